"""Times of collectives called from JAX.

A chain of (operation, multiply) is timed, less the same chain without the operation.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_intranode
from jax_intranode._src.command_line.bench.collectives.operations import Operation
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.bench.timing import Times, program, statistics, take_turns
from jax_intranode._src.selection import tuning


def _fit(x: jax.Array, count: int) -> jax.Array:
    """Repeats or truncates an array to this number of elements."""
    return x[:count] if len(x) >= count else jnp.tile(x, count // len(x))


def _chain(mesh: Mesh, call: Callable[[Any], Any], length: int) -> Callable[..., Any]:
    """Returns a program that applies a function many times, each time to the previous result.

    Between two calls the result is brought to the operand's size and multiplied, so that sums
    don't grow. A barrier keeps XLA from merging the calls. The caller subtracts this overhead.
    """

    def body(xs: list[jax.Array], scale: jax.Array) -> list[jax.Array]:
        for _ in range(length):
            ys = zip(call(xs), xs, strict=True)
            xs = jax.lax.optimization_barrier([_fit(y, len(x)) * scale for y, x in ys])
        return xs

    return program(mesh, body, donated=0)


def chain_length(settings: Settings, size: int, leaves: int) -> int:
    """Returns the number of calls in a chain."""
    if settings.chain is not None:
        return settings.chain
    # Chains are long on GPUs, because a single process launches on all of them: a short program
    # would end before the next one is launched.
    if settings.platform == "cpu":
        length = 32 if size < 1 << 20 else 4
    else:
        length = 256 if size <= 1 << 20 else 128 if size <= 4 << 20 else 16
    # With many leaves a call takes longer, and the compiled program is larger.
    return length if leaves == 1 else max(4, min(length, 1024 // leaves))


def times_from_jax(
    settings: Settings,
    operation: Operation,
    mesh: Mesh,
    data: list[jax.Array],
    size: int,
    with_shipped: bool = False,
) -> tuple[Times, Times, Times | None, int]:
    """Measures one call of ours and of lax's on this rank.

    Each chain continues from its last result in the same memory. With changing addresses XLA would
    capture its CUDA graphs again, which takes longer than running them.

    Args:
        settings: what to measure.
        operation: the operation.
        mesh: a mesh with one axis "x" of all devices.
        data: the operands.
        size: bytes, as defined in `operations.Operation`.
        with_shipped: whether to measure our call by the shipped table, too.

    Returns:
        Our times, lax's times, ours by the shipped table, and how often XLA called our FFI handlers
        meanwhile.
    """
    n = settings.devices
    dtype = data[0].dtype
    length = chain_length(settings, size, len(data))

    def scale(value: float) -> jax.Array:
        shard = np.full((1,), value, dtype)
        return jax.make_array_from_callback((n,), data[0].sharding, lambda index: shard)

    def nothing(xs: list[jax.Array]) -> list[jax.Array]:
        # An array of the size of the operation's result.
        return [x[: len(x) // n] if operation.result_is_part else x for x in xs]

    one = scale(1)
    # Without a sum, multiplying by 1/n would end in subnormal numbers, which are slow on some
    # devices.
    grows = operation.sums and not operation.is_mean and not jnp.issubdtype(dtype, jnp.integer)
    mean = scale(1 / n) if grows else one
    chains = [
        (_chain(mesh, partial(operation.call, jax_intranode), length), mean),
        (_chain(mesh, partial(operation.call, jax.lax), length), mean),
        (_chain(mesh, nothing, length), one),
    ]
    if with_shipped:
        chains.append((_chain(mesh, partial(operation.call, jax_intranode), length), mean))
    calls = 4 if settings.platform == "cpu" else 5
    states = [[x.copy() for x in data] for _ in chains]

    def run(which: int) -> Any:
        chain, factor = chains[which]
        # The first call lowers the chain.
        with tuning.using(None) if which == 3 else contextlib.nullcontext():
            for _ in range(calls):
                states[which] = chain(states[which], factor)
        return states[which]

    runs = [partial(run, which) for which in range(len(chains))]
    seconds, handler_calls = take_turns(runs, mesh, settings)
    ours, lax, empty, *shipped = (1e6 * np.array(times) / (calls * length) for times in seconds)
    overhead = np.median(empty)
    our_times, lax_times, *shipped_times = (
        statistics(np.maximum(us - overhead, 0)) for us in (ours, lax, *shipped)
    )
    return our_times, lax_times, shipped_times[0] if shipped_times else None, handler_calls
