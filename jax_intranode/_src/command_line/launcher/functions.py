"""Functions of this package that run in the ranks of a job: those of bench, tune, soak and doctor.

The parent process calls `run_function`. Each rank is a process of function_rank.py, which calls the
function. Rank 0 tells the parent in lines of JSON what happens.
"""

import contextlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
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
        if line is not None and "begun" in message:
            line.begin(message["begun"])
        result = message.get("result", result)
        hear(message)

    with tempfile.TemporaryDirectory(prefix="jax_intranode_") as name:
        directory = Path(name)
        messages = directory / "messages"
        job = [function, json.dumps(arguments), json.dumps(devices), str(messages)]
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", _PROGRAM, *job]
        with followed(messages, take, line, directory / "rank0.log" if shows_log else None):
            run_ranks(
                [command] * devices.ranks,
                timeout_s=timeout_s,
                log_dir=directory,
                env=env,
                joined=devices.ranks > 1,
            )
    return result


@contextlib.contextmanager
def followed(
    messages: Path,
    take: Callable[[dict[str, Any]], None],
    line: ProgressLine | None,
    log: Path | None = None,
) -> Iterator[None]:
    """Follows what a job writes, until the end of the block.

    Args:
        line: the progress line, which is shown again all the time.
        log: a file that is copied to stdout while it grows, so that each row of a table appears as
            soon as it is measured.
    """
    finished = threading.Event()

    def new(file: Path, position: int) -> tuple[str, int]:
        """What a file has after a position, up to its last whole line."""
        if not file.exists():
            return "", position
        with file.open("rb") as stream:
            stream.seek(position)
            data = stream.read()
        data = data[: data.rfind(b"\n") + 1]
        return data.decode(errors="replace"), position + len(data)

    def follow() -> None:
        at = of_log = 0
        last = False
        while not last:
            # Read once more after the end, because the last lines may have come during the wait.
            last = finished.wait(0.1)
            if log is not None:
                text, of_log = new(log, of_log)
                if text:
                    if line is not None:
                        line.clear()
                    print(text, end="", flush=True)
            text, at = new(messages, at)
            for message in text.splitlines():
                take(json.loads(message))
            if line is not None:
                line.show()
        if line is not None:
            line.clear()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        finished.set()
        follower.join()
