"""ppermute: each rank gets the operand of one other rank, or zeros."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax

from jax_intranode._src import reasons
from jax_intranode._src.native import definitions
from jax_intranode._src.ops import all_reduce, collective, fallback
from jax_intranode._src.ops.annotations import AxisNames, PyTree
from jax_intranode._src.ops.collective import PpermuteParams, ppermute_p


def ppermute(x: PyTree, axis_name: AxisNames, perm: Sequence[tuple[int, int]]) -> PyTree:
    """Sends arrays from rank to rank; takes the place of ``jax.lax.ppermute``.

    Inside ``jax.shard_map`` over devices of one host, each source writes its array into the memory
    of its destination. A rank waits for its source. It waits for its destination only if the
    destination has not begun the previous permute. Other dtypes, larger arrays
    (`explain` says up to which size), other axes and platforms fall back to ``jax.lax.ppermute``,
    on every rank alike. Bits are kept, except that a floating-point NaN may become another NaN.

    The arrays of a pytree that have one dtype are sent by as few operations as possible.

    Differentiates as ``jax.lax.ppermute`` does: the transpose is the inverse permutation.

    As in NCCL's symmetric kernels (AGxLL), data show by themselves that they have arrived. The
    encoding is our own.

    Args:
        x: an array or a pytree of arrays of any shape. Accelerated dtypes: those of ``all_to_all``.
        axis_name: the name of a mapped axis, or a tuple of names, with ranks in row-major order.
        perm: pairs of source and destination. No rank is a source twice, or a destination twice.

    Returns:
        Arrays of the shapes and dtypes of `x`: what the rank's source has; zeros on a rank that is
        no destination.

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.ppermute``.
        TypeError, ValueError, IndexError: `perm` is no list of pairs, or has a source or a
            destination twice, or one that is no rank, as in ``jax.lax.ppermute``.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        ... def shifted(x):
        ...     return jax_intranode.ppermute(x, "model", [(0, 1)])
        >>> shifted(jnp.array([1.0, 2.0]))
        Array([0., 1.], dtype=float32)
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    reason = fallback.reason_of_axes(axes)
    size = 1 if reason is not None else lax.psum(1, axes)
    mesh_axes = jax.sharding.get_abstract_mesh().axis_names
    reason = reason or reason_of_perm(perm, size, axes, mesh_axes)
    if reason is not None:
        with fallback.to_lax("ppermute", reason):
            return lax.ppermute(x, axis_name, perm)
    pairs = collective.pairs_of(perm)
    return collective.of_arrays_by_dtype(
        ppermute_p,
        x,
        axes,
        lambda leaf: lax.ppermute(leaf, axis_name, perm),
        lambda count: PpermuteParams(axes, (pairs,) * count, size),
    )


def reason_of_perm(
    perm: Any, size: int, axes: Sequence[Hashable], mesh_axes: Sequence[Hashable]
) -> str | None:
    """Why lax runs a permutation, or raises its error; None for partial ones of so many ranks."""
    if sorted(axes, key=mesh_axes.index) != list(axes):  # versions of lax differ in the ranks
        return reasons.AXES_IN_OTHER_ORDER
    if not isinstance(perm, (list, tuple)):
        return reasons.PERM_OF_OTHER_TYPE
    try:
        pairs = collective.pairs_of(perm)
    except (TypeError, ValueError):
        return reasons.PERM_WITHOUT_PAIRS.of(perm=perm)
    for what, ranks in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        for rank in ranks:
            if not 0 <= rank < size:
                return reasons.PERM_OUTSIDE.of(what=what, rank=rank, size=size)
            if ranks.count(rank) > 1:
                return reasons.PERM_TWICE.of(what=what, rank=rank)
    return None


# Rules.


def _abstract_eval(*xs: Any, params: PpermuteParams) -> list[Any]:
    return list(xs)


def _inverse(perm: collective.Perm) -> collective.Perm:
    return collective.pairs_of([(d, s) for s, d in perm])


def _transpose(cotangents: Sequence[Any], *xs: Any, params: PpermuteParams) -> list[Any]:
    def of_nonzero(chosen: list[int]) -> PpermuteParams:
        return replace(params, perms=tuple(_inverse(params.perms[i]) for i in chosen))

    return collective.transpose_some(
        lambda chosen, cts: ppermute_p.bind(*cts, params=of_nonzero(chosen)), cotangents, xs
    )


def _jvp(
    bind: Any, primals: Sequence[Any], tangents: Sequence[Any], params: PpermuteParams
) -> tuple[list[Any], list[Any]]:
    def bind_some(*xs: Any, chosen: list[int]) -> list[Any]:
        return list(bind(*xs, params=params.of_some(chosen)))

    return collective.jvp_some(bind_some, primals, tangents)


def _needed(used: list[bool], params: PpermuteParams) -> tuple[list[bool], PpermuteParams]:
    return used, params.of_some([i for i, is_used in enumerate(used) if is_used])


ppermute_p.register(
    abstract_eval=_abstract_eval,
    decide=partial(all_reduce.decide, ppermute_p, most_arrays=definitions.MAX_MEMBERS),
    jvp=_jvp,
    transpose=_transpose,
    batch=partial(collective.batch_in_place, ppermute_p, 0),
    needed=_needed,
)
