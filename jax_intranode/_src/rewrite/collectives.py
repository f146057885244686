"""A collective of lax, as an operation of this package."""

from dataclasses import dataclass
from typing import Any

from jax_intranode._src import compat
from jax_intranode._src.ops.collective import (
    AllGatherParams,
    Params,
    PsumParams,
    PsumScatterParams,
    all_gather_p,
    psum_p,
    psum_scatter_p,
)
from jax_intranode._src.ops.primitive import OpPrimitive
from jax_intranode._src.rewrite.body import Body


@dataclass(frozen=True)
class Choice:
    """The operation that takes the place of an equation.

    Attributes:
        primitive: the operation.
        params: its parameters.
    """

    primitive: OpPrimitive
    params: Params


def choose(equation: Any, body: Body) -> Choice | None:
    """The operation that replaces an equation; None if it is no collective of lax, or is left.

    The decision is recorded in the body.
    """
    collective = compat.lax_collective(equation)
    if collective is None:
        return None
    choice = _operation(equation, collective) if body.reason is None else body.reason
    reason = choice if isinstance(choice, str) else _reason_to_leave(equation, choice, body)
    body.decide(equation, reason)
    return None if reason is not None or isinstance(choice, str) else choice


def replace(equation: Any, choice: Choice, body: Body) -> Any:
    """The equation that takes its place, with the same operands and results."""
    params = {"params": choice.params, "traced_over": body.traced_over}
    return compat.new_equation(
        equation, choice.primitive.plain, equation.invars, equation.outvars, params
    )


def _operation(equation: Any, collective: compat.LaxCollective) -> Choice | str:
    axes = collective.axes
    if collective.index_groups is not None:
        return "axis_index_groups"
    if collective.over_vmap or not axes:
        return "over axes of vmap"
    if len(set(axes)) < len(axes):
        return "an axis that is named twice"
    if any(v.aval.size == 0 for v in equation.invars):
        return "empty arrays"
    if compat.is_placed(equation):
        return "under compute_on or set_xla_metadata"
    if collective.operation == "psum":
        return Choice(psum_p, PsumParams(axes, invariant=collective.invariant))
    dimension, tiled, size = collective.dimension, collective.tiled, collective.size
    if collective.operation == "all_gather":
        return Choice(all_gather_p, AllGatherParams(axes, dimension, tiled, size))
    return Choice(psum_scatter_p, PsumScatterParams(axes, dimension, tiled, size))


def _reason_to_leave(equation: Any, choice: Choice, body: Body) -> str | None:
    """Why lax keeps a collective; None if selection wants it."""
    if not body.site.manual.issuperset(choice.params.axes):
        return "an axis that shard_map has not bound"
    operations = choice.primitive.explain(
        body.site,
        [v.aval for v in equation.invars],
        params=choice.params,
        traced_over=body.traced_over,
    )
    reasons = [o.selected.reason for o in operations if o.selected.algorithm == "lax"]
    return reasons[0] if reasons else None
