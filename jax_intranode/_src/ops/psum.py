"""psum: the sum of every rank's operand, on every rank."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.native import definitions
from jax_intranode._src.ops import collective, fallback
from jax_intranode._src.ops.annotations import AxisNames, PyTree
from jax_intranode._src.ops.collective import PsumParams, psum_p
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Decision
from jax_intranode._src.selection import select


def psum(
    x: PyTree,
    axis_name: AxisNames,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> PyTree:
    """Sums over one or more mapped axes; takes the place of ``jax.lax.psum``.

    Inside ``jax.shard_map`` over devices of one host, kernels that write into the peers' memory
    compute the sum. Small arrays take the one-shot algorithm: each rank sends its array to all
    others. Larger ones take the two-shot algorithm: a reduce-scatter, then an all-gather. Other
    dtypes, sizes, axes and platforms fall back to ``jax.lax.psum``, on every rank alike; `explain`
    says which calls do, and why.

    Values are added in rank order, starting with rank 0's, and rounded once. float32, bfloat16 and
    float16 are added in float32, float64 in float64, and integers in their own type (wrapping). So
    the bits are the same on every rank, in every run and with every algorithm.

    The arrays of a pytree that have one dtype are summed by as few operations as possible.

    Forward and reverse mode give what ``jax.lax.psum`` gives, with check_vma on and off.

    Args:
        x: an array or a pytree of arrays of any shape. Accelerated dtypes: float32, bfloat16,
            float16, float64, int8, uint8, int32, uint32, int64, uint64.
        axis_name: the name of a mapped axis, or several names.
        axis_index_groups: as in ``jax.lax.psum``; not accelerated.

    Returns:
        The sums, with the shapes and dtypes of `x` (bool becomes int32).

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.psum``.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def total(x):
        ...     return jax_intranode.psum(x, "model")
        >>> total(jnp.array([1.0, 2.0]))
        Array([3.], dtype=float32)
    """
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    axes = trace_state.axes_in_types(axes)
    leaves, tree = jax.tree.flatten(x)
    reason = fallback.reason_of_axes(axes, axis_index_groups)
    if reason is not None:
        # lax multiplies constants by the number of ranks.
        sends = len(axes) > 0 and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        with fallback.to_lax("psum", reason, sends=sends):
            return lax.psum(x, axis_name, axis_index_groups=axis_index_groups)
    by_dtype: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        reason = fallback.reason_of_array("psum", leaf, axes)
        if reason is None:
            by_dtype.setdefault(leaf.dtype.name, []).append(i)
        else:
            with fallback.to_lax("psum", reason, sends=isinstance(leaf, jax.core.Tracer)):
                leaves[i] = lax.psum(leaf, axes)
    params = PsumParams(axes, invariant=trace_state.check_vma())
    for chosen in by_dtype.values():
        sums = collective.bind(psum_p, [leaves[i] for i in chosen], params)
        for i, total in zip(chosen, sums, strict=True):
            leaves[i] = total
    return jax.tree.unflatten(tree, leaves)


def pmean(
    x: PyTree,
    axis_name: AxisNames,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> PyTree:
    """The mean over one or more mapped axes; takes the place of ``jax.lax.pmean``.

    It is `psum` divided by the number of ranks. Arguments, results, errors and differentiation are
    described there.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def mean(x):
        ...     return jax_intranode.pmean(x, "model")
        >>> mean(jnp.array([1.0, 2.0]))
        Array([1.5], dtype=float32)
    """
    with jax.named_scope("jax_intranode.pmean"):
        total = psum(x, axis_name, axis_index_groups=axis_index_groups)
    size = lax.psum(1, axis_name, axis_index_groups=axis_index_groups)
    return jax.tree.map(lambda v: v / size, total)


# Selection: the arrays of one call are summed by one operation or several.

# The positions of the arrays that one operation sums, and its algorithm.
Part = tuple[list[int], select.Selection]


def operations(
    mesh: jax.sharding.Mesh,
    axes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtype: Any,
) -> list[Part]:
    """Divides a psum of arrays of one dtype into operations.

    Returns:
        The operations. Empty arrays are in none of them, unless all arrays are empty.
    """
    dtype = np.dtype(dtype)
    # In a kernel's buffer each array starts a new pack.
    packs = [-(-math.prod(shape) * dtype.itemsize // definitions.PACK_BYTES) for shape in shapes]
    choose_by_bytes = collective.chooser("psum", mesh, axes, dtype)

    def choose(chosen: Sequence[int]) -> select.Selection:
        count = sum(packs[i] for i in chosen)
        if len(chosen) > 1 and count > definitions.MAX_PACKS:
            return select.Selection("lax", "together the arrays are larger than 64 GiB")
        return choose_by_bytes(count * definitions.PACK_BYTES)

    nonempty = [i for i, count in enumerate(packs) if count > 0] or list(range(len(packs)))
    whole = choose(nonempty)
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    # On GPUs XLA sums all arrays at once; on CPUs, one by one.
    most = (math.inf if on_gpus else 1) if whole.algorithm == "lax" else definitions.MAX_BUFFERS
    if len(nonempty) <= most:
        return [(nonempty, whole)]
    # Each operation takes as many of the arrays, in order, as can be accelerated together.
    parts: list[Part] = []
    for i in nonempty:
        if parts and len(parts[-1][0]) < definitions.MAX_BUFFERS:
            longer = [*parts[-1][0], i]
            selected = choose(longer)
            if selected.algorithm != "lax":
                parts[-1] = longer, selected
                continue
        parts.append(([i], choose([i])))
    return parts


# Rules.


def _abstract_eval(*xs: Any, params: PsumParams) -> list[Any]:
    def total(x: Any) -> Any:
        if not params.invariant:
            return x.update(weak_type=False)
        return collective.invariant_over(x, params.axes)

    return [total(x) for x in xs]


def _decide(site: LoweringSite, avals: Sequence[Any], params: PsumParams) -> Decision:
    reason = site.reason_for_lax()
    if reason is not None:
        parts = [(list(range(len(avals))), select.Selection("lax", reason))]
    else:
        assert site.mesh is not None  # or there would be a reason
        shapes = [x.shape for x in avals]
        parts = operations(site.mesh, params.axes, shapes, avals[0].dtype)

    def lower(ctx: Any, *xs: Any) -> list[Any]:
        results = list(xs)  # an empty array is its own sum
        for chosen, selected in parts:
            operands = [xs[i] for i in chosen]
            part = ctx.replace(
                avals_in=[avals[i] for i in chosen],
                avals_out=[ctx.avals_out[i] for i in chosen],
            )
            if selected.algorithm == "lax":
                sums = collective.lower_to_lax(part, psum_p, operands, params, selected)
            else:
                sums = collective.lower_to_call(
                    part, psum_p, operands, site.mesh, params.axes, selected
                )
            for i, total in zip(chosen, sums, strict=True):
                results[i] = total
        return results

    return Decision(
        lower,
        lambda: [
            collective.operation_of(psum_p, [avals[i] for i in chosen], selected)
            for chosen, selected in parts
        ],
    )


def _transpose(cotangents: Sequence[Any], *xs: Any, params: PsumParams) -> list[Any]:
    def of_nonzero(cts: list[Any]) -> list[Any]:
        if params.invariant:
            return [lax.pcast(ct, params.axes, to="varying") for ct in cts]
        return psum_p.bind(*cts, params=params)

    return collective.transpose(of_nonzero, cotangents, xs)


def _batch(
    name: Hashable, size: int, operands: Sequence[Any], dims: Sequence[Any], params: PsumParams
) -> tuple[list[Any], list[Any]]:
    if name in params.axes:
        return collective.batch_over_hidden_axis(psum_p, name, size, operands, dims, params, None)
    return psum_p.bind(*operands, params=params), list(dims)


psum_p.register(
    abstract_eval=_abstract_eval,
    decide=_decide,
    jvp=collective.jvp,
    transpose=_transpose,
    batch=_batch,
    needed=collective.needed,
)
