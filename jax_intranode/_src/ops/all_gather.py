"""all_gather: every rank's operand, in rank order, on every rank."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_intranode._src import reasons
from jax_intranode._src.ops import collective, fallback
from jax_intranode._src.ops.annotations import AxisNames, PyTree
from jax_intranode._src.ops.collective import (
    AllGatherParams,
    PsumScatterParams,
    all_gather_p,
    psum_scatter_p,
)


def all_gather(
    x: PyTree,
    axis_name: AxisNames,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> PyTree:
    """Gathers arrays over one or more mapped axes; takes the place of ``jax.lax.all_gather``.

    Inside ``jax.shard_map`` over devices of one host, each rank writes its array into its peers'
    memory. Other dtypes, larger arrays (`explain` says up to which size), other axes and platforms
    fall back to ``jax.lax.all_gather``, on every rank alike. Bits are kept, except that a
    floating-point NaN may become another NaN.

    Differentiates as ``jax.lax.all_gather`` does: the transpose is a ``psum_scatter``.

    The algorithm follows NCCL's symmetric kernels (AGxLL). The encoding of packets is our own.

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
        TypeError: `axis` is not an integer.
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

    def params_of(leaf: Any, size: int) -> AllGatherParams | str:
        dimensions = leaf.ndim if tiled else leaf.ndim + 1
        reason = collective.reason_of_dimension(
            "axis", axis, leaf.ndim, -dimensions, dimensions - 1
        )
        return reason or AllGatherParams(axes, axis % dimensions, bool(tiled), size)

    reason = fallback.reason_of_axes(axes, axis_index_groups)
    if reason is None and to != "varying":
        reason = reasons.TO.of(to=to)
    return collective.of_each_array(all_gather_p, x, axes, reason, by_lax, params_of)


# Rules.


def _shape(shape: list[int], params: AllGatherParams) -> tuple[int, ...]:
    if params.tiled:
        shape[params.axis] *= params.world_size
    else:
        shape.insert(params.axis, params.world_size)
    return tuple(shape)


def _batched(params: AllGatherParams, d: int) -> tuple[AllGatherParams, int]:
    if d <= params.axis:
        return replace(params, axis=params.axis + 1), d
    return params, d if params.tiled else d + 1


collective.register(
    all_gather_p,
    shape=_shape,
    join=lambda parts, shape, params: jnp.moveaxis(parts, 0, params.axis).reshape(shape),
    transposed=lambda params: (
        psum_scatter_p,
        PsumScatterParams(params.axes, params.axis, params.tiled, params.world_size),
    ),
    batched=_batched,
    hidden_dim=None,
)
