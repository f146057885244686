"""One process per rank on this node: start them, watch them, and leave none behind.

The parent calls `run_ranks`. Each rank calls `connect` before its first use of JAX. When a rank
fails, the others are ended within seconds, and the parent raises one error that shows every rank's
log. Otherwise a collective whose peer has died would wait until its time limit and hide the real
cause.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import jax

from jax_intranode._src import config

_POLL_S = 0.02
# How long a rank may take to print its stacks after SIGABRT.
_ABORT_S = 1.0
_LOG_TAIL_CHARS = 4000


class RankError(RuntimeError):
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
) -> None:
    """Runs one process per rank until all have succeeded.

    When a rank fails, the others get `grace_s` to report errors of their own. A rank that still
    runs then, or at the time limit, gets SIGABRT, upon which Python prints its stacks, and then
    SIGKILL, together with the processes that it started. When this function returns or raises, no
    rank is left.

    Args:
        commands: The command of each rank.
        timeout_s: Time limit for all ranks together.
        log_dir: An existing directory; rank r's stdout and stderr go to `rank{r}.log` there.
        env: For each rank, variables to add to this process's environment.
        grace_s: How long the other ranks may go on after the first failure.

    Raises:
        RankError: A rank failed, or the time limit came first.
    """
    started = time.monotonic()
    log_paths = [log_dir / f"rank{rank}.log" for rank in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            rank_environment = {
                **os.environ,
                "PYTHONFAULTHANDLER": "1",
                **(env[rank] if env is not None else {}),
            }
            with log_paths[rank].open("wb") as log:
                process = subprocess.Popen(
                    command,
                    env=rank_environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
        first_failed = _watch(processes, started + timeout_s, grace_s)
        _abort(processes)
    finally:
        for process in processes:
            # A process group outlives its leader if a rank left children behind.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()

    exit_codes = [process.returncode for process in processes]
    if any(exit_codes):
        if first_failed is None:
            reason = f"the ranks did not finish within {timeout_s:g} s"
        else:
            reason = f"rank {first_failed} failed first"
        logs = [path.read_text(errors="replace") for path in log_paths]
        raise RankError(reason, exit_codes, first_failed, logs)


def _watch(
    processes: Sequence[subprocess.Popen[bytes]], deadline: float, grace_s: float
) -> int | None:
    """Waits for all to end, until the deadline or `grace_s` after the first failure.

    Returns:
        The rank that failed first, if one did.
    """
    first_failed = None
    while True:
        exit_codes = [process.poll() for process in processes]
        if first_failed is None:
            first_failed = next((rank for rank, code in enumerate(exit_codes) if code), None)
            if first_failed is not None:
                deadline = min(deadline, time.monotonic() + grace_s)
        if None not in exit_codes or time.monotonic() >= deadline:
            return first_failed
        time.sleep(_POLL_S)


def _abort(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Lets the processes that still run print their stacks."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + _ABORT_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)


def free_port() -> int:
    """Returns a TCP port that nobody on this node listened on a moment ago.

    It is outside of the range from which the system takes ports for connections: such a port may be
    taken before the caller's child listens on it.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port


def rank_env(
    rank: int, world_size: int, port: int, local_devices: Sequence[int] | None = None
) -> dict[str, str]:
    """Returns the variables that `connect` reads.

    Args:
        rank: The process's rank, 0 to world_size - 1.
        world_size: The number of processes.
        port: A free port, the same for all ranks; rank 0's coordination service listens there.
        local_devices: The devices of this process, as numbered among those that it sees; by
            default the one with the number of its rank. On the CPU only their count matters.
    """
    devices = [rank] if local_devices is None else local_devices
    return {
        config.RANK: str(rank),
        config.WORLD_SIZE: str(world_size),
        config.COORDINATOR: f"127.0.0.1:{port}",
        config.LOCAL_DEVICES: ",".join(map(str, devices)),
    }


def connect(platform: str) -> int:
    """Joins the other ranks' `jax.distributed` run. Call it before any other use of JAX.

    Afterwards an uncaught exception ends the process at once. Python's ordinary exit would first
    enter JAX's shutdown barrier and wait there for the healthy ranks.

    Args:
        platform: "cpu" or "gpu".

    Returns:
        This process's rank.
    """
    sys.excepthook = _exit_at_once
    rank = int(os.environ[config.RANK])
    local_devices = [int(number) for number in os.environ[config.LOCAL_DEVICES].split(",")]
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", len(local_devices))
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        local_devices = list(range(len(local_devices)))
    jax.distributed.initialize(
        os.environ[config.COORDINATOR],
        int(os.environ[config.WORLD_SIZE]),
        rank,
        local_device_ids=local_devices,
        initialization_timeout=60,
        heartbeat_timeout_seconds=100,
        shutdown_timeout_seconds=30,
    )
    return rank


def _exit_at_once(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A `sys.excepthook` that prints the error and ends the process without exit handlers."""
    traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
