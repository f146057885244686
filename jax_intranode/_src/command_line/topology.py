"""The command `topology`: which GPUs are linked by NVLink, as text and as a picture."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from jax_intranode._src.command_line import picture
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
    parser.add_argument(
        "--json", action="store_true", help="print JSON, for programs and for --from"
    )
    parser.add_argument("--png", type=new_file, metavar="FILE", help="draw the links, too")
    parser.add_argument(
        "--from", type=Path, dest="source", metavar="FILE", help="read what --json has printed"
    )


def run(arguments: argparse.Namespace) -> int:
    found = topology_lib.topology() if arguments.source is None else read(arguments.source)
    if arguments.png is not None:
        if not found.gpus:
            raise WrongInput(f"--png {arguments.png}: there are no GPUs to draw: {_why_none()}")
        check_can_draw("--png")
        picture.draw(found, arguments.png)
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
    """Reads a topology that `--json` has printed.

    Raises:
        WrongInput: the file cannot be read, or is not such a file.
    """
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
