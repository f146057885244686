"""The operations of a program, from its jaxpr.

The jaxpr is walked rather than the lowered module, because the jaxpr has every call: a function
that is called twice is lowered once. Where programs are rewritten, the body of each shard_map is
rewritten as lowering does, and the result is walked. A call that was bound is an equation of one of
our primitives; `OpPrimitive.decide` is asked as by lowering. A call that fell back to lax
while it was traced is found by the named scope around lax's equations (`fallback.scope`).
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from jax_intranode._src import reasons
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.health import call_sites
from jax_intranode._src.jax_private import (
    call_frames,
    hlo,
    jaxpr_walk,
    lax_collectives,
    lowering_context,
    trace_state,
)
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.ops import fallback, primitive
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.rewrite import mode
from jax_intranode._src.rewrite.auto import rewriting
from jax_intranode._src.rewrite.jaxprs import rewrite_shard_map
from jax_intranode._src.selection import config, select

# Where a collective of a program comes from.
OURS, LAX, INSERTED, UNKNOWN = "jax_intranode", "jax.lax", "inserted by JAX", "unknown"
PARTITIONER = "XLA's partitioner"


@dataclass(frozen=True)
class Call:
    """One operation of a program.

    Attributes:
        operation: the name of a function of this package, such as "psum", "ppermute" or
            "matmul_all_reduce"; for another collective of ``jax.lax`` its name there.
            A transpose has the name of the operation that it is. The all-gather after an overlapped
            "matmul_all_reduce" is an operation of its own.
        source: ``file:line (function)`` of the call. Gradients have that of the forward call, and
            collectives that JAX inserts have that of the call for which it did.
        shapes: the operands' shapes on a device. A psum of a pytree is one operation or several.
            For a collective matmul that fell back to lax while it was traced, only the shape of the
            gathered or summed array.
        dtype: the operands' dtype; if they differ, as in gradients, that of the first one.
        nbytes: bytes of the array that a device gathers, sums or exchanges: the operands, or the
            product of a matmul. (A reason counts the bytes that a rank sends to each peer: for
            psum_scatter and all_to_all those of a part; for several arrays, each rounded up to a
            multiple of 16 bytes.)
        axes: the mesh axes; empty if only axes of vmap are reduced.
        groups: the ids of each group's devices, in rank order; empty if they are not known.
        algorithm: of this package: "one_shot" and "two_shot" (also with "_max", "_min", "_rms_norm"
            or "_layer_norm"), "hybrid_cube_mesh", "reduce_scatter", "all_gather", "all_to_all",
            "permute", "ragged", "dispatch", "combine", "few_rows"; "all_gather_matmul" or
            "matmul_reduce_scatter" for an overlapped matmul; or "lax", the operation of
            ``jax.lax``.
        blocks: blocks of the kernel's launch; 0 for lax.
        threads: threads per block; 0 for lax.
        reason: why this algorithm.
        times: how often it runs in one call of the function; the most, if `conditional`. None in a
            ``while`` loop.
        conditional: whether it is in a branch of ``cond`` or ``switch``.
        origin: who called for it. "jax_intranode": the program called a function of this package.
            "jax.lax": the program, or a library that it uses, called one of ``jax.lax``. A gradient
            has the origin of the forward call. "inserted by JAX": nobody called a collective; such
            are the gradients of operands that are replicated over the axes. "unknown": JAX has not
            kept the traceback. An operation that takes the place of several is inserted by JAX if
            all of them are. "XLA's partitioner": it would add the collective to an operation of a
            plain ``jit`` program. Over Explicit axes these are listed while programs are rewritten,
            over Auto axes with ``install(auto=True)`` only.
        sources: the `source` of each collective of ``jax.lax`` that the operation takes the place
            of; for all other operations, `source` only.
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
    origin: str
    sources: tuple[str, ...]

    @property
    def group_size(self) -> int | None:
        """Ranks of a group; None if the groups are not known."""
        return len(self.groups[0]) if self.groups else None


# The walk.


@dataclass(frozen=True)
class Context:
    """What is known of a jaxpr from the equations around it.

    Attributes:
        site: the site that its equations will be lowered at.
        times: as in `Call`.
        conditional: as in `Call`.
        transposed: whether the jaxpr is the transpose of another one.
        in_loop: whether the jaxpr is in the body of a loop.
        computed: the `dataflow.computed_arguments` of the program.
        rewriting: what was rewritten around it; None if nothing was.
    """

    site: LoweringSite
    times: int | None = 1
    conditional: bool = False
    transposed: bool = False
    in_loop: bool = False
    computed: Collection[Var] | None = None
    rewriting: "_Rewriting | None" = None


def platforms_of(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The platforms that a program on a mesh is lowered for."""
    return (lowering_context.device_platform(mesh.devices.flat[0]),)


class _Rewriting:
    """What became of the collectives in the body of a shard_map that was rewritten."""

    def __init__(
        self, site: LoweringSite, params: dict[str, Any], computed: Collection[Var] | None
    ):
        """Rewrites the body as lowering does."""
        self.jaxpr, self._body = rewrite_shard_map(site, params, computed)
        # By identity: the body keeps the equations.
        self._reasons = {key: why for key, (_, why) in self._body.decisions.items()}
        self._own: set[int] = set()
        self._replaced: dict[Any, Any] = {}
        body = jaxpr_walk.body_of_shard_map(params)
        for equation in jaxpr_walk.equations(body, nested_shard_maps=False):
            if equation.primitive in primitive.BY_PRIMITIVE:
                self._own.add(id(equation))
            elif lax_collectives.lax_collective(equation) is not None:
                self._replaced.update(dict.fromkeys(equation.outvars, equation))

    def is_own(self, equation: Any) -> bool:
        """Whether the program itself bound one of our primitives."""
        return id(equation) in self._own

    def replaced(self, equation: Any) -> list[Any]:
        """The collectives of lax whose results an equation computes, in order."""
        found = [self._replaced[v] for v in equation.outvars if v in self._replaced]
        return list({id(collective): collective for collective in found}.values())

    def reason_to_leave(self, equation: Any) -> str:
        """Why an equation of lax was left."""
        return self._reasons.get(id(equation)) or reasons.NOT_SEEN


def calls_in(jaxpr: Any, context: Context) -> Iterator[Call]:
    """The operations of a jaxpr, in its order."""
    # The equations of one call that fell back to lax are adjacent.
    for fell_back, equations in itertools.groupby(jaxpr.eqns, _fallback):
        if fell_back is not None:
            yield from _calls_of_lax(fell_back, list(equations), context)
            continue
        for equation in equations:
            bound = primitive.BY_PRIMITIVE.get(equation.primitive)
            if bound is not None:
                yield from _calls_of_primitive(bound, equation, context)
            else:
                yield from _call_of_lax(equation, context)
            for inner, inside in _inner_jaxprs(equation, context):
                yield from calls_in(inner, inside)


def _inner_jaxprs(equation: Any, context: Context) -> Iterator[tuple[Any, Context]]:
    """The jaxprs that an equation runs, and the context of each."""
    site, rewriting = context.site, context.rewriting
    shard_map = jaxpr_walk.shard_map_of(equation)
    if shard_map is not None:
        mesh, manual = shard_map
        site = LoweringSite(mesh, manual, () if mesh is None else platforms_of(mesh))
        rewriting = None
        if mode.enabled.value:
            rewrite = partial(_Rewriting, site, equation.params, context.computed)
            rewriting = trace_state.body_of_loop(rewrite) if context.in_loop else rewrite()
    transposed = context.transposed or "transpose" in call_frames.scopes_of(equation)
    in_loop = context.in_loop or equation.primitive.name in ("scan", "while")
    for inner in jaxpr_walk.inner_jaxprs(equation, next(iter(site.platforms), None)):
        times = None
        if context.times is not None and inner.times is not None:
            times = context.times * inner.times
        conditional = context.conditional or inner.conditional
        jaxpr = inner.jaxpr
        if rewriting is not None and shard_map is not None:
            jaxpr = rewriting.jaxpr
        yield (
            jaxpr,
            Context(site, times, conditional, transposed, in_loop, context.computed, rewriting),
        )


def _calls_of_primitive(
    bound: primitive.OpPrimitive, equation: Any, context: Context
) -> Iterator[Call]:
    avals = [operand.aval for operand in equation.invars]
    axes = equation.params["params"].axes
    replaced = []
    origin = OURS
    if context.rewriting is not None and not context.rewriting.is_own(equation):
        replaced = context.rewriting.replaced(equation)
        # A collective matmul has new results, and the traceback of its collective.
        origin = _origin_of_all(replaced or [equation])
    sources = tuple(map(_source, replaced)) or (_source(equation),)
    site = dataclasses.replace(context.site, traced_over=equation.params["traced_over"])
    for operation in bound.decide(site, avals, equation.params["params"]).operations():
        yield _call(
            context,
            operation=_name(replaced or [equation], operation.name),
            sources=sources,
            avals=operation.operands,
            nbytes=operation.nbytes,
            axes=axes,
            selected=operation.selected,
            origin=origin,
        )


# Calls that fell back to lax while they were traced.


def _fallback(equation: Any) -> tuple[str, str, str] | None:
    """The operation, the reason and the source of a call that fell back; None for others."""
    if equation.primitive in primitive.BY_PRIMITIVE:  # it was replaced after all
        return None
    for scope in reversed(call_frames.scopes_of(equation)):
        found = fallback.parse_scope(scope)
        if found is not None:
            return *found, _source(equation)
    return None


def _calls_of_lax(
    fell_back: tuple[str, str, str], equations: list[Any], context: Context
) -> Iterator[Call]:
    operation, reason, source = fell_back

    def call(equation: Any, name: str, avals: list[Any], axes: Any, index_groups: Any) -> Call:
        return _call(
            context,
            operation=_name([equation], name),
            sources=(source,),
            avals=avals,
            axes=axes,
            index_groups=index_groups,
            selected=select.Selection("lax", reason),
            origin=OURS,
        )

    found = [(equation, lax_collectives.lax_collective(equation)) for equation in equations]
    collectives = [(equation, of_lax) for equation, of_lax in found if of_lax is not None]
    for equation, of_lax in collectives:
        avals = [operand.aval for operand in equation.invars]
        # The collective of a matmul has the matmul's name.
        contains = RECORDS[operation].collective if operation in RECORDS else None
        name = operation if contains == of_lax.operation else of_lax.operation
        yield call(equation, name, avals, of_lax.axes, of_lax.index_groups)
    # Over an axis of vmap, lax may compute without a collective.
    if not collectives and reasons.OTHER_AXIS in reason and not context.transposed:
        made = {result for equation in equations for result in equation.outvars}
        used = [v for equation in equations for v in equation.invars if not isinstance(v, Literal)]
        for operand in dict.fromkeys(used):
            if operand not in made:
                yield call(equations[0], operation, [operand.aval], (), None)


# Collectives of lax that no function of this package called.


def _call_of_lax(equation: Any, context: Context) -> Iterator[Call]:
    collective = lax_collectives.lax_collective(equation)
    other = lax_collectives.other_collective(equation)
    if collective is not None and collective.axes:
        operation, axes = collective.operation, collective.axes
        index_groups = collective.index_groups
        reason = _reason_to_leave(equation, context)
    elif other is not None:
        operation, axes = other
        index_groups = equation.params.get("axis_index_groups")
        reason = reasons.OTHER_KIND.of(operation=operation)
    else:
        return
    arrays = [v.aval for v in equation.invars if hasattr(v.aval, "dtype")]
    if operation == "ragged_all_to_all":
        arrays = arrays[:1]  # the others say which rows go where
    yield _call(
        context,
        operation=_name([equation], operation),
        sources=(_source(equation),),
        avals=arrays or [v.aval for v in equation.outvars],
        axes=axes,
        index_groups=index_groups,
        selected=select.Selection("lax", reason),
        origin=_origin(equation),
    )


def _reason_to_leave(equation: Any, context: Context) -> str:
    if context.rewriting is None:
        return reasons.DISABLED if config.get().disable else reasons.NOT_INSTALLED
    return context.rewriting.reason_to_leave(equation)


# Operations to which XLA's partitioner would add collectives.


def calls_of_partitioner(outcome: rewriting.Outcome, outside: Context) -> Iterator[Call]:
    """The operations of a lowered program to which XLA's partitioner would add collectives."""
    for record in outcome.records:
        times = None if record.in_loop else 1
        if record.jaxpr is not None:
            with mode.enabled(mode.PART):
                inside = dataclasses.replace(outside, in_loop=record.copies, computed=None)
                calls = list(calls_in(record.jaxpr, inside))
            for call in calls:
                yield dataclasses.replace(
                    call,
                    source=record.source,
                    sources=record.sources,
                    origin=PARTITIONER,
                    times=times,
                    conditional=record.in_branch,
                )
        elif record.reason is not None:
            mesh = outcome.mesh
            platforms = () if mesh is None else platforms_of(mesh)
            site = LoweringSite(mesh, frozenset(), platforms)
            yield _call(
                Context(site, times, record.in_branch),
                operation=record.operation,
                sources=(record.source,),
                avals=list(record.avals),
                axes=record.axes,
                selected=select.Selection("lax", record.reason),
                origin=PARTITIONER,
            )


def calls_of_xla(text: str, listed: Collection[str]) -> Iterator[Call]:
    """The collectives of a compiled program that are of no operation at the lines `listed`."""
    context = Context(LoweringSite(None, frozenset(), ()))
    for found in hlo.sources_of(text):
        if found.source not in listed:
            arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for name, shape in found.arrays]
            yield _call(
                context,
                operation=found.kind,
                sources=(found.source,),
                avals=arrays,
                axes=(),
                selected=select.Selection("lax", reasons.OTHER_OPERATION.of(name=found.of)),
                origin=PARTITIONER,
            )


# A call, and its fields.


def _call(
    context: Context,
    *,
    operation: str,
    sources: tuple[str, ...],
    avals: list[Any],
    axes: Any,
    selected: select.Selection,
    origin: str,
    nbytes: int | None = None,
    index_groups: Any = None,
) -> Call:
    return Call(
        operation=operation,
        source=sources[0],
        shapes=tuple(aval.shape for aval in avals),
        dtype=avals[0].dtype.name if avals else "unknown",
        nbytes=sum(map(primitive.nbytes, avals)) if nbytes is None else nbytes,
        axes=axes,
        groups=_groups(context.site, axes, index_groups),
        algorithm=selected.algorithm,
        blocks=selected.blocks,
        threads=selected.threads,
        reason=selected.reason,
        times=context.times,
        conditional=context.conditional,
        origin=origin,
        sources=sources,
    )


def _name(equations: list[Any], operation: str) -> str:
    mean = operation == "psum" and all(map(_is_mean, equations))
    return "pmean" if mean else operation


def _is_mean(equation: Any) -> bool:
    return "jax_intranode.pmean" in call_frames.scopes_of(equation) or (
        lax_collectives.lax_collective(equation) is not None
        and lax_collectives.called_function(equation) == "pmean"
    )


def _origin(equation: Any) -> str:
    """The origin of a collective of lax, or of what takes its place."""
    if _fallback(equation) is not None:
        return OURS
    function = lax_collectives.called_function(equation)
    if function is None:
        return UNKNOWN
    return LAX if function else INSERTED


def _origin_of_all(replaced: list[Any]) -> str:
    """The origin of an operation that takes the place of these collectives of lax."""
    origins = set(map(_origin, replaced))
    return origins.pop() if len(origins) == 1 else LAX


def _source(equation: Any) -> str:
    return call_sites.call_site(call_frames.frames_of(equation))


def _groups(
    site: LoweringSite, axes: tuple[str, ...], index_groups: Any
) -> tuple[tuple[int, ...], ...]:
    if site.mesh is None or not axes:
        return ()
    groups = partition_lib.partition(site.mesh, tuple(axes)).groups()
    if index_groups is None:
        return tuple(groups)
    return tuple(tuple(group[i] for i in part) for group in groups for part in index_groups)
