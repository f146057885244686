"""What psum, pmax and pmin share: every rank gets the sum or the extreme of all ranks' operands."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.native import definitions
from jax_intranode._src.ops import collective, fallback
from jax_intranode._src.ops.annotations import AxisNames, PyTree
from jax_intranode._src.ops.collective import AllReduceParams, Params
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Decision, OpPrimitive
from jax_intranode._src.selection import select


def of_tree(
    primitive: OpPrimitive,
    x: PyTree,
    axis_name: AxisNames,
    axis_index_groups: Sequence[Sequence[int]] | None,
    of_lax: Callable[..., Any],
    constants_send: bool,
) -> PyTree:
    """Reduces the arrays of a pytree: those of one dtype by as few operations as possible.

    Args:
        of_lax: the function of ``jax.lax``, of the same arguments.
        constants_send: whether it communicates operands that do not depend on any argument.
    """
    operation, params_of = primitive.operation, primitive.params
    assert params_of is not None  # all of these replace collectives of lax
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    axes = trace_state.axes_in_types(axes)

    def sends(leaf: Any) -> bool:
        return constants_send or isinstance(leaf, jax.core.Tracer)

    reason = fallback.reason_of_axes(axes, axis_index_groups)
    if reason is not None:
        any_sends = len(axes) > 0 and any(map(sends, jax.tree.leaves(x)))
        with fallback.to_lax(operation, reason, sends=any_sends):
            return of_lax(x, axis_name, axis_index_groups=axis_index_groups)
    params = params_of(axes, invariant=trace_state.check_vma())
    return collective.of_arrays_by_dtype(
        *(primitive, x, axes, lambda leaf: of_lax(leaf, axes), lambda count: params, sends)
    )


# Selection: the arrays of one call are reduced by one operation or several.

# The positions of the arrays that one operation reduces, and its algorithm.
Part = tuple[list[int], select.Selection]


def operations(
    operation: str,
    mesh: jax.sharding.Mesh,
    axes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtype: Any,  # may be one of JAX's own, such as that of PRNG keys
    most_arrays: int = definitions.MAX_BUFFERS,
) -> list[Part]:
    """Divides a call of arrays of one dtype into operations of at most `most_arrays` of them.

    Returns:
        The operations. Empty arrays are in none of them, unless all arrays are empty.
    """
    # In a kernel's buffer each array starts a new pack.
    packs = [-(-math.prod(shape) * dtype.itemsize // definitions.PACK_BYTES) for shape in shapes]
    choose_by_bytes = collective.chooser(operation, mesh, axes, dtype)

    def choose(chosen: Sequence[int]) -> select.Selection:
        count = sum(packs[i] for i in chosen)
        if len(chosen) > 1 and count > definitions.MAX_PACKS:
            return select.Selection("lax", reasons.TOO_LARGE_TOGETHER)
        return choose_by_bytes(count * definitions.PACK_BYTES)

    nonempty = [i for i, count in enumerate(packs) if count > 0] or list(range(len(packs)))
    whole = choose(nonempty)
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    # On GPUs XLA reduces all arrays at once; on CPUs, one by one.
    most = (math.inf if on_gpus else 1) if whole.algorithm == "lax" else most_arrays
    if len(nonempty) <= most:
        return [(nonempty, whole)]
    # Each operation takes as many of the arrays, in order, as can be accelerated together.
    parts: list[Part] = []
    for i in nonempty:
        if parts and len(parts[-1][0]) < most_arrays:
            longer = [*parts[-1][0], i]
            selected = choose(longer)
            if selected.algorithm != "lax":
                parts[-1] = longer, selected
                continue
        parts.append(([i], choose([i])))
    return parts


# Rules.


def _abstract_eval(*xs: Any, params: AllReduceParams) -> list[Any]:
    def reduced(x: Any) -> Any:
        if not params.invariant:
            return x.update(weak_type=False)
        return collective.invariant_over(x, params.axes)

    return [reduced(x) for x in xs]


def decide(
    primitive: OpPrimitive,
    site: LoweringSite,
    avals: Sequence[Any],
    params: Params,
    most_arrays: int = definitions.MAX_BUFFERS,
) -> Decision:
    """What a call of arrays of one dtype runs as: operations of at most `most_arrays` of them."""
    reason = site.reason_for_lax()
    if reason is not None:
        parts = [(list(range(len(avals))), select.Selection("lax", reason))]
    else:
        assert site.mesh is not None  # or there would be a reason
        shapes = [x.shape for x in avals]
        parts = operations(
            primitive.operation, site.mesh, params.axes, shapes, avals[0].dtype, most_arrays
        )

    def lower(ctx: Any, *xs: Any) -> list[Any]:
        results = list(xs)  # an empty array is its own result
        for chosen, selected in parts:
            operands, some = [xs[i] for i in chosen], params.of_some(chosen)
            part = ctx.replace(
                avals_in=[avals[i] for i in chosen],
                avals_out=[ctx.avals_out[i] for i in chosen],
            )
            if selected.algorithm == "lax":
                found = collective.lower_to_lax(part, primitive, operands, some, selected)
            else:
                found = collective.lower_to_call(
                    *(part, primitive, operands, site.mesh, params.axes, selected),
                    attributes=some.attributes(),
                    detail=some.detail,
                )
            for i, result in zip(chosen, found, strict=True):
                results[i] = result
        return results

    return Decision(
        lower,
        lambda: [
            collective.operation_of(primitive, [avals[i] for i in chosen], selected)
            for chosen, selected in parts
        ],
    )


def register(
    primitive: OpPrimitive,
    jvp: Callable[..., tuple[list[Any], list[Any]]] | None = None,
    transpose: Callable[..., list[Any]] | None = None,
) -> None:
    """Registers the rules of an all-reduce; `jvp` and `transpose` as `OpPrimitive.register`."""
    primitive.register(
        abstract_eval=_abstract_eval,
        decide=partial(decide, primitive),
        jvp=jvp,
        transpose=transpose,
        batch=partial(collective.batch_in_place, primitive, None),
        needed=collective.needed,
    )
