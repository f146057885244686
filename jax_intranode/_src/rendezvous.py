"""How the processes of a mesh exchange what they need to know: a store of keys and values.

Between processes it is JAX's own key-value store, which lives in the coordinator and dies with
it: nothing of an earlier run can be found there. A single process needs none.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from jax_intranode._src import compat


class Deadline:
    """A point in time by which a meeting has to be over."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def passed(self) -> bool:
        """Whether it is over."""
        return time.monotonic() >= self._end

    def remaining_ms(self) -> int:
        """Milliseconds left; at least 1."""
        return max(1, int((self._end - time.monotonic()) * 1000))


class Refused(Exception):
    """A meeting can't go on: a process did not come in time, or a verdict stands already."""


class Store(Protocol):
    """What a meeting needs."""

    def gather(self, stage: str, value: Any, deadline: Deadline) -> list[Any]:
        """Says `value` (JSON) and returns what every process has said, in process order.

        Raises:
            Refused: one has not, by the deadline, or somebody has given up before.
        """

    def claim(self, key: str, value: str) -> str:
        """Sets `key` unless somebody has; returns the value that stands."""

    def wait(self, key: str, deadline: Deadline) -> str | None:
        """The value of `key` once somebody has set it; None after the deadline."""


class LocalStore:
    """The store of a single process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def gather(self, stage: str, value: Any, deadline: Deadline) -> list[Any]:
        """See Store."""
        return [json.loads(json.dumps(value))]

    def claim(self, key: str, value: str) -> str:
        """See Store."""
        return self._values.setdefault(key, value)

    def wait(self, key: str, deadline: Deadline) -> str | None:
        """See Store."""
        return self._values.get(key)


def _slice(deadline: Deadline) -> Deadline:
    """A part of the time left, after which a waiting process looks around."""
    return Deadline(min(1.0, deadline.remaining_ms() / 1e3))


class KeyValueStore:
    """JAX's key-value store, under a prefix that the processes of one mesh share."""

    def __init__(self, client: Any, prefix: str, process: int, processes: Sequence[int]):
        self._client = client
        self._prefix = prefix
        self._process = process
        self._processes = tuple(processes)

    def gather(self, stage: str, value: Any, deadline: Deadline) -> list[Any]:
        """See Store."""
        text = json.dumps(value)
        if self.claim(f"{stage}/{self._process}", text) != text:
            raise Refused(f"process {self._process} meets a second time")
        values = []
        for process in self._processes:
            while (said := self.wait(f"{stage}/{process}", _slice(deadline))) is None:
                if verdict := self.wait("verdict", Deadline(0.001)):
                    raise Refused(verdict)
                if deadline.passed():
                    raise Refused(
                        f"process {process} did not come to the meeting within "
                        f"{deadline.seconds:g} s ({stage})"
                    )
            values.append(json.loads(said))
        return values

    def claim(self, key: str, value: str) -> str:
        """See Store."""
        try:
            self._client.key_value_set(self._prefix + key, value)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return self._client.blocking_key_value_get(self._prefix + key, 10_000)
        return value

    def wait(self, key: str, deadline: Deadline) -> str | None:
        """See Store."""
        try:
            return self._client.blocking_key_value_get(self._prefix + key, deadline.remaining_ms())
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None


def store(prefix: str, process: int, processes: Sequence[int]) -> Store:
    """The store through which `processes` meet.

    Raises:
        RuntimeError: there are several, and jax.distributed is not initialised.
    """
    if len(processes) == 1:
        return LocalStore()
    client = compat.key_value_client()
    if client is None:
        raise RuntimeError(f"processes {list(processes)} need jax.distributed.initialize() to meet")
    return KeyValueStore(client, prefix, process, processes)
