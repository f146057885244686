"""psum: the sum of every rank's operand, on every rank."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jax_intranode._src import communicator, compat, config, select

# The primitive: sums arrays of one dtype. `axes` name manual mesh axes. With `invariant` the
# results do not vary over them (check_vma=True); lax has a primitive for each of the two cases.
psum_p = Primitive("intranode_psum")
# The same under jax.set_mesh, where the mesh, and so the order of the devices, is not in the jaxpr.
psum_over_set_mesh_p = Primitive("intranode_psum_over_set_mesh")


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

    All arrays of a pytree that have one dtype are summed by one operation, with the same bits as
    one by one.

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
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    ours = bool(axes) and len(set(axes)) == len(axes) and manual.issuperset(axes)
    if not ours or axis_index_groups is not None or not compat.settings_are_usual(axes):
        try:
            return lax.psum(x, axis_name, axis_index_groups=axis_index_groups)
        except NameError as error:
            error.add_note(
                f"jax_intranode.psum sums over the axes that jax.shard_map (or jax.vmap or "
                f"jax.pmap) binds; bound here: {sorted(map(str, manual)) or 'none'}."
            )
            raise
    leaves, tree = jax.tree.flatten(x)
    by_dtype: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if _is_served(leaf, axes):
            by_dtype.setdefault(leaf.dtype.name, []).append(i)
        else:
            leaves[i] = lax.psum(leaf, axes)
    for chosen in by_dtype.values():
        for i, total in zip(chosen, _psum_arrays([leaves[i] for i in chosen], axes), strict=True):
            leaves[i] = total
    return jax.tree.unflatten(tree, leaves)


def _is_served(leaf: Any, axes: tuple[str, ...]) -> bool:
    # Constants lax scales by the number of ranks, without communication. References it refuses.
    if not isinstance(leaf, jax.core.Tracer) or not isinstance(jax.typeof(leaf), ShapedArray):
        return False
    kind = jax.typeof(leaf).manual_axis_type
    # Under check_vma=True an operand varies over all axes, or over none; lax refuses others.
    varying = kind.varying.intersection(axes)
    return not (
        leaf.dtype.name not in select.DTYPES
        or kind.unreduced
        or kind.reduced
        or (varying and len(varying) < len(axes))
    )


def _psum_arrays(arrays: list[Any], axes: tuple[str, ...]) -> list[Any]:
    invariant = compat.check_vma()
    if invariant:
        arrays = [
            x if jax.typeof(x).manual_axis_type.varying.issuperset(axes)
            else lax.pcast(x, axes, to="varying")
            for x in arrays
        ]  # fmt: skip
    primitive = psum_over_set_mesh_p if compat.mesh_is_set() else psum_p
    with jax.named_scope("jax_intranode.psum"):
        return primitive.bind(*arrays, axes=axes, invariant=invariant)


# Abstract evaluation.


def _abstract_eval(*xs: Any, axes: tuple[str, ...], invariant: bool) -> tuple[list[Any], set[Any]]:
    def total(x: Any) -> Any:
        if not invariant:
            return x.update(weak_type=False)
        kind = x.manual_axis_type
        return x.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))

    return [total(x) for x in xs], compat.named_axis_effects(axes)


# Lowering.


def selection(
    mesh: jax.sharding.Mesh, axes: Sequence[str], shape: Sequence[int], dtype: Any
) -> select.Selection:
    """What a psum over `axes` of a mesh runs as, for a per-device operand of a shape and dtype.

    The processes of the mesh meet, if they have not before.
    """
    return operations(mesh, axes, [shape], dtype)[0][1]


def operations(
    mesh: jax.sharding.Mesh, axes: Sequence[str], shapes: Sequence[Sequence[int]], dtype: Any
) -> list[tuple[list[int], select.Selection]]:
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

    def choose(chosen: Sequence[int]) -> select.Selection:
        return _select(mesh, axes, sum(packs[i] for i in chosen) * select.PACK_BYTES, dtype)

    # Nothing is to be done for empty arrays.
    everything = [i for i, count in enumerate(packs) if count > 0] or list(range(len(packs)))
    if len(everything) == 1 or mesh.devices.flat[0].platform == "gpu":
        whole = choose(everything)
        if whole.algorithm == "lax":
            # XLA makes one operation of it; on CPUs it makes one of each array.
            return [(everything, whole)]
    chosen: list[tuple[list[int], select.Selection]] = []
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
    mesh: jax.sharding.Mesh, axes: Sequence[str], nbytes: int, dtype: np.dtype[Any]
) -> select.Selection:
    groups = communicator.partition(mesh, tuple(axes))
    meeting = communicator.meet(mesh.devices.flat)
    if meeting.reason is not None:
        return select.Selection("lax", meeting.reason)
    selected = select.select(
        "psum",
        nbytes=nbytes,
        dtype=dtype.name,
        world_size=groups.group_size,
        platform=meeting.platform,
        mode=meeting.mode,
        half_bytes=meeting.half_bytes,
        algorithm=config.get().algorithm,
    )
    if selected.algorithm != "lax":
        reason = communicator.communicator(meeting, groups)
        if reason is not None:
            return select.Selection("lax", reason)
    return selected


def _lower_to_lax(ctx: Any, *xs: Any, axes: tuple[str, ...], invariant: bool) -> Any:
    del invariant  # lax finds out by itself, as we did
    return mlir.lower_fun(lambda *vs: lax.psum(list(vs), axes), multiple_results=True)(ctx, *xs)


def _lower(ctx: Any, *xs: Any, axes: tuple[str, ...], invariant: bool) -> Any:
    fall_back = partial(_lower_to_lax, ctx, *xs, axes=axes, invariant=invariant)
    context = compat.lowering_mesh(ctx)
    platforms = compat.lowering_platforms(ctx)
    if context is None or compat.lowering_for_export(ctx) or len(platforms) > 1:
        return fall_back()
    mesh, manual = context
    platform = {"cpu": "cpu", "cuda": "gpu"}.get(platforms[0])
    # XLA would gather the operand of a custom call over axes that it partitions itself.
    partly_manual = any(mesh.shape[name] > 1 and name not in manual for name in mesh.axis_names)
    elsewhere = mesh.devices.flat[0].platform != platform  # lowering for another platform
    if partly_manual or elsewhere:
        return fall_back()
    results = list(xs)
    shapes = [x.shape for x in ctx.avals_in]
    for chosen, selected in operations(mesh, axes, shapes, ctx.avals_in[0].dtype):
        part = ctx.replace(
            avals_in=[ctx.avals_in[i] for i in chosen], avals_out=[ctx.avals_out[i] for i in chosen]
        )
        operands = [xs[i] for i in chosen]
        if selected.algorithm == "lax":
            totals = _lower_to_lax(part, *operands, axes=axes, invariant=invariant)
        else:
            totals = _lower_to_call(part, operands, mesh, axes, platform, selected)
        for i, total in zip(chosen, totals, strict=True):
            results[i] = total
    return results


def _lower_to_call(
    ctx: Any,
    xs: Sequence[Any],
    mesh: jax.sharding.Mesh,
    axes: Sequence[str],
    platform: str,
    selected: select.Selection,
) -> Sequence[Any]:
    groups = communicator.partition(mesh, axes)
    attributes: dict[str, Any] = {
        "device_ids": np.array(groups.device_ids, np.int64),
        "group_size": np.int64(groups.group_size),
        "algorithm": np.int32(select.ALGORITHMS.index(selected.algorithm)),
    }
    if platform == "gpu":
        attributes |= {"blocks": np.int32(selected.blocks), "threads": np.int32(selected.threads)}
    else:
        # Tells call sites apart; alike in all processes.
        shapes = " ".join(x.str_short() for x in ctx.avals_in)
        attributes["site"] = f"{compat.lowering_program_name(ctx)} {shapes}"
    return jax.ffi.ffi_lowering("jax_intranode_psum")(ctx, *xs, **attributes)


# Differentiation: psum is linear. What does not move, or is not asked for, is not sent.


def _jvp(
    primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    totals = primitive.bind(*primals, **params)
    moving = [t for t in tangents if type(t) is not ad.Zero]
    moved = iter(primitive.bind(*moving, **params) if moving else [])
    return totals, [
        ad.Zero(jax.typeof(total).to_tangent_aval()) if type(t) is ad.Zero else next(moved)
        for t, total in zip(tangents, totals, strict=True)
    ]


def _transpose(
    primitive: Primitive,
    cotangents: Sequence[Any],
    *xs: Any,
    axes: tuple[str, ...],
    invariant: bool,
) -> list[Any]:
    asked = [ct for ct in cotangents if type(ct) is not ad.Zero]
    if invariant:
        sent = iter([lax.pcast(ct, axes, to="varying") for ct in asked])
    else:
        sent = iter(primitive.bind(*asked, axes=axes, invariant=False) if asked else [])
    return [
        ad.Zero(x.aval.to_ct_aval()) if type(ct) is ad.Zero else next(sent)
        for ct, x in zip(cotangents, xs, strict=True)
    ]


# Batching: elementwise, unless the mapped axis has the name of a mesh axis and so hides it.


def _batch(
    primitive: Primitive,
    name: Hashable,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    axes: tuple[str, ...],
    invariant: bool,
) -> tuple[Any, Any]:
    if name in axes:
        mapped = jax.vmap(
            lambda *xs: lax.psum(list(xs), axes),
            in_axes=tuple(dims),
            out_axes=None,
            axis_name=name,
            axis_size=size,
        )
        return mapped(*operands), [None] * len(operands)
    return primitive.bind(*operands, axes=axes, invariant=invariant), dims


# Registration.

for _primitive in (psum_p, psum_over_set_mesh_p):
    _primitive.multiple_results = True
    _primitive.def_effectful_abstract_eval(_abstract_eval)
    mlir.register_lowering(_primitive, _lower)
    ad.primitive_jvps[_primitive] = partial(_jvp, _primitive)
    ad.primitive_transposes[_primitive] = partial(_transpose, _primitive)
    compat.batch_by_axis(_primitive, partial(_batch, _primitive))
    compat.drop_unused_results(_primitive)
compat.lower_with_devices(psum_over_set_mesh_p)
