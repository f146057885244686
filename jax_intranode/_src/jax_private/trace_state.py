"""The state in which a call is traced: its mesh, its axes and JAX's settings."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax._src import config, core, mesh
from jax._src.lax import lax as lax_internal
from jax._src.lax.control_flow import loops

T = TypeVar("T")


def check_vma() -> bool:
    """Whether this is traced under ``shard_map(..., check_vma=True)``. 0.10.2 and later.

    The public way is to ask what ``lax.axis_index`` varies over. It leaves an equation behind.
    """
    return bool(config._check_vma.value)


def in_loop() -> bool:
    """Whether this is traced or lowered in the body of a scan, a fori_loop or a while_loop.

    0.10.2 and later: one of the functions below is among the callers. It does not see the loop
    where a ``jax.jit`` inside of the body has cached its trace or its lowering outside of it.
    """
    names = ("scan", "fori_loop", "while_loop", "_while_lowering", body_of_loop.__name__)
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in names and frame.f_code.co_filename in _WITH_LOOPS:
            return True
    return False


def body_of_loop(function: Callable[[], T]) -> T:
    """Calls a function in which `in_loop` is True."""
    return function()


def is_computed(x: Any) -> bool:
    """Whether an equation computes an array here, other than by giving it another shape or type.

    0.10.2 and later: a tracer has its equation. One of a transformation has none.
    """
    shaping = ("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "pvary")
    while (equation := getattr(x, "parent", None)) is not None:
        before = equation.in_tracers[0] if equation.primitive.name in shaping else None
        if before is None or before.size != x.size:
            return True
        x = before
    return False


_WITH_LOOPS = (loops.__file__, __file__)


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


def forbidden_axes() -> frozenset[Any]:
    """The axes of ``jax.sharding.no_collectives``, which 0.12 and later have."""
    return config.no_collectives.value if hasattr(config, "no_collectives") else frozenset()


def axes_in_types(axes: Sequence[Any]) -> tuple[Any, ...]:
    """The axes without those of one device that the types of arrays leave out here.

    They do under ``jax_remove_size_one_mesh_axis_from_type``. 0.10.2 and later.
    """
    if not config.remove_size_one_mesh_axis_from_type.value:
        return tuple(axes)
    shape = jax.sharding.get_abstract_mesh().shape
    return tuple(a for a in axes if not isinstance(a, str) or shape.get(a) != 1)


def casts_operands() -> bool:
    """Whether lax casts operands to vary over more axes: ``jax_auto_pcast``. 0.10.2 and later."""
    return bool(config.auto_pcast.value) or not check_vma()


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
