"""all_to_all: every rank's operand is divided among the ranks, and each gets its parts of all."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_intranode._src.ops import collective, fallback
from jax_intranode._src.ops.collective import AllToAllParams, all_to_all_p
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Operation, nbytes
from jax_intranode._src.selection import select


def all_to_all(
    x: Any,
    axis_name: Any,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
) -> Any:
    """Exchanges parts of arrays over mapped axes; takes the place of ``jax.lax.all_to_all``.

    Inside ``jax.shard_map`` over devices of one host, each rank writes each part of its array into
    the memory of the rank that gets it. Other dtypes, sizes, axes and platforms fall back to
    ``jax.lax.all_to_all``, on every rank alike. Bits are kept, except that a floating-point NaN may
    become another NaN. XLA transposes the array before the exchange unless `split_axis` is 0, and
    after it unless `concat_axis` is 0.

    On GPUs the speed has not been measured yet. There unedited programs keep ``jax.lax.all_to_all``
    (see ``install``), unless a tuning of the node says that ours is faster.

    Differentiates as ``jax.lax.all_to_all`` does: the transpose is an ``all_to_all`` with
    `split_axis` and `concat_axis` exchanged.

    The algorithm follows the packet protocol of NCCL's symmetric kernels (AGxLL, RSxLL).

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
        TypeError: `split_axis` or `concat_axis` is no integer.
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

    def exchange(leaf: Any) -> Any:
        dimensions = np.ndim(leaf)
        why = reason or fallback.reason_of_array("all_to_all", leaf, axes)
        for name, axis in (("split_axis", split_axis), ("concat_axis", concat_axis)):
            if not -dimensions <= axis < dimensions:
                with fallback.to_lax("all_to_all", why or _no_dimension(name, axis, dimensions)):
                    return by_lax(leaf, split_axis, concat_axis)  # which raises the error
        # Also for lax: that of jax 0.10 does not know negative ones.
        split, concat = split_axis % dimensions, concat_axis % dimensions
        why = why or _reason_of_length(leaf, split, size, tiled)
        if why is not None:
            with fallback.to_lax("all_to_all", why):
                return by_lax(leaf, split, concat)
        if tiled or split == concat:
            return _bind(leaf, axes, split, concat, size)
        # As in lax: the new dimension is there before the exchange, and the old one goes after it.
        concat += split < concat
        split += concat <= split
        result = _bind(lax.expand_dims(leaf, (concat,)), axes, split, concat, size)
        return lax.squeeze(result, (split,))

    return jax.tree.map(exchange, x)


def _no_dimension(name: str, axis: int, dimensions: int) -> str:
    """The reason for an argument that names no dimension of an array of so many dimensions."""
    if dimensions == 0:
        return "x has no dimensions"
    return (
        f"{name} is {axis}; with {dimensions} dimensions it must be from {-dimensions} to "
        f"{dimensions - 1}"
    )


def _reason_of_length(x: Any, split: int, size: int, tiled: bool) -> str | None:
    """Why a dimension can't be divided among the ranks. lax raises the ValueError."""
    length = x.shape[split]
    if length % size == 0 and (tiled or length == size):
        return None
    needed = f"a multiple of {size}" if tiled else f"{size}, or pass tiled=True"
    return (
        f"x has the shape {x.shape}; with {size} ranks, the length of its dimension {split} must "
        f"be {needed}"
    )


def _bind(x: Any, axes: tuple[str, ...], split: int, concat: int, size: int) -> Any:
    (result,) = collective.bind(all_to_all_p, [x], AllToAllParams(axes, split, concat, size))
    return result


# Abstract evaluation.


def _abstract_eval(x: Any, *, params: AllToAllParams) -> list[Any]:
    shape = list(x.shape)
    shape[params.split] //= params.world_size
    shape[params.concat] *= params.world_size
    return [x.update(shape=tuple(shape), weak_type=False)]


# Selection and lowering.


def _select(
    site: LoweringSite, aval: Any, params: AllToAllParams, traced_over: Any
) -> select.Selection:
    part = nbytes(aval) // params.world_size
    return collective.select_one(all_to_all_p, site, aval, part, params, traced_over)


def _explain(
    site: LoweringSite, avals: Sequence[Any], *, params: AllToAllParams, traced_over: Any
) -> list[Operation]:
    selected = _select(site, avals[0], params, traced_over)
    return [collective.operation_of(all_to_all_p, avals, selected)]


def _lower(ctx: Any, x: Any, *, params: AllToAllParams, traced_over: Any) -> list[Any]:
    site = LoweringSite.of(ctx)
    (aval,), (out_aval,) = ctx.avals_in, ctx.avals_out
    selected = _select(site, aval, params, traced_over)
    if selected.algorithm == "lax":
        return collective.lower_to_lax(ctx, all_to_all_p, [x], params, selected)
    size, split, concat = params.world_size, params.split, params.concat
    part = (*aval.shape[:split], aval.shape[split] // size, *aval.shape[split + 1 :])
    stacked = aval.update(shape=(size, *part))

    def divide(v: Any) -> Any:
        """Stacks the parts along a first dimension, as the custom call expects them."""
        divided = v.reshape(*part[:split], size, *part[split:])
        return jnp.moveaxis(divided, split, 0)

    def join(v: Any) -> Any:
        """Puts the parts of all ranks, which the custom call stacks, one behind the other."""
        return jnp.moveaxis(v, 0, concat).reshape(out_aval.shape)

    (parts,) = mlir.lower_fun(divide, False)(ctx.replace(avals_out=[stacked]), x)
    (parts,) = collective.lower_to_call(
        ctx.replace(avals_in=[stacked], avals_out=[stacked]),
        *(all_to_all_p, [parts], site.mesh, params.axes, selected),
    )
    return list(mlir.lower_fun(join, False)(ctx.replace(avals_in=[stacked]), parts))


# Differentiation.


def _transpose(cotangents: Sequence[Any], x: Any, *, params: AllToAllParams) -> list[Any]:
    back = AllToAllParams(params.axes, params.concat, params.split, params.world_size)

    def of_nonzero(cts: list[Any]) -> list[Any]:
        return [collective.bind_or_fall_back(all_to_all_p, ct, back) for ct in cts]

    return collective.transpose(of_nonzero, cotangents, [x])


# Batching: the batch is one more dimension.


def _batch(
    name: Hashable, size: int, operands: Sequence[Any], dims: Sequence[Any], params: AllToAllParams
) -> tuple[list[Any], list[Any]]:
    if name in params.axes:
        return collective.batch_over_hidden_axis(
            all_to_all_p, name, size, operands, dims, params, 0
        )
    (x,), (d,) = operands, dims
    split, concat = (axis + (d <= axis) for axis in (params.split, params.concat))
    return all_to_all_p.bind(
        x, params=AllToAllParams(params.axes, split, concat, params.world_size)
    ), [d]


# Registration.

all_to_all_p.register(
    abstract_eval=_abstract_eval,
    lower=_lower,
    explain=_explain,
    jvp=collective.jvp,
    transpose=_transpose,
    batch=_batch,
    needed=collective.needed,
)
