"""Makes one operation of a sum over ranks, a residual add and a norm.

A psum or psum_scatter of lax whose only use is the addition of a residual becomes a
psum_residual_rms_norm or one of its relatives, if a norm of the result follows. `rows` recognizes
norms. What a norm computes on its way must not be used elsewhere: XLA would compute it once more.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Var

from jax_intranode._src.jax_private import equation_kinds, jaxpr_edit, lax_collectives
from jax_intranode._src.ops import norm_rules
from jax_intranode._src.rewrite import rows
from jax_intranode._src.rewrite.body import Body
from jax_intranode._src.rewrite.collectives import collective_of
from jax_intranode._src.rewrite.dataflow import Dataflow
from jax_intranode._src.selection import select

# A parameter that is made in more steps is read from the middle on, as if it were given there.
_MOST_STEPS = 32


@dataclass(frozen=True)
class _Found:
    """A norm that can take the place of equations.

    Attributes:
        collective: the position of the collective.
        addition: the position of the residual add, where the operation runs.
        residual: the residual.
        result: the normalized rows.
        norm: which norm.
        removed: the positions of the equations that it replaces.
    """

    collective: int
    addition: int
    residual: Var
    result: Var
    norm: rows.Norm
    removed: frozenset[int]


def rewrite(equations: Sequence[Any], results: Sequence[Any], body: Body) -> Sequence[Any]:
    """The equations of a jaxpr that has these results; the same object if nothing changes."""
    if body.reason is not None:
        return equations
    collectives = [
        (position, collective)
        for position, equation in enumerate(equations)
        if (collective := collective_of(equation, body)) is not None
        and (collective.operation == "psum" or _scatters_rows(collective))
    ]
    if not collectives:
        return equations
    flow: Dataflow | None = None
    accepted: dict[int, tuple[_Found, Any]] = {}
    removed: set[int] = set()
    hoisted: set[int] = set()
    for position, collective in collectives:
        if not _may_be_normed(equations[position], collective, body):
            continue
        flow = flow or Dataflow(equations, results)
        found = _find(flow, position)
        if found is None or not removed.isdisjoint(found.removed):
            continue
        operation = _operation(flow, found, collective, body)
        if operation is None:
            continue
        earlier = set(_hoisted(flow, found, operation.invars[2:]) or ())
        if earlier.isdisjoint(removed | found.removed) and hoisted.isdisjoint(found.removed):
            accepted[found.addition] = found, operation
            removed |= found.removed
            hoisted |= earlier
            body.decide(equations[position], None)
    if flow is None or not accepted:
        return equations
    return list(_emitted(flow, accepted, removed))


def _scatters_rows(collective: lax_collectives.LaxCollective) -> bool:
    return collective.operation == "psum_scatter" and collective.tiled


def _may_be_normed(equation: Any, collective: lax_collectives.LaxCollective, body: Body) -> bool:
    """Whether the sum is one of rows that our kernels take, and would be faster with some norm."""
    x: Any = equation.invars[0].aval
    scatters = collective.operation == "psum_scatter"
    if x.ndim < 1 + scatters or (scatters and collective.dimension == x.ndim - 1):
        return False
    if select.unsupported_norm(x.dtype.name, x.shape[-1]) is not None:
        return False
    kinds = ("rms_norm", "layer_norm")
    candidates = (_params(rows.Norm(kind, 0.0, None, 0.0, None), collective) for kind in kinds)
    return any(norm_rules.is_faster(body.site, x, params) for params in candidates)


def _params(norm: rows.Norm, collective: lax_collectives.LaxCollective) -> norm_rules.NormParams:
    return norm_rules.NormParams(
        collective.axes,
        norm.kind,
        norm.eps,
        norm.weight_offset,
        collective.dimension if collective.operation == "psum_scatter" else None,
        collective.size,
        invariant=collective.invariant,
    )


# Finding norms.


def _find(flow: Dataflow, position: int) -> _Found | None:
    """The norm that follows a collective."""
    (total,) = flow.equations[position].outvars
    addition = flow.only_user(total)
    if addition is None:
        return None
    equation = flow.equations[addition]
    if not equation_kinds.is_addition(equation) or equation_kinds.is_placed(equation):
        return None
    (h,) = equation.outvars
    others = [v for v in equation.invars if v is not total]
    if len(others) != 1 or not isinstance(others[0], Var):
        return None
    (residual,) = others
    if _type(residual) != _type(h):
        return None
    for result, norm, passed in _norms(flow, h):
        removed = _removed(flow, position, addition, result, passed)
        if removed is not None:
            return _Found(position, addition, residual, result, norm, removed)
    return None


def _type(v: Any) -> tuple[Any, Any]:
    return v.aval.shape, v.aval.dtype


def _norms(flow: Dataflow, h: Any) -> Iterator[tuple[Var, rows.Norm, set[int]]]:
    """The norms of h that have its type, the longest chains of equations first.

    With each come the positions of the equations that were read.
    """
    reader = rows.Reader(h.aval.shape)
    known: dict[Any, rows.Rows | None] = {h: rows.own()}
    passed: set[int] = set()
    found: list[tuple[Var, rows.Norm]] = []
    outside: dict[Any, rows.Rows | None] = {}

    def value(v: Any) -> rows.Rows | None:
        return known[v] if v in known else _parameter(flow, reader, v, outside)

    waiting = sorted(set(flow.used_at[h]))
    seen = set(waiting)
    while waiting:
        position = heapq.heappop(waiting)
        if (
            position == len(flow.equations)
            or flow.stretches[position] != flow.stretches[flow.made_at[h]]
        ):
            continue
        equation = flow.equations[position]
        read = reader.read(equation, value)
        known.update(zip(equation.outvars, read, strict=True))
        for v, described in zip(equation.outvars, read, strict=True):
            if described is None:
                continue
            passed.add(position)
            norm = None
            if _type(v) == _type(h):
                norm = rows.norm_of(described)
            if norm is not None:
                found.append((v, norm))
            for user in flow.used_at[v]:
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(waiting, user)
    for v, norm in reversed(found):
        yield v, norm, passed


def _parameter(
    flow: Dataflow,
    reader: rows.Reader,
    v: Any,
    known: dict[Any, rows.Rows | None],
    steps: int = _MOST_STEPS,
) -> rows.Rows | None:
    """A variable that does not depend on h, as a parameter or as a function of some."""
    if v not in known:
        known[v] = None
        equation = flow.maker(v) if steps else None
        if equation is not None and not (
            equation_kinds.changes_dtype(equation) and not _widens(equation)
        ):
            read = reader.read(equation, lambda w: _parameter(flow, reader, w, known, steps - 1))
            known[v] = read[equation.outvars.index(v)]
        dtype = v.aval.dtype
        if known[v] is None and v.aval.ndim == 1 and dtype in rows.FLOATS:
            known[v] = rows.parameter(v)
    return known[v]


def _widens(equation: Any) -> bool:
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return before.itemsize < after.itemsize or before == after


def _removed(
    flow: Dataflow, collective: int, addition: int, result: Var, passed: set[int]
) -> frozenset[int] | None:
    """The equations that are not needed once the operation makes the result.

    None if something that the norm computes, other than a cast, is still needed.
    """
    made = flow.made_at[result]
    if len(flow.equations[made].outvars) > 1:
        return None
    removed = {collective, addition, made}
    # Only equations that were read can have become unused; users come after what they use.
    for position in sorted(passed, reverse=True):
        equation = flow.equations[position]
        users = {p for v in equation.outvars for p in flow.used_at[v]}
        if position != made and users and users <= removed:
            removed.add(position)
    needed = _ancestors(flow, made, passed) - removed
    if any(not equation_kinds.changes_dtype(flow.equations[p]) for p in needed):
        return None
    return frozenset(removed)


def _ancestors(flow: Dataflow, position: int, among: set[int]) -> set[int]:
    """The positions among some of the equations that another one needs."""
    found: set[int] = set()
    waiting = [position]
    while waiting:
        for v in flow.uses[waiting.pop()]:
            made = flow.made_at.get(v)
            if made is not None and made in among and made not in found:
                found.add(made)
                waiting.append(made)
    return found


# Replacing them.


def _operation(
    flow: Dataflow, found: _Found, collective: lax_collectives.LaxCollective, body: Body
) -> Any:
    """The operation's equation; None if the selection or a type forbids it."""
    like = flow.equations[found.collective]
    addition = flow.equations[found.addition]
    (x,), (h,) = like.invars, addition.outvars
    parameters = [found.norm.weight] + ([found.norm.bias] if found.norm.bias is not None else [])
    allowed = ({x.aval.dtype.name}, {"float32"})
    if {v.aval.dtype.name for v in parameters} not in allowed:
        return None
    if _hoisted(flow, found, parameters) is None:
        return None
    params = _params(found.norm, collective)
    if not norm_rules.is_faster(body.site, x.aval, params):
        return None
    primitive = params.primitive
    operands = [x, found.residual, *parameters]
    (operation,) = primitive.explain(
        body.site, [v.aval for v in operands], params=params, traced_over=body.traced_over
    )
    if operation.selected.algorithm == "lax":
        return None
    equation_params = {"params": params, "traced_over": body.traced_over}
    return jaxpr_edit.new_equation(
        like, primitive.plain, operands, [found.result, h], equation_params, primitive.scope
    )


def _hoisted(flow: Dataflow, found: _Found, operands: Sequence[Var]) -> list[int] | None:
    """The positions of equations that must run before the operation, in order.

    None if one of them needs what the operation computes.
    """
    hoisted: set[int] = set()
    waiting = list(operands)
    while waiting:
        v = waiting.pop()
        position = flow.made_at.get(v, -1)
        if position in (found.collective, found.addition) or position in found.removed:
            return None
        if position < found.addition or position in hoisted:
            continue
        if equation_kinds.has_effects(flow.equations[position]) or flow.is_heavy(position):
            return None
        hoisted.add(position)
        waiting += flow.uses[position]
    return sorted(hoisted)


def _emitted(
    flow: Dataflow, accepted: dict[int, tuple[_Found, Any]], removed: set[int]
) -> Iterator[Any]:
    emitted: set[int] = set()
    for position, equation in enumerate(flow.equations):
        if position in accepted:
            found, operation = accepted[position]
            for earlier in _hoisted(flow, found, operation.invars[2:]) or []:
                if earlier not in emitted:
                    emitted.add(earlier)
                    yield flow.equations[earlier]
            yield operation
        elif position not in removed and position not in emitted:
            yield equation
