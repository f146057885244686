"""ragged_all_to_all: each rank writes slices of its operand into slices of other ranks' outputs."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, mlir
from jax.typing import ArrayLike

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import primitive_rules
from jax_intranode._src.jax_private.lax_collectives import LaxCollective
from jax_intranode._src.native import definitions
from jax_intranode._src.ops import collective, fallback
from jax_intranode._src.ops.annotations import AxisNames
from jax_intranode._src.ops.collective import AllGatherParams, Params, all_gather_p
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Decision, OpPrimitive, nbytes, own_equations
from jax_intranode._src.selection import select

TABLES = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@dataclass(frozen=True)
class RaggedParams(Params):
    """Parameters of `ragged_all_to_all_p` and of the gradient of its operand.

    Attributes:
        groups: its axis_index_groups.
        world_size: number of ranks of a group.
        rows: of the gradient: the rows of the operand.
    """

    groups: tuple[tuple[int, ...], ...] | None
    world_size: int
    rows: int = 0

    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        return [lax.ragged_all_to_all(*xs, axis_name=self.axes, axis_index_groups=self.groups)]

    @classmethod
    def of_lax(cls, of: LaxCollective, world_size: int) -> Params:
        groups = of.index_groups and tuple(map(tuple, of.index_groups))
        return cls(of.axes, groups, len(groups[0]) if groups else world_size)


ragged_all_to_all_p = OpPrimitive("ragged_all_to_all", RaggedParams)
gradient_p = OpPrimitive("gradient_of_ragged_all_to_all")


def ragged_all_to_all(
    operand: ArrayLike,
    output: ArrayLike,
    input_offsets: ArrayLike,
    send_sizes: ArrayLike,
    output_offsets: ArrayLike,
    recv_sizes: ArrayLike,
    *,
    axis_name: AxisNames,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> jax.Array:
    """Sends rows whose numbers are data; takes the place of ``jax.lax.ragged_all_to_all``.

    Each rank has the same number of *updates* for each rank. An update copies rows of the operand
    to rows of the output of that rank. Inside ``jax.shard_map`` over devices of one host, each rank
    writes the rows that it sends, and no more, into the memory of the ranks that get them. Bits are
    kept, except that a floating-point NaN may become another NaN. Where ``jax.lax`` can't run it,
    as on CPU devices, an ``all_gather`` computes what this package does not accelerate.

    Slices of the operand may overlap. Where updates overlap in an output, the last one counts, in
    the order of the rank that sends and of its updates. An empty update does nothing, wherever its
    offsets are. A slice that is not within the operand or the output, or a size that is not the one
    in `recv_sizes`, is an error that names the ranks, the update and the numbers.

    Differentiable with respect to `operand` and `output`: a row that several updates have read gets
    the sum of their gradients, in rank order, in float32, rounded once. The gradient of `output` is
    zero where an update has written.

    Args:
        operand: an array [N, ...], the rows that are sent. Accelerated dtypes: those of
            ``all_to_all``.
        output: an array [M, ...] of the same dtype, with rows of the same shape. The result has
            its values where no update writes.
        input_offsets: the first row of each update in `operand`. Those of rank 0 come first; their
            number is a multiple of the number of ranks.
        send_sizes: the number of rows of each update.
        output_offsets: the first row of each update in the output of the rank that gets it.
        recv_sizes: the number of rows of each update that this rank gets, those from rank 0 first.
        axis_name: the name of a mapped axis, or a tuple of names, with ranks in row-major order.
        axis_index_groups: as in ``jax.lax.ragged_all_to_all``; not accelerated.

    Returns:
        `output` with the rows that this rank gets.

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.ragged_all_to_all``.
        ValueError: shapes or dtypes do not fit together.

    Examples:
        Rank 0 has a row for rank 0 and two for rank 1; rank 1 has one for each:

        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        ... def sent(x, *tables):
        ...     return jax_intranode.ragged_all_to_all(x, 0 * x, *tables, axis_name="model")
        >>> starts, sizes = jnp.array([0, 1, 0, 1]), jnp.array([1, 2, 1, 1])
        >>> places, expected = jnp.array([0, 0, 1, 2]), jnp.array([1, 1, 2, 1])
        >>> sent(jnp.array([1, 2, 3, 4, 5, 6]), starts, sizes, places, expected)
        Array([1, 4, 0, 2, 3, 5], dtype=int32)
    """
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    groups = None
    if axis_index_groups is not None:
        groups = tuple(tuple(map(int, group)) for group in axis_index_groups)
    tables = input_offsets, send_sizes, output_offsets, recv_sizes
    xs = [jnp.asarray(x) for x in (operand, output, *tables)]
    reason = fallback.reason_of_axes(axes)
    if reason is None and not all(isinstance(jax.typeof(x), jax.core.ShapedArray) for x in xs):
        reason = reasons.NOT_AN_ARRAY
    if reason is not None:
        with fallback.to_lax("ragged_all_to_all", reason):
            return _by_gather(_checked(xs, axes, groups), *xs)
    params = _checked(xs, axes, groups)
    over = set(axes).union(*(jax.typeof(x).manual_axis_type.varying for x in xs))
    xs = [collective.varying(x, sorted(over, key=str)) for x in xs]
    with jax.named_scope(ragged_all_to_all_p.scope):
        (result,) = ragged_all_to_all_p.bind(*xs, params=params)
    return result


def _lax_by_gathers(*xs: Any, axis_name: Any, axis_index_groups: Any) -> Any:
    return _by_gather(_checked(xs, axis_name, axis_index_groups), *xs)


def _gpus_need_gathers(avals: Sequence[Any], platforms: Sequence[str]) -> bool:
    # Until 0.11 XLA needs all devices in one process, and crashes if there are no rows. JAX exports
    # no program with XLA's operation.
    is_empty = any(aval.size == 0 for aval in avals)
    in_processes = jax.__version_info__ < (0, 12) and jax.process_count() > 1
    return is_empty or in_processes or len(platforms) > 1


def _checked(xs: Sequence[Any], axes: Any, groups: Any) -> RaggedParams:
    """The parameters of a call; raises the errors of lax, and ValueErrors of its own."""
    types = map(jax.typeof, xs)
    lax.ragged_all_to_all_p.abstract_eval(*types, axis_name=axes, axis_index_groups=groups)
    sizes = {int(lax.psum(1, axes))} if groups is None else set(map(len, groups))
    if len(sizes) != 1:
        raise ValueError(f"ragged_all_to_all: groups of different sizes: {groups}")
    (size,) = sizes
    operand, output, *tables = xs
    if len({x.shape for x in tables}) > 1:
        lengths = ", ".join(f"{name} {len(x)}" for name, x in zip(TABLES, tables, strict=True))
        raise ValueError(f"ragged_all_to_all: the tables have different lengths: {lengths}")
    if operand.dtype != output.dtype:
        raise ValueError(
            f"ragged_all_to_all: operand is {operand.dtype}, output is {output.dtype}; cast one"
        )
    if operand.ndim < 1 or output.ndim < 1 or operand.shape[1:] != output.shape[1:]:
        raise ValueError(
            f"ragged_all_to_all: operand has the shape {operand.shape}, output {output.shape}; "
            "both need one dimension or more, and may differ in the first one only"
        )
    if len(tables[0]) % size != 0:
        raise ValueError(
            f"ragged_all_to_all: {len(tables[0])} updates for {size} ranks; pass as many for each"
        )
    return RaggedParams(axes, groups, size)


# What all ranks know of the updates.


def _rank(params: RaggedParams) -> Any:
    index = lax.axis_index(params.axes)
    if params.groups is None:
        return index
    places = {rank: place for group in params.groups for place, rank in enumerate(group)}
    return jnp.array([places[rank] for rank in sorted(places)])[index]


def _gathered(x: Any, params: RaggedParams, by_lax: bool = False) -> Any:
    """The arrays of all ranks, stacked."""
    if by_lax or params.groups is not None:
        return lax.all_gather(x, params.axes, axis_index_groups=params.groups)
    its_params = AllGatherParams(params.axes, 0, False, params.world_size)
    return collective.bind_or_fall_back(all_gather_p, x, its_params)


def _int32(table: Any) -> Any:
    """A table as kernels take it. What is no int32 lies outside of any array, and stays so."""
    if table.dtype == np.int32:
        return table
    most = np.iinfo(np.int32)
    bounds = np.iinfo(table.dtype)
    return jnp.clip(table, max(bounds.min, most.min), min(bounds.max, most.max)).astype(np.int32)


def _sent(tables: Sequence[Any], params: RaggedParams, by_lax: bool = False) -> list[Any]:
    """input_offsets, send_sizes and output_offsets of all ranks: of each [ranks, updates]."""
    stacked = jnp.stack([_int32(table) for table in tables[:3]])
    return list(jnp.moveaxis(_gathered(stacked, params, by_lax), 1, 0))


def _received(of_all: Any, params: RaggedParams) -> Any:
    """For each rank, what `_sent` says of the updates that it gets, in their order."""
    n = params.world_size
    return of_all.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1)


def _over_rows(mask: Any, like: Any) -> Any:
    return lax.expand_dims(mask, tuple(range(mask.ndim, like.ndim)))


@own_equations()
def _by_gather(params: RaggedParams, operand: Any, output: Any, *tables: Any) -> Any:
    """The operation by all-gathers."""
    if operand.size == 0 or output.size == 0:
        return output
    of_all = _sent(tables, params, by_lax=True)
    starts, sizes, places = (_received(x, params)[_rank(params)] for x in of_all)
    rows = _gathered(operand, params, by_lax=True)
    rows = rows.reshape(-1, *operand.shape[1:])
    last, row = _last_writer(places, sizes, output.shape[0]), jnp.arange(output.shape[0])
    source = last // (len(sizes) // params.world_size)
    taken = rows[
        jnp.clip(source * len(operand) + starts[last] + row - places[last], 0, len(rows) - 1)
    ]
    return jnp.where(_over_rows(last >= 0, output), taken, output)


def _last_writer(places: Any, sizes: Any, rows: int) -> Any:
    """For each row of an output the last update that writes it; -1 for none."""
    row, number = jnp.arange(rows), jnp.arange(len(sizes))[:, None]
    writes = (row >= places[:, None]) & (row < (places + sizes)[:, None])
    return jnp.max(jnp.where(writes, number, -1), axis=0)


# Selection and lowering.


def _select(site: LoweringSite, avals: Sequence[Any], params: RaggedParams) -> select.Selection:
    operand, output, table = avals[:3]
    reason = site.reason_for_lax() or (reasons.INDEX_GROUPS if params.groups else None)
    if reason is not None:
        return select.Selection("lax", reason)
    assert site.mesh is not None  # or there would be a reason
    n, updates, dtype = params.world_size, table.shape[0], operand.dtype.name
    name = ragged_all_to_all_p.operation
    is_empty = operand.size == 0 or output.size == 0
    static = select.static_reason(name, dtype, n, is_empty=is_empty)
    if static is None and updates > definitions.MAX_UPDATES:
        reason = reasons.TOO_MANY_UPDATES.of(updates=updates, most=definitions.MAX_UPDATES)
        static = select.Selection("lax", reason)

    def choose(epoch_buffer_bytes: int, **facts: Any) -> select.Selection:
        sizes = {"nbytes": min(max(1, nbytes(operand) // n), 1 << 30), "dtype": dtype}
        found = select.select(name, epoch_buffer_bytes=epoch_buffer_bytes, **sizes, **facts)
        if found.algorithm == "lax":
            return found
        # Notices, packets of 32 bytes for each update and block, take at most half.
        room = epoch_buffer_bytes // (4 * definitions.PACK_BYTES * updates)
        if room == 0:
            no_room = reasons.UPDATES_IN_EPOCH_BUFFER.of(updates=updates, has=epoch_buffer_bytes)
            return select.Selection("lax", no_room)
        if facts["hardware"] == "cpu":
            return replace(found, reason="lax has none on CPU devices")
        # Each block gets all notices: of many, fewer blocks with as many threads.
        threads = max(found.threads, 512 if updates > 32 else 0)
        blocks = min(-(-found.blocks * found.threads // threads), room)
        return replace(found, blocks=blocks, threads=threads)

    return collective.selector(site.mesh, params.axes)(static, choose)


def _decide(site: LoweringSite, avals: Sequence[Any], params: RaggedParams) -> Decision:
    selected = _select(site, avals, params)

    def lower(ctx: Any, *xs: Any) -> list[Any]:
        if selected.algorithm == "lax":
            return collective.lower_to_lax(ctx, ragged_all_to_all_p, xs, params, selected)
        types, operands = list(avals), list(xs)
        for i, aval in enumerate(avals[2:], 2):
            if aval.dtype != np.int32:
                types[i] = aval.update(dtype=np.dtype(np.int32), weak_type=False)
                (operands[i],) = collective.arranged(ctx, _int32, xs[i], aval, types[i])
        return collective.lower_to_call(
            *(ctx.replace(avals_in=types), ragged_all_to_all_p, operands, site.mesh, params.axes),
            *(selected, types[:1]),
            aliases={1: 0},
        )

    return Decision(
        lower, lambda: [collective.operation_of(ragged_all_to_all_p, avals[:1], selected)]
    )


def _decide_gradient(site: LoweringSite, avals: Sequence[Any], params: RaggedParams) -> Decision:
    ct, *tables = avals
    operand = ct.update(shape=(params.rows, *ct.shape[1:]))
    exchange = partial(ragged_all_to_all_p.bind_at, site)

    def lower(ctx: Any, *xs: Any) -> list[Any]:
        back = mlir.lower_fun(lambda *vs: _sum_of_reads(exchange, params, *vs), False)
        return list(back(ctx, *xs))

    return Decision(lower, lambda: _decide(site, [ct, operand, *tables], params).operations())


# Rules.


def _abstract_eval(operand: Any, output: Any, *tables: Any, params: RaggedParams) -> list[Any]:
    return [output.update(weak_type=False)]


def _abstract_eval_gradient(ct: Any, *tables: Any, params: RaggedParams) -> list[Any]:
    return [ct.update(shape=(params.rows, *ct.shape[1:]), weak_type=False)]


def _jvp(
    bind: Any, primals: Sequence[Any], tangents: Sequence[Any], params: RaggedParams
) -> tuple[list[Any], list[Any]]:
    """Both operations are linear in all but the tables."""
    moving = len(primals) - len(TABLES)
    results = bind(*primals, params=params)
    if all(type(t) is ad.Zero for t in tangents[:moving]):
        return results, [ad.Zero(jax.typeof(results[0]).to_tangent_aval())]
    moved = [ad.instantiate_zeros(t) for t in tangents[:moving]]
    return results, list(bind(*moved, *primals[moving:], params=params))


def _transpose(cotangents: Sequence[Any], *operands: Any, params: RaggedParams) -> list[Any]:
    (ct,) = cotangents
    operand, output, *tables = operands
    none = [None] * len(TABLES)
    if type(ct) is ad.Zero:
        zeros = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands[:2]]
        return [*zeros, *none]
    of_operand = of_output = None
    if ad.is_undefined_primal(operand):
        its_params = replace(params, rows=operand.aval.shape[0])
        (of_operand,) = gradient_p.bind(ct, *tables, params=its_params)
    if ad.is_undefined_primal(output):
        _, sizes, places = (_received(x, params)[_rank(params)] for x in _sent(tables, params))
        written = _last_writer(places, sizes, len(ct)) >= 0
        of_output = jnp.where(_over_rows(written, ct), jnp.zeros_like(ct), ct)
    return [of_operand, of_output, *none]


def _transpose_gradient(cotangents: Sequence[Any], *operands: Any, params: Any) -> list[Any]:
    moved, *tables = operands

    def back(cts: list[Any]) -> list[Any]:
        over = sorted(jax.typeof(cts[0]).manual_axis_type.varying, key=str)
        zeros = collective.varying(jnp.zeros(moved.aval.shape, cts[0].dtype), over)
        return ragged_all_to_all_p.bind(*cts, zeros, *tables, params=replace(params, rows=0))

    return [*collective.transpose(back, cotangents, [moved]), *[None] * len(TABLES)]


def _sum_of_reads(exchange: Callable[..., Any], params: RaggedParams, ct: Any, *tables: Any) -> Any:
    """The gradient of the operand: each row of `ct` goes back to the row that was written there.

    The rows go back one behind the other, in the order of the table, at most as many at a time as
    the operand has: if no slices of the operand overlap, in one exchange. All ranks know all
    tables, so they make equally many exchanges.
    """
    n, me, rows = params.world_size, _rank(params), params.rows
    shape, over = (rows, *ct.shape[1:]), sorted(jax.typeof(ct).manual_axis_type.varying, key=str)

    def zeros(dtype: Any) -> Any:
        return collective.varying(jnp.zeros(shape, dtype), over)

    if ct.size == 0 or rows == 0:
        return zeros(ct.dtype)
    starts, sizes, places = _sent(tables, params)
    updates = sizes.shape[1] // n
    behind = jnp.cumsum(sizes, axis=1) - sizes
    last = _received(places, params), _received(sizes, params)
    row = jnp.arange(rows)

    def once(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        first, total = carry
        skipped = jnp.maximum(first - behind, 0)
        count = jnp.clip(first + rows - behind, 0, sizes) - jnp.minimum(skipped, sizes)
        count = jnp.maximum(count, 0)
        to = behind + skipped - first

        def of_me(x: Any) -> Any:
            return _received(x, params)[me]

        back = of_me(places + skipped), of_me(count), of_me(to), count[me]
        (found,) = exchange(ct, zeros(ct.dtype), *back, params=replace(params, rows=0))
        begin = (starts + skipped)[me][:, None]
        reads = (row >= begin) & (row < begin + count[me][:, None])
        order = jnp.cumsum(reads, axis=0) * reads

        def add(turn: Any, total: Any) -> Any:
            """Adds to each row the next update that has read it."""
            is_next = order == turn + 1
            update = jnp.argmax(is_next, axis=0)
            place = places[me][update] + row - starts[me][update]
            peer, number = update // updates, me * updates + update % updates
            its_places, its_sizes = (x[peer] for x in last)
            later = jnp.arange(its_sizes.shape[1]) > number[:, None]
            begins, ends = its_places, its_places + its_sizes
            lost = later & (place[:, None] >= begins) & (place[:, None] < ends)
            counts = is_next.any(axis=0) & ~lost.any(axis=1)
            at = jnp.clip(to[me][update] + row - begin[update, 0], 0, rows - 1)
            return total + jnp.where(_over_rows(counts, found), found[at], 0).astype(total.dtype)

        return first + rows, lax.fori_loop(0, order.max(), add, total)

    most = sizes.sum(axis=1).max()
    total = zeros(jnp.promote_types(ct.dtype, jnp.float32))
    first = collective.varying(jnp.int32(0), over)
    _, total = lax.while_loop(lambda carry: carry[0] < most, once, (first, total))
    return total.astype(ct.dtype)


def _batch(
    primitive: OpPrimitive,
    name: Hashable,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: RaggedParams,
) -> tuple[list[Any], list[Any]]:
    """Batches lie one behind the other, and each rank has the updates of all of them."""
    moving = len(operands) - len(TABLES)

    def front(x: Any, d: int | None) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)

    xs = [front(x, d) for x, d in zip(operands, dims, strict=True)]
    if name in params.axes:
        by_lax = partial(_by_lax, primitive, params)
        reason = fallback.reason_of_hidden_axis(name)
        with fallback.to_lax(ragged_all_to_all_p.operation, reason):
            return jax.vmap(by_lax, axis_name=name, axis_size=size)(*xs), [0]
    starts, sizes, places, expected = map(_int32, xs[moving:])

    def behind(first: Any, rows: int) -> Any:
        """The first rows in all batches. What is outside of its own batch stays outside of all."""
        at = first + jnp.arange(size, dtype=np.int32)[:, None] * rows
        outside = jnp.where(first < 0, first, first + size * rows)
        return jnp.where((first >= 0) & (first <= rows - sizes), at, outside)

    starts = behind(starts, xs[0].shape[1] if moving == 2 else params.rows)
    places = behind(places, xs[moving - 1].shape[1])
    tables = [x.T.reshape(-1) for x in (starts, sizes, places, expected)]
    moved = [x.reshape(-1, *x.shape[2:]) for x in xs[:moving]]
    its_params = replace(params, rows=params.rows * size)
    (found,) = primitive.bind(*moved, *tables, params=its_params)
    return [found.reshape(size, -1, *found.shape[1:])], [0]


def _by_lax(primitive: OpPrimitive, params: RaggedParams, *xs: Any) -> list[Any]:
    if primitive is ragged_all_to_all_p:
        return [_by_gather(params, *xs)]
    return [_sum_of_reads(lambda *vs, params: [_by_gather(params, *vs)], params, *xs)]


# Where XLA has none, all-gathers take its place, also in programs that call lax.
primitive_rules.lower_otherwise(lax.ragged_all_to_all_p, "cpu", _lax_by_gathers)
primitive_rules.lower_otherwise(
    lax.ragged_all_to_all_p, "cuda", _lax_by_gathers, where=_gpus_need_gathers
)
ragged_all_to_all_p.register(
    abstract_eval=_abstract_eval,
    decide=_decide,
    jvp=_jvp,
    transpose=_transpose,
    batch=partial(_batch, ragged_all_to_all_p),
)
gradient_p.register(
    abstract_eval=_abstract_eval_gradient,
    decide=_decide_gradient,
    jvp=_jvp,
    transpose=_transpose_gradient,
    batch=partial(_batch, gradient_p),
)
