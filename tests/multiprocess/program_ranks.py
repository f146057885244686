"""What tests of whole programs (program_main.py) share: they run several at once."""

import concurrent.futures
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest
from devices import need_ranks
from multiprocess_ranks import environments_of_ranks

from jax_intranode._src.command_line.launcher.runs import RankError, run_ranks

MAIN = Path(__file__).with_name("program_main.py")
# Most programs sleep most of the time.
_AT_ONCE = {"cpu": 4, "gpu": 2}
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Program:
    """A program, and what its ranks print."""

    results: Sequence[Sequence[object]] = ((), ())  # of each rank
    env: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()  # of Python
    prefixes: Sequence[Sequence[str]] = ((),) * 4  # in front of the command of each rank
    only_cpu: str = ""  # why it runs on CPU devices only


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a program ended, and what they printed."""

    exit_codes: list[int]
    logs: list[str]

    def said(self, rank: int, label: str = "RESULT") -> list[str]:
        """What a rank said with a label."""
        return re.findall(rf"^{label}: (.*)$", self.logs[rank], re.MULTILINE)

    def __str__(self) -> str:
        texts = [f"---- rank {rank}\n{log[-4000:]}" for rank, log in enumerate(self.logs)]
        return "\n".join([f"exit codes {self.exit_codes}", *texts])


def run(name: str, program: Program, log_dir: Path, grace_s: float = 2) -> Outcome:
    """Runs the ranks of a program; `name` has the function, and its argument.

    The others may go on for grace_s after the first failure.
    """
    log_dir.mkdir(parents=True)
    world, platform = len(program.results), jax.devices()[0].platform
    need_ranks(world)
    if program.only_cpu and platform != "cpu":
        pytest.skip(program.only_cpu)
    command = [sys.executable, *program.options, str(MAIN), platform, *name.split()]
    environments = environments_of_ranks(world, program.env)
    codes = [0] * world
    try:
        run_ranks(
            [[*program.prefixes[rank], *command] for rank in range(world)],
            timeout_s=_TIMEOUT_S,
            log_dir=log_dir,
            env=environments,
            grace_s=grace_s,
        )
    except RankError as error:
        codes = error.exit_codes
    return Outcome(codes, [(log_dir / f"rank{r}.log").read_text() for r in range(world)])


Started = Mapping[str, "concurrent.futures.Future[Outcome]"]


def start_all(
    request: pytest.FixtureRequest,
    programs: Mapping[str, Program],
    log_dir: Path,
    at_once: Mapping[str, int] = _AT_ONCE,
    **how: Any,
) -> Iterator[Started]:
    """For a fixture of a module: starts the programs that this session tests, some at once.

    The tests have the parameter "name". `at_once`: how many run at once on a platform.
    """
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and "started" in item.fixturenames
    ]
    with concurrent.futures.ThreadPoolExecutor(at_once[jax.devices()[0].platform]) as pool:
        try:
            yield {
                name: pool.submit(run, name, programs[name], log_dir / name, **how)
                for name in names
            }
        finally:
            pool.shutdown(cancel_futures=True)
