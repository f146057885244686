"""Timing of programs that take turns, and statistics of their repetitions."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_intranode._src.command_line.bench import power
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.native import extension

# Tables show a shorter time as 0.00 us.
_LEAST_US = 0.005
_DOUBTFUL_SPREAD = 0.2


class Times(NamedTuple):
    """Median and 99th percentile of the repetitions, in microseconds a call.

    With few repetitions the latter is almost the largest time. The spread is that between the
    quartiles, divided by the median. What a GPU draws is None unless it was measured.
    """

    p50: float
    p99: float
    spread: float = 0.0
    watts: float | None = None
    sm_mhz: float | None = None


def of_slowest(name: str, *us: Sequence[float] | np.ndarray) -> Times:
    """Returns the largest times of all ranks, and of several devices of this one.

    An operation is done when its last device is.
    """
    quartiles = np.array([np.percentile(of_device, (25, 50, 75, 99)) for of_device in us])
    low, p50, high, p99 = quartiles.T
    found = {"p50": p50, "p99": p99, "spread": (high - low) / np.maximum(p50, _LEAST_US)}
    return Times(**{key: all_ranks.largest(f"{name}/{key}", max(v)) for key, v in found.items()})


def array(mesh: Mesh, count: int, shard: Callable[[int], np.ndarray]) -> jax.Array:
    """Returns an array with `count` elements on each device: those that `shard` makes of a rank."""

    def of_device(index: Any) -> np.ndarray:
        return shard((index[0].start or 0) // count)

    sharding = NamedSharding(mesh, PartitionSpec("x"))
    return jax.make_array_from_callback((mesh.size * count,), sharding, of_device)


def program(mesh: Mesh, body: Callable[..., Any], donated: int | None = None) -> Any:
    """Compiles a function of per-device arrays for all devices of the mesh.

    Args:
        donated: the number of the argument whose memory the result may take.
    """
    spec = PartitionSpec("x")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=() if donated is None else donated)


class Chain:
    """A program of many calls, each of which depends on the previous one, and its state.

    It continues from its last state in the same memory. With changing addresses XLA would capture
    its CUDA graphs again, which takes longer than running them.
    """

    def __init__(
        self,
        mesh: Mesh,
        link: Callable[..., Any],
        moving: Any,
        fixed: Sequence[Any],
        length: int,
        executions: int,
    ) -> None:
        """Compiles nothing yet.

        Args:
            link: a function of the state and of `fixed` that returns the next state.
            fixed: more arguments of each call.
            executions: how often `run` executes the program.
        """

        def body(moving: Any, *fixed: Any) -> Any:
            for _ in range(length):
                moving = link(moving, *fixed)
            return moving

        self.program = program(mesh, body, donated=0)
        self.moving = jax.tree.map(lambda x: x.copy(), moving)
        self.fixed = fixed
        self._executions = executions

    def run(self) -> Any:
        """Starts the program, and returns the state to wait for."""
        for _ in range(self._executions):
            self.moving = self.program(self.moving, *self.fixed)
        return self.moving


def take_turns(
    runs: Sequence[Callable[[], Any]], mesh: Mesh, settings: Settings, untimed: int = 0
) -> tuple[list[list[float]], int]:
    """Times functions that take turns.

    Args:
        runs: functions that start work on all devices of the mesh and return arrays to wait for.
        untimed: how often a function is called, untimed, right before each of its repetitions.

    Returns:
        For each function the seconds of its repetitions; and how often XLA called our FFI handlers
        in all of them, 0 if it only replayed CUDA graphs.
    """
    align = program(mesh, lambda x: jax.lax.psum(x, "x"))
    one = array(mesh, 1, lambda rank: np.ones(1, np.float32))
    for run in runs:
        jax.block_until_ready(run())  # Compiles it, also without warm-up.
    seconds: list[list[float]] = [[] for _ in runs]
    handler_calls = 0
    for repetition in range(-settings.warmup_iterations, settings.iterations):
        # The first function changes, and every second round goes in the opposite direction. So a
        # drift affects all functions alike, and so does a predecessor that lowers a GPU's clock by
        # heating it.
        turns = [(repetition + turn) % len(runs) for turn in range(len(runs))]
        for which in turns if repetition % 2 == 0 else reversed(turns):
            for _ in range(untimed):
                settled = runs[which]()
            if untimed > 0:
                jax.block_until_ready(settled)
            # Ranks drift apart between collectives. A rank that starts early would wait for the
            # others, and the collective would be charged for that.
            align(one).block_until_ready()
            calls_before = extension.handler_calls()
            start = time.perf_counter()
            jax.block_until_ready(runs[which]())
            if repetition >= 0:
                seconds[which].append(time.perf_counter() - start)
                handler_calls += extension.handler_calls() - calls_before
    return seconds, handler_calls


def fields(times: Mapping[str, Times]) -> dict[str, Any]:
    """Returns the fields of "ours", None without it, of "lax", and which times are doubtful."""
    ours, lax = times.get("ours"), times["lax"]
    doubts = [f"{name} 0.00 us" for name, of in times.items() if of.p50 < _LEAST_US]
    wide = {name: of.spread for name, of in times.items() if of.spread > _DOUBTFUL_SPREAD}
    return {
        "time_us": ours and ours.p50,
        "time_p99_us": ours and ours.p99,
        "lax_time_us": lax.p50,
        "lax_time_p99_us": lax.p99,
        "ratio": lax.p50 / ours.p50 if ours and ours.p50 else None,
        "spread": ours and ours.spread,
        "lax_spread": lax.spread,
        "doubts": doubts + [f"{name} spread {spread:.0%}" for name, spread in wide.items()],
    }


def draw_fields(times: Mapping[str, Times], *names: str) -> dict[str, float | None]:
    """Returns the fields of what GPUs draw; those of "ours" have no prefix."""
    return {
        ("" if name == "ours" else f"{name}_") + key: getattr(times.get(name), key, None)
        for name in names
        for key in ("watts", "sm_mhz")
    }


def compare(
    runs: Mapping[str, Callable[[], Any]],
    mesh: Mesh,
    settings: Settings,
    label: str,
    *,
    calls: int,
    untimed: int = 0,
    overhead_s: float = 0.0,
) -> tuple[dict[str, Times], int]:
    """Times functions that take turns, on all ranks.

    Args:
        runs: see `take_turns`, by name. The time of one that is called "empty" is subtracted from
            the others.
        calls: the number of calls in a repetition.
        untimed: see `take_turns`.
        overhead_s: the part of a repetition that is no call.

    Returns:
        The slowest rank's times of each function, but "empty", and what GPUs draw if the functions
        settle; and how often XLA called our FFI handlers, over all ranks.
    """
    seconds, handler_calls = take_turns(list(runs.values()), mesh, settings, untimed)
    us = {
        name: 1e6 * (np.array(of_run) - overhead_s) / calls
        for name, of_run in zip(runs, seconds, strict=True)
    }
    if "empty" in us:
        nothing = np.median(us.pop("empty"))
        us = {name: np.maximum(of_run - nothing, 0) for name, of_run in us.items()}
    times = {name: of_slowest(f"{label}/{name}", of_run) for name, of_run in us.items()}
    if untimed > 0 and settings.platform == "gpu":
        seconds_of = {name: 1e-6 * calls * of.p50 + overhead_s for name, of in times.items()}
        draws = power.draws({name: runs[name] for name in times}, seconds_of, mesh, label)
        times = {name: Times(*of[:3], *draws[name]) for name, of in times.items()}
    return times, all_ranks.total(f"{label}/handler_calls", handler_calls)
