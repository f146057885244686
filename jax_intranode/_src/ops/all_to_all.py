"""all_to_all: every rank's operand is divided among the ranks, and each gets its parts of all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_intranode._src.ops import collective, fallback
from jax_intranode._src.ops.annotations import AxisNames, PyTree
from jax_intranode._src.ops.collective import AllToAllParams, all_to_all_p


def all_to_all(
    x: PyTree,
    axis_name: AxisNames,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
) -> PyTree:
    """Exchanges parts of arrays over mapped axes; takes the place of ``jax.lax.all_to_all``.

    Inside ``jax.shard_map`` over devices of one host, each rank writes each part of its array into
    the memory of the rank that gets it. Other dtypes, larger arrays (`explain` says up to which
    size), other axes and platforms fall back to ``jax.lax.all_to_all``, on every rank alike. Bits
    are kept, except that a floating-point NaN may become another NaN. XLA transposes the array
    before the exchange unless `split_axis` is 0, and after it unless `concat_axis` is 0.

    For GPUs, rows of the shipped table count as measured for float32, bfloat16 and float16, among 2
    to 4 ranks with a process each, and between 2 ranks of one process. Otherwise unedited programs
    keep ``jax.lax.all_to_all`` (see ``install``), unless a tuning of the node says that ours is
    faster.

    Differentiates as ``jax.lax.all_to_all`` does: the transpose is an ``all_to_all`` with
    `split_axis` and `concat_axis` exchanged.

    The algorithm follows NCCL's symmetric kernels (AGxLL, RSxLL). The encoding of packets is our
    own.

    Args:
        x: an array or a pytree of arrays with at least one dimension. Accelerated dtypes: those of
            ``all_gather``, and the float8 dtypes.
        axis_name: the name of a mapped axis, or a tuple of names, with ranks in row-major order.
        split_axis: the dimension that is divided among the ranks. Its length is the number of
            ranks, or, if tiled, a multiple of it.
        concat_axis: the position of the new dimension, or, if tiled, the dimension along which to
            concatenate.
        axis_index_groups: as in ``jax.lax.all_to_all``; not accelerated.
        tiled: whether to keep `split_axis`, shorter by a factor of the number of ranks, and to
            make `concat_axis` longer by that factor. Otherwise `split_axis` is dropped, and
            `concat_axis` is added.

    Returns:
        Arrays of the dtypes of `x`: the parts that all ranks have for this one, in rank order. If
        not tiled, their shapes are those of `x` without `split_axis`, and with a dimension at
        `concat_axis` whose length is the number of ranks.

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.all_to_all``.
        TypeError: `split_axis` or `concat_axis` is not an integer.
        ValueError: there is no such dimension, or it can't be divided among the ranks. (jax 0.10
            may raise IndexError instead.)

    Examples:
        Each rank has a row per rank, and gets a row of each:

        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        ... def exchanged(x):
        ...     return jax_intranode.all_to_all(x, "model", 0, 0)
        >>> exchanged(jnp.array([[0, 1], [10, 11], [20, 21], [30, 31]]))
        Array([[ 0,  1],
               [20, 21],
               [10, 11],
               [30, 31]], dtype=int32)
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    split_axis = collective.integer("all_to_all", "split_axis", split_axis)
    concat_axis = collective.integer("all_to_all", "concat_axis", concat_axis)

    def by_lax(leaf: Any, split: int, concat: int) -> Any:
        return lax.all_to_all(
            leaf, axis_name, split, concat, axis_index_groups=axis_index_groups, tiled=tiled
        )

    reason = fallback.reason_of_axes(axes, axis_index_groups)
    size = 1 if reason is not None else lax.psum(1, axes)

    def bind(leaf: Any, split: int, concat: int) -> Any:
        params = AllToAllParams(axes, split, concat, size)
        (result,) = collective.bind(all_to_all_p, [leaf], params)
        return result

    def exchange(leaf: Any) -> Any:
        dimensions = np.ndim(leaf)
        why = reason or fallback.reason_of_array("all_to_all", leaf, axes)
        for name, axis in (("split_axis", split_axis), ("concat_axis", concat_axis)):
            wrong = collective.reason_of_dimension(
                name, axis, dimensions, -dimensions, dimensions - 1
            )
            if wrong is not None:
                with fallback.to_lax("all_to_all", why or wrong):
                    return by_lax(leaf, split_axis, concat_axis)  # which raises the error
        # Also for lax: that of jax 0.10 does not know negative ones.
        split, concat = split_axis % dimensions, concat_axis % dimensions
        why = why or collective.reason_of_length(leaf, split, size, tiled)
        if why is not None:
            with fallback.to_lax("all_to_all", why):
                return by_lax(leaf, split, concat)
        if tiled or split == concat:
            return bind(leaf, split, concat)
        # As in lax: the new dimension is there before the exchange, and the old one goes after it.
        concat += split < concat
        split += concat <= split
        result = bind(lax.expand_dims(leaf, (concat,)), split, concat)
        return lax.squeeze(result, (split,))

    return jax.tree.map(exchange, x)


# Rules.


def _shape(shape: list[int], params: AllToAllParams) -> tuple[int, ...]:
    shape[params.split] //= params.world_size
    shape[params.concat] *= params.world_size
    return tuple(shape)


def _batched(params: AllToAllParams, d: int) -> tuple[AllToAllParams, int]:
    split, concat = (axis + (d <= axis) for axis in (params.split, params.concat))
    return replace(params, split=split, concat=concat), d


collective.register(
    all_to_all_p,
    shape=_shape,
    divide=lambda x, params: collective.stack_parts(x, params.split, params.world_size),
    join=lambda parts, shape, params: jnp.moveaxis(parts, 0, params.concat).reshape(shape),
    transposed=lambda params: (
        all_to_all_p,
        replace(params, split=params.concat, concat=params.split),
    ),
    batched=_batched,
    hidden_dim=0,
    keeps_weak_type=False,
)
