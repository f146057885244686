"""`run --compare`: the steps of a script, plain and accelerated in turns.

``jax.jit`` and ``jax.pmap`` give the script functions that look at their own calls. Each function
alternates between two compiled programs, the plain and the accelerated one: the steps stay the
script's own. They work on the script's data and in the memory that they have in the script, they
carry its state on, and what they do besides computing (callbacks, logging) happens once. Copies of
one call's arguments, run again and again, would show neither.

A call is timed from its start, when its arguments are there, until its results are there. The order
of the blocks of calls is plain, accelerated, accelerated, plain, and so on, so that a drift affects
both alike. Not timed are the first call of a block and calls that compile. Only calls with
arguments of the same shapes are compared.

One call runs both programs, on the same arguments, for the difference of the results: the plain one
on copies of the arguments that the function donates. A function with effects that must not happen
twice (``io_callback``, mutable arrays) is not called twice.
"""

import contextlib
import functools
import inspect
import math
import statistics
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_intranode
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.report import calls
from jax_intranode._src.rewrite import mode

PLAIN, ACCELERATED = "plain", "accelerated"
# Effects that may happen twice, other than those of debugging: none.
_HARMLESS = ("DebugEffect", "OrderedDebugEffect")

_current: "Comparison | None" = None


def start(steps: int, auto: bool = False) -> "Comparison":
    """Lets the functions that are jitted from now on be compared.

    Args:
        auto: that of `accelerate` and, after the report, of `install`.
    """
    global _current
    _current = Comparison(steps, auto)
    _current.patch()
    return _current


def finish() -> None:
    """Reports at the end of the script, unless that has happened, or there is no comparison."""
    if _current is not None:
        _current.finish()


class _Function:
    """A jitted function of the script, and what its calls have shown.

    Attributes:
        calls: the number of calls outside of other functions.
        seconds: the times of calls, by the arguments' shapes and by program.
        explanation: what becomes of its collectives, or why that is not known.
        difference: the greatest difference of results and where it is, or why it is not known.
    """

    def __init__(self, function: Any) -> None:
        self.name = getattr(function, "__name__", "a function")
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
        self.calls = 0
        self.last = ""
        self.seconds: dict[Any, dict[str, list[float]]] = {}
        self.explanation: Any = "it was called only once"
        self.difference: tuple[float, str] | str = "it was called only once"

    @property
    def replaced(self) -> list[Any]:
        """The operations that take the place of collectives of ``jax.lax``."""
        if isinstance(self.explanation, str):
            return []
        return [call for call in _of_lax(self.explanation) if call.algorithm != "lax"]

    def times(self) -> dict[str, list[float]]:
        """The times of both programs with the shapes of which there are most."""
        found = max(self.seconds.values(), key=lambda f: sum(map(len, f.values())), default={})
        return {program: found.get(program, []) for program in (PLAIN, ACCELERATED)}


class _Instead:
    """Has all that the object has that JAX has made, besides what a subclass does instead."""

    _made: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_made"], name)


class _Jitted(_Instead):
    """What ``jax.jit`` returns to the script: the function that JAX made, and its comparison."""

    def __init__(self, made: Any, comparison: "Comparison", function: _Function) -> None:
        functools.update_wrapper(self, made)
        self._made = made
        self._comparison = comparison
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._comparison.call(self._function, self._made, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    # What `jax.stages.Wrapped` asks for, or else `jax.export` takes it for a plain function.

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return _Lowered(self, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._made.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._made.eval_shape(*args, **kwargs)


class _Lowered(_Instead):
    """What ``lower`` returns to the script: what JAX has lowered, without acceleration."""

    def __init__(self, jitted: _Jitted, args: Any, kwargs: Any) -> None:
        self._jitted = jitted
        self._traced = functools.partial(jitted._made, *args, **kwargs)
        with mode.enabled(None):
            self._made = jitted._made.lower(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        return _Compiled(self, args, kwargs)


class _Compiled(_Instead):
    """What ``lower().compile()`` returns to the script: both programs."""

    def __init__(self, lowered: _Lowered, args: Any, kwargs: Any) -> None:
        self._jitted, self._traced = lowered._jitted, lowered._traced
        self._made = lowered._made.compile(*args, **kwargs)
        with self._jitted._comparison.accelerate():
            again = self._jitted._made.lower(*self._traced.args, **self._traced.keywords)
            self._accelerated = again.compile(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        jitted = self._jitted
        return jitted._comparison.call(jitted._function, self._run, args, kwargs, self._traced)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return (self._accelerated if mode.enabled.value else self._made)(*args, **kwargs)


class Comparison:
    def __init__(self, steps: int, auto: bool) -> None:
        self._steps = steps
        self._block = max(1, steps // 8)
        self._auto = auto
        self.accelerate = functools.partial(jax_intranode.accelerate, auto=auto)
        self._functions: dict[Any, _Function] = {}
        self._thread = threading.main_thread().ident  # another one may have imported JAX
        self._compiles = 0
        self._over = False
        self._of_jax: dict[str, Any] = {"jit": jax.jit, "pmap": jax.pmap}

    def patch(self) -> None:
        """Replaces ``jax.jit`` and ``jax.pmap``, until the report."""
        jax.monitoring.register_event_duration_secs_listener(self._note)
        for name, transform in self._of_jax.items():
            setattr(jax, name, self._watched(transform))

    def _note(self, event: str, *_: Any, **__: Any) -> None:
        self._compiles += event.startswith("/jax/core/compile/")

    def _watched(self, transform: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(transform)
        def watched(*args: Any, **kwargs: Any) -> Any:
            made = transform(*args, **kwargs)
            if not hasattr(made, "lower"):  # a decorator with options
                return lambda function: self._wrap(made(function))
            return self._wrap(made)

        return watched

    def _wrap(self, made: Any) -> _Jitted:
        function = getattr(made, "__wrapped__", made)
        try:  # the same function may be jitted anew at each step
            known = self._functions.setdefault(function, _Function(function))
        except TypeError:
            known = self._functions.setdefault(made, _Function(function))
        return _Jitted(made, self, known)

    def _context(self, program: str) -> Any:
        return self.accelerate() if program == ACCELERATED else mode.enabled(None)

    def call(
        self,
        function: _Function,
        made: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        traced: functools.partial[Any] | None = None,
    ) -> Any:
        """Calls a function, by the program whose turn it is.

        Args:
            made: runs it, by the program that the context says.
            traced: what to trace, with its arguments; by default `made` with these.
        """
        if self._over or threading.get_ident() != self._thread or trace_state.is_tracing():
            return made(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return made(*args, **kwargs)
        number = function.calls
        function.calls += 1
        # One call of each program, then blocks: plain, accelerated, accelerated, plain.
        turn = (number - 2) // self._block % 4
        program = ACCELERATED if number == 1 or (number > 1 and turn in (1, 2)) else PLAIN
        if number == 1:
            traced = traced or functools.partial(made, *args, **kwargs)
            result = self._call_both(function, made, args, kwargs, traced)
        else:
            result = self._call_timed(function, program, made, args, kwargs)
        function.last = program
        if function.replaced and function.calls >= self._steps + 2:
            self._end()
            self._report(function)
            _say("the script goes on, accelerated")
            jax_intranode.install(auto=self._auto)
        return result

    def _call_timed(
        self, function: _Function, program: str, made: Any, args: Any, kwargs: Any
    ) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        shapes = tuple(
            (x.shape, str(x.dtype))
            if isinstance(x, (jax.Array, np.ndarray, np.generic))
            else type(x)
            for x in leaves
        )
        with contextlib.suppress(Exception):  # the call raises it, too
            jax.block_until_ready(leaves)
        compiles = self._compiles
        with self._context(program):
            started = time.perf_counter()
            result = jax.block_until_ready(made(*args, **kwargs))
            seconds = time.perf_counter() - started
        if self._compiles == compiles and function.last == program:
            function.seconds.setdefault(shapes, {}).setdefault(program, []).append(seconds)
        return result

    def _call_both(
        self, function: _Function, made: Any, args: Any, kwargs: Any, traced: functools.partial[Any]
    ) -> Any:
        """Calls both programs with the same arguments; the script gets the accelerated result."""
        plain: Any = None
        try:
            with self._context(ACCELERATED):
                explain = jax_intranode.explain(traced.func)
                function.explanation = explain(*traced.args, **traced.keywords)
        except Exception as error:
            function.explanation = f"{type(error).__name__}: {error}"
        with self._context(PLAIN):
            copies = _copied(traced, args, kwargs)
            if isinstance(copies, str):
                function.difference = copies
            else:
                plain = on_host(made(*copies[0], **copies[1]))
                del copies
        with self._context(ACCELERATED):
            result = jax.block_until_ready(made(*args, **kwargs))
        if plain is not None:
            function.difference = difference(on_host(result), plain)
        return result

    def finish(self) -> None:
        """Reports on the function that was called most, of those with replaced collectives."""
        if self._over:
            return
        self._end()
        called = [function for function in self._functions.values() if function.calls > 1]
        if not called:
            once = ", ".join(f.name + f.where for f in self._functions.values() if f.calls)
            _say(
                "there is nothing to compare: the main thread has called no function of jax.jit or "
                f"jax.pmap twice{once and f'; once: {once}'}"
            )
            _say(
                f"  call one in a loop, {self._steps + 2} times: its calls are then timed, plain "
                "and accelerated in turns"
            )
            return
        self._report(max(called, key=lambda f: (bool(f.replaced), f.calls)))

    def _end(self) -> None:
        self._over = True
        for name, transform in self._of_jax.items():
            setattr(jax, name, transform)

    def _report(self, function: _Function) -> None:
        times = function.times()
        found = {}
        for program, seconds in times.items():
            # A step is done when its last rank is.
            found[program] = [
                all_ranks.largest(f"compare/{program}/{k}", ms)
                for k, ms in enumerate(percentiles(seconds))
            ]
        off = function.difference
        if not isinstance(off, str):
            off = all_ranks.largest("compare/difference", off[0]), off[1]
        if jax.process_index() > 0:
            return
        _say(f"{function.name}{function.where}, {function.calls} calls; median (10th to 90th %)")
        for program, (low, middle, high) in found.items():
            text = f"{middle:10.3f} ms  ({low:.3f} to {high:.3f}, {len(times[program])} calls)"
            if math.isnan(middle):
                text = " not timed: the first calls do not count, nor those that compile"
            _say(f"  {program:<12}{text}")
        (p10, p50, p90), (a10, a50, a90) = found[PLAIN], found[ACCELERATED]
        if not math.isnan(p50 + a50):
            overlap = "" if p10 > a90 or p90 < a10 else ", but the times overlap"
            _say(f"  accelerated steps are {p50 / a50:.2f} times as fast{overlap}")
        _say(f"  results: {_text_of_difference(off)}")
        for text in _texts_of_collectives(function.explanation):
            _say(f"  {text}")


def percentiles(seconds: list[float]) -> list[float]:
    """Returns the 10th percentile, the median and the 90th percentile in ms; NaN of one time."""
    if len(seconds) < 2:
        return [math.nan] * 3
    parts = statistics.quantiles(seconds, n=10, method="inclusive")
    return [1e3 * parts[k] for k in (0, 4, 8)]


def _say(text: str) -> None:
    if jax.process_index() == 0:
        sys.stderr.write(f"compare: {text}\n")
        sys.stderr.flush()


def _copied(traced: functools.partial[Any], args: Any, kwargs: Any) -> tuple[Any, Any] | str:
    """The arguments, with copies of those that the function donates; or why it can't run twice."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    donated = [True] * len(leaves)  # with static arguments, and for pmap, it is not known which
    if hasattr(traced.func, "trace"):
        found = traced.func.trace(*traced.args, **traced.keywords)
        effects = {type(effect).__name__ for effect in found.jaxpr.effects} - {*_HARMLESS}
        if effects:
            return f"it has effects that must not happen twice: {', '.join(sorted(effects))}"
        infos = [info.donated for info in jax.tree.leaves(found.args_info)]
        if len(infos) == len(leaves) or not any(infos):
            donated = infos + [False] * (len(leaves) - len(infos))
    pairs = zip(leaves, donated, strict=True)
    copies = [x.copy() if d and isinstance(x, jax.Array) else x for x, d in pairs]
    return jax.tree.unflatten(structure, copies)


def on_host(tree: Any) -> list[tuple[str, list[np.ndarray]]]:
    """Returns the arrays of a result, with their places in it, as this process's parts of them."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array):
            if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            parts = [np.array(shard.data) for shard in leaf.addressable_shards]
            found.append((jax.tree_util.keystr(path), parts))
    return found


def difference(
    ours: list[tuple[str, list[np.ndarray]]], plain: list[tuple[str, list[np.ndarray]]]
) -> tuple[float, str]:
    """Returns the greatest difference, relative to the largest value of its array, and its place.

    It is NaN where only one of two values is NaN, or one is infinite.
    """
    worst, place = 0.0, ""
    for (path, our_parts), (_, plain_parts) in zip(ours, plain, strict=True):
        for a, b in zip(our_parts, plain_parts, strict=True):
            kind = np.complex128 if a.dtype.kind == "c" else np.float64
            x, y = a.astype(kind), b.astype(kind)
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            if same.all():
                continue
            largest = np.max(np.abs(y[np.isfinite(y)]), initial=0)
            off = float(np.max(np.abs(x - y)[~same])) / (float(largest) or 1.0)
            if not math.isfinite(off):
                return math.nan, path
            if off > worst:
                worst, place = off, path
    return worst, place


def _text_of_difference(found: tuple[float, str] | str) -> str:
    if isinstance(found, str):
        return f"not compared: {found}"
    off, place = found
    if off == 0:
        return "all have the same values"
    where = f", in {place}" if place else ""
    if math.isnan(off):
        return f"a value that is finite with one program only{where}"
    return f"they differ by at most {off:.1e} of the largest value of their array{where}"


def _of_lax(explanation: Any) -> list[Any]:
    """The collectives of the plain program. Calls of this package are the same in both programs."""
    return [call for call in explanation if call.origin != calls.OURS]


def _texts_of_collectives(explanation: Any) -> list[str]:
    if isinstance(explanation, str):
        return [f"collectives: not known: {explanation}"]
    found = _of_lax(explanation)
    texts = []
    if ours := len(explanation) - len(found):
        texts.append(f"the same in both programs: {ours} by functions of jax_intranode")
    if not found:
        return [
            *texts,
            "collectives: it calls none of jax.lax, so nothing was replaced. Those that XLA's "
            "partitioner adds stay as they are (run --auto --compare replaces them)",
        ]
    replaced = Counter(
        f"{call.operation} ({call.algorithm})" for call in found if call.algorithm != "lax"
    )
    left = Counter(f"{call.operation}: {call.reason}" for call in found if call.algorithm == "lax")
    texts += [f"replaced: {count} {what}" for what, count in replaced.most_common()]
    texts += [] if replaced else ["replaced: none"]
    return texts + [f"left to jax.lax: {count} {what}" for what, count in left.most_common()]
