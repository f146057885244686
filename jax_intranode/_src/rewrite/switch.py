"""Turns the rewriting of programs on and off, and is what runs when JAX lowers a program."""

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax

from jax_intranode._src.jax_private import (
    distributed,
    jaxpr_walk,
    lowering_context,
    lowering_hooks,
    trace_state,
)
from jax_intranode._src.ops.lowering_site import LoweringSite, device_ids
from jax_intranode._src.rewrite import agreement, dataflow, mode
from jax_intranode._src.rewrite.auto import rewriting
from jax_intranode._src.rewrite.auto.program import PIPELINE
from jax_intranode._src.rewrite.jaxprs import has_collectives, rewrite_shard_map
from jax_intranode._src.selection import config


def install(*, auto: bool = False) -> None:
    """Accelerates all programs of this process from now on, without a change to them.

    When JAX lowers a program, collectives in the bodies of its shard_maps (and pmaps) are replaced
    where that is faster: psum, pmean, pmax, pmin, all_gather, psum_scatter, all_to_all and ppermute
    of ``jax.lax``, and the sums that JAX inserts for gradients. So is ragged_all_to_all. On GPUs
    the exchanges, permutes, maxima and minima are replaced for the numbers of ranks and the dtypes
    that were measured; a tuning of the node can add others. Independent sums
    become one operation, as XLA would combine them, and so do independent maxima, minima and
    permutes. Gathers and sums beside a matmul become collective matmuls, and a sum and its RMSNorm
    one operation where that is faster. Results have the bits of the functions of this package: sums
    are rounded once, in rank order.

    Functions that were compiled before are compiled again when they are called. Nothing is
    rewritten under ``jax.export``, or with JAX_INTRANODE_DISABLE=1. All processes of a program must
    install it, or none.

    Args:
        auto: whether collectives that XLA's partitioner adds to plain ``jit`` programs over Auto
            axes are replaced as well. Over Explicit axes they are replaced without `auto`. If one
            process passes `auto`, all must; else collectives over Auto axes are left to XLA.

    Raises:
        RuntimeError: this version of JAX has changed in a way that makes rewriting impossible. JAX
            is as it was. If only the propagation of shardings has changed, it is raised with `auto`
            alone: without, a warning says that programs over Explicit axes are left to XLA.

    Examples:
        >>> jax_intranode.install()
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def total(x):
        ...     return jax.lax.psum(x, "model")
        >>> total(jnp.array([1.0, 2.0]))
        Array([3.], dtype=float32)
        >>> jax_intranode.uninstall()
    """
    if not config.get().disable:
        _hook(auto)
        _installed.auto = auto
        mode.enabled.set_global(mode.AUTO if auto else mode.ON)


def uninstall() -> None:
    """Undoes `install`; functions that were compiled with it are compiled again when called."""
    for call in agreement.CALLS:
        distributed.say(call, "")
    _installed.auto = False
    mode.enabled.set_global(None)


def _hook(auto: bool) -> None:
    propagates = True
    try:
        lowering_hooks.check_propagation(PIPELINE)
    except RuntimeError as error:
        if auto:
            raise
        propagates = False
        _log.warning("Programs over Explicit axes are left to XLA: %s", error)
    lowering_hooks.hook_lowering(_rewrite_body, _lower_program)
    if propagates:
        lowering_hooks.hook_programs(rewriting.rewrite_program, rewriting.forget)
    for call in list(agreement.CALLS)[: 1 + auto]:
        distributed.say(call, "yes")


# Whether `install` was called with `auto`.
_installed = SimpleNamespace(auto=False)


class _Depth(threading.local):
    """How many contexts of `accelerate` this thread is in, and JAX's, which the first has entered.

    They are counted, because those of asyncio's tasks need not end in the order of a stack.
    """

    count = 0
    autos = 0
    context: Any = None

    def enter(self) -> None:
        """Enters the context that the counts ask for, instead of the one that was entered."""
        if self.context is not None:
            context, self.context = self.context, None
            context.__exit__(None, None, None)
        if self.count and not config.get().disable:
            auto = self.autos or _installed.auto
            self.context = mode.enabled(mode.AUTO if auto else mode.ON)
            self.context.__enter__()


_depth = _Depth()


class Accelerated(contextlib.ContextDecorator):
    """What `accelerate` returns."""

    def __init__(self, auto: bool):
        self._auto = auto

    def __enter__(self) -> None:
        """Begins. It raises as `install`."""
        self._thread = threading.get_ident()
        if not config.get().disable:
            _hook(self._auto)
        _depth.count += 1
        _depth.autos += self._auto
        if _depth.count == 1 or (self._auto and _depth.autos == 1):
            _depth.enter()

    def __exit__(self, *exception: Any) -> None:
        """Ends; raises RuntimeError if another thread began it."""
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "jax_intranode.accelerate() ended in another thread than the one that it began in, "
                "which stays accelerated. Don't hand a generator or a task that is inside of it "
                "to another thread."
            )
        _depth.count -= 1
        _depth.autos -= self._auto
        if _depth.count == 0 or (self._auto and _depth.autos == 0):
            _depth.enter()

    def _recreate_cm(self) -> "Accelerated":
        """For each call of a decorated function: calls may run in several threads."""
        return Accelerated(self._auto)

    def __call__(self, function: Any) -> Any:
        """The function, accelerated. TypeError: its calls run nothing of its body."""
        for kind, found in (
            ("a generator function", inspect.isgeneratorfunction),
            ("a coroutine function", inspect.iscoroutinefunction),
            ("an asynchronous generator function", inspect.isasyncgenfunction),
        ):
            if found(function):
                raise TypeError(
                    f"jax_intranode.accelerate() can't decorate {function}, which is {kind}: its "
                    "body runs after the call. Write `with jax_intranode.accelerate():` inside it, "
                    "around calls of JAX and around no yield or await."
                )
        return super().__call__(function)


def accelerate(*, auto: bool = False) -> Accelerated:
    """Accelerates the programs that this thread calls inside of the context, as `install` does.

    It is a decorator, too. A function that is called both inside and outside is compiled twice.

    The context covers all that its thread runs until it ends. With a ``yield`` inside, that is the
    generator's caller, too; with an ``await``, other tasks of the same thread. Otherwise it covers
    exactly the calls in its body.

    Args:
        auto: as for `install`.

    Raises:
        RuntimeError: as `install`, or the context ends in another thread than it began in.
        TypeError: it decorates a generator function or a coroutine function.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def total(x):
        ...     return jax.lax.psum(x, "model")
        >>> with jax_intranode.accelerate():
        ...     total(jnp.array([1.0, 2.0]))
        Array([3.], dtype=float32)
    """
    return Accelerated(auto)


# What runs when JAX lowers a program.

_log = logging.getLogger("jax_intranode")


class _Totals(threading.local):
    """What this thread lowers: the program's name and collectives, and what is known of it.

    `call` is who replaces XLA's collectives; `computed` gives its `dataflow.computed_arguments`.
    """

    def __init__(self) -> None:
        self.program = ""
        self.taken = 0
        self.left = 0
        self.call: str | None = None
        self.computed: Callable[[], Any] = set


_totals = _Totals()


def _lower_program(jaxpr: Any, lower: Callable[[Any], Any]) -> Any:
    """Lowers a program: `lower` gets the jaxpr as it is to be lowered.

    Under ``jax.set_mesh`` the jaxpr of a shard_map without ``mesh=`` names no devices, so JAX would
    reuse its lowering, which holds device ids, for a mesh with other devices. Hence the devices are
    part of the cache's key while such a program is lowered.
    """
    if not mode.enabled.value:
        return lower(jaxpr)
    # Lowering one program may compile another, for instance to compute a constant.
    around = vars(_totals).copy()
    _totals.taken = _totals.left = 0
    _totals.call = agreement.call_for_partitioners(jaxpr)
    try:
        _totals.computed = functools.cache(partial(dataflow.computed_arguments, jaxpr))
        mesh = trace_state.set_mesh()
        on = mode.enabled.value
        key = (on, device_ids(mesh)) if mesh is not None and _over_set_mesh(jaxpr) else on
        with mode.enabled(key):
            lowered = lower(jaxpr)
        if _totals.call:
            rewriting.divided[lowered[0]] = _totals.call
        if _totals.taken + _totals.left and on != mode.PART:
            _log.info(
                "Lowered %s: %d collectives of jax.lax replaced, %d left.",
                _totals.program,
                _totals.taken,
                _totals.left,
            )
        return lowered
    finally:
        vars(_totals).update(around)


def _rewrite_body(ctx: Any, params: dict[str, Any]) -> Any:
    """The jaxpr of a shard_map's body as it is to be lowered.

    It raises as `Body.refuse_if_strict`.
    """
    jaxpr = jaxpr_walk.body_of_shard_map(params)
    if not mode.enabled.value or not has_collectives(jaxpr):
        return jaxpr
    mesh, manual = jaxpr_walk.mesh_of_shard_map(params)
    site = LoweringSite(
        mesh,
        manual,
        lowering_context.lowering_platforms(ctx),
        lowering_context.lowering_for_export(ctx),
    )
    if _totals.call and site.auto_axes() and not site.for_export:
        return jaxpr  # once it is known how its arrays are sharded over the other axes: see auto/
    rewritten, body = rewrite_shard_map(site, params, _totals.computed())
    body.refuse_if_strict("Collectives of jax.lax")
    if mode.enabled.value != mode.PART:
        body.log("jax.lax")
    _totals.program = lowering_context.lowering_program_name(ctx)
    _totals.taken += body.taken()
    _totals.left += body.left()
    return rewritten


def _over_set_mesh(jaxpr: Any) -> bool:
    """Whether a jaxpr has a shard_map with collectives that names no devices."""
    return any(
        jaxpr_walk.shard_map_of(equation) is not None
        and not isinstance(equation.params["mesh"], jax.sharding.Mesh)
        and has_collectives(jaxpr_walk.body_of_shard_map(equation.params))
        for equation in jaxpr_walk.equations(jaxpr)
    )
