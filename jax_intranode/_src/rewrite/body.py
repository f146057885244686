"""The body of a shard_map that is rewritten, and what became of its collectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_intranode._src import reasons
from jax_intranode._src.health import call_sites
from jax_intranode._src.jax_private import call_frames, jaxpr_walk, lax_collectives
from jax_intranode._src.ops import fallback, primitive
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.rewrite import agreement, mode
from jax_intranode._src.selection import config


@dataclass(frozen=True)
class Decision:
    """What became of a collective of lax.

    Attributes:
        equation: the equation.
        reason: why it was left; None if it was replaced.
    """

    equation: Any
    reason: str | None

    @property
    def missed(self) -> bool:
        """Whether it was left although this package might be faster."""
        return self.reason is not None and reasons.cause_of(self.reason) == reasons.REFUSED


class Body:
    """What all equations of a body have in common.

    Attributes:
        site: where the body is lowered.
        params: the parameters of the shard_map equation.
        reason: why all collectives are left; None if they may be replaced.
        decisions: what became of each collective, in order; those of a jaxpr that several equations
            run are there once.
    """

    def __init__(self, site: LoweringSite, params: dict[str, Any], reason: str | None):
        self.site = site
        self.params = params
        self.reason = reason
        self.decisions: list[Decision] = []
        # What a collective became, by its operation and its types: see `collectives.choose`.
        self.chosen: dict[Any, Any] = {}

    def is_overlapped(
        self, operation: primitive.OpPrimitive, avals: Sequence[Any], params: Any
    ) -> bool:
        """Whether such a call would be one overlapped custom call."""
        return operation.decide(self.site, avals, params).is_overlapped

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

    def log(self, left: str) -> None:
        """Logs each collective that was left, and why. `left` says to whom."""
        for decision in self.decisions:
            if decision.reason is not None:
                fallback.log_once(*_named(decision.equation), left, decision.reason)

    def refuse_if_strict(self, which: str) -> None:
        """Raises RuntimeError if JAX_INTRANODE_STRICT=1 and a collective was missed."""
        missed = [decision for decision in self.decisions if decision.missed]
        if not missed or not config.get().is_strict:
            return
        lines = ["  {} at {}: {}".format(*_named(d.equation), d.reason) for d in missed]
        raise RuntimeError(
            f"{which} were not replaced:\n"
            + "\n".join(lines)
            + "\nJAX_INTRANODE_STRICT=1 makes this an error. Fix the causes, compile this "
            "program without install() and accelerate(), or unset the variable."
        )


def _named(equation: Any) -> tuple[str, str]:
    """The operation that a collective is, and its call site."""
    collective = lax_collectives.lax_collective(equation)
    assert collective is not None  # or nothing would have been decided
    return collective.operation, call_sites.call_site(call_frames.frames_of(equation))


def body_of(site: LoweringSite, params: dict[str, Any]) -> Body:
    """The body of a shard_map at a lowering site, with the reason if it is left as it is."""
    site = site.traced_here()
    reason = site.reason_for_lax()
    if reason is None and mode.enabled.value != mode.PART:
        assert site.mesh is not None  # or there would be a reason
        reason = agreement.reason_not_to_rewrite(site.mesh, jaxpr_walk.body_of_shard_map(params))
    return Body(site, params, reason)
