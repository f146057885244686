"""The plot of collective matmuls: for each shape, each library's time as a share of the bound.

A bar joins lax's share and ours. The ratio of the times stands next to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from bench_peers.registry import is_matmul, key_of

from bench_plots.styles import GRID, OURS, colour_of, marker_of

_INCHES_PER_LANE = 0.3
_TIMES = "\N{MULTIPLICATION SIGN}"


class Lane(NamedTuple):
    """One horizontal line of the plot: a shape in a process mode.

    Attributes:
        shape: the text at the left end.
        mode: the process mode of our run and of lax's.
        shares: bound / time for each library, ours first.
        text: the text at the right end.
    """

    shape: str
    mode: str
    shares: dict[str, float]
    text: str


def all_are_matmuls(results: Sequence[dict[str, Any]]) -> bool:
    """Returns whether all rows are those of collective matmuls, and there is one."""
    rows = [row for result in results for row in result["rows"]]
    return bool(rows) and all(map(is_matmul, rows))


def lanes(results: Sequence[dict[str, Any]]) -> list[Lane]:
    """Returns the lanes from top to bottom. The lanes of a shape are neighbours."""
    several_dtypes = len({row["dtype"] for result in results for row in result["rows"]}) > 1
    found = []
    for result in results:
        for key in dict.fromkeys(map(key_of, result["rows"])):
            for row in result["rows"]:
                if key_of(row) == key:
                    found.append(_lane(row, result, len(results) > 1, several_dtypes))
    return found


def _lane(
    row: dict[str, Any], result: dict[str, Any], several_files: bool, several_dtypes: bool
) -> Lane:
    best = _shortest_time(row)
    shares = {"ours": best / row["time_us"], "lax": best / row["lax_time_us"]}
    for peer in result["peers"]["rows"]:
        if key_of(peer) == key_of(row):
            shares[peer["library"]] = best / peer["time_us"]
    shape = f" {_TIMES} ".join(f"{row[name]}" for name in "mkn")
    shape += f" {row['dtype']}" if several_dtypes else ""
    if several_files:
        direction = " backward" if row["backward"] else ""
        shape = f"{row['operation']}{direction}, jax {result['header']['jax']}: {shape}"
    return Lane(shape, row["mode"], shares, f"{row['ratio']:.2f} {_TIMES}")


def _shortest_time(row: dict[str, Any]) -> float:
    """Returns the bound, or the time of the matmul alone on CPUs, which have no bound."""
    return row["alone_time_us"] if row["bound_us"] is None else row["bound_us"]


def draw(results: Sequence[dict[str, Any]], details: str) -> Any:
    """Returns the figure, with the details as small text below the place of the title."""
    # Without pyplot, which would need a display or keep state.
    from matplotlib.figure import Figure

    drawn = lanes(results)
    shapes = list(dict.fromkeys(lane.shape for lane in drawn))
    # A gap separates the lanes of different shapes.
    heights = [position + 0.6 * shapes.index(lane.shape) for position, lane in enumerate(drawn)]
    height = 1.7 + _INCHES_PER_LANE * (heights[-1] + 1)
    figure = Figure(figsize=(8.4, height), dpi=200, layout="constrained")
    axes = figure.subplots()
    modes = list(dict.fromkeys(lane.mode for lane in drawn))
    labelled: set[str] = set()
    for y, lane in zip(heights, drawn, strict=True):
        ends = [lane.shares["lax"], lane.shares["ours"]]
        axes.plot(ends, [y, y], color=OURS, linewidth=4, alpha=0.25, zorder=1)
        for library, share in lane.shares.items():
            is_jax = library in ("ours", "lax")
            name = f"{library}, {lane.mode}" if is_jax and len(modes) > 1 else library
            axes.plot(
                share,
                y,
                marker_of(lane.mode if is_jax else None),
                color=colour_of(library),
                markersize=9 if library == "ours" else 6,
                label=None if name in labelled else name,
                zorder=2 if library == "ours" else 3,  # the largest marker is the lowest
                linestyle="none",
            )
            labelled.add(name)
        axes.annotate(
            lane.text,
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold",
            color=OURS,
            annotation_clip=False,
        )
    middles = [
        sum(y for y, lane in zip(heights, drawn, strict=True) if lane.shape == shape)
        / sum(lane.shape == shape for lane in drawn)
        for shape in shapes
    ]
    axes.set_yticks(middles, shapes, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(heights[-1] + 0.8, -0.8)
    largest = max(share for lane in drawn for share in lane.shares.values())
    axes.set_xlim(0, max(1.05, 1.03 * largest))
    axes.axvline(1, color="#000000", linewidth=1, zorder=1)
    bounded = all(row["bound_us"] is not None for result in results for row in result["rows"])
    axes.set_xlabel(
        "bound / time; the bound is the longer of the matmul alone and the NVLink transfer"
        if bounded
        else "time of the matmul alone / time"
    )
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("lax / ours", fontsize=9, loc="right", color=OURS)
    axes.set_title(details, fontsize=8, loc="left")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure
