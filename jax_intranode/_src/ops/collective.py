"""What the collectives share: which calls are ours, and what a call lowers to."""

import math
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jax_intranode._src import communicator, compat, config, select, table

# Which calls are ours.


def reason_for_lax(axes: tuple[Hashable, ...], axis_index_groups: Any) -> str | None:
    """Why lax does a collective over these axes, or None if it may be ours."""
    if not axes:
        return "no axes"
    if len(set(axes)) < len(axes):
        return f"an axis that is named twice in {_names(axes)}"
    elsewhere = [axis for axis in axes if axis not in bound_axes()]
    if elsewhere:
        return f"axis {_names(elsewhere[:1])} {NOT_OF_A_MESH}"
    if axis_index_groups is not None:
        return "axis_index_groups"
    if not compat.settings_are_usual(axes):
        return "settings of jax under which collectives have other rules"
    return None


def _names(axes: Sequence[Hashable]) -> str:
    """Axes as text that is the same in all processes: names may be objects of any kind."""
    return ", ".join(repr(a) if isinstance(a, str) else type(a).__name__ for a in axes)


# What a reason says of an axis over which nothing is sent between devices.
NOT_OF_A_MESH = "is not one that shard_map has bound"


def reason_of_hidden(name: Hashable) -> str:
    """Why lax does a collective over an axis that vmap has bound over a mesh axis of its name."""
    return f"axis {_names([name])} {NOT_OF_A_MESH}: vmap hides that one"


def bound_axes() -> frozenset[Any]:
    """The mesh axes that shard_map has bound here."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def reason_for_lax_of_array(operation: str, x: Any, axes: tuple[Hashable, ...]) -> str | None:
    """Why lax does a collective of this operand, or None if it may be ours.

    Constants have rules of their own in lax, and references it refuses.
    """
    if not isinstance(x, jax.core.Tracer):
        return "a constant"
    if not isinstance(jax.typeof(x), ShapedArray):
        return "not an array"
    reason = reason_for_lax_of_types([x], [x], axes)
    return reason or select.unsupported_dtype(operation, x.dtype.name)


def reason_for_lax_of_types(
    operands: Sequence[Any], sent: Sequence[Any], axes: tuple[Hashable, ...]
) -> str | None:
    """Why lax does a collective of arrays that vary as these do, or None if it may be ours.

    Args:
        operands: all arrays of the call.
        sent: those of them that what is gathered or summed is made of.
        axes: the axes.
    """
    kinds = [jax.typeof(v).manual_axis_type for v in operands]
    if any(kind.unreduced or kind.reduced for kind in kinds):
        return "an operand that is unreduced or reduced over mesh axes"
    # Under check_vma=True an operand varies over all axes, or over none; lax refuses others.
    over = set[Any]().union(*(jax.typeof(v).manual_axis_type.varying for v in sent))
    if 0 < len(over.intersection(axes)) < len(axes):
        return f"an operand that varies over some of the axes {_names(axes)} only"
    return None


def checked_integer(operation: str, name: str, value: Any) -> int:
    """An argument that says which dimension.

    Raises:
        TypeError: it is no integer, or not known while tracing.
    """
    try:
        return int(operator.index(value))
    except jax.errors.TracerIntegerConversionError:
        raise  # which says where it was traced
    except TypeError:
        raise TypeError(f"{operation}: {name} is {value!r}; pass an integer") from None


@contextmanager
def left_to_lax(operation: str, reason: str) -> Iterator[None]:
    """Around lax's function in place of ours: has what it leaves in the jaxpr say why.

    Adds to lax's error of an unbound axis what binds one.
    """
    try:
        with jax.named_scope(f"jax_intranode.{operation}[lax: {reason}]"):
            yield
    except NameError as error:
        error.add_note(
            f"jax_intranode.{operation} acts on the axes that jax.shard_map (or jax.vmap or "
            f"jax.pmap) binds; bound here: {sorted(map(str, bound_axes())) or 'none'}."
        )
        raise


def parse_left_to_lax(scope: str) -> tuple[str, str] | None:
    """The operation and the reason of a scope of `left_to_lax`; None for another scope."""
    match = re.fullmatch(r"jax_intranode\.(\w+)\[lax: (.*)\]", scope, re.DOTALL)
    return None if match is None else (match[1], match[2])


def varying(x: Any, axes: Sequence[Hashable]) -> Any:
    """The operand as one that varies over the axes, too, which check_vma=True asks for."""
    if not compat.check_vma():
        return x
    over = jax.typeof(x).manual_axis_type.varying
    missing = tuple(axis for axis in axes if axis not in over)
    if not missing:
        return x
    with left_to_lax("psum", "the transpose of a cast by jax.lax.pcast"):
        return lax.pcast(x, missing, to="varying")


# Where a call is lowered.


@dataclass(frozen=True)
class Place:
    """What decides, besides a call itself, what it runs as.

    Attributes:
        mesh: the mesh of the shard_map around it; None outside of one, or if its devices are not
            known.
        manual: the mesh's manual axes.
        platforms: what the program is lowered for, in JAX's names.
        for_export: whether it is lowered by ``jax.export``.
    """

    mesh: jax.sharding.Mesh | None
    manual: frozenset[str]
    platforms: tuple[str, ...]
    for_export: bool = False

    def reason_for_lax(self, traced_over: tuple[int, ...] | None) -> str | None:
        """Why lax does all calls here that were traced over these devices, or None."""
        mesh = self.mesh
        if mesh is None:
            return "no shard_map over a mesh of known devices around it"
        if self.for_export:
            return "lowered by jax.export"
        if len(self.platforms) > 1:
            return f"lowered for several platforms: {', '.join(self.platforms)}"
        if traced_over is None:
            if compat.set_mesh() is not None:
                return "traced without the mesh of jax.set_mesh"
        elif traced_over != _device_ids(mesh):
            return "traced under a mesh with other devices, or in another order"
        platform = {"cpu": "cpu", "cuda": "gpu"}.get(self.platforms[0])
        if platform is None:
            return f"platform {self.platforms[0]}; supported are cpu and cuda"
        # XLA would gather the operand of a custom call over axes that it partitions itself.
        auto = [n for n in mesh.axis_names if mesh.shape[n] > 1 and n not in self.manual]
        if auto:
            return f"a partly manual mesh: shard_map has not bound {', '.join(map(repr, auto))}"
        if mesh.devices.flat[0].platform != platform:
            return f"lowered for {self.platforms[0]}, which is not the platform of the devices"
        return None


def place_of(ctx: Any) -> Place:
    mesh, manual = compat.lowering_mesh(ctx) or (None, frozenset())
    return Place(mesh, manual, compat.lowering_platforms(ctx), compat.lowering_for_export(ctx))


# The arrays of one operation, by their positions among those of a call, and what it runs as.
Operation = tuple[list[int], select.Selection]


# Primitives.


class Primitives:
    """An operation as a primitive, in two forms.

    A call holds the ids of its devices. Under jax.set_mesh the jaxpr does not name the mesh, so a
    lowering must not be used again for another one: lowering has to be told of the devices, which
    would forbid programs with two meshes elsewhere. And a jaxpr that was traced under one mesh can
    be lowered under another: the devices of the trace go with it, and where the mesh that is found
    while lowering has others, or where one is set only then, lax takes over. (An eager shard_map
    sets its mesh while it runs.)
    """

    def __init__(self, operation: str):
        """Creates the primitives of an operation."""
        self.operation = operation
        self._plain = Primitive(f"intranode_{operation}")
        self._over_set_mesh = Primitive(f"intranode_{operation}_over_set_mesh")
        for primitive in (self._plain, self._over_set_mesh):
            BY_PRIMITIVE[primitive] = self
            primitive.multiple_results = True
        compat.lower_with_devices(self._over_set_mesh)

    def bind(self, *xs: Any, **params: Any) -> list[Any]:
        """Binds the form for where this is traced."""
        primitive = self._plain if compat.set_mesh() is None else self._over_set_mesh
        mesh = compat.set_mesh() or compat.eager_mesh()
        traced_over = None if mesh is None else _device_ids(mesh)
        return list(primitive.bind(*xs, traced_over=traced_over, **params))

    def bind_as_traced(
        self, *xs: Any, traced_over: tuple[int, ...] | None, **params: Any
    ) -> list[Any]:
        """Binds for the lowering of a call that was traced over these devices."""
        return list(self._plain.bind(*xs, traced_over=traced_over, **params))

    def register(
        self,
        abstract_eval: Callable[..., Any],
        lower: Callable[..., Any],
        jvp: Callable[..., Any],
        transpose: Callable[..., Any],
        batch: Callable[..., Any],
        needed: compat.Needed | None,
    ) -> None:
        """Registers the rules.

        Those for types, transposes and batches do not get the devices that a call was traced over:
        what the last two bind is traced where they run.

        Args:
            abstract_eval: from types to types.
            lower: a lowering rule.
            jvp: from the primitive, the operands and their tangents to the results and theirs.
            transpose: from the results' cotangents and the operands to the operands' cotangents.
            batch: from the mapped axis' name and size, the operands and their batch dimensions to
                the results and theirs. Not asked where nothing is batched and the axis is none of
                the operation's.
            needed: from which results are used and the parameters to which operands are, then, and
                new parameters; None if a call is used as a whole or not at all.
        """

        def batch_if_any(
            name: Hashable,
            size: int,
            operands: Sequence[Any],
            dims: Sequence[Any],
            /,
            **params: Any,
        ) -> tuple[Any, Any]:
            del params["traced_over"]
            if name in params["axes"] or any(d is not None for d in dims):
                return batch(name, size, operands, dims, **params)
            results = self.bind(*operands, **params)
            return results, [None] * len(results)

        def transpose_here(
            cotangents: Sequence[Any], *operands: Any, traced_over: Any, **params: Any
        ) -> Any:
            del traced_over
            return transpose(cotangents, *operands, **params)

        for primitive in (self._plain, self._over_set_mesh):

            def with_effects(
                *xs: Any, axes: tuple[str, ...], traced_over: Any, **params: Any
            ) -> Any:
                del traced_over
                return abstract_eval(*xs, axes=axes, **params), compat.named_axis_effects(axes)

            primitive.def_effectful_abstract_eval(with_effects)
            mlir.register_lowering(primitive, lower)
            ad.primitive_jvps[primitive] = partial(jvp, primitive)
            ad.primitive_transposes[primitive] = transpose_here
            compat.batch_by_axis(primitive, batch_if_any)
            if needed is not None:
                compat.drop_unused_results(primitive, needed)
                compat.evaluate_known_results(primitive, needed)

    def described(self, place: Place, avals: Sequence[Any], **params: Any) -> list["Description"]:
        """What a call runs as, for `explain`; the processes of the mesh may meet."""
        raise NotImplementedError


@dataclass(frozen=True)
class Description:
    """What `explain` tells of an operation.

    Attributes:
        operation: its name.
        operands: the operands' types.
        nbytes: bytes of what is gathered or summed, on a device.
        selected: what it runs as.
    """

    operation: str
    operands: list[Any]
    nbytes: int
    selected: select.Selection


def nbytes(aval: Any) -> int:
    """Bytes of an array of a type."""
    return int(math.prod(aval.shape)) * int(aval.dtype.itemsize)


class Collective(Primitives):
    """A primitive from arrays to as many arrays."""

    def __init__(
        self, operation: str, by_lax: Callable[..., list[Any]], dim_over_hidden_axis: int | None
    ):
        """Creates the primitives.

        Args:
            operation: its name in `select`.
            by_lax: what ``jax.lax`` does in its place, with a list of arrays and the parameters.
            dim_over_hidden_axis: the batch dimension of lax's results over a mapped axis.
        """
        super().__init__(operation)
        self.by_lax = by_lax
        self._dim_over_hidden_axis = dim_over_hidden_axis

    def define(
        self,
        abstract_eval: Callable[..., Any],
        select: Callable[..., list[Operation]],
        emit: Callable[..., Any],
        transpose: Callable[..., list[Any]],
        batch: Callable[..., tuple[list[Any], list[Any]]],
    ) -> None:
        """Registers the rules.

        Args:
            abstract_eval: from types to types.
            select: from a mesh, the operands' types and the parameters to the operations that a
                call runs as. An array that is in none of them is its own result.
            emit: a lowering rule for an operation of ours; it gets the mesh and the selection too.
            transpose: from cotangents, none of them zero, to cotangents of operands that vary.
            batch: from operands and their batch dimensions to results and theirs.
        """
        self._select = select
        self.register(
            abstract_eval,
            partial(self._lower, emit),
            _jvp,
            partial(_transpose, transpose),
            partial(self._batch, batch),
            lambda used, params: (used, params),
        )

    def operations(
        self, place: Place, avals: Sequence[Any], *, traced_over: Any, **params: Any
    ) -> list[Operation]:
        """What a call runs as; the processes of the mesh may meet."""
        reason = place.reason_for_lax(traced_over)
        if reason is not None:
            return [(list(range(len(avals))), select.Selection("lax", reason))]
        return self._select(place.mesh, avals, **params)

    def described(self, place: Place, avals: Sequence[Any], **params: Any) -> list[Description]:
        """What a call runs as, for `explain`; the processes of the mesh may meet."""
        return [
            Description(
                self.operation,
                operands := [avals[i] for i in chosen],
                sum(map(nbytes, operands)),
                selected,
            )
            for chosen, selected in self.operations(place, avals, **params)
        ]

    def _lower(
        self, emit: Callable[..., Any], ctx: Any, *xs: Any, traced_over: Any, **params: Any
    ) -> Any:
        place = place_of(ctx)
        results = list(xs)
        for chosen, selected in self.operations(
            place, ctx.avals_in, traced_over=traced_over, **params
        ):
            part = ctx.replace(
                avals_in=[ctx.avals_in[i] for i in chosen],
                avals_out=[ctx.avals_out[i] for i in chosen],
            )
            operands = [xs[i] for i in chosen]
            if selected.algorithm == "lax":
                by_lax = mlir.lower_fun(lambda *vs: self.by_lax(list(vs), **params), True)
                emitted = by_lax(part, *operands)
            else:
                emitted = emit(part, *operands, mesh=place.mesh, selected=selected, **params)
            for i, result in zip(chosen, emitted, strict=True):
                results[i] = result
        return results

    def _batch(
        self,
        rule: Callable[..., Any],
        name: Hashable,
        size: int,
        operands: Sequence[Any],
        dims: Sequence[Any],
        /,  # a parameter of a primitive may be called "size" too
        **params: Any,
    ) -> tuple[list[Any], list[Any]]:
        if name not in params["axes"]:
            return rule(operands, dims, **params)
        # The mapped axis has the name of a mesh axis, and so hides it.
        out = self._dim_over_hidden_axis
        mapped = jax.vmap(
            lambda *xs: self.by_lax(list(xs), **params),
            in_axes=tuple(dims),
            out_axes=out,
            axis_name=name,
            axis_size=size,
        )
        with left_to_lax(self.operation, reason_of_hidden(name)):
            return mapped(*operands), [out] * len(operands)


# The operation of each of our primitives.
BY_PRIMITIVE: dict[Primitive, Primitives] = {}


def _device_ids(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.flat)


# Collectives are linear. What does not move, or is not asked for, is not sent.


def _jvp(
    primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    results = primitive.bind(*primals, **params)
    moving = [t for t in tangents if type(t) is not ad.Zero]
    moved = iter(primitive.bind(*moving, **params) if moving else [])
    return results, [
        ad.Zero(jax.typeof(result).to_tangent_aval()) if type(t) is ad.Zero else next(moved)
        for t, result in zip(tangents, results, strict=True)
    ]


def _transpose(
    rule: Callable[..., list[Any]],
    cotangents: Sequence[Any],
    *xs: Any,
    **params: Any,
) -> list[Any]:
    asked = [ct for ct in cotangents if type(ct) is not ad.Zero]
    sent = iter(rule(asked, **params) if asked else [])
    return [
        ad.Zero(x.aval.to_ct_aval()) if type(ct) is ad.Zero else next(sent)
        for ct, x in zip(cotangents, xs, strict=True)
    ]


# Lowering.


def chooser(
    operation: str, mesh: jax.sharding.Mesh, axes: Sequence[str], dtype: np.dtype[Any]
) -> Callable[[int], select.Selection]:
    """What an operation over `axes` of a mesh runs as: a function of its bytes (select.py).

    Calling the function performs the rendezvous of the mesh's processes, if it has not taken place
    and if our kernels may run the operation.
    """
    groups = communicator.partition(mesh, tuple(axes))
    device = mesh.devices.flat[0]
    select_within = partial(
        select.select,
        operation,
        dtype=dtype.name,
        world_size=groups.group_size,
        hardware=table.hardware_of(device.platform, device.device_kind),
        mode=communicator.mode_of(mesh.devices.flat),
    )

    def choose(nbytes: int) -> select.Selection:
        # An operation that falls back to lax with any memory and any settings needs no rendezvous.
        selected = select_within(nbytes=nbytes, epoch_buffer_bytes=1 << 62, algorithm="one_shot")
        if selected.algorithm == "lax":
            return selected
        rendezvous = communicator.rendezvous_of(mesh.devices.flat)
        if rendezvous.reason is not None:
            return select.Selection("lax", rendezvous.reason)
        selected = select_within(
            nbytes=nbytes,
            epoch_buffer_bytes=rendezvous.epoch_buffer_bytes,
            algorithm=config.get().algorithm,
        )
        if selected.algorithm != "lax":
            reason = communicator.communicator(rendezvous, groups)
            if reason is not None:
                return select.Selection("lax", reason)
        return selected

    return choose


def lower_to_call(
    ctx: Any,
    operation: str,
    xs: Sequence[Any],
    mesh: jax.sharding.Mesh,
    axes: Sequence[str],
    selected: select.Selection,
) -> list[Any]:
    """Emits our custom call."""
    groups = communicator.partition(mesh, axes)
    attributes: dict[str, Any] = {
        "device_ids": np.array(groups.device_ids, np.int64),
        "group_size": np.int64(groups.group_size),
        "algorithm": np.int32(select.ALGORITHMS.index(selected.algorithm)),
    }
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    if on_gpus:
        attributes |= {"blocks": np.int32(selected.blocks), "threads": np.int32(selected.threads)}
    else:
        # Tells call sites apart; alike in all processes.
        shapes = " ".join(x.str_short() for x in ctx.avals_in)
        attributes["site"] = f"{compat.lowering_program_name(ctx)} {operation} {shapes}"
    results = jax.ffi.ffi_lowering(f"jax_intranode_{operation}")(ctx, *xs, **attributes)
    return compat.called_once(results) if on_gpus else list(results)
