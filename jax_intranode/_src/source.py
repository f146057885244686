"""Where in the user's program a call of this package stands."""

import os
from collections.abc import Sequence
from pathlib import Path

from jax_intranode._src import compat

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
