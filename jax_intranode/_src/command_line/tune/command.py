"""The command `tune`: the parent process, which starts the ranks and writes the file."""

import argparse
import dataclasses
import datetime
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_intranode._src.command_line import launcher
from jax_intranode._src.command_line.bench import machine, record
from jax_intranode._src.command_line.bench.command import end_by_exit, run_mode
from jax_intranode._src.command_line.bench.options import integer_from
from jax_intranode._src.command_line.bench.progress import ProgressLine
from jax_intranode._src.command_line.bench.settings import MODES, Settings
from jax_intranode._src.command_line.tune import matmuls
from jax_intranode._src.command_line.wrong_input import WrongInput, check_writable
from jax_intranode._src.native import definitions
from jax_intranode._src.selection import table, tuning
from jax_intranode._src.selection.overlap import Profile

DESCRIPTION = (
    "Measures this node: which algorithm and which launch is fastest for each collective, process "
    "mode, kind of dtype, number of ranks and size, and up to which size that is faster than "
    "jax.lax; and on Hopper GPUs the constants of the overlap model. Writes one file, which a "
    "program uses with JAX_INTRANODE_TUNING=FILE. All processes need the same file. What there is "
    "no time for keeps the shipped values."
)
EXAMPLES = """\
python -m jax_intranode tune                                 writes jax_intranode_tuning.json
python -m jax_intranode tune -o node.json --minutes 30
python -m jax_intranode tune --platform cpu --devices 4 --mode single-process"""

OPERATIONS = ("psum", "psum_scatter", "all_gather", "all_to_all")
# Longer chains take long to compile on GPUs, and to run on the CPU.
_ITERATIONS = {"gpu": 9, "cpu": 11}
_CHAIN = {"gpu": 64, "cpu": 8}
# The measurement of the profile takes this many seconds, if there are as many.
_MATMULS_S = 235
# What starting the ranks and the last measurement may take beyond the time of a job.
_SLACK_S = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add = parser.add_argument
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("jax_intranode_tuning.json"),
        metavar="FILE",
        help="the file (default jax_intranode_tuning.json)",
    )
    add(
        "--minutes",
        type=_minutes,
        help="how long to measure, about (default 20 on GPUs, 4 on CPU devices)",
    )
    add(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto chooses GPUs if there are any (default auto)",
    )
    add(
        "--devices",
        type=integer_from(2),
        help="number of devices (default all GPUs, or 2 CPU devices); smaller groups are measured, "
        "too",
    )
    add(
        "--mode",
        choices=(*MODES, "both"),
        default="both",
        help="one process per device, a single process for all devices, or both (default both)",
    )
    add(
        "--operations",
        type=_operations,
        default=list(OPERATIONS),
        metavar="NAME[,NAME...]",
        help=f"the collectives to measure (default {','.join(OPERATIONS)})",
    )
    add("--no-matmuls", action="store_true", help="do not measure the overlap model's constants")
    add("--probe", type=Path, metavar="FILE", help="a compiled tools/fused_probe.cu")
    add(
        "--compare",
        action="store_true",
        help="print the plans of bench's reference shapes by today's and by the measured "
        "constants, and time those that differ",
    )
    add(
        "--print-profile",
        action="store_true",
        help="print the overlap model's constants as source for overlap/profiles.py",
    )


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return value


def _operations(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in OPERATIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(OPERATIONS)}")
    return names


def worlds(devices: int) -> list[int]:
    """Returns the world sizes to measure on a node, the most important one first."""
    most = min(devices, definitions.MAX_WORLD_SIZE)
    return sorted({most, *(n for n in (2, 4, 8) if n <= most)}, reverse=True)


def jobs(platform: str, devices: int, modes: list[str]) -> Iterator[Settings]:
    """Yields the settings of each job."""
    for world in worlds(devices):
        for mode in modes:
            yield Settings(
                name="psum",  # of all operations, which the rank gets by name
                sizes=[],
                leaves=1,
                dtypes=[],
                iterations=_ITERATIONS[platform],
                warmup_iterations=1,
                chain=_CHAIN[platform],
                mode=mode,
                devices=world,
                platform=platform,
            )


def run(arguments: argparse.Namespace) -> int:
    """Measures and writes the file.

    Returns:
        The exit code: 1 if ranks failed, else 0.

    Raises:
        WrongInput: the arguments cannot be served.
    """
    signal.signal(signal.SIGTERM, end_by_exit)
    check_writable("--output", arguments.output)
    gpus, driver = machine.gpus_and_driver()
    platform = machine.chosen_platform(arguments.platform, gpus)
    devices = arguments.devices or (gpus if platform == "gpu" else 2)
    if platform == "gpu" and not 2 <= devices <= gpus:
        raise WrongInput(
            f"a group has 2 or more GPUs; this node has {gpus}, and {devices} are asked for: "
            "choose --devices, or --platform cpu"
        )
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        print(
            f"# other programs run on this machine (load {load:.1f} on {cores} cores): times will "
            "be off",
            flush=True,
        )
    started = time.monotonic()
    seconds = 60 * (arguments.minutes or {"gpu": 20, "cpu": 4}[platform])
    of_matmuls = 0.0
    if platform == "gpu" and not arguments.no_matmuls:
        of_matmuls = min(_MATMULS_S, seconds / 2)
    end_of_collectives = started + seconds - of_matmuls

    modes = list(MODES) if arguments.mode == "both" else [arguments.mode]
    todo = list(jobs(platform, devices, modes))
    line = ProgressLine(sys.stderr, _expected_measurements(platform, arguments.operations, todo))
    found: dict[str, Any] = {"tables": [], "measurements": [], "left_out": []}
    for number, settings in enumerate(todo):
        left = end_of_collectives - time.monotonic()
        allowed = max(0.0, left) / (len(todo) - number)
        try:
            of_job = run_mode(
                settings,
                # What is in force must not decide what is measured.
                {tuning.VARIABLE: "", "JAX_INTRANODE_ALGORITHM": "", "JAX_INTRANODE_STRICT": ""},
                allowed + _SLACK_S,
                line,
                module="jax_intranode._src.command_line.tune.rank",
                arguments=(str(allowed), ",".join(arguments.operations)),
            )
        except launcher.RankError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        found["device"] = of_job["device"]
        for name in ("tables", "measurements", "left_out"):
            found[name] += of_job[name]

    profile: Profile | str = "not asked for" if platform == "gpu" else "CPU devices"
    if of_matmuls:
        limit = max(started + seconds - time.monotonic(), of_matmuls)
        profile = matmuls.measure(limit, arguments.probe, arguments.compare)
    if isinstance(profile, str):
        print(f"# the overlap model's constants were not measured: {profile}")
    elif arguments.print_profile:
        print(matmuls.to_source(profile))
    tuning.write(
        arguments.output,
        {
            "platform": platform,
            "device": found["device"],
            "devices": devices,
            "versions": {**record.library_versions(), "driver": driver},
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - started, 1),
            "command": record.command_line(sys.argv),
            "tables": found["tables"],
            "profile": None if isinstance(profile, str) else dataclasses.asdict(profile),
            "left_out": found["left_out"],
            "measurements": found["measurements"],
        },
    )
    print(summary(tuning.read(str(arguments.output)), found["left_out"]))
    return 0


def _expected_measurements(platform: str, operations: list[str], todo: list[Settings]) -> int:
    """The number of sizes that the progress line counts to; the search may end earlier."""
    return len(todo) * len(operations) * 2 * (8 if platform == "gpu" else 5)


def summary(tuned: tuning.Tuning, left_out: list[str]) -> str:
    """Returns up to which size each table is faster than lax, and what is shipped."""
    hardware = table.hardware_of(tuned.platform, tuned.device)
    lines = [f"{'operation':<14} {'packets':<8} {'ranks':>5} {'mode':<7} {'shipped':>10} tuned"]
    for (mode, operation, packets, ranks), rows in tuned.rows.items():
        shipped = table.rows(hardware, mode, operation, packets, ranks)
        upto = shipped[-1].nbytes if shipped else 0
        parts = [f"{row.algorithm} up to {row.nbytes}" for row in rows] or ["jax.lax"]
        lines.append(
            f"{operation:<14} {packets:<8} {ranks:>5} {mode:<7} {upto:>10} {', '.join(parts)}"
        )
    lines += [f"not measured for want of time: {what}" for what in left_out]
    lines += [str(tuned), f"To use it: export {tuning.VARIABLE}={Path(tuned.path).absolute()}"]
    return "\n".join(lines)
