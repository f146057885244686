"""What the benchmark knows of another library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.runs import ProgressLine


class Unavailable(Exception):
    """Says why a peer can't be measured here."""


@dataclass(frozen=True)
class Peer:
    """Another library that the benchmark can measure.

    Attributes:
        name: the name that `--peers` takes.
        measure: measures what the settings say. Its other arguments are an empty directory for
            files, the time limit in seconds and the progress line. Returns "version", a text, and
            "rows", as `registry.measure` describes them. Raises `Unavailable` if the library is not
            installed or doesn't have the operation.
        count: the number of measurements that the progress line counts.
        colours: for each library name in the rows, its colour in plots.
    """

    name: str
    measure: Callable[[Settings, Path, float, ProgressLine], dict[str, Any]]
    count: Callable[[Settings], int]
    colours: Mapping[str, str]
