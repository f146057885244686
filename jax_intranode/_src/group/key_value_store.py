"""The key-value store through which the processes of a mesh exchange values in a rendezvous.

Several processes use JAX's own key-value store. It lives in the coordinator and dies with it, so it
holds nothing of an earlier run. A single process needs none.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_intranode._src import timeouts
from jax_intranode._src.health import failures
from jax_intranode._src.jax_private import distributed
from jax_intranode._src.native import threads
from jax_intranode._src.selection import config

_log = logging.getLogger("jax_intranode")


class Deadline:
    """The point in time at which a rendezvous times out."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def passed(self) -> bool:
        """Whether it is in the past."""
        return time.monotonic() >= self._end

    def remaining_ms(self) -> int:
        """Milliseconds left; at least 1."""
        return max(1, int((self._end - time.monotonic()) * 1000))

    def at_most(self, seconds: float) -> "Deadline":
        """A part of the time left, after which a waiting process looks for what has changed."""
        return Deadline(min(seconds, self.remaining_ms() / 1e3))


class Refused(Exception):
    """Why the devices of a rendezvous can't communicate."""


@contextlib.contextmanager
def reading(stage: str) -> Iterator[None]:
    """Refuses records of other processes that have another form than those of this version."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Refused(
            f"a process sent a record ({stage}) of another form than this version's ({error!r}); "
            "give all processes the same version"
        ) from error


class Store:
    """What a rendezvous needs of a key-value store. This one serves a single process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def gather(self, stage: str, value: Any, deadline: Deadline) -> list[Any]:
        """Sends `value` (JSON) to all; returns every process's value, in process order.

        Raises:
            Refused: a process has sent none by the deadline, or another one has given up.
        """
        return [json.loads(json.dumps(value))]

    def claim(self, key: str, value: str) -> str:
        """Sets `key` unless it is set already; returns its value.

        Raises:
            CommunicationError: a process is lost, or the store does not answer in time.
        """
        return self._values.setdefault(key, value)

    def wait(self, key: str, deadline: Deadline) -> str | None:
        """Waits until `key` is set and returns its value; None after the deadline."""
        return self._values.get(key)


class KeyValueStore(Store):
    """JAX's key-value store, under a prefix that the processes of one mesh share."""

    def __init__(self, client: Any, prefix: str, process: int, processes: Sequence[int]):
        self._client = client
        self._prefix = prefix
        self._process = process
        self._processes = tuple(processes)
        # How a process was lost that will send nothing any more; None while there is none.
        self.lost: Callable[[], str | None] = lambda: None

    def gather(self, stage: str, value: Any, deadline: Deadline) -> list[Any]:
        mine = json.dumps(value)
        if self.claim(f"{stage}/{self._process}", mine) != mine:
            raise Refused(f"process {self._process} entered the rendezvous a second time")
        values = []
        report: Deadline | None = Deadline(config.get().report_after_s)
        for process in self._processes:
            while (
                text := self.wait(f"{stage}/{process}", deadline.at_most(timeouts.LOOK_S))
            ) is None:
                if verdict := self.wait("verdict", Deadline(0.001)):
                    raise Refused(verdict)
                if lost := self.lost():
                    raise Refused(lost)
                if distributed.is_ending():  # a daemon thread still runs
                    raise failures.CommunicationError(
                        f"jax_intranode: process {self._process} is at its end, and meets no peers "
                        "any more."
                    )
                if deadline.passed():
                    raise Refused(
                        f"process {process} did not enter the rendezvous within "
                        f"{deadline.seconds:g} s ({stage}); JAX_INTRANODE_TIMEOUT_S sets the limit"
                    )
                if report is not None and report.passed():
                    _log.warning(
                        "Process %s has waited %g s for process %s, which has not entered the "
                        "rendezvous (%s). It gives up after %g s.",
                        *(self._process, report.seconds, process, stage, deadline.seconds),
                    )
                    report = None
            try:
                values.append(json.loads(text))
            except (ValueError, RecursionError):
                raise Refused(
                    f"process {process} sent a record ({stage}) that is no JSON"
                ) from None
        return values

    def claim(self, key: str, value: str) -> str:
        try:
            _in_time(lambda: self._client.key_value_set(self._prefix + key, value))
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        else:
            return value
        # Not above: an error of this call would be shown with that one, whose text has the key.
        return self._client.blocking_key_value_get(self._prefix + key, 10_000)

    def wait(self, key: str, deadline: Deadline) -> str | None:
        try:
            return self._client.blocking_key_value_get(self._prefix + key, deadline.remaining_ms())
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None


def _in_time(call: Callable[[], None]) -> None:
    """Calls JAX's store, which has no limit of its own when the process that has it is stopped."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threads.Thread(run)
    deadline = Deadline(config.get().meeting_s)
    while not thread.join(timeouts.LOOK_S):
        if failure := failures.current():
            raise failures.CommunicationError(failure.message)
        if deadline.passed():
            raise failures.CommunicationError(
                f"jax_intranode: JAX's coordination service did not answer within "
                f"{deadline.seconds:g} s. Is the process stopped that has it? It is process 0, or "
                "the launcher. JAX_INTRANODE_TIMEOUT_S sets the limit."
            )
    if errors:
        # In the list it would be part of a cycle, which keeps the slabs until Python collects it.
        raise errors.pop()


def store(prefix: str, process: int, processes: Sequence[int]) -> Store:
    """The store of a rendezvous of `processes`.

    Raises RuntimeError if there are several, and jax.distributed is not initialised.
    """
    if len(processes) == 1:
        return Store()
    client = distributed.key_value_client()
    if client is None:
        raise RuntimeError(
            f"processes {list(processes)} need jax.distributed.initialize() to rendezvous"
        )
    secret = os.environ.get(config.SECRET)
    return KeyValueStore(client, f"{prefix}{secret}/" if secret else prefix, process, processes)
