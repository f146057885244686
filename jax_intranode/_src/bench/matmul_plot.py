"""The picture of collective matmuls: for each shape each library's share of the bound.

A line joins lax's share and ours, so that its length is the gain; beside it stands the ratio.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_intranode._src.bench.colours import COLOURS, OTHER
from jax_intranode._src.bench.matmul_report import is_matmul, key_of
from jax_intranode._src.bench.settings import PROCESS_PER_DEVICE, SINGLE_PROCESS

_MARKERS: dict[str | None, str] = {PROCESS_PER_DEVICE: "o", SINGLE_PROCESS: "s", None: "D"}
_INCHES_A_LANE = 0.3
_TIMES = "\N{MULTIPLICATION SIGN}"


class Lane(NamedTuple):
    """One horizontal line of the picture.

    Attributes:
        shape: whose.
        mode: how ours and lax's ran.
        shares: of the libraries, ours first.
        text: what stands at its right end.
    """

    shape: str
    mode: str
    shares: dict[str, float]
    text: str


def is_of_matmuls(results: Sequence[dict[str, Any]]) -> bool:
    """Whether all rows of files are those of collective matmuls."""
    rows = [row for result in results for row in result["rows"]]
    return bool(rows) and all(map(is_matmul, rows))


def lanes(results: Sequence[dict[str, Any]]) -> list[Lane]:
    """Returns the lanes of the picture, from its top, those of one shape in a row."""
    several_dtypes = len({row["dtype"] for result in results for row in result["rows"]}) > 1
    found = []
    for result in results:
        keys = dict.fromkeys(map(key_of, result["rows"]))
        for key in keys:
            for row in result["rows"]:
                if key_of(row) == key:
                    found.append(_lane(row, result, len(results) > 1, several_dtypes))
    return found


def _lane(row: dict[str, Any], result: dict[str, Any], several: bool, dtypes: bool) -> Lane:
    best = _best(row)
    shares = {"ours": best / row["time_us"], "lax": best / row["lax_time_us"]}
    for peer in result["peers"]["rows"]:
        if key_of(peer) == key_of(row):
            shares[peer["library"]] = best / peer["time_us"]
    shape = f" {_TIMES} ".join(f"{row[name]}" for name in "mkn")
    shape += f" {row['dtype']}" if dtypes else ""
    if several:
        direction = " backward" if row["backward"] else ""
        shape = f"{row['operation']}{direction}, jax {result['header']['jax']}: {shape}"
    return Lane(shape, row["mode"], shares, f"{row['ratio']:.2f} {_TIMES}")


def _best(row: dict[str, Any]) -> float:
    """The bound; on CPUs, which have none, the matmul alone."""
    return row["alone_time_us"] if row["bound_us"] is None else row["bound_us"]


def draw(results: Sequence[dict[str, Any]], file: Path, title: str, details: str) -> None:
    """Draws what the benchmark found.

    Args:
        results: contents of its JSON files.
        file: the PNG to write.
        title: of the picture.
        details: below the title.
    """
    # Without pyplot: no window, no state.
    from matplotlib.figure import Figure

    of_picture = lanes(results)
    shapes = list(dict.fromkeys(lane.shape for lane in of_picture))
    # Lanes of one shape lie together, a gap between shapes.
    places = [position + 0.6 * shapes.index(lane.shape) for position, lane in enumerate(of_picture)]
    height = 1.7 + _INCHES_A_LANE * (places[-1] + 1)
    figure = Figure(figsize=(8.4, height), dpi=200, layout="constrained")
    axes = figure.subplots()
    modes = list(dict.fromkeys(lane.mode for lane in of_picture))
    seen: set[str] = set()
    for place, lane in zip(places, of_picture, strict=True):
        ends = [lane.shares["lax"], lane.shares["ours"]]
        axes.plot(ends, [place, place], color=COLOURS["ours"], linewidth=4, alpha=0.25, zorder=1)
        for library, share in lane.shares.items():
            of_jax = library in ("ours", "lax")
            name = f"{library}, {lane.mode}" if of_jax and len(modes) > 1 else library
            axes.plot(
                share,
                place,
                _MARKERS[lane.mode if of_jax else None],
                color=COLOURS.get(library, OTHER),
                markersize=9 if library == "ours" else 6,
                label=None if name in seen else name,
                zorder=2 if library == "ours" else 3,  # the largest below
                linestyle="none",
            )
            seen.add(name)
        axes.annotate(
            lane.text,
            (1, place),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold",
            color=COLOURS["ours"],
            annotation_clip=False,
        )
    middles = [
        sum(p for p, lane in zip(places, of_picture, strict=True) if lane.shape == shape)
        / sum(lane.shape == shape for lane in of_picture)
        for shape in shapes
    ]
    axes.set_yticks(middles, shapes, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.8, -0.8)
    largest = max(share for lane in of_picture for share in lane.shares.values())
    axes.set_xlim(0, max(1.05, 1.03 * largest))
    axes.axvline(1, color="#000000", linewidth=1, zorder=1)
    bounded = all(row["bound_us"] is not None for result in results for row in result["rows"])
    axes.set_xlabel(
        "share of the bound, which is the matmul alone, or NVLink where that takes longer"
        if bounded
        else "share of the matmul alone"
    )
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("lax / ours", fontsize=9, loc="right", color=COLOURS["ours"])
    figure.suptitle(title, fontsize=11, fontweight="bold")
    axes.set_title(details, fontsize=8, loc="left")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(file, format="png")
