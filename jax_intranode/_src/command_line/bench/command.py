"""The command `bench`: the parent process, which starts the ranks and collects their results."""

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Mapping
from typing import Any

from jax_intranode._src.command_line import machine, source_tree
from jax_intranode._src.command_line.bench import options, record
from jax_intranode._src.command_line.bench.options import add_arguments as add_arguments
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.runs import ProgressLine, end_by_exit, run_function

DESCRIPTION = (
    "Measures an operation of this package and the same one of jax.lax, and compares their results "
    "with those of numpy. Starts a process per device and then one process with all devices."
)
EXAMPLES = """\
python -m jax_intranode bench psum                                all sizes up to 16 MB (CPU: 64 KB)
python -m jax_intranode bench psum -b 1K -e 64K -f 2 -d float32,bfloat16
python -m jax_intranode bench all_gather_matmul --shapes 4096,8192,3584 --json rows.json
python -m jax_intranode bench psum --platform cpu --devices 4 --plot psum.png"""


def run(arguments: argparse.Namespace) -> int:
    """Measures in the chosen modes, prints the tables and writes the files.

    Returns:
        The exit code: 0 if all elements were right in all modes, 1 if one was wrong.
    """
    signal.signal(signal.SIGTERM, end_by_exit)
    settings = options.settings(arguments, *machine.platform_and_devices(arguments))
    result: dict[str, Any] = {"version": record.VERSION, "header": {}, "rows": []}
    peers = source_tree.load("bench_peers.registry", "--peers") if arguments.peers else None
    measurements = settings[0].matmuls() or settings[0].measurements() or [settings[0].name]
    of_peers = peers.count(arguments.peers, settings[0]) if peers is not None else 0
    line = ProgressLine(sys.stderr, len(settings) * len(measurements) + of_peers)
    for of_mode in settings:
        variables = options.environment(arguments)
        measured = run_mode(of_mode, variables, arguments.timeout, line)
        result["header"] = {
            **measured["header"],
            "mode": arguments.mode,
            "driver": machine.driver()["version"],
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
    if options.is_program(arguments.name):
        good = all(row["difference"] is not None for row in result["rows"])
        print(f"# results are finite numbers: {'OK' if good else 'FAILED'}", flush=True)
    else:
        good = _are_right(result["rows"])
    return 0 if good else 1


def run_mode(
    settings: Settings,
    variables: Mapping[str, str],
    timeout_s: float,
    line: ProgressLine,
    shows_table: bool = True,
) -> dict[str, Any]:
    """Runs the ranks of one mode and returns the "header" and the "rows" of the JSON file."""
    return run_function(
        "jax_intranode._src.command_line.bench.measure:measure",
        dataclasses.asdict(settings),
        settings.job,
        variables=variables,
        timeout_s=timeout_s,
        line=line,
        shows_log=shows_table,
    )


def _are_right(rows: list[dict[str, Any]]) -> bool:
    """Prints the largest errors against float64, and whether all elements were right."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        rounded = [row for row in rows if row["dtype"] == dtype and row["error"] is not None]
        if rounded:
            ours, lax = (max(row[key] for row in rounded) for key in ("error", "lax_error"))
            print(f"# {dtype}: relative rms error against float64: ours {ours:.2e}, lax {lax:.2e}")
    columns = ("wrong", "lax_wrong", "graph_wrong")
    wrong = sum(row.get(column) or 0 for row in rows for column in columns)
    print(f"# wrong elements: {wrong} {'FAILED' if wrong else 'OK'}", flush=True)
    return wrong == 0
