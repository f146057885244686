"""psum_scatter: the sum of every rank's operand, of which each rank keeps its own part."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from jax_intranode._src.ops import collective, fallback
from jax_intranode._src.ops.collective import (
    AllGatherParams,
    PsumScatterParams,
    all_gather_p,
    psum_scatter_p,
)
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Operation
from jax_intranode._src.selection import select


def psum_scatter(
    x: Any,
    axis_name: Any,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
) -> Any:
    """Sums over mapped axes and keeps a part; takes the place of ``jax.lax.psum_scatter``.

    Inside ``jax.shard_map`` over devices of one host, each rank writes every part of its array into
    the memory of the rank that keeps it, which computes the sum. Other dtypes, sizes, axes and
    platforms fall back to ``jax.lax.psum_scatter``, on every rank alike. Sums are computed as by
    ``jax_intranode.psum``: in rank order, rounded once, with the same bits in every run.

    Differentiates as ``jax.lax.psum_scatter`` does: the transpose is an ``all_gather``.

    The algorithm follows the packet protocol of NCCL's symmetric kernels (RSxLL).

    Args:
        x: an array or a pytree of arrays of any shape. Accelerated dtypes: those of ``psum``.
        axis_name: the name of a mapped axis, or a tuple of names, with ranks in row-major order.
        scatter_dimension: the dimension that is divided among the ranks. Its length is the number
            of ranks, or, if tiled, a multiple of it.
        axis_index_groups: as in ``jax.lax.psum_scatter``; not accelerated.
        tiled: whether to keep the dimension, shorter by a factor of the number of ranks, instead
            of dropping it.

    Returns:
        This rank's parts of the sums, with the dtypes of `x`.

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.psum_scatter``.
        TypeError: `scatter_dimension` is no integer.
        ValueError: the dimension can't be divided among the ranks.

    Examples:
        Each rank has four numbers, and gets the sums of two:

        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        ... def sums(x):
        ...     return jax_intranode.psum_scatter(x, "model", tiled=True)
        >>> sums(jnp.array([1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0]))
        Array([11., 22., 33., 44.], dtype=float32)
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    scatter_dimension = collective.integer("psum_scatter", "scatter_dimension", scatter_dimension)

    def by_lax(leaf: Any) -> Any:
        return lax.psum_scatter(
            leaf,
            axis_name,
            scatter_dimension=scatter_dimension,
            axis_index_groups=axis_index_groups,
            tiled=tiled,
        )

    reason = fallback.reason_of_axes(axes, axis_index_groups)
    if reason is not None:
        with fallback.to_lax("psum_scatter", reason):
            return by_lax(x)
    size = lax.psum(1, axes)

    def reason_of_shape(leaf: Any) -> str | None:
        # lax raises the ValueError.
        if not 0 <= scatter_dimension < leaf.ndim:
            return (
                f"scatter_dimension is {scatter_dimension}; with {leaf.ndim} dimensions it must be "
                f"from 0 to {leaf.ndim - 1}"
            )
        length = leaf.shape[scatter_dimension]
        if length % size != 0 or (not tiled and length != size):
            needed = f"a multiple of {size}" if tiled else f"{size}, or pass tiled=True"
            return (
                f"x has the shape {leaf.shape}; with {size} ranks, the length of its dimension "
                f"{scatter_dimension} must be {needed}"
            )
        return None

    def scatter(leaf: Any) -> Any:
        reason = fallback.reason_of_array("psum_scatter", leaf, axes) or reason_of_shape(leaf)
        if reason is not None:
            with fallback.to_lax("psum_scatter", reason):
                return by_lax(leaf)
        params = PsumScatterParams(axes, scatter_dimension, bool(tiled), size)
        (result,) = collective.bind(psum_scatter_p, [leaf], params)
        return result

    return jax.tree.map(scatter, x)


# Abstract evaluation.


def _abstract_eval(x: Any, *, params: PsumScatterParams) -> list[Any]:
    shape = list(x.shape)
    if params.tiled:
        shape[params.dimension] //= params.world_size
    else:
        del shape[params.dimension]
    return [x.update(shape=tuple(shape))]


# Selection and lowering.


def _select(
    site: LoweringSite, aval: Any, params: PsumScatterParams, traced_over: Any
) -> select.Selection:
    part = aval.size // params.world_size * aval.dtype.itemsize
    return collective.select_one(psum_scatter_p, site, aval, part, params, traced_over)


def _explain(
    site: LoweringSite, avals: Sequence[Any], *, params: PsumScatterParams, traced_over: Any
) -> list[Operation]:
    selected = _select(site, avals[0], params, traced_over)
    return [collective.operation_of(psum_scatter_p, avals, selected)]


def _lower(ctx: Any, x: Any, *, params: PsumScatterParams, traced_over: Any) -> list[Any]:
    site = LoweringSite.of(ctx)
    (aval,), (out_aval,) = ctx.avals_in, ctx.avals_out
    selected = _select(site, aval, params, traced_over)
    if selected.algorithm == "lax":
        return collective.lower_to_lax(ctx, psum_scatter_p, [x], params, selected)
    size, dimension = params.world_size, params.dimension

    def arrange(v: Any) -> Any:
        """Stacks the ranks' parts, as the custom call expects them."""
        divided = (*v.shape[:dimension], size, -1, *v.shape[dimension + 1 :])
        return jnp.moveaxis(v.reshape(divided), dimension, 0).reshape(size, *out_aval.shape)

    stacked = aval.update(shape=(size, *out_aval.shape))
    lower = mlir.lower_fun(arrange, multiple_results=False)
    (parts,) = lower(ctx.replace(avals_out=[stacked]), x)
    return collective.lower_to_call(
        ctx.replace(avals_in=[stacked]), psum_scatter_p, [parts], site.mesh, params.axes, selected
    )


# Differentiation.


def _transpose(cotangents: Sequence[Any], x: Any, *, params: PsumScatterParams) -> list[Any]:
    gathered = AllGatherParams(params.axes, params.dimension, params.tiled, params.world_size)

    def of_nonzero(cts: list[Any]) -> list[Any]:
        return [collective.bind_or_fall_back(all_gather_p, ct, gathered) for ct in cts]

    return collective.transpose(of_nonzero, cotangents, [x])


# Batching: the batch is one more dimension.


def _batch(
    name: Hashable,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: PsumScatterParams,
) -> tuple[list[Any], list[Any]]:
    if name in params.axes:
        return collective.batch_over_hidden_axis(
            psum_scatter_p, name, size, operands, dims, params, 0
        )
    (x,), (d,), dimension = operands, dims, params.dimension
    if d <= dimension:
        dimension += 1
    elif not params.tiled:
        d -= 1
    batched = PsumScatterParams(params.axes, dimension, params.tiled, params.world_size)
    return psum_scatter_p.bind(x, params=batched), [d]


# Registration.

psum_scatter_p.register(
    abstract_eval=_abstract_eval,
    lower=_lower,
    explain=_explain,
    jvp=collective.jvp,
    transpose=_transpose,
    batch=_batch,
    needed=collective.needed,
)
