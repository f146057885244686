"""psum: the sum of every rank's operand, on every rank."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jax_intranode._src.ops import all_reduce, collective
from jax_intranode._src.ops.annotations import AxisNames, PyTree
from jax_intranode._src.ops.collective import PsumParams, psum_p


def psum(
    x: PyTree,
    axis_name: AxisNames,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> PyTree:
    """Sums over one or more mapped axes; takes the place of ``jax.lax.psum``.

    Inside ``jax.shard_map`` over devices of one host, kernels that write into the peers' memory
    compute the sum, by one of two algorithms, which a measured table chooses by size. In one-shot
    each rank sends its array to all others; two-shot is a reduce-scatter, then an all-gather. Other
    dtypes, larger arrays, other axes and platforms fall back to ``jax.lax.psum``, on every rank
    alike; `explain` says which calls do, why, and up to which size ours is faster.

    Values are added in rank order, starting with rank 0's, and rounded once. float32, bfloat16 and
    float16 are added in float32, float64 in float64, and integers in their own type (wrapping). So
    the bits are the same on every rank, in every run and with both algorithms.

    The arrays of a pytree that have one dtype are summed by as few operations as possible.

    Forward and reverse mode give what ``jax.lax.psum`` gives, with check_vma on and off.

    Args:
        x: an array or a pytree of arrays of any shape. Accelerated dtypes: float32, bfloat16,
            float16, float64, int8, uint8, int32, uint32, int64, uint64.
        axis_name: the name of a mapped axis, or several names.
        axis_index_groups: as in ``jax.lax.psum``; not accelerated.

    Returns:
        The sums, with the shapes and dtypes of `x` (bool becomes int32).

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.psum``.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def total(x):
        ...     return jax_intranode.psum(x, "model")
        >>> total(jnp.array([1.0, 2.0]))
        Array([3.], dtype=float32)
    """
    # lax multiplies constants by the number of ranks.
    return all_reduce.of_tree(psum_p, x, axis_name, axis_index_groups, lax.psum, False)


def pmean(
    x: PyTree,
    axis_name: AxisNames,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> PyTree:
    """The mean over one or more mapped axes; takes the place of ``jax.lax.pmean``.

    It is `psum` divided by the number of ranks. Arguments, results, errors and differentiation are
    described there.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def mean(x):
        ...     return jax_intranode.pmean(x, "model")
        >>> mean(jnp.array([1.0, 2.0]))
        Array([1.5], dtype=float32)
    """
    with jax.named_scope("jax_intranode.pmean"):
        total = psum(x, axis_name, axis_index_groups=axis_index_groups)
    size = lax.psum(1, axis_name, axis_index_groups=axis_index_groups)
    return jax.tree.map(lambda v: v / size, total)


# Rules.


def _transpose(cotangents: Sequence[Any], *xs: Any, params: PsumParams) -> list[Any]:
    def of_nonzero(cts: list[Any]) -> list[Any]:
        if params.invariant:
            return [lax.pcast(ct, params.axes, to="varying") for ct in cts]
        return psum_p.bind(*cts, params=params)

    return collective.transpose(of_nonzero, cotangents, xs)


all_reduce.register(psum_p, collective.jvp, _transpose)
