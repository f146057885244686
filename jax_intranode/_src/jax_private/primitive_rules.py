"""Rules of primitives for which ``jax.interpreters`` has no public registration."""

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import dispatch
from jax._src.interpreters import mlir, partial_eval
from jax.extend.core import Primitive, Var
from jax.interpreters import batching


def lower_with_devices(primitive: Primitive) -> None:
    """Makes JAX lower programs with this primitive anew for each order of devices.

    0.10.2 and later. Without it, under ``jax.set_mesh``, JAX reuses a lowering that holds device
    ids for a mesh whose devices are in another order. A program with such a primitive can't use two
    meshes.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def lower_otherwise(
    primitive: Primitive,
    platform: str,
    function: Callable[..., Any],
    where: Callable[[Sequence[Any], Sequence[str]], bool] = lambda avals, platforms: True,
) -> None:
    """Lowers a function in place of a primitive on a platform.

    `where` tells of the types of its operands and the platforms of the program whether it does.
    """
    default = mlir._lowerings[primitive].rule
    otherwise = mlir.lower_fun(function, multiple_results=False)

    def rule(ctx: Any, *xs: Any, **params: Any) -> Any:
        lowered = otherwise if where(ctx.avals_in, ctx.module_context.platforms) else default
        return lowered(ctx, *xs, **params)

    mlir.register_lowering(primitive, rule, platform)


# needed(used_results, params) -> (needed_operands, params of the equation with these results only).
Needed = Callable[[list[bool], dict[str, Any]], tuple[list[bool], dict[str, Any]]]


def drop_unused_results(primitive: Primitive, needed: Needed) -> None:
    """Makes dead code elimination drop unused results, and the operands that only they need.

    0.10.2 and later; 0.12 passes one more argument to the rule.
    """

    def rule(used: list[bool], *arguments: Any) -> tuple[list[bool], Any]:
        equation = arguments[-1]
        if not any(used):
            return [False] * len(equation.invars), None
        return _part(equation, used, needed)

    partial_eval.dce_rules[primitive] = rule


def evaluate_known_results(primitive: Primitive, needed: Needed) -> None:
    """Makes partial evaluation split a call of which only some results are known.

    A result is known if all operands that it needs are known. 0.10.2 and later: without these rules
    all results are unknown as soon as one operand is. Then a ``custom_jvp`` whose rule sums value
    and tangent in one call can't be linearized.
    """

    def known_results(known: list[bool], params: dict[str, Any], count: int) -> list[bool]:
        found = []
        for result in range(count):
            operands, _ = needed([i == result for i in range(count)], params)
            found.append(all(_chosen(known, operands)))
        return found

    def of_trace(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
        """The rule for linearization."""
        operands = [tracer.is_known() for tracer in tracers]
        known: list[bool] = []
        if any(operands) and not all(operands):
            results, _ = primitive.abstract_eval(*(tracer.aval for tracer in tracers), **params)
            known = known_results(operands, params, len(results))
        if not any(known):
            return list(trace.default_process_primitive(primitive, tracers, params))

        def part(used: list[bool]) -> Any:
            if not any(used):
                return iter([])
            operands, of_part = needed(used, params)
            return iter(
                trace.default_process_primitive(primitive, _chosen(tracers, operands), of_part)
            )

        of_known, of_unknown = part(known), part([not k for k in known])
        return [next(of_known if k else of_unknown) for k in known]

    def of_checkpoint(
        saveable: Callable[..., Any],
        unknown: Sequence[bool],
        available: Sequence[bool],
        equation: Any,
    ) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
        """The rule for the policies of ``jax.checkpoint``.

        Returns the equations of the known and of the staged part, the results that are unknown, the
        results that the staged part computes, and the residuals that it needs.
        """
        count = len(equation.outvars)
        known = known_results([not u for u in unknown], equation.params, count)
        unknown_results = [not k for k in known]
        staged = unknown_results
        known_equation = staged_equation = None
        residuals: list[Any] = []
        if any(known):
            _, known_equation = _part(equation, known, needed)
            types = [v.aval for v in known_equation.invars]
            policy = partial_eval.ensure_enum(saveable(primitive, *types, **known_equation.params))
            # Results that a policy offloads to the host stay on the device: offloading takes
            # another equation, and a rule returns only one.
            if isinstance(policy, partial_eval.RecomputeType):
                staged = [True] * count
        if any(staged):
            operands, staged_equation = _part(equation, staged, needed)
            residuals = [
                v
                for v, keep, there in zip(equation.invars, operands, available, strict=True)
                if keep and not there and isinstance(v, Var)
            ]
        return known_equation, staged_equation, unknown_results, staged, residuals

    partial_eval.custom_partial_eval_rules[primitive] = of_trace
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = of_checkpoint


def _part(equation: Any, used: list[bool], needed: Needed) -> tuple[list[bool], Any]:
    """The operands needed for some of an equation's results, and the equation of these results."""
    operands, params = needed(used, equation.params)
    return operands, equation.replace(
        invars=_chosen(equation.invars, operands),
        outvars=_chosen(equation.outvars, used),
        params=params,
    )


def _chosen(values: Sequence[Any], keep: Sequence[bool]) -> list[Any]:
    return [v for v, kept in zip(values, keep, strict=True) if kept]


def batch_by_axis(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Registers a batching rule that gets the mapped axis: rule(name, size, operands, dims).

    0.10.2 and later: ``jax.interpreters.batching`` exports the table of such rules, but does not
    document their arguments.
    """

    def with_axis(mapped: Any, operands: Any, dims: Any, /, **params: Any) -> Any:
        return rule(mapped.name, mapped.size, operands, dims, **params)

    batching.fancy_primitive_batchers[primitive] = with_axis
