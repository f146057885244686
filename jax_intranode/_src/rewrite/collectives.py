"""The body of a shard_map that is rewritten, and the collectives of lax in it, one by one."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Var

from jax_intranode._src import reasons
from jax_intranode._src.health import call_sites
from jax_intranode._src.jax_private import (
    call_frames,
    equation_kinds,
    jaxpr_edit,
    jaxpr_walk,
    lax_collectives,
    trace_state,
)
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.ops import fallback, ppermute
from jax_intranode._src.ops.collective import Params
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import BY_OPERATION, OpPrimitive
from jax_intranode._src.rewrite import agreement, mode


class Body:
    """What all equations of a body have in common.

    Attributes:
        site: where the body is lowered.
        params: the parameters of the shard_map equation.
        reason: why all collectives are left; None if they may be replaced.
        computed: the `dataflow.computed_arguments` of its jaxprs.
        decisions: each collective, and why it was left; None if it was replaced. In order, by the
            identity of the equation; those of a jaxpr that several equations run are there once.
    """

    def __init__(
        self,
        site: LoweringSite,
        params: dict[str, Any],
        reason: str | None,
        computed: Collection[Var],
    ):
        self.site = site
        self.params = params
        self.reason = reason
        self.computed = computed
        self.in_loop = trace_state.in_loop()  # whether the equations at hand are in a loop's body
        self.decisions: dict[int, tuple[Any, str | None]] = {}
        # Why the selection leaves a choice to lax, by the choice and the types of its operands.
        self.selected: dict[Any, str | None] = {}

    def is_overlapped(self, operation: OpPrimitive, avals: Sequence[Any], params: Any) -> bool:
        """Whether such a call would be one overlapped custom call."""
        return operation.decide(self.site, avals, params).is_overlapped

    def taken(self) -> int:
        """How many collectives were replaced."""
        return sum(reason is None for _, reason in self.decisions.values())

    def left(self) -> int:
        """How many collectives were left."""
        return len(self.decisions) - self.taken()

    def decide(self, equation: Any, reason: str | None) -> None:
        """Records what becomes of a collective, also if it was decided otherwise before."""
        self.decisions[id(equation)] = equation, reason

    def log(self, left_to: str) -> None:
        """Logs each collective that was left, to what, and why."""
        for operation, site, reason in self._all_left():
            fallback.log_once(operation, site, f"is left to {left_to}", reason)

    def refuse_if_strict(self, what: str) -> None:
        """Raises RuntimeError if JAX_INTRANODE_STRICT=1 and a collective was missed."""
        missed = [left for left in self._all_left() if reasons.is_missed(left[-1])]
        fallback.refuse_missed(what, missed, "install() and accelerate()")

    def _all_left(self) -> list[tuple[str, str, str]]:
        """The operation, the call site and the reason of each collective that was left."""
        return [
            (*_operation_and_site(equation), reason)
            for equation, reason in self.decisions.values()
            if reason is not None
        ]


def _operation_and_site(equation: Any) -> tuple[str, str]:
    """The operation that a collective is, and its call site."""
    collective = lax_collectives.lax_collective(equation)
    assert collective is not None  # or nothing would have been decided
    return collective.operation, call_sites.call_site(call_frames.frames_of(equation))


def body_of(site: LoweringSite, params: dict[str, Any], computed: Collection[Var]) -> Body:
    """The body of a shard_map at a lowering site, with the reason if it is left as it is."""
    site = site.traced_here()
    reason = site.reason_for_lax()
    if reason is None and mode.enabled.value != mode.PART:
        assert site.mesh is not None  # or there would be a reason
        reason = agreement.reason_not_to_rewrite(site.mesh, jaxpr_walk.body_of_shard_map(params))
    return Body(site, params, reason, computed)


# A collective of lax, as an operation of this package.


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
    choice = None
    reason = body.reason or _reason_to_leave(equation, collective, body)
    if reason is None:
        primitive = BY_OPERATION[collective.operation]
        assert primitive.params is not None  # the record names lax's primitives
        params = primitive.params.of_lax(collective, _world_size(collective.axes, body))
        choice = Choice(primitive, params)
        key = choice, *((operand.aval.shape, operand.aval.dtype) for operand in equation.invars)
        if key not in body.selected:
            body.selected[key] = _reason_of_selection(equation, choice, body)
        reason = body.selected[key]
    body.decide(equation, reason)
    return choice if reason is None else None


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


def fusible_collective(equation: Any, body: Body) -> lax_collectives.LaxCollective | None:
    """The sum or all-gather of one array that an equation is, if it may be part of another one."""
    collective = lax_collectives.lax_collective(equation)
    if (
        collective is None
        or not (is_sum(collective) or is_gather(collective))
        or len(equation.invars) > 1
        or not isinstance(equation.invars[0], Var)
        or _reason_to_leave(equation, collective, body) is not None
    ):
        return None
    return dataclasses.replace(collective, size=_world_size(collective.axes, body))
