"""psum: the sum of every rank's operand, on every rank."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_intranode._src import compat, select
from jax_intranode._src.ops import collective

# The primitive: sums arrays of one dtype. `axes` name manual mesh axes. With `invariant` the
# results do not vary over them (check_vma=True); lax has a primitive for each of the two cases.
primitive = collective.Collective(
    "psum",
    # lax finds out by itself, as we did, what is invariant.
    lambda xs, *, axes, invariant: lax.psum(xs, axes),
    None,
)


def psum(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> Any:
    """Sums over one or more mapped axes; takes the place of ``jax.lax.psum``.

    Inside ``jax.shard_map`` over a mesh of devices of one host, the sum runs in kernels that
    write into the peers' memory: one-shot for small arrays (each rank sends its array to all),
    two-shot for larger ones (reduce-scatter, then all-gather). What they don't serve (other
    dtypes, sizes, axes and platforms) lowers to ``jax.lax.psum``, on every rank alike.

    Values are added in rank order, starting with rank 0's, in float32 for float32, bfloat16 and
    float16, in float64 for float64, in their own type (wrapping) for integers, and rounded once:
    the same bits on every rank, in every run and by every algorithm.

    Arrays of a pytree that have one dtype are summed together, by as few operations as can be.

    Differentiates as ``jax.lax.psum`` does, forward and reverse, under check_vma on and off.

    Args:
        x: an array or a pytree of arrays; any shape. Accelerated dtypes: float32, bfloat16,
            float16, float64, int8, uint8, int32, uint32, int64, uint64.
        axis_name: the name of a mapped axis, or several.
        axis_index_groups: as in ``jax.lax.psum``; not accelerated.

    Returns:
        Arrays of the shapes and dtypes of `x` (bool becomes int32).

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.psum``.
    """
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    reason = collective.reason_for_lax(axes, axis_index_groups)
    if reason is not None:
        with collective.left_to_lax("psum", reason):
            return lax.psum(x, axis_name, axis_index_groups=axis_index_groups)
    leaves, tree = jax.tree.flatten(x)
    by_dtype: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        reason = collective.reason_for_lax_of_array("psum", leaf, axes)
        if reason is None:
            by_dtype.setdefault(leaf.dtype.name, []).append(i)
        else:
            with collective.left_to_lax("psum", reason):
                leaves[i] = lax.psum(leaf, axes)
    for chosen in by_dtype.values():
        for i, total in zip(chosen, _psum_arrays([leaves[i] for i in chosen], axes), strict=True):
            leaves[i] = total
    return jax.tree.unflatten(tree, leaves)


def _psum_arrays(arrays: Sequence[Any], axes: tuple[str, ...]) -> list[Any]:
    arrays = [collective.varying(x, axes) for x in arrays]
    with jax.named_scope("jax_intranode.psum"):
        return primitive.bind(*arrays, axes=axes, invariant=compat.check_vma())


def pmean(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> Any:
    """The mean over one or more mapped axes; takes the place of ``jax.lax.pmean``.

    ``psum``, divided by the number of ranks; see there for shapes, dtypes, errors and derivatives.
    """
    with jax.named_scope("jax_intranode.pmean"):
        total = psum(x, axis_name, axis_index_groups=axis_index_groups)
    size = lax.psum(1, axis_name, axis_index_groups=axis_index_groups)
    return jax.tree.map(lambda v: v / size, total)


# Abstract evaluation.


def _abstract_eval(*xs: Any, axes: tuple[str, ...], invariant: bool) -> list[Any]:
    def total(x: Any) -> Any:
        if not invariant:
            return x.update(weak_type=False)
        kind = x.manual_axis_type
        return x.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))

    return [total(x) for x in xs]


# What it runs as, and lowering.


def selection(
    mesh: jax.sharding.Mesh, axes: Sequence[str], shape: Sequence[int], dtype: Any
) -> select.Selection:
    """What a psum over `axes` of a mesh runs as, for a per-device operand of a shape and dtype.

    The processes of the mesh meet, if they have not before.
    """
    return operations(mesh, axes, [shape], dtype)[0][1]


def operations(
    mesh: jax.sharding.Mesh, axes: Sequence[str], shapes: Sequence[Sequence[int]], dtype: Any
) -> list[collective.Operation]:
    """What a psum of many arrays of one dtype runs as.

    Returns:
        For each operation the positions of the arrays that it sums, and how; for lax, of the arrays
        that it gets together. Empty arrays are in none, unless all are empty.
    """
    dtype = np.dtype(dtype)
    # Each array begins with a pack of its own.
    packs = [
        -(-int(np.prod(shape, dtype=np.int64)) * dtype.itemsize // select.PACK_BYTES)
        for shape in shapes
    ]

    choose_by_bytes = collective.chooser("psum", mesh, axes, dtype)

    def choose(chosen: Sequence[int]) -> select.Selection:
        return choose_by_bytes(sum(packs[i] for i in chosen) * select.PACK_BYTES)

    # Nothing is to be done for empty arrays.
    everything = [i for i, count in enumerate(packs) if count > 0] or list(range(len(packs)))
    if len(everything) == 1 or mesh.devices.flat[0].platform == "gpu":
        whole = choose(everything)
        if whole.algorithm == "lax":
            # XLA makes one operation of it; on CPUs it makes one of each array.
            return [(everything, whole)]
    chosen: list[collective.Operation] = []
    for i in everything:
        if chosen and len(chosen[-1][0]) < select.MAX_BUFFERS:
            longer = [*chosen[-1][0], i]
            selected = choose(longer)
            if selected.algorithm != "lax":
                chosen[-1] = longer, selected
                continue
        chosen.append(([i], choose([i])))
    return chosen


def _select(
    mesh: jax.sharding.Mesh, avals: Sequence[Any], *, axes: tuple[str, ...], invariant: bool
) -> list[collective.Operation]:
    del invariant
    return operations(mesh, axes, [x.shape for x in avals], avals[0].dtype)


def _emit(
    ctx: Any,
    *xs: Any,
    mesh: jax.sharding.Mesh,
    selected: select.Selection,
    axes: tuple[str, ...],
    invariant: bool,
) -> list[Any]:
    del invariant
    return collective.lower_to_call(ctx, "psum", xs, mesh, axes, selected)


# Differentiation.


def _transpose(cotangents: list[Any], *, axes: tuple[str, ...], invariant: bool) -> list[Any]:
    if invariant:
        return [lax.pcast(ct, axes, to="varying") for ct in cotangents]
    return primitive.bind(*cotangents, axes=axes, invariant=False)


# Batching: elementwise.


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, axes: tuple[str, ...], invariant: bool
) -> tuple[list[Any], list[Any]]:
    return primitive.bind(*operands, axes=axes, invariant=invariant), list(dims)


# Registration.

primitive.define(_abstract_eval, _select, _emit, _transpose, _batch)
