"""Rewrites the body of a shard_map, and the jaxprs that its equations run.

Equations that do not change stay the same objects.
"""

from collections.abc import Sequence
from typing import Any

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import jaxpr_edit, jaxpr_walk, lax_collectives
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.rewrite import collectives, norms, sums
from jax_intranode._src.rewrite.body import Body, body_of
from jax_intranode._src.rewrite.matmuls import MatmulRewriter

# Whether a jaxpr, or one inside it, has a collective of lax that this package may replace.
has_collectives = jaxpr_walk.Contains(
    lambda equation: lax_collectives.lax_collective(equation) is not None
)


class Rewriter(jaxpr_edit.JaxprRewriter):
    """Rewrites the jaxprs of one body."""

    def __init__(self, body: Body):
        self.body = body
        super().__init__()
        self._matmuls = MatmulRewriter(body)

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
        equations = [jaxpr_edit.replaced_inside(e, self.rewrite) for e in equations]
        return sums.issue(equations, choices, self.body)

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


def rewrite_shard_map(site: LoweringSite, params: dict[str, Any]) -> tuple[Any, Body]:
    """The rewritten jaxpr of a shard_map's body, and what became of its collectives."""
    body = body_of(site, params)
    return Rewriter(body).rewrite(jaxpr_walk.body_of_shard_map(params)), body
