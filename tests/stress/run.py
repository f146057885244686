"""Runs random programs, and compares every result with jax.lax or with sums in rank order.

Starts one process with all devices and then a process per device. Exits with 1 as soon as a value
is wrong.
"""

import argparse
import os
import random
import signal
import sys
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

# How often a line of progress is printed.
_LINES_S = 30
# What starting, compiling and comparing may take beyond the time that was asked for.
_SLACK_S = 600


def _parser() -> argparse.ArgumentParser:
    parser = options.Parser(prog="python tests/stress/run.py", description=__doc__)
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
    print(f"# random programs on {devices} x {platform}, --seed {seed}", flush=True)
    what = {
        "seed": seed,
        "seconds": arguments.minutes * 60 / len(modes),
        "program": arguments.program,
        "operations": arguments.operations,
    }
    right = [_run(runs.Devices(platform, devices, mode), what) for mode in modes]
    print(f"# {'OK' if all(right) else 'FAILED'}", flush=True)
    return 0 if all(right) else 1


def _platform_and_devices(arguments: argparse.Namespace) -> tuple[str, int]:
    if machine.chosen_platform(arguments.platform) == "gpu" and machine.has_one_gpu():
        return "gpu", arguments.devices or 2  # which share it
    platform, devices = machine.platform_and_devices(arguments, fewest=2)
    return platform, 4 if platform == "cpu" and arguments.devices is None else devices


def _run(job: runs.Devices, what: dict[str, Any]) -> bool:
    """Runs a mode with these arguments of chains.run, and shows its progress now and then."""
    heard: dict[str, Any] = {"begun": "no program yet", "counts": chains.no_counts()}
    shown = time.monotonic()

    def show() -> None:
        text = "{programs} programs, {runs} runs, {operations} operations in our kernels, "
        text += "{elements:.3g} elements compared"
        print(f"{job.mode}: {text.format(**heard['counts'])}", flush=True)

    def hear(message: dict[str, Any]) -> None:
        nonlocal shown
        heard.update(message)
        if time.monotonic() - shown > _LINES_S:
            shown = time.monotonic()
            show()

    variables = {
        **stress.importable(),
        # A rank that hangs ends with a message, and soon.
        "JAX_INTRANODE_TIMEOUT_S": os.environ.get("JAX_INTRANODE_TIMEOUT_S", "120"),
        # XLA would leave out roundings between operations that it fuses.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false",
    }
    limit_s = what["seconds"] + _SLACK_S
    try:
        runs.run_function(
            "stress.chains:run", what, job, timeout_s=limit_s, variables=variables, hear=hear
        )
    except runs.RankError as failed:
        number = what["program"] or heard["counts"]["programs"]
        again = f"python tests/stress/run.py --platform {job.platform} --devices {job.size}"
        again += f" --mode {job.mode} --seed {what['seed']} --program {number}"
        again += f" --operations {','.join(what['operations'])}" * bool(what["operations"])
        print(f"FAILED: {heard['begun']}\n  again: {again}\n{failed}", flush=True)
        return False
    finally:
        show()
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 if something was wrong, or 2 for wrong arguments."""
    try:
        return run(_parser().parse_args(argv))
    except (Failed, WrongInput) as error:
        sys.stderr.write(f"run.py: {error}\n")
        return 2 if isinstance(error, WrongInput) else 1


if __name__ == "__main__":
    sys.exit(main())
