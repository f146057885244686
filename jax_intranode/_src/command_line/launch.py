"""The command `launch`: a process per GPU or CPU device, started again after a fault."""

import argparse
import contextlib
import functools
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jax_intranode._src import timeouts
from jax_intranode._src.command_line import acceleration, machine, start_rank
from jax_intranode._src.command_line import run as run_command
from jax_intranode._src.command_line.launcher.job import Job, Streams
from jax_intranode._src.command_line.launcher.output import RankOutput, Screen, Stream
from jax_intranode._src.command_line.launcher.own_files import make_own_directory
from jax_intranode._src.command_line.launcher.rank import rank_env
from jax_intranode._src.command_line.launcher.service import coordination_service
from jax_intranode._src.command_line.options import WrongInput, integer_from, positive_number
from jax_intranode._src.selection import config

DESCRIPTION = (
    "Starts one process per GPU of this node, or with --platform cpu one per CPU device, and JAX's "
    "coordination service. jax.distributed.initialize() needs no arguments in them; where a "
    "script does not call it, it is called when the script first uses a device. What the "
    "processes print is shown with the rank in front. When a process fails, the others are ended, "
    "and its last lines are shown. The exit code is that of the process that failed first, or 128 "
    "+ the number of the signal that ended it; 130 after Ctrl-C, 124 after --timeout. Process 0 "
    "gets this command's stdin. Environment variables of each process: JAX_INTRANODE_RANK, "
    "JAX_INTRANODE_WORLD_SIZE, JAX_INTRANODE_RESTART (the number of restarts so far)."
)
EXAMPLES = """\
python -m jax_intranode launch train.py --steps 10            # a process per GPU
python -m jax_intranode launch -n 2 --platform cpu train.py   # two CPU devices
python -m jax_intranode launch -n 4 -m package.train
python -m jax_intranode launch -n 4 run train.py              # collectives accelerated
python -m jax_intranode launch -n 4 run --compare train.py    # and not, in turns
python -m jax_intranode launch -n 4 --restarts 3 --log-dir logs train.py"""

# Ends the job, as when a terminal is closed, Ctrl-C is pressed, or a supervisor ends it.
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_TIMED_OUT = 124  # the exit code of timeout(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "number of processes (default: the number of GPUs)"
    add("-n", dest="processes", metavar="N", type=integer_from(1), help=text)
    text = "cpu: each process has one CPU device, as where there are no GPUs (default: auto)"
    add("--platform", choices=("auto", "cpu", "gpu"), default="auto", help=text)
    text = (
        "write what process R prints to DIR/rankR.log, too, and after restart K to "
        "DIR/rankR.restartK.log"
    )
    add("--log-dir", type=Path, metavar="DIR", help=text)
    text = (
        "after a fault start all processes again, at most K times (default 0); the program "
        "goes on from its last checkpoint"
    )
    add("--restarts", type=integer_from(0), default=0, metavar="K", help=text)
    text = "end everything after S seconds, with the stacks of the processes that still run"
    add("--timeout", type=positive_number(), metavar="S", help=text)
    text = (
        "seconds from the first failure, or from a signal to this command, until processes "
        "that still run are killed (default 5); raise it if yours save a checkpoint at SIGTERM"
    )
    add("--grace", type=positive_number(), default=5.0, metavar="S", help=text)
    run_command.add_script(
        parser, "a Python file, or with -m a module; `run SCRIPT` and `run -m MODULE` accelerate it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the processes, again after a fault if that was asked for."""
    _reserve_standard_descriptors()
    program = _program(arguments)
    world_size = _world_size(arguments)
    deadline = time.monotonic() + arguments.timeout if arguments.timeout else float("inf")
    with _signals() as received:
        for restart in range(arguments.restarts + 1):
            end = _Launch(arguments, program, world_size, restart).run(received, deadline)
            if not end.is_fault or restart == arguments.restarts or received:
                break
            _say(f"restart {restart + 1} of {arguments.restarts}")
        while (full := _full()) and not received and time.monotonic() < deadline:
            select.select([], full, [], 0.1)
        if full:  # nobody has read the rest
            return 128 + received[0] if received else _TIMED_OUT
    return end.code


class _End(NamedTuple):
    """The exit code for this command, and whether a process has failed by itself."""

    code: int
    is_fault: bool


class _Launch:
    def __init__(
        self, arguments: argparse.Namespace, program: list[str], world_size: int, restart: int
    ) -> None:
        self._arguments = arguments
        # No variables: Python may have been told to ignore them.
        self._command = [*start_rank.command("-u", "-X", "faulthandler"), "rank", *program]
        self._world_size = world_size
        self._restart = restart
        self._started = time.monotonic()
        self._failed_s = 0.0

    def run(self, received: list[signal.Signals], deadline: float) -> _End:
        """Starts the processes and waits for their end.

        Args:
            received: the signals that this process gets, the newest one last.
        """
        ranks = range(self._world_size)
        outputs: list[RankOutput] = []
        try:
            if self._arguments.log_dir is not None:
                make_own_directory(self._arguments.log_dir)
            for r in ranks:
                outputs.append(RankOutput(r, self._world_size, self._log(r), _say))
        except OSError as error:
            for output in outputs:
                output.close()
            raise WrongInput(
                f"launch --log-dir: {error.filename}: {error.strerror}. Name a directory of "
                "your own."
            ) from error
        streams: list[Stream] = []
        with coordination_service(self._world_size) as address:
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            with Job(
                [self._command] * self._world_size,
                env=[self._environment(r, address) for r in ranks],
                streams=[Streams(None if r == 0 else nothing, pipe, pipe) for r in ranks],
                told_at=start_rank.told_at(address),
            ) as job:
                for process, output in zip(job.processes, outputs, strict=True):
                    for end, screen in ((process.stdout, _STDOUT), (process.stderr, _STDERR)):
                        assert end is not None
                        streams.append(Stream(end, output, screen))
                        job.watch(end, streams[-1].read)
                pids = ", ".join(str(process.pid) for process in job.processes)
                are = "are processes" if len(ranks) > 1 else "is process"
                _say(f"{_named(list(ranks))} {are} {pids}")
                with _handling(signal.SIGTSTP, job.pause):
                    end_of_all = self._watch(job, streams, received, deadline)
        for stream in streams:
            stream.finish()
        for output in outputs:
            output.close()
        return end_of_all or self._report(job, outputs)

    def _watch(
        self, job: Job, streams: list[Stream], received: list[signal.Signals], deadline: float
    ) -> _End | None:
        """Waits until all have ended, or have been asked to and have had the time for it.

        Returns:
            How the run has ended if it was this process that ended it.
        """

        def wait(seconds: float, wakes: Callable[[], bool]) -> None:
            until = time.monotonic() + seconds
            while job.running and not wakes() and (left := until - time.monotonic()) > 0:
                job.wait(left, _full())
                for stream in streams:
                    stream.show_old()

        grace_s = self._arguments.grace
        wait(deadline - time.monotonic(), lambda: job.first_failed is not None or bool(received))
        if job.first_failed is not None:
            self._failed_s = time.monotonic() - self._started
            if others := [rank for rank in job.running if rank != job.first_failed]:
                _say(f"rank {job.first_failed} has failed; ending {_named(others)}")
            wait(min(timeouts.OWN_ERRORS_S, grace_s / 2), lambda: bool(received))
            job.send(signal.SIGTERM)
            wait(grace_s - min(timeouts.OWN_ERRORS_S, grace_s / 2), lambda: bool(received))
        elif not received and job.running:
            _say(f"ending {_named(job.running)}: not finished after {self._arguments.timeout:g} s")
            job.send(signal.SIGABRT)
            wait(timeouts.ABORT_S, lambda: bool(received))
            return _End(_TIMED_OUT, is_fault=False)
        if received:
            _say(f"{received[0].name}: ending the ranks")
            job.send(received[0])
            wait(grace_s, lambda: len(received) > 1)
            return _End(128 + received[0], is_fault=False)
        return None

    def _report(self, job: Job, outputs: list[RankOutput]) -> _End:
        """Shows what has failed first, so that it is the last thing that is seen."""
        failed = job.first_failed
        if failed is None:
            return _End(0, is_fault=False)
        code = job.exit_codes[failed]
        assert code is not None
        text = f"rank {failed} failed first, after {self._failed_s:.1f} s: {_described(code)}"
        # What it has printed last may be what was shown last.
        tail = outputs[failed].tail if Stream.last != (outputs[failed], _STDERR) else ()
        _say(f"{text}. Its last lines:" if tail else text)
        for line in tail:
            _STDERR.write(outputs[failed].prefix + line + b"\n")
        others = [
            f"rank {rank}: {_described(code)}"
            for rank, code in enumerate(job.exit_codes)
            if rank != failed
        ]
        if others:
            _say("after it, " + ", ".join(others))
        if self._arguments.log_dir is not None:
            _say(f"all that it has printed: {self._log(failed)}")
        return _End(code if code > 0 else 128 - code, is_fault=True)

    def _log(self, rank: int) -> Path | None:
        directory: Path | None = self._arguments.log_dir
        restart = f".restart{self._restart}" if self._restart else ""
        return directory and directory / f"rank{rank}{restart}.log"

    def _environment(self, rank: int, address: str) -> dict[str, str]:
        variables = rank_env(rank, self._world_size, address)
        variables[config.RESTART] = str(self._restart)
        variables["PYTHONUNBUFFERED"] = "1"
        # A process per CPU device. It overrides the number in XLA_FLAGS, and has no effect on GPUs.
        variables["JAX_NUM_CPU_DEVICES"] = os.environ.get("JAX_NUM_CPU_DEVICES") or "1"
        platform = self._arguments.platform
        if platform != "auto":
            variables["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[platform]
        return variables


_STDOUT, _STDERR = Screen(1), Screen(2)


def _full() -> list[int]:
    """The file descriptors that do not take what is to be shown."""
    return [screen.fd for screen in (_STDOUT, _STDERR) if screen.is_full()]


def _say(text: str) -> None:
    """Tells the user of an event, in one line."""
    _STDERR.write(f"launch: {text}\n".encode())


def _named(ranks: list[int]) -> str:
    """These ranks, in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _described(code: int | None) -> str:
    """How a process has ended, in words."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Gives a list that gets the signals that end the job, and keeps them from this process."""
    received: list[signal.Signals] = []
    with contextlib.ExitStack() as handlers:
        for number in _ENDING:
            handlers.enter_context(_handling(number, functools.partial(received.append, number)))
        yield received


@contextlib.contextmanager
def _handling(number: signal.Signals, act: Callable[[], None]) -> Iterator[None]:
    """Calls a function at a signal, unless the signal is ignored, as by nohup."""
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(number, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(number, before)


def _reserve_standard_descriptors() -> None:
    """Opens those of stdin, stdout and stderr that are closed, or other files would get them."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd > 2:
            os.close(fd)
            return
        os.set_inheritable(fd, True)


def _program(arguments: argparse.Namespace) -> list[str]:
    """The arguments of start_rank.py."""
    what = words = run_command.script_of(arguments)
    if words[:1] == ["run"]:
        options, what = start_rank.split(words[1:])
        acceleration.parse_options(options)
        words = ["run", *options, *what]
    is_module = what[:1] == ["-m"]
    if not what[is_module:]:
        raise WrongInput("launch run: name a script, or a module after -m.")
    run_command.check_script(what[is_module], is_module=is_module)
    return words


def _world_size(arguments: argparse.Namespace) -> int:
    """The number of processes."""
    gpus, wanted = machine.visible_gpus(), arguments.processes
    of_jax = os.environ.get("JAX_PLATFORMS") or ("cuda" if gpus else "cpu")
    if arguments.platform == "cpu" or (arguments.platform == "auto" and of_jax == "cpu"):
        if wanted is None:
            raise WrongInput("launch: without GPUs, say how many processes to start: -n 2.")
        return int(wanted)
    if not gpus:
        raise WrongInput(f"launch on GPUs: {machine.NO_GPUS}")
    if wanted is not None and wanted > gpus:
        raise WrongInput(f"launch -n {wanted}: JAX sees {gpus} GPUs here. Use -n {gpus} or less.")
    return wanted or gpus
