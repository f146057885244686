"""A collective of lax, as an operation of this package."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Var

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import equation_kinds, jaxpr_edit, lax_collectives
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.ops import ppermute
from jax_intranode._src.ops.collective import Params
from jax_intranode._src.ops.primitive import BY_OPERATION, OpPrimitive
from jax_intranode._src.rewrite.body import Body


@dataclass(frozen=True)
class Choice:
    """The operation that takes the place of an equation."""

    primitive: OpPrimitive
    params: Params


def choose(equation: Any, body: Body) -> Choice | None:
    """The operation that replaces an equation; None if it is not a collective of lax, or is left.

    The decision is recorded in the body.
    """
    collective = lax_collectives.lax_collective(equation)
    if collective is None or not collective.axes:  # over axes of vmap nothing is sent
        return None
    found: Choice | str | None = body.reason or _reason_to_leave(equation, collective, body)
    if found is None:
        primitive = BY_OPERATION[collective.operation]
        assert primitive.params is not None  # the record names lax's primitives
        params = primitive.params.of_lax(collective, _world_size(collective.axes, body))
        choice = Choice(primitive, params)
        key = choice, *((v.aval.shape, v.aval.dtype) for v in equation.invars)
        if key not in body.chosen:
            body.chosen[key] = _reason_of_selection(equation, choice, body) or choice
        found = body.chosen[key]
    if not isinstance(found, Choice):
        body.decide(equation, found)
        return None
    body.decide(equation, None)
    return found


def replace(equation: Any, choice: Choice, body: Body) -> Any:
    """The equation that takes its place, with the same operands and results."""
    params = {"params": choice.params, "traced_over": body.site.traced_over}
    primitive = choice.primitive
    return jaxpr_edit.new_equation(
        equation, primitive.plain, equation.invars, equation.outvars, params, primitive.scope
    )


def _reason_to_leave(
    equation: Any, collective: lax_collectives.LaxCollective, body: Body
) -> str | None:
    """Why no operation can take the place of a collective; None if one may."""
    axes = collective.axes
    if collective.index_groups is not None:
        return reasons.INDEX_GROUPS
    if collective.over_vmap:
        return reasons.AXES_OF_VMAP_TOO
    if len(set(axes)) < len(axes):
        return reasons.AXIS_TWICE.of(axes=reasons.names(axes))
    if any(v.aval.size == 0 for v in equation.invars):
        return reasons.EMPTY.of(operation=collective.operation)
    if equation_kinds.is_placed(equation):
        return reasons.PLACED
    if not_bound := [axis for axis in axes if axis not in body.site.manual]:
        return reasons.AXIS_NOT_BOUND.of(axes=reasons.names(not_bound))
    if collective.operation == "ppermute" and (mesh := body.site.mesh) is not None:
        size = _world_size(axes, body)
        return ppermute.reason_of_perm(collective.perm, size, axes, mesh.axis_names)
    return None


def _world_size(axes: tuple[str, ...], body: Body) -> int:
    mesh = body.site.mesh
    assert mesh is not None  # or there would be a reason to leave all collectives
    return math.prod(mesh.shape[axis] for axis in axes)


def _reason_of_selection(equation: Any, choice: Choice, body: Body) -> str | None:
    """Why lax keeps a collective; None if it is replaced."""
    avals = [v.aval for v in equation.invars]
    for operation in choice.primitive.decide(body.site, avals, choice.params).operations():
        selected = operation.selected
        if selected.algorithm == "lax":
            return selected.reason
        if not selected.measured:
            return reasons.NOT_TUNED.of(reason=selected.reason)
    return None


def is_sum(collective: lax_collectives.LaxCollective) -> bool:
    """Whether it is an all-reduce or a reduce-scatter that adds."""
    return RECORDS[collective.operation].reduction == "sum"


def is_gather(collective: lax_collectives.LaxCollective) -> bool:
    """Whether every rank gets the whole operands of all, and nothing else."""
    record = RECORDS[collective.operation]
    return record.gathers and not record.divides and record.reduction is None


def collective_of(equation: Any, body: Body) -> lax_collectives.LaxCollective | None:
    """The sum or all-gather of one array that an equation is, if it may be part of another one."""
    found = lax_collectives.lax_collective(equation)
    if (
        found is None
        or not (is_sum(found) or is_gather(found))
        or len(equation.invars) > 1
        or not isinstance(equation.invars[0], Var)
        or _reason_to_leave(equation, found, body) is not None
    ):
        return None
    return dataclasses.replace(found, size=_world_size(found.axes, body))
