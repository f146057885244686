"""The plot of collectives: the time over the size and, below it, the ratio to lax."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench_plots.styles import GRID, LAX, OURS, colour_of, marker_of
from jax_intranode._src.command_line.benefits import size_text

# A larger ratio makes the axis of the ratios logarithmic: a linear axis would flatten the others.
_LARGEST_LINEAR_RATIO = 8


class Point(NamedTuple):
    """One measurement.

    Attributes:
        size: bytes.
        us: the time in microseconds.
        ratio: lax's time from JAX divided by `us`.
        algorithm: what our call ran as; None for other libraries and for times in a graph.
    """

    size: int
    us: float
    ratio: float
    algorithm: str | None = None


@dataclass
class Line:
    """One line of the plot.

    Attributes:
        label: the text in the legend.
        library: determines the colour.
        mode: the process mode, which determines the marker; None for a peer.
        in_graph: whether the times are those in a CUDA graph, drawn as a dashed line.
        points: by increasing size.
        width: the line's width, which distinguishes dtypes and files.
    """

    label: str
    library: str
    mode: str | None
    in_graph: bool
    points: list[Point]
    width: float = 1.8

    def columns(self, *names: str) -> list[list[Any]]:
        """Returns a list for each of these fields of the points."""
        return [[getattr(point, name) for point in self.points] for name in names]


def draw(results: Sequence[dict[str, Any]], details: str) -> Any:
    """Returns the figure, with the details as small text below the place of the title."""
    # Without pyplot, which would need a display or keep state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    drawn = list(lines(results))
    figure = Figure(figsize=(8.4, 6.4 + 0.1 * len(drawn)), dpi=200, layout="constrained")
    times, ratios = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    times.margins(y=0.15)  # space for the names of algorithms
    for line in drawn:
        style = {
            "color": colour_of(line.library),
            "linestyle": "--" if line.in_graph else "-",
            "linewidth": line.width,
            "zorder": 3 if line.library == "ours" else 2,
            "marker": marker_of(line.mode),
            "markersize": 4,
            "markerfacecolor": "white" if line.in_graph else None,
        }
        times.plot(*line.columns("size", "us"), label=line.label, **style)
        # lax is measured from JAX only, so only times from JAX are compared with it.
        if line.library != "lax" and not line.in_graph:
            ratios.plot(*line.columns("size", "ratio"), **style)
    _mark_algorithms(times, drawn)
    sizes = sorted({point.size for line in drawn for point in line.points})
    times.set(xscale="log", yscale="log", ylabel="time of a call (µs)")
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    times.yaxis.set_major_formatter(lambda us, position: f"{us:g}")
    times.yaxis.set_minor_locator(NullLocator())
    ratios.set(ylabel="lax / ours, from JAX", xlabel="size")
    ratios.axhline(1, color=LAX, linewidth=1)
    if is_logarithmic(drawn):
        ratios.set_yscale("log")
        ratios.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ratios.yaxis.set_major_formatter(lambda ratio, position: f"{ratio:g}")
        ratios.yaxis.set_minor_locator(NullLocator())
    else:
        ratios.set_ylim(bottom=0)
    shown = sizes[:: max(1, len(sizes) // 10)]
    ratios.set_xticks(shown, [size_text(size) for size in shown])
    ratios.xaxis.set_minor_locator(NullLocator())
    for axes in (times, ratios):
        axes.grid(color=GRID, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    times.set_title(details, fontsize=8)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def lines(results: Sequence[dict[str, Any]]) -> Iterator[Line]:
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


def is_logarithmic(drawn: Sequence[Line]) -> bool:
    """Returns whether the axis of the ratios is logarithmic."""
    shown = [line for line in drawn if line.library != "lax" and not line.in_graph]
    return any(point.ratio > _LARGEST_LINEAR_RATIO for line in shown for point in line.points)


def _lines_of_dtype(result: dict[str, Any], dtype: str) -> Iterator[Line]:
    """Yields the lines of one file and dtype: first those of each mode, then those of the peers."""
    rows = [row for row in _rows(result) if row["dtype"] == dtype]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        for library, key, how in (
            ("ours", "time_us", "from JAX"),
            ("ours", "graph_time_us", "in a graph"),
            ("lax", "lax_time_us", "from JAX"),
        ):
            points = [
                Point(
                    row["size"],
                    row[key],
                    row["lax_time_us"] / row[key],
                    row["algorithm"] if key == "time_us" else None,
                )
                for row in rows
                # A time below the clock's resolution is 0, which a logarithmic axis can't show.
                if row["mode"] == mode and row[key]
            ]
            if points:
                yield Line(f"{library} {how}, {mode}", library, mode, how == "in a graph", points)
    lax = {row["size"]: row["lax_time_us"] for row in reversed(rows)}
    peer_rows = [row for row in result["peers"]["rows"] if row["dtype"] == dtype]
    for library in dict.fromkeys(row["library"] for row in peer_rows):
        points = [
            Point(row["size"], row["time_us"], lax[row["size"]] / row["time_us"])
            for row in peer_rows
            if row["library"] == library
        ]
        yield Line(f"{library} in a graph", library, None, True, points, width=1.2)


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of collectives; those of programs have no size."""
    return [row for row in result["rows"] if "size" in row]


def _mark_algorithms(axes: Any, drawn: Sequence[Line]) -> None:
    """Draws a ring where a line's algorithm changes, and writes each algorithm's name once."""
    lowest: dict[tuple[int, str], float] = {}
    for line in drawn:
        before = None
        for size, us, _, algorithm in line.points:
            if algorithm is not None and algorithm != before:
                axes.plot(size, us, "o", markersize=9, fillstyle="none", color=OURS)
                lowest[size, algorithm] = min(us, lowest.get((size, algorithm), us))
            before = algorithm
    for (size, algorithm), us in lowest.items():
        axes.annotate(
            algorithm,
            (size, us),
            xytext=(6, -14),
            textcoords="offset points",
            fontsize=8,
            color=OURS,
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
