"""Colours and markers of plots.

The colours are those of Okabe and Ito, which people with colour blindness can tell apart.
"""

from bench_peers.registry import PEERS

from jax_intranode._src.command_line.launcher.runs import PROCESS_PER_DEVICE, SINGLE_PROCESS

OURS = "#0072B2"
LAX = "#D55E00"
GRID = "#dddddd"

_OTHER = "#999999"
_PEERS = {library: colour for peer in PEERS.values() for library, colour in peer.colours.items()}
_COLOURS = {"ours": OURS, "lax": LAX, **_PEERS}

_MODE_MARKERS = {PROCESS_PER_DEVICE: "o", SINGLE_PROCESS: "s"}
_PEER_MARKER = "^"


def colour_of(library: str) -> str:
    """Returns a library's colour."""
    return _COLOURS.get(library, _OTHER)


def marker_of(mode: str | None) -> str:
    """Returns the marker of a process mode; that of peers for None."""
    return _PEER_MARKER if mode is None else _MODE_MARKERS[mode]
