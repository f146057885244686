"""Equations that communicate, in the terms of ``jax.lax``."""

from dataclasses import dataclass
from typing import Any

from jax._src import source_info_util
from jax._src.lax import parallel

from jax_intranode._src.operations import of_function, of_lax_primitive


def _axes(equation: Any) -> tuple[Any, ...]:
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


@dataclass(frozen=True)
class LaxCollective:
    """A collective of jax.lax.

    Attributes:
        operation: the public function.
        axes: the mesh axes; none if only axes of vmap are reduced.
        over_vmap: whether an axis of vmap is reduced, too.
        index_groups: its axis_index_groups.
        invariant: psum: whether the result no longer varies over the axes.
        dimension: psum_scatter, all_gather: the dimension that is scattered or gathered.
            all_to_all: the one that is divided.
        tiled: psum_scatter, all_gather: whether the dimension stays, or is dropped or made.
        size: psum_scatter, all_gather: the number of ranks; 0 for the others.
        perm: ppermute: the pairs of source and destination.
        concat: all_to_all: the dimension along which the parts are concatenated. The public
            function has added and drops dimensions, so that all stay.
    """

    operation: str
    axes: tuple[Any, ...]
    over_vmap: bool
    index_groups: Any
    invariant: bool
    dimension: int
    tiled: bool
    size: int
    concat: int
    perm: tuple[tuple[int, int], ...] = ()


def lax_collective(equation: Any) -> LaxCollective | None:
    """The collective of jax.lax that an equation is; None for any other equation."""
    record = of_lax_primitive(equation.primitive.name)
    if record is None:
        return None
    params, axes = equation.params, _axes(equation)
    if not axes:
        return None
    dimension = params.get("all_gather_dimension", params.get("scatter_dimension", 0))
    # vmap has replaced the names of its axes with numbers.
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    return LaxCollective(
        record.name,
        named,
        over_vmap=len(named) < len(axes),
        index_groups=params.get("axis_index_groups"),
        invariant=equation.primitive.name in ("psum_invariant", "unreduced_psum")
        or _no_longer_varies(equation, named),
        dimension=params.get("split_axis", dimension),
        tiled=params.get("tiled", False),
        size=params.get("axis_size", 0),
        concat=params.get("concat_axis", 0),
        perm=tuple(tuple(pair) for pair in params.get("perm", ())),
    )


def _no_longer_varies(equation: Any, axes: tuple[Any, ...]) -> bool:
    """Whether the types say that the operand varies over the axes, and the result over none."""

    def varying(v: Any) -> frozenset[Any]:
        return getattr(getattr(v.aval, "manual_axis_type", None), "varying", frozenset())

    before, after = varying(equation.invars[0]), varying(equation.outvars[0])
    return len(axes) > 0 and before.issuperset(axes) and not after.intersection(axes)


# lax's other primitives that communicate, and the public function of each.
_OTHERS = {
    **{name: name for name in ("pbroadcast", "psend", "precv")},
    "unreduced_pmax": "pmax",
    "unreduced_pmin": "pmin",
    "pbroadcast_dynamic": "pbroadcast",
}


def _function(primitive: str) -> str | None:
    """The public function of a primitive that communicates, and is not replaced; or None."""
    started = primitive.removesuffix("_start")
    record = of_lax_primitive(started)
    if record is not None:
        return None if started == primitive else f"{record.name}_start"
    function = _OTHERS.get(started)
    return f"{function}_start" if function and started != primitive else function


def other_collective(equation: Any) -> tuple[str, tuple[Any, ...]] | None:
    """The public function and the mesh axes of a collective that is no `lax_collective`, or None.

    Of those that start an operation and finish it later, it is the one that starts.
    """
    operation = _function(equation.primitive.name)
    if operation is None:
        return None
    named = tuple(axis for axis in _axes(equation) if not isinstance(axis, int))
    return (operation, named) if named else None


# The functions of jax.lax that communicate and have no record. `pcast` is none: it communicates in
# its transpose only.
_FUNCTIONS = {*_OTHERS.values(), "pargmax", "pargmin", "pshuffle", "pswapaxes"}


def _communicates(function: str) -> bool:
    name = function.removesuffix("_start")
    return name in _FUNCTIONS or of_function(name) is not None


def called_function(equation: Any) -> str | None:
    """The function of jax.lax by whose call a collective of lax came into the program.

    An equation keeps the traceback of the call that made it, and a transpose that of what it is the
    transpose of. JAX's own frames in it, up to the caller's, tell a call of a collective from a
    collective that JAX has inserted. 0.10.2 and later: only the frames of the caller are public.

    Returns:
        The name; "" if JAX has inserted the collective; None if there is no traceback.
    """
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else []
    name = "" if frames else None
    for frame in frames:
        if source_info_util.is_user_filename(frame.file_name):
            break
        if frame.file_name == parallel.__file__ and _communicates(frame.function_name):
            name = frame.function_name  # pmean calls psum: the outermost counts
    return name
