"""The command `bench`: the parent process, which starts the ranks and collects their results."""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_intranode._src.command_line import launcher, source_tree
from jax_intranode._src.command_line.bench import machine, options, record
from jax_intranode._src.command_line.bench.options import add_arguments as add_arguments
from jax_intranode._src.command_line.bench.progress import ProgressLine, following
from jax_intranode._src.command_line.bench.settings import PROCESS_PER_DEVICE, Settings

DESCRIPTION = (
    "Measures an operation of this package and the same one of jax.lax, and compares their results "
    "with those of numpy. Starts a process per device and then one process with all devices."
)
EXAMPLES = """\
python -m jax_intranode bench psum                                all sizes up to 16 MB (CPU: 64 KB)
python -m jax_intranode bench psum -b 1K -e 64K -f 2 -d float32,bfloat16
python -m jax_intranode bench all_gather_matmul --shapes 4096,8192,3584 --json rows.json
python -m jax_intranode bench psum --platform cpu --devices 4 --plot psum.png"""


def end_by_exit(signal_number: int, frame: object) -> None:
    """Ends the process by sys.exit, so that the ranks are ended too."""
    del frame
    signal.signal(signal_number, signal.SIG_IGN)  # a second signal would leave ranks behind
    sys.exit(128 + signal_number)


def run(arguments: argparse.Namespace) -> int:
    """Measures in the chosen modes, prints the tables and writes the files.

    Args:
        arguments: the arguments as parsed by a parser that `options.add_arguments` has set up.

    Returns:
        The exit code: 0 if all elements were right in all modes, 1 if one was wrong or a rank
        failed, 2 if the options can't be served.
    """
    signal.signal(signal.SIGTERM, end_by_exit)
    gpus, driver = machine.gpus_and_driver()
    platform = machine.chosen_platform(arguments.platform, gpus)
    devices = arguments.devices or (gpus if platform == "gpu" else 2)
    try:
        settings = options.settings(arguments, platform, devices, gpus)
    except ValueError as refusal:
        sys.stderr.write(f"python -m jax_intranode bench: {refusal}\n")
        return 2

    result: dict[str, Any] = {"version": record.VERSION, "header": {}, "rows": []}
    peers = source_tree.load("bench_peers.registry", "--peers") if arguments.peers else None
    measurements = settings[0].matmuls() or settings[0].measurements() or [settings[0].name]
    of_peers = peers.count(arguments.peers, settings[0]) if peers is not None else 0
    line = ProgressLine(sys.stderr, len(settings) * len(measurements) + of_peers)
    for settings_of_mode in settings:
        try:
            measured = run_mode(
                settings_of_mode, options.environment(arguments), arguments.timeout, line
            )
        except launcher.RankError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        result["header"] = {
            **measured["header"],
            "mode": arguments.mode,
            "driver": driver,
            "command": record.command_line(sys.argv),
        }
        result["rows"] += measured["rows"]
    result["peers"] = {"versions": [], "rows": []}
    if peers is not None:
        result["peers"] = peers.measure(arguments.peers, settings[0], arguments.timeout, line)
        print(peers.table_of(result["peers"], result["rows"]), end="", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.plot is not None:
        source_tree.load("bench_plots.command", "--plot").draw([result], arguments.plot)
    is_program = options.is_program(arguments.name)
    return (_verdict_of_programs if is_program else _verdict)(result)


def _print_errors(rows: Sequence[dict[str, Any]]) -> None:
    """Prints, for each dtype, the largest error of both libraries against float64."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        rounded = [row for row in rows if row["dtype"] == dtype and row["error"] is not None]
        if rounded:
            ours, lax = (max(row[key] for row in rounded) for key in ("error", "lax_error"))
            print(f"# {dtype}: relative rms error against float64: ours {ours:.2e}, lax {lax:.2e}")


def _verdict(result: dict[str, Any]) -> int:
    """Prints whether all elements were right, and returns the exit code."""
    _print_errors(result["rows"])
    columns = ("wrong", "lax_wrong", "graph_wrong")
    wrong = sum(row.get(column) or 0 for row in result["rows"] for column in columns)
    print(f"# wrong elements: {wrong} {'FAILED' if wrong else 'OK'}", flush=True)
    return 1 if wrong else 0


def _verdict_of_programs(result: dict[str, Any]) -> int:
    """Prints whether both libraries returned finite numbers, and returns the exit code."""
    finite = all(row["difference"] is not None for row in result["rows"])
    print(f"# results are finite numbers: {'OK' if finite else 'FAILED'}", flush=True)
    return 0 if finite else 1


def run_mode(
    settings: Settings,
    variables: dict[str, str],
    timeout_s: float,
    line: ProgressLine,
    shows_table: bool = True,
    module: str = "jax_intranode._src.command_line.bench.rank",
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs the ranks of one mode and returns what rank 0 wrote: for `bench` "header" and "rows".

    Args:
        settings: what to measure.
        variables: environment variables for the ranks.
        timeout_s: time limit for all ranks together.
        line: the progress line.
        shows_table: whether to print the table of rank 0 while it grows.
        module: the program of a rank.
        arguments: what its command line has besides settings and files.

    Raises:
        launcher.RankError: a rank failed, or the time limit came first.
    """
    joined = settings.mode == PROCESS_PER_DEVICE
    env = [variables] * (settings.devices if joined else 1)
    if settings.platform == "cpu":
        # JAX_NUM_CPU_DEVICES overrides the number of host devices in XLA_FLAGS.
        cpus = "1" if joined else str(settings.devices)
        env = [{**rank, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": cpus} for rank in env]
    with tempfile.TemporaryDirectory(prefix="jax_intranode_bench_") as name:
        directory = Path(name)
        output, begun = directory / "rows.json", directory / "begun"
        command = [
            *(sys.executable, "-P", "-X", "faulthandler", "-m", module),
            *(settings.to_json(), str(output), str(begun), *arguments),
        ]
        with following(directory / "rank0.log" if shows_table else None, begun, line):
            launcher.run_ranks(
                [command] * len(env),
                timeout_s=timeout_s,
                log_dir=directory,
                env=env,
                joined=joined,
            )
        return json.loads(output.read_text())
