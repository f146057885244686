"""Compares and times a whole program: with our collectives, with lax's, and with lax's replaced."""

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
from bench_programs.report import ProgramRow
from jax_intranode._src.command_line.bench import all_ranks, timing
from jax_intranode._src.command_line.bench.settings import Settings


class _Chained:
    """A program whose next arguments are its last result. It may reuse its arguments' memory."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self.arguments = arguments

    def run(self, calls: int, unedited: bool = False) -> tuple[Any, ...]:
        """Starts this number of calls in a row and returns the result of the last one.

        With `unedited` under `jax_intranode.accelerate`.
        """
        with jax_intranode.accelerate() if unedited else contextlib.nullcontext():
            return self._run(calls)

    def _run(self, calls: int) -> tuple[Any, ...]:
        for _ in range(calls):
            result = self._function(*self.arguments)
            # A function of one argument may return a result that is no tuple.
            structures: list[Any] = [jax.tree.structure(x) for x in (result, self.arguments)]
            self.arguments = result if structures[0] == structures[1] else (result,)
        return self.arguments


def measure(settings: Settings, mesh: Mesh) -> ProgramRow:
    """Compares and times a program with our collectives, with lax's, and with lax's replaced.

    Args:
        settings: what to measure.
        mesh: a mesh with one axis "x" of all devices.
    """
    build = PROGRAMS[settings.name]
    ours, lax, unedited = (
        _Chained(*build(library, mesh)) for library in (jax_intranode, jax.lax, jax.lax)
    )
    label = f"{settings.name}/{settings.mode}"
    wanted = lax.run(1)
    worst = np.max([_difference(ours.run(1), wanted), _difference(unedited.run(1, True), wanted)])
    difference = all_ranks.largest(f"{label}/difference", float(worst))

    calls = settings.chain or (2 if settings.platform == "cpu" else 10)
    runs = [partial(ours.run, calls), partial(lax.run, calls), partial(unedited.run, calls, True)]
    untimed = 1 if settings.settle_ms > 0 else 0
    seconds, handler_calls = timing.take_turns(runs, mesh, settings, untimed)
    our_times, lax_times, unedited_times = (
        timing.slowest_rank(f"{label}/{name}", timing.statistics(1e6 * np.array(of_run) / calls))
        for name, of_run in zip(("ours", "lax", "unedited"), seconds, strict=True)
    )
    return ProgramRow(
        program=settings.name,
        mode=settings.mode,
        time_us=our_times.p50,
        time_p99_us=our_times.p99,
        lax_time_us=lax_times.p50,
        lax_time_p99_us=lax_times.p99,
        ratio=lax_times.p50 / our_times.p50,
        unedited_time_us=unedited_times.p50,
        unedited_ratio=lax_times.p50 / unedited_times.p50,
        difference=difference if math.isfinite(difference) else None,
        handler_calls=all_ranks.total(f"{label}/handler_calls", handler_calls),
    )


def _difference(ours: Any, lax: Any) -> float:
    """Returns the largest difference, relative to lax's largest value, on this process's devices.

    Returns NaN if a value is not finite.
    """
    worst = 0.0
    for our_leaf, lax_leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(lax), strict=True):
        our_values, lax_values = _values(our_leaf), _values(lax_leaf)
        largest = np.max(np.abs(lax_values), initial=0)
        off = np.max(np.abs(our_values - lax_values), initial=0)
        if not np.isfinite([largest, off]).all():
            return math.nan
        worst = max(worst, float(off / largest if largest > 0 else off))
    return worst


def _values(x: jax.Array) -> np.ndarray:
    """Returns the shards of an array on this process's devices, stacked."""
    shards = [np.asarray(shard.data).astype(np.float64) for shard in x.addressable_shards]
    return np.stack(shards)
