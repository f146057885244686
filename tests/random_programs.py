"""Random programs: chains of calls, each of which reads the result of the one before.

`random_call` makes a call of whatever chooses: a seed, which makes the same one on all ranks, or
hypothesis. The cases here run chains; tests/test_random_calls.py runs calls of any bits.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import cases
import jax
import jax.numpy as jnp
import numpy as np
from cases import (
    COPIED_DTYPES,
    DTYPES,
    OPERATIONS,
    case,
    check,
    compiled_of_ours,
    forced,
    in_segments,
    line,
    make_mesh,
    oracle,
    psum_of,
    put,
    random,
    reference,
    segments_of,
    set_epochs,
    sharded,
    takes_part,
    x64,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_intranode


class Choice(Protocol):
    """Whatever chooses."""

    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""

    def one_of(self, values: Sequence[Any]) -> Any:
        """One of the values."""


class Seeded:
    """Chooses by a seed."""

    def __init__(self, seed: int):
        self._generator = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        return int(self._generator.integers(low, high, endpoint=True))

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[self.integer(0, len(values) - 1)]


# Calls.


@dataclasses.dataclass(frozen=True)
class Call:
    """An operation over axes of a mesh.

    Attributes:
        operation: one of OPERATIONS.
        axes: the axes, in rank order.
        dtype: the dtype.
        shape: the shape of a rank's operand.
        dimension: what is scattered or split, or the axis of the result that is gathered.
        concat: where an all-to-all puts the parts.
        tiled: as for the functions, if they have it.
    """

    operation: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    dimension: int
    concat: int
    tiled: bool

    def apply(self, x: Any) -> Any:
        """The result of this rank."""
        if self.operation == "psum":
            return jax_intranode.psum(x, self.axes)
        f, tiled = getattr(jax_intranode, self.operation), self.tiled
        if self.operation == "psum_scatter":
            return f(x, self.axes, scatter_dimension=self.dimension, tiled=tiled)
        if self.operation == "all_gather":
            return f(x, self.axes, axis=self.dimension, tiled=tiled)
        return f(x, self.axes, self.dimension, self.concat, tiled=tiled)

    def expected(self, operands: Sequence[np.ndarray], rank: int) -> np.ndarray:
        """What rank `rank` of a group gets, if rank r has operands[r]."""
        dimension = self.dimension
        if self.operation == "all_gather":
            joined = np.concatenate if self.tiled else np.stack
            return joined(operands, dimension)
        if self.operation == "all_to_all":
            parts = [np.split(x, len(operands), dimension)[rank] for x in operands]
            if self.tiled:
                return np.concatenate(parts, self.concat)
            return np.stack([part.squeeze(dimension) for part in parts], self.concat)
        total = oracle(np.stack(operands))
        if self.operation == "psum":
            return total
        part = np.split(total, len(operands), dimension)[rank]
        return part if self.tiled else part.squeeze(dimension)


def random_call(choose: Choice, mesh: Mesh, most: dict[str, int], *, empty: bool) -> Call:
    """Makes a call over some axes of a mesh, in any order.

    Args:
        choose: chooses.
        mesh: the mesh.
        most: the greatest number of elements of an operand, or of a part of it for each rank.
        empty: whether operands may have no element.
    """
    operation = choose.one_of(OPERATIONS)
    axes: tuple[str, ...] = ()
    for _ in range(choose.integer(1, len(mesh.axis_names))):
        axes += (choose.one_of([name for name in mesh.axis_names if name not in axes]),)
    ranks = math.prod(mesh.shape[name] for name in axes)
    copies = operation.startswith("all_")
    divided = operation in cases.DIVIDED
    tiled = choose.one_of((True, False))
    fewest = 0 if empty else 1
    shape = [choose.integer(fewest, 9) for _ in range(choose.integer(0, 2))]
    if divided or choose.one_of((True, False)):  # more than a pack, or than a thread handles
        largest = most[operation] // max(1, math.prod(shape))
        shape.insert(choose.integer(0, len(shape)), choose.integer(1, max(1, largest)))
    while math.prod(shape) > most[operation]:
        shape[shape.index(max(shape))] //= 2
    dimension = concat = 0
    if divided:
        dimension, concat = (choose.integer(0, len(shape) - 1) for _ in range(2))
        shape[dimension] = ranks * (max(1, shape[dimension]) if tiled else 1)
    elif operation == "all_gather":
        tiled = tiled and bool(shape)
        dimension = choose.integer(0, len(shape) - (1 if tiled else 0))
        if tiled:  # MLIR refuses to gather a dimension without elements
            shape[dimension] = max(1, shape[dimension])
    dtype = choose.one_of(COPIED_DTYPES if copies else DTYPES)
    return Call(operation, axes, dtype, tuple(shape), dimension, concat, tiled)


def groups(mesh: Mesh, axes: Sequence[str]) -> Iterator[list[int]]:
    """The groups of a mesh's devices over some axes, each in rank order, as places in the mesh."""
    others = [name for name in mesh.axis_names if name not in axes]
    order = [mesh.axis_names.index(name) for name in (*others, *axes)]
    places = np.arange(mesh.size).reshape(mesh.devices.shape).transpose(order)
    for group in places.reshape(-1, math.prod(mesh.shape[name] for name in axes)):
        yield [int(place) for place in group]


# Chains.

WORDS = 64  # size of the carry that each call hands to the next one
# So few elements that all operations are ours on CPU devices.
FEW = {"psum": 1500, "psum_scatter": 120, "all_gather": 120, "all_to_all": 60}


def random_calls(seed: int, count: int, mesh: Mesh) -> list[Call]:
    choose = Seeded(seed)
    return [random_call(choose, mesh, FEW, empty=False) for _ in range(count)]


def operand(carry: Any, call: Call, k: int) -> Any:
    """The operand of call k: a hash of the carry, as finite values of the call's dtype."""
    dtype = np.dtype(call.dtype)
    numbers = math.prod(call.shape) * (2 if dtype.kind == "c" else 1)
    index = np.arange(numbers)
    words = carry[index * 7 % WORDS] * np.uint32(2654435761)
    words = words + (index * 40503 + k).astype(np.uint32)
    words = words ^ (words >> np.uint32(15))
    if call.dtype in ("float32", "complex64"):
        values = ((words & np.uint32(0x80FFFFFF)) | np.uint32(0x3E000000)).view(np.float32)
    elif call.dtype in ("bfloat16", "float16"):
        short = ((words & np.uint32(0x83FF)) | np.uint32(0x3C00)).astype(np.uint16)
        values = short.view(dtype)
    elif call.dtype in ("float64", "complex128"):
        long = words.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mask, one = np.uint64(0x800FFFFFFFFFFFFF), np.uint64(0x3FE0000000000000)
        values = ((long & mask) | one).view(np.float64)
    elif call.dtype == "bool":
        values = words % 2 == 1
    else:
        values = words.astype(call.dtype)
    if dtype.kind == "c":
        values = (values[::2] + 1j * values[1::2]).astype(dtype)
    return values.reshape(call.shape)


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
    words = words.astype(np.uint32) * (np.arange(words.size) * 2 + 1).astype(np.uint32)
    words = xp.pad(words, (0, -words.size % WORDS)).reshape(-1, WORDS)
    return carry * np.uint32(5) + words.sum(0, dtype=np.uint32)


def chain(calls: Sequence[Call], mesh: Mesh) -> Any:
    """The function from all ranks' carries to the carries after the calls."""

    def f(v: Any) -> Any:
        carry = v[0]
        for k, call in enumerate(calls):
            carry = folded(jnp, carry, call.apply(operand(carry, call, k)))
        return carry[None]

    return sharded(f, mesh, P(mesh.axis_names), P(mesh.axis_names))


def expected_of_chain(calls: Sequence[Call], mesh: Mesh, carries: np.ndarray) -> np.ndarray:
    carries = carries.copy()
    for k, call in enumerate(calls):
        for group in groups(mesh, call.axes):
            operands = [operand(carries[place], call, k) for place in group]
            for rank, place in enumerate(group):
                carries[place] = folded(np, carries[place], call.expected(operands, rank))
    return carries


def random_carries(mesh: Mesh, seed: int) -> tuple[np.ndarray, jax.Array]:
    carries = random("uint32", (mesh.size, WORDS), seed)
    return carries, put(mesh, P(mesh.axis_names), carries)


# Cases.


def meshes() -> list[Mesh]:
    """A line of all devices; of 4 or more devices also grids and lines of some of them."""
    n = len(jax.devices())
    found = [line()]
    if n >= 4:
        found += [make_mesh((2, n // 2), ("d", "t")), line(2), line(3)]
    if n >= 6:
        found.append(make_mesh((3, 2), ("d", "t"), (5, 0, 3, 1, 2, 4)))
    return found


@case(which=range(5))
def random_program(which: int) -> None:
    """A chain of random operations, dtypes, sizes, algorithms and groups."""
    mesh = meshes()[which % len(meshes())]
    if not takes_part(mesh):
        return
    jax_intranode.initialize(mesh)
    calls = random_calls(which, 40 if which < 2 else 15, mesh)
    with x64("float64"), forced("one_shot", "two_shot", "two_shot"):
        carries, value = random_carries(mesh, which)
        program = compiled_of_ours(chain(calls, mesh), value)
        want = expected_of_chain(calls, mesh, carries)
        results = [program(value) for _ in range(6)]
        for result in results:
            check(result, want)


@case()
def random_programs_in_turn() -> None:
    """Programs over several meshes start in a random order, without a pause between them."""
    programs = []
    with x64("float64"):
        for seed, mesh in enumerate(meshes()[:3] * 2):
            if not takes_part(mesh):
                continue
            jax_intranode.initialize(mesh)
            calls = random_calls(30 + seed, 4, mesh)
            carries, value = random_carries(mesh, seed)
            with forced("one_shot", "two_shot"):
                program = compiled_of_ours(chain(calls, mesh), value)
            programs.append((seed, program, value, expected_of_chain(calls, mesh, carries)))
        order = np.random.default_rng(31).integers(0, 6, 28)
        results = [
            (program(value), want)
            for chosen in order
            for seed, program, value, want in programs
            if seed == chosen
        ]
        for result, want in results:
            check(result, want)


@case(which=(0, 1))
def random_program_in_segments(which: int) -> None:
    """Operations of one epoch and of many follow each other, and the epoch passes 2^32."""
    mesh = meshes()[which % len(meshes())]
    if not takes_part(mesh):
        return
    jax_intranode.shutdown()
    jax.clear_caches()
    set_epochs(mesh, 2**32 - 30)
    calls = random_calls(70 + which, 15, mesh)
    with x64("float64"), in_segments(300):
        carries, value = random_carries(mesh, which)
        program = compiled_of_ours(chain(calls, mesh), value)
        segments = segments_of(program.as_text())
        assert len(segments) == len(calls) and 1 in segments and max(segments) > 8
        before = jax_intranode.usage_counter()
        for _ in range(3):
            check(program(value), expected_of_chain(calls, mesh, carries))
    # An operation counts once, whatever the number of its segments.
    local = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
    assert jax_intranode.usage_counter() - before == 3 * len(calls) * local


@case()
def graphs_in_turn() -> None:
    """Two programs in turn and eager calls. One process keeps results, so its addresses change.

    On GPUs XLA replays both from graphs. Where addresses have changed it captures them again, on
    each rank at a different time.
    """
    mesh = line()
    first = mesh.devices.flat[0]
    programs = []
    with x64("float64"):
        for seed in (40, 41):
            calls = random_calls(seed, 8, mesh)
            carries, value = random_carries(mesh, seed)
            with forced("one_shot", "two_shot"):
                program = compiled_of_ours(chain(calls, mesh), value)
            programs.append((program, value, expected_of_chain(calls, mesh, carries)))
        parts = random("float32", (mesh.size, 50), 42)
        before = jax_intranode.usage_counter()
        kept = []
        for k in range(9):
            for program, value, want in programs:
                result = program(value)
                check(result, want)
                if first.process_index == jax.process_index():
                    kept.append(jax.device_put(np.ones(1000 * k + 1, np.float32), first))
                    kept.append(result if k % 3 == 1 else None)
            if k % 3 == 2:
                check(psum_of(parts, mesh, jit=False), reference("psum", parts))
        jax.block_until_ready(kept)
    local = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
    assert jax_intranode.usage_counter() - before == (9 * 2 * 8 + 3) * local


@case()
@in_segments(256)
def graphs_of_segments_in_turn() -> None:
    """As `graphs_in_turn`, with several epochs in most calls."""
    graphs_in_turn()


@case(before_wrap=(3, 4))
def epochs_wrap(before_wrap: int) -> None:
    """The epoch passes 2^32."""
    mesh = meshes()[1] if len(jax.devices()) >= 4 else line()
    jax_intranode.shutdown()
    jax.clear_caches()
    set_epochs(mesh, 2**32 - before_wrap)
    calls = random_calls(50, 9, mesh)
    with x64("float64"), forced("one_shot", "two_shot"):
        carries, value = random_carries(mesh, 50)
        program = compiled_of_ours(chain(calls, mesh), value)
        before = jax_intranode.usage_counter()
        for _ in range(3):
            check(program(value), expected_of_chain(calls, mesh, carries))
    local = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
    assert jax_intranode.usage_counter() - before == 3 * 9 * local
