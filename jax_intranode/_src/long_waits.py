"""Long waits of kernels on GPUs: which rank waits for which, and what the missing rank waits in.

A kernel that has waited for longer than a second writes that to host memory, again and again while
it waits (xla_ffi/cuda/failure.h). This costs operations nothing that end in time. Each process
publishes what its own ranks wait in, in JAX's key-value store, so that ranks that run different
operations name both. On the CPU the groups do all of this themselves (xla_ffi/host/host_group.cc).
"""

import atexit
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from jax_intranode._src import limits, source

# Kernels that wait write every 10 ms.
_OVER_AFTER_S = 1.0
# How old the note of a peer may be.
_STALE_AFTER_S = 5.0
_EXCHANGE_EVERY_S = 0.5
# After how much more time a wait that goes on is reported again.
_SECOND_REPORT_S = 60.0
_LATER_REPORTS_S = 300.0


@dataclass(frozen=True)
class Wait:
    """A kernel that waits.

    Attributes:
        partition: names the partition of the mesh whose group runs the operation.
        group: the devices of the group, in rank order.
        rank: the rank that waits.
        missing: a rank that it waits for.
        seconds: how long it has waited.
        site: the text of the call site; empty if it is not known.
    """

    partition: str
    group: tuple[int, ...]
    rank: int
    missing: int
    seconds: float
    site: str


@dataclass(frozen=True)
class Note:
    """What a process says of a rank that waits.

    Attributes:
        partition: as in `Wait`.
        site: as in `Wait`.
        call: the operation, its bytes and its place, for messages.
        time: when this was so, in seconds as of ``time.time()``: the processes are on one host.
    """

    partition: str
    site: str
    call: str
    time: float


class Notes:
    """Notes of this process and of its peers, in a key-value store.

    The store may be as stuck as a peer is. So a thread of its own talks to it, which runs while
    there are notes.
    """

    _PREFIX = "jax_intranode/waits/"

    def __init__(self, client: Callable[[], Any]):
        """Takes a function that returns the store's client, or None if there is none."""
        self._client = client
        self._changed = threading.Condition()
        self._mine: dict[int, Note] = {}
        self._wanted: set[int] = set()
        self._found: dict[int, Note] = {}
        self._thread: threading.Thread | None = None
        self._ended = False

    def publish(self, device_id: int, note: Note, wanted: int) -> None:
        """Publishes a device's note, and asks for that of another device."""
        with self._changed:
            self._mine[device_id] = note
            self._wanted.add(wanted)
            self._changed.notify()
            if self._thread is None and self._client() is not None:
                self._thread = threading.Thread(
                    target=self._run, name="jax_intranode waits", daemon=True
                )
                self._thread.start()
                # A thread that comes back from C++ while Python ends would abort the process.
                atexit.register(self.end)

    def end(self) -> None:
        """Ends the thread. If the store hangs, the thread never comes back."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(1)

    def of(self, device_id: int) -> Note | None:
        """The last note that was found of a peer's device."""
        return self._found.get(device_id)

    def exchange(self) -> None:
        """Sends what was published and looks for what is wanted."""
        with self._changed:
            mine, self._mine = self._mine, {}
            wanted, self._wanted = self._wanted, set()
        client = self._client()
        for device_id, note in mine.items():
            client.key_value_set(self._PREFIX + str(device_id), json.dumps(asdict(note)), True)
        for device_id in wanted:
            try:
                text = client.key_value_try_get(self._PREFIX + str(device_id))
            except Exception:  # XLA chooses the type; there is no such key yet
                continue
            note_of_peer = _parsed(text)
            if note_of_peer is not None:
                self._found[device_id] = note_of_peer

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._mine or self._ended)
            if self._ended:
                return
            try:
                self.exchange()
            except Exception:  # the store is gone: messages do without it
                return
            with self._changed:
                self._changed.wait_for(lambda: self._ended, _EXCHANGE_EVERY_S)


def _parsed(text: str) -> Note | None:
    """A peer's note; None for any other text."""
    try:
        fields = json.loads(text)
        if set(fields) != {"partition", "site", "call", "time"}:
            return None
        partition, site, call = (str(fields[name])[:500] for name in ("partition", "site", "call"))
        return Note(partition, site, "".join(filter(str.isprintable, call)), float(fields["time"]))
    except (ValueError, TypeError):
        return None


class LongWaits:
    """The long waits of this process's devices."""

    def __init__(self, notes: Notes, report_after_s: float, timeout_s: float):
        self._notes = notes
        self._report_after_s = report_after_s
        self._note_after_s = min(report_after_s, timeout_s) / 2
        self._timeout_s = timeout_s
        self._waits: dict[int, tuple[Wait, float]] = {}  # by device, with the time
        self._next_report: dict[int, float] = {}  # by device, after how many seconds

    def update(self, going_on: list[Wait]) -> list[str]:
        """Takes the waits that have gone on since the last call; returns new warnings."""
        now = time.time()
        for wait in going_on:
            self._waits[wait.group[wait.rank]] = wait, now
        for device_id, (_, seen) in list(self._waits.items()):
            if now - seen > _OVER_AFTER_S:
                del self._waits[device_id]
                self._next_report.pop(device_id, None)
        warnings = []
        for device_id, (wait, seen) in self._waits.items():
            if wait.seconds >= self._note_after_s:
                note = Note(wait.partition, wait.site, source.call_name(wait.site), seen)
                self._notes.publish(device_id, note, wait.group[wait.missing])
            due = self._next_report.get(device_id, self._report_after_s)
            if wait.seconds >= due:
                more = _SECOND_REPORT_S if due < _SECOND_REPORT_S else _LATER_REPORTS_S
                self._next_report[device_id] = due + more
                warnings.append(self._warning(wait, due))
        return warnings

    def instead(self, wait: Wait) -> tuple[str, bool]:
        """What the missing rank waits in.

        Returns:
            The end of a sentence on the missing rank, empty if nothing is known; and whether the
            ranks run different operations of one group.
        """
        device_id, now = wait.group[wait.missing], time.time()
        note = self._notes.of(device_id)
        if device_id in self._waits:
            other, seen = self._waits[device_id]
            note = Note(other.partition, other.site, source.call_name(other.site), seen)
        if note is None or now - note.time > _STALE_AFTER_S:
            return "", False
        same_group = note.partition == wait.partition
        if same_group and note.site == wait.site:
            return "", False
        return f", which waits in another operation: {note.call}", same_group

    def _warning(self, wait: Wait, waited_s: float) -> str:
        detail, _ = self.instead(wait)
        return limits.wait_message(
            source.call_name(wait.site),
            waited_s,
            self._timeout_s,
            wait.group,
            wait.rank,
            wait.missing,
            detail,
        )
