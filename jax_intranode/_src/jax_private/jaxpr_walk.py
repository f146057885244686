"""Reads jaxprs: what an equation runs, and where.

0.10.2 and later: JAX does not document the names and parameters of primitives.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.interpreters import partial_eval
from jax.extend.core import Jaxpr
from jax.sharding import AxisType

from jax_intranode._src.jax_private import trace_state


def without_dead_code(jaxpr: Any) -> Any:
    """A traced program's jaxpr as it is lowered: without equations that no result needs.

    From 0.11 on a traced program's jaxpr holds its constants itself.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def shard_map_of(equation: Any) -> tuple[jax.sharding.Mesh | None, frozenset[str]] | None:
    """As `mesh_of_shard_map`, of an equation; None if it is not a shard_map."""
    return mesh_of_shard_map(equation.params) if equation.primitive.name == "shard_map" else None


def mesh_of_shard_map(
    params: dict[str, Any],
) -> tuple[jax.sharding.Mesh | None, frozenset[str]]:
    """The mesh and the manual axes that `lowering_mesh` will give for a shard_map's body.

    The mesh is None if its devices are not known.
    """
    of_equation = params["mesh"]
    manual = frozenset(params["newly_manual_axes"]) | frozenset(of_equation.manual_axes)
    concrete = of_equation if isinstance(of_equation, jax.sharding.Mesh) else trace_state.set_mesh()
    return concrete, manual


@dataclass(frozen=True)
class InnerJaxpr:
    """A jaxpr that an equation runs.

    Attributes:
        jaxpr: the jaxpr.
        times: how often one execution of the equation runs it, at most; None if that is not known.
        conditional: whether it may run less often.
    """

    jaxpr: Jaxpr
    times: int | None
    conditional: bool


def may_run_jaxprs(equation: Any) -> bool:
    """False for most equations, which have no `inner_jaxprs`. It takes no time."""
    return equation.primitive.multiple_results


def inner_jaxprs(equation: Any, platform: str | None) -> Iterator[InnerJaxpr]:
    """The jaxprs that an equation runs when it is lowered for a platform, None for any platform.

    Those that only combine two numbers, of a scatter for instance, are left out.
    """
    if not may_run_jaxprs(equation):
        return
    name, params = equation.primitive.name, equation.params
    values: Sequence[Any] = list(params.values())
    times: int | None = 1
    conditional = False
    if name == "scan":
        times = params["length"]
    elif name == "while":
        times = None
    elif name == "custom_linear_solve":
        values = [params["jaxprs"].solve]  # the others are for its derivatives
    elif name == "cond":
        branches = params.get("branches_platforms")  # of jax.lax.platform_dependent
        conditional = not branches
        if branches and platform is not None:  # only the platform's branch is lowered
            lowered = [p is None or platform in p for p in branches]
            values = [params["branches"][lowered.index(True)]]
    for value in values:
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = getattr(inner, "jaxpr", inner)  # of a ClosedJaxpr
            if isinstance(jaxpr, Jaxpr):
                yield InnerJaxpr(jaxpr, times, conditional)


def equations(jaxpr: Any, nested_shard_maps: bool = True) -> Iterator[Any]:
    """The equations of a jaxpr, and after each one those of the jaxprs that it runs."""
    for equation in open_jaxpr(jaxpr).eqns:
        yield equation
        if may_run_jaxprs(equation) and (nested_shard_maps or shard_map_of(equation) is None):
            for inner in inner_jaxprs(equation, None):
                yield from equations(inner.jaxpr, nested_shard_maps)


def has_explicit_shardings(jaxpr: Any) -> bool:
    """Whether the types of a program's arrays say how they are divided, all axes being Explicit.

    0.10.2 and later.
    """
    top = open_jaxpr(jaxpr)
    meshes = (_sharding(v).mesh for v in (*top.invars, *top.outvars) if _sharding(v) is not None)
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    kinds = () if mesh is None else zip(mesh.axis_names, mesh.axis_types, strict=True)
    return (
        mesh is not None
        and all(kind is AxisType.Explicit or mesh.shape[name] == 1 for name, kind in kinds)
        and any(
            any(_sharding(v).spec)
            for variables in ((*e.invars, *e.outvars) for e in equations(jaxpr))
            for v in variables
            if _sharding(v) is not None
        )
    )


def _sharding(variable: Any) -> Any:
    return getattr(variable.aval, "sharding", None)


class Contains:
    """Whether a jaxpr, or one inside it, has an equation of a kind; the answers are kept."""

    def __init__(self, is_of_kind: Callable[[Any], bool]):
        self._is_of_kind = is_of_kind
        self._found: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def __call__(self, jaxpr: Jaxpr) -> bool:
        found = self._found.get(jaxpr)
        if found is None:
            found = self._found[jaxpr] = any(map(self.within, jaxpr.eqns))
        return found

    def within(self, equation: Any) -> bool:
        """Whether an equation is of the kind, or runs one that is."""
        return self._is_of_kind(equation) or any(
            self(inner.jaxpr) for inner in inner_jaxprs(equation, None)
        )


def body_of_shard_map(params: dict[str, Any]) -> Jaxpr:
    """The jaxpr of a shard_map's body. 0.10.2 and later."""
    return params["jaxpr"]


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The jaxpr of a closed one; an open one itself. From 0.12 on all are of one type."""
    return getattr(jaxpr, "jaxpr", jaxpr)
