"""Random calls of the collectives, chains of them, and the bits that they must have.

A seed makes the same calls on all ranks. chains.py and the tests run chains: each rank has a carry
of some words. The operand of a call is a hash of the carry, and its result is folded into the next
one, so that a wrong bit anywhere changes what follows. NumPy computes the carries of all ranks.

Results of collective matmuls, and of tokens that went to experts and back, are compared with those
of `jax.lax` in the program itself, on small integers, which have one right sum in any order. The
number of unlike elements is folded.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import cases
import expert_routings
import jax
import jax.numpy as jnp
import numpy as np
import ragged_tables
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src import operations
from jax_intranode._src.native import definitions

FLOATS = ("float32", "bfloat16", "float16", "float64")
_COLLECTIVES = operations.of_kind(operations.COLLECTIVE)
OPERATIONS = tuple(record.name for record in _COLLECTIVES)
SUMS = tuple(record.name for record in _COLLECTIVES if record.reduction == "sum")
# Those that have no derivative.
EXTREMES = tuple(record.name for record in _COLLECTIVES if record.reduction in ("max", "min"))
MATMULS = tuple(record.name for record in operations.of_kind(operations.MATMUL))
EXPERTS = ("moe_dispatch",)  # and back, by moe_combine
# Those whose results are compared in the program.
COMPARED = (*MATMULS, *EXPERTS)
# Those whose operand has a part for each rank.
DIVIDED = tuple(record.name for record in _COLLECTIVES if record.divides and not record.ragged)
# How a chain makes a call. "late": the ranks come at different times.
WAYS = ("plain", "gradient", "vmap", "cond", "scan", "jit", "late", "checkpoint")
# Their cotangents, without check_vma.
_TRANSPOSES = {"psum": "psum", "psum_scatter": "all_gather", "all_gather": "psum_scatter"}

WORDS = 64  # of a carry
_LATE = 1 << 14  # copies of the carry, which a late rank reverses in each turn of its loop


class Seeded:
    """Chooses by a seed."""

    def __init__(self, *seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return int(self._generator.integers(low, high, endpoint=True))

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[self.integer(0, len(values) - 1)]


# Calls.


@dataclass(frozen=True)
class Call:
    """A call over axes of a mesh.

    Attributes:
        operation: one of OPERATIONS or COMPARED.
        axes: in rank order.
        shape: that of a rank's operand.
        dimension: what is scattered or split, or the axis of the result that is gathered; the
            updates for each rank of a ragged all-to-all; the experts of a rank.
        concat: where an all-to-all puts the parts; the columns of a matmul's matrix; the seed of
            the tables of a ragged all-to-all, whose output is the operand with its rows reversed;
            the seed of who goes to which expert.
        tiled: as for the functions, if they have it.
        way: one of WAYS.
        leaves: an operation that takes a tree takes so many arrays, an all-gather matmul so many
            matrices; a token goes to so many experts.
        small: whether the operands are small integers, so that no sum rounds.
        perm: of a permutation, the pairs of source and destination.
    """

    operation: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    dimension: int = 0
    concat: int = 0
    tiled: bool = True
    way: str = "plain"
    leaves: int = 1
    small: bool = False
    perm: tuple[tuple[int, int], ...] = ()

    def apply(self, lib: Any, x: Any) -> Any:
        """The result of this rank, by the functions of a library: ours or `jax.lax`."""
        f, tiled = getattr(lib, self.operation), self.tiled
        if operations.RECORDS[self.operation].takes_many:
            at = [x.size * k // self.leaves for k in range(1, self.leaves)]
            perm = [[*self.perm]] if self.operation == "ppermute" else []
            parts = f(jnp.split(x.reshape(-1), at), self.axes, *perm)
            return jnp.concatenate(parts).reshape(x.shape)
        if operations.RECORDS[self.operation].ragged:
            of_ranks = self._tables(lax.axis_size(self.axes))
            nothing = (x.reshape(-1)[0] != x.reshape(-1)[0]).astype(
                np.int32
            )  # lax maps all or none
            rank = lax.axis_index(self.axes)
            mine = [jnp.asarray(table)[rank] + nothing for table in of_ranks]
            return f(x, x[::-1], *mine, axis_name=self.axes)
        if self.operation == "psum_scatter":
            return f(x, self.axes, scatter_dimension=self.dimension, tiled=tiled)
        if self.operation == "all_gather":
            return f(x, self.axes, axis=self.dimension, tiled=tiled)
        return f(x, self.axes, self.dimension, self.concat, tiled=tiled)

    def expected(self, operands: Sequence[np.ndarray], rank: int) -> np.ndarray:
        """What rank `rank` of a group gets, if rank r has operands[r]."""
        dimension = self.dimension
        if operations.RECORDS[self.operation].ragged:
            outputs = np.stack([x[::-1] for x in operands])
            return ragged_tables.expected(operands, outputs, self._tables(len(operands)))[rank]
        if self.operation == "all_gather":
            joined: Callable[..., np.ndarray] = np.concatenate if self.tiled else np.stack
            return joined(operands, dimension)
        if self.operation == "all_to_all":
            parts = [np.split(x, len(operands), dimension)[rank] for x in operands]
            if self.tiled:
                return np.concatenate(parts, self.concat)
            return np.stack([part.squeeze(dimension) for part in parts], self.concat)
        if self.operation in EXTREMES:
            of = np.maximum if self.operation == "pmax" else np.minimum
            return np.asarray(reduce(of, operands))
        if self.operation == "ppermute":
            found = [operands[source] for source, to in self.perm if to == rank]
            return found[0] if found else np.zeros_like(operands[0])
        with np.errstate(all="ignore"):
            total = operations.total(operands)
        if self.operation == "psum":
            return total
        part = np.split(total, len(operands), dimension)[rank]
        return part if self.tiled else part.squeeze(dimension)

    def _tables(self, ranks: int) -> ragged_tables.Tables:
        """The tables of all ranks of a ragged all-to-all."""
        rng, rows = np.random.default_rng(self.concat), self.shape[0]
        kind = ragged_tables.KINDS[self.concat % len(ragged_tables.KINDS)]
        return ragged_tables.tables(rng, ranks, self.dimension, rows, rows, kind)

    def transposed(self, shape: tuple[int, ...]) -> "Call":
        """The call that makes the operand's cotangent of a cotangent of this shape."""
        if self.operation == "all_to_all":
            return replace(self, shape=shape, dimension=self.concat, concat=self.dimension)
        if self.operation == "ppermute":
            return replace(self, perm=tuple((to, source) for source, to in self.perm))
        return replace(self, shape=shape, operation=_TRANSPOSES[self.operation])

    def unlike(self, lib: Any, operand: Callable[..., Any]) -> Any:
        """How many elements of a call differ from those of `jax.lax`, as an array.

        Args:
            lib: ours, or `jax.lax` where it is accelerated.
            operand: makes an operand, from its number and its shape.
        """
        x, results = operand(1), []
        if self.operation in EXPERTS:
            w = operand(1, (self.shape[0], self.leaves))
            functions: Any = self._experts()
        else:
            w = operand(2, (self.shape[1], self.concat))
            functions = self._matmul(lib), self._matmul(lax, apart=True)
        for f in functions:
            f = self.transformed(f)
            if self.way in ("gradient", "checkpoint"):
                ys, pull = jax.vjp(f, x, w)
                results.append([*ys, *pull([operand(3 + k, y.shape) for k, y in enumerate(ys)])])
            else:
                results.append(f(x, w))
        counts = [jnp.sum(a != b, dtype=jnp.uint32) for a, b in zip(*results, strict=True)]
        return jnp.stack(counts).sum(dtype=jnp.uint32)[None]

    def transformed(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """The function as the call's way wants it, if that is a transformation of a function."""
        ways: dict[str, Callable[..., Any]] = {"jit": jax.jit, "checkpoint": jax.checkpoint}
        return ways[self.way](f) if self.way in ways else f

    def _experts(self) -> Sequence[Callable[[Any, Any], list[Any]]]:
        """Of tokens and weights: a layer whose experts multiply by 1 or 2, and what it computes."""
        rng, (tokens, _), ranks = np.random.default_rng(self.concat), self.shape, self.axes
        n, rank = lax.axis_size(ranks), lax.axis_index(ranks)
        kind = expert_routings.KINDS[self.concat % len(expert_routings.KINDS)]
        experts = n * self.dimension
        of_ranks = expert_routings.routing(rng, n, tokens, self.leaves, experts, kind)
        ids, rows = jnp.asarray(of_ranks)[rank], n * tokens * self.leaves

        def layer(x: Any, w: Any) -> list[Any]:
            received, sizes, state = jax_intranode.moe_dispatch(
                x, ids, w, ranks, num_experts=experts, capacity=rows
            )
            expert = (jnp.arange(rows)[:, None] >= jnp.cumsum(sizes)).sum(1)
            factor = 1 + (rank * self.dimension + expert) % 2
            return [jax_intranode.moe_combine(received * factor[:, None].astype(x.dtype), state)]

        def dense(x: Any, w: Any) -> list[Any]:
            factor = jnp.where(ids < 0, 0, 1 + ids % 2)
            total = (w.astype(jnp.float32) * factor).sum(1)
            return [(x.astype(jnp.float32) * total[:, None]).astype(x.dtype)]

        return layer, dense

    def _matmul(self, lib: Any, apart: bool = False) -> Callable[[Any, Any], list[Any]]:
        """The results of x and w; `apart`: nothing can merge the matmul and the collective."""
        barrier = lax.optimization_barrier if apart else (lambda value: value)

        def of_ours(x: Any, w: Any) -> list[Any]:
            if self.operation != "all_gather_matmul":
                return [getattr(lib, self.operation)(x, w, self.axes)]
            ws = [w, w[::-1]][: self.leaves]
            ys, whole = lib.all_gather_matmul(x, ws, self.axes, return_gathered=True)
            return [*ys, whole]

        def of_lax(x: Any, w: Any) -> list[Any]:
            if self.operation == "all_gather_matmul":
                whole = barrier(lax.all_gather(x, self.axes, tiled=True))
                return [*(whole @ v for v in [w, w[::-1]][: self.leaves]), whole]
            product = barrier(x @ w)
            if self.operation == "matmul_all_reduce":
                return [lax.psum(product, self.axes)]
            return [lax.psum_scatter(product, self.axes, tiled=True)]

        return of_lax if lib is lax else of_ours


def random_call(
    choose: Seeded,
    mesh: Mesh,
    most: dict[str, int],
    *,
    ways: Sequence[str] = WAYS[:1],
    leaves: int = 1,
) -> Call:
    """Makes a call over some axes of a mesh, in any order.

    Args:
        most: for each operation to choose from the greatest number of elements of an operand, or
            of a part of it for each rank; for those of COMPARED the greatest number of columns.
        ways: the ways to choose from.
        leaves: the greatest number of arrays that a call takes.
    """
    operation = choose.one_of([*most])
    axes: tuple[str, ...] = ()
    for _ in range(choose.integer(1, len(mesh.axis_names))):
        axes += (choose.one_of([name for name in mesh.axis_names if name not in axes]),)
    ranks = math.prod(mesh.shape[name] for name in axes)
    if operation in MATMULS:
        # Overlapped ones need columns that are multiples of 8.
        rows, inner, columns = (8 * choose.integer(1, most[operation] // 8) for _ in range(3))
        dtype, way = choose.one_of(FLOATS[:3]), choose.one_of([w for w in ways if w != "vmap"])
        size, matrices = (ranks * rows, inner), choose.integer(1, min(leaves, 2))
        return Call(operation, axes, dtype, size, 0, columns, True, way, matrices, small=True)
    if operation in EXPERTS:
        tokens, hidden = (choose.integer(1, most[operation]) for _ in range(2))
        dtype, way = choose.one_of(FLOATS[:3]), choose.one_of([w for w in ways if w != "vmap"])
        of_rank, seed, chosen = (choose.integer(1, high) for high in (4, 999, leaves))
        size = tokens, hidden
        return Call(operation, axes, dtype, size, of_rank, seed, True, way, chosen, small=True)
    perm: tuple[tuple[int, int], ...] = ()
    if operation == "ppermute":
        axes = tuple(sorted(axes, key=mesh.axis_names.index))  # lax takes no other order
        free = [*range(ranks)]
        for source in range(ranks):
            if choose.integer(0, 2):
                perm = (*perm, (source, free.pop(choose.integer(0, len(free) - 1))))
    copies = operations.RECORDS[operation].reduction is None
    divided, ragged = operation in DIVIDED, operations.RECORDS[operation].ragged
    tiled = choose.one_of((True, False))
    shape = [choose.integer(1, 9) for _ in range(choose.integer(0, 2))]
    if (
        divided or ragged or choose.one_of((True, False))
    ):  # more than a pack, or than a thread handles
        largest = most[operation] // math.prod(shape)
        shape.insert(choose.integer(0, len(shape)), choose.integer(1, max(1, largest)))
    while math.prod(shape) > most[operation]:
        shape[shape.index(max(shape))] //= 2
    dimension = concat = 0
    if divided:
        dimension, concat = (choose.integer(0, len(shape) - 1) for _ in range(2))
        shape[dimension] = ranks * (shape[dimension] if tiled else 1)
    elif ragged:
        dimension, concat = choose.integer(1, 5), choose.integer(0, 999)
    elif operation == "all_gather":
        tiled = tiled and bool(shape)
        dimension = choose.integer(0, len(shape) - (1 if tiled else 0))
    dtype = choose.one_of(operations.COPIED if copies else definitions.DTYPES)
    has_gradient = dtype in FLOATS and operation not in EXTREMES and not ragged
    way = choose.one_of([w for w in ways if has_gradient or w not in ("gradient", "checkpoint")])
    if operation == "all_to_all" and not tiled and way in ("gradient", "checkpoint"):
        concat = dimension  # the gradient by jax.lax raises otherwise (0.10.2 to 0.12)
    leaves = choose.integer(1, leaves) if operations.RECORDS[operation].takes_many else 1
    options = tuple(shape), dimension, concat, tiled, way, leaves
    return Call(operation, axes, dtype, *options, perm=perm)


def groups(mesh: Mesh, axes: Sequence[str]) -> Iterator[list[int]]:
    """The groups of a mesh's devices over some axes, each in rank order, as places in the mesh."""
    others = [name for name in mesh.axis_names if name not in axes]
    order = [mesh.axis_names.index(name) for name in (*others, *axes)]
    places = np.arange(mesh.size).reshape(mesh.devices.shape).transpose(order)
    for group in places.reshape(-1, math.prod(mesh.shape[name] for name in axes)):
        yield [int(place) for place in group]


# Chains.


def operand(
    xp: Any, carry: Any, call: Call, k: int, number: int, shape: tuple[int, ...] | None = None
) -> Any:
    """The operand with this number of call k: a hash of the carry, as finite values.

    Small ones are -1, 0 and 1; from number 2 on few of a column are not 0, so that sums of products
    are small.
    """
    shape, dtype = call.shape if shape is None else shape, call.dtype
    kind = np.dtype(jnp.dtype(dtype))
    index = _places(xp, math.prod(shape) * (2 if kind.kind == "c" else 1))
    words = carry[index * np.uint32(7) % np.uint32(WORDS)] * np.uint32(2654435761)
    words = words + (index * np.uint32(40503) + np.uint32(k + 1000 * number))
    words = words ^ (words >> np.uint32(15))
    if call.small and dtype in FLOATS:
        rare = words // 4 % np.uint32(shape[0] if number > 1 else 1) < 8
        return (rare * ((words % 4).astype(np.int32) % 3 - 1)).astype(kind).reshape(shape)
    if dtype in ("float32", "complex64"):
        values = ((words & np.uint32(0x80FFFFFF)) | np.uint32(0x3E000000)).view(np.float32)
    elif dtype in ("bfloat16", "float16"):
        short = ((words & np.uint32(0x83FF)) | np.uint32(0x3C00)).astype(np.uint16)
        values = short.view(kind)
    elif dtype in ("float64", "complex128"):
        long = words.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mask, one = np.uint64(0x800FFFFFFFFFFFFF), np.uint64(0x3FE0000000000000)
        values = ((long & mask) | one).view(np.float64)
    elif dtype == "bool":
        values = words % 2 == 1
    else:
        values = words.astype(kind)
    if kind.kind == "c":
        values = (values[::2] + 1j * values[1::2]).astype(kind)
    return values.reshape(shape)


def _places(xp: Any, count: int) -> Any:
    """The numbers from 0 on; few of them are a constant of the program, which compiles faster."""
    return (np if count < 1 << 12 else xp).arange(count, dtype=np.uint32)


def folded(xp: Any, carry: Any, result: Any) -> Any:
    """The next carry. It depends on each bit of the result and on the bit's position."""
    result = result.reshape(-1)
    if result.dtype.kind == "c":
        result = xp.stack([result.real, result.imag], -1).reshape(-1)
    if result.dtype == bool:
        result = result.astype(np.uint8)
    words = result.view(np.dtype(f"u{result.dtype.itemsize}"))
    if words.dtype.itemsize == 8:
        words = words ^ (words >> np.uint64(32))
    words = words.astype(np.uint32) * (_places(xp, words.size) * np.uint32(2) + np.uint32(1))
    words = xp.pad(words, (0, -words.size % WORDS)).reshape(-1, WORDS)
    return carry * np.uint32(5) + words.sum(0, dtype=np.uint32)


def chain(
    calls: Sequence[Call], mesh: Mesh, lib: Any = jax_intranode, check_vma: bool = False
) -> Any:
    """A function from all ranks' carries, and a turn, to the carries after each call."""

    def step(call: Call, k: int, carry: Any) -> Any:
        f = call.transformed(partial(call.apply, lib))
        of = partial(operand, jnp, carry, call, k)
        if call.operation in COMPARED:
            results = [call.unlike(lib, of)]
        elif call.way == "vmap":
            results = jax.vmap(f)(jnp.stack([of(0), of(1)]))
        elif call.way in ("gradient", "checkpoint"):
            y, pull = jax.vjp(f, of(0))
            results = [y, *pull(of(1, y.shape))]
        else:
            results = [f(of(0))]
        for result in results:
            carry = folded(jnp, carry, result)
        return carry

    def body(carries: Any, turn: Any) -> Any:
        carry, history = carries[0], []
        for k, call in enumerate(calls):
            after = partial(step, call, k)
            if call.way == "scan":
                carry, _ = lax.scan(partial(_scanned, after), carry, length=2)
            elif call.way == "cond":
                carry = lax.cond((turn + k) % 3 > 0, after, lambda c: c + np.uint32(1), carry)
            else:
                if call.way == "late":
                    # Reverses copies an even number of times. The host reads the condition of
                    # each turn, which takes long where ranks share a GPU: few turns of much work.
                    rank = lax.axis_index(mesh.axis_names)
                    times = 2 * ((7919 * rank + turn) % 5)
                    copies = jnp.tile(carry, _LATE)
                    carry = lax.fori_loop(0, times, lambda _, c: c[::-1], copies)[:WORDS]
                carry = after(carry)
            history.append(carry)
        return jnp.stack(history)[None]

    by_device = P(mesh.axis_names)
    return cases.sharded(body, mesh, (by_device, P()), by_device, check_vma)


def _scanned(after: Callable[[Any], Any], carry: Any, _: None) -> tuple[Any, None]:
    return after(carry), None


def expected_of_chain(
    calls: Sequence[Call], mesh: Mesh, carries: np.ndarray, turn: int = 0
) -> np.ndarray:
    history = []
    for k, call in enumerate(calls):
        carries = carries.copy()
        if call.way == "cond" and (turn + k) % 3 == 0:
            carries += np.uint32(1)
        else:
            for group in groups(mesh, call.axes):
                for _ in range(2 if call.way == "scan" else 1):
                    carries[group] = _after(call, k, carries[group])
        history.append(carries)
    return np.stack(history, 1)


def _after(call: Call, k: int, carries: np.ndarray) -> np.ndarray:
    """The carries of a group after a call."""
    if call.operation in COMPARED:
        return carries * np.uint32(5)  # no element is unlike
    ranks, before, after = range(len(carries)), carries, carries

    def take(call: Call, number: int) -> tuple[int, ...]:
        nonlocal after
        operands = [operand(np, carry, call, k, number) for carry in before]
        results = [call.expected(operands, rank) for rank in ranks]
        after = np.stack([folded(np, *pair) for pair in zip(after, results, strict=True)])
        return results[0].shape

    shape = take(call, 0)
    if call.way == "vmap":
        take(call, 1)
    elif call.way in ("gradient", "checkpoint"):
        take(call.transposed(shape), 1)
    return after


def random_carries(mesh: Mesh, *seed: int) -> tuple[np.ndarray, jax.Array]:
    """Carries of all ranks, on the host and on the devices."""
    words = np.random.default_rng(seed).integers(0, 1 << 32, (mesh.size, WORDS), np.uint32)
    return words, cases.put(mesh, P(mesh.axis_names), words)
