"""Plots of the benchmark's results of any kind: `python tools/bench.py plot`."""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_peers.registry import is_matmul

from bench_plots import collectives, matmuls
from jax_intranode._src.command_line.bench import report
from jax_intranode._src.command_line.options import WrongInput, new_file

DESCRIPTION = "Draws what `bench --json FILE` has written, several files into one picture."
EXAMPLES = "python tools/bench.py plot rows.json -o rows.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `plot`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="rows.json")
    parser.add_argument("-o", "--output", type=new_file, required=True, metavar="FILE.png")


def run(arguments: argparse.Namespace) -> int:
    """Plots JSON files of the benchmark in one PNG; returns the exit code.

    Raises:
        WrongInput: the files can't be drawn.
    """
    try:
        results = [read(file) for file in arguments.files]
    except OSError as error:
        raise WrongInput(
            f"{error.filename}: {error.strerror}: name files that `bench --json` has written"
        ) from error
    except ValueError as error:
        raise WrongInput(str(error)) from error
    check_can_draw("plot")
    if not matmuls.all_are_matmuls(results):
        if any(is_matmul(row) for result in results for row in result["rows"]):
            raise WrongInput(
                "collective matmuls and other operations can't be drawn in one plot: draw each "
                "alone"
            )
        if not any(collectives.lines(results)):
            raise WrongInput(
                "the files have no rows of operations, and programs can't be plotted: measure psum"
            )
    draw(results, arguments.output)
    return 0


def check_can_draw(what: str) -> None:
    """Raises WrongInput if matplotlib is not installed, which draws what was asked for."""
    if importlib.util.find_spec("matplotlib") is None:
        raise WrongInput(f"{what} needs matplotlib: pip install 'jax_intranode[plot]'")


def read(path: Path) -> dict[str, Any]:
    """Reads a JSON file that the benchmark wrote.

    Raises:
        ValueError: the benchmark did not write this file, or wrote it in another layout.
    """
    try:
        result = json.loads(path.read_text())
        version = result["version"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not what `bench --json` writes: measure again") from None
    if version != report.VERSION:
        raise ValueError(f"{path} has layout {version}, not {report.VERSION}: measure again")
    return result


def draw(
    results: Sequence[dict[str, Any]], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Plots results in one PNG.

    Args:
        results: contents of JSON files of the benchmark, all of collectives or all of collective
            matmuls.
        file: the PNG to write.
        metadata: texts to store in the PNG.
    """
    kind = matmuls if matmuls.all_are_matmuls(results) else collectives
    figure = kind.draw(results, _details(results))
    figure.suptitle(_title(results), fontsize=11, fontweight="bold")
    figure.savefig(file, format="png", metadata=metadata)


def _title(results: Sequence[dict[str, Any]]) -> str:
    """Returns the operations and devices."""
    headers = [result["header"] for result in results]
    whats = dict.fromkeys(
        f"{h['operation']}{' backward' if h.get('backward') else ''}, "
        f"{h['devices']} x {h['device']}"
        for h in headers
    )
    rows = [row for result in results for row in result["rows"]]
    dtypes = dict.fromkeys(row["dtype"] for row in rows if "dtype" in row)
    return f"{'; '.join(whats)}, {', '.join(dtypes)}"


def _details(results: Sequence[dict[str, Any]]) -> str:
    """Returns the versions and the date of each file."""
    lines = []
    for result in results:
        header = result["header"]
        lines.append(f"{report.versions_text(header)}, {header['date'][:10]}")
        lines += [", ".join(result["peers"]["versions"])] if result["peers"]["versions"] else []
    return "\n".join(lines)
