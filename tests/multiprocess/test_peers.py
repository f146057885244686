"""A process that ends or stops is noticed by its peers within a second, and they end in order."""

import re
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from devices import need_devices

from jax_intranode._src import launcher

MAIN = Path(__file__).with_name("peer_main.py")
# The promise is 1 s; the rest is for machines that run other tests, too.
NOTICED_S = 1 + 2
SILENT_S = 3.0  # as in peer_main.py

# What the survivors' error says of the victim.
TEXTS = {
    "killed": "has ended without a goodbye: it was killed, crashed, or called os._exit",
    "os_exit": "has ended without a goodbye: it was killed, crashed, or called os._exit",
    "exception": "has failed: ValueError: the victim's own error",
    "sys_exit": "has come to the end of its program",
    "returns": "has come to the end of its program",
    "shutdown": "has called jax_intranode.shutdown()",
    "stopped": f"has shown no sign of life for {SILENT_S:.0f} s: it is stopped",
}
TEXTS["killed_parent"] = TEXTS["killed"]
# The victim's exit code; None: the launcher has ended it.
EXIT_CODES = {
    "killed": -9, "killed_parent": -9, "os_exit": 0, "exception": 1, "sys_exit": 0, "returns": 0,
    "shutdown": 0, "stopped": None,
}  # fmt: skip


def line(log: str, label: str) -> tuple[float, str]:
    """The time and the text of a line of a rank."""
    found = re.findall(rf"^{label}: ([\d.]+) (.*)$", log, re.MULTILINE)
    assert len(found) == 1, (label, log)
    return float(found[0][0]), found[0][1]


def run(tmp_path: Path, world: int, ending: str, waiting: bool, victim: int) -> Any:
    port = launcher.free_port()
    platform = jax.devices()[0].platform
    command = [
        sys.executable, str(MAIN), platform, ending, "waiting" if waiting else "not", str(victim)
    ]  # fmt: skip
    with pytest.raises(launcher.RankError) as error:
        launcher.run_ranks(
            [command] * world,
            timeout_s=100,
            log_dir=tmp_path,
            env=[launcher.rank_env(rank, world, port) for rank in range(world)],
            grace_s=20,
        )
    return error.value


ALL = [
    (2, ending, waiting, 1)
    for ending in TEXTS
    for waiting in (True, False)
    if (ending, waiting) not in (("stopped", False), ("exception", False))
]
QUICK = [(2, "killed_parent", True, 1), (3, "exception", False, 1), (2, "returns", True, 1)]
FULL = [
    *(case for case in ALL if case not in QUICK),
    (3, "killed", True, 2),
    (3, "killed", True, 1),
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
    outcome = run(tmp_path, world, ending, waiting, victim)
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
