"""Everything that depends on JAX's version: all uses of private JAX, and a workaround for XLA.

No other file imports jax._src, or relies on names and parameters that JAX does not document. Each
function says which versions need it. Tested with jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

import contextlib
import ctypes
import functools
import inspect
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import api, config, core, dispatch, distributed, mesh, source_info_util, xla_bridge
from jax._src.interpreters import partial_eval
from jax._src.lax import lax as lax_internal
from jax._src.lax import parallel
from jax.extend.core import Jaxpr, Primitive, Var
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching
from jaxlib import _jax
from jaxlib.version import __version__ as jaxlib_version

_log = logging.getLogger("jax_intranode")

# Rules of primitives for which jax.interpreters has no public registration.


def lower_with_devices(primitive: Primitive) -> None:
    """Makes JAX lower programs with this primitive anew for each order of devices.

    0.10.2 and later. Without it, under ``jax.set_mesh``, JAX reuses a lowering that holds device
    ids for a mesh whose devices are in another order. A program with such a primitive can't use two
    meshes.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


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


# The state in which a call is traced.


def check_vma() -> bool:
    """Whether this is traced under ``shard_map(..., check_vma=True)``. 0.10.2 and later.

    The public way is to ask what ``lax.axis_index`` varies over. It leaves an equation behind.
    """
    return bool(config._check_vma.value)


def axis_is_bound(axis: Any) -> bool:
    """Whether shard_map, vmap or pmap has bound an axis of this name here.

    0.10.2 and later: a public function would have to be called to see whether it raises.
    """
    return core.get_axis_env().axis_exists(axis)


def axes_of_explicit_vmap() -> frozenset[Any]:
    """The explicit mesh axes over which a vmap spreads its batch here. 0.10.2 and later.

    The types of what is traced do not have them, and shard_map refuses to bind them.
    """
    return frozenset(core.get_axis_env().explicit_mesh_axis_names)


def mesh_of_with() -> jax.sharding.Mesh | None:
    """The mesh of ``with mesh:``, or None. 0.10.2 and later: JAX deprecates the statement."""
    of_with = mesh.thread_resources.env.physical_mesh
    return None if of_with.empty else of_with


def settings_are_usual(axes: Sequence[Any]) -> bool:
    """Whether the settings that restrict collectives over `axes` have their default values.

    With other values only ``lax`` knows what is right. 0.10.2 and later, ``no_collectives`` 0.12
    and later.
    """
    forbidden = config.no_collectives.value if hasattr(config, "no_collectives") else frozenset()
    return (
        config.auto_pcast.value
        and not config.remove_size_one_mesh_axis_from_type.value
        and forbidden.isdisjoint(axes)
    )


def with_weak_type(x: Any, weak: bool) -> Any:
    """The array with a weak type, or with a strong one; its cotangent is cast back.

    0.10.2 and later: public functions do not make a type weak.
    """
    return lax_internal._convert_element_type(x, weak_type=weak)


def matmul_precision() -> str | None:
    """The precision that ``jax.default_matmul_precision`` has set here.

    0.10.2 and later: JAX's types have its public name only from 0.11 on.
    """
    return config.default_matmul_precision.value


def named_axis_effects(axes: Sequence[Any]) -> set[Any]:
    """The effects by which a jaxpr says which axes it acts on. 0.10.2 and later."""
    return {core.NamedAxisEffect(axis) for axis in axes}


def set_mesh() -> jax.sharding.Mesh | None:
    """The mesh of ``jax.set_mesh``, or None.

    0.10.2 and later: ``jax.sharding.get_mesh`` raises under ``jit``.
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


def is_tracing() -> bool:
    """Whether this thread traces a function.

    0.10.2 and later: public functions only tell of single values whether they are traced.
    """
    return not core.trace_state_clean()


def key_value_client() -> Any | None:
    """The client of JAX's key-value store; None if jax.distributed is not initialised.

    0.10.2 and later: ``jax.distributed`` has no public store.
    """
    return distributed.global_state.client


def at_end_of_backends(action: Callable[[], None]) -> None:
    """Makes the end of the process call `action` before JAX clears its backends.

    0.10.2 to 0.12: JAX's exit handler, which was registered when JAX was imported, calls
    ``clear_backends`` of its module. The program's own exit handlers that were registered later
    have run by then.
    """
    if action in _at_end:
        return
    _at_end.append(action)
    of_jax = api.clear_backends
    if len(_at_end) > 1:
        return

    @functools.wraps(of_jax)
    def clear_backends(*args: Any, **kwargs: Any) -> Any:
        if threading.main_thread().is_alive():
            return of_jax(*args, **kwargs)
        for action in _at_end:
            action()
        try:
            return of_jax(*args, **kwargs)
        except Exception:  # such as that of a debugging callback
            distributed.global_state.shutdown()  # JAX's exit handler does not come to it
            raise

    api.clear_backends = clear_backends


_at_end: list[Callable[[], None]] = []


def bound_distributed_shutdown(
    begins: Callable[[], None], gives_up: Callable[[float, bool], bool], ends: Callable[[], None]
) -> None:
    """Makes the end of ``jax.distributed`` give up when peers won't come.

    ``jax.distributed.shutdown``, which JAX calls at exit, waits in a barrier for all processes, for
    up to 5 minutes, and aborts the process when that fails.

    0.10.2 to 0.12: ``jax.distributed.shutdown`` calls a method of a private object.

    Args:
        begins: is called first.
        gives_up: whether to give up, from the seconds that have passed since the end began, and
            whether JAX's coordination service runs in this process.
        ends: is called last.
    """
    state = distributed.global_state
    if getattr(state.shutdown, "of_jax_intranode", False):
        return
    of_jax = state.shutdown
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def end() -> None:
        while True:
            asked.get()
            try:
                of_jax()
                ended.put(None)
            except BaseException as error:
                ended.put(error)

    # Started here: at exit Python 3.12 starts no threads.
    thread = threading.Thread(target=end, name="jax_intranode shutdown", daemon=True)
    thread.start()

    def shutdown() -> None:
        try:
            begins()
            wait()
        finally:
            ends()

    def wait() -> None:
        if state.client is None or not thread.is_alive():  # not alive: in a forked child
            return of_jax()
        started, serves = time.monotonic(), state.service is not None
        asked.put(None)
        while True:
            with contextlib.suppress(queue.Empty):
                error = ended.get(timeout=0.02)
                break
            if gives_up(time.monotonic() - started, serves):
                leave_without_waiting()
                return
        if error is not None:
            raise error

    shutdown.of_jax_intranode = True  # type: ignore[attr-defined]
    state.shutdown = shutdown  # type: ignore[method-assign]


def leave_without_waiting() -> None:
    """Lets this process end without the barrier at which JAX waits for all processes.

    JAX's client and service are left to the end of the process: deleting them waits or aborts as
    well. 0.10.2 and later.
    """
    state = distributed.global_state
    for name in ("client", "service", "preemption_sync_manager"):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(state, name)))
        setattr(state, name, None)


# Processes under `launch`, whose coordination service runs in the launcher.

# Seconds after which the service and a process that do not hear from each other take each other for
# dead: a week. A launcher sees processes end. One that is suspended, alone or with all others, is
# not dead; with JAX's 100 s it would be when it goes on.
HEARTBEAT_S = 7 * 24 * 3600


def start_coordination_service(address: str, processes: int) -> Any:
    """Starts the service that the processes of a program meet at; `shutdown` of it ends it.

    0.10.2 and later: ``jax.distributed`` starts it in process 0 only.
    """
    return _jax.get_distributed_runtime_service(address, processes, heartbeat_timeout=HEARTBEAT_S)


def use_service_elsewhere() -> None:
    """Makes this process a client of a coordination service that runs in another one.

    0.10.2 and later: ``jax.distributed.initialize`` starts one in process 0 in any case. 0.12: the
    client would use the certificates of JAX's settings, which are for a service on the network.
    """
    of_jax = _jax.get_distributed_runtime_client

    def client(*args: Any, **kwargs: Any) -> Any:
        of_network = [name for name in kwargs if name.startswith(("mtls_", "verify_"))]
        return of_jax(*args, **{k: v for k, v in kwargs.items() if k not in of_network})

    for name, value in (
        ("get_distributed_runtime_service", lambda *_, **__: None),
        ("get_distributed_runtime_client", client),
    ):
        setattr(_jax, name, value)


def join_at_first_use(arguments: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Makes this process a client of a coordination service that runs elsewhere.

    ``jax.distributed.initialize`` starts no service and gets arguments(those that were passed). If
    the program has not called it before its first use of a device, it is called then. 0.10.2 and
    later: JAX can detect the address, the number of processes and the rank, but a program that
    calls nothing stays alone.
    """
    use_service_elsewhere()
    state, backends = distributed.global_state, xla_bridge.backends
    initialize, lock = state.initialize, threading.RLock()
    parameters = inspect.signature(initialize)

    def initialize_client(*args: Any, **kwargs: Any) -> None:
        initialize(**arguments(dict(parameters.bind(*args, **kwargs).arguments)))

    def backends_of_all() -> Any:
        with lock:
            if xla_bridge.backends is backends_of_all:
                if state.client is None:
                    jax.distributed.initialize()
                setattr(xla_bridge, "backends", backends)  # noqa: B010, or mypy objects
        return backends()

    for owner, name, value in (
        (state, "initialize", initialize_client),
        (xla_bridge, "backends", backends_of_all),
    ):
        setattr(owner, name, value)


def show_in_runtime_errors(shown: Callable[[str], str | None]) -> None:
    """Makes the text of a ``JaxRuntimeError`` begin with ours, whoever prints it.

    0.10.2 to 0.12: the class is made by Python's C API, and its ``__str__`` can be replaced. Where
    that is refused, XLA's text stays as it is.

    Args:
        shown: from XLA's text to ours, or to None if XLA's stays alone.
    """
    error = jax.errors.JaxRuntimeError
    if getattr(error.__str__, "of_jax_intranode", False):
        return
    of_xla = error.__str__

    def text_of(self: BaseException) -> str:
        text = of_xla(self)
        ours = shown(text)
        return text if ours is None else f"{ours}\n\nXLA reported: {text}"

    text_of.of_jax_intranode = True  # type: ignore[attr-defined]
    with contextlib.suppress(TypeError, AttributeError):
        error.__str__ = text_of


# The context of a lowering rule. 0.10.2 and later: JAX passes the module context to lowering rules,
# but its fields are private.


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule runs for."""
    return tuple(ctx.module_context.platforms)


def lowering_mesh(ctx: Any) -> tuple[Any, frozenset[str]] | None:
    """The mesh and the manual axes that a lowering rule runs under; None outside of shard_map."""
    axis_context = ctx.module_context.axis_context
    of_program = getattr(axis_context, "mesh", None)
    if not isinstance(of_program, jax.sharding.Mesh):
        return None
    return of_program, frozenset(axis_context.manual_axes)


def lowering_for_export(ctx: Any) -> bool:
    """Whether a lowering rule runs under ``jax.export``."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def lowering_program_name(ctx: Any) -> str:
    """The name of the program that is lowered."""
    return str(ctx.module_context.module.operation.attributes["sym_name"].value)


def called_once(results: Sequence[Any]) -> list[Any]:
    """The results of a lowered custom call for GPUs, arranged so that XLA runs the call once. 0.11.

    Where a scan stacks a result for the backward pass, XLA lets a copy of the call write it in
    place. With jaxlib 0.11 other uses of the result keep the original call, which then runs too
    (fixed by openxla/xla#45799). XLA does not look through an optimization barrier: with one the
    stacked result is copied.
    """
    if not jaxlib_version.startswith("0.11."):
        return list(results)
    return [stablehlo.OptimizationBarrierOp([v]).results[0] for v in results]


# Devices.


def device_platform(device: Any) -> str:
    """The platform that programs for a device are lowered for, as in `lowering_platforms`.

    0.10.2 and later: ``Device.platform`` is "gpu" for CUDA and for other GPUs.
    """
    return str(getattr(device.client, "_raw_platform", device.client.platform))


# Jaxprs. 0.10.2 and later: names and parameters of JAX's primitives are not documented.


def without_dead_code(jaxpr: Any) -> Any:
    """A traced program's jaxpr as it is lowered: without equations that no result needs.

    From 0.11 on a traced program's jaxpr holds its constants itself.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def shard_map_of(equation: Any) -> tuple[jax.sharding.Mesh | None, frozenset[str]] | None:
    """As `mesh_of_shard_map`, of an equation; None if it is no shard_map."""
    return mesh_of_shard_map(equation.params) if equation.primitive.name == "shard_map" else None


def mesh_of_shard_map(
    params: dict[str, Any],
) -> tuple[jax.sharding.Mesh | None, frozenset[str]]:
    """The mesh and the manual axes that `lowering_mesh` will give for a shard_map's body.

    The mesh is None if its devices are not known.
    """
    of_equation = params["mesh"]
    manual = frozenset(params["newly_manual_axes"]) | frozenset(of_equation.manual_axes)
    concrete = of_equation if isinstance(of_equation, jax.sharding.Mesh) else set_mesh()
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


# lax's primitives that communicate, and the public function of each.
_COLLECTIVES = {
    "psum": "psum",
    "psum_invariant": "psum",
    "unreduced_psum": "psum",
    "reduce_scatter": "psum_scatter",
    "unreduced_reduce_scatter": "psum_scatter",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "all_to_all": "all_to_all",
}


@dataclass(frozen=True)
class LaxCollective:
    """A collective of jax.lax.

    Attributes:
        operation: the public function.
        axes: the mesh axes; none if only axes of vmap are reduced.
        over_vmap: whether an axis of vmap is reduced, too.
        index_groups: its axis_index_groups.
        invariant: psum: whether the result no longer varies over the axes.
        dimension: psum_scatter, all_gather: the dimension that is scattered or gathered.
            all_to_all: the one that is divided.
        tiled: psum_scatter, all_gather: whether the dimension stays, or is dropped or made.
        size: psum_scatter, all_gather: the number of ranks; 0 for the others.
        concat: all_to_all: the dimension along which the parts are concatenated. The public
            function has added and drops dimensions, so that all stay.
    """

    operation: str
    axes: tuple[Any, ...]
    over_vmap: bool
    index_groups: Any
    invariant: bool
    dimension: int
    tiled: bool
    size: int
    concat: int


def lax_collective(equation: Any) -> LaxCollective | None:
    """The collective of jax.lax that an equation is; None for any other equation."""
    operation = _COLLECTIVES.get(equation.primitive.name)
    if operation is None:
        return None
    params = equation.params
    axes = params.get("axes", params.get("axis_name"))
    axes = axes if isinstance(axes, tuple) else (axes,)
    if not axes:
        return None
    dimension = params.get("all_gather_dimension", params.get("scatter_dimension", 0))
    # vmap has replaced the names of its axes with numbers.
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    return LaxCollective(
        operation,
        named,
        over_vmap=len(named) < len(axes),
        index_groups=params.get("axis_index_groups"),
        invariant=equation.primitive.name in ("psum_invariant", "unreduced_psum"),
        dimension=params.get("split_axis", dimension),
        tiled=params.get("tiled", False),
        size=params.get("axis_size", 0),
        concat=params.get("concat_axis", 0),
    )


# lax's other primitives that communicate, and the public function of each.
_OTHER_COLLECTIVES = {
    **{
        name: name
        for name in (
            *("pmax", "pmin", "ppermute", "pbroadcast", "psend", "precv", "ragged_all_to_all"),
        )
    },
    "unreduced_pmax": "pmax",
    "unreduced_pmin": "pmin",
    "pbroadcast_dynamic": "pbroadcast",
    **{
        f"{name}_start": f"{function}_start"
        for name, function in (
            *_COLLECTIVES.items(),
            *((name, name) for name in ("pbroadcast", "ppermute")),
        )
    },
}


def other_collective(equation: Any) -> tuple[str, tuple[Any, ...]] | None:
    """The public function and the mesh axes of a collective that is no `lax_collective`, or None.

    Of those that start an operation and finish it later, it is the one that starts.
    """
    operation = _OTHER_COLLECTIVES.get(equation.primitive.name)
    if operation is None:
        return None
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    return (operation, named) if named else None


# Where a call stands. 0.10.2 and later: ``jax.named_scope`` can't be read back, and JAX shows the
# frames of an equation in messages only.

# File, line and function.
Frame = tuple[str, int, str]


def scopes_of(equation: Any) -> tuple[str, ...]:
    """The named scopes and transformations that an equation was traced in, outermost first.

    They start anew in each nested jaxpr.
    """
    return tuple(entry.name for entry in equation.source_info.name_stack.stack)


def frames_of(equation: Any) -> list[Frame]:
    """The frames outside of JAX that traced an equation, innermost first."""
    return _frames(equation.source_info.traceback)


def frames_here() -> list[Frame]:
    """The frames outside of JAX that called this function, innermost first.

    In a lowering rule: the frames that traced the equation that is lowered.
    """
    return _frames(source_info_util.current().traceback)


def as_called_here(body: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose equations will have the frames that call this function here.

    0.10.2 and later: JAX starts the frames of a shard_map's equations anew at its body. For a body
    of this package the user's frames would be lost.
    """
    traceback = source_info_util.current().traceback

    def called_here(*args: Any) -> Any:
        with source_info_util.user_context(traceback):
            return body(*args)

    return called_here


def as_called_by(equation: Any, body: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose equations will have the frames that traced this equation.

    0.10.2 and later.
    """

    def called_there(*args: Any) -> Any:
        with source_info_util.user_context(equation.source_info.traceback):
            return body(*args)

    return called_there


def _frames(traceback: Any) -> list[Frame]:
    frames = source_info_util.user_frames(traceback)
    return [(f.file_name, f.start_line, f.function_name) for f in frames]


# The functions of jax.lax that communicate. `pcast` is none: it communicates in its transpose only.
_FUNCTIONS = frozenset(
    {
        *_COLLECTIVES.values(),
        *_OTHER_COLLECTIVES.values(),
        *("pmean", "pargmax", "pargmin", "pshuffle", "pswapaxes"),
    }
)


def called_function(equation: Any) -> str | None:
    """The function of jax.lax by whose call a collective of lax came into the program.

    An equation keeps the traceback of the call that made it, and a transpose that of what it is the
    transpose of. JAX's own frames in it, up to the caller's, tell a call of a collective from a
    collective that JAX has inserted. 0.10.2 and later: only the frames of the caller are public.

    Returns:
        The name; "" if JAX has inserted the collective; None if there is no traceback.
    """
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else []
    name = "" if frames else None
    for frame in frames:
        if source_info_util.is_user_filename(frame.file_name):
            break
        if frame.file_name == parallel.__file__ and frame.function_name in _FUNCTIONS:
            name = frame.function_name  # pmean calls psum: the outermost counts
    return name


# Rewriting programs when they are lowered.

# What a rewrite does with a shard_map: rewrite(context of the lowering rule, its parameters) ->
# the jaxpr of its body that is lowered.
RewriteBody = Callable[[Any, dict[str, Any]], Any]

# Lowers a program: lower_program(its jaxpr, the platforms, a function that lowers a jaxpr) -> what
# that function returns.
LowerProgram = Callable[[Any, tuple[str, ...], Callable[[Any], Any]], Any]

_hooked = False


def cache_key_context() -> Any:
    """A setting, None by default, that is part of the key of all of JAX's caches.

    It has a value for the process (``set_global``) and one for each thread (as a context manager).
    0.10.2 and later: the former is not documented.
    """
    return jax.make_user_context(None)


def hook_lowering(rewrite: RewriteBody, lower_program: LowerProgram) -> None:
    """Makes JAX call these functions whenever it lowers a program. Later calls do nothing.

    0.10.2 to 0.12. It replaces the lowering rule of shard_map, which gets the body as it is after
    all transformations, and the function that lowers a program unless JAX has done so before.

    Raises:
        RuntimeError: this version of JAX has not got what this needs. JAX is as it was.
    """
    global _hooked
    if _hooked:
        return
    try:
        from jax._src import shard_map
        from jax._src.interpreters import mlir, pxla

        rule, lower = shard_map._shard_map_lowering, pxla._cached_lowering_to_hlo
        wanted = {"jaxpr", "mesh", "newly_manual_axes", "check_vma"}
        missing = wanted - set(inspect.signature(rule).parameters)
        if missing:
            raise AttributeError(f"shard_map has no parameter {', '.join(sorted(missing))}")
        if mlir._lowerings[shard_map.shard_map_p].rule is not rule:
            raise AttributeError("another package has replaced the lowering rule of shard_map")
        for owner, name in (
            (shard_map, "_extend_axis_env"),
            (shard_map, "_as_manual_mesh"),
            (mesh, "use_abstract_mesh"),
            (core.Jaxpr, "replace"),
            (core.JaxprEqn, "replace"),
            (partial_eval, "trace_to_jaxpr_dynamic"),
            (type(jax.make_user_context(None)), "set_global"),
        ):
            getattr(owner, name)
    except (ImportError, AttributeError, KeyError) as error:
        raise RuntimeError(
            f"jax_intranode can't rewrite programs of jax {jax.__version__}: {error}. It can with "
            "jax 0.10.2 to 0.12.0.1. Install one of these, or call the functions of jax_intranode "
            "in the program itself."
        ) from error

    def rewriting_rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        return rule(ctx, *operands, **params | {"jaxpr": rewrite(ctx, params)})

    def rewriting_lower(closed_jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs["lowering_parameters"].for_export:
            lowered = lower(closed_jaxpr, *args, **kwargs)
            _exported.add(lowered[0])
            return lowered
        *_, platforms = args
        return lower_program(closed_jaxpr, platforms, lambda j: lower(j, *args, **kwargs))

    # Users count compilations by the function's cache.
    for name in ("cache_info", "cache_clear", "cache_keys", "evict_weakref"):
        if hasattr(lower, name):
            setattr(rewriting_lower, name, getattr(lower, name))
    # Or locations in the lowered program would begin with these frames, which are not the user's.
    for function in (rewriting_lower, lower_program):
        source_info_util.register_exclusion(function.__code__.co_filename)
    mlir.register_lowering(shard_map.shard_map_p, rewriting_rule)
    setattr(pxla, "_cached_lowering_to_hlo", rewriting_lower)  # noqa: B010, or mypy objects
    _hooked = True


# Programs that JAX has lowered.

# rewrite(lowered module, devices, platforms) -> the module that XLA gets.
RewriteModule = Callable[[Any, Sequence[Any], Sequence[str]], Any]

_programs_hooked = False


def check_propagation(pipeline: str) -> None:
    """Checks that this jaxlib has Shardy's propagation. 0.10.2 and later.

    Raises:
        RuntimeError: it has not.
    """
    try:
        from jax._src.interpreters import mlir, pxla
        from jax.extend.mlir import ir, passmanager
        from jax.extend.mlir.dialects import sdy

        with mlir.make_ir_context(), ir.Location.unknown():
            passmanager.PassManager.parse(pipeline)
        for owner, name in (
            *((sdy, f"{kind}Attr") for kind in ("Mesh", "TensorSharding", "DimensionSharding")),
            *((sdy, name) for name in ("TensorShardingPerValueAttr", "ShardingConstraintOp")),
            *((pxla.MeshComputation, name) for name in ("__init__", "compile")),
            (pxla, "_cached_lowering_to_hlo"),
        ):
            getattr(owner, name)
        wanted = ["self", "name", "hlo", "const_args", "donated_invars", "platforms"]
        found = list(inspect.signature(pxla.MeshComputation.__init__).parameters)
        if found[:6] != wanted or "device_assignment" not in found:
            raise AttributeError("MeshComputation has other arguments")
    except Exception as error:
        raise RuntimeError(
            f"jax_intranode can't replace collectives of XLA's partitioner with jax "
            f"{jax.__version__} and jaxlib {jaxlib_version}: {error}. It can with jax 0.10.2 to "
            "0.12.0.1. Install one of these, or leave out auto=True."
        ) from error


def hook_programs(rewrite: RewriteModule, forget: Callable[[Any], None]) -> None:
    """Makes JAX call a function for each program that it has lowered. Later calls do nothing.

    0.10.2 to 0.12. `check_propagation` and `hook_lowering` come first.

    Args:
        rewrite: gives the module that XLA gets.
        forget: is called with the lowered module if XLA refuses that.
    """
    global _programs_hooked
    if _programs_hooked:
        return
    from jax._src.interpreters import pxla

    computation = pxla.MeshComputation
    init, of_jax = computation.__init__, computation.compile

    @functools.wraps(init)
    def init_rewritten(
        self: Any,
        name: Any,
        hlo: Any,
        const_args: Any,
        donated_invars: Any,
        platforms: Any,
        compiler_options_kvs: Any,
        device_assignment: Any,
        **others: Any,
    ) -> None:
        new = hlo
        callbacks = others.get("host_callbacks")
        if hlo not in _exported and device_assignment is not None and not callbacks:
            new = rewrite(hlo, tuple(device_assignment), tuple(platforms))
        init(
            self,
            name,
            new,
            const_args,
            donated_invars,
            platforms,
            compiler_options_kvs,
            device_assignment,
            **others,
        )
        self.lowered_by_jax = hlo

    @functools.wraps(of_jax)
    def compile_rewritten(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return of_jax(self, *args, **kwargs)
        except (jax.errors.JaxRuntimeError, AssertionError, ValueError) as error:
            before = getattr(self, "lowered_by_jax", None)
            if before is None or before is self._hlo:
                raise
            _log.warning(
                "XLA refuses %s with the collectives of this package; it is compiled without: %s",
                self._name,
                " ".join(str(error).split())[:300],
            )
            forget(before)
            self._hlo = before
            return of_jax(self, *args, **kwargs)

    for name, function in (("__init__", init_rewritten), ("compile", compile_rewritten)):
        setattr(computation, name, function)
    source_info_util.register_exclusion(rewrite.__code__.co_filename)
    _programs_hooked = True


# Modules that jax.export has lowered.
_exported: weakref.WeakSet[Any] = weakref.WeakSet()


def lowered_by_jax(lowered: Any) -> tuple[Any, tuple[Any, ...], tuple[str, ...]] | None:
    """The module of a ``Lowered`` before `rewrite`, the devices and the platforms. 0.10.2."""
    computation = lowered._lowering
    devices = getattr(computation, "_device_list", None)
    module = getattr(computation, "lowered_by_jax", None)
    if module is None or devices is None or module in _exported:
        return None
    return module, tuple(devices), tuple(computation._platforms)


def uses_shardy() -> bool:
    """Whether JAX lowers shardings for Shardy. 0.10.2 and later; it is the default."""
    return bool(getattr(config, "use_shardy_partitioner", _Always).value)


class _Always:
    value = True


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """The context in which no mesh is set. 0.10.2 and later: ``jax.set_mesh`` refuses to be traced.

    From 0.11 on the settings have moved.
    """
    settings = mesh if hasattr(mesh, "abstract_mesh_context_manager") else config
    abstract, concrete = settings.abstract_mesh_context_manager, settings.device_context
    with core.set_current_trace(core.eval_trace):
        before = abstract.swap_local(mesh.empty_abstract_mesh)
        devices = concrete.swap_local(mesh.empty_concrete_mesh)
        try:
            yield
        finally:
            abstract.set_local(before)
            concrete.set_local(devices)


@contextlib.contextmanager
def inside_shard_map(params: dict[str, Any]) -> Iterator[None]:
    """The context in which the body of a shard_map equation was traced. 0.10.2 and later."""
    from jax._src import shard_map

    manual = shard_map._as_manual_mesh(params["mesh"], frozenset(params["newly_manual_axes"]))
    with (
        shard_map._extend_axis_env(params["mesh"], set(params["newly_manual_axes"])),
        mesh.use_abstract_mesh(manual),
        config._check_vma(params["check_vma"]),
    ):
        yield


def under_mesh(concrete: jax.sharding.Mesh) -> contextlib.AbstractContextManager[Any]:
    """The context in which a program outside of shard_map is traced for this mesh. 0.10.2."""
    return mesh.use_abstract_mesh(concrete.abstract_mesh)


def body_of_shard_map(params: dict[str, Any]) -> Jaxpr:
    """The jaxpr of a shard_map's body. 0.10.2 and later."""
    return params["jaxpr"]


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
    """An equation that has the source and the context of another one. 0.10.2 and later.

    Args:
        like: that equation.
        primitive: the primitive.
        invars: its operands.
        outvars: its results.
        params: its parameters.
        scope: a named scope to put it in.
    """
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


def is_rewritten_inside(equation: Any) -> bool:
    """Whether `replaced_inside` rewrites the jaxprs that an equation runs."""
    return equation.primitive.name in _RUNS_JAXPRS


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The jaxpr of a closed one; an open one itself. From 0.12 on all are of one type."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def with_equations(jaxpr: Any, equations: Sequence[Any]) -> Any:
    """A jaxpr, open or closed, with other equations. 0.10.2 and later."""
    inner = open_jaxpr(jaxpr)
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


# Equations between collectives and matmuls. 0.10.2 and later: names and parameters of primitives.


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
    return None if getattr(called, "consts", ()) else open_jaxpr(called)


def is_addition(equation: Any) -> bool:
    """Whether an equation adds two arrays of one type."""
    return equation.primitive.name in ("add", "add_any")


def permutation(equation: Any) -> tuple[int, ...] | None:
    """The dimensions of the operand in the result's order; None if it is no transposition."""
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
