"""The picture of `topology`: GPUs on a circle, and the links between them."""

import math
from pathlib import Path
from typing import Any

from jax_intranode._src.group.topology import Topology

_GPU, _SWITCH, _LINK = "#0072B2", "#009E73", "#555555"


def draw(topology: Topology, file: Path) -> None:
    """Draws the GPUs and their links.

    Args:
        topology: a topology with at least one GPU.
    """
    # Without pyplot, which would need a display or keep state.
    from matplotlib.figure import Figure

    count = len(topology.gpus)
    figure = Figure(figsize=(7, 7.4), dpi=160, layout="constrained")
    axes = figure.subplots()
    places = [
        (math.sin(2 * math.pi * i / count), math.cos(2 * math.pi * i / count)) for i in range(count)
    ]
    switched = [gpu.switch_links for gpu in topology.gpus]
    if any(switched):
        for place, links in zip(places, switched, strict=True):
            if links:
                _line(axes, place, (0, 0), links)
        _disc(axes, (0, 0), "NVSwitch", _SWITCH)
    direct = [dict(gpu.peer_links) for gpu in topology.gpus]
    for i in range(count):
        for j in range(i):
            links = direct[i].get(topology.gpus[j].bus_id, 0)
            if links and topology.links[i][j]:
                _line(axes, places[i], places[j], links)
    for number, place in enumerate(places):
        _disc(axes, place, f"GPU {number}", _GPU)
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axes.axis("off")
    names = ", ".join(dict.fromkeys(gpu.name for gpu in topology.gpus))
    kind = topology.kind.value.replace("_", " ")
    figure.suptitle(f"{count} x {names}: {kind}", fontsize=12, fontweight="bold")
    axes.set_title("The numbers are NVLinks.", fontsize=9)
    figure.savefig(file, format="png")


def _line(axes: Any, a: tuple[float, float], b: tuple[float, float], links: int) -> None:
    xs, ys = [a[0], b[0]], [a[1], b[1]]
    axes.plot(xs, ys, color=_LINK, linewidth=1 + links / 4, alpha=0.6, zorder=1)
    # Nearer to one end, because the middles of diagonals coincide.
    at = [0.62 * start + 0.38 * end for start, end in (xs, ys)]
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1.5}
    axes.annotate(str(links), at, ha="center", va="center", fontsize=9, bbox=box, zorder=2)


def _disc(axes: Any, place: tuple[float, float], text: str, colour: str) -> None:
    axes.scatter(*place, s=2600, color=colour, zorder=3)
    axes.annotate(
        text, place, ha="center", va="center", fontsize=9, color="white", zorder=4, weight="bold"
    )
