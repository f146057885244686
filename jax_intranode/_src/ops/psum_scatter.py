"""psum_scatter: the sum of every rank's operand, of which each rank keeps its own part."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from jax_intranode._src import select
from jax_intranode._src.ops import all_gather, collective

# The primitive: sums one array. `size` ranks; the rest as in lax.psum_scatter.
primitive = collective.Collective(
    "psum_scatter",
    lambda xs, *, axes, dimension, tiled, size: [
        lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=tiled) for x in xs
    ],
    0,
)


def psum_scatter(
    x: Any,
    axis_name: Any,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
) -> Any:
    """Sums over mapped axes and keeps a part; takes the place of ``jax.lax.psum_scatter``.

    Inside ``jax.shard_map`` over a mesh of devices of one host, each rank writes every part of its
    array into the memory of the peer that keeps it, which sums. What this does not serve lowers
    to ``jax.lax.psum_scatter``, on every rank alike. Sums are those of ``jax_intranode.psum``: in
    rank order, rounded once, the same bits in every run.

    Differentiates as ``jax.lax.psum_scatter`` does: the transpose is an ``all_gather``.

    After the packet protocols of NCCL's symmetric kernels (RSxLL).

    Args:
        x: an array or a pytree of arrays; any shape. Accelerated dtypes: those of ``psum``.
        axis_name: the name of a mapped axis, or a tuple of names: ranks in row-major order.
        scatter_dimension: the dimension that is cut into parts: of the number of ranks, or (tiled)
            of a multiple of it.
        axis_index_groups: as in ``jax.lax.psum_scatter``; not accelerated.
        tiled: keep the dimension, shorter by the number of ranks, in place of dropping it.

    Returns:
        Arrays of this rank's part.

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.psum_scatter``.
        TypeError: `scatter_dimension` is no integer.
        ValueError: the dimension can't be cut so.
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    scatter_dimension = collective.checked_integer(
        "psum_scatter", "scatter_dimension", scatter_dimension
    )

    def by_lax(leaf: Any) -> Any:
        return lax.psum_scatter(
            leaf,
            axis_name,
            scatter_dimension=scatter_dimension,
            axis_index_groups=axis_index_groups,
            tiled=tiled,
        )

    reason = collective.reason_for_lax(axes, axis_index_groups)
    if reason is not None:
        with collective.left_to_lax("psum_scatter", reason):
            return by_lax(x)
    size = lax.psum(1, axes)

    def reason_of_shape(leaf: Any) -> str | None:
        if not 0 <= scatter_dimension < leaf.ndim:
            return f"scatter_dimension {scatter_dimension} of {leaf.ndim} dimensions"
        length = leaf.shape[scatter_dimension]
        if length % size != 0 or (not tiled and length != size):
            return f"{length} elements for {size} ranks"  # which lax refuses
        return None

    def scatter(leaf: Any) -> Any:
        reason = collective.reason_for_lax_of_array("psum_scatter", leaf, axes)
        reason = reason or reason_of_shape(leaf)
        if reason is not None:
            with collective.left_to_lax("psum_scatter", reason):
                return by_lax(leaf)
        leaf = collective.varying(leaf, axes)
        with jax.named_scope("jax_intranode.psum_scatter"):
            (result,) = primitive.bind(
                leaf, axes=axes, dimension=scatter_dimension, tiled=bool(tiled), size=size
            )
        return result

    return jax.tree.map(scatter, x)


# Abstract evaluation.


def _abstract_eval(x: Any, *, axes: tuple[str, ...], dimension: int, tiled: bool, size: int) -> Any:
    shape = list(x.shape)
    if tiled:
        shape[dimension] //= size
    else:
        del shape[dimension]
    return [x.update(shape=tuple(shape))]


# What it runs as, and lowering.


def _select(
    mesh: jax.sharding.Mesh,
    avals: Sequence[Any],
    *,
    axes: tuple[str, ...],
    dimension: int,
    tiled: bool,
    size: int,
) -> list[collective.Operation]:
    del dimension, tiled
    (aval,) = avals
    choose = collective.chooser("psum_scatter", mesh, axes, aval.dtype)
    return [([0], choose(aval.size // size * aval.dtype.itemsize))]


def _emit(
    ctx: Any,
    x: Any,
    *,
    mesh: jax.sharding.Mesh,
    selected: select.Selection,
    axes: tuple[str, ...],
    dimension: int,
    tiled: bool,
    size: int,
) -> list[Any]:
    del tiled
    (aval,), (out_aval,) = ctx.avals_in, ctx.avals_out

    # The parts, one after another in memory.
    def arrange(v: Any) -> Any:
        cut = (*v.shape[:dimension], size, -1, *v.shape[dimension + 1 :])
        return jnp.moveaxis(v.reshape(cut), dimension, 0).reshape(size, *out_aval.shape)

    stacked = aval.update(shape=(size, *out_aval.shape))
    lower = mlir.lower_fun(arrange, multiple_results=False)
    (parts,) = lower(ctx.replace(avals_out=[stacked]), x)
    call = ctx.replace(avals_in=[stacked])
    return collective.lower_to_call(call, "psum_scatter", [parts], mesh, axes, selected)


# Differentiation.


def _transpose(
    cotangents: list[Any], *, axes: tuple[str, ...], dimension: int, tiled: bool, size: int
) -> list[Any]:
    del size
    (ct,) = cotangents
    return [all_gather.all_gather(ct, axes, axis=dimension, tiled=tiled)]


# Batching.


def _batch(
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    axes: tuple[str, ...],
    dimension: int,
    tiled: bool,
    size: int,
) -> tuple[list[Any], list[Any]]:
    (x,), (d,) = operands, dims
    if d <= dimension:
        dimension += 1
    elif not tiled:
        d -= 1
    return primitive.bind(x, axes=axes, dimension=dimension, tiled=tiled, size=size), [d]


# Registration.

primitive.define(_abstract_eval, _select, _emit, _transpose, _batch)
