"""The command `topology`: which GPUs are linked by NVLink, as text and as a picture."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jax_intranode._src.command_line.options import WrongInput, check_can_draw, new_file
from jax_intranode._src.group import nvml
from jax_intranode._src.group import topology as topology_lib
from jax_intranode._src.group.topology import LinkReport, Topology, TopologyKind
from jax_intranode._src.selection import records

DESCRIPTION = (
    "Prints how many NVLinks are between each pair of this node's GPUs, as `nvidia-smi topo -m` "
    "does, and what that means for this package. It asks NVML, so it starts no backend of JAX, and "
    "ignores CUDA_VISIBLE_DEVICES."
)
EXAMPLES = """\
python -m jax_intranode topology
python -m jax_intranode topology --png links.png            needs matplotlib
python -m jax_intranode topology --json > node.json
python -m jax_intranode topology --from node.json           of another node"""

_UNLINKED = "a mesh with a pair of GPUs that is not linked falls back to jax.lax as a whole"
_MEANING = {
    TopologyKind.FULLY_CONNECTED: "all GPUs are linked: a mesh of any of them is accelerated",
    TopologyKind.HYBRID_CUBE_MESH: f"a mesh of one of the two quads is accelerated; {_UNLINKED}",
    TopologyKind.UNKNOWN: _UNLINKED,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON, for programs and for --from")
    add("--png", type=new_file, metavar="FILE", help="draw the links, too")
    text = "read what --json has printed"
    add("--from", type=Path, dest="source", metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> int:
    found = topology_lib.topology() if arguments.source is None else read(arguments.source)
    if arguments.png is not None:
        if not found.gpus:
            raise WrongInput(f"--png {arguments.png}: there are no GPUs to draw: {_why_none()}")
        check_can_draw("--png")
        draw(found, arguments.png)
    print(json.dumps(to_json(found), indent=2) if arguments.json else text_of(found))
    return 0


def to_json(found: Topology) -> dict[str, Any]:
    """Returns a topology as a plain dict, which `read` reads from a file."""
    return {
        "kind": found.kind.value,
        "forced": found.forced,
        "gpus": [dataclasses.asdict(gpu) for gpu in found.gpus],
        "links": found.links,
    }


def read(file: Path) -> Topology:
    """Reads a topology that `--json` has printed."""
    try:
        gpus = tuple(
            records.from_json(LinkReport, gpu) for gpu in json.loads(file.read_text())["gpus"]
        )
    except OSError as error:
        raise WrongInput(f"--from {file}: {error.strerror}: name a file that exists") from error
    except (ValueError, TypeError, KeyError) as error:
        raise WrongInput(
            f"--from {file}: this is not what `topology --json` prints ({type(error).__name__}: "
            f"{error}): run that on the node"
        ) from error
    links = topology_lib.link_matrix(gpus)
    return Topology(topology_lib.classify(links), gpus, links, forced=False)


def text_of(found: Topology) -> str:
    if not found.gpus:
        return f"no GPUs: {_why_none()}"
    lines = [str(found), ""]
    if len(found.gpus) > 1:
        lines += ["NV4: 4 NVLinks, directly or through NVSwitches    -: none", _MEANING[found.kind]]
    else:
        lines.append("a mesh of one GPU has nothing to communicate")
    return "\n".join(lines)


def _why_none() -> str:
    try:
        with nvml.session():
            return "NVML shows none to this process"
    except nvml.Unavailable as error:
        return str(error)


# The picture: GPUs on a circle, and the links between them.

_GPU, _SWITCH, _LINK = "#0072B2", "#009E73", "#555555"


def draw(topology: Topology, file: Path) -> None:
    """Draws the GPUs, of which there is at least one, and their links."""
    # Without pyplot, which would need a display or keep state.
    from matplotlib.figure import Figure

    gpus, count = topology.gpus, len(topology.gpus)
    figure = Figure(figsize=(7, 7.4), dpi=160, layout="constrained")
    axes: Any = figure.subplots()
    angles = [2 * math.pi * i / count for i in range(count)]
    places = [(math.sin(angle), math.cos(angle)) for angle in angles]
    lines = [(place, (0.0, 0.0), gpu.switch_links) for place, gpu in zip(places, gpus, strict=True)]
    lines += [
        (places[i], places[j], dict(gpus[i].peer_links).get(gpus[j].bus_id, 0))
        for i in range(count)
        for j in range(i)
        if topology.links[i][j]
    ]
    discs = [(place, f"GPU {number}", _GPU) for number, place in enumerate(places)]
    if any(gpu.switch_links for gpu in gpus):
        discs.append(((0.0, 0.0), "NVSwitch", _SWITCH))
    text = {"ha": "center", "va": "center", "fontsize": 9}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1.5}
    for a, b, links in lines:
        if links:
            xs, ys = (a[0], b[0]), (a[1], b[1])
            axes.plot(xs, ys, color=_LINK, linewidth=1 + links / 4, alpha=0.6, zorder=1)
            # Nearer to one end, because the middles of diagonals coincide.
            at = [0.62 * start + 0.38 * end for start, end in (xs, ys)]
            axes.annotate(str(links), at, bbox=box, zorder=2, **text)
    for place, name, colour in discs:
        axes.scatter(*place, s=2600, color=colour, zorder=3)
        axes.annotate(name, place, color="white", zorder=4, weight="bold", **text)
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axes.axis("off")
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    kind = topology.kind.value.replace("_", " ")
    figure.suptitle(f"{count} x {names}: {kind}", fontsize=12, fontweight="bold")
    axes.set_title("The numbers are NVLinks.", fontsize=9)
    figure.savefig(file, format="png")
