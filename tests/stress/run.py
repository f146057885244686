"""Runs random programs, and shows their progress."""

import argparse
import json
import os
import random
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import stress
from jax_intranode._src.command_line import machine, options
from jax_intranode._src.command_line.launcher import runs
from jax_intranode._src.command_line.options import Failed, WrongInput
from stress import calls, chains

DESCRIPTION = (
    "Runs random programs and compares every result with jax.lax, or with sums in rank order where "
    "bits are promised. Starts one process with all devices and then a process per device. Exits "
    "with 1 if a value was wrong or a rank failed."
)
EXAMPLES = """\
python tests/stress/run.py                               one minute, half of it in each mode
python tests/stress/run.py --minutes 30 --json counts.json
python tests/stress/run.py --platform cpu --devices 8 --mode single-process
python tests/stress/run.py --seed 7 --program 123        that program only"""

# How often a line of progress is printed where the output is not a terminal.
_LINES_S = 30
# What starting, compiling and comparing may take beyond the time that was asked for.
_SLACK_S = 600


def _parser() -> argparse.ArgumentParser:
    parser = options.Parser(
        prog="python tests/stress/run.py",
        description=textwrap.fill(DESCRIPTION, 80),
        epilog="examples:\n" + textwrap.indent(EXAMPLES, "  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    minutes = options.positive_number()
    add("--minutes", type=minutes, default=1, help="how long to run, in all (default 1)")
    add("--seed", type=int, help="makes the same programs again (default: a random one)")
    add("--program", type=int, metavar="NUMBER", help="run only the program with this number")
    names = options.names_from((*calls.OPERATIONS, *calls.COMPARED))
    text = "call only these, collectives with arrays of all sizes"
    add("--operations", type=names, default=[], metavar="NAME[,NAME...]", help=text)
    add("--devices", type=int, help="number of devices (default all GPUs, or 4 CPU devices)")
    options.add_platform(parser)
    options.add_mode(parser)
    add("--json", type=options.new_file, metavar="FILE", help="write the counts to FILE")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs random programs in the chosen modes; returns the exit code."""
    platform, devices = _platform_and_devices(arguments)
    if not 2 <= devices <= 8:
        raise WrongInput(f"{devices} devices: use 2 to 8")
    if arguments.program is not None and arguments.seed is None:
        raise WrongInput("--program needs the --seed of the run that it was part of")
    signal.signal(signal.SIGTERM, runs.end_by_exit)
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    modes = tuple(reversed(runs.MODES)) if arguments.mode == "both" else (arguments.mode,)
    if platform == "gpu" and machine.has_one_gpu():
        if arguments.mode not in ("both", runs.PROCESS_PER_DEVICE):
            raise WrongInput(f"--mode {arguments.mode}: this needs 2 GPUs, and there is 1 here")
        modes = (runs.PROCESS_PER_DEVICE,)
    seconds = arguments.minutes * 60 / len(modes)
    print(f"# random programs on {devices} x {platform}, --seed {seed}", flush=True)
    results = []
    for mode in modes:
        what = {
            "seed": seed,
            "seconds": seconds,
            "program": arguments.program,
            "operations": arguments.operations,
        }
        of_mode = _Run(runs.Devices(platform, devices, mode), what)
        results.append({"mode": mode, **of_mode.run()})
    if arguments.json is not None:
        header = {"seed": seed, "platform": platform, "devices": devices}
        arguments.json.write_text(json.dumps({**header, "modes": results}, indent=2) + "\n")
    wrong = any(result["wrong"] or result["error"] for result in results)
    print(f"# {'FAILED' if wrong else 'OK'}", flush=True)
    return 1 if wrong else 0


def _platform_and_devices(arguments: argparse.Namespace) -> tuple[str, int]:
    if machine.chosen_platform(arguments.platform) == "gpu" and machine.has_one_gpu():
        return "gpu", arguments.devices or 2  # which share it
    platform, devices = machine.platform_and_devices(arguments, fewest=2)
    return platform, 4 if platform == "cpu" and arguments.devices is None else devices


class _Run(runs.ProgressLine):
    """The run of one mode, and its progress."""

    def __init__(self, job: runs.Devices, what: dict[str, Any]) -> None:
        """Takes the arguments of chains.run."""
        super().__init__(sys.stderr, 0)
        self._job, self._arguments, self._seconds = job, what, what["seconds"]
        self._heard: dict[str, Any] = {"begun": "no program yet", "counts": chains.no_counts()}
        self._shown = self.started

    def run(self) -> dict[str, Any]:
        """Runs the ranks; returns the last counts, and as "error" what a rank has printed."""
        variables = {
            **stress.importable(),
            # A rank that hangs ends with a message, and soon.
            "JAX_INTRANODE_TIMEOUT_S": os.environ.get("JAX_INTRANODE_TIMEOUT_S", "120"),
            # XLA would leave out roundings between operations that it fuses.
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false",
        }
        error = None
        try:
            runs.run_function(
                "stress.chains:run",
                self._arguments,
                self._job,
                timeout_s=self._seconds + _SLACK_S,
                variables=variables,
                line=self,
                hear=self._heard.update,
            )
        except runs.RankError as failed:
            error = str(failed)
        counts = self._heard["counts"]
        print(f"{self._job.mode}: {self._so_far()}", flush=True)
        for failure in counts["failures"]:
            print(f"WRONG: {failure['wrong']} elements of {failure['text']}")
            print(self._again(failure["program"]), flush=True)
        if error is not None:
            print(f"A RANK FAILED in {self._heard['begun']}\n{self._again(counts['programs'])}")
            print(error, flush=True)
        return {**counts, "error": error}

    def _again(self, program: int) -> str:
        """The command that runs a program again."""
        platform, devices, mode = self._job
        only, operations = self._arguments["program"], ",".join(self._arguments["operations"])
        return (
            f"  again: python tests/stress/run.py --platform {platform} --devices {devices} "
            f"--mode {mode} --seed {self._arguments['seed']} "
            f"--program {program if only is None else only}"
            + (f" --operations {operations}" if operations else "")
        )

    def _so_far(self) -> str:
        counts = self._heard["counts"]
        return (
            f"{counts['programs']} programs, {counts['runs']} runs, {counts['operations']} "
            f"operations in our kernels, {counts['elements']:.3g} elements compared, "
            f"{counts['wrong']} wrong"
        )

    def text(self) -> str:
        left = runs.minutes(max(0, self._seconds - (time.monotonic() - self.started)))
        return f"{self._job.mode}, {left} left: {self._so_far()}"

    def show(self) -> None:
        """Shows the line, or prints it now and then where the output is not a terminal."""
        super().show()
        if not sys.stderr.isatty() and time.monotonic() - self._shown > _LINES_S:
            self._shown = time.monotonic()
            print(self.text(), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 if something was wrong, or 2 for wrong arguments."""
    try:
        return run(_parser().parse_args(argv))
    except (Failed, WrongInput) as error:
        sys.stderr.write(f"run.py: {error}\n")
        return 2 if isinstance(error, WrongInput) else 1


if __name__ == "__main__":
    sys.exit(main())
