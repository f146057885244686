"""Makes one operation of a collective of lax and the matmuls before or after it.

- An all-gather and the matmuls that share it become one all_gather_matmul.
- Matmuls, their sum and a reduce-scatter become one matmul_reduce_scatter; those before an
  all-reduce become one matmul_all_reduce.
- Weight gradients join the input gradient that has the collective, as in `ops.matmul_gradients`.

Reshapes, transpositions and casts may be in between. `views` describes them, so that operands and
results need as few transpositions as possible. Whatever the selection would
not overlap is left as it is, and its collective is replaced alone, or stays lax's.

`gathers` and `scatters` find candidates, and `fusion` says what forbids one.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr

from jax_intranode._src.jax_private import equation_kinds, jaxpr_edit, trace_state
from jax_intranode._src.ops.collective_matmul import matmul_all_reduce_p
from jax_intranode._src.rewrite import gathers, scatters, sums
from jax_intranode._src.rewrite.body import Body
from jax_intranode._src.rewrite.collectives import collective_of
from jax_intranode._src.rewrite.dataflow import Dataflow
from jax_intranode._src.rewrite.fusion import Accepted, Fusion, Operation


class MatmulRewriter:
    """Rewrites the jaxprs of one body."""

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
            if (collective := collective_of(equation, self._body)) is not None
        }
        if not collectives or not any(map(equation_kinds.dot_general, equations)):
            return equations
        flow = Dataflow(equations, results)
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
        key = operation, tuple(avals)
        if key not in self._traced:
            body, jaxpr = self._body, None
            its_avals = operation.avals(avals)
            if body.is_overlapped(operation.primitive, its_avals, operation.params):
                with trace_state.inside_shard_map(body.params):
                    jaxpr = jaxpr_edit.trace(operation.function(body.site), avals)
            self._traced[key] = jaxpr
        return self._traced[key]
