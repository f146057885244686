"""Compares and times a whole program in up to four ways.

They are: with our collectives ("ours"), with those of lax, with those of lax replaced ("unedited"),
and without communication ("none"). "Ours" of an auto-sharded program is the program itself under
``accelerate(auto=True)``.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_intranode
from bench_programs.definitions import PROGRAMS, without_communication
from jax_intranode._src.command_line import compare
from jax_intranode._src.command_line.bench import measure as of_bench
from jax_intranode._src.command_line.bench import report, timing
from jax_intranode._src.command_line.bench.report import Column
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.command_line.launcher.all_ranks import Rank

TABLE: report.Table = (
    ("", (Column("program", "program", 24),)),
    ("ours (us)", (*report.times("time", ".1f", width=10), *report.draw())),
    ("lax (us)", (*report.times("lax_time", ".1f", width=10), *report.draw("lax_"))),
    ("", (Column("ratio", "ratio", 6, ".2f"),)),
    ("none (us)", (*report.times("none_time", ".1f", width=10), *report.draw("none_"))),
    ("", (Column("hidden_share", "hidden", 6, ".2f"), Column("none_ratio", "ours/none", 9, ".2f"))),
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


def libraries(program: str) -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Returns for each way of a program but "none" its library, and the context of its calls."""
    auto, plain = program.startswith("auto_"), contextlib.nullcontext
    accelerated = partial(jax_intranode.accelerate, auto=auto)
    if auto:
        return {"ours": (jax_intranode, accelerated), "lax": (jax.lax, plain)}
    ours, lax = (jax_intranode, plain), (jax.lax, plain)
    return {"ours": ours, "lax": lax, "unedited": (jax.lax, accelerated)}


def measure_all(rank: Rank, **fields: Any) -> dict[str, Any]:
    """What each rank runs: measures programs, one after the other."""
    return of_bench.measure_all(rank, Settings(**fields), _measurements)


def _measurements(settings: Settings, mesh: Mesh) -> Iterator[of_bench.Measurement]:
    for name in settings.name.split(","):
        yield name, TABLE, partial(measure, dataclasses.replace(settings, name=name), mesh)


def measure(settings: Settings, mesh: Mesh) -> tuple[dict[str, Any], None]:
    """Compares and times a program in the ways that the settings ask for, and with lax.

    Args:
        settings: what to measure.
        mesh: a mesh with one axis "x" of all devices.

    Returns:
        The row (docs/bench.md), and None as the reason for a fallback, which is not looked for.
    """
    build = PROGRAMS[settings.name]
    runs = {
        name: partial(_Chained(*build(library, mesh)).run, setting)
        for name, (library, setting) in libraries(settings.name).items()
        if name in (*settings.ways, "lax")
    }
    label = f"{settings.name}/{settings.mode}"
    wanted = runs["lax"](1)
    others = [run(1) for name, run in runs.items() if name != "lax"] or [wanted]
    worst = np.max([_difference(result, wanted) for result in others])
    del wanted, others
    none = without_communication(settings.name, mesh) if "none" in settings.ways else None
    if none is not None:  # its values are wrong
        runs["none"] = partial(_Chained(*none[0]).run, contextlib.nullcontext)
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
    if none is not None:
        of_none, worth = times["none"], none[1]
        times["none"] = of_none._replace(p50=of_none.p50 / worth, p99=of_none.p99 / worth)
    unedited_us, none_us = (times[n].p50 if n in times else None for n in ("unedited", "none"))
    fields = timing.fields(times)
    our_us, lax_us = fields["time_us"], fields["lax_time_us"]
    exposed_us = lax_us - none_us if none_us is not None else 0
    row = {
        "program": settings.name,
        "mode": settings.mode,
        **fields,
        **timing.draw_fields(times, "ours", "lax", "none"),
        "none_time_us": none_us,
        "none_time_p99_us": times["none"].p99 if none is not None else None,
        "hidden_share": (lax_us - our_us) / exposed_us if our_us and exposed_us > 0 else None,
        "none_ratio": our_us / none_us if our_us and none_us else None,
        "unedited_time_us": unedited_us,
        "unedited_ratio": unedited_us and lax_us / unedited_us,
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
