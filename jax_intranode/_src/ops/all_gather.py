"""all_gather: every rank's operand, one after another, on every rank."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from jax_intranode._src import select
from jax_intranode._src.ops import collective, psum_scatter

# The primitive: gathers one array. `size` ranks; the rest as in lax.all_gather.
primitive = collective.Collective(
    "all_gather",
    lambda xs, *, axes, axis, tiled, size: [
        lax.all_gather(x, axes, axis=axis, tiled=tiled) for x in xs
    ],
    None,
)


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

    Inside ``jax.shard_map`` over a mesh of devices of one host, each rank writes its array into
    its peers' memory. What this does not serve lowers to ``jax.lax.all_gather``, on every rank
    alike. Bits are kept, but that a float NaN may become another NaN.

    Differentiates as ``jax.lax.all_gather`` does: the transpose is a ``psum_scatter``.

    After the packet protocols of NCCL's symmetric kernels (AGxLL).

    Args:
        x: an array or a pytree of arrays; any shape. Accelerated dtypes: those of ``psum``, bool,
            int16, uint16, complex64 and complex128.
        axis_name: the name of a mapped axis, or a tuple of names: ranks in row-major order.
        axis_index_groups: as in ``jax.lax.all_gather``; not accelerated.
        axis: the position of the new axis, or (tiled) the axis along which to concatenate.
        tiled: concatenate, in place of stacking on a new axis.
        to: as in ``jax.lax.all_gather``; only "varying" is accelerated.

    Returns:
        Arrays with an axis of the number of ranks more, or (tiled) with one so many times longer.

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.all_gather``.
        TypeError: `axis` is no integer.
        ValueError: there is no such `axis`.
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    axis = collective.checked_integer("all_gather", "axis", axis)

    def by_lax(leaf: Any) -> Any:
        return lax.all_gather(
            leaf, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled, to=to
        )

    reason = collective.reason_for_lax(axes, axis_index_groups)
    if reason is None and to != "varying":
        reason = f"to={to!r}"
    if reason is not None:
        with collective.left_to_lax("all_gather", reason):
            return by_lax(x)

    def gather(leaf: Any) -> Any:
        reason = collective.reason_for_lax_of_array("all_gather", leaf, axes)
        if reason is not None:
            with collective.left_to_lax("all_gather", reason):
                return by_lax(leaf)
        dimensions = leaf.ndim if tiled else leaf.ndim + 1
        if not -dimensions <= axis < dimensions:
            return by_lax(leaf)  # which refuses it
        leaf = collective.varying(leaf, axes)
        with jax.named_scope("jax_intranode.all_gather"):
            (result,) = primitive.bind(
                leaf, axes=axes, axis=axis % dimensions, tiled=bool(tiled), size=lax.psum(1, axes)
            )
        return result

    return jax.tree.map(gather, x)


# Abstract evaluation.


def _abstract_eval(x: Any, *, axes: tuple[str, ...], axis: int, tiled: bool, size: int) -> Any:
    shape = list(x.shape)
    if tiled:
        shape[axis] *= size
    else:
        shape.insert(axis, size)
    return [x.update(shape=tuple(shape))]


# What it runs as, and lowering.


def _select(
    mesh: jax.sharding.Mesh,
    avals: Sequence[Any],
    *,
    axes: tuple[str, ...],
    axis: int,
    tiled: bool,
    size: int,
) -> list[collective.Operation]:
    del axis, tiled, size
    (aval,) = avals
    choose = collective.chooser("all_gather", mesh, axes, aval.dtype)
    return [([0], choose(aval.size * aval.dtype.itemsize))]


def _emit(
    ctx: Any,
    x: Any,
    *,
    mesh: jax.sharding.Mesh,
    selected: select.Selection,
    axes: tuple[str, ...],
    axis: int,
    tiled: bool,
    size: int,
) -> list[Any]:
    del tiled
    (aval,), (out_aval,) = ctx.avals_in, ctx.avals_out
    stacked = aval.update(shape=(size, *aval.shape))
    call = ctx.replace(avals_out=[stacked])
    (gathered,) = collective.lower_to_call(call, "all_gather", [x], mesh, axes, selected)

    def arrange(v: Any) -> Any:
        return jnp.moveaxis(v, 0, axis).reshape(out_aval.shape)

    lower = mlir.lower_fun(arrange, multiple_results=False)
    return list(lower(ctx.replace(avals_in=[stacked]), gathered))


# Differentiation.


def _transpose(
    cotangents: list[Any], *, axes: tuple[str, ...], axis: int, tiled: bool, size: int
) -> list[Any]:
    del size
    (ct,) = cotangents
    return [psum_scatter.psum_scatter(ct, axes, scatter_dimension=axis, tiled=tiled)]


# Batching.


def _batch(
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    axes: tuple[str, ...],
    axis: int,
    tiled: bool,
    size: int,
) -> tuple[list[Any], list[Any]]:
    (x,), (d,) = operands, dims
    if d <= axis:
        axis += 1
    elif not tiled:
        d += 1
    return primitive.bind(x, axes=axes, axis=axis, tiled=tiled, size=size), [d]


# Registration.

primitive.define(_abstract_eval, _select, _emit, _transpose, _batch)
