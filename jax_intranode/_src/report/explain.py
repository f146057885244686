"""explain: what each collective of a program runs as, and why, without running the program."""

import functools
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import jax

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import hlo, jaxpr_walk, lowering_hooks
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.report import calls
from jax_intranode._src.report.calls import Call
from jax_intranode._src.rewrite import agreement, dataflow
from jax_intranode._src.rewrite.auto import rewriting


@dataclass(frozen=True)
class Explanation(Sequence[Call]):
    """The operations of a program in the order of its jaxpr; ``str()`` gives a table of them.

    Attributes:
        calls: the operations.
        compiled: with ``explain(f, compiled=True)``: the collectives in the program that XLA has
            compiled, by the names that they have there. Custom calls of this package have names
            like "jax_intranode_psum". All-reduces, all-gathers and reduce-scatters are counted by
            their arrays, because XLA merges and splits them. None without ``compiled=True``.
        added: what `compiled` has more than the lowered program: the collectives that XLA's
            partitioner has added. XLA may also drop a collective, copy the body of a loop, or turn
            an all-reduce into a reduce-scatter; this then differs by these. None without
            ``compiled=True``.
        left: over Explicit axes, or with ``install(auto=True)``: why all that XLA's partitioner
            adds is left to it; None if each operation has a reason of its own.
    """

    calls: tuple[Call, ...]
    compiled: Mapping[str, int] | None = field(default=None, hash=False)
    added: Mapping[str, int] | None = field(default=None, hash=False)
    left: str | None = None

    @property
    def own(self) -> tuple[Call, ...]:
        """The operations of the program's calls of this package, and of their gradients."""
        return tuple(call for call in self.calls if call.origin == calls.OURS)

    def __len__(self) -> int:
        """Returns how many operations there are."""
        return len(self.calls)

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Call]: ...
    def __getitem__(self, index: int | slice) -> Call | Sequence[Call]:
        """Returns an operation, or several."""
        return self.calls[index]

    def __str__(self) -> str:
        """Returns a table, with source and reason below each row, the groups, and the counts."""
        lines = self._table() if self.calls else ["no collectives"]
        if self.left is not None:
            lines.append(f"all that XLA's partitioner adds is left to it: {self.left}")
        if self.compiled is not None and self.added is not None:
            lines.append(f"in the compiled program: {_counts(self.compiled)}")
            lines.append(f"added by XLA's partitioner: {_counts(self.added)}")
        return "\n".join(lines)

    def _table(self) -> list[str]:
        title, *rows = aligned([_TITLES, *map(_row, self.calls)])
        lines = [title]
        for row, call in zip(rows, self.calls, strict=True):
            more = f" and {len(call.sources) - 1} more" * (len(call.sources) > 1)
            for text in (call.source.removeprefix(os.getcwd() + os.sep) + more, call.reason):
                row += "\n" + _BELOW.fill(text)
            lines.append(row)
        for axes, groups in dict.fromkeys((_axes(call), call.groups) for call in self.calls):
            if groups:
                lines.append(f"groups over {axes}: " + " ".join(str(list(ids)) for ids in groups))
        return lines


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


_TITLES = (
    *("operation", "operands", "bytes", "axes", "ranks", "algorithm", "launch", "times"),
    "origin",
)
# Below the row of a call stand its source and its reason.
_BELOW = textwrap.TextWrapper(100, " " * 4, " " * 4, break_long_words=False, break_on_hyphens=False)


def _row(call: Call) -> tuple[str, ...]:
    operands = [f"{call.dtype}[{','.join(map(str, shape))}]" for shape in call.shapes]
    if len(operands) > 2:
        operands = [operands[0], f"... ({len(operands)} arrays)"]
    times = "?" if call.times is None else f"{'<=' if call.conditional else ''}{call.times}"
    return (
        call.operation,
        " ".join(operands),
        str(call.nbytes),
        _axes(call),
        str(call.group_size or "-"),
        call.algorithm,
        f"{call.blocks}x{call.threads}" if call.blocks else "-",
        times,
        call.origin,
    )


def _axes(call: Call) -> str:
    return ",".join(map(str, call.axes)) or "-"


class Explainer:
    """The result of ``explain(f)``, to be called with the arguments of ``f``."""

    def __init__(self, fun: Callable[..., Any], compiled: bool):
        self._jitted = fun if isinstance(fun, jax.stages.Wrapped) else jax.jit(fun)
        self._compiled = compiled
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Explanation:
        """Traces the function and returns the report."""
        traced = self._jitted.trace(*args, **kwargs)
        if not hasattr(traced, "jaxpr"):
            kind = type(self._jitted)
            raise TypeError(
                f"explain: {getattr(self, '__name__', 'f')} is a {kind.__module__}."
                f"{kind.__qualname__}, whose trace has no jaxpr; pass a function of arrays, or one "
                "of jax.jit"
            )
        jaxpr = jaxpr_walk.without_dead_code(traced.jaxpr)
        computed = dataflow.computed_arguments(jaxpr)
        outside = calls.Context(LoweringSite(None, frozenset(), ()), computed=computed)
        found = tuple(calls.calls_in(jaxpr, outside))
        is_divided = agreement.call_for_partitioners(jaxpr) is not None
        if not self._compiled and not is_divided:
            return Explanation(found)
        with rewriting.explaining():
            program = traced.lower()
        left = None
        place = lowering_hooks.lowered_by_jax(program) if is_divided else None
        if place is not None:
            with rewriting.explaining():
                outcome = rewriting.outcome_of(*place)
            left = outcome.reason
            of_partitioner = tuple(calls.calls_of_partitioner(outcome, outside))
            seen = {source for call in of_partitioner for source in call.sources}
            # Collectives of partly manual shard_maps are in both.
            found = tuple(
                c for c in found if c.source not in seen or reasons.PARTLY_MANUAL not in c.reason
            )
            found += of_partitioner
        if not self._compiled:
            return Explanation(found, left=left)
        before = hlo.in_lowered(program.as_text())
        text = program.compile().as_text() or ""
        after = hlo.in_compiled(text)
        if is_divided:
            listed = {s for call in found if call.algorithm == "lax" for s in call.sources}
            found += tuple(calls.calls_of_xla(text, listed))
        of_xla = Counter({kind: after[kind] for kind in hlo.KINDS})
        return Explanation(found, dict(sorted(after.items())), dict(of_xla - before), left)

    def __repr__(self) -> str:
        """Returns how to use it."""
        name = getattr(self, "__name__", "f")
        return (
            f"<explain({name}) has no report yet; call it with the arguments of {name}, as in "
            f"explain({name})(x)>"
        )


def explain(fun: Callable[..., Any], *, compiled: bool = False) -> Callable[..., Explanation]:
    """Reports what each collective of a function runs as, and why, without running it.

    The collectives are the calls of this package, including those that fall back to ``jax.lax``,
    the program's own calls of ``jax.lax``, and what JAX inserts for gradients; `Call.origin` tells
    them apart. The report is of the program that ``jax.jit`` compiles for the devices of the
    function's mesh: without equations that no result needs, and without calls that leave nothing to
    compute. Called while programs are rewritten (`install`, `accelerate`), it says what becomes of
    each collective of ``jax.lax``, or why it is left.

    Args:
        fun: the function, jitted or not.
        compiled: whether to compile the function and count the collectives of the result as well.
            Only this shows what XLA's partitioner adds, except where `install` replaces it.

    Returns:
        A function of the arguments of `fun` that traces `fun` and returns the report. Arrays may be
        ``jax.ShapeDtypeStruct``. The processes of the mesh rendezvous if they have not before; so
        if one process calls it, all processes with devices of the mesh must. It raises what tracing
        `fun` raises, and with `compiled` what compiling it raises.

    Examples:
        >>> @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def total(x):
        ...     return jax_intranode.psum(x, "model")
        >>> report = jax_intranode.explain(total)(jnp.ones(4))
        >>> [(call.operation, call.axes, call.shapes, call.algorithm) for call in report]
        [('psum', ('model',), ((2,),), 'one_shot')]

        ``print(report)`` prints a table. A test can require that nothing falls back:

        >>> assert all(call.algorithm != "lax" for call in report.own)
    """
    if not callable(fun):
        raise TypeError(
            f"jax_intranode.explain got {fun!r:.80}; pass a function, and call the result with the "
            "function's arguments: explain(f)(x)"
        )
    return Explainer(fun, compiled)
