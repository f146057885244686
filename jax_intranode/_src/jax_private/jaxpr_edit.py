"""Makes jaxprs: traces functions, and replaces equations."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core
from jax._src.interpreters import partial_eval
from jax.extend.core import Jaxpr, Primitive, Var

from jax_intranode._src.jax_private import jaxpr_walk


def trace(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Jaxpr | None:
    """The jaxpr of a function of arrays of these types; None if it needs constants.

    0.10.2 and later: ``jax.make_jaxpr`` does not take the types of a shard_map's body.
    """
    from jax._src import api_util, linear_util

    debug = api_util.debug_info("jax_intranode", fun, tuple(avals), {})
    wrapped = linear_util.wrap_init(fun, debug_info=debug)
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, list(avals))
    return None if consts else jaxpr


def new_variable(aval: Any) -> Var:
    """A variable of this type. 0.10.2 and later."""
    return core.Var(aval)


def new_equation(
    like: Any,
    primitive: Primitive,
    invars: Sequence[Any],
    outvars: Sequence[Any],
    params: Any,
    scope: str,
) -> Any:
    """An equation with the source, in one more scope, and the context of another. 0.10.2."""
    _, effects = primitive.abstract_eval(*(v.aval for v in invars), **params)
    source = source_in_scope(like, scope)
    return core.new_jaxpr_eqn(
        list(invars), list(outvars), primitive, params, effects, source, like.ctx
    )


def source_in_scope(equation: Any, scope: str) -> Any:
    """The source of an equation, inside one more named scope. 0.10.2 and later."""
    source = equation.source_info
    return source.replace(name_stack=source.name_stack.extend(scope))


def replaced_inside(equation: Any, rewrite: Callable[[Any], Any]) -> Any:
    """The equation with each jaxpr that it runs rewritten; itself if none of them changes.

    `rewrite` gets a jaxpr, open or closed. Only equations that do nothing else with their jaxprs
    than to run them: calls, loops, branches. 0.10.2 and later.
    """
    if equation.primitive.name not in _RUNS_JAXPRS:
        return equation

    def of_value(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            new = [of_value(v) for v in value]
            changed = any(v is not w for v, w in zip(value, new, strict=True))
            return type(value)(new) if changed else value
        return rewrite(value) if isinstance(getattr(value, "jaxpr", value), Jaxpr) else value

    new = {name: of_value(v) if name in _JAXPR_PARAMS else v for name, v in equation.params.items()}
    if all(new[name] is value for name, value in equation.params.items()):
        return equation
    return equation.replace(params=new)


class JaxprRewriter:
    """Rewrites jaxprs, each of them once: lowering takes little longer, and shared functions stay.

    Subclasses define `rewritten`.
    """

    def __init__(self) -> None:
        # By identity. The first of each pair keeps the identity from being used again.
        self._known: dict[int, tuple[Any, Any]] = {}

    def rewritten(self, equations: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """The new equations of a jaxpr; those that stay are the same objects."""
        raise NotImplementedError

    def rewrite(self, jaxpr: Any) -> Any:
        """The rewritten jaxpr, open or closed; the same object if nothing changes."""
        known = self._known.get(id(jaxpr))
        if known is None:
            inner = jaxpr_walk.open_jaxpr(jaxpr)
            new = self.rewritten(inner.eqns, inner.outvars)
            same = len(new) == len(inner.eqns) and all(map(operator.is_, new, inner.eqns))
            result = jaxpr if same else with_equations(jaxpr, new)
            known = self._known[id(jaxpr)] = jaxpr, result
        return known[1]


def is_rewritten_inside(equation: Any) -> bool:
    """Whether `replaced_inside` rewrites the jaxprs that an equation runs."""
    return equation.primitive.name in _RUNS_JAXPRS


def with_equations(jaxpr: Any, equations: Sequence[Any]) -> Any:
    """A jaxpr, open or closed, with other equations. 0.10.2 and later."""
    inner = jaxpr_walk.open_jaxpr(jaxpr)
    new = inner.replace(eqns=list(equations))
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


_RUNS_JAXPRS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "eval_jaxpr",
        "remat2",
        "checkpoint",
        "scan",
        "while",
        "cond",
        "custom_jvp_call",
        "custom_vjp_call",
    }
)
_JAXPR_PARAMS = frozenset(
    {"jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr", "cond_jaxpr", "branches"}
)
