"""Functions of ours that JAX calls whenever it lowers a program."""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config, core, mesh, source_info_util
from jax._src.interpreters import partial_eval
from jaxlib.version import __version__ as jaxlib_version

from jax_intranode._src.jax_private import hlo

_log = logging.getLogger("jax_intranode")


# What a rewrite does with a shard_map: rewrite(context of the lowering rule, its parameters) ->
# the jaxpr of its body that is lowered.
RewriteBody = Callable[[Any, dict[str, Any]], Any]

# Lowers a program: lower_program(its jaxpr, a function that lowers a jaxpr) -> what that function
# returns.
LowerProgram = Callable[[Any, Callable[[Any], Any]], Any]

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
        return lower_program(closed_jaxpr, lambda j: lower(j, *args, **kwargs))

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


@functools.cache
def check_propagation(pipeline: str) -> None:
    """Checks once that this jaxlib has Shardy's propagation, which takes 4 ms. 0.10.2 and later.

    Raises:
        RuntimeError: it has not.
    """
    try:
        from jax._src.interpreters import mlir, pxla
        from jax.extend.mlir import ir, passmanager
        from jax.extend.mlir.dialects import sdy

        with mlir.make_ir_context(), ir.Location.unknown():
            passmanager.PassManager.parse(pipeline)
            hlo.through_hlo(b"func.func @main() { return }")
        for owner, name in (
            *((sdy, f"{kind}Attr") for kind in ("Mesh", "TensorSharding", "DimensionSharding")),
            *((sdy, name) for name in ("TensorShardingPerValueAttr", "ShardingConstraintOp")),
            *((pxla.MeshComputation, name) for name in ("__init__", "compile")),
            (pxla, "_cached_lowering_to_hlo"),
        ):
            getattr(owner, name)
        found = inspect.signature(pxla.MeshComputation.__init__).parameters
        if not {"self", "hlo", "platforms", "device_assignment"} <= set(found):
            raise AttributeError("MeshComputation has other arguments")
    except Exception as error:
        raise RuntimeError(
            f"jax_intranode can't replace collectives of XLA's partitioner with jax "
            f"{jax.__version__} and jaxlib {jaxlib_version}: {error}. It can with jax 0.10.2 to "
            "0.12.0.1. Install one of these, or leave out auto=True where it is given."
        ) from error


def hook_programs(rewrite: RewriteModule, forget: Callable[[Any], None]) -> None:
    """Makes JAX call `rewrite` for each program that it has lowered. Later calls do nothing.

    If XLA refuses the module that it returns, `forget` gets the lowered module.

    0.10.2 to 0.12. `check_propagation` and `hook_lowering` come first.
    """
    global _programs_hooked
    if _programs_hooked:
        return
    from jax._src.interpreters import pxla

    computation = pxla.MeshComputation
    init, of_jax = computation.__init__, computation.compile

    parameters = inspect.signature(init)

    @functools.wraps(init)
    def init_rewritten(*args: Any, **kwargs: Any) -> None:
        bound = parameters.bind(*args, **kwargs)
        given = bound.arguments
        hlo, devices = given["hlo"], given["device_assignment"]
        if hlo not in _exported and devices is not None:
            given["hlo"] = rewrite(hlo, tuple(devices), tuple(given["platforms"]))
        init(*bound.args, **bound.kwargs)
        given["self"].lowered_by_jax = hlo

    @functools.wraps(of_jax)
    def compile_rewritten(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return of_jax(self, *args, **kwargs)
        except (jax.errors.JaxRuntimeError, AssertionError, ValueError) as error:
            before = getattr(self, "lowered_by_jax", None)
            if before is None or before is self._hlo:
                raise
            rewritten, self._hlo = self._hlo, before
            why = " ".join(str(error).split())[:300]
        try:
            compiled = of_jax(self, *args, **kwargs)
        except BaseException:  # XLA refuses the program anyway, as with a wrong compiler option
            self._hlo = rewritten
            raise
        forget(before)
        _log.warning(
            "XLA refuses %s with the collectives of this package; it is compiled without: %s",
            self._name,
            why,
        )
        return compiled

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
