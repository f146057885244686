"""Times as called from JAX: chains of calls, turns, and statistics."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_intranode
from jax_intranode._src import native
from jax_intranode._src.bench import exchange
from jax_intranode._src.bench.operations import Operation
from jax_intranode._src.bench.settings import Settings


@dataclass(frozen=True)
class Times:
    """Statistics of the repetitions, in microseconds a call.

    Attributes:
        p50: the median.
        p99: the 99th percentile. Of few repetitions it is nearly the largest.
    """

    p50: float
    p99: float

    def __add__(self, other: "Times") -> "Times":
        """The times of two operations, one after the other."""
        return Times(self.p50 + other.p50, self.p99 + other.p99)


def statistics(us: Sequence[float] | np.ndarray) -> Times:
    """Returns the statistics of times in microseconds."""
    p50, p99 = np.percentile(us, (50, 99))
    return Times(float(p50), float(p99))


def slowest_rank(name: str, times: Times) -> Times:
    """Returns the largest of all ranks' times, since an operation is done when the last one is."""
    return Times(
        exchange.max_over_ranks(f"{name}/p50", times.p50),
        exchange.max_over_ranks(f"{name}/p99", times.p99),
    )


# Programs and chains.


def program(mesh: Mesh, body: Callable[..., Any], donated: int | None = None) -> Callable[..., Any]:
    """Compiles a function of per-device arrays for all devices of the mesh.

    Args:
        mesh: a mesh with one axis "x".
        body: the function.
        donated: the argument whose memory the result takes.
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


def _fit(x: jax.Array, count: int) -> jax.Array:
    """Repeats an array, or cuts it off, so that it has that many elements."""
    return x[:count] if len(x) >= count else jnp.tile(x, count // len(x))


def _chain(mesh: Mesh, call: Callable[[Any], Any], length: int) -> Callable[..., Any]:
    """Returns a program that applies a function many times, each to the last one's result.

    The result is brought to the operand's size and multiplied, which keeps sums from growing; the
    barrier keeps the links of the chain apart. All of it costs time, which the caller takes off
    again.
    """

    def body(xs: list[jax.Array], scale: jax.Array) -> list[jax.Array]:
        for _ in range(length):
            ys = zip(call(xs), xs, strict=True)
            xs = jax.lax.optimization_barrier([_fit(y, len(x)) * scale for y, x in ys])
        return xs

    return program(mesh, body, donated=0)


def chain_length(settings: Settings, size: int, leaves: int) -> int:
    """Returns how many calls to make in a row."""
    if settings.chain is not None:
        return settings.chain
    # Long chains on GPUs: one process launches on all of them, and a short program ends before the
    # next one has been launched.
    if settings.platform == "cpu":
        length = 32 if size < 1 << 20 else 4
    else:
        length = 256 if size <= 1 << 20 else 128 if size <= 4 << 20 else 16
    # The program grows with the leaves, and so does the time that one link takes.
    return length if leaves == 1 else max(4, min(length, 1024 // leaves))


def times_as_called(
    settings: Settings, operation: Operation, mesh: Mesh, data: list[jax.Array], size: int
) -> tuple[Times, Times, int]:
    """Measures, on this rank, one call of ours and of lax's.

    Both are chains of (operation, multiply) less the same chain without the operation. A chain goes
    on from its last result, in the same memory: with other addresses XLA would capture its graphs
    again, which takes longer than running them.

    Returns:
        Both times, and how often XLA called a handler of ours while they were taken.
    """
    n = settings.devices
    dtype = data[0].dtype
    length = chain_length(settings, size, len(data))

    def scale(value: float) -> jax.Array:
        shard = np.full((1,), value, dtype)
        return jax.make_array_from_callback((n,), data[0].sharding, lambda index: shard)

    def nothing(xs: list[jax.Array]) -> list[jax.Array]:
        # As long as the operation's result, of which the chain makes the operand again.
        return [x[: len(x) // n] if operation.result_is_part else x for x in xs]

    one = scale(1)
    # Where nothing is summed, multiplying by 1/n would end in subnormal numbers, a slow path on
    # some devices.
    grows = operation.sums and not operation.is_mean and not jnp.issubdtype(dtype, jnp.integer)
    mean = scale(1 / n) if grows else one
    chains = (
        (_chain(mesh, partial(operation.call, jax_intranode), length), mean),
        (_chain(mesh, partial(operation.call, jax.lax), length), mean),
        (_chain(mesh, nothing, length), one),
    )
    calls = 4 if settings.platform == "cpu" else 5
    states = [[x.copy() for x in data] for _ in chains]

    def run(which: int) -> Any:
        chain, factor = chains[which]
        for _ in range(calls):
            states[which] = chain(states[which], factor)
        return states[which]

    runs = [partial(run, which) for which in range(len(chains))]
    seconds, handler_calls = take_turns(runs, mesh, settings)
    ours, lax, empty = (1e6 * np.array(times) / (calls * length) for times in seconds)
    overhead = np.median(empty)
    our_times, lax_times = (statistics(np.maximum(us - overhead, 0)) for us in (ours, lax))
    return our_times, lax_times, handler_calls


def take_turns(
    runs: Sequence[Callable[[], Any]], mesh: Mesh, settings: Settings, untimed: int = 0
) -> tuple[list[list[float]], int]:
    """Repeats functions in turns.

    Returns the seconds of each one's repetitions, and how often XLA called a handler of ours in
    them: not at all if it only replayed graphs.

    Args:
        runs: functions that start work on all devices of the mesh and return arrays to wait for.
        mesh: a mesh with one axis "x".
        settings: how often.
        untimed: how often a function is called, untimed, right before each of its repetitions.
    """
    align = program(mesh, lambda x: jax.lax.psum(x, "x"))
    one = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, PartitionSpec("x")), lambda index: np.ones(1, np.float32)
    )
    for run in runs:
        jax.block_until_ready(run())  # Compiles, also without warm-up.
    seconds: list[list[float]] = [[] for _ in runs]
    handler_calls = 0
    for repetition in range(-settings.warmup_iterations, settings.iterations):
        # Another one goes first each time, and they go in the other direction every other time, so
        # that a drift or an after-effect hits all alike: after one that heats a GPU its clocks are
        # lower.
        turns = [(repetition + turn) % len(runs) for turn in range(len(runs))]
        for which in turns if repetition % 2 == 0 else reversed(turns):
            for _ in range(untimed):
                settled = runs[which]()
            if untimed > 0:
                jax.block_until_ready(settled)
            # Ranks drift apart while they do not communicate; who starts early would wait, and the
            # wait would be charged to the collective.
            align(one).block_until_ready()
            calls_before = native.handler_calls()
            start = time.perf_counter()
            jax.block_until_ready(runs[which]())
            if repetition >= 0:
                seconds[which].append(time.perf_counter() - start)
                handler_calls += native.handler_calls() - calls_before
    return seconds, handler_calls
