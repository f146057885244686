"""The command `tune`: the parent process, which starts the ranks and writes the file."""

import argparse
import dataclasses
import datetime
import signal
import sys
import time
from pathlib import Path
from typing import Any

from jax_intranode._src import timeouts
from jax_intranode._src.command_line import machine, options
from jax_intranode._src.command_line.bench import report
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher import runs
from jax_intranode._src.native import definitions
from jax_intranode._src.operations import COLLECTIVE, NORM, of_kind
from jax_intranode._src.selection import generations, table, tuning

DESCRIPTION = (
    "Measures this node: which algorithm and which launch is fastest for each collective, each "
    "norm that follows one, process mode, kind of dtype, number of ranks and size, and up to which "
    "size that is faster than jax.lax. Writes one file, which a program uses with "
    "JAX_INTRANODE_TUNING=FILE. All processes need the same file. What there is no time for keeps "
    "the shipped values."
)
EXAMPLES = """\
python -m jax_intranode tune                                 writes jax_intranode_tuning.json
python -m jax_intranode tune -o node.json --minutes 30
python -m jax_intranode tune --platform cpu --devices 4 --mode single-process"""

OPERATIONS = tuple(record.name for kind in (COLLECTIVE, NORM) for record in of_kind(kind))
# Longer chains take long to compile on GPUs, and to run on the CPU.
_ITERATIONS = {"gpu": 9, "cpu": 11}
_CHAIN = {"gpu": 64, "cpu": 8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = "jax_intranode_tuning.json"
    text = f"the file (default {default})"
    add("-o", "--output", type=options.new_file, default=default, metavar="FILE", help=text)
    text = "how long to measure, about (default 20 on GPUs, 4 on CPU devices)"
    add("--minutes", type=options.positive_number(24 * 60), help=text)
    options.add_platform(parser)
    text = (
        "number of devices (default all GPUs, or 2 CPU devices); smaller groups are measured, too"
    )
    add("--devices", type=options.integer_from(2), help=text)
    options.add_mode(parser)
    names, of_names = "NAME[,NAME...]", options.names_from(OPERATIONS)
    text = f"the collectives and norms to measure (default {','.join(OPERATIONS)})"
    add("--operations", type=of_names, default=list(OPERATIONS), metavar=names, help=text)


def worlds(devices: int) -> list[int]:
    """The world sizes to measure on a node, the most important one first."""
    most = min(devices, definitions.MAX_WORLD_SIZE)
    return sorted({most, *(n for n in (2, 4, 8) if n <= most)}, reverse=True)


def jobs(platform: str, devices: int, modes: list[str]) -> list[Settings]:
    """Returns the settings of each job. The ranks get the operations by name."""
    return [
        Settings(
            name="psum",
            mode=mode,
            devices=world,
            platform=platform,
            iterations=_ITERATIONS[platform],
            warmup_iterations=1,
            chain=_CHAIN[platform],
        )
        for world in worlds(devices)
        for mode in modes
    ]


def run(arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, runs.end_by_exit)
    platform, devices = machine.platform_and_devices(arguments, fewest=2)
    load, cores = machine.load()
    if load > cores / 2:
        print(
            f"# other programs run on this machine (load {load:.1f} on {cores} cores): times will "
            "be off",
            flush=True,
        )
    started = time.monotonic()
    seconds = 60 * (arguments.minutes or {"gpu": 20, "cpu": 4}[platform])
    modes = list(runs.MODES) if arguments.mode == "both" else [arguments.mode]
    todo = jobs(platform, devices, modes)
    found: dict[str, Any] = {"tables": [], "measurements": [], "left_out": []}
    # The progress line counts to as many sizes; the search may end earlier.
    sizes = len(todo) * len(arguments.operations) * 2 * (8 if platform == "gpu" else 5)
    line = runs.ProgressLine(sys.stderr, sizes)
    for number, settings in enumerate(todo):
        left = started + seconds - time.monotonic()
        allowed = max(0.0, left) / (len(todo) - number)
        what = {"seconds": allowed, "operations": arguments.operations}
        of_job = runs.run_function(
            "jax_intranode._src.command_line.tune.sweep:measure",
            {**what, **dataclasses.asdict(settings)},
            settings.job,
            # What is in force must not decide what is measured.
            variables=dict.fromkeys(
                (tuning.VARIABLE, "JAX_INTRANODE_ALGORITHM", "JAX_INTRANODE_STRICT"), ""
            ),
            timeout_s=allowed + timeouts.TUNE_SLACK_S,
            line=line,
            shows_log=True,
        )
        found["device"] = of_job["device"]
        for name in ("tables", "measurements", "left_out"):
            found[name] += of_job[name]

    tuning.write(
        arguments.output,
        {
            "platform": platform,
            "device": found["device"],
            "devices": devices,
            "versions": {**report.library_versions(), "driver": machine.driver()["version"]},
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - started, 1),
            "command": report.command_line(sys.argv),
            "tables": found["tables"],
            "profile": None,
            "left_out": found["left_out"],
            "measurements": found["measurements"],
        },
    )
    print(summary(tuning.read(str(arguments.output)), found["left_out"]))
    return 0


def summary(tuned: tuning.Tuning, left_out: list[str]) -> str:
    """Returns up to which size each table is faster than lax, and what is shipped."""
    hardware = generations.hardware_of(tuned.platform, tuned.device)
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
