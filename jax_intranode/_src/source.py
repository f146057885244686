"""Where in the user's program a call of this package stands."""

import os
from collections.abc import Sequence
from pathlib import Path

from jax_intranode._src import compat, native

_PACKAGE = str(Path(__file__).parent.parent) + os.sep


def call_site(frames: Sequence[tuple[str, int, str]]) -> str:
    """The innermost frame outside of this package, as "file:line (function)".

    Args:
        frames: file, line and function of each frame, innermost first.
    """
    outside = [frame for frame in frames if not frame[0].startswith(_PACKAGE)]
    for file, line, function in outside or frames:
        return f"{file}:{line} ({function.rpartition('<locals>.')[2]})"
    return "unknown"


def caller() -> str:
    """The call site of what is traced or lowered here."""
    return call_site(compat.frames_here())


# The call sites of lowered programs: where the program calls the operation. One text may stand for
# several places, for instance two equal sums of one program.
_places: dict[str, list[str]] = {}
_MAX_PLACES = 3


def describe_site(site: str, shapes: str, platform: str) -> None:
    """Notes where a call that is lowered here stands, for messages.

    The HLO must not hold it: a cached executable would depend on the line.

    Args:
        site: the attribute of the HLO that tells call sites apart.
        shapes: the types of the operands.
        platform: "cpu" or "gpu".
    """
    places = _places.setdefault(site, [])
    if len(places) == _MAX_PLACES:
        return
    place = caller()
    if place not in places:
        places.append(place)
        native.module(platform).describe_site(site, f"{shapes}, {' or '.join(places)}")


def place_of_site(site: str) -> str | None:
    """The call site as "file:line (function)", or several with "or"; None if it is not known."""
    places = _places.get(site)
    return " or ".join(places) if places else None
