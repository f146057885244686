"""Compares and times a whole program: with our collectives, with lax's, and with lax's replaced.

"Ours" of an auto-sharded program is the program itself under ``accelerate(auto=True)``.
"""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_intranode
from bench_programs.definitions import PROGRAMS
from jax_intranode._src.command_line import compare
from jax_intranode._src.command_line.bench import report, timing
from jax_intranode._src.command_line.bench.report import Column
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher import all_ranks

TABLE: report.Table = (
    ("", (Column("program", "program", 24),)),
    ("ours (us)", report.times("time", ".1f", width=10)),
    ("lax (us)", report.times("lax_time", ".1f", width=10)),
    ("", (Column("ratio", "ratio", 6, ".2f"),)),
    (
        "lax, accelerated",
        (Column("unedited_time_us", "p50", 10, ".1f"), Column("unedited_ratio", "ratio", 6, ".2f")),
    ),
    ("", (Column("difference", "difference", 10, ".1e", nothing="not finite"),)),
)


class _Chained:
    """A program whose next arguments are its last result. It may reuse its arguments' memory."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self.arguments = arguments

    def run(self, setting: Callable[[], Any], calls: int) -> tuple[Any, ...]:
        """Starts this number of calls in a row and returns the result of the last one.

        Args:
            setting: returns the context of the calls.
        """
        with setting():
            return self._run(calls)

    def _run(self, calls: int) -> tuple[Any, ...]:
        for _ in range(calls):
            result = self._function(*self.arguments)
            # A function of one argument may return a result that is no tuple.
            structures: list[Any] = [jax.tree.structure(x) for x in (result, self.arguments)]
            self.arguments = result if structures[0] == structures[1] else (result,)
        return self.arguments


def measure(settings: Settings, mesh: Mesh) -> tuple[dict[str, Any], None]:
    """Compares and times a program with our collectives, with lax's, and with lax's replaced.

    Args:
        settings: what to measure.
        mesh: a mesh with one axis "x" of all devices.

    Returns:
        The row (docs/bench.md), and None as the reason for a fallback, which is not looked for.
    """
    build, auto = PROGRAMS[settings.name], settings.name.startswith("auto_")
    accelerated = partial(jax_intranode.accelerate, auto=auto)
    programs: dict[str, tuple[Any, Callable[[], Any]]] = {
        "ours": (jax_intranode, accelerated if auto else contextlib.nullcontext),
        "lax": (jax.lax, contextlib.nullcontext),
    }
    if not auto:
        programs["unedited"] = (jax.lax, accelerated)
    runs = {
        name: partial(_Chained(*build(library, mesh)).run, setting)
        for name, (library, setting) in programs.items()
    }
    label = f"{settings.name}/{settings.mode}"
    wanted = runs["lax"](1)
    worst = np.max([_difference(run(1), wanted) for name, run in runs.items() if name != "lax"])
    difference = all_ranks.largest(f"{label}/difference", float(worst))

    calls = settings.chain or (2 if settings.platform == "cpu" else 10)
    times, handler_calls = timing.compare(
        {name: partial(run, calls) for name, run in runs.items()},
        mesh,
        settings,
        label,
        calls=calls,
        untimed=1 if settings.settle_ms > 0 else 0,
    )
    unedited_us = times["unedited"].p50 if "unedited" in times else None
    row = {
        "program": settings.name,
        "mode": settings.mode,
        **timing.fields(times),
        "unedited_time_us": unedited_us,
        "unedited_ratio": unedited_us and times["lax"].p50 / unedited_us,
        "difference": difference if math.isfinite(difference) else None,
        "handler_calls": handler_calls,
    }
    return row, None


def _difference(ours: Any, lax: Any) -> float:
    """Returns the largest difference, relative to the largest value of lax's array.

    Returns NaN if a value is not finite.
    """
    wanted = compare.on_host(lax)
    finite = all(np.isfinite(np.float64(part)).all() for _, parts in wanted for part in parts)
    return compare.difference(compare.on_host(ours), wanted)[0] if finite else math.nan
