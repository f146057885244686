"""all_gather: every rank's operand, in rank order, on every rank."""

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
from jax_intranode._src.ops.primitive import Operation, nbytes
from jax_intranode._src.selection import select


def all_gather(
    x: Any,
    axis_name: Any,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> Any:
    """Gathers arrays over one or more mapped axes; takes the place of ``jax.lax.all_gather``.

    Inside ``jax.shard_map`` over devices of one host, each rank writes its array into its peers'
    memory. Other dtypes, sizes, axes and platforms fall back to ``jax.lax.all_gather``, on every
    rank alike. Bits are kept, except that a floating-point NaN may become another NaN.

    Differentiates as ``jax.lax.all_gather`` does: the transpose is a ``psum_scatter``.

    The algorithm follows the packet protocol of NCCL's symmetric kernels (AGxLL).

    Args:
        x: an array or a pytree of arrays of any shape. Accelerated dtypes: those of ``psum``, bool,
            int16, uint16, complex64 and complex128.
        axis_name: the name of a mapped axis, or a tuple of names, with ranks in row-major order.
        axis_index_groups: as in ``jax.lax.all_gather``; not accelerated.
        axis: the position of the new axis, or, if tiled, the axis along which to concatenate.
        tiled: whether to concatenate the arrays, instead of stacking them on a new axis.
        to: as in ``jax.lax.all_gather``; only "varying" is accelerated.

    Returns:
        Arrays of the dtypes of `x`, with a new axis whose length is the number of ranks, or, if
        tiled, with `axis` longer by that factor.

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.all_gather``.
        TypeError: `axis` is no integer.
        ValueError: there is no such `axis`.

    Examples:
        Each rank has two numbers, and gets all four:

        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P(None, "model"))
        ... def gathered(x):
        ...     return jax_intranode.all_gather(x, "model", tiled=True)[:, None]
        >>> gathered(jnp.array([1, 2, 3, 4]))
        Array([[1, 1],
               [2, 2],
               [3, 3],
               [4, 4]], dtype=int32)
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    axis = collective.integer("all_gather", "axis", axis)

    def by_lax(leaf: Any) -> Any:
        return lax.all_gather(
            leaf, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled, to=to
        )

    reason = fallback.reason_of_axes(axes, axis_index_groups)
    if reason is None and to != "varying":
        reason = f"to={to!r}"
    if reason is not None:
        with fallback.to_lax("all_gather", reason):
            return by_lax(x)
    size = lax.psum(1, axes)

    def gather(leaf: Any) -> Any:
        reason = fallback.reason_of_array("all_gather", leaf, axes)
        if reason is not None:
            with fallback.to_lax("all_gather", reason):
                return by_lax(leaf)
        dimensions = leaf.ndim if tiled else leaf.ndim + 1
        if not -dimensions <= axis < dimensions:
            reason = (
                f"axis is {axis}; with {leaf.ndim} dimensions it must be from {-dimensions} to "
                f"{dimensions - 1}"
            )
            with fallback.to_lax("all_gather", reason, logged=False):
                return by_lax(leaf)  # which raises the ValueError
        params = AllGatherParams(axes, axis % dimensions, bool(tiled), size)
        (result,) = collective.bind(all_gather_p, [leaf], params)
        return result

    return jax.tree.map(gather, x)


# Abstract evaluation.


def _abstract_eval(x: Any, *, params: AllGatherParams) -> list[Any]:
    shape = list(x.shape)
    if params.tiled:
        shape[params.axis] *= params.world_size
    else:
        shape.insert(params.axis, params.world_size)
    return [x.update(shape=tuple(shape))]


# Selection and lowering.


def _select(
    site: LoweringSite, aval: Any, params: AllGatherParams, traced_over: Any
) -> select.Selection:
    return collective.select_one(all_gather_p, site, aval, nbytes(aval), params, traced_over)


def _explain(
    site: LoweringSite, avals: Sequence[Any], *, params: AllGatherParams, traced_over: Any
) -> list[Operation]:
    selected = _select(site, avals[0], params, traced_over)
    return [collective.operation_of(all_gather_p, avals, selected)]


def _lower(ctx: Any, x: Any, *, params: AllGatherParams, traced_over: Any) -> list[Any]:
    site = LoweringSite.of(ctx)
    (aval,), (out_aval,) = ctx.avals_in, ctx.avals_out
    selected = _select(site, aval, params, traced_over)
    if selected.algorithm == "lax":
        return collective.lower_to_lax(ctx, all_gather_p, [x], params, selected)
    # The custom call stacks the shards along a first dimension. `arrange` moves that dimension.
    stacked = aval.update(shape=(params.world_size, *aval.shape))
    (gathered,) = collective.lower_to_call(
        ctx.replace(avals_out=[stacked]), all_gather_p, [x], site.mesh, params.axes, selected
    )

    def arrange(v: Any) -> Any:
        return jnp.moveaxis(v, 0, params.axis).reshape(out_aval.shape)

    lower = mlir.lower_fun(arrange, multiple_results=False)
    return list(lower(ctx.replace(avals_in=[stacked]), gathered))


# Differentiation.


def _transpose(cotangents: Sequence[Any], x: Any, *, params: AllGatherParams) -> list[Any]:
    scattered = PsumScatterParams(params.axes, params.axis, params.tiled, params.world_size)

    def of_nonzero(cts: list[Any]) -> list[Any]:
        return [collective.bind_or_fall_back(psum_scatter_p, ct, scattered) for ct in cts]

    return collective.transpose(of_nonzero, cotangents, [x])


# Batching: the batch is one more dimension.


def _batch(
    name: Hashable, size: int, operands: Sequence[Any], dims: Sequence[Any], params: AllGatherParams
) -> tuple[list[Any], list[Any]]:
    if name in params.axes:
        return collective.batch_over_hidden_axis(
            all_gather_p, name, size, operands, dims, params, None
        )
    (x,), (d,), axis = operands, dims, params.axis
    if d <= axis:
        axis += 1
    elif not params.tiled:
        d += 1
    batched = AllGatherParams(params.axes, axis, params.tiled, params.world_size)
    return all_gather_p.bind(x, params=batched), [d]


# Registration.

all_gather_p.register(
    abstract_eval=_abstract_eval,
    lower=_lower,
    explain=_explain,
    jvp=collective.jvp,
    transpose=_transpose,
    batch=_batch,
    needed=collective.needed,
)
