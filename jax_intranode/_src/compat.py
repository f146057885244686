"""What depends on JAX's version: every use of private JAX, and a way around a fault of XLA's.

Each with the versions that need it. Nothing else imports jax._src.

Seen with jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config, core, dispatch, distributed, mesh, source_info_util
from jax._src.interpreters import partial_eval
from jax._src.lax import lax as lax_internal
from jax.extend.core import Primitive, Var
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching
from jaxlib.version import __version__ as jaxlib_version


def lower_with_devices(primitive: Primitive) -> None:
    """Has programs with this primitive lowered anew for each order of devices.

    0.10.2 and later: else a lowering that holds device ids is reused, under ``jax.set_mesh``, for
    a mesh whose devices come in another order. There is no public way to ask for it. Such a
    program can't use two meshes.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


# From which results of a call are used, and its parameters, to which operands are, then, and new
# parameters.
Needed = Callable[[list[bool], dict[str, Any]], tuple[list[bool], dict[str, Any]]]


def drop_unused_results(primitive: Primitive, needed: Needed) -> None:
    """Has unused results dropped from a primitive, with the operands that only they need.

    0.10.2 and later; 0.12 hands rules one more argument. ``jax.interpreters`` has no way to ask for
    it.
    """

    def rule(used: list[bool], *arguments: Any) -> tuple[list[bool], Any]:
        equation = arguments[-1]
        if not any(used):
            return [False] * len(equation.invars), None
        return _part(equation, used, needed)

    partial_eval.dce_rules[primitive] = rule


def evaluate_known_results(primitive: Primitive, needed: Needed) -> None:
    """Has a primitive evaluated in two parts where only some of its results are known.

    A result is known if all operands are that it needs. 0.10.2 and later: without rules all results
    count as unknown as soon as one operand is, and a ``custom_jvp`` whose rule sums value and
    tangent in one call can't be linearized. ``jax.interpreters`` has no way to ask for it.
    """

    def known_results(known: list[bool], params: dict[str, Any], count: int) -> list[bool]:
        found = []
        for result in range(count):
            operands, _ = needed([i == result for i in range(count)], params)
            found.append(all(_chosen(known, operands)))
        return found

    def of_trace(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
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
        saveable: Callable[..., Any], unknown: Sequence[bool], there: Sequence[bool], equation: Any
    ) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
        """For policies: equations of before and after; results that are unknown, that are there
        after; what else has to be."""
        count = len(equation.outvars)
        known = known_results([not u for u in unknown], equation.params, count)
        unknown_results = [not k for k in known]
        after = unknown_results
        before_equation = after_equation = None
        missing: list[Any] = []
        if any(known):
            _, before_equation = _part(equation, known, needed)
            types = [v.aval for v in before_equation.invars]
            policy = partial_eval.ensure_enum(saveable(primitive, *types, **before_equation.params))
            # What a policy wants on the host is kept on the device: to send it there would take
            # another equation, and a rule returns one.
            if isinstance(policy, partial_eval.RecomputeType):
                after = [True] * count
        if any(after):
            operands, after_equation = _part(equation, after, needed)
            missing = [
                v
                for v, keep, is_there in zip(equation.invars, operands, there, strict=True)
                if keep and not is_there and isinstance(v, Var)
            ]
        return before_equation, after_equation, unknown_results, after, missing

    partial_eval.custom_partial_eval_rules[primitive] = of_trace
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = of_checkpoint


def _part(equation: Any, used: list[bool], needed: Needed) -> tuple[list[bool], Any]:
    """Which operands an equation needs for some of its results, and the equation of these."""
    operands, params = needed(used, equation.params)
    return operands, equation.replace(
        invars=_chosen(equation.invars, operands),
        outvars=_chosen(equation.outvars, used),
        params=params,
    )


def _chosen(values: Sequence[Any], keep: Sequence[bool]) -> list[Any]:
    return [v for v, kept in zip(values, keep, strict=True) if kept]


def check_vma() -> bool:
    """Whether this is traced under ``shard_map(..., check_vma=True)``. 0.10.2 and later.

    The public way, to ask what ``lax.axis_index`` varies over, leaves an equation behind.
    """
    return bool(config._check_vma.value)


def settings_are_usual(axes: Sequence[Any]) -> bool:
    """Whether settings are at their defaults that say what a collective over `axes` may do.

    0.10.2 and later, ``no_collectives`` 0.12 and later: with others, ``lax`` knows what is right.
    """
    forbidden = config.no_collectives.value if hasattr(config, "no_collectives") else frozenset()
    return (
        config.auto_pcast.value
        and not config.remove_size_one_mesh_axis_from_type.value
        and forbidden.isdisjoint(axes)
    )


def with_weak_type(x: Any, weak: bool) -> Any:
    """An array as one of a weak type, or of none; cotangents are cast back.

    0.10.2 and later: public functions make no weak type of another.
    """
    return lax_internal._convert_element_type(x, weak_type=weak)


def matmul_precision() -> str | None:
    """The precision that ``jax.default_matmul_precision`` has set where this is traced.

    0.10.2 and later: of its public name types know from 0.11 on only.
    """
    return config.default_matmul_precision.value


def named_axis_effects(axes: Sequence[Any]) -> set[Any]:
    """The effects by which a jaxpr says which axes it acts on. 0.10.2 and later."""
    return {core.NamedAxisEffect(axis) for axis in axes}


def set_mesh() -> jax.sharding.Mesh | None:
    """The mesh of ``jax.set_mesh``, or None.

    0.10.2 and later: ``jax.sharding.get_mesh`` refuses to answer under ``jit``.
    """
    concrete = mesh.get_concrete_mesh()
    return None if concrete.empty else concrete


def eager_mesh() -> jax.sharding.Mesh | None:
    """The mesh of the shard_map whose body runs here without ``jit``, or None.

    0.10.2 and later: its trace holds the mesh.
    """
    trace = core.trace_ctx.trace
    while trace is not None:
        of_trace = getattr(trace, "mesh", None)
        if isinstance(of_trace, jax.sharding.Mesh):
            return of_trace
        trace = getattr(trace, "parent_trace", None)
    return None


def batch_by_axis(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Registers a batching rule that is told the mapped axis: rule(name, size, operands, dims).

    0.10.2 and later: ``jax.interpreters.batching`` offers the table, but not what it hands to the
    rules.
    """

    def told(mapped: Any, operands: Any, dims: Any, /, **params: Any) -> Any:
        return rule(mapped.name, mapped.size, operands, dims, **params)

    batching.fancy_primitive_batchers[primitive] = told


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule runs for. 0.10.2 and later, as `lowering_mesh`."""
    return tuple(ctx.module_context.platforms)


def called_once(results: Sequence[Any]) -> list[Any]:
    """The results of a lowered custom call for GPUs, such that XLA runs it once. 0.11.

    XLA writes a result in place where a scan stacks it for the backward pass, in a copy of the
    call. In jaxlib 0.11 what else uses that result keeps the call itself: it would run twice
    (mended by openxla/xla#45799). It does not look through a barrier; what is stacked is copied.
    """
    if not jaxlib_version.startswith("0.11."):
        return list(results)
    return [stablehlo.OptimizationBarrierOp([v]).results[0] for v in results]


def key_value_client() -> Any | None:
    """The client of JAX's key-value store; None when jax.distributed is not initialised.

    0.10.2 and later: ``jax.distributed`` has no public store.
    """
    return distributed.global_state.client


def lowering_mesh(ctx: Any) -> tuple[Any, frozenset[str]] | None:
    """The mesh and the manual axes that a lowering rule runs under; None outside shard_map.

    0.10.2 and later: the module context is handed to lowering rules, its fields are private.
    """
    axis_context = ctx.module_context.axis_context
    of_program = getattr(axis_context, "mesh", None)
    if not isinstance(of_program, jax.sharding.Mesh):
        return None
    return of_program, frozenset(axis_context.manual_axes)


def lowering_for_export(ctx: Any) -> bool:
    """Whether a lowering rule runs under ``jax.export``. 0.10.2 and later, as above."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def lowering_program_name(ctx: Any) -> str:
    """The name of the program that is being lowered. 0.10.2 and later, as above."""
    return str(ctx.module_context.module.operation.attributes["sym_name"])


def device_platform(device: Any) -> str:
    """The platform that programs for a device are lowered for, as in `lowering_platforms`.

    0.10.2 and later: ``Device.platform`` is "gpu" for CUDA and others.
    """
    return str(getattr(device.client, "_raw_platform", device.client.platform))


def without_dead_code(jaxpr: Any) -> Any:
    """A traced program's jaxpr as it is lowered: without what none of its results needs.

    0.10.2 and later. From 0.11 on, a traced program's jaxpr holds its constants itself.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def shard_map_of(equation: Any) -> tuple[jax.sharding.Mesh | None, frozenset[str]] | None:
    """The mesh and the manual axes of an equation's body, as `lowering_mesh` will give them there.

    None for an equation that is no shard_map. 0.10.2 and later: the parameters have no
    documentation. The mesh is None if its devices are not known.
    """
    if equation.primitive.name != "shard_map":
        return None
    of_equation = equation.params["mesh"]
    manual = frozenset(equation.params["newly_manual_axes"]) | frozenset(of_equation.manual_axes)
    concrete = of_equation if isinstance(of_equation, jax.sharding.Mesh) else set_mesh()
    return concrete, manual


def scopes_of(equation: Any) -> tuple[str, ...]:
    """The named scopes and the transformations that an equation was traced in, outermost first.

    0.10.2 and later: ``jax.named_scope`` has no way back. They begin anew in each nested jaxpr.
    """
    return tuple(entry.name for entry in equation.source_info.name_stack.stack)


def frames_of(equation: Any) -> list[tuple[str, int, str]]:
    """File, line and function of the frames outside of JAX that traced an equation; inmost first.

    0.10.2 and later: JAX tells them in messages only.
    """
    frames = source_info_util.user_frames(equation.source_info.traceback)
    return [(f.file_name, f.start_line, f.function_name) for f in frames]
