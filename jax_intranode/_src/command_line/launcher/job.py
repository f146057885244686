"""The processes of one run: started together, watched together, and ended with all they started.

Each rank leads a process group of its own, so that its children are ended with it. Ranks that have
ended stay zombies until the end of the job: until then the system gives their numbers to no other
process, and a signal hits who it is meant for.
"""

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from jax_intranode._src import timeouts

# Ends the ranks when the process that has started them is gone, however it ended. It reads the
# numbers of process groups until then. PR_SET_PDEATHSIG would not reach the ranks' children, and
# it fires when the thread ends that has started a rank.
_GUARD = """
import os, signal, sys
for group in [int(line) for line in sys.stdin]:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Streams(NamedTuple):
    """The stdin, stdout and stderr of a rank, as `subprocess.Popen` takes them."""

    stdin: int | IO[Any] | None = subprocess.DEVNULL
    stdout: int | IO[Any] | None = None
    stderr: int | IO[Any] | None = None


class Job:
    """One process per rank.

    It is a context manager. At its end no rank is left, and no process that a rank has started,
    unless that has left the rank's process group. If this process is killed, the same holds.

    Attributes:
        processes: the processes in rank order, for their pipes and process ids (`pid`). To send
            a signal, use `send`.
        exit_codes: the exit code of each rank in rank order, minus the signal's number if a signal
            has ended it, or None while it runs.
        first_failed: when a rank has ended with another exit code than 0, the rank that failed
            first: by its own word, or else by its end.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        env: Sequence[Mapping[str, str]],
        streams: Sequence[Streams],
        told_at: str | None = None,
    ) -> None:
        """Starts the ranks.

        Args:
            env: for each rank, variables to add to this process's environment.
            streams: for each rank, where its input comes from and its output goes.
            told_at: the path of a socket at which ranks tell that they fail, see start_rank.py. A
                rank may end later than a peer that fails because of it.

        Raises:
            OSError: a command cannot be started. No rank is left.
        """
        self.processes: list[subprocess.Popen[bytes]] = []
        self.exit_codes: list[int | None] = []
        self.first_failed: int | None = None
        self._pidfds: dict[int, int] = {}
        self._ends = selectors.EpollSelector()  # of the ranks
        self._selector = selectors.EpollSelector()  # of all that is waited for
        self._selector.register(self._ends.fileno(), selectors.EVENT_READ, self._take_ends)
        # By rank that has told: its exit code, whether it fails because of a peer, and which ranks
        # were ending when it told.
        self._told: dict[int, tuple[int, bool, list[int]]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        if told_at is not None:
            self._socket.bind(told_at)
            self._ends.register(self._socket, selectors.EVENT_READ, self._take_told)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            for of_rank in zip(commands, env, streams, strict=True):
                self._start(*of_rank)
        except BaseException:
            self.end()
            raise

    def _start(
        self, command: Sequence[str], variables: Mapping[str, str], streams: Streams
    ) -> None:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **variables},
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            start_new_session=True,
        )
        rank = len(self.processes)
        self.processes.append(process)
        self.exit_codes.append(None)
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"%d\n" % process.pid)
        self._guard.stdin.flush()
        self._pidfds[rank] = os.pidfd_open(process.pid)
        self._ends.register(self._pidfds[rank], selectors.EVENT_READ, lambda: self._ended(rank))

    @property
    def running(self) -> list[int]:
        return [rank for rank, code in enumerate(self.exit_codes) if code is None]

    def watch(self, pipe: IO[bytes], ready: Callable[[], bool]) -> None:
        """Makes `wait` call a function when a pipe can be read, until that returns False."""

        def read() -> None:
            if not ready():
                self._selector.unregister(pipe)

        self._selector.register(pipe, selectors.EVENT_READ, read)

    def wait(self, timeout_s: float, full: Sequence[int] = ()) -> None:
        """Waits until a rank ends or a watched pipe can be read, at most this many seconds.

        It may return earlier.

        Args:
            full: file descriptors. If there are any, the pipes stay unread, and the wait ends when
                one of these can be written.
        """
        # A signal does not end a wait of the main thread if another thread has got it.
        timeout_s = max(0.0, min(timeout_s, timeouts.SIGNAL_S))
        if full:
            ready = select.poll()
            ready.register(self._ends.fileno(), select.POLLIN)
            for fd in full:
                ready.register(fd, select.POLLOUT)
            ready.poll(timeout_s * 1e3)
            self._take_ends()
            return
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def send(self, number: int) -> None:
        """Sends a signal to the ranks that run; not to their children."""
        for rank in self.running:
            os.kill(self.processes[rank].pid, number)

    def pause(self) -> None:
        """Stops this process, and all processes of the ranks' groups until it is continued."""
        self._send_to_groups(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send_to_groups(signal.SIGCONT)

    def end(self) -> None:
        """Ends all that is left of the ranks. Later calls do nothing."""
        self._send_to_groups(signal.SIGKILL)
        for rank, process in enumerate(self.processes):
            # One that the driver holds in the kernel ends later; nothing can hurry it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeouts.KILLED_S)
            code = process.returncode
            code = -signal.SIGKILL if code is None else code
            if rank == self.first_failed and code in (0, -signal.SIGTERM, -signal.SIGKILL):
                code = self._told.get(rank, (code,))[0]  # it was ended on its way to this one
            self.exit_codes[rank] = code
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
        self._selector.close()
        self._ends.close()
        self._socket.close()
        self._guard.kill()
        self._guard.communicate()

    def _send_to_groups(self, number: int) -> None:
        for process in self.processes:
            if process.returncode is None:  # until `end` waits for it, its number is its own
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)

    def _take_ends(self) -> None:
        for key, _ in self._ends.select(0):  # in the order in which they came
            key.data()

    def _take_told(self) -> None:
        with contextlib.suppress(BlockingIOError, ValueError):
            while True:
                rank, code, follows = map(int, self._socket.recv(100).split())
                if 0 <= rank < len(self.processes):
                    ending = [r for r, process in enumerate(self.processes) if _ends(process.pid)]
                    self._told.setdefault(rank, (code, bool(follows), ending))

    def _ended(self, rank: int) -> None:
        pid = self.processes[rank].pid
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert status is not None
        ended_itself = status.si_code == os.CLD_EXITED
        self.exit_codes[rank] = status.si_status if ended_itself else -status.si_status
        if self.exit_codes[rank] and self.first_failed is None:
            for first, (_, follows, ending) in self._told.items():
                # A rank that a signal or os._exit ends tells nothing, and is missed before its end.
                is_missed = rank in ending and rank not in self._told
                if not (follows or is_missed) and self.exit_codes[first] != 0:
                    break
            else:
                first = rank
            self.first_failed = first
        self._ends.unregister(self._pidfds[rank])
        os.close(self._pidfds.pop(rank))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.end()


def _ends(pid: int) -> bool:
    """Whether the system is ending a process of this one, or has ended it."""
    flags = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[6]
    return bool(int(flags) & 4)  # PF_EXITING
