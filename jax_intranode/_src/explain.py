"""explain: what each collective of a program runs as, and why, without running the program.

It walks the jaxpr, in which a call stands as often as it runs: a lowering is used again for what is
called twice. A call of ours is one of our primitives, for which the same rule as in lowering tells
the operations (`Collective.operations`). A call that was left to lax while tracing is known by the
scope around what lax has put in its place (`collective.left_to_lax`).
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import jax
from jax.extend.core import Jaxpr, Literal

from jax_intranode._src import communicator, compat
from jax_intranode._src.ops import collective


@dataclass(frozen=True)
class Call:
    """One operation of a program.

    Attributes:
        operation: "psum", "pmean", "psum_scatter", "all_gather", "all_gather_matmul",
            "matmul_reduce_scatter" or "matmul_all_reduce". A transpose has its own name, and so has
            the "all_gather" after an overlapped "matmul_all_reduce".
        source: file:line (function) of the call; of the forward one, for its derivatives.
        shapes: the operands' shapes on a device. A psum of a pytree is one operation or several. A
            collective matmul that was left to lax while tracing tells only what is gathered or
            summed.
        dtype: the operands' dtype; of operands that differ, as in derivatives, the first one's.
        nbytes: bytes of what is gathered or summed, on a device: the operands, or the product of a
            matmul. (A reason counts what a rank gives to each: for psum_scatter a part, and for
            several arrays whole packs of 16 bytes.)
        axes: the mesh axes; none if only axes that vmap has bound are reduced.
        groups: the ids of each group's devices, in rank order; none if they are not known.
        algorithm: "one_shot", "two_shot", "reduce_scatter" or "all_gather" of this package,
            "all_gather_matmul" or "matmul_reduce_scatter" if it is overlapped, or "lax": the
            operation of ``jax.lax``.
        blocks: blocks that the kernel is launched with; 0 for lax.
        threads: threads a block; 0 for lax.
        reason: why this algorithm.
        times: how often it runs in one call of the function; at most, if `conditional`. None in a
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


def explain(fun: Callable[..., Any]) -> Callable[..., Explanation]:
    """Reports what each collective of a function runs as, and why, without running it.

    The collectives are the calls of this package, those that fall back to ``jax.lax`` included,
    and what derivatives make of them; not the program's own calls of ``jax.lax``. The report is of
    the program that ``jax.jit`` makes of the function, for the platform of its mesh's devices: what
    is not needed for its results is left out, and so is what leaves nothing to compute.

    >>> print(jax_intranode.explain(step)(x))
    >>> assert all(call.algorithm != "lax" for call in jax_intranode.explain(step)(x))

    Args:
        fun: the function, jitted or not.

    Returns:
        A function of the arguments of `fun` (``jax.ShapeDtypeStruct`` will do for arrays) that
        traces `fun` and returns the report. If one of several processes calls it, all that have
        devices of the mesh must, as they meet if they have not before. It raises what tracing
        `fun` raises.
    """
    jitted = fun if isinstance(fun, jax.stages.Wrapped) else jax.jit(fun)

    @functools.wraps(fun)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        jaxpr = compat.without_dead_code(jitted.trace(*args, **kwargs).jaxpr)
        outside = _Context(collective.Place(None, frozenset(), ()))
        return Explanation(tuple(_calls(jaxpr, outside)))

    return explained


# The walk.


@dataclass(frozen=True)
class _Context:
    """Where a jaxpr is: what is lowered around it, and how often it runs.

    Attributes:
        place: as lowering will find it.
        times: as in `Call`.
        conditional: as in `Call`.
        transposed: whether the jaxpr is the transpose of a forward one.
    """

    place: collective.Place
    times: int | None = 1
    conditional: bool = False
    transposed: bool = False


def _calls(jaxpr: Any, context: _Context) -> Iterator[Call]:
    # What one call has left to lax lies together.
    for left, equations in itertools.groupby(jaxpr.eqns, _left_to_lax):
        if left is not None:
            yield from _calls_of_lax(left, list(equations), context)
            continue
        for equation in equations:
            ours = collective.BY_PRIMITIVE.get(equation.primitive)
            if ours is not None:
                yield from _calls_of_ours(ours, equation, context)
            for inner, where in _inner_jaxprs(equation, context):
                yield from _calls(inner, where)


def _inner_jaxprs(equation: Any, context: _Context) -> Iterator[tuple[Any, _Context]]:
    """The jaxprs that an equation runs, and where they are."""
    place, times, conditional = context.place, context.times, context.conditional
    shard_map = compat.shard_map_of(equation)
    if shard_map is not None:
        mesh, manual = shard_map
        platform = () if mesh is None else (compat.device_platform(mesh.devices.flat[0]),)
        place = collective.Place(mesh, manual, platform)
    name = equation.primitive.name
    if name == "scan":
        times = None if times is None else times * equation.params["length"]
    elif name == "while":
        times = None
    elif name == "cond" and not equation.params.get("branches_platforms"):
        conditional = True
    transposed = context.transposed or "transpose" in compat.scopes_of(equation)
    for inner in _run_by(equation, place):
        jaxpr = getattr(inner, "jaxpr", inner)  # of a closed one
        if isinstance(jaxpr, Jaxpr):
            yield jaxpr, _Context(place, times, conditional, transposed)


def _run_by(equation: Any, place: collective.Place) -> Iterator[Any]:
    """The parameters of an equation, among them the jaxprs that it runs."""
    if equation.primitive.name == "custom_linear_solve":
        yield equation.params["jaxprs"].solve  # the others are for its derivatives
        return
    platforms = equation.params.get("branches_platforms")
    if platforms and place.platforms:
        # jax.lax.platform_dependent: one branch is lowered.
        named = [p is None or place.platforms[0] in p for p in platforms]
        yield equation.params["branches"][named.index(True)]
        return
    for value in equation.params.values():
        yield from value if isinstance(value, (tuple, list)) else (value,)


def _calls_of_ours(ours: collective.Primitives, equation: Any, context: _Context) -> Iterator[Call]:
    avals = [operand.aval for operand in equation.invars]
    axes = equation.params["axes"]
    for described in ours.described(context.place, avals, **equation.params):
        selected = described.selected
        yield Call(
            operation=_name(equation, described.operation),
            source=_source(equation),
            **_types(described.operands),
            nbytes=described.nbytes,
            axes=axes,
            groups=_groups(context.place, axes, None),
            algorithm=selected.algorithm,
            blocks=selected.blocks,
            threads=selected.threads,
            reason=selected.reason,
            times=context.times,
            conditional=context.conditional,
        )


# The primitives of lax that send something to other devices, and what we call them.
_OF_LAX = {
    "psum": "psum",
    "psum_invariant": "psum",
    "unreduced_psum": "psum",
    "reduce_scatter": "psum_scatter",
    "unreduced_reduce_scatter": "psum_scatter",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
}

# The collective of each collective matmul.
_OF_MATMUL = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "psum_scatter",
    "matmul_all_reduce": "psum",
}


def _left_to_lax(equation: Any) -> tuple[str, str, str] | None:
    """The operation, the reason and the source of what is left to lax; None for others."""
    for scope in reversed(compat.scopes_of(equation)):
        left = collective.parse_left_to_lax(scope)
        if left is not None:
            return *left, _source(equation)
    return None


def _calls_of_lax(
    left: tuple[str, str, str], equations: list[Any], context: _Context
) -> Iterator[Call]:
    operation, reason, source = left

    def call(equation: Any, name: str, avals: list[Any], axes: Any, index_groups: Any) -> Call:
        return Call(
            operation=_name(equation, name),
            source=source,
            **_types(avals),
            nbytes=sum(map(collective.nbytes, avals)),
            axes=axes,
            groups=_groups(context.place, axes, index_groups),
            algorithm="lax",
            blocks=0,
            threads=0,
            reason=reason,
            times=context.times,
            conditional=context.conditional,
        )

    sent = [equation for equation in equations if _axes_of_lax(equation)]
    for equation in sent:
        # Those that vmap has bound have become numbers.
        axes = tuple(axis for axis in _axes_of_lax(equation) if not isinstance(axis, int))
        index_groups = equation.params.get("axis_index_groups")
        avals = [operand.aval for operand in equation.invars]
        name = _OF_LAX[equation.primitive.name]
        name = operation if _OF_MATMUL.get(operation) == name else name
        yield call(equation, name, avals, axes, index_groups)
    # Over an axis that vmap has bound, lax may compute without a collective.
    if not sent and collective.NOT_OF_A_MESH in reason and not context.transposed:
        made = {result for equation in equations for result in equation.outvars}
        used = [v for equation in equations for v in equation.invars if not isinstance(v, Literal)]
        for operand in dict.fromkeys(used):
            if operand not in made:
                yield call(equations[0], operation, [operand.aval], (), None)


def _axes_of_lax(equation: Any) -> tuple[Any, ...]:
    """The axes of a collective of lax; none for any other equation."""
    if equation.primitive.name not in _OF_LAX:
        return ()
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    return axes if isinstance(axes, tuple) else (axes,)


# What is said of a call.

_PACKAGE = str(Path(__file__).parent.parent) + os.sep


def _name(equation: Any, operation: str) -> str:
    mean = operation == "psum" and "jax_intranode.pmean" in compat.scopes_of(equation)
    return "pmean" if mean else operation


def _source(equation: Any) -> str:
    frames = compat.frames_of(equation)
    users = [frame for frame in frames if not frame[0].startswith(_PACKAGE)]
    for file, line, function in users or frames:
        return f"{file}:{line} ({function.rpartition('<locals>.')[2]})"
    return "unknown"


def _types(avals: list[Any]) -> dict[str, Any]:
    return {
        "shapes": tuple(aval.shape for aval in avals),
        "dtype": avals[0].dtype.name,
    }


def _groups(
    place: collective.Place, axes: tuple[str, ...], index_groups: Any
) -> tuple[tuple[int, ...], ...]:
    if place.mesh is None or not axes:
        return ()
    groups = communicator.partition(place.mesh, axes).groups()
    if index_groups is None:
        return tuple(groups)
    return tuple(tuple(group[i] for i in part) for group in groups for part in index_groups)
