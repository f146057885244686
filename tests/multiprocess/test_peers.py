"""A process that ends or stops is noticed by its peers within a second, and they end in order."""

from pathlib import Path

import jax
import pytest
from devices import need_devices
from peer_ranks import EXIT_CODES, NOTICED_S, SILENT_S, TEXTS, line, run

ALL = [
    (2, ending, waiting, 1)
    for ending in TEXTS
    for waiting in (True, False)
    if (ending, waiting) not in (("stopped", False), ("exception", False))
]
QUICK = [(3, "exception", False, 1)]  # test_the_rest_goes_on has a killed process
FULL = [
    *(case for case in ALL if case not in QUICK),
    (3, "killed", True, 1),
    # The process with JAX's coordination service; JAX aborts the others when it is killed.
    (2, "exception", True, 0),
    (2, "returns", False, 0),
]


@pytest.mark.parametrize(
    ("world", "ending", "waiting", "victim"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_end_of_a_process(
    tmp_path: Path, world: int, ending: str, waiting: bool, victim: int
) -> None:
    if jax.devices()[0].platform != "cpu":
        pytest.skip("the programs go on after the failure, which they can on the CPU only")
    need_devices(world)
    outcome = run(tmp_path, world, ending, "waiting" if waiting else "not", victim)
    logs = outcome.logs
    end, _ = line(logs[victim], "END")
    _, pid = line(logs[victim], "PID")
    if EXIT_CODES[ending] is not None:
        assert outcome.exit_codes[victim] == EXIT_CODES[ending], outcome
    for rank, log in enumerate(logs):
        if rank == victim:
            continue
        assert outcome.exit_codes[rank] == 1, outcome
        call, _ = line(log, "CALL")
        noticed, text = line(log, "FIRST")
        # A goodbye at the end of a program counts when nothing has run for 1 s.
        quiet = 1 if ending in ("sys_exit", "returns") else 0
        extra = SILENT_S if ending == "stopped" else quiet
        assert noticed - max(call, end) <= NOTICED_S + extra, (noticed, call, end)
        if ending == "stopped":
            assert noticed - end >= SILENT_S - 1.5
        for part in (f"process {victim} (pid {pid})", TEXTS[ending]):
            assert part in text, text
        if waiting:
            for part in ("psum", f"rank {rank} (device ", f"waited for rank {victim} (device "):
                assert part in text, text
        later, text = line(log, "LATER")
        assert later - noticed <= NOTICED_S and TEXTS[ending] in text, text
        _, text = line(log, "LAST")
        reason = "peer_stopped" if ending == "stopped" else "peer_gone"
        assert text.startswith(f"{reason} {victim} ") and TEXTS[ending] in text, text
        assert TEXTS[ending] in line(log, "INITIALIZE")[1]
        assert "RuntimeError: the survivor ends" in log
        assert "Terminating process because the JAX distributed service" not in log


def test_the_rest_goes_on(tmp_path: Path) -> None:
    """After a fault the other processes set up anew, run, and end in order."""
    if jax.devices()[0].platform != "cpu":
        pytest.skip("on GPUs the CUDA context is lost")
    need_devices(3)
    outcome = run(tmp_path, 3, "killed_parent", "rest", 1)
    assert outcome.exit_codes == [0, -9, 0], outcome
    end, _ = line(outcome.logs[1], "END")
    for rank in (0, 2):
        noticed, text = line(outcome.logs[rank], "FIRST")
        assert noticed - end <= NOTICED_S and TEXTS["killed"] in text, (noticed, end, text)
        assert line(outcome.logs[rank], "REST")[1] == "right"


@pytest.mark.full
@pytest.mark.parametrize("ending", ["returns", "stopped"])
def test_new_communicators_know_who_is_absent(tmp_path: Path, ending: str) -> None:
    if jax.devices()[0].platform != "cpu":
        pytest.skip("the programs go on after the failure, which they can on the CPU only")
    need_devices(2)
    outcome = run(tmp_path, 2, ending, "new", 1)
    call, _ = line(outcome.logs[0], "CALL")
    noticed, text = line(outcome.logs[0], "FIRST")
    # The peer is no fault so far, so the call is lowered, and then waits in vain.
    assert TEXTS[ending] in text and "waited for rank 0 (device" in text, text
    assert noticed - call <= NOTICED_S + 2  # it compiles


@pytest.mark.full
def test_interrupted_while_it_waits(tmp_path: Path) -> None:
    """Ctrl-C ends all processes, also those that wait inside of an operation."""
    if jax.devices()[0].platform != "cpu":
        pytest.skip("the times are those of CPU devices")
    need_devices(2)
    outcome = run(tmp_path, 2, "interrupted", "waiting", 1)
    assert outcome.exit_codes == [-2, -2], outcome
    for log in outcome.logs:
        assert "KeyboardInterrupt" in log
    assert "process 1 (pid" in outcome.logs[0]
