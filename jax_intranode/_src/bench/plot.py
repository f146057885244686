"""The picture: time and, below it, the ratio to lax over the size. matplotlib is optional."""

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jax_intranode._src.bench import matmul_plot, report
from jax_intranode._src.bench.colours import COLOURS, OTHER
from jax_intranode._src.bench.matmul_report import is_matmul
from jax_intranode._src.bench.settings import PROCESS_PER_DEVICE, SINGLE_PROCESS

_MARKERS: dict[str | None, str] = {PROCESS_PER_DEVICE: "o", SINGLE_PROCESS: "s", None: "^"}


class _Point(NamedTuple):
    """A time in microseconds, lax's time as called divided by it, and what ours ran as."""

    size: int
    us: float
    ratio: float
    algorithm: str | None = None


@dataclass
class _Line:
    """One line of the picture.

    Attributes:
        label: for the legend.
        library: which gives the colour.
        mode: which gives the marker; None of a peer.
        in_graph: dashed, for times in a graph.
        points: in the order of their sizes.
        width: of the line, which tells dtypes and files apart.
    """

    label: str
    library: str
    mode: str | None
    in_graph: bool
    points: list[_Point]
    width: float = 1.8

    def columns(self, *names: str) -> list[list[Any]]:
        """The points' fields of these names, each as a list."""
        return [[getattr(point, name) for point in self.points] for name in names]


def why_not() -> str | None:
    """Returns why nothing can be drawn; None if it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "a plot needs matplotlib, which is not installed: pip install 'jax_intranode[plot]'"
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command `plot`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="rows.json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.png")


def run(arguments: argparse.Namespace) -> int:
    """Draws JSON files of the benchmark into one picture; returns the exit code."""
    try:
        results = [report.read(file) for file in arguments.files]
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    refusal = why_not()
    if refusal is None and not matmul_plot.is_of_matmuls(results):
        if any(is_matmul(row) for result in results for row in result["rows"]):
            refusal = "collective matmuls and other operations can't be drawn into one picture"
        elif not any(_lines(results)):
            refusal = "the files have no rows of operations: programs can't be drawn"
    if refusal is not None:
        sys.stderr.write(f"{refusal}\n")
        return 2
    draw(results, arguments.output)
    return 0


def draw(results: Sequence[dict[str, Any]], file: Path) -> None:
    """Draws what the benchmark found.

    Args:
        results: contents of its JSON files.
        file: the PNG to write.
    """
    if matmul_plot.is_of_matmuls(results):
        matmul_plot.draw(results, file, _title(results), _details(results))
        return
    # Without pyplot: no window, no state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    lines = list(_lines(results))
    figure = Figure(figsize=(8.4, 6.4 + 0.1 * len(lines)), dpi=200, layout="constrained")
    times, ratios = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    times.margins(y=0.1)
    for line in lines:
        style = {
            "color": COLOURS.get(line.library, OTHER),
            "linestyle": "--" if line.in_graph else "-",
            "linewidth": line.width,
            "zorder": 3 if line.library == "ours" else 2,
            "marker": _MARKERS[line.mode],
            "markersize": 4,
            "markerfacecolor": "white" if line.in_graph else None,
        }
        times.plot(*line.columns("size", "us"), label=line.label, **style)
        # Like with like: lax is measured as called.
        if line.library != "lax" and not line.in_graph:
            ratios.plot(*line.columns("size", "ratio"), **style)
    _mark_algorithms(times, lines)
    sizes = sorted({point.size for line in lines for point in line.points})
    times.set(xscale="log", yscale="log", ylabel="time of a call (µs)")
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    times.yaxis.set_major_formatter(lambda us, position: f"{us:g}")
    times.yaxis.set_minor_locator(NullLocator())
    ratios.set(ylabel="lax / ours, as called", xlabel="size")
    ratios.axhline(1, color=COLOURS["lax"], linewidth=1)
    ratios.set_ylim(bottom=0)
    shown = sizes[:: max(1, len(sizes) // 10)]
    ratios.set_xticks(shown, [_size_text(size) for size in shown])
    ratios.minorticks_off()
    for axes in (times, ratios):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(results), fontsize=11, fontweight="bold")
    times.set_title(_details(results), fontsize=8)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(file, format="png")


def _lines(results: Sequence[dict[str, Any]]) -> Iterator[_Line]:
    """Yields the lines of all files."""
    several_dtypes = len({row["dtype"] for result in results for row in _rows(result)}) > 1
    number = 0
    for result in results:
        prefix = f"jax {result['header']['jax']}: " if len(results) > 1 else ""
        for dtype in dict.fromkeys(row["dtype"] for row in _rows(result)):
            suffix = f", {dtype}" if several_dtypes else ""
            for line in _lines_of_dtype(result, dtype):
                line.label = f"{prefix}{line.label}{suffix}"
                line.width /= 1 + 0.6 * number
                yield line
            number += 1


def _lines_of_dtype(result: dict[str, Any], dtype: str) -> Iterator[_Line]:
    """Yields the lines of one file and dtype: of each mode, then of each peer."""
    rows = [row for row in _rows(result) if row["dtype"] == dtype]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        for library, key, how in (
            ("ours", "time_us", "as called"),
            ("ours", "graph_time_us", "in a graph"),
            ("lax", "lax_time_us", "as called"),
        ):
            named = key == "time_us"
            points = [
                _Point(
                    row["size"],
                    row[key],
                    row["lax_time_us"] / row[key],
                    row["algorithm"] if named else None,
                )
                for row in rows
                # A logarithm has no place for what is below the clock's resolution.
                if row["mode"] == mode and row[key]
            ]
            if points:
                yield _Line(f"{library} {how}, {mode}", library, mode, how == "in a graph", points)
    lax = {row["size"]: row["lax_time_us"] for row in reversed(rows)}
    of_peers = [row for row in result["peers"]["rows"] if row["dtype"] == dtype]
    for library in dict.fromkeys(row["library"] for row in of_peers):
        points = [
            _Point(row["size"], row["time_us"], lax[row["size"]] / row["time_us"])
            for row in of_peers
            if row["library"] == library
        ]
        yield _Line(f"{library} in a graph", library, None, True, points, width=1.2)


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of operations, of which programs have none."""
    return [row for row in result["rows"] if "size" in row]


def _name(library: str, in_graph: bool) -> str:
    return f"{library} in a graph" if in_graph else f"{library} as called"


def _mark_algorithms(axes: Any, lines: Sequence[_Line]) -> None:
    """Rings each line where its algorithm changes, and names the algorithms once below."""
    lowest: dict[tuple[int, str], float] = {}
    for line in lines:
        before = None
        for size, us, _, algorithm in line.points:
            if algorithm is not None and algorithm != before:
                axes.plot(size, us, "o", markersize=9, fillstyle="none", color=COLOURS["ours"])
                lowest[size, algorithm] = min(us, lowest.get((size, algorithm), us))
            before = algorithm
    for (size, algorithm), us in lowest.items():
        axes.annotate(
            algorithm,
            (size, us),
            xytext=(6, -14),
            textcoords="offset points",
            fontsize=8,
            color=COLOURS["ours"],
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _size_text(size: int) -> str:
    """Returns a size as "64 KB"."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def _title(results: Sequence[dict[str, Any]]) -> str:
    """Returns what was measured on which devices."""
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
        lines.append(f"{report.versions(header)}, {header['date'][:10]}")
        lines += [", ".join(result["peers"]["versions"])] if result["peers"]["versions"] else []
    return "\n".join(lines)
