"""Timing of programs that take turns, and statistics of their repetitions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_intranode._src.command_line.bench import all_ranks
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.native import extension


@dataclass(frozen=True)
class Times:
    """Statistics of the repetitions, in microseconds a call.

    Attributes:
        p50: the median.
        p99: the 99th percentile. With few repetitions it is almost the largest time.
    """

    p50: float
    p99: float

    def __add__(self, other: "Times") -> "Times":
        """Returns the times of two operations in a row."""
        return Times(self.p50 + other.p50, self.p99 + other.p99)


def statistics(us: Sequence[float] | np.ndarray) -> Times:
    """Returns the statistics of times in microseconds."""
    p50, p99 = np.percentile(us, (50, 99))
    return Times(float(p50), float(p99))


def slowest_rank(name: str, times: Times) -> Times:
    """Returns the largest times of all ranks. An operation is done when its last rank is.

    Args:
        name: a unique name of the measurement.
        times: this rank's times.
    """
    return Times(
        all_ranks.largest(f"{name}/p50", times.p50),
        all_ranks.largest(f"{name}/p99", times.p99),
    )


# Programs and chains.


def program(mesh: Mesh, body: Callable[..., Any], donated: int | None = None) -> Any:
    """Compiles a function of per-device arrays for all devices of the mesh.

    Args:
        mesh: a mesh with one axis "x".
        body: the function.
        donated: the number of the argument whose memory the result may take.
    """
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec("x"),
            check_vma=False,
        ),
        donate_argnums=() if donated is None else donated,
    )


def take_turns(
    runs: Sequence[Callable[[], Any]], mesh: Mesh, settings: Settings, untimed: int = 0
) -> tuple[list[list[float]], int]:
    """Times functions that take turns.

    Args:
        runs: functions that start work on all devices of the mesh and return arrays to wait for.
        mesh: a mesh with one axis "x".
        settings: the number of repetitions.
        untimed: how often a function is called, untimed, right before each of its repetitions.

    Returns:
        For each function the seconds of its repetitions; and how often XLA called our FFI handlers
        in all of them, 0 if it only replayed CUDA graphs.
    """
    align = program(mesh, lambda x: jax.lax.psum(x, "x"))
    one = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, PartitionSpec("x")), lambda index: np.ones(1, np.float32)
    )
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
