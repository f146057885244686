"""What psum, psum_scatter, all_gather and all_to_all share.

Their primitives are declared here, because transposition turns one into another: each operation's
rules are in its own file, and may bind the others' primitives.
"""

import operator
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, mlir

from jax_intranode._src import reasons
from jax_intranode._src.group import agreed, communicator
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.health import call_sites, counts
from jax_intranode._src.jax_private import lowering_context, trace_state
from jax_intranode._src.jax_private.lax_collectives import LaxCollective
from jax_intranode._src.native import definitions, extension
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.ops import fallback
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Decision, Operation, OpPrimitive, nbytes
from jax_intranode._src.selection import config, generations, select, tuning

# The primitives, and the parameters of each.


@dataclass(frozen=True)
class Params:
    """What the parameters of all collectives have in common.

    Attributes:
        axes: the mesh axes.
    """

    axes: tuple[str, ...]

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        """What jax.lax computes instead of the primitive."""
        raise NotImplementedError

    def of_some(self, chosen: Sequence[int]) -> "Params":
        """The parameters of a call of some of the arrays, by their positions."""
        return self

    def attributes(self) -> dict[str, Any]:
        """What the operation's handler gets besides."""
        return {}

    @property
    def detail(self) -> str:
        """What tells a call from others of the same operation and types."""
        return ""

    @property
    def family(self) -> Hashable:
        """Calls of one family may become one call, if the operation takes many arrays."""
        return self

    def joined(self, others: Sequence[Any]) -> "Params":
        """The parameters of one call in place of this one and others of its family."""
        return self

    @classmethod
    def of_lax(cls, of: LaxCollective, world_size: int) -> "Params":
        """The parameters of the operation that takes the place of a collective of jax.lax."""
        raise NotImplementedError


@dataclass(frozen=True)
class AllReduceParams(Params):
    """Parameters of `psum_p`, `pmax_p` and `pmin_p`, which reduce arrays of one dtype.

    Attributes:
        invariant: whether the results no longer vary over the axes (check_vma=True). lax has a
            primitive for each case, and finds out by itself which one applies.
    """

    invariant: bool

    @classmethod
    def of_lax(cls, of: LaxCollective, world_size: int) -> Params:
        return cls(of.axes, invariant=of.invariant)


class PsumParams(AllReduceParams):
    """Parameters of `psum_p`."""

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return lax.psum(list(xs), self.axes)


class PmaxParams(AllReduceParams):
    """Parameters of `pmax_p`."""

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return lax.pmax(list(xs), self.axes)


class PminParams(AllReduceParams):
    """Parameters of `pmin_p`."""

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return lax.pmin(list(xs), self.axes)


@dataclass(frozen=True)
class PsumScatterParams(Params):
    """Parameters of `psum_scatter_p`, which sums one array.

    Attributes:
        dimension: the dimension that is scattered.
        tiled: whether the dimension stays, or is dropped.
        world_size: number of ranks.
    """

    dimension: int
    tiled: bool
    world_size: int

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        dimension, tiled = self.dimension, self.tiled
        return [
            lax.psum_scatter(x, self.axes, scatter_dimension=dimension, tiled=tiled) for x in xs
        ]

    @classmethod
    def of_lax(cls, of: LaxCollective, world_size: int) -> Params:
        return cls(of.axes, of.dimension, of.tiled, world_size)


@dataclass(frozen=True)
class AllGatherParams(Params):
    """Parameters of `all_gather_p`, which gathers one array.

    Attributes:
        axis: the dimension of the result along which the shards lie.
        tiled: whether the shards are concatenated along it, or stacked.
        world_size: number of ranks.
    """

    axis: int
    tiled: bool
    world_size: int

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return [lax.all_gather(x, self.axes, axis=self.axis, tiled=self.tiled) for x in xs]

    @classmethod
    def of_lax(cls, of: LaxCollective, world_size: int) -> Params:
        return cls(of.axes, of.dimension, of.tiled, world_size)


@dataclass(frozen=True)
class AllToAllParams(Params):
    """Parameters of `all_to_all_p`, which exchanges parts of one array. No dimension comes or goes.

    Attributes:
        split: the dimension that is divided among the ranks.
        concat: the dimension along which the parts of all ranks are concatenated.
        world_size: number of ranks.
    """

    split: int
    concat: int
    world_size: int

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return [lax.all_to_all(x, self.axes, self.split, self.concat, tiled=True) for x in xs]

    @classmethod
    def of_lax(cls, of: LaxCollective, world_size: int) -> Params:
        return cls(of.axes, of.dimension, of.concat, world_size)


# Pairs of source and destination.
Perm = tuple[tuple[int, int], ...]


def pairs_of(perm: Sequence[Any]) -> Perm:
    """The pairs of a permutation, by destination; raises TypeError or ValueError for others."""
    pairs = ((operator.index(s), operator.index(d)) for s, d in perm)
    return tuple(sorted(pairs, key=operator.itemgetter(1)))


@dataclass(frozen=True)
class PpermuteParams(Params):
    """Parameters of `ppermute_p`, which permutes arrays of one dtype.

    Attributes:
        perms: for each array the pairs of source and destination, by destination.
        world_size: number of ranks.
    """

    perms: tuple[Perm, ...]
    world_size: int

    def of_some(self, chosen: Sequence[int]) -> "PpermuteParams":
        return replace(self, perms=tuple(self.perms[i] for i in chosen))

    def attributes(self) -> dict[str, Any]:
        """For each array the source of each rank, or -1."""
        sources = np.full((len(self.perms), self.world_size), -1, np.int64)
        for member, perm in enumerate(self.perms):
            for source, destination in perm:
                sources[member, destination] = source
        return {"sources": sources.reshape(-1)}

    @property
    def detail(self) -> str:
        return f"-{zlib.crc32(repr(self.perms).encode()):08x}"

    @property
    def family(self) -> Hashable:
        return self.axes

    def joined(self, others: Sequence[Any]) -> Params:
        return replace(self, perms=sum((other.perms for other in others), self.perms))

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return [lax.ppermute(x, self.axes, p) for x, p in zip(xs, self.perms, strict=True)]

    @classmethod
    def of_lax(cls, of: LaxCollective, world_size: int) -> Params:
        return cls(of.axes, (pairs_of(of.perm),), world_size)


psum_p = OpPrimitive("psum", PsumParams)
pmax_p = OpPrimitive("pmax", PmaxParams)
pmin_p = OpPrimitive("pmin", PminParams)
psum_scatter_p = OpPrimitive("psum_scatter", PsumScatterParams)
all_gather_p = OpPrimitive("all_gather", AllGatherParams)
all_to_all_p = OpPrimitive("all_to_all", AllToAllParams)
ppermute_p = OpPrimitive("ppermute", PpermuteParams)


# Binding.


def integer(operation: str, name: str, value: Any) -> int:
    """An argument that names a dimension. TypeError: it is no integer, or it is traced."""
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
    return lax.pcast(x, missing, to="varying")  # JAX inserts its transpose, a psum of lax


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


def of_each_array(
    primitive: OpPrimitive,
    x: Any,
    axes: tuple[Hashable, ...],
    reason: str | None,
    by_lax: Callable[[Any], Any],
    params_of: Callable[[Any, int], Params | str],
) -> Any:
    """A public function of a pytree, each of whose arrays is communicated alone.

    `reason` is why lax runs all of the call, and `params_of` has the parameters for an array and
    the number of ranks, or why lax runs that one.
    """
    operation = primitive.operation
    if reason is not None:
        with fallback.to_lax(operation, reason):
            return by_lax(x)
    size = lax.psum(1, axes)

    def of_array(leaf: Any) -> Any:
        found = fallback.reason_of_array(operation, leaf, axes) or params_of(leaf, size)
        if isinstance(found, str):
            with fallback.to_lax(operation, found):
                return by_lax(leaf)
        (result,) = bind(primitive, [leaf], found)
        return result

    return jax.tree.map(of_array, x)


def of_arrays_by_dtype(
    primitive: OpPrimitive,
    x: Any,
    axes: tuple[Hashable, ...],
    by_lax: Callable[[Any], Any],
    params_of: Callable[[int], Params],
    sends: Callable[[Any], bool] = lambda leaf: True,
) -> Any:
    """A public function of a pytree, whose arrays of one dtype are communicated together.

    `params_of` has the parameters for so many arrays; `sends` says whether lax has anything to send
    for an array that it runs.
    """
    operation = primitive.operation
    leaves, tree = jax.tree.flatten(x)
    by_dtype: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        reason = fallback.reason_of_array(operation, leaf, axes)
        if reason is None:
            by_dtype.setdefault(leaf.dtype.name, []).append(i)
        else:
            with fallback.to_lax(operation, reason, sends=sends(leaf)):
                leaves[i] = by_lax(leaf)
    for chosen in by_dtype.values():
        results = bind(primitive, [leaves[i] for i in chosen], params_of(len(chosen)))
        for i, result in zip(chosen, results, strict=True):
            leaves[i] = result
    return jax.tree.unflatten(tree, leaves)


def reason_of_dimension(name: str, value: int, ndim: int, least: int, most: int) -> str | None:
    """Why an argument names no dimension of an array of so many. lax raises the ValueError."""
    if least <= value <= most:
        return None
    if least > most:
        return reasons.NO_DIMENSIONS
    return reasons.DIMENSION.of(name=name, value=value, ndim=ndim, least=least, most=most)


def reason_of_length(x: Any, dimension: int, size: int, tiled: bool) -> str | None:
    """Why a dimension can't be divided among the ranks. lax raises the ValueError."""
    length = x.shape[dimension]
    if length % size == 0 and (tiled or length == size):
        return None
    needed = f"a multiple of {size}" if tiled else f"{size}, or pass tiled=True"
    return reasons.LENGTH.of(shape=x.shape, size=size, dimension=dimension, needed=needed)


# Selection.


def facts_of(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """What the table's rows depend on besides the operation: see `table.rows_and_source`."""
    device = mesh.devices.flat[0]
    return {
        "hardware": generations.hardware_of(device.platform, device.device_kind),
        "mode": agreed.mode_of(mesh.devices.flat),
        "tuned": tuning.rows_for([d.device_kind for d in mesh.devices.flat]),
    }


def selector(
    mesh: jax.sharding.Mesh, axes: Sequence[str]
) -> Callable[[select.Selection | None, Callable[..., select.Selection]], select.Selection]:
    """Selects what runs the operations over `axes` of a mesh.

    Returns:
        A function of what `select.static_reason` says, and of a function that selects from the
        facts that all ranks know. The processes of the mesh rendezvous when there is no static
        reason for the first time.
    """
    partition = partition_lib.partition(mesh, tuple(axes))
    select_with = facts_of(mesh)

    def choose(
        static: select.Selection | None, selected_by: Callable[..., select.Selection]
    ) -> select.Selection:
        if static is not None:
            return static
        rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
        if rendezvous.reason is not None:
            return select.Selection("lax", rendezvous.reason, logged=True)
        selected = selected_by(
            **select_with,
            world_size=partition.group_size,
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


def chooser(
    operation: str, mesh: jax.sharding.Mesh, axes: Sequence[str], dtype: np.dtype[Any]
) -> Callable[[int], select.Selection]:
    """Selects the algorithm of a collective from its bytes (see `select.select`)."""
    choose = selector(mesh, axes)
    partition = partition_lib.partition(mesh, tuple(axes))

    def choose_by_bytes(nbytes: int) -> select.Selection:
        return choose(
            select.static_reason(operation, dtype.name, partition.group_size, is_empty=nbytes == 0),
            partial(
                select.select,
                operation,
                nbytes=nbytes,
                dtype=dtype.name,
                segment_bytes=config.get().segment_kib * 1024,
            ),
        )

    return choose_by_bytes


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
    if selected.cause != reasons.NOT_FASTER:
        fallback.refuse_if_strict(primitive.operation, selected.reason)
    if selected.logged:
        counts.fell_back(primitive.operation, selected.reason)
    else:
        fallback.log(primitive.operation, selected.reason)
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
    detail: str = "",
    aliases: dict[int, int] | None = None,
) -> list[Any]:
    """Emits our custom call.

    `communicated` are the types of the operands that are sent (None: all of them), `attributes`
    what the operation's handler gets besides, and `detail` tells the call from others of the same
    operation and types. `aliases`: the operands in whose memory results are, by number.
    """
    assert mesh is not None  # or lax would run it
    partition = partition_lib.partition(mesh, tuple(axes))
    attributes = (attributes or {}) | {
        "device_ids": np.array(partition.device_ids, np.int64),
        "group_size": np.int64(partition.group_size),
        "algorithm": np.int32(definitions.ALGORITHMS.index(selected.algorithm)),
        "segments": np.int32(selected.segments),
    }
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    if on_gpus:
        attributes |= {"blocks": np.int32(selected.blocks), "threads": np.int32(selected.threads)}
    site = attributes["site"] = site_of(ctx, primitive.operation, detail)
    if not on_gpus:
        extension.module("cpu").lower_site(site, partition.device_ids, partition.group_size)
    sent = ctx.avals_in if communicated is None else communicated
    counts.lowered(primitive.operation, selected.algorithm, sum(map(nbytes, sent)))
    target = RECORDS[primitive.operation].ffi_target
    lowered = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    results = lowered(ctx, *xs, **attributes)
    return lowering_context.called_once(results) if on_gpus else list(results)


def site_of(ctx: Any, operation: str, detail: str = "") -> str:
    """The attribute that tells call sites apart; the same in all processes.

    On the CPU it matches the calls of the ranks. Everywhere messages name calls by it.
    """
    shapes = " ".join(x.str_short() for x in ctx.avals_in)
    site = f"{lowering_context.lowering_program_name(ctx)} {operation}{detail} {shapes}"
    call_sites.describe_site(site, operation, ctx.avals_in)
    return site


def arranged(ctx: Any, arrange: Callable[[Any], Any], x: Any, aval: Any, result: Any) -> list[Any]:
    """Emits a function that arranges the elements of an array, from one type to another."""
    lowered = mlir.lower_fun(arrange, multiple_results=False)
    return list(lowered(ctx.replace(avals_in=[aval], avals_out=[result]), x))


def stack_parts(x: Any, dimension: int, size: int) -> Any:
    """Divides a dimension among the ranks, and stacks their parts along a first dimension."""
    part = (*x.shape[:dimension], x.shape[dimension] // size, *x.shape[dimension + 1 :])
    divided = x.reshape(*part[:dimension], size, *part[dimension:])
    return jnp.moveaxis(divided, dimension, 0)


# Rules.


def invariant_over(aval: Any, axes: Sequence[str]) -> Any:
    """The type of an array that no longer varies over these axes."""
    kind = aval.manual_axis_type
    return aval.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))


def jvp(
    bind: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], params: Params
) -> tuple[list[Any], list[Any]]:
    """The jvp rule: collectives are linear. Nothing is sent for a tangent that is zero."""
    return jvp_some(lambda *xs, chosen: bind(*xs, params=params), primals, tangents)


def jvp_some(
    bind: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The same, where the parameters depend on the arrays: `bind` gets their positions."""
    results = bind(*primals, chosen=list(range(len(primals))))
    chosen = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    moved = iter(bind(*(tangents[i] for i in chosen), chosen=chosen) if chosen else [])
    return results, [
        ad.Zero(jax.typeof(result).to_tangent_aval()) if type(t) is ad.Zero else next(moved)
        for t, result in zip(tangents, results, strict=True)
    ]


def transpose(
    rule: Callable[[list[Any]], list[Any]], cotangents: Sequence[Any], operands: Sequence[Any]
) -> list[Any]:
    """Cotangents of the operands, from a rule for cotangents that are not zero."""
    return transpose_some(lambda chosen, cts: rule(cts), cotangents, operands)


def transpose_some(
    rule: Callable[[list[int], list[Any]], list[Any]],
    cotangents: Sequence[Any],
    operands: Sequence[Any],
) -> list[Any]:
    """The same, from a rule that also gets the positions of the cotangents."""
    chosen = [i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    transposed = iter(rule(chosen, [cotangents[i] for i in chosen]) if chosen else [])
    return [
        ad.Zero(x.aval.to_ct_aval()) if type(ct) is ad.Zero else next(transposed)
        for ct, x in zip(cotangents, operands, strict=True)
    ]


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

    `out_dim` is the batch dimension of lax's results; None if they have none.
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


def batch_in_place(
    primitive: OpPrimitive,
    hidden_dim: int | None,
    name: Hashable,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: Params,
) -> tuple[list[Any], list[Any]]:
    """Batches a collective of arrays of any shape: a batch dimension is one more.

    `hidden_dim` is the batch dimension of lax's results where vmap hides a mesh axis.
    """
    if name in params.axes:
        return batch_over_hidden_axis(primitive, name, size, operands, dims, params, hidden_dim)
    return primitive.bind(*operands, params=params), list(dims)


def needed(used: list[bool], params: Params) -> tuple[list[bool], Params]:
    """Each result needs the operand of its position."""
    return used, params


def register(
    primitive: OpPrimitive,
    *,
    shape: Callable[[list[int], Any], tuple[int, ...]],
    transposed: Callable[[Any], tuple[OpPrimitive, Params]],
    batched: Callable[[Any, int], tuple[Params, int]],
    hidden_dim: int | None,
    divide: Callable[[Any, Any], Any] | None = None,
    join: Callable[[Any, tuple[int, ...], Any], Any] | None = None,
    keeps_weak_type: bool = True,
) -> None:
    """Registers the rules of a collective of one array.

    Args:
        primitive: its primitive.
        shape: (shape of the operand as a list, params) -> shape of the result.
        transposed: params -> the collective that is the transpose, and its parameters.
        batched: (params, batch dimension) -> parameters with one more dimension, and the batch
            dimension of the result.
        hidden_dim: batch dimension of lax's results where vmap hides a mesh axis.
        divide: (x, params) -> the parts that the custom call sends to the ranks, stacked along a
            first dimension. None: it sends x to all.
        join: (parts, shape, params) -> the result, of this shape, from the parts of all ranks,
            which the custom call stacks along a first dimension. None: its result is one array.
        keeps_weak_type: whether the result of a weakly typed operand is weakly typed.
    """
    operation = primitive.operation

    def abstract_eval(x: Any, *, params: Any) -> list[Any]:
        weak = {} if keeps_weak_type else {"weak_type": False}
        return [x.update(shape=tuple(shape(list(x.shape), params)), **weak)]

    def decide(site: LoweringSite, avals: Sequence[Any], params: Any) -> Decision:
        (aval,) = avals
        reason = site.reason_for_lax()
        if reason is not None:
            selected = select.Selection("lax", reason)
        else:
            assert site.mesh is not None  # or there would be a reason
            choose = chooser(operation, site.mesh, params.axes, aval.dtype)
            # What a rank sends to each peer.
            selected = choose(nbytes(aval) // (1 if divide is None else params.world_size))

        def lower(ctx: Any, x: Any) -> list[Any]:
            if selected.algorithm == "lax":
                return lower_to_lax(ctx, primitive, [x], params, selected)
            (result,) = ctx.avals_out
            parts = aval
            if join is not None:
                parts = aval.update(shape=(params.world_size, *aval.shape))
            if divide is not None:
                divided = jax.eval_shape(
                    lambda v: divide(v, params), jax.ShapeDtypeStruct(aval.shape, aval.dtype)
                )
                parts = aval.update(shape=divided.shape)
                (x,) = arranged(ctx, lambda v: divide(v, params), x, aval, parts)
            call = ctx.replace(
                avals_in=[aval if divide is None else parts],
                avals_out=[result if join is None else parts],
            )
            found = lower_to_call(call, primitive, [x], site.mesh, params.axes, selected)
            if join is None:
                return found
            return arranged(ctx, lambda v: join(v, result.shape, params), found[0], parts, result)

        return Decision(lower, lambda: [operation_of(primitive, avals, selected)])

    def transpose_rule(cotangents: Sequence[Any], x: Any, *, params: Any) -> list[Any]:
        back, its_params = transposed(params)
        return transpose(
            lambda cts: [bind_or_fall_back(back, ct, its_params) for ct in cts], cotangents, [x]
        )

    def batch(
        name: Hashable, size: int, operands: Sequence[Any], dims: Sequence[Any], params: Any
    ) -> tuple[list[Any], list[Any]]:
        if name in params.axes:
            return batch_over_hidden_axis(primitive, name, size, operands, dims, params, hidden_dim)
        its_params, d = batched(params, dims[0])
        return primitive.bind(*operands, params=its_params), [d]

    primitive.register(
        abstract_eval=abstract_eval,
        decide=decide,
        jvp=jvp,
        transpose=transpose_rule,
        batch=batch,
        needed=needed,
    )
