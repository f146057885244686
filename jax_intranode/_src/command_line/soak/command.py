"""The command `soak`: the parent process, which starts the ranks and shows their progress."""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_intranode._src.command_line import launcher, source_tree
from jax_intranode._src.command_line.bench import machine
from jax_intranode._src.command_line.bench.settings import MODES, PROCESS_PER_DEVICE
from jax_intranode._src.command_line.soak.rank import Settings
from jax_intranode._src.command_line.wrong_input import WrongInput, check_writable

DESCRIPTION = (
    "Runs random programs and compares every result with jax.lax, or with sums in rank order where "
    "bits are promised. Starts one process with all devices and then a process per device. With "
    "--faults, starts jobs of a process per device in which one process fails, and checks what the "
    "others see, and when. Exits with 1 if a value was wrong, a rank failed or an error was not as "
    "it must be."
)
EXAMPLES = """\
python -m jax_intranode soak                               one minute, half of it in each mode
python -m jax_intranode soak --minutes 30 --json soak.json
python -m jax_intranode soak --platform cpu --devices 8 --mode single-process
python -m jax_intranode soak --seed 7 --program 123        that program only
python -m jax_intranode soak --faults --cases 50           50 jobs in which a process fails
python -m jax_intranode soak --faults --case psum:inside:kill:1of2"""

# How often a line of progress is printed where the output is no terminal.
_LINES_S = 30
# What starting, compiling and comparing may take beyond the time that was asked for.
_SLACK_S = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add = parser.add_argument
    add("--minutes", type=float, default=1, help="how long to run, in all (default 1)")
    add("--seed", type=int, help="makes the same programs again (default: a random one)")
    add("--program", type=int, metavar="NUMBER", help="run only the program with this number")
    add("--devices", type=int, help="number of devices (default all GPUs, or 4 CPU devices)")
    add(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto chooses GPUs if there are any (default auto)",
    )
    add(
        "--mode",
        choices=(*MODES, "both"),
        default="both",
        help="one process per device, a single process for all devices, or both (default both)",
    )
    add("--json", type=Path, metavar="FILE", help="write the counts to FILE")
    add("--faults", action="store_true", help="let processes fail; needs the source tree")
    add("--cases", type=int, default=300, metavar="COUNT", help="how many faults (default 300)")
    add("--case", metavar="CASE[,CASE...]", help="run only these faults, as --faults prints them")
    add("--jobs", type=int, default=1, metavar="COUNT", help="faults at the same time (default 1)")
    add(
        "--slack",
        type=float,
        default=1,
        metavar="FACTOR",
        help="multiplies the time limits of --faults, for a machine that is busy (default 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs random programs in the chosen modes and prints what was found.

    Args:
        arguments: the arguments as parsed by a parser that `add_arguments` has set up.

    Returns:
        The exit code: 0 if all values were right, 1 if one was wrong or a rank failed.

    Raises:
        WrongInput: the arguments can't be served.
    """
    platform, devices = platform_and_devices(arguments.platform, arguments.devices, 4)
    if not arguments.minutes > 0:
        raise WrongInput(f"--minutes {arguments.minutes:g}: use a positive number")
    if arguments.program is not None and arguments.seed is None:
        raise WrongInput("--program needs the --seed of the run that it was part of")
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    for name in ("cases", "jobs", "slack"):
        if not getattr(arguments, name) > 0:
            raise WrongInput(f"--{name} {getattr(arguments, name)}: use a positive number")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if arguments.faults:
        faults = source_tree.load("soak_faults.command", "--faults")
        return int(faults.run(arguments, platform, devices))
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    modes = tuple(reversed(MODES)) if arguments.mode == "both" else (arguments.mode,)
    if machine.ranks_share_a_gpu(platform):
        if arguments.mode not in ("both", PROCESS_PER_DEVICE):
            raise WrongInput(f"--mode {arguments.mode}: this needs 2 GPUs, and there is 1 here")
        modes = (PROCESS_PER_DEVICE,)
    seconds = arguments.minutes * 60 / len(modes)
    print(f"# soak of {devices} x {platform}, --seed {seed}", flush=True)
    results = []
    for mode in modes:
        settings = Settings(mode, platform, devices, seed, seconds, arguments.program)
        results.append({"mode": mode, **_run_mode(settings)})
    if arguments.json is not None:
        header = {"seed": seed, "platform": platform, "devices": devices}
        arguments.json.write_text(json.dumps({**header, "modes": results}, indent=2) + "\n")
    wrong = any(result["wrong"] or result["error"] for result in results)
    print(f"# {'FAILED' if wrong else 'OK'}", flush=True)
    return 1 if wrong else 0


def platform_and_devices(platform: str, devices: int | None, cpus: int) -> tuple[str, int]:
    """Returns the platform and the number of devices to use.

    Args:
        platform: "auto", "cpu" or "gpu".
        devices: the number that was asked for; None for all GPUs, or `cpus` CPU devices. Processes
            share a single GPU; then the default is two.
        cpus: see above.

    Raises:
        WrongInput: there are not as many.
    """
    gpus, _ = machine.gpus_and_driver()
    platform = machine.chosen_platform(platform, gpus)
    if platform == "gpu" and not gpus:
        raise WrongInput("--platform gpu: there is no GPU here; use --platform cpu")
    if devices is None:
        devices = max(gpus, 2) if platform == "gpu" else cpus
    if not 2 <= devices <= 8:
        raise WrongInput(f"{devices} devices: use 2 to 8")
    if platform == "gpu" and devices > gpus > 1:
        raise WrongInput(f"--devices {devices}: there are {gpus} GPUs here")
    return platform, devices


def _run_mode(settings: Settings) -> dict[str, Any]:
    """Runs the ranks of one mode.

    Returns:
        The counts that rank 0 wrote last, and as "error" what a rank that failed has printed.
    """
    variables = {
        # A rank that hangs ends with a message, and soon.
        "JAX_INTRANODE_TIMEOUT_S": os.environ.get("JAX_INTRANODE_TIMEOUT_S", "120"),
        # XLA would leave out roundings between operations that it fuses.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false",
    }
    joined = settings.mode == PROCESS_PER_DEVICE
    env = [variables] * (settings.devices if joined else 1)
    if joined and machine.ranks_share_a_gpu(settings.platform):
        env = [{**of_rank, **launcher.sharing_env(rank)} for rank, of_rank in enumerate(env)]
    if settings.platform == "cpu":
        cpus = "1" if joined else str(settings.devices)
        env = [{**rank, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": cpus} for rank in env]
    with tempfile.TemporaryDirectory(prefix="jax_intranode_soak_") as name:
        directory = Path(name)
        output = directory / "counts.jsonl"
        command = [
            *(sys.executable, "-P", "-m", "jax_intranode._src.command_line.soak.rank"),
            *(settings.to_json(), str(output)),
        ]
        error = None
        progress = _Progress(settings, output)
        with progress.shown():
            try:
                launcher.run_ranks(
                    [command] * len(env),
                    timeout_s=settings.seconds + _SLACK_S,
                    log_dir=directory,
                    env=env,
                    joined=joined,
                )
            except launcher.RankError as failed:
                error = str(failed)
        counts, begun = progress.read()
        print(f"{settings.mode}: {_text(counts)}", flush=True)
        for failure in counts["failures"]:
            print(
                f"WRONG: {failure['wrong']} elements of {failure['text']}\n  again: "
                f"{_again(settings, failure['program'])}",
                flush=True,
            )
        if error is not None:
            print(
                f"A RANK FAILED in {begun}\n  again: {_again(settings, counts['programs'])}\n"
                f"{error}",
                flush=True,
            )
        return {**counts, "error": error}


def _again(settings: Settings, program: int) -> str:
    """Returns the command that runs a program again."""
    number = settings.program if settings.program is not None else program
    return (
        f"python -m jax_intranode soak --platform {settings.platform} --devices "
        f"{settings.devices} --mode {settings.mode} --seed {settings.seed} --program {number}"
    )


def _text(counts: dict[str, Any]) -> str:
    return (
        f"{counts['programs']} programs, {counts['runs']} runs, {counts['operations']} operations "
        f"in our kernels, {counts['elements']:.3g} elements compared, {counts['wrong']} wrong"
    )


class _Progress:
    """Shows what rank 0 has written: on a terminal in one line, else in a line now and then."""

    def __init__(self, settings: Settings, output: Path) -> None:
        self._settings = settings
        self._output = output
        self._started = time.monotonic()

    def read(self) -> tuple[dict[str, Any], str]:
        """Returns the last counts, and the program that began last."""
        counts: dict[str, Any] = dict.fromkeys(
            ("programs", "runs", "operations", "elements", "wrong"), 0
        )
        counts["failures"] = []
        begun = "no program yet"
        for line in self._output.read_text().splitlines() if self._output.exists() else ():
            with contextlib.suppress(ValueError):  # a line that is being written
                value = json.loads(line)
                if "begun" in value:
                    begun = value["begun"]
                else:
                    counts = value
        return counts, begun

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the progress until the end of the block."""
        over = threading.Event()
        thread = threading.Thread(target=self._show, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _show(self, over: threading.Event) -> None:
        terminal = sys.stderr.isatty()
        while not over.wait(1 if terminal else _LINES_S):
            left = max(0, self._settings.seconds - (time.monotonic() - self._started))
            text = (
                f"{self._settings.mode}, {int(left) // 60}:{int(left) % 60:02} left: "
                f"{_text(self.read()[0])}"
            )
            if terminal:
                sys.stderr.write(f"\r\x1b[K{text[: os.get_terminal_size(2).columns - 1]}")
                sys.stderr.flush()
            else:
                print(text, flush=True)
        if terminal:
            sys.stderr.write("\r\x1b[K")
