"""Times of collectives as called from JAX: chains of calls, less the same chains without them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_intranode
from jax_intranode._src.bench.collectives.operations import Operation
from jax_intranode._src.bench.settings import Settings
from jax_intranode._src.bench.timing import Times, program, statistics, take_turns


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
