"""psum_scatter: the sum of every rank's operand, of which each rank keeps its own part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.ops import collective, fallback
from jax_intranode._src.ops.annotations import AxisNames, PyTree
from jax_intranode._src.ops.collective import (
    AllGatherParams,
    PsumScatterParams,
    all_gather_p,
    psum_scatter_p,
)


def psum_scatter(
    x: PyTree,
    axis_name: AxisNames,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
) -> PyTree:
    """Sums over mapped axes and keeps a part; takes the place of ``jax.lax.psum_scatter``.

    Inside ``jax.shard_map`` over devices of one host, each rank writes every part of its array into
    the memory of the rank that keeps it, which computes the sum. Other dtypes, larger arrays
    (`explain` says up to which size), other axes and platforms fall back to
    ``jax.lax.psum_scatter``, on every rank alike. Sums are computed as by ``jax_intranode.psum``:
    in rank order, rounded once, with the same bits in every run.

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
        TypeError: `scatter_dimension` is not an integer.
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
    axes = trace_state.axes_in_types(axis_name if isinstance(axis_name, tuple) else (axis_name,))
    scatter_dimension = collective.integer("psum_scatter", "scatter_dimension", scatter_dimension)

    def by_lax(leaf: Any) -> Any:
        return lax.psum_scatter(
            leaf,
            axis_name,
            scatter_dimension=scatter_dimension,
            axis_index_groups=axis_index_groups,
            tiled=tiled,
        )

    def params_of(leaf: Any, size: int) -> PsumScatterParams | str:
        last = leaf.ndim - 1
        reason = collective.reason_of_dimension(
            "scatter_dimension", scatter_dimension, leaf.ndim, 0, last
        ) or collective.reason_of_length(leaf, scatter_dimension, size, tiled)
        return reason or PsumScatterParams(axes, scatter_dimension, bool(tiled), size)

    reason = fallback.reason_of_axes(axes, axis_index_groups)
    return collective.of_each_array(psum_scatter_p, x, axes, reason, by_lax, params_of)


# Rules.


def _shape(shape: list[int], params: PsumScatterParams) -> tuple[int, ...]:
    if params.tiled:
        shape[params.dimension] //= params.world_size
    else:
        del shape[params.dimension]
    return tuple(shape)


def _divide(x: Any, params: PsumScatterParams) -> Any:
    parts = collective.stack_parts(x, params.dimension, params.world_size)
    return parts.reshape(params.world_size, *_shape(list(x.shape), params))


def _batched(params: PsumScatterParams, d: int) -> tuple[PsumScatterParams, int]:
    if d <= params.dimension:
        return replace(params, dimension=params.dimension + 1), d
    return params, d if params.tiled else d - 1


collective.register(
    psum_scatter_p,
    shape=_shape,
    divide=_divide,
    transposed=lambda params: (
        all_gather_p,
        AllGatherParams(params.axes, params.dimension, params.tiled, params.world_size),
    ),
    batched=_batched,
    hidden_dim=0,
)
