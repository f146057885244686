"""Runs of ranks: `run_ranks` of commands, `run_function` of a function of this package.

Their output goes to files. Rank 0 tells this process in lines of JSON what happens.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from jax_intranode._src import timeouts
from jax_intranode._src.command_line import machine
from jax_intranode._src.command_line.launcher.job import Job, Streams
from jax_intranode._src.command_line.launcher.own_files import open_own, private_directory
from jax_intranode._src.command_line.launcher.rank import rank_env, sharing_env
from jax_intranode._src.command_line.launcher.service import coordination_service
from jax_intranode._src.command_line.options import Failed

PROCESS_PER_DEVICE = "process-per-device"
SINGLE_PROCESS = "single-process"
MODES = (PROCESS_PER_DEVICE, SINGLE_PROCESS)

# The file in the directory of the logs to which rank 0 writes messages.
MESSAGES = "messages"
_LOG_TAIL_CHARS = 4000
# The program of a rank that calls a function. Not -m: the function may import this module, too.
_CALL = "from jax_intranode._src.command_line.launcher.all_ranks import call; call()"
_CLEAR = "\r\x1b[K"


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


class ProgressLine:
    """The current measurement, its number, the time since the start, and what may be left.

    It is a line on a terminal that is overwritten in place. Elsewhere it is absent.
    """

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream if stream.isatty() else None
        self._total = total
        self._number = 0
        self._what = ""
        self.started = time.monotonic()
        self._first = 0.0  # when the first measurement began

    def begin(self, what: str) -> None:
        """Counts the next measurement, which begins now. `show` writes the line."""
        self._first = self._first or time.monotonic()
        self._number += 1
        self._what = what

    def text(self) -> str:
        """Returns the line; empty if there is nothing to show."""
        if not self._what:
            return ""
        now, done, left = time.monotonic(), self._number - 1, ""
        if done > 0:  # each measurement is assumed to take as long as those before
            each = (now - self._first) / (done + 0.5)
            left = f", about {minutes(each * (self._total - done - 0.5))} left"
        passed = minutes(now - self.started)
        return f"{self._what}: {self._number} of {self._total}, {passed}{left}"

    def show(self) -> None:
        """Writes the line again, with the current time."""
        if text := self.text():
            # A longer line would wrap and could not be overwritten.
            self._write(text[: shutil.get_terminal_size().columns - 1])

    def clear(self) -> None:
        """Erases the line, before other output."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(_CLEAR + text)
            self._stream.flush()


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def run_ranks(
    commands: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    log_dir: Path,
    env: Sequence[Mapping[str, str]] | None = None,
    grace_s: float = 2.0,
    joined: bool = False,
    line: ProgressLine | None = None,
    hear: Callable[[dict[str, Any]], None] = lambda message: None,
    shows_log: bool = False,
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
        line: The progress line; it counts the messages with "begun".
        hear: Gets each message that a rank has added to `log_dir / MESSAGES`, as a line of JSON.
        shows_log: Whether to print what rank 0 prints, so that each row of a table appears as soon
            as it is measured.

    Raises:
        RankError: A rank failed, or the time limit came first.
    """
    deadline = time.monotonic() + timeout_s
    log_paths = [log_dir / f"rank{rank}.log" for rank in range(len(commands))]
    variables = [dict(of_rank) for of_rank in env or [{} for _ in commands]]
    read: Counter[Path] = Counter()  # how much of each file

    def follow(ended: bool = False) -> None:
        """Shows what is new, and the progress line again unless the job has ended."""
        if shows_log and (text := _new(log_paths[0], read)):
            if line is not None:
                line.clear()
            print(text, end="", flush=True)
        for text in _new(log_dir / MESSAGES, read).splitlines():
            message = json.loads(text)
            if line is not None and "begun" in message:
                line.begin(message["begun"])
            hear(message)
        if line is not None:
            (line.clear if ended else line.show)()

    with contextlib.ExitStack() as stack:
        if joined:
            address = stack.enter_context(coordination_service(len(commands)))
            for rank, of_rank in enumerate(variables):
                variables[rank] = {**rank_env(rank, len(commands), address), **of_rank}
        with contextlib.ExitStack() as logs:  # this process needs none of them
            opened = [logs.enter_context(open_own(path)) for path in log_paths]
            streams = [Streams(stdout=log, stderr=subprocess.STDOUT) for log in opened]
            job = stack.enter_context(Job(commands, env=variables, streams=streams))

        def wait(until: float, wakes: Callable[[], bool] = lambda: False) -> None:
            while job.running and not wakes() and (left := until - time.monotonic()) > 0:
                job.wait(left)
                follow()

        stack.callback(follow, True)
        wait(deadline, lambda: job.first_failed is not None)
        first_failed = job.first_failed
        wait(min(deadline, time.monotonic() + grace_s))
        job.send(signal.SIGABRT)
        wait(time.monotonic() + timeouts.ABORT_S)

    exit_codes = [code or 0 for code in job.exit_codes]
    if any(exit_codes):
        reason = f"rank {first_failed} failed first"
        if first_failed is None:
            reason = f"the ranks did not finish within {timeout_s:g} s"
        texts = [path.read_text(errors="replace") for path in log_paths]
        raise RankError(reason, exit_codes, first_failed, texts)


def _new(file: Path, read: Counter[Path]) -> str:
    """What a file has since the last time, up to its last whole line."""
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        stream.seek(read[file])
        data = stream.read()
    data = data[: data.rfind(b"\n") + 1]
    read[file] += len(data)
    return data.decode(errors="replace")


class Devices(NamedTuple):
    """The devices of a job.

    Attributes:
        platform: "cpu" or "gpu".
        size: the number of devices.
        mode: one of MODES.
    """

    platform: str
    size: int
    mode: str

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.size if self.mode == PROCESS_PER_DEVICE else 1


def end_by_exit(number: int, frame: object) -> None:
    """A signal handler that ends the process by sys.exit, so that the ranks are ended, too."""
    del frame
    signal.signal(number, signal.SIG_IGN)  # a second signal would leave ranks behind
    sys.exit(128 + number)


def run_function(
    function: str,
    arguments: Mapping[str, Any],
    devices: Devices,
    *,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    line: ProgressLine | None = None,
    hear: Callable[[dict[str, Any]], None] = lambda message: None,
    shows_log: bool = False,
) -> Any:
    """Calls a function in all ranks of a job, and returns what it returned in rank 0.

    Args:
        function: "module:name" of a function of an `all_ranks.Rank` and keyword arguments.
        arguments: the keyword arguments, which travel as JSON.
        line: see `run_ranks`, as for `hear` and `shows_log`.
    """
    env = [dict(variables or {}) for _ in range(devices.ranks)]
    for rank, of_rank in enumerate(env):
        if devices.platform == "cpu":
            # JAX_NUM_CPU_DEVICES overrides the number of host devices in XLA_FLAGS.
            own = str(devices.size // devices.ranks)
            of_rank.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=own)
        elif devices.ranks > 1 and machine.has_one_gpu():
            of_rank.update(sharing_env(rank))
    result = None

    def take(message: dict[str, Any]) -> None:
        nonlocal result
        result = message.get("result", result)
        hear(message)

    with private_directory() as directory:
        job = [function, json.dumps(arguments), json.dumps(devices), str(directory / MESSAGES)]
        command = [sys.executable, "-P", "-X", "faulthandler", "-c", _CALL, *job]
        run_ranks(
            [command] * devices.ranks,
            timeout_s=timeout_s,
            log_dir=directory,
            env=env,
            joined=devices.ranks > 1,
            line=line,
            hear=take,
            shows_log=shows_log,
        )
    return result
