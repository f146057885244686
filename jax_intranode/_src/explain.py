"""explain: what each collective of a program runs as, and why, without running the program.

It walks the jaxpr rather than the lowered module, because the jaxpr has every call: a function that
is called twice is lowered once. A call that was bound is an equation of one of our primitives;
`OpPrimitive.explain` then decides as lowering does. A call that fell back to lax while it was
traced is found by the named scope around lax's equations (`fallback.scope`).
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
from jax.extend.core import Literal

from jax_intranode._src import communicator, compat
from jax_intranode._src import source as source_lib
from jax_intranode._src.ops import fallback, primitive
from jax_intranode._src.ops.lowering_site import LoweringSite


@dataclass(frozen=True)
class Call:
    """One operation of a program.

    Attributes:
        operation: "psum", "pmean", "psum_scatter", "all_gather", "all_gather_matmul",
            "matmul_reduce_scatter" or "matmul_all_reduce". A transpose has the name of the
            operation that it is. The all-gather after an overlapped "matmul_all_reduce" is an
            operation of its own.
        source: file:line (function) of the call. Gradients have that of the forward call.
        shapes: the operands' shapes on a device. A psum of a pytree is one operation or several.
            For a collective matmul that fell back to lax while it was traced, only the shape of the
            gathered or summed array.
        dtype: the operands' dtype; if they differ, as in gradients, that of the first one.
        nbytes: bytes of the array that a device gathers or sums: the operands, or the product of a
            matmul. (A reason counts the bytes that a rank sends to each peer: for psum_scatter
            those of a part; for several arrays, each rounded up to a multiple of 16 bytes.)
        axes: the mesh axes; empty if only axes of vmap are reduced.
        groups: the ids of each group's devices, in rank order; empty if they are not known.
        algorithm: "one_shot", "two_shot", "reduce_scatter" or "all_gather" of this package;
            "all_gather_matmul" or "matmul_reduce_scatter" for an overlapped matmul; or "lax", the
            operation of ``jax.lax``.
        blocks: blocks of the kernel's launch; 0 for lax.
        threads: threads per block; 0 for lax.
        reason: why this algorithm.
        times: how often it runs in one call of the function; the most, if `conditional`. None in a
            ``while`` loop.
        conditional: whether it is in a branch of ``cond`` or ``switch``.
    """

    operation: str
    source: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    nbytes: int
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    algorithm: str
    blocks: int
    threads: int
    reason: str
    times: int | None
    conditional: bool

    @property
    def group_size(self) -> int | None:
        """Ranks of a group; None if the groups are not known."""
        return len(self.groups[0]) if self.groups else None


@dataclass(frozen=True)
class Explanation(Sequence[Call]):
    """The operations of a program in the order of its jaxpr; ``str()`` gives a table of them."""

    calls: tuple[Call, ...]

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
        """Returns a table, with the groups of devices below it."""
        if not self.calls:
            return "no collectives of jax_intranode"
        table = [_TITLES, *map(_row, self.calls)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        for axes, groups in dict.fromkeys((_axes(call), call.groups) for call in self.calls):
            if groups:
                lines.append(f"groups over {axes}: " + " ".join(str(list(ids)) for ids in groups))
        return "\n".join(lines)


_TITLES = (
    *("operation", "operands", "bytes", "axes", "ranks", "algorithm", "launch", "times"),
    *("source", "reason"),
)


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
        call.source.removeprefix(os.getcwd() + os.sep),
        call.reason,
    )


def _axes(call: Call) -> str:
    return ",".join(map(str, call.axes)) or "-"


class Explainer:
    """The result of ``explain(f)``, to be called with the arguments of ``f``."""

    def __init__(self, fun: Callable[..., Any]):
        """Keeps the function."""
        self._jitted = fun if isinstance(fun, jax.stages.Wrapped) else jax.jit(fun)
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Explanation:
        """Traces the function and returns the report."""
        jaxpr = compat.without_dead_code(self._jitted.trace(*args, **kwargs).jaxpr)
        outside = _Context(LoweringSite(None, frozenset(), ()))
        return Explanation(tuple(_calls(jaxpr, outside)))

    def __repr__(self) -> str:
        """Returns how to use it."""
        name = getattr(self, "__name__", "f")
        return (
            f"<explain({name}) has no report yet; call it with the arguments of {name}, as in "
            f"explain({name})(x)>"
        )


def explain(fun: Callable[..., Any]) -> Callable[..., Explanation]:
    """Reports what each collective of a function runs as, and why, without running it.

    The collectives are the calls of this package, including those that fall back to ``jax.lax``,
    and the collectives of their gradients. The program's own calls of ``jax.lax`` are not reported,
    nor are collectives that JAX inserts. The report is of the program that ``jax.jit`` compiles for
    the devices of the function's mesh: without equations that no result needs, and without calls
    that leave nothing to compute.

    >>> print(jax_intranode.explain(step)(x))
    >>> assert all(call.algorithm != "lax" for call in jax_intranode.explain(step)(x))

    Args:
        fun: the function, jitted or not.

    Returns:
        A function of the arguments of `fun` that traces `fun` and returns the report. Arrays may be
        ``jax.ShapeDtypeStruct``. The processes of the mesh rendezvous if they have not before; so
        if one process calls it, all processes with devices of the mesh must. It raises what tracing
        `fun` raises.
    """
    return Explainer(fun)


# The walk.


@dataclass(frozen=True)
class _Context:
    """What is known of a jaxpr from the equations around it.

    Attributes:
        site: the site that its equations will be lowered at.
        times: as in `Call`.
        conditional: as in `Call`.
        transposed: whether the jaxpr is the transpose of another one.
    """

    site: LoweringSite
    times: int | None = 1
    conditional: bool = False
    transposed: bool = False


def _calls(jaxpr: Any, context: _Context) -> Iterator[Call]:
    # The equations of one call that fell back to lax are adjacent.
    for fell_back, equations in itertools.groupby(jaxpr.eqns, _fallback):
        if fell_back is not None:
            yield from _calls_of_lax(fell_back, list(equations), context)
            continue
        for equation in equations:
            bound = primitive.BY_PRIMITIVE.get(equation.primitive)
            if bound is not None:
                yield from _calls_of_primitive(bound, equation, context)
            for inner, inside in _inner_jaxprs(equation, context):
                yield from _calls(inner, inside)


def _inner_jaxprs(equation: Any, context: _Context) -> Iterator[tuple[Any, _Context]]:
    """The jaxprs that an equation runs, and the context of each."""
    site = context.site
    shard_map = compat.shard_map_of(equation)
    if shard_map is not None:
        mesh, manual = shard_map
        platforms = () if mesh is None else (compat.device_platform(mesh.devices.flat[0]),)
        site = LoweringSite(mesh, manual, platforms)
    transposed = context.transposed or "transpose" in compat.scopes_of(equation)
    for inner in compat.inner_jaxprs(equation, next(iter(site.platforms), None)):
        times = None
        if context.times is not None and inner.times is not None:
            times = context.times * inner.times
        conditional = context.conditional or inner.conditional
        yield inner.jaxpr, _Context(site, times, conditional, transposed)


def _calls_of_primitive(
    bound: primitive.OpPrimitive, equation: Any, context: _Context
) -> Iterator[Call]:
    avals = [operand.aval for operand in equation.invars]
    axes = equation.params["params"].axes
    for operation in bound.explain(context.site, avals, **equation.params):
        selected = operation.selected
        yield Call(
            operation=_name(equation, operation.name),
            source=_source(equation),
            **_types(operation.operands),
            nbytes=operation.nbytes,
            axes=axes,
            groups=_groups(context.site, axes, None),
            algorithm=selected.algorithm,
            blocks=selected.blocks,
            threads=selected.threads,
            reason=selected.reason,
            times=context.times,
            conditional=context.conditional,
        )


# Calls that fell back to lax while they were traced.

# The collective of each collective matmul.
_OF_MATMUL = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "psum_scatter",
    "matmul_all_reduce": "psum",
}


def _fallback(equation: Any) -> tuple[str, str, str] | None:
    """The operation, the reason and the source of a call that fell back; None for others."""
    for scope in reversed(compat.scopes_of(equation)):
        found = fallback.parse_scope(scope)
        if found is not None:
            return *found, _source(equation)
    return None


def _calls_of_lax(
    fell_back: tuple[str, str, str], equations: list[Any], context: _Context
) -> Iterator[Call]:
    operation, reason, source = fell_back

    def call(equation: Any, name: str, avals: list[Any], axes: Any, index_groups: Any) -> Call:
        return Call(
            operation=_name(equation, name),
            source=source,
            **_types(avals),
            nbytes=sum(map(primitive.nbytes, avals)),
            axes=axes,
            groups=_groups(context.site, axes, index_groups),
            algorithm="lax",
            blocks=0,
            threads=0,
            reason=reason,
            times=context.times,
            conditional=context.conditional,
        )

    found = [(equation, compat.lax_collective(equation)) for equation in equations]
    collectives = [(equation, of_lax) for equation, of_lax in found if of_lax is not None]
    for equation, of_lax in collectives:
        avals = [operand.aval for operand in equation.invars]
        name = operation if _OF_MATMUL.get(operation) == of_lax.operation else of_lax.operation
        yield call(equation, name, avals, of_lax.axes, of_lax.index_groups)
    # Over an axis of vmap, lax may compute without a collective.
    if not collectives and fallback.NOT_BOUND in reason and not context.transposed:
        made = {result for equation in equations for result in equation.outvars}
        used = [v for equation in equations for v in equation.invars if not isinstance(v, Literal)]
        for operand in dict.fromkeys(used):
            if operand not in made:
                yield call(equations[0], operation, [operand.aval], (), None)


# The fields of a call.


def _name(equation: Any, operation: str) -> str:
    mean = operation == "psum" and "jax_intranode.pmean" in compat.scopes_of(equation)
    return "pmean" if mean else operation


def _source(equation: Any) -> str:
    return source_lib.call_site(compat.frames_of(equation))


def _types(avals: list[Any]) -> dict[str, Any]:
    return {
        "shapes": tuple(aval.shape for aval in avals),
        "dtype": avals[0].dtype.name,
    }


def _groups(
    site: LoweringSite, axes: tuple[str, ...], index_groups: Any
) -> tuple[tuple[int, ...], ...]:
    if site.mesh is None or not axes:
        return ()
    groups = communicator.partition(site.mesh, axes).groups()
    if index_groups is None:
        return tuple(groups)
    return tuple(tuple(group[i] for i in part) for group in groups for part in index_groups)
