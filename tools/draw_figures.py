"""Draws the figures of docs/how_it_works.md, docs/when.md and docs/collective_matmuls.md.

    python tools/draw_figures.py docs/figures
    python tools/draw_figures.py /tmp/figures --format png

Needs matplotlib. Writes one_shot_two_shot, memory, overlap and decision. Lengths in the figures are
illustrative: no figure shows a measurement.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

RANK_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
LINK, COMPUTE, NEUTRAL, DARK = "#e9c46a", "#8ab6d6", "#eeeeee", "#333333"
YES, NO = "#d8efd3", "#f6dcd8"


def canvas(width: float, height: float) -> tuple[Figure, Any]:
    """Returns a figure whose coordinates are tenths of an inch, the origin at the lower left."""
    figure = Figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Any, x: float, y: float, width: float, height: float, text: str = "", **style: Any
) -> None:
    """Draws a rectangle with centred text; (x, y) is its lower left corner."""
    size, weight = style.pop("size", 8), style.pop("weight", "normal")
    ink = style.pop("ink", "black")
    style = {"facecolor": NEUTRAL, "edgecolor": DARK, "linewidth": 0.8} | style
    axes.add_patch(Rectangle((x, y), width, height, **style))
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        size=size,
        weight=weight,
        color=ink,
    )


def label(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    """Draws text whose left end is at x, unless `ha` says otherwise."""
    axes.text(x, y, text, **({"size": 8, "va": "center", "ha": "left"} | style))


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    """Draws an arrow."""
    style = {"arrowstyle": "-|>", "color": DARK, "linewidth": 1, "shrinkA": 0, "shrinkB": 0} | style
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


# One-shot and two-shot all-reduce.

CELL = 2.6  # edge of a square that stands for a quarter of an array
ARRAY = 4 * CELL
STEP = ARRAY + 2.4  # from one rank's column to the next one's


def array_of(axes: Any, x: float, y: float, colours: list[str], hatch: str | None = None) -> None:
    """Draws an array as four parts."""
    for part, colour in enumerate(colours):
        style = {"facecolor": colour, "hatch": hatch} if colour else {"facecolor": "white"}
        box(axes, x + part * CELL, y, CELL, CELL, **style, linewidth=0.6)


def inputs(axes: Any, left: float, y: float) -> None:
    """Draws every rank's array."""
    for rank, colour in enumerate(RANK_COLOURS):
        x = left + rank * STEP
        label(axes, x + ARRAY / 2, y + 4.4, f"rank {rank}", ha="center", weight="bold")
        array_of(axes, x, y, [colour] * 4)


def sums(axes: Any, left: float, y: float, parts: Any) -> None:
    """Draws the parts of the sum that every rank has; `parts(rank)` says which."""
    for rank in range(4):
        has = parts(rank)
        array_of(axes, left + rank * STEP, y, ["#c8c8c8" if p in has else "" for p in range(4)])
        x = left + rank * STEP + (ARRAY / 2 if len(has) == 4 else (has[0] + 0.5) * CELL)
        label(axes, x, y + CELL / 2, "sum" if len(has) == 4 else "Σ", ha="center")


def one_shot_two_shot() -> Figure:
    """One-shot beside two-shot, for four ranks."""
    figure, axes = canvas(146, 56)
    ranks = range(4)
    axes.plot((72, 72), (2, 54), color="#bbbbbb", linewidth=0.8)

    left = 19
    label(axes, 2, 53, "One-shot: for small arrays", size=11, weight="bold")
    inputs(axes, left, 42)
    label(axes, 2, 38.3, "every rank sends\nits array to all\n(shown: rank 1)")
    for rank in (0, 2, 3):
        start = (left + STEP + ARRAY / 2, 41.7)
        arrow(axes, start, (left + rank * STEP + ARRAY / 2, 34.2), color=RANK_COLOURS[1])
    for rank in ranks:
        for source, colour in enumerate(RANK_COLOURS):
            array_of(axes, left + rank * STEP, 31.2 - source * (CELL + 0.4), [colour] * 4)
    label(axes, 2, 20, "every rank sums\nin rank order")
    for rank in ranks:
        x = left + rank * STEP + ARRAY / 2
        arrow(axes, (x, 21.8), (x, 18.2))
    sums(axes, left, 15, lambda rank: (0, 1, 2, 3))
    label(axes, 2, 3.5, "1 exchange; each rank sends (n - 1) x the array", size=9)

    left, text = 93, 76
    label(axes, text, 53, "Two-shot: for larger arrays", size=11, weight="bold")
    inputs(axes, left, 42)
    label(axes, text, 38.3, "reduce-scatter:\npart k of the\narray to rank k")
    for rank in (0, 2, 3):
        start = (left + STEP + (rank + 0.5) * CELL, 41.7)
        end = (left + rank * STEP + (rank + 0.5) * CELL, 34.2)
        arrow(axes, start, end, color=RANK_COLOURS[1])
    for rank in ranks:
        for source, colour in enumerate(RANK_COLOURS):
            parts = [colour if part == rank else "" for part in range(4)]
            array_of(axes, left + rank * STEP, 31.2 - source * (CELL + 0.4), parts)
    label(axes, text, 20, "rank k sums part k\nin rank order")
    for rank in ranks:
        x = left + rank * STEP + (rank + 0.5) * CELL
        arrow(axes, (x, 21.8), (x, 18.2))
    sums(axes, left, 15, lambda rank: (rank,))
    label(axes, text, 12.3, "all-gather: each\nsum to all ranks")
    for rank in (0, 2, 3):
        x = left + 1.5 * CELL
        arrow(axes, (x + STEP, 14.7), (x + rank * STEP, 10.2))
    sums(axes, left, 7, lambda rank: (0, 1, 2, 3))
    label(axes, text, 3.5, "2 exchanges; each rank sends 2 (n - 1) / n x the array", size=9)
    return figure


# The memory that peers write into.


def zoom(axes: Any, above: tuple[float, float, float], below: tuple[float, float, float]) -> None:
    """Draws the lines from a part (left, right, y) to its enlargement."""
    for k in (0, 1):
        axes.plot((above[k], below[k]), (above[2], below[2]), color="#999999", linewidth=0.8)


def memory() -> Figure:
    """The slab and the ring buffer of one GPU."""
    figure, axes = canvas(110, 66)
    label(
        axes,
        2,
        63.5,
        "Slab: 392 MiB per GPU. Collectives write packets into it.",
        size=10,
        weight="bold",
    )
    box(axes, 2, 54, 7, 6, "test\npage", size=7)
    for region in range(8):
        colour = "#cfe0ef" if region == 0 else NEUTRAL
        box(axes, 9 + region * 12.3, 54, 12.3, 6, f"region {region}", facecolor=colour)
    label(
        axes, 107.4, 61.8, "one region per partition of the devices into groups", size=7, ha="right"
    )
    zoom(axes, (9, 21.3, 54), (2, 107.4, 47))
    box(axes, 2, 41, 17, 6, "header:\nepoch, signals", size=7)
    box(axes, 19, 41, 44.2, 6, "epoch buffer 0: even epochs", facecolor="#cfe0ef")
    box(axes, 63.2, 41, 44.2, 6, "epoch buffer 1: odd epochs")
    zoom(axes, (19, 63.2, 41), (2, 107.4, 34))
    for rank, colour in enumerate(RANK_COLOURS):
        box(
            axes,
            2 + rank * 26.35,
            28,
            26.35,
            6,
            f"packets written by rank {rank}",
            facecolor=colour,
            ink="white",
        )
    label(
        axes,
        2,
        25.4,
        "packet: 16 bytes of payload that carry their own arrival mark; "
        "the reader clears what it has read",
        size=7,
    )

    label(
        axes,
        2,
        20,
        "Ring buffer: 512 MiB per GPU. Collective matmuls send rows and products through it.",
        size=10,
        weight="bold",
    )
    box(axes, 2, 10.5, 9, 6, "header", size=7)
    box(axes, 11, 10.5, 17, 6, "flags, one\nper chunk", size=7)
    for slot in range(6):
        box(
            axes,
            28 + slot * 13.23,
            10.5,
            13.23,
            6,
            f"slot {slot}" if slot < 5 else "...",
            facecolor="#f3e6c0",
        )
    label(
        axes,
        2,
        6.5,
        "fused kernel: a slot holds a chunk (64 columns x 128 rows, 16 KiB); "
        "its flag is the number of the operation",
        size=7,
    )
    label(
        axes,
        2,
        3.6,
        "cuBLASLt pipeline: a slot holds a piece of rows; "
        "signals in the slab grant it and announce its arrival",
        size=7,
    )
    return figure


# Sequential and overlapped.


def lane(axes: Any, y: float, name: str, bars: list[tuple[float, float, str, str]]) -> None:
    """Draws one line of a time axis; a bar is (start, duration, text, colour)."""
    label(axes, 18.5, y + 2, name, ha="right")
    for start, duration, text, colour in bars:
        box(axes, 20 + start, y, duration, 4, text, facecolor=colour, size=7)


def overlap() -> Figure:
    """Time axes of a collective matmul on one of four ranks."""
    figure, axes = canvas(116, 70)

    def title(y: float, text: str) -> None:
        label(axes, 2, y, text, size=10, weight="bold")

    def finished(start: float, y: float, text: str) -> None:
        axes.plot((20 + start, 20 + start), (y - 1, y + 11.5), color="#c0392b", linewidth=1.2)
        label(axes, 20.8 + start, y + 10.6, text, color="#c0392b", size=7)

    title(67.5, "Sequential: all-gather, then matmul")
    receive = [(k * 12, 12, f"receive rank {k + 1}", LINK) for k in range(3)]
    lane(axes, 58.5, "NVLink", [(s, d, t, c) for s, d, t, c in receive])
    lane(axes, 53, "SMs", [(36, 48, "matmul of all rows", COMPUTE)])
    finished(84, 53, "done")

    title(47, "Overlapped all_gather_matmul: own rows first")
    lane(axes, 38, "NVLink", receive)
    names = ("own rows", "rows of rank 1", "rows of rank 2", "rows of rank 3")
    lane(axes, 32.5, "SMs", [(k * 12.5, 12.5, names[k], COMPUTE) for k in range(4)])
    finished(50, 32.5, "done")

    title(26.5, "Overlapped matmul_reduce_scatter: own rows last")
    sends = [(12.5 * (k + 1), 12, f"send to rank {k + 1}", LINK) for k in range(3)]
    lane(axes, 17.5, "NVLink", sends)
    names = ("rows for rank 1", "rows for rank 2", "rows for rank 3", "own rows + sum")
    lane(axes, 12, "SMs", [(k * 12.5, 12.5, names[k], COMPUTE) for k in range(4)])
    finished(50, 12, "done")

    arrow(axes, (20, 6), (112, 6))
    label(axes, 112, 3.6, "time on rank 0 of 4", ha="right")
    return figure


# Is my call accelerated?


def question(axes: Any, x: float, y: float, width: float, text: str) -> None:
    """Draws a rounded box with a question; (x, y) is its lower left corner."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            5.4,
            boxstyle="round,pad=0,rounding_size=1.4",
            facecolor="white",
            edgecolor=DARK,
            linewidth=0.9,
        )
    )
    label(axes, x + width / 2, y + 2.7, text, ha="center", size=8)


def decision() -> Figure:
    """The decision whether a call is accelerated, and by what."""
    figure, axes = canvas(140, 66)
    top, step = 55, 9.6

    def column(left: float, width: float, name: str, questions: tuple[str, ...], no: str) -> float:
        """Draws questions below each other and where a "no" leads; returns the last arrow's end."""
        label(axes, left, 63.5, name, size=10, weight="bold")
        for k, text in enumerate(questions):
            y = top - k * step
            question(axes, left, y, width, text)
            arrow(axes, (left + width, y + 2.7), (left + width + 5.5, y + 2.7))
            label(axes, left + width + 0.6, y + 4, "no", size=7)
            arrow(axes, (left + width / 2, y), (left + width / 2, y - 4.2))
            label(axes, left + width / 2 + 0.8, y - 1.9, "yes", size=7)
        last = top - (len(questions) - 1) * step
        box(axes, left + width + 5.5, last, 13, top - last + 5.4, no, facecolor=NO)
        return last - 4.2

    end = column(
        2,
        48,
        "psum, pmean, psum_scatter, all_gather",
        (
            "Called inside shard_map, and all mesh axes\nof size > 1 are manual?",
            "2 to 8 ranks on one host, each pair linked\nby NVLink (or all of them CPU devices)?",
            "Package built with CUDA (for GPUs); same versions\nand settings in all processes?",
            "Supported dtype?",
            "Does the array fit the slab, and is it small enough\nthat our kernel is faster?",
        ),
        "jax.lax",
    )
    box(
        axes,
        2,
        end - 5.8,
        48,
        5.8,
        "our kernels: one-shot, two-shot,\nreduce-scatter, all-gather",
        facecolor=YES,
        weight="bold",
    )
    end = column(
        72,
        48,
        "all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce",
        (
            "Yes to the first three questions on the left?",
            "Hopper GPUs, bfloat16 or float16,\nK and N multiples of 8?",
            "Does the model predict that overlapping\nis faster?",
        ),
        "not overlapped:\nthe matmul, and\na collective as\non the left",
    )
    box(
        axes,
        72,
        end - 5.8,
        48,
        5.8,
        "overlapped: fused kernel\nor cuBLASLt pipeline",
        facecolor=YES,
        weight="bold",
    )
    label(axes, 72, end - 12, "explain(f)(*args) prints the answer for each call of f.", size=9)
    return figure


FIGURES = {
    "one_shot_two_shot": one_shot_two_shot,
    "memory": memory,
    "overlap": overlap,
    "decision": decision,
}


def main() -> None:
    """Draws all figures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "jax_intranode"  # the same bytes in every run
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: small files, readable diffs
    for name, draw in FIGURES.items():
        metadata = {"Date": None} if options.format == "svg" else None
        file = options.folder / f"{name}.{options.format}"
        draw().savefig(file, dpi=150, facecolor="white", metadata=metadata)
        print(file)


if __name__ == "__main__":
    main()
