"""Rewrites the body of a shard_map, and the jaxprs that its equations run.

A collective of lax becomes an operation of this package. With the matmuls before or after it, it
becomes one operation:

- An all-gather and the matmuls that share it become one all_gather_matmul.
- Matmuls, their sum and a reduce-scatter become one matmul_reduce_scatter; those before an
  all-reduce become one matmul_all_reduce.
- Weight gradients join the input gradient that has the collective, as in `ops.matmul_gradients`.

Reshapes, transpositions and casts may be in between. `views` describes them, so that operands and
results need as few transpositions as possible. Whatever the selection would not overlap is left as
it is, and its collective is replaced alone, or stays lax's. `gathers` and `scatters` find
candidates, and `fusion` says what forbids one.

Equations that do not change stay the same objects.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Var

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import (
    equation_kinds,
    jaxpr_edit,
    jaxpr_walk,
    lax_collectives,
    trace_state,
)
from jax_intranode._src.ops.collective_matmul import matmul_all_reduce_p
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.rewrite import collectives, dataflow, gathers, norms, scatters, sums
from jax_intranode._src.rewrite.collectives import Body, body_of, fusible_collective
from jax_intranode._src.rewrite.dataflow import Dataflow
from jax_intranode._src.rewrite.fusion import Accepted, Fusion, Operation

# Whether a jaxpr, or one inside it, has a collective of lax that this package may replace.
has_collectives = jaxpr_walk.Contains(
    lambda equation: lax_collectives.lax_collective(equation) is not None
)


class Rewriter(jaxpr_edit.JaxprRewriter):
    """Rewrites the jaxprs of one body."""

    def __init__(self, body: Body):
        self.body = body
        super().__init__()
        self._matmuls = _Matmuls(body)

    def rewrite(self, jaxpr: Any) -> Any:
        """The rewritten jaxpr, open or closed; the same object if nothing changes."""
        return super().rewrite(jaxpr) if has_collectives(jaxpr_walk.open_jaxpr(jaxpr)) else jaxpr

    def rewritten(self, equations: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """The new equations of a jaxpr."""
        equations = self._matmuls.rewrite(equations, results)
        equations = norms.rewrite(equations, results, self.body)
        choices = {}
        for equation in equations:
            choice = collectives.choose(equation, self.body)
            if choice is not None:
                choices[id(equation)] = choice
            if jaxpr_walk.may_run_jaxprs(equation):
                self._leave_inside(equation)
        # An equation that stays is the same object, so that its choice is found.
        equations = [self._rewritten_inside(e) for e in equations]
        return sums.issue(equations, choices, self.body)

    def _rewritten_inside(self, equation: Any) -> Any:
        body, outside = self.body, self.body.in_loop
        body.in_loop = outside or equation.primitive.name in ("scan", "while")
        found = jaxpr_edit.replaced_inside(equation, self.rewrite)
        body.in_loop = outside
        return found

    def _leave_inside(self, equation: Any) -> None:
        """Records what is left in the jaxprs of an equation that are not rewritten."""
        if (
            jaxpr_edit.is_rewritten_inside(equation)
            or jaxpr_walk.shard_map_of(equation) is not None
        ):
            return
        for inner in jaxpr_walk.inner_jaxprs(equation, None):
            for one in jaxpr_walk.equations(inner.jaxpr, nested_shard_maps=False):
                collective = lax_collectives.lax_collective(one)
                if collective is not None and collective.axes:
                    self.body.decide(one, reasons.INSIDE.of(name=equation.primitive.name))


def rewrite_shard_map(
    site: LoweringSite, params: dict[str, Any], computed: Collection[Var] | None = None
) -> tuple[Any, Body]:
    """The rewritten jaxpr of a shard_map's body, and what became of its collectives.

    Args:
        site: where it is lowered.
        params: the parameters of its equation.
        computed: the `dataflow.computed_arguments` of the program; None if the program computes
            none of the body's.
    """
    jaxpr = jaxpr_walk.body_of_shard_map(params)
    if computed is None:
        computed = dataflow.computed_arguments(jaxpr)
    body = body_of(site, params, computed)
    return Rewriter(body).rewrite(jaxpr), body


class _Matmuls:
    """Rewrites the matmuls of one body, with their collectives."""

    def __init__(self, body: Body):
        self._body = body
        self._traced: dict[Any, Jaxpr | None] = {}  # see `_trace`

    def rewrite(self, equations: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """The equations of a jaxpr that has these results; the same object if nothing changes."""
        if self._body.reason is not None:
            return equations
        collectives = {
            position: collective
            for position, equation in enumerate(equations)
            if (collective := fusible_collective(equation, self._body)) is not None
        }
        if not collectives or not any(map(equation_kinds.dot_general, equations)):
            return equations
        flow = Dataflow(equations, results, self._body.computed)
        accepted = Accepted(flow)
        overlap = sums.Overlap(equations, self._body)
        for find in (gathers.fusions, scatters.fusions):
            for candidates in find(flow, collectives):
                for candidate in candidates:
                    jaxpr = self._jaxpr(candidate, accepted, overlap)
                    if jaxpr is not None:
                        accepted.add(candidate, candidate.inlined(jaxpr))
                        self._body.decide(equations[candidate.collective], None)
                        break
        return accepted.equations()

    def _jaxpr(self, fusion: Fusion, accepted: Accepted, overlap: sums.Overlap) -> Jaxpr | None:
        """What takes the place of equations; None if they stay."""
        if self._is_slower(fusion, overlap):
            return None
        jaxpr = self._trace(fusion.operation, [v.aval for v in fusion.operands])
        allowed = jaxpr is not None and fusion.obstacle is None and accepted.fits(fusion)
        return jaxpr if allowed else None

    def _is_slower(self, fusion: Fusion, overlap: sums.Overlap) -> bool:
        """Whether XLA is faster, because it can overlap the collective with other matmuls.

        That counts where ours would be sequential: the all-gather of an all-reduce is not
        overlapped, and transpositions take time.
        """
        if not fusion.transposes and fusion.operation.primitive is not matmul_all_reduce_p:
            return False
        ready = max((p for p in fusion.removed if p < fusion.collective), default=fusion.collective)
        return overlap.has_matmul(fusion.collective, ready + 1)

    def _trace(self, operation: Operation, avals: list[Any]) -> Jaxpr | None:
        """The operation as a jaxpr; None if it would not be overlapped."""
        if self._body.in_loop and operation.primitive is matmul_all_reduce_p:
            copies = dataclasses.replace(operation.params, copies=True)
            operation = dataclasses.replace(operation, params=copies)
        key = operation, tuple(avals)
        if key not in self._traced:
            body, jaxpr = self._body, None
            its_avals = operation.avals(avals)
            if body.is_overlapped(operation.primitive, its_avals, operation.params):
                with trace_state.inside_shard_map(body.params):
                    jaxpr = jaxpr_edit.trace(operation.function(body.site), avals)
            self._traced[key] = jaxpr
        return self._traced[key]
