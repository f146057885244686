"""Where in the user's program a call of this package stands."""

import contextlib
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_intranode._src.jax_private import call_frames
from jax_intranode._src.native import extension

_PACKAGE = str(Path(__file__).parents[2]) + os.sep


def call_site(frames: Sequence[tuple[str, int, str]]) -> str:
    """The innermost frame outside of this package, as "file:line (function)".

    Args:
        frames: file, line and function of each frame, innermost first.
    """
    outside = [frame for frame in frames if not frame[0].startswith(_PACKAGE)]
    for file, line, function in outside or frames:
        return f"{file}:{line} ({function.rpartition('<locals>.')[2]})"
    return "unknown"


class _Place(threading.local):
    """The call site of all that this thread lowers; None: that of its frames."""

    text: str | None = None


_place = _Place()


@contextlib.contextmanager
def at(place: str) -> Iterator[None]:
    """What this thread lowers inside has this call site. Its own frames are this package's."""
    before, _place.text = _place.text, place
    try:
        yield
    finally:
        _place.text = before


def caller() -> str:
    """The call site of what is traced or lowered here."""
    return _place.text or call_site(call_frames.frames_here())


@dataclass
class _Site:
    """A call site of lowered programs.

    Attributes:
        operation: the operation.
        nbytes: bytes of its operands on one device.
        shapes: the types of its operands.
        places: where programs of the same name call it. JAX lowers equal calls of a program once:
            the place is that of the first.
        equal_calls: whether a program has equal calls, at places that are not known.
    """

    operation: str
    nbytes: int
    shapes: str
    places: list[str] = field(default_factory=list)
    equal_calls: bool = False

    @property
    def place(self) -> str:
        return " or ".join(self.places) + (" or an equal call" if self.equal_calls else "")

    @property
    def label(self) -> str:
        return f"{self.shapes}, {' or '.join(self.places)}"


_sites: dict[str, _Site] = {}
_MAX_PLACES = 3
_MAX_SHAPES = 4


def describe_site(site: str, operation: str, avals: Sequence[Any]) -> None:
    """Notes where a call that is lowered here stands, for messages.

    The HLO must not hold it: a cached executable would depend on the line.

    Args:
        site: the attribute of the HLO that tells call sites apart.
        operation: the operation.
        avals: the types of its operands.
    """
    known = _sites.get(site)
    if known is None:
        nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in avals)
        shapes = " ".join(x.str_short() for x in avals[:_MAX_SHAPES])
        more = f" and {len(avals) - _MAX_SHAPES} more" if len(avals) > _MAX_SHAPES else ""
        known = _sites[site] = _Site(operation, nbytes, shapes + more)
    if len(known.places) == _MAX_PLACES:
        return
    place = caller()
    if place not in known.places:
        known.places.append(place)
        extension.module("cpu").describe_site(site, operation, known.nbytes, known.label)


def has_equal_calls(site: str) -> None:
    """Notes that several calls of loaded programs have this site."""
    if site in _sites:
        _sites[site].equal_calls = True


def place_of_site(site: str) -> str | None:
    """The call site as "file:line (function)", or several with "or"; None if it is not known."""
    known = _sites.get(site)
    return None if known is None else known.place


def bytes_of_site(site: str) -> int | None:
    """The bytes of a call's operands on one device; None if the site is not known."""
    known = _sites.get(site)
    return None if known is None else known.nbytes
