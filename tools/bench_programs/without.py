"""Programs without communication: the bound of what hiding it can gain."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from jax_intranode._src.jax_private import jaxpr_edit, jaxpr_walk, lax_collectives
from jax_intranode._src.jax_private.lax_collectives import LaxCollective


def without_communication(
    jitted: Callable[..., Any], arguments: Sequence[Any], out_shardings: Any = None
) -> Any:
    """Returns a jitted function like another one, without its collectives, for such arguments.

    A local operation with a result of the same type takes the place of each collective, those that
    JAX has inserted included. So the values of the results are wrong. What XLA's partitioner adds
    stays.

    Args:
        out_shardings: as for ``jax.jit``.
    """
    jaxpr, result = jax.make_jaxpr(jitted, return_shape=True)(*arguments)
    flat = core.jaxpr_as_fun(_Remover().rewrite(jaxpr))

    def function(*arguments: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(result), flat(*jax.tree.leaves(arguments)))

    return jax.jit(function, out_shardings=out_shardings)


class _Remover(jaxpr_edit.JaxprRewriter):
    """Replaces the collectives of jaxprs."""

    def rewritten(self, equations: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """The equations of a jaxpr without collectives."""
        return [self._without(equation) for equation in equations]

    def _without(self, equation: Any) -> Any:
        collective = lax_collectives.lax_collective(equation)
        other = lax_collectives.other_collective(equation)
        if collective is not None or other is not None:
            operands = equation.invars
            if collective is not None and collective.operation == "ragged_all_to_all":
                operands = operands[1:2]  # the array that it writes to
            params = {"collective": collective, "avals": tuple(v.aval for v in equation.outvars)}
            return jaxpr_edit.new_equation(
                equation, _LOCAL, operands, equation.outvars, params, "none"
            )
        if jaxpr_walk.shard_map_of(equation) is None:
            return jaxpr_edit.replaced_inside(equation, self.rewrite)
        body = jaxpr_walk.body_of_shard_map(equation.params)
        return equation.replace(params=equation.params | {"jaxpr": self.rewrite(body)})


def _local(
    *operands: jax.Array, collective: LaxCollective | None, avals: Sequence[Any]
) -> Sequence[jax.Array]:
    """The results of a collective, made of the operands of this rank alone.

    Barriers keep XLA from merging operations that the collective separates, and from computing only
    the part of an operand that is used.
    """
    operands = lax.optimization_barrier(operands)
    operation = "" if collective is None else collective.operation
    if collective is None or operation in ("psum", "ragged_all_to_all"):
        return operands
    (x,), axis = operands, collective.dimension
    if operation == "psum_scatter":
        part = x.shape[axis] // collective.size
        mine = lax.slice_in_dim(x, 0, part, axis=axis)
        return [mine if collective.tiled else lax.squeeze(mine, [axis])]
    if operation == "all_gather":
        join = jnp.concatenate if collective.tiled else jnp.stack
        whole = join([x] * collective.size, axis)
    else:  # all_to_all
        parts = x.shape[axis] // avals[0].shape[axis]
        whole = jnp.concatenate(jnp.split(x, parts, axis), collective.concat)
    return [lax.optimization_barrier(whole)]


# A collective of jax.lax whose results have these types.
_LOCAL = core.Primitive("without_communication")
_LOCAL.multiple_results = True
_LOCAL.def_abstract_eval(lambda *_, avals, **__: list(avals))
mlir.register_lowering(_LOCAL, mlir.lower_fun(_local, multiple_results=True))
