"""What psum, psum_scatter, all_gather and all_to_all share.

Their primitives are declared here, because transposition turns one into another: each operation's
rules are in its own file, and may bind the others' primitives.
"""

import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad, mlir

from jax_intranode._src.group import communicator
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.jax_private import lowering_context, trace_state
from jax_intranode._src.native import call_sites, definitions
from jax_intranode._src.ops import counts, fallback
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Operation, OpPrimitive, nbytes
from jax_intranode._src.selection import config, select, table, tuning

# The primitives, and the parameters of each.


@dataclass(frozen=True)
class PsumParams:
    """Parameters of `psum_p`, which sums arrays of one dtype.

    Attributes:
        axes: the mesh axes.
        invariant: whether the results no longer vary over the axes (check_vma=True). lax has a
            primitive for each case, and finds out by itself which one applies.
    """

    axes: tuple[str, ...]
    invariant: bool

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return lax.psum(list(xs), self.axes)


@dataclass(frozen=True)
class PsumScatterParams:
    """Parameters of `psum_scatter_p`, which sums one array.

    Attributes:
        axes: the mesh axes.
        dimension: the dimension that is scattered.
        tiled: whether the dimension stays, or is dropped.
        world_size: number of ranks.
    """

    axes: tuple[str, ...]
    dimension: int
    tiled: bool
    world_size: int

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        dimension, tiled = self.dimension, self.tiled
        return [
            lax.psum_scatter(x, self.axes, scatter_dimension=dimension, tiled=tiled) for x in xs
        ]


@dataclass(frozen=True)
class AllGatherParams:
    """Parameters of `all_gather_p`, which gathers one array.

    Attributes:
        axes: the mesh axes.
        axis: the dimension of the result along which the shards lie.
        tiled: whether the shards are concatenated along it, or stacked.
        world_size: number of ranks.
    """

    axes: tuple[str, ...]
    axis: int
    tiled: bool
    world_size: int

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return [lax.all_gather(x, self.axes, axis=self.axis, tiled=self.tiled) for x in xs]


@dataclass(frozen=True)
class AllToAllParams:
    """Parameters of `all_to_all_p`, which exchanges parts of one array. No dimension comes or goes.

    Attributes:
        axes: the mesh axes.
        split: the dimension that is divided among the ranks.
        concat: the dimension along which the parts of all ranks are concatenated.
        world_size: number of ranks.
    """

    axes: tuple[str, ...]
    split: int
    concat: int
    world_size: int

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return [lax.all_to_all(x, self.axes, self.split, self.concat, tiled=True) for x in xs]


class Params(Protocol):
    """What the functions below need of the parameters of any collective.

    Attributes:
        axes: the mesh axes.
    """

    @property
    def axes(self) -> tuple[str, ...]: ...

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        """What jax.lax computes instead of the primitive."""
        ...


psum_p = OpPrimitive("psum")
psum_scatter_p = OpPrimitive("psum_scatter")
all_gather_p = OpPrimitive("all_gather")
all_to_all_p = OpPrimitive("all_to_all")


# Binding.


def integer(operation: str, name: str, value: Any) -> int:
    """An argument that names a dimension.

    Raises:
        TypeError: it is no integer, or its value is not known while tracing.
    """
    try:
        return int(operator.index(value))
    except jax.errors.TracerIntegerConversionError:
        raise  # its message says where the value was traced
    except TypeError:
        raise TypeError(f"{operation}: {name} is {value!r}; pass an integer") from None


def varying(x: Any, axes: Sequence[Hashable]) -> Any:
    """The operand, cast to vary over these axes too, as check_vma=True requires."""
    if not trace_state.check_vma():
        return x
    over = jax.typeof(x).manual_axis_type.varying
    missing = tuple(axis for axis in axes if axis not in over)
    if not missing:
        return x
    # The transpose of the cast is a psum of lax. `explain` finds it by the scope.
    with fallback.scope("psum", "the transpose of a cast by jax.lax.pcast"):
        return lax.pcast(x, missing, to="varying")


def bind(primitive: OpPrimitive, xs: Sequence[Any], params: Params) -> list[Any]:
    """Binds the primitive of a collective."""
    xs = [varying(x, params.axes) for x in xs]
    with jax.named_scope(primitive.scope):
        return primitive.bind(*xs, params=params)


def bind_or_fall_back(primitive: OpPrimitive, x: Any, params: Params) -> Any:
    """Binds the primitive for one array, or calls lax for an array that can't be accelerated."""
    operation = primitive.operation
    reason = fallback.reason_of_axes(params.axes)
    reason = reason or fallback.reason_of_array(operation, x, params.axes)
    if reason is not None:
        with fallback.to_lax(operation, reason):
            (result,) = params.by_lax([x])
    else:
        (result,) = bind(primitive, [x], params)
    return result


# Selection.

# A size of epoch buffers for which no operation is too large.
_UNLIMITED = sys.maxsize


def chooser(
    operation: str, mesh: jax.sharding.Mesh, axes: Sequence[str], dtype: np.dtype[Any]
) -> Callable[[int], select.Selection]:
    """Selects the algorithm of an operation over `axes` of a mesh.

    Returns:
        A function from the operation's bytes (see `select.select`) to the selection. The processes
        of the mesh rendezvous when it is first called for an operation that may be accelerated.
    """
    partition = partition_lib.partition(mesh, tuple(axes))
    device = mesh.devices.flat[0]
    select_within = partial(
        select.select,
        operation,
        dtype=dtype.name,
        world_size=partition.group_size,
        hardware=table.hardware_of(device.platform, device.device_kind),
        mode=rendezvous_lib.mode_of(mesh.devices.flat),
        tuned=tuning.rows_for([d.device_kind for d in mesh.devices.flat]),
        segment_bytes=config.get().segment_kib * 1024,
    )

    def never_accelerated(nbytes: int) -> select.Selection | None:
        """The selection if lax runs the operation with any memory and any environment, or None.

        The question is asked with unlimited memory and an algorithm that is forced at all sizes.
        """
        selected = select_within(nbytes=nbytes, epoch_buffer_bytes=_UNLIMITED, algorithm="one_shot")
        return selected if selected.algorithm == "lax" else None

    def choose(nbytes: int) -> select.Selection:
        by_lax = never_accelerated(nbytes)
        if by_lax is not None:
            return by_lax  # without a rendezvous
        rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
        if rendezvous.reason is not None:
            return select.Selection("lax", rendezvous.reason, logged=True)
        selected = select_within(
            nbytes=nbytes,
            epoch_buffer_bytes=rendezvous.epoch_buffer_bytes,
            algorithm=config.get().algorithm,
            topology=communicator.topology_of(rendezvous, partition).value,
        )
        if selected.algorithm != "lax":
            reason = communicator.communicator(rendezvous, partition, selected.algorithm)
            if reason is not None:
                return select.Selection("lax", reason)
        return selected

    return choose


def select_one(
    primitive: OpPrimitive,
    site: LoweringSite,
    aval: Any,
    nbytes: int,
    params: Params,
    traced_over: tuple[int, ...] | None,
) -> select.Selection:
    """What a collective of one array runs as at a lowering site."""
    reason = site.reason_for_lax(traced_over)
    if reason is not None:
        return select.Selection("lax", reason)
    assert site.mesh is not None  # or there would be a reason
    return chooser(primitive.operation, site.mesh, params.axes, aval.dtype)(nbytes)


def operation_of(
    primitive: OpPrimitive, avals: Sequence[Any], selected: select.Selection
) -> Operation:
    """What `explain` says of a collective of arrays."""
    return Operation(primitive.operation, list(avals), sum(map(nbytes, avals)), selected)


# Lowering.


def lower_to_lax(
    ctx: Any,
    primitive: OpPrimitive,
    xs: Sequence[Any],
    params: Params,
    selected: select.Selection,
) -> list[Any]:
    """Emits the collective of jax.lax.

    Raises:
        RuntimeError: JAX_INTRANODE_STRICT=1, and lax runs it although it might be slower.
    """
    if selected.cause != select.NOT_FASTER:
        fallback.refuse_if_strict(primitive.operation, selected.reason, call_sites.caller)
    if selected.logged:
        counts.fell_back(primitive.operation, selected.reason)
    else:
        fallback.log(primitive.operation, selected.reason, call_sites.caller)
    return list(mlir.lower_fun(lambda *vs: params.by_lax(vs), True)(ctx, *xs))


def lower_to_call(
    ctx: Any,
    primitive: OpPrimitive,
    xs: Sequence[Any],
    mesh: jax.sharding.Mesh | None,
    axes: Sequence[str],
    selected: select.Selection,
    communicated: Sequence[Any] | None = None,
    attributes: dict[str, Any] | None = None,
) -> list[Any]:
    """Emits our custom call.

    Args:
        ctx: the context of the lowering rule.
        primitive: the operation.
        xs: the operands.
        mesh: the mesh.
        axes: the axes of the operation.
        selected: the algorithm.
        communicated: the types of the operands that are sent; None: all of them.
        attributes: what the operation's handler gets besides.
    """
    assert mesh is not None  # or lax would run it
    partition = partition_lib.partition(mesh, axes)
    attributes = (attributes or {}) | {
        "device_ids": np.array(partition.device_ids, np.int64),
        "group_size": np.int64(partition.group_size),
        "algorithm": np.int32(definitions.ALGORITHMS.index(selected.algorithm)),
        "segments": np.int32(selected.segments),
    }
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    if on_gpus:
        attributes |= {"blocks": np.int32(selected.blocks), "threads": np.int32(selected.threads)}
    attributes["site"] = site_of(ctx, primitive.operation)
    sent = ctx.avals_in if communicated is None else communicated
    counts.lowered(primitive.operation, selected.algorithm, sum(map(nbytes, sent)))
    target = f"jax_intranode_{primitive.operation}"
    results = jax.ffi.ffi_lowering(target)(ctx, *xs, **attributes)
    return lowering_context.called_once(results) if on_gpus else list(results)


def site_of(ctx: Any, operation: str) -> str:
    """The attribute that tells call sites apart; the same in all processes.

    On the CPU it matches the calls of the ranks. Everywhere messages name calls by it.
    """
    shapes = " ".join(x.str_short() for x in ctx.avals_in)
    site = f"{lowering_context.lowering_program_name(ctx)} {operation} {shapes}"
    call_sites.describe_site(site, operation, ctx.avals_in)
    return site


# Differentiation. Collectives are linear. Nothing is sent for a tangent or cotangent that is zero.


def jvp(
    bind: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], params: Params
) -> tuple[list[Any], list[Any]]:
    """The jvp rule of all of them."""
    results = bind(*primals, params=params)
    nonzero = [t for t in tangents if type(t) is not ad.Zero]
    moved = iter(bind(*nonzero, params=params) if nonzero else [])
    return results, [
        ad.Zero(jax.typeof(result).to_tangent_aval()) if type(t) is ad.Zero else next(moved)
        for t, result in zip(tangents, results, strict=True)
    ]


def transpose(
    rule: Callable[[list[Any]], list[Any]], cotangents: Sequence[Any], operands: Sequence[Any]
) -> list[Any]:
    """Cotangents of the operands, from a rule for cotangents that are not zero."""
    nonzero = [ct for ct in cotangents if type(ct) is not ad.Zero]
    transposed = iter(rule(nonzero) if nonzero else [])
    return [
        ad.Zero(x.aval.to_ct_aval()) if type(ct) is ad.Zero else next(transposed)
        for ct, x in zip(cotangents, operands, strict=True)
    ]


# Batching.


def batch_over_hidden_axis(
    primitive: OpPrimitive,
    name: Hashable,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: Params,
    out_dim: int | None,
) -> tuple[list[Any], list[Any]]:
    """Batches a collective over an axis of vmap that hides the mesh axis of its name: lax runs it.

    Args:
        out_dim: the batch dimension of lax's results; None if they have none.
    """
    mapped = jax.vmap(
        lambda *xs: params.by_lax(xs),
        in_axes=tuple(dims),
        out_axes=out_dim,
        axis_name=name,
        axis_size=size,
    )
    with fallback.to_lax(primitive.operation, fallback.reason_of_hidden_axis(name)):
        return mapped(*operands), [out_dim] * len(operands)


def needed(used: list[bool], params: Params) -> tuple[list[bool], Params]:
    """Each result needs the operand of its position."""
    return used, params
