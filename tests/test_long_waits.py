"""Long waits of kernels, simulated: warnings, and what the missing rank waits in."""

import json
import threading
import time
from typing import Any

import pytest

from jax_intranode._src import config, failures, limits, long_waits, native, source, watcher

PARTITION = "2: [4, 5]"
GROUP = (4, 5)


class Store:
    """A key-value store that two processes share."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise RuntimeError("NOT_FOUND")
        return self.values[key]


class Process:
    """What a process knows; its notes are exchanged when a test says so."""

    def __init__(self, store: Store | None, report_after_s: float = 10, timeout_s: float = 300):
        self.notes = long_waits.Notes(lambda: store)
        self.notes._thread = threading.Thread()  # never started: a test exchanges the notes
        self.waits = long_waits.LongWaits(self.notes, report_after_s, timeout_s)

    def update(self, rank: int, seconds: float, site: str, partition: str = PARTITION) -> list[str]:
        return self.waits.update([long_waits.Wait(partition, GROUP, rank, 1 - rank, seconds, site)])


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "sum": source._Site("psum", 400, "float32[100]", ["train.py:10 (total)"]),
        "gather": source._Site("all_gather", 40, "float32[10]", ["train.py:20 (gathered)"]),
    }
    monkeypatch.setattr(source, "_sites", known)


SUM = "psum of 400 bytes (float32[100], train.py:10 (total))"
GATHER = "all_gather of 40 bytes (float32[10], train.py:20 (gathered))"


def test_a_wait_is_reported_once(sites: None, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(None)
    assert process.update(0, 4.0, "sum") == []
    warning = f"{SUM} has waited 10 s: rank 0 (device 4) waits for rank 1 (device 5). "
    warning += "It fails after 300 s (see JAX_INTRANODE_TIMEOUT_S)."
    assert process.update(0, 10.5, "sum") == [warning]
    assert process.update(0, 11.0, "sum") == []
    # It is over when the kernel no longer writes. The next one is reported again.
    later = time.time() + 2
    monkeypatch.setattr(time, "time", lambda: later)
    assert process.waits.update([]) == []
    assert process.update(0, 10.5, "sum") == [warning]


@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_that_run_different_operations_name_both(sites: None, processes: int) -> None:
    store = Store() if processes == 2 else None
    both = [Process(store) for _ in range(processes)]
    first, last = both[0], both[-1]
    first.update(0, 6.0, "sum")
    last.update(1, 6.0, "gather")
    for _ in range(2 if store else 0):  # the first one finds nothing yet
        for process in both:
            process.notes.exchange()
        first.update(0, 7.0, "sum")
        last.update(1, 7.0, "gather")
    (warning,) = first.update(0, 10.0, "sum")
    assert f"{SUM} has waited 10 s: rank 0 (device 4) waits for rank 1 (device 5), which" in warning
    assert f"which waits in another operation: {GATHER}." in warning
    (warning,) = last.update(1, 10.0, "gather")
    assert f"{GATHER} has waited 10 s: rank 1" in warning
    assert f"rank 0 (device 4), which waits in another operation: {SUM}." in warning
    wait = long_waits.Wait(PARTITION, GROUP, 0, 1, 10.0, "sum")
    assert first.waits.instead(wait) == (f", which waits in another operation: {GATHER}", True)


def test_a_rank_that_waits_elsewhere_is_no_mismatch(sites: None) -> None:
    process = Process(None)
    process.update(1, 6.0, "gather", partition="4: [4, 5, 6, 7]")
    wait = long_waits.Wait(PARTITION, GROUP, 0, 1, 10.0, "sum")
    assert process.waits.instead(wait) == (f", which waits in another operation: {GATHER}", False)
    process.update(1, 6.0, "sum")
    assert process.waits.instead(wait) == ("", False)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "7", "null", json.dumps({"partition": "p"}),
        json.dumps({"partition": "p", "site": "s", "call": "c", "time": "now"}),
        json.dumps({"partition": "p", "site": "s", "call": "c", "time": 1, "more": 2}),
    ],
)  # fmt: skip
def test_a_note_that_is_none_is_ignored(text: str) -> None:
    assert long_waits._parsed(text) is None


def test_a_note_of_a_peer_is_cut_and_printable() -> None:
    call = "a\x1b[31m\n" + "b" * 1000
    note = long_waits._parsed(
        json.dumps({"partition": "p", "site": "s", "call": call, "time": 1.0})
    )
    assert note is not None and note.call == "a[31m" + "b" * (500 - 7)


def test_an_old_note_says_nothing(sites: None) -> None:
    store = Store()
    old = long_waits.Note(PARTITION, "gather", GATHER, time.time() - 60)
    store.values["jax_intranode/waits/5"] = json.dumps(vars(old))
    process = Process(store)
    process.update(0, 6.0, "sum")
    process.notes.exchange()
    wait = long_waits.Wait(PARTITION, GROUP, 0, 1, 10.0, "sum")
    assert process.notes.of(5) == old
    assert process.waits.instead(wait) == ("", False)


class Module:
    """The native module of GPUs, with the record of a kernel that gave up."""

    def __init__(self, missing: int, shared: bool, reason: str = "timeout", told: str = ""):
        self.record: tuple[Any, ...] = (
            [4, 5], 2, 0, limits.FAILURE_REASONS[reason],
            limits.ALGORITHMS.index("one_shot"), 0, missing, "sum", shared, told,
        )  # fmt: skip

    def failures(self) -> list[Any]:
        return [self.record] if self.record else []

    def refusals(self) -> list[Any]:
        return [([4, 5], 2, 0, 0, "jax_intranode: process 1 has come to its end.")]


@pytest.mark.parametrize("mismatch", [False, True])
def test_the_failure_of_a_kernel(
    sites: None, monkeypatch: pytest.MonkeyPatch, mismatch: bool
) -> None:
    monkeypatch.setattr(native, "_modules", {**native._modules, "gpu": Module(1, not mismatch)})
    native.module.cache_clear()
    process = Process(None)
    if mismatch:
        process.update(1, 6.0, "gather")
    find = watcher._Records(lambda: {0: 4}, lambda device_id: device_id - 4, process.waits)
    (failure,) = find()
    assert find() == []
    native.module.cache_clear()
    place = "train.py:10 (total)" + ("" if mismatch else " or an equal call")
    operation = f"psum (one_shot) of 400 bytes (float32[100], {place})"
    waited = f"timed out after {config.get().timeout_s:g} s: rank 0 (device 4) waited for rank 1"
    assert failure.message.startswith(f"jax_intranode: {operation} {waited}")
    assert failure.message.endswith("The CUDA context is lost; restart the program.")
    assert (f", which waits in another operation: {GATHER}." in failure.message) == mismatch
    assert failure == failures.Failure(
        message=failure.message, reason="mismatch" if mismatch else "timeout", platform="gpu",
        operation="psum", nbytes=400, rank=0, device_ids=GROUP, missing_rank=1, missing_process=1,
        source=place, time=failure.time,
    )  # fmt: skip


def test_a_call_that_was_refused(sites: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module(1, False)
    module.record = ()
    monkeypatch.setattr(native, "_modules", {**native._modules, "gpu": module})
    native.module.cache_clear()
    process = Process(None)
    find = watcher._Records(lambda: {0: 4}, lambda device_id: device_id - 4, process.waits)
    (failure,) = find()
    native.module.cache_clear()
    assert failure.message == "jax_intranode: process 1 has come to its end."
    assert (failure.reason, failure.rank, failure.device_ids) == ("peer_gone", 0, GROUP)


def test_a_kernel_that_was_told_of_another_operation(
    sites: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Module(1, False, "other_operation", "all_gather of 400 bytes")
    monkeypatch.setattr(native, "_modules", {**native._modules, "gpu": module})
    native.module.cache_clear()
    process = Process(None)
    find = watcher._Records(lambda: {0: 4}, lambda device_id: device_id - 4, process.waits)
    (failure,) = find()
    native.module.cache_clear()
    assert failure.message == (
        "jax_intranode: psum (one_shot) of 400 bytes (float32[100], train.py:10 (total)) met "
        "another operation: rank 0 (device 4) waited for rank 1 (device 5), which runs all_gather "
        "of 400 bytes. All ranks of a group must run the same operations, as often and in the same "
        "order. "
        "The CUDA context is lost; restart the program."
    )
    assert (failure.reason, failure.missing_process) == ("mismatch", 1)


def test_the_thread_exchanges_notes(sites: None) -> None:
    store = Store()
    notes = long_waits.Notes(lambda: store)
    notes.publish(4, long_waits.Note(PARTITION, "sum", SUM, time.time()), wanted=5)
    for _ in range(200):
        if "jax_intranode/waits/4" in store.values:
            break
        time.sleep(0.05)
    assert json.loads(store.values["jax_intranode/waits/4"])["call"] == SUM
    notes.end()
    assert notes._thread is not None and not notes._thread.is_alive()
