"""Makes one operation of a sum over ranks, a residual add and a norm.

A psum or psum_scatter of lax whose only use is the addition of a residual becomes a
psum_residual_rms_norm or one of its relatives, if a norm of the result follows. `rows` recognizes
norms. What a norm computes on its way must not be used elsewhere: XLA would compute it once more.
"""

import heapq
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Var

from jax_intranode._src.jax_private import equation_kinds, jaxpr_edit, lax_collectives
from jax_intranode._src.operations import NORM, RECORDS, of_kind
from jax_intranode._src.ops import norm_rules
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.rewrite import rows
from jax_intranode._src.rewrite.collectives import Body, fusible_collective, is_sum
from jax_intranode._src.rewrite.dataflow import Dataflow
from jax_intranode._src.rewrite.fusion import FARTHEST, Accepted, Replacement
from jax_intranode._src.selection import select


def rewrite(equations: Sequence[Any], results: Sequence[Any], body: Body) -> Sequence[Any]:
    """The equations of a jaxpr that has these results; the same object if nothing changes."""
    if body.reason is not None:
        return equations
    flow: Dataflow | None = None
    accepted: Accepted | None = None
    for position, equation in enumerate(equations):
        collective = fusible_collective(equation, body)
        if collective is None or not is_sum(collective):
            continue
        dimension = _scattered(collective)
        of = equation.invars[0].aval, collective.axes, dimension, collective.size
        if (dimension is not None and not collective.tiled) or not may_be_normed(*of, body.site):
            continue
        flow = flow or Dataflow(equations, results)
        accepted = accepted or Accepted(flow)
        found = _replacement(flow, position, collective, body)
        if found is not None and accepted.fits(found[0]):
            accepted.add(*found)
            body.decide(equation, None)
    return equations if accepted is None else accepted.equations()


def may_be_normed(
    x: Any, axes: tuple[str, ...], dimension: int | None, size: int, site: LoweringSite
) -> bool:
    """Whether a sum of x is one of rows that our kernels take, and is faster with some norm.

    `dimension` is the one that the sum is scattered along, if it is.
    """
    name = "psum" if dimension is None else "psum_scatter"
    of_sum = [record for record in of_kind(NORM) if record.collective == name]
    if x.ndim < 1 or dimension == x.ndim - 1:
        return False
    if select.unsupported_norm(of_sum[0].name, x.dtype.name, x.shape[-1]) is not None:
        return False
    kinds = [record.norm or "" for record in of_sum]
    candidates = (norm_rules.NormParams(axes, k, 0.0, 0.0, dimension, size, False) for k in kinds)
    return any(norm_rules.is_faster(site, x, params) for params in candidates)


def _scattered(collective: lax_collectives.LaxCollective) -> int | None:
    return collective.dimension if RECORDS[collective.operation].divides else None


def _replacement(
    flow: Dataflow, position: int, collective: lax_collectives.LaxCollective, body: Body
) -> tuple[Replacement, list[Any]] | None:
    """A sum, its only use, and a norm of that; and the equation that takes their place."""
    like = flow.equations[position]
    (total,) = like.outvars
    addition = flow.only_user(total)
    if addition is None or flow.stretches[position] != flow.stretches[addition]:
        return None
    equation = flow.equations[addition]
    if not equation_kinds.is_addition(equation) or equation_kinds.is_placed(equation):
        return None
    (h,) = equation.outvars
    others = [v for v in equation.invars if v is not total]
    if len(others) != 1 or not isinstance(others[0], Var) or _type(others[0]) != _type(h):
        return None
    norms, passed = _norms(flow, h)
    for result, norm in norms:
        removed = _removed(flow, {position, addition}, flow.made_at[result], passed)
        if removed is None:
            continue
        parameters = [norm.weight, *([] if norm.bias is None else [norm.bias])]
        operands = (like.invars[0], others[0], *parameters)
        replaced = Replacement(flow, position, operands, (result, h), removed, frozenset())
        params = norm_rules.NormParams(
            *(collective.axes, norm.kind, norm.eps, norm.weight_offset),
            *(_scattered(collective), collective.size, collective.invariant),
        )
        if (
            replaced.last - replaced.first > FARTHEST
            or replaced.feeds(replaced)
            or not _is_chosen([v.aval for v in operands], params, body)
        ):
            return None
        operation = jaxpr_edit.new_equation(
            *(like, params.primitive.plain, operands, [result, h]),
            {"params": params, "traced_over": body.site.traced_over},
            params.primitive.scope,
        )
        return replaced, [operation]
    return None


def _type(v: Any) -> tuple[Any, Any]:
    return v.aval.shape, v.aval.dtype


def _is_chosen(avals: Sequence[Any], params: norm_rules.NormParams, body: Body) -> bool:
    """Whether the operation takes operands of these types, and is selected."""
    x, _, *parameters = avals
    if {v.dtype.name for v in parameters} not in ({x.dtype.name}, {"float32"}):
        return False
    if not norm_rules.is_faster(body.site, x, params):
        return False
    (operation,) = params.primitive.decide(body.site, avals, params).operations()
    return operation.selected.algorithm != "lax"


def _norms(flow: Dataflow, h: Any) -> tuple[list[tuple[Var, rows.Norm]], set[int]]:
    """The norms of h that have its type, the longest chains of equations first.

    With them come the positions of the equations that were read.
    """
    reader = rows.Reader(h.aval.shape)
    own = rows.own(h.aval.shape)
    known: dict[Any, rows.Rows | None] = {h: own}
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
        for v, described in zip(equation.outvars, reader.read(equation, value), strict=True):
            known[v] = described
            if described is None:
                continue
            passed.add(position)
            norm = rows.norm_of(described, own) if _type(v) == _type(h) else None
            if norm is not None and len(equation.outvars) == 1:
                found.append((v, norm))
            for user in flow.used_at[v]:
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(waiting, user)
    return found[::-1], passed


def _parameter(
    flow: Dataflow,
    reader: rows.Reader,
    v: Any,
    known: dict[Any, rows.Rows | None],
    steps: int = rows.MOST_STEPS,
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
        if known[v] is None and v.aval.ndim == 1 and v.aval.dtype in rows.FLOATS:
            known[v] = rows.parameter(v, reader.shape)
    return known[v]


def _widens(equation: Any) -> bool:
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return before.itemsize < after.itemsize or before == after


def _removed(
    flow: Dataflow, always: set[int], made: int, passed: set[int]
) -> frozenset[int] | None:
    """The equations that are not needed once the operation makes the result.

    None if something that the norm computes, other than a cast, is still needed.
    """
    removed = {*always, made}
    # Only equations that were read can have become unused; users come after what they use.
    for position in sorted(passed, reverse=True):
        users = {p for v in flow.equations[position].outvars for p in flow.used_at[v]}
        if users and users <= removed:
            removed.add(position)
    waiting, seen = [made], {made}
    while waiting:
        position = waiting.pop()
        if position not in removed and not equation_kinds.changes_dtype(flow.equations[position]):
            return None
        made_at = (flow.made_at.get(v, -1) for v in flow.uses[position])
        needs = {p for p in made_at if p in passed and p not in seen}
        seen |= needs
        waiting += needs
    return frozenset(removed)
