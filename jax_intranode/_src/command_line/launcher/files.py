"""Runs of ranks whose output goes to files: those of tests and benchmarks."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jax_intranode._src.command_line.launcher.job import Job, Streams
from jax_intranode._src.command_line.launcher.output import open_log
from jax_intranode._src.command_line.launcher.rank import rank_env
from jax_intranode._src.command_line.launcher.service import coordination_service
from jax_intranode._src.command_line.options import Failed

# How long a rank may take to print its stacks after SIGABRT.
_ABORT_S = 1.0
_LOG_TAIL_CHARS = 4000


class RankError(Failed):
    """At least one rank failed or ran past the time limit.

    Attributes:
        exit_codes: Exit code of each rank, in rank order; minus the signal's number for a rank
            that a signal ended.
        first_failed: The rank that failed first by itself, or None when the time limit came first.
        logs: Each rank's stdout and stderr, in rank order.
    """

    def __init__(
        self, reason: str, exit_codes: list[int], first_failed: int | None, logs: list[str]
    ) -> None:
        """Builds the message: the exit codes, then each log's tail, the first failure first."""
        self.exit_codes = exit_codes
        self.first_failed = first_failed
        self.logs = logs
        lines = [f"{reason}; exit codes {exit_codes}"]
        for rank in sorted(range(len(logs)), key=lambda rank: (rank != first_failed, rank)):
            lines.append(f"---- rank {rank}, exit code {exit_codes[rank]}")
            lines.append(logs[rank][-_LOG_TAIL_CHARS:].rstrip())
        super().__init__("\n".join(lines))


def run_ranks(
    commands: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    log_dir: Path,
    env: Sequence[Mapping[str, str]] | None = None,
    grace_s: float = 2.0,
    joined: bool = False,
    follow: Callable[[bool], None] = lambda ended: None,
) -> None:
    """Runs one process per rank until all have succeeded.

    When a rank fails, the others get `grace_s` to report errors of their own. A rank that still
    runs then, or at the time limit, gets SIGABRT, upon which Python prints its stacks, and then
    SIGKILL, together with the processes that it started. When this function returns or raises, no
    rank is left.

    Args:
        commands: The command of each rank.
        log_dir: An existing directory; rank r's stdout and stderr go to `rank{r}.log` there.
        env: For each rank, variables to add to this process's environment, and to those by which
            the ranks join.
        grace_s: How long the other ranks may go on after the first failure.
        joined: Whether they join each other by `connect`; JAX's coordination service then runs in
            this process, for this user alone.
        follow: Is called all the time, and in the end with True.

    Raises:
        RankError: A rank failed, or the time limit came first.
    """
    started = time.monotonic()
    log_paths = [log_dir / f"rank{rank}.log" for rank in range(len(commands))]
    variables = [dict(of_rank) for of_rank in env] if env is not None else [{} for _ in commands]
    with contextlib.ExitStack() as stack:
        if joined:
            address = stack.enter_context(coordination_service(len(commands)))
            for rank, of_rank in enumerate(variables):
                variables[rank] = {**rank_env(rank, len(commands), address), **of_rank}
        with contextlib.ExitStack() as logs:  # this process needs none of them
            opened = [logs.enter_context(open_log(path)) for path in log_paths]
            streams = [Streams(stdout=log, stderr=subprocess.STDOUT) for log in opened]
            job = stack.enter_context(Job(commands, env=variables, streams=streams))

        def wait(until: float, wakes: Callable[[], bool] = lambda: False) -> None:
            while job.running and not wakes() and (left := until - time.monotonic()) > 0:
                job.wait(left)
                follow(False)

        stack.callback(follow, True)
        deadline = started + timeout_s
        wait(deadline, lambda: job.first_failed is not None)
        first_failed = job.first_failed
        wait(min(deadline, time.monotonic() + grace_s))
        job.send(signal.SIGABRT)
        wait(time.monotonic() + _ABORT_S)

    exit_codes = [code or 0 for code in job.exit_codes]
    if any(exit_codes):
        if first_failed is None:
            reason = f"the ranks did not finish within {timeout_s:g} s"
        else:
            reason = f"rank {first_failed} failed first"
        texts = [path.read_text(errors="replace") for path in log_paths]
        raise RankError(reason, exit_codes, first_failed, texts)
