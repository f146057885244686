"""Functions of this package that run in the ranks of a job: those of bench, tune, soak and doctor.

The parent process calls `run_function`. Each rank is a process of function_rank.py, which calls the
function. Rank 0 tells the parent in lines of JSON what happens.
"""

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax_intranode._src.command_line import machine
from jax_intranode._src.command_line.launcher.files import run_ranks
from jax_intranode._src.command_line.launcher.progress import ProgressLine
from jax_intranode._src.command_line.launcher.rank import sharing_env

PROCESS_PER_DEVICE = "process-per-device"
SINGLE_PROCESS = "single-process"
MODES = (PROCESS_PER_DEVICE, SINGLE_PROCESS)

_PROGRAM = "jax_intranode._src.command_line.launcher.function_rank"


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
        function: "module:name" of a function of a `function_rank.Rank` and keyword arguments.
        arguments: the keyword arguments, which travel as JSON.
        line: the progress line; it counts the messages with "begun".
        hear: gets each message of rank 0.
        shows_log: whether to print what rank 0 prints, while it does so.
    """
    env = [dict(variables or {}) for _ in range(devices.ranks)]
    if devices.platform == "cpu":
        # JAX_NUM_CPU_DEVICES overrides the number of host devices in XLA_FLAGS.
        of_rank = str(devices.size // devices.ranks)
        for of_one in env:
            of_one.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=of_rank)
    elif devices.ranks > 1 and machine.has_one_gpu():
        for rank, of_one in enumerate(env):
            of_one.update(sharing_env(rank))
    result = None

    def take(message: dict[str, Any]) -> None:
        nonlocal result
        result = message.get("result", result)
        hear(message)

    with tempfile.TemporaryDirectory(prefix="jax_intranode_") as name:
        directory = Path(name)
        messages = directory / "messages"
        job = [function, json.dumps(arguments), json.dumps(devices), str(messages)]
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", _PROGRAM, *job]
        follower = Follower(messages, line, take, directory / "rank0.log" if shows_log else None)
        run_ranks(
            [command] * devices.ranks,
            timeout_s=timeout_s,
            log_dir=directory,
            env=env,
            joined=devices.ranks > 1,
            follow=follower.follow,
        )
    return result


class Follower:
    """Follows what a job writes: messages, and what is to be shown."""

    def __init__(
        self,
        messages: Path,
        line: ProgressLine | None,
        take: Callable[[dict[str, Any]], None] = lambda message: None,
        log: Path | None = None,
    ) -> None:
        """Begins with nothing.

        Args:
            messages: a file with a line of JSON for each message.
            line: the progress line; it counts the messages with "begun".
            take: gets each message.
            log: a file that is copied to stdout while it grows, so that each row of a table appears
                as soon as it is measured.
        """
        self._messages, self._line, self._take, self._log = messages, line, take, log
        self._read: dict[Path, int] = {}  # how much of each file

    def follow(self, ended: bool = False) -> None:
        """Shows what is new, and the progress line again unless the job has ended."""
        if self._log is not None and (text := self._new(self._log)):
            if self._line is not None:
                self._line.clear()
            print(text, end="", flush=True)
        for text in self._new(self._messages).splitlines():
            message = json.loads(text)
            if self._line is not None and "begun" in message:
                self._line.begin(message["begun"])
            self._take(message)
        if self._line is not None:
            (self._line.clear if ended else self._line.show)()

    def _new(self, file: Path) -> str:
        """What a file has since the last time, up to its last whole line."""
        if not file.exists():
            return ""
        with file.open("rb") as stream:
            stream.seek(self._read.get(file, 0))
            data = stream.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read[file] = self._read.get(file, 0) + len(data)
        return data.decode(errors="replace")
