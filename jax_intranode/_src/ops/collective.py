"""What the collectives share: which calls are ours, and what a call lowers to."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jax_intranode._src import communicator, compat, config, select

# Which calls are ours.


def serves(axes: tuple[Hashable, ...], axis_index_groups: Any) -> bool:
    """Whether a collective over these axes may be ours; what is not lax does."""
    return (
        bool(axes)
        and len(set(axes)) == len(axes)
        and bound_axes().issuperset(axes)
        and axis_index_groups is None
        and compat.settings_are_usual(axes)
    )


def bound_axes() -> frozenset[Any]:
    """The mesh axes that shard_map has bound here."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


@contextmanager
def hint_at_shard_map(operation: str) -> Iterator[None]:
    """Adds to lax's error of an unbound axis what binds one."""
    try:
        yield
    except NameError as error:
        error.add_note(
            f"jax_intranode.{operation} acts on the axes that jax.shard_map (or jax.vmap or "
            f"jax.pmap) binds; bound here: {sorted(map(str, bound_axes())) or 'none'}."
        )
        raise


def serves_array(x: Any, axes: tuple[Hashable, ...]) -> bool:
    """Whether an operand is a traced array whose type our collectives know.

    Constants have rules of their own in lax, and references it refuses.
    """
    if not isinstance(x, jax.core.Tracer) or not isinstance(jax.typeof(x), ShapedArray):
        return False
    kind = jax.typeof(x).manual_axis_type
    # Under check_vma=True an operand varies over all axes, or over none; lax refuses others.
    varying = kind.varying.intersection(axes)
    return not (kind.unreduced or kind.reduced or (varying and len(varying) < len(axes)))


def varying(x: Any, axes: tuple[Hashable, ...]) -> Any:
    """The operand as one that varies over the axes, which check_vma=True asks for."""
    if not compat.check_vma() or jax.typeof(x).manual_axis_type.varying.issuperset(axes):
        return x
    return lax.pcast(x, axes, to="varying")


# Primitives.


class Collective:
    """A primitive from arrays to as many arrays, in two forms.

    A call holds the ids of its devices. Under jax.set_mesh the jaxpr does not name the mesh, so a
    lowering must not be used again for another one: lowering has to be told of the devices, which
    would forbid programs with two meshes elsewhere. And a jaxpr that was traced under one mesh can
    be lowered under another: the devices of the trace go with it, and where the mesh that is found
    while lowering has others, or where one is set only then, lax takes over. (An eager shard_map
    sets its mesh while it runs.)
    """

    def __init__(
        self, name: str, by_lax: Callable[..., list[Any]], dim_over_hidden_axis: int | None
    ):
        """Creates the primitives.

        Args:
            name: of the primitive.
            by_lax: what ``jax.lax`` does in its place, with a list of arrays and the parameters.
            dim_over_hidden_axis: the batch dimension of lax's results over a mapped axis.
        """
        self._by_lax = by_lax
        self._dim_over_hidden_axis = dim_over_hidden_axis
        self._plain = Primitive(name)
        self._over_set_mesh = Primitive(f"{name}_over_set_mesh")
        for primitive in (self._plain, self._over_set_mesh):
            primitive.multiple_results = True
            compat.drop_unused_results(primitive)
        compat.lower_with_devices(self._over_set_mesh)

    def bind(self, *xs: Any, **params: Any) -> list[Any]:
        """Binds the form for where this is traced."""
        primitive = self._plain if compat.set_mesh() is None else self._over_set_mesh
        mesh = compat.set_mesh() or compat.eager_mesh()
        traced_over = None if mesh is None else _device_ids(mesh)
        return list(primitive.bind(*xs, traced_over=traced_over, **params))

    def define(
        self,
        abstract_eval: Callable[..., Any],
        lower: Callable[..., Any],
        transpose: Callable[..., list[Any]],
        batch: Callable[..., tuple[list[Any], list[Any]]],
    ) -> None:
        """Registers the rules.

        Args:
            abstract_eval: from types to types.
            lower: a lowering rule for what may be ours; after the context it gets the mesh and
                the platform ("cpu" or "gpu").
            transpose: from cotangents, none of them zero, to cotangents of operands that vary.
            batch: from operands and their batch dimensions to results and theirs.
        """
        for primitive in (self._plain, self._over_set_mesh):

            def with_effects(
                *xs: Any, axes: tuple[str, ...], traced_over: Any, **params: Any
            ) -> Any:
                del traced_over
                return abstract_eval(*xs, axes=axes, **params), compat.named_axis_effects(axes)

            primitive.def_effectful_abstract_eval(with_effects)
            mlir.register_lowering(primitive, partial(self._lower, lower))
            ad.primitive_jvps[primitive] = partial(_jvp, primitive)
            ad.primitive_transposes[primitive] = partial(_transpose, transpose)
            compat.batch_by_axis(primitive, partial(self._batch, batch))

    def lower_to_lax(self, ctx: Any, *xs: Any, **params: Any) -> list[Any]:
        """Emits what ``jax.lax`` does."""
        function = mlir.lower_fun(lambda *vs: self._by_lax(list(vs), **params), True)
        return list(function(ctx, *xs))

    def _lower(
        self, rule: Callable[..., Any], ctx: Any, *xs: Any, traced_over: Any, **params: Any
    ) -> Any:
        context = _context_of(ctx, traced_over)
        if context is None:
            return self.lower_to_lax(ctx, *xs, **params)
        return rule(ctx, *context, *xs, **params)

    def _batch(
        self,
        rule: Callable[..., Any],
        name: Hashable,
        size: int,
        operands: Sequence[Any],
        dims: Sequence[Any],
        /,  # a parameter of a primitive may be called "size" too
        *,
        traced_over: Any,
        **params: Any,
    ) -> tuple[list[Any], list[Any]]:
        del traced_over  # what is bound next is traced here
        if name not in params["axes"]:
            return rule(operands, dims, **params)
        # The mapped axis has the name of a mesh axis, and so hides it.
        out = self._dim_over_hidden_axis
        mapped = jax.vmap(
            lambda *xs: self._by_lax(list(xs), **params),
            in_axes=tuple(dims),
            out_axes=out,
            axis_name=name,
            axis_size=size,
        )
        return mapped(*operands), [out] * len(operands)


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
    traced_over: Any,
    **params: Any,
) -> list[Any]:
    del traced_over  # what is bound next is traced here
    asked = [ct for ct in cotangents if type(ct) is not ad.Zero]
    sent = iter(rule(asked, **params) if asked else [])
    return [
        ad.Zero(x.aval.to_ct_aval()) if type(ct) is ad.Zero else next(sent)
        for ct, x in zip(cotangents, xs, strict=True)
    ]


# Lowering.


def _context_of(ctx: Any, traced_over: Any) -> tuple[jax.sharding.Mesh, str] | None:
    context = compat.lowering_mesh(ctx)
    platforms = compat.lowering_platforms(ctx)
    if context is None or compat.lowering_for_export(ctx) or len(platforms) > 1:
        return None
    mesh, manual = context
    if traced_over is None:
        if compat.set_mesh() is not None:
            return None
    elif traced_over != _device_ids(mesh):
        return None
    platform = {"cpu": "cpu", "cuda": "gpu"}.get(platforms[0])
    # XLA would gather the operand of a custom call over axes that it partitions itself.
    partly_manual = any(mesh.shape[name] > 1 and name not in manual for name in mesh.axis_names)
    elsewhere = mesh.devices.flat[0].platform != platform  # lowering for another platform
    if platform is None or partly_manual or elsewhere:
        return None
    return mesh, platform


def chooser(
    operation: str, mesh: jax.sharding.Mesh, axes: Sequence[str], dtype: np.dtype[Any]
) -> Callable[[int], select.Selection]:
    """What an operation over `axes` of a mesh runs as: a function of its bytes (select.py).

    The processes of the mesh meet when it is called, if they have not before and if the operation
    may be ours.
    """
    groups = communicator.partition(mesh, tuple(axes))
    select_within = partial(
        select.select,
        operation,
        dtype=dtype.name,
        world_size=groups.group_size,
        platform=mesh.devices.flat[0].platform,
        mode=communicator.mode_of(mesh.devices.flat),
    )

    def choose(nbytes: int) -> select.Selection:
        # What lax does with any memory and any environment (one in which the ranks differ is
        # found by meeting) needs no meeting.
        selected = select_within(nbytes=nbytes, half_bytes=1 << 62, algorithm="one_shot")
        if selected.algorithm == "lax":
            return selected
        meeting = communicator.meet(mesh.devices.flat)
        if meeting.reason is not None:
            return select.Selection("lax", meeting.reason)
        selected = select_within(
            nbytes=nbytes, half_bytes=meeting.half_bytes, algorithm=config.get().algorithm
        )
        if selected.algorithm != "lax":
            reason = communicator.communicator(meeting, groups)
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
    platform: str,
    selected: select.Selection,
) -> list[Any]:
    """Emits our custom call."""
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
        attributes["site"] = f"{compat.lowering_program_name(ctx)} {operation} {shapes}"
    return list(jax.ffi.ffi_lowering(f"jax_intranode_{operation}")(ctx, *xs, **attributes))
