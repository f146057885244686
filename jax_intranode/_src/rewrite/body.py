"""Rewrites the body of a shard_map, and the jaxprs that its equations run.

Equations that do not change stay the same objects, and a jaxpr that several equations run is
rewritten once: lowering takes little longer, and shared functions stay shared.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_intranode._src import compat
from jax_intranode._src.ops.lowering_site import LoweringSite, device_ids
from jax_intranode._src.rewrite import collectives, sums

_has_collectives: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def has_collectives(jaxpr: Any) -> bool:
    """Whether a jaxpr, or one inside it, has a collective of lax that this package may replace."""
    found = _has_collectives.get(jaxpr)
    if found is None:
        found = any(
            compat.lax_collective(equation) is not None
            or any(has_collectives(inner.jaxpr) for inner in compat.inner_jaxprs(equation, None))
            for equation in jaxpr.eqns
        )
        _has_collectives[jaxpr] = found
    return found


@dataclass(frozen=True)
class Decision:
    """What became of a collective of lax.

    Attributes:
        equation: the equation.
        reason: why it was left; None if it was replaced.
    """

    equation: Any
    reason: str | None


class Rewriter:
    """Rewrites one body.

    Attributes:
        site: where the body is lowered.
        params: the parameters of the shard_map equation.
        decisions: what became of each collective, in order; those of a jaxpr that several equations
            run are there once.
    """

    def __init__(self, site: LoweringSite, params: dict[str, Any], reason: str | None):
        """Keeps the arguments; with a reason, all collectives are left."""
        self.site = site
        self.params = params
        self.reason = reason
        self.decisions: list[Decision] = []
        self.traced_over = None if site.mesh is None else device_ids(site.mesh)
        # By identity. The first of each pair keeps the identity from being used again.
        self._rewritten: dict[int, tuple[Any, Any]] = {}

    def taken(self) -> int:
        """How many collectives were replaced."""
        return sum(decision.reason is None for decision in self.decisions)

    def left(self) -> int:
        """How many collectives were left."""
        return len(self.decisions) - self.taken()

    def decide(self, equation: Any, reason: str | None) -> None:
        """Records what became of a collective."""
        self.decisions.append(Decision(equation, reason))

    def leave(self, equation: Any, reason: str) -> None:
        """Replaces the decision to replace a collective."""
        for index, decision in enumerate(self.decisions):
            if decision.equation is equation:
                self.decisions[index] = Decision(equation, reason)

    def rewrite(self, jaxpr: Any) -> Any:
        """The rewritten jaxpr; the same object if nothing changes."""
        if not has_collectives(jaxpr):
            return jaxpr
        known = self._rewritten.get(id(jaxpr))
        if known is None:
            known = self._rewritten[id(jaxpr)] = jaxpr, self._rewrite(jaxpr)
        return known[1]

    def _rewrite(self, jaxpr: Any) -> Any:
        equations: Sequence[Any] = jaxpr.eqns
        choices = {}
        for equation in equations:
            choice = collectives.choose(equation, self)
            if choice is not None:
                choices[id(equation)] = choice
        equations = [compat.replaced_inside(e, self.rewrite) for e in equations]
        equations = sums.issue(equations, choices, self)
        if len(equations) == len(jaxpr.eqns) and all(map(_same, equations, jaxpr.eqns)):
            return jaxpr
        return jaxpr.replace(eqns=equations)


def _same(a: Any, b: Any) -> bool:
    return a is b
