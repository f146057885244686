"""Processes: Python with a program, whether they run, and ports for them."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path


def python(
    *arguments: str | Path,
    cwd: Path | None = None,
    stderr: int = subprocess.STDOUT,
    timeout_s: float = 120,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with more environment variables. Errors go to stdout, too, unless stderr says so.

    With "-P" it imports the installed package, also where the source tree is the current directory.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        # JAX of this process has reserved most of each GPU's memory.
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **env},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=timeout_s,
    )


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children_of(pid: int) -> list[int]:
    """The children of a process's main thread, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, children) for one in (child, *children_of(child))]


def assert_gone(pids: list[int]) -> None:
    """Asserts that no process runs, after the moment that the kernel may take to kill it."""
    deadline = time.monotonic() + 2
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if is_running(pid)] == []


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


def segments_of(pid: int) -> list[str]:
    """The segments of shared memory of a process that still have a name."""
    return [path.name for path in Path("/dev/shm").glob(f"jax_intranode.{pid}.*")]
