"""psum: the sum of every rank's operand, on every rank."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_intranode._src import communicator, compat, config, select

# The primitive. `axes` are names of manual mesh axes. With `invariant` the result does not vary
# over them (check_vma=True); lax has a primitive for each of the two cases.
psum_p = Primitive("intranode_psum")


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
    leaves, tree = jax.tree.flatten(x)
    # lax scales constants by the number of ranks, without communication.
    constant = not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    ours = bool(axes) and len(set(axes)) == len(axes) and manual.issuperset(axes)
    if constant or axis_index_groups is not None or not ours:
        return lax.psum(x, axis_name, axis_index_groups=axis_index_groups)
    return jax.tree.unflatten(tree, [_psum_array(leaf, axes) for leaf in leaves])


def _psum_array(x: Any, axes: tuple[str, ...]) -> Any:
    x = jnp.asarray(x)
    kind = jax.typeof(x).manual_axis_type
    if x.dtype.name not in select.DTYPES or kind.unreduced or kind.reduced:
        return lax.psum(x, axes)
    # Under check_vma=True (only then does an axis index vary) operands must vary over the axes.
    invariant = bool(jax.typeof(lax.axis_index(axes[0])).manual_axis_type.varying)
    if invariant:
        unvarying = tuple(axis for axis in axes if axis not in kind.varying)
        if unvarying:
            x = lax.pcast(x, unvarying, to="varying")
    with jax.named_scope("jax_intranode.psum"):
        return psum_p.bind(x, axes=axes, invariant=invariant)


# Abstract evaluation.


@psum_p.def_abstract_eval
def _abstract_eval(x: Any, *, axes: tuple[str, ...], invariant: bool) -> Any:
    if not invariant:
        return x
    kind = x.manual_axis_type
    return x.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))


# Lowering.


def selection(
    mesh: jax.sharding.Mesh, axes: Sequence[str], shape: Sequence[int], dtype: Any
) -> select.Selection:
    """What a psum over `axes` of a mesh runs as, for per-device operands of a shape and dtype.

    The processes of the mesh meet, if they have not before.
    """
    groups = communicator.partition(mesh, tuple(axes))
    meeting = communicator.meet(mesh.devices.flat)
    if meeting.reason is not None:
        return select.Selection("lax", meeting.reason)
    dtype = np.dtype(dtype)
    selected = select.select(
        "psum",
        nbytes=int(np.prod(shape, dtype=np.int64)) * dtype.itemsize,
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


def _lower_to_lax(ctx: Any, x: Any, *, axes: tuple[str, ...], invariant: bool) -> Any:
    del invariant  # lax finds out by itself, as we did
    return mlir.lower_fun(lambda v: lax.psum(v, axes), multiple_results=False)(ctx, x)


def _lower(platform: str, ctx: Any, x: Any, *, axes: tuple[str, ...], invariant: bool) -> Any:
    (aval,) = ctx.avals_in
    context = compat.lowering_mesh(ctx)
    if context is None or compat.lowering_for_export(ctx):
        return _lower_to_lax(ctx, x, axes=axes, invariant=invariant)
    mesh, manual = context
    # XLA would gather the operand of a custom call over axes that it partitions itself.
    partly_manual = any(mesh.shape[name] > 1 and name not in manual for name in mesh.axis_names)
    elsewhere = mesh.devices.flat[0].platform != platform  # lowering for another platform
    if partly_manual or elsewhere:
        return _lower_to_lax(ctx, x, axes=axes, invariant=invariant)
    selected = selection(mesh, axes, aval.shape, aval.dtype)
    if selected.algorithm == "lax":
        return _lower_to_lax(ctx, x, axes=axes, invariant=invariant)
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
        attributes["site"] = f"{compat.lowering_program_name(ctx)} {aval.str_short()}"
    return jax.ffi.ffi_lowering("jax_intranode_psum")(ctx, x, **attributes)


# Differentiation: psum is linear.


def _transpose(cotangent: Any, x: Any, *, axes: tuple[str, ...], invariant: bool) -> tuple[Any]:
    if type(cotangent) is ad.Zero:
        return (ad.Zero(x.aval),)
    if invariant:
        return (lax.pcast(cotangent, axes, to="varying"),)
    return (psum_p.bind(cotangent, axes=axes, invariant=False),)


# Batching: elementwise.


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, axes: tuple[str, ...], invariant: bool
) -> tuple[Any, Any]:
    return psum_p.bind(operands[0], axes=axes, invariant=invariant), dims[0]


# Registration.

mlir.register_lowering(psum_p, _lower_to_lax)
mlir.register_lowering(psum_p, partial(_lower, "cpu"), platform="cpu")
mlir.register_lowering(psum_p, partial(_lower, "gpu"), platform="cuda")
ad.deflinear2(psum_p, _transpose)
batching.primitive_batchers[psum_p] = _batch
compat.lower_with_devices(psum_p)
