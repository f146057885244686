"""What tests of several processes share of which one ends early (peer_main.py)."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from processes import free_port

from jax_intranode._src.command_line import launcher

MAIN = Path(__file__).with_name("peer_main.py")
# The promise is 1 s; the rest is for machines that run other tests, too.
NOTICED_S = 1 + 2
SILENT_S = 3.0  # as in peer_main.py

# What the survivors' error says of the victim.
TEXTS = {
    "killed": "has exited without notice: it was killed, crashed, or called os._exit",
    "os_exit": "has exited without notice: it was killed, crashed, or called os._exit",
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


@dataclass
class Outcome:
    """The exit codes and the logs of all ranks."""

    exit_codes: list[int]
    logs: list[str]


def run(
    tmp_path: Path,
    world: int,
    ending: str,
    waiting: str,
    victim: int,
    prefixes: Sequence[Sequence[str]] = (),
) -> Outcome:
    """Runs the ranks, each with the words of `prefixes` in front of its command."""
    port = free_port()
    platform = jax.devices()[0].platform
    command = [sys.executable, str(MAIN), platform, ending, waiting, str(victim)]
    try:
        launcher.run_ranks(
            [[*(prefixes[rank] if prefixes else ()), *command] for rank in range(world)],
            timeout_s=100,
            log_dir=tmp_path,
            env=[launcher.rank_env(rank, world, port) for rank in range(world)],
            grace_s=20,
        )
    except launcher.RankError as error:
        return Outcome(error.exit_codes, error.logs)
    return Outcome(
        [0] * world, [(tmp_path / f"rank{rank}.log").read_text() for rank in range(world)]
    )
