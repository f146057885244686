"""moe_dispatch and moe_combine: tokens to the ranks of their experts, and the results back.

A dispatch of few tokens is one operation. One of more is three: an `all_gather` of who goes where,
the layout, which each rank computes by itself, and the exchange. A combine is one exchange.
"""

import math
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, mlir
from jax.typing import ArrayLike

from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.health import call_sites
from jax_intranode._src.native import definitions
from jax_intranode._src.ops import collective, fallback, matmul_arguments
from jax_intranode._src.ops.annotations import AxisNames
from jax_intranode._src.ops.collective import AllGatherParams, Params, all_gather_p
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Decision, OpPrimitive
from jax_intranode._src.selection import select


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("weights", "places", "ranks", "dropped"),
    meta_fields=("axes", "num_experts", "tokens"),
)
@dataclass(frozen=True)
class MoeState:
    """What `moe_combine` needs to know of a `moe_dispatch`: arrays, and three static fields.

    Attributes:
        weights: float32 [n, T, k]: the weights of the tokens of all ranks.
        places: int32 [n, T, k]: the rows of `received` that the tokens of all ranks have; -1 where
            an expert is not of this rank, -2 where there was no room.
        ranks: int32 [T]: the ranks that each token of this rank goes to, as bits.
        dropped: int32 [n]: for how many rows of each rank there was no room on this one.
        axes: the names of the mapped axes.
        num_experts: the experts of all ranks.
        tokens: T, the tokens of a rank.
    """

    weights: Any
    places: Any
    ranks: Any
    dropped: Any
    axes: tuple[Any, ...]
    num_experts: int
    tokens: int


@dataclass(frozen=True)
class MoeParams(Params):
    """Parameters of the primitives.

    Attributes:
        world_size: number of ranks.
        experts: the experts of a rank.
        capacity: the rows that a rank has for what it receives.
        bounded: whether the call has set the capacity.
    """

    world_size: int
    experts: int
    capacity: int
    bounded: bool = True


dispatch_p = OpPrimitive("moe_dispatch")
combine_p = OpPrimitive("moe_combine")
layout_p = OpPrimitive("moe_layout")
routed_p = OpPrimitive("routed_moe_dispatch")  # a dispatch as a whole
tangent_p = OpPrimitive("tangent_of_moe_combine")


def moe_dispatch(
    tokens: ArrayLike,
    expert_ids: ArrayLike,
    weights: ArrayLike,
    axis_name: AxisNames,
    *,
    num_experts: int,
    capacity: int | None = None,
) -> tuple[jax.Array, jax.Array, MoeState]:
    """Sends each token to the ranks of its experts, sorted by expert.

    Inside ``jax.shard_map`` over n ranks, rank r holds the experts r * E / n to (r + 1) * E / n - 1
    of E. A token crosses once to each other rank that has experts of it, however many. Each rank
    stores the rows where they belong: those of its first expert come first, and those of an expert
    are sorted by the rank that they come from, then by position there. `moe_combine` brings back
    what the experts have made of them. ``jax.lax.ragged_dot`` takes rows in this order, but on GPUs
    XLA multiplies all rows by all experts for it: use a batched matmul, with a bound of the rows of
    an expert.

    Nothing is dropped if `capacity` is None and no token names an expert twice. Then `received` has
    room for the case that all tokens of all ranks come here; the log says at level INFO how many
    bytes that is. Else the first tokens of each rank keep their rows: position 0 of all ranks, then
    position 1, until the room is full. Other dtypes, ``jax.export`` and groups that span hosts fall
    back to an ``all_gather`` of all tokens.

    Differentiable with respect to `tokens` and `weights`. The gradient of the tokens is one
    exchange, as by `moe_combine` with weights of 1.

    Args:
        tokens: an array [T, H], the tokens of this rank. Accelerated dtypes: float32, bfloat16 and
            float16.
        expert_ids: integers [T, k]: the experts of each token, -1 for none. Other numbers that no
            expert has are none, too, and are not counted as dropped.
        weights: floats [T, k], by which `moe_combine` multiplies the results of the experts. They
            travel as float32.
        axis_name: the name of a mapped axis, or a tuple of names, with ranks in row-major order.
        num_experts: E, a multiple of the number of ranks.
        capacity: the rows of `received`, for all experts of this rank; None for
            n * T * min(k, E / n), as many as there can be if the experts of a token differ.

    Returns:
        ``received, group_sizes, state``: an array [capacity, H], whose rows behind the last one are
        zeros; int32 [E / n], how many rows each expert of this rank has; and what `moe_combine`
        needs. ``state.dropped`` is int32 [n]: for how many rows from each rank there was no room.

    Raises:
        TypeError: an argument is not an array of a suitable dtype, or not an integer.
        ValueError: shapes or numbers do not fit together.
        NameError: an axis is not bound.

    Examples:
        Two ranks, with an expert each. The first token goes to both:

        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        ... def layer(x, ids, weights):
        ...     received, sizes, state = jax_intranode.moe_dispatch(
        ...         x, ids, weights, "model", num_experts=2
        ...     )
        ...     expert = 1.0 + jax.lax.axis_index("model")  # multiplies by 1, or by 2
        ...     return jax_intranode.moe_combine(expert * received, state)
        >>> ids, weights = jnp.array([[0, 1], [1, -1]]), jnp.array([[0.5, 0.5], [1.0, 0.0]])
        >>> print(layer(jnp.array([[1.0], [2.0]]), ids, weights))
        [[1.5]
         [4. ]]
    """
    name = "moe_dispatch"
    x, ids, factors = _operands(tokens, expert_ids, weights)
    axes = matmul_arguments.axes_of(axis_name)
    n = matmul_arguments.world_size(name, axes)
    experts = collective.integer(name, "num_experts", num_experts)
    if experts < 1 or experts % n != 0:
        raise ValueError(
            f"{name}: num_experts is {experts}; it must be a multiple of the number of ranks, {n}"
        )
    rows = n * len(x) * min(ids.shape[1], experts // n)
    if capacity is not None:
        rows = collective.integer(name, "capacity", capacity)
        if rows < 1:
            raise ValueError(f"{name}: capacity is {rows}; pass 1 or more, or None")
    params = MoeParams(axes, n, experts // n, rows, bounded=capacity is not None)
    reason = fallback.reason_of_axes(axes)
    if ids.dtype.itemsize > 4:
        ids = jnp.where((ids < 0) | (ids > experts), experts, ids)  # no expert has this id
    operands = x, ids.astype(np.int32), factors.astype(np.float32)
    if reason is not None:
        results = _by_lax(reason, routed_p, *operands, params=params)
    elif definitions.routed_fits(n, ids.size, experts // n, 1, 0, sys.maxsize):
        # Lowering finds whether blocks and tokens fit, too.
        with jax.named_scope(dispatch_p.scope):
            results = routed_p.bind(*_vary(operands, axes), params=params)
    else:  # three operations for JAX as well, which drops and batches each by itself
        results = _in_turn(_bind, params, *_vary(operands, axes))
    received, of_all, places, ranks, sizes, _, dropped = results
    state = MoeState(of_all, places, ranks, dropped, axes, experts, len(x))
    return received, sizes, state


def moe_combine(outputs: ArrayLike, state: MoeState) -> jax.Array:
    """Brings the results of the experts back to the ranks of the tokens, and sums them.

    The inverse of `moe_dispatch`. Each rank multiplies the rows of a token by their weights, adds
    them in the order of k, in float32, and rounds once. This sum crosses once. The rank of the
    token adds the sums of the ranks in rank order, in float32, and rounds once. So a result has the
    same bits in every run. Sums start at 0; a token without experts gets zeros, and rows that were
    dropped count as zeros.

    Differentiable with respect to `outputs` and to the weights that `moe_dispatch` got. Both
    gradients come from one exchange, which dispatches the gradient of the result. That of the
    weights also takes a reduce-scatter, in the backward pass of `moe_dispatch`. The backward pass
    keeps `state` and, for the gradient of the weights, `outputs`.

    Args:
        outputs: an array [capacity, H], a row for each row of what `moe_dispatch` returned. Its H
            and dtype may differ from those of the tokens.
        state: what `moe_dispatch` returned, in a call of the same ``shard_map`` or another one
            over the same axes.

    Returns:
        An array [T, H] of the dtype of `outputs`, a row for each token of this rank.

    Raises:
        TypeError: `outputs` is not an array of floats, or `state` not what `moe_dispatch` returns.
        ValueError: `outputs` does not have two dimensions.
        NameError: an axis is not bound.

    Examples:
        Each token comes back as the sum of its weights times itself:

        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        ... def there_and_back(x, ids, weights):
        ...     received, _, state = jax_intranode.moe_dispatch(
        ...         x, ids, weights, "model", num_experts=4
        ...     )
        ...     return jax_intranode.moe_combine(received, state)
        >>> ids, weights = jnp.array([[0, 3], [2, 1]]), jnp.array([[0.5, 0.25], [1.0, 2.0]])
        >>> print(there_and_back(jnp.array([[4.0], [1.0]]), ids, weights))
        [[3.]
         [3.]]
    """
    name = "moe_combine"
    if not isinstance(state, MoeState):
        kind = type(state).__name__
        raise TypeError(f"{name}: state is a {kind}; pass what moe_dispatch returned")
    x = _floats(name, "outputs", outputs)
    if x.ndim != 2:
        raise ValueError(f"{name}: outputs has the shape {x.shape}; pass rows [capacity, H]")
    n = matmul_arguments.world_size(name, state.axes)
    params = MoeParams(state.axes, n, state.num_experts // n, len(x))
    operands = [x, state.weights, state.places, state.ranks]
    reason = fallback.reason_of_axes(state.axes)
    if reason is not None:
        (result,) = _by_lax(reason, combine_p, *operands, params=params)
    else:
        (result,) = _bind(combine_p, *_vary(operands, state.axes), params=params)
    return result


# Checks.


def _floats(name: str, argument: str, value: Any) -> Any:
    value = matmul_arguments.array(name, argument, value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"{name}: {argument} has the dtype {value.dtype}; pass floating-point data")
    return value


def _operands(tokens: Any, expert_ids: Any, weights: Any) -> tuple[Any, Any, Any]:
    name = "moe_dispatch"
    x, weights = _floats(name, "tokens", tokens), _floats(name, "weights", weights)
    ids = matmul_arguments.array(name, "expert_ids", expert_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: expert_ids has the dtype {ids.dtype}; pass integers")
    if x.ndim != 2 or ids.ndim != 2 or ids.shape != weights.shape or len(ids) != len(x):
        raise ValueError(
            f"{name}: tokens has the shape {x.shape}, expert_ids {ids.shape}, weights "
            f"{weights.shape}; they must be [T, H], [T, k] and [T, k]"
        )
    return x, ids, weights


def _vary(operands: Sequence[Any], axes: tuple[Hashable, ...]) -> list[Any]:
    over = set(axes).union(*(jax.typeof(v).manual_axis_type.varying for v in operands))
    return [collective.varying(v, sorted(over, key=str)) for v in operands]


def _bind(primitive: OpPrimitive, *operands: Any, params: Any) -> list[Any]:
    with jax.named_scope(primitive.scope):
        return primitive.bind(*operands, params=params)


def _by_lax(reason: str, primitive: OpPrimitive, *operands: Any, params: MoeParams) -> list[Any]:
    sends = primitive is not layout_p
    operation = "moe_dispatch" if primitive is routed_p else primitive.operation
    with fallback.to_lax(operation, reason, logged=sends, sends=sends):
        return _compute(primitive, *operands, params=params)


def _gather(params: MoeParams) -> AllGatherParams:
    return AllGatherParams(params.axes, 0, False, params.world_size)


def _in_turn(
    bind: Callable[..., Any], params: MoeParams, x: Any, ids: Any, factors: Any
) -> list[Any]:
    """A dispatch as three operations: what is received, all weights, and the layout."""
    if ids.size == 0:
        shape = params.world_size, 2, *ids.shape
        of_all, bits = (jnp.zeros_like(factors, t, shape=shape) for t in (np.float32, np.int32))
    else:
        # One array for both: ids are bits of subnormal numbers, which no operation changes.
        ids = jnp.clip(ids, -1, params.experts * params.world_size) + 1
        sent = jnp.stack([lax.bitcast_convert_type(ids, np.float32), factors])
        (of_all,) = bind(all_gather_p, sent, params=_gather(params))
        bits = lax.bitcast_convert_type(lax.stop_gradient(of_all), np.int32)
    layout = bind(layout_p, bits, params=params)
    places, ranks, _, used, _ = layout
    (received,) = bind(dispatch_p, x, places, ranks, used, params=params)
    return [received, of_all[:, 1], *layout]


# What jax.lax computes. Where the kernels differ is in subnormal numbers on CPU devices, and in
# products that XLA adds without rounding them. Arrays without elements are not sent, and nothing is
# computed from ids without elements: XLA:GPU crashed when it compiled that (jax 0.11.2).


def _layout(params: MoeParams, gathered: Any) -> list[Any]:
    """Who goes where. gathered: ids + 1 and weights of all ranks, [n, 2, T, k].

    Returns:
        places and ranks, as in `MoeState`; the rows of each expert; [the rows of all]; dropped.
    """
    if gathered.size == 0:
        types = _types_of_layout(gathered, params=params)
        return [jnp.zeros_like(gathered, shape=each.shape) for each in types]
    me, experts = lax.axis_index(params.axes), params.experts
    ids = gathered[:, 0] - 1
    local = ids - me * experts
    mine = (local >= 0) & (local < experts)
    in_turn = mine.swapaxes(0, 1)  # [T, n, k]: the order in which rows are kept
    number = jnp.cumsum(in_turn.reshape(-1), dtype=np.int32).reshape(in_turn.shape)
    kept = mine & (number <= params.capacity).swapaxes(0, 1)
    key = jnp.where(kept, local, experts).reshape(-1)
    order = jnp.argsort(key, stable=True)
    row = jnp.zeros_like(key).at[order].set(jnp.arange(len(key), dtype=np.int32))
    places = jnp.where(kept, row.reshape(ids.shape), jnp.where(mine, -2, -1)).astype(np.int32)
    sizes = jnp.sum(key[:, None] == jnp.arange(experts), axis=0, dtype=np.int32)
    # No ids of a negative rank, as -1 has.
    to = jnp.where(ids[me] < 0, params.world_size, ids[me] // experts)
    reached = jnp.any(to[..., None] == jnp.arange(params.world_size), axis=1)
    ranks = jnp.sum(reached << jnp.arange(params.world_size), axis=1, dtype=np.int32)
    dropped = jnp.sum(mine & ~kept, axis=(1, 2), dtype=np.int32)
    return [places, ranks, sizes, sizes.sum(keepdims=True, dtype=np.int32), dropped]


def _source_of(places: Any, capacity: int) -> Any:
    """For each row the number of its token, of all ranks in order; a number too large for none."""
    tokens = jnp.arange(places.shape[0] * places.shape[1], dtype=np.int32)
    tokens = jnp.broadcast_to(tokens.reshape(*places.shape[:2], 1), places.shape)
    none = jnp.full_like(places, tokens.size, shape=(capacity,))
    return none.at[jnp.where(places < 0, capacity, places)].set(tokens, mode="drop")


def _dispatch(params: MoeParams, x: Any, places: Any, ranks: Any, used: Any) -> list[Any]:
    if x.size == 0 or places.size == 0:
        return [jnp.zeros_like(x, shape=(params.capacity, x.shape[1]))]
    of_all = lax.all_gather(x, params.axes, tiled=True)
    source = _source_of(places, params.capacity)
    return [jnp.take(of_all, source, axis=0, mode="fill", fill_value=0)]


def _combine(params: MoeParams, x: Any, weights: Any, places: Any, ranks: Any) -> list[Any]:
    if x.size == 0 or places.size == 0:
        return [jnp.zeros_like(x, shape=(len(ranks), x.shape[1]))]
    wide = _wide(x.dtype)
    partial_sum: Any = 0
    for choice in range(places.shape[2]):
        place = places[..., choice]
        row = jnp.take(x, jnp.where(place < 0, len(x), place), axis=0, mode="fill", fill_value=0)
        partial_sum += row.astype(wide) * weights[..., choice, None].astype(wide)
    partial_sum = jnp.broadcast_to(partial_sum, (*places.shape[:2], x.shape[1]))
    of_ranks = lax.all_to_all(_from_zero(partial_sum).astype(x.dtype), params.axes, 0, 0)
    total: Any = 0
    for rank in range(params.world_size):
        total += of_ranks[rank].astype(wide)
    return [_from_zero(total).astype(x.dtype)]


def _wide(dtype: Any) -> Any:
    """The dtype in which sums are added."""
    return np.float64 if dtype == np.float64 else np.float32


def _from_zero(total: Any) -> Any:
    """A sum as if it had started at 0, which XLA leaves out: it is no negative zero."""
    return jnp.where(total == 0, 0, total)


def _tangent(
    combine: Callable[..., Any], dx: Any, dw: Any, x: Any, w: Any, *layout: Any
) -> list[Any]:
    """The tangent of a combine whose outputs and weights both have one."""
    (of_x,), (of_w,) = combine(dx, w, *layout), combine(x, dw, *layout)
    return [of_x + of_w]


def _compute(primitive: OpPrimitive, *operands: Any, params: Any) -> list[Any]:
    return _COMPUTED[primitive.operation](params, *operands)


_COMPUTED: dict[str, Callable[..., list[Any]]] = {
    "all_gather": lambda params, x: params.by_lax([x]),
    "routed_moe_dispatch": lambda params, *operands: _in_turn(_compute, params, *operands),
    "moe_layout": _layout,
    "moe_dispatch": _dispatch,
    "moe_combine": _combine,
}


# Lowering.


def _select(
    operation: str, site: LoweringSite, avals: Sequence[Any], params: MoeParams, experts: int = 0
) -> select.Selection:
    """What runs it. `experts`: those of a rank, of a dispatch that may find who goes where."""
    reason = site.reason_for_lax()
    if reason is not None:
        return select.Selection("lax", reason)
    assert site.mesh is not None  # or there would be a reason
    x, dtype = avals[0], avals[0].dtype.name
    places = avals[1] if operation == "moe_dispatch" else avals[2]
    is_empty = x.size == 0 or places.size == 0
    static = select.static_reason(operation, dtype, params.world_size, is_empty=is_empty)
    row = math.prod(x.shape[1:]) * x.dtype.itemsize
    if experts:
        row = -(-row // definitions.PACK_BYTES) * definitions.PACK_BYTES
    selected_by = partial(
        select.select_experts, operation, nbytes=places.shape[1] * row, dtype=dtype,
        ids=math.prod(places.shape[1:]), experts=experts,
    )  # fmt: skip
    return collective.selector(site.mesh, params.axes)(static, selected_by)


def _decide(
    primitive: OpPrimitive,
    site: LoweringSite,
    avals: Sequence[Any],
    params: MoeParams,
    experts: int = 0,
) -> Decision:
    selected = _select(primitive.operation, site, avals, params, experts)

    def lower(ctx: Any, *xs: Any) -> list[Any]:
        if primitive is dispatch_p and not params.bounded:
            received = ctx.avals_out[0]
            nbytes = received.size * received.dtype.itemsize
            what = f"has {received.shape[0]} rows for what it receives, {nbytes} bytes"
            why = "capacity=None has room for all tokens"
            fallback.log_once(primitive.operation, call_sites.caller(), what, why)
        if selected.algorithm == "lax":
            return _lower_to_lax(ctx, primitive, xs, params, selected)
        return collective.lower_to_call(ctx, primitive, xs, site.mesh, params.axes, selected)

    return Decision(lower, lambda: [collective.operation_of(primitive, avals[:1], selected)])


def _lower_to_lax(
    ctx: Any, primitive: OpPrimitive, xs: Sequence[Any], params: MoeParams, selected: Any
) -> list[Any]:
    by_lax = _ByLax(params.axes, primitive.operation, params)
    return collective.lower_to_lax(ctx, primitive, xs, by_lax, selected)


@dataclass(frozen=True)
class _ByLax(Params):
    operation: str
    params: MoeParams

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return _COMPUTED[self.operation](self.params, *xs)


def _decide_layout(site: LoweringSite, avals: Sequence[Any], params: MoeParams) -> Decision:
    # It does not communicate, but the kernel asks the communicator for its rank.
    selected = select.Selection("lax", "on CPU devices")
    if site.platforms == ("cuda",):
        places = _types_of_layout(avals[0], params=params)[0]
        rows = places.update(shape=places.shape[1:2], dtype=np.dtype(np.float32))
        selected = _select("moe_dispatch", site, [rows, places], params)

    def lower(ctx: Any, *xs: Any) -> list[Any]:
        if selected.algorithm == "lax":
            return list(mlir.lower_fun(partial(_layout, params), True)(ctx, *xs))
        groups = partition_lib.partition(site.mesh, params.axes)
        return list(
            jax.ffi.ffi_lowering("jax_intranode_moe_layout")(
                ctx,
                *xs,
                device_ids=np.array(groups.device_ids, np.int64),
                group_size=np.int64(groups.group_size),
                algorithm=np.int32(definitions.ALGORITHMS.index(selected.algorithm)),
                site=collective.site_of(ctx, layout_p.operation),
                capacity=np.int64(params.capacity),
            )
        )

    return Decision(lower, lambda: [])


def _decide_routed(site: LoweringSite, avals: Sequence[Any], params: MoeParams) -> Decision:
    x, ids, _ = avals
    shapes = [x, ids.update(shape=(params.world_size, *ids.shape))]
    if _select("moe_dispatch", site, shapes, params, params.experts).algorithm == "routed_dispatch":
        return _decide(dispatch_p, site, shapes, params, params.experts)

    def bind(primitive: OpPrimitive, *operands: Any, params: Any) -> list[Any]:
        return primitive.bind_at(site, *operands, params=params)

    def lower(ctx: Any, *xs: Any) -> list[Any]:
        return list(mlir.lower_fun(partial(_in_turn, bind, params), True)(ctx, *xs))

    def operations() -> list[Any]:
        sent = ids.update(shape=(2, *ids.shape), dtype=np.dtype(np.float32))
        gathered = all_gather_p.decide(site, [sent], _gather(params)).operations()
        one = _decide(dispatch_p, site, shapes, params)
        return [*gathered, *one.operations()]

    return Decision(lower, operations)


def _decide_tangent(site: LoweringSite, avals: Sequence[Any], params: MoeParams) -> Decision:
    combine = partial(combine_p.bind_at, site, params=params)

    def lower(ctx: Any, *xs: Any) -> list[Any]:
        return list(mlir.lower_fun(partial(_tangent, combine), True)(ctx, *xs))

    one = _decide(combine_p, site, [avals[0], *avals[3:]], params)
    return Decision(lower, lambda: one.operations() * 2)


# Rules.


def _types_of_layout(gathered: Any, *, params: MoeParams) -> list[Any]:
    n, _, tokens, choices = gathered.shape
    shapes = (n, tokens, choices), (tokens,), (params.experts,), (1,), (n,)
    return [gathered.update(shape=shape) for shape in shapes]


def _types_of_routed(x: Any, ids: Any, factors: Any, *, params: MoeParams) -> list[Any]:
    of_all = factors.update(shape=(params.world_size, *factors.shape), weak_type=False)
    bits = ids.update(shape=(params.world_size, 2, *ids.shape), weak_type=False)
    received = x.update(shape=(params.capacity, x.shape[1]), weak_type=False)
    return [received, of_all, *_types_of_layout(bits, params=params)]


def _jvp_routed(
    bind: Any, primals: Sequence[Any], tangents: Sequence[Any], params: MoeParams
) -> tuple[list[Any], list[Any]]:
    results = bind(*primals, params=params)
    _, _, places, ranks, _, used, _ = results
    dx, _, dw = tangents
    moved: list[Any] = [ad.Zero(jax.typeof(v).to_tangent_aval()) for v in results]
    if type(dx) is not ad.Zero:
        (moved[0],) = dispatch_p.bind(dx, places, ranks, used, params=params)
    if type(dw) is not ad.Zero:
        (moved[1],) = all_gather_p.bind(dw, params=_gather(params))
    return results, moved


def _jvp_dispatch(
    bind: Any, primals: Sequence[Any], tangents: Sequence[Any], params: MoeParams
) -> tuple[list[Any], list[Any]]:
    (x, *layout), dx = primals, tangents[0]
    results = bind(x, *layout, params=params)
    if type(dx) is ad.Zero:
        return results, [ad.Zero(jax.typeof(results[0]).to_tangent_aval())]
    return results, bind(dx, *layout, params=params)


def _transpose_dispatch(
    cotangents: Sequence[Any], x: Any, places: Any, ranks: Any, used: Any, params: MoeParams
) -> list[Any]:
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval), None, None, None]
    ones = jnp.ones_like(places, dtype=np.float32)
    return [*combine_p.bind(ct, ones, places, ranks, params=params), None, None, None]


def _jvp_combine(
    bind: Any, primals: Sequence[Any], tangents: Sequence[Any], params: MoeParams
) -> tuple[list[Any], list[Any]]:
    (x, weights, *layout), (dx, dw) = primals, tangents[:2]
    results = bind(*primals, params=params)
    if type(dw) is ad.Zero and type(dx) is ad.Zero:
        return results, [ad.Zero(jax.typeof(results[0]).to_tangent_aval())]
    if type(dw) is ad.Zero:
        return results, bind(dx, weights, *layout, params=params)
    if type(dx) is ad.Zero:
        return results, bind(x, dw, *layout, params=params)
    return results, tangent_p.bind(dx, dw, *primals, params=params)


def _cotangents(
    ct: Any, x: Any, weights: Any, layout: Sequence[Any], params: MoeParams
) -> tuple[Any, Any]:
    """Of the outputs, if there are weights, and of the weights, if there are outputs."""
    places, ranks = layout
    if ct.size == 0 or places.size == 0:
        zeros: Any = jnp.zeros_like(ct, shape=(params.capacity, ct.shape[1]))
        of_choices: Any = jnp.zeros_like(ct, np.float32, shape=places.shape)
        return zeros if weights is not None else None, of_choices if x is not None else None
    used = places.max().reshape(1) + 1
    (rows,) = dispatch_p.bind(ct, places, ranks, used, params=params)
    wide, kept = _wide(rows.dtype), places >= 0
    of_x = of_weights = None
    if weights is not None:
        at = jnp.where(kept, places, params.capacity)
        weight = jnp.zeros_like(weights, shape=(params.capacity,)).at[at].set(weights, mode="drop")
        of_x = (rows.astype(wide) * weight[:, None]).astype(rows.dtype)
    if x is not None:
        products = jnp.sum(rows.astype(wide) * x.astype(wide), axis=1).astype(np.float32)
        of_weights = jnp.where(kept, products[jnp.where(kept, places, 0)], 0)
    return of_x, of_weights


def _transpose_combine(
    cotangents: Sequence[Any], x: Any, weights: Any, *layout: Any, params: MoeParams
) -> list[Any]:
    (ct,) = cotangents
    linear = [ad.is_undefined_primal(v) for v in (x, weights)]
    if type(ct) is ad.Zero:
        zeros = [ad.Zero(v.aval) if ad.is_undefined_primal(v) else None for v in (x, weights)]
        return [*zeros, None, None]
    found = _cotangents(
        ct, None if linear[0] else x, None if linear[1] else weights, layout, params
    )
    return [*found, None, None]


def _jvp_tangent(
    bind: Any, primals: Sequence[Any], tangents: Sequence[Any], params: MoeParams
) -> tuple[list[Any], list[Any]]:
    *floats, places, ranks = primals
    combine = partial(combine_p.bind, params=params)

    def tangent(*xs: Any) -> list[Any]:
        return _tangent(combine, *xs, places, ranks)

    moved = [ad.instantiate_zeros(t) for t in tangents[:4]]
    return jax.jvp(tangent, tuple(floats), tuple(moved))


def _transpose_tangent(
    cotangents: Sequence[Any], dx: Any, dw: Any, x: Any, w: Any, *layout: Any, params: MoeParams
) -> list[Any]:
    (ct,) = cotangents
    linear = [ad.is_undefined_primal(v) for v in (dx, dw)]
    if type(ct) is ad.Zero:
        zeros = [ad.Zero(v.aval) if ad.is_undefined_primal(v) else None for v in (dx, dw)]
        return [*zeros, *[None] * 4]
    found = _cotangents(ct, x if linear[1] else None, w if linear[0] else None, layout, params)
    return [*found, *[None] * 4]


def _batch_routed(
    name: Hashable, size: int, operands: Sequence[Any], dims: Sequence[Any], params: MoeParams
) -> tuple[list[Any], list[Any]]:
    if name in params.axes or dims[1] is not None or dims[2] is not None:
        return _batch(routed_p, name, size, operands, dims, params)
    # Of tokens alone: the weights and the layout are those of all elements.
    xs, ids, factors = jnp.moveaxis(operands[0], dims[0], 0), *operands[1:]
    first, *shared = routed_p.bind(xs[0], ids, factors, params=params)
    _, places, ranks, _, used, _ = shared
    others = [dispatch_p.bind(x, places, ranks, used, params=params)[0] for x in xs[1:]]
    return [jnp.stack([first, *others]), *shared], [0, *[None] * len(shared)]


def _batch(
    primitive: OpPrimitive,
    name: Hashable,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: MoeParams,
) -> tuple[list[Any], list[Any]]:
    """An operation for each element of the batch."""
    if name in params.axes:
        reason = fallback.reason_of_hidden_axis(name)
        computed = jax.vmap(
            partial(_by_lax, reason, primitive, params=params),
            in_axes=tuple(dims), axis_name=name, axis_size=size,
        )(*operands)  # fmt: skip
        return computed, [0] * len(computed)

    def bind(i: int) -> list[Any]:
        xs = [
            x if d is None else lax.index_in_dim(x, i, d, keepdims=False)
            for x, d in zip(operands, dims, strict=True)
        ]
        return primitive.bind(*xs, params=params)

    found = [jnp.stack(of_all) for of_all in zip(*map(bind, range(size)), strict=True)]
    return found, [0] * len(found)


dispatch_p.register(
    abstract_eval=lambda x, *layout, params: [
        x.update(shape=(params.capacity, x.shape[1]), weak_type=False)
    ],
    decide=partial(_decide, dispatch_p),
    jvp=_jvp_dispatch,
    transpose=_transpose_dispatch,
    batch=partial(_batch, dispatch_p),
)
combine_p.register(
    abstract_eval=lambda x, weights, places, ranks, params: [
        x.update(shape=(ranks.shape[0], x.shape[1]), weak_type=False)
    ],
    decide=partial(_decide, combine_p),
    jvp=_jvp_combine,
    transpose=_transpose_combine,
    batch=partial(_batch, combine_p),
)
layout_p.register(
    abstract_eval=_types_of_layout,
    decide=_decide_layout,
    jvp=None,
    transpose=None,
    batch=partial(_batch, layout_p),
)
routed_p.register(
    abstract_eval=_types_of_routed,
    decide=_decide_routed,
    jvp=_jvp_routed,
    transpose=None,
    batch=_batch_routed,
)
tangent_p.register(
    abstract_eval=lambda dx, dw, x, w, places, ranks, params: [
        x.update(shape=(ranks.shape[0], x.shape[1]), weak_type=False)
    ],
    decide=_decide_tangent,
    jvp=_jvp_tangent,
    transpose=_transpose_tangent,
    batch=partial(_batch, tangent_p),
)
