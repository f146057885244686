"""Equations between collectives and matmuls.

0.10.2 and later: JAX does not document the names and parameters of primitives.
"""

import math
from dataclasses import dataclass
from typing import Any

from jax._src import core
from jax.extend.core import Jaxpr

from jax_intranode._src.jax_private import jaxpr_walk


@dataclass(frozen=True)
class DotGeneral:
    """What ``lax.dot_general`` multiplies.

    Attributes:
        contracting: pairs of contracted dimensions, (of the first operand, of the second).
        batch: likewise for batch dimensions.
        precision: as in ``lax.dot_general``.
    """

    contracting: tuple[tuple[int, int], ...]
    batch: tuple[tuple[int, int], ...]
    precision: Any


def dot_general(equation: Any) -> DotGeneral | None:
    """What a dot_general multiplies; None for others, and if the program shards its result."""
    if equation.primitive.name != "dot_general":
        return None
    sharding = equation.params["out_sharding"]
    if sharding is not None and (
        any(axes is not None for axes in sharding.spec) or sharding.spec.unreduced
    ):
        return None
    contracting, batch = equation.params["dimension_numbers"]
    return DotGeneral(
        tuple(zip(*contracting, strict=True)),
        tuple(zip(*batch, strict=True)),
        equation.params["precision"],
    )


def called_jaxpr(equation: Any) -> Jaxpr | None:
    """The jaxpr that an equation calls, if it does nothing else and the jaxpr has no constants."""
    if equation.primitive.name not in ("jit", "pjit", "closed_call", "custom_jvp_call"):
        return None
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return None if getattr(called, "consts", ()) else jaxpr_walk.open_jaxpr(called)


def is_addition(equation: Any) -> bool:
    """Whether an equation adds two arrays of one type."""
    return equation.primitive.name in ("add", "add_any")


def permutation(equation: Any) -> tuple[int, ...] | None:
    """The dimensions of the operand in the result's order; None if it is not a transposition."""
    if equation.primitive.name != "transpose":
        return None
    return tuple(equation.params["permutation"])


def only_reshapes(equation: Any) -> bool:
    """Whether the result has the operand's elements in the same order."""
    name = equation.primitive.name
    if name == "reshape":
        return equation.params["dimensions"] is None and len(equation.invars) == 1
    if name == "broadcast_in_dim":
        return len(equation.invars) == 1 and equation.invars[0].aval.size == math.prod(
            equation.outvars[0].aval.shape
        )
    return name in ("squeeze", "expand_dims", "name", "pvary")


def only_changes_type(equation: Any) -> bool:
    """Whether the result is the operand, and is another sum or copy of it over axes by type only.

    0.11 and later have other names for these.
    """
    return equation.primitive.name.removesuffix("_p") in (
        "reduced_vary_cast",
        "vary_unreduced_cast",
    )


def changes_dtype(equation: Any) -> bool:
    """Whether the result is the operand in another dtype."""
    return equation.primitive.name == "convert_element_type"


def is_fence(equation: Any) -> bool:
    """Whether collectives must not be moved from one side of an equation to the other.

    Such are optimization barriers, and what the program places itself: on the host, by
    ``compute_on``, or in a scheduling group, by ``set_xla_metadata``. 0.10.2 and later.
    """
    return equation.primitive.name == "optimization_barrier" or is_placed(equation)


def is_placed(equation: Any) -> bool:
    """Whether an equation is under ``compute_on`` or ``set_xla_metadata``. 0.10.2 and later."""
    return bool(equation.ctx.compute_type or equation.ctx.xla_metadata)


def has_effects(equation: Any) -> bool:
    """Whether an equation has effects other than to act on named axes. 0.10.2 and later."""
    effects = equation.effects
    return bool(effects) and any(not isinstance(e, core.NamedAxisEffect) for e in effects)
