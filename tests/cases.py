"""What cases of the collectives and of what stands on them share.

A case is a function that uses all devices of the program, or the first few of them, and raises an
error if a result is wrong. The modules cases_of_* have the cases; they run in one process with all
devices, and with one process per device. Each process compares the results on its own devices. They
must have the bits of the oracle (a sum in rank order, rounded once).
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.group import agreed, slabs
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.native import extension
from jax_intranode._src.operations import COLLECTIVE, RECORDS, of_kind
from jax_intranode._src.ops import all_reduce
from jax_intranode._src.selection import config, select, table

FLOATS = ("float32", "bfloat16", "float16")
DTYPES = (*FLOATS, "float64", "int8", "uint8", "int32", "uint32", "int64", "uint64")
COPIED_DTYPES = (*DTYPES, "bool", "int16", "uint16", "complex64", "complex128")
# cases_of_ragged.py has those of the ragged one.
OPERATIONS = tuple(record.name for record in of_kind(COLLECTIVE) if not record.ragged)
# Those that run in segments, if they are large.
SEGMENTED = tuple(name for name in OPERATIONS if name != "ppermute")
# Those whose operand has a part for each rank.
DIVIDED = tuple(name for name in OPERATIONS if RECORDS[name].divides)
# Those whose result has the shape of the operand.
KEEPS_SHAPE = tuple(
    name for name in OPERATIONS if not RECORDS[name].divides and not RECORDS[name].gathers
)
# Those that have no derivative.
EXTREMES = tuple(name for name in OPERATIONS if RECORDS[name].reduction in ("max", "min"))


@dataclasses.dataclass(frozen=True)
class Case:
    """A case, its name, and how many devices it needs."""

    name: str
    run: Callable[[], None]
    devices: int


CASES: dict[str, Case] = {}


def case(
    devices: int = 2, into: dict[str, Case] = CASES, **parameters: Sequence[Any]
) -> Callable[[Any], Any]:
    """Registers a function as one case per combination of the parameters' values."""

    def add(function: Any) -> Any:
        combinations: list[dict[str, Any]] = [{}]
        for name, values in parameters.items():
            combinations = [{**c, name: value} for c in combinations for value in values]
        for chosen in combinations:
            name = "-".join([function.__name__, *(str(value) for value in chosen.values())])
            takes = chosen.get("world", devices)
            into[name] = Case(name, functools.partial(function, **chosen), takes)
        return function

    return add


# Meshes and arrays.


def make_mesh(
    shape: Sequence[int], names: Sequence[str], order: Sequence[int] | None = None
) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(shape)])
    if order is not None:
        devices = devices[list(order)]
    return Mesh(devices.reshape(shape), tuple(names), axis_types=(AxisType.Auto,) * len(names))


def line(world: int | None = None) -> Mesh:
    """A mesh of the first `world` devices, by default of all, with one axis "x"."""
    return make_mesh((world or len(jax.devices()),), ("x",))


def group(world: int) -> Mesh:
    """Like `line`, but skips: each number of processes runs the groups of its size."""
    if 1 < jax.process_count() != world:
        pytest.skip(f"{jax.process_count()} processes run no groups of {world}")
    return line(world)


def selection(
    mesh: Mesh, axes: Sequence[str], shape: Sequence[int], dtype: Any
) -> select.Selection:
    """What runs a psum over `axes` of a mesh, for an operand of this shape on each device."""
    return all_reduce.operations("psum", mesh, axes, [shape], np.dtype(dtype))[0][1]


def free_regions() -> None:
    """Frees the slab's regions if many are taken: a program may have fewer partitions than cases.

    In several processes all have to call it, between cases.
    """
    if any(len(r.communicators) > 3 for r in rendezvous_lib._all.values()):
        jax.clear_caches()  # programs from before do not run after shutdown()
        jax_intranode.shutdown()


def takes_part(mesh: Mesh) -> bool:
    return any(d.process_index == jax.process_index() for d in mesh.devices.flat)


def put(mesh: Mesh, spec: P, value: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, spec), lambda index: value[index]
    )


def everywhere(value: np.ndarray, world: int) -> np.ndarray:
    """The sharded result of all ranks, if each rank has the same value."""
    return np.concatenate([value[None]] * world)


def random(dtype: str, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if np.issubdtype(kind, np.integer):
        info = np.iinfo(kind)
        return generator.integers(info.min, info.max, shape, dtype=kind, endpoint=True)
    return generator.uniform(-1, 1, shape).astype(kind)


# Comparison.


def bits(value: np.ndarray) -> np.ndarray:
    """The bits of a value as unsigned integers; all NaNs become the same NaN."""
    value = np.ascontiguousarray(value)
    if value.dtype.kind == "c":
        value = value.view(value.real.dtype)
    if value.dtype.kind not in "biu":
        value = np.where(np.isnan(value), np.array(np.nan, value.dtype), value)
    return value.view(f"u{value.dtype.itemsize}")


def check(result: jax.Array, expected: np.ndarray, *, exact: bool = True) -> None:
    """Compares the shards of this process with the expected global value."""
    assert result.shape == expected.shape, (result.shape, expected.shape)
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
    for shard in result.addressable_shards:
        got, want = np.asarray(shard.data), expected[shard.index]
        if exact:
            words = 2 if got.dtype.kind == "c" else 1
            different = (bits(got) != bits(want)).reshape(*got.shape, words).any(-1)
            assert not different.any(), (
                f"device {shard.device.id}: {different.sum()} of {different.size} elements differ, "
                f"the first at {np.argwhere(different)[0]}: {got[different][0]}, "
                f"not {want[different][0]}"
            )
        else:
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), rtol=2e-5, atol=2e-5
            )


def check_like(ours: Any, theirs: Any, tolerance: float) -> None:
    """Compares the shards of this process in two trees of arrays."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        for p, q in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_allclose(p.data, q.data, rtol=tolerance, atol=tolerance)


def oracle(parts: np.ndarray) -> np.ndarray:
    """The sum over the first axis, in rank order starting from rank 0's value, rounded once."""
    dtype = parts.dtype
    wide = np.float32 if dtype.name in FLOATS else dtype
    total = parts[0].astype(wide)
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total = total + part.astype(wide)
        return total.astype(dtype)


def extreme(operation: str, parts: np.ndarray) -> np.ndarray:
    """The fold of lax.max or lax.min over the first axis: NaN if there is one, +0 above -0."""
    of = np.maximum if operation == "pmax" else np.minimum
    total = parts[0]
    for part in parts[1:]:
        with np.errstate(all="ignore"):  # older versions of NumPy warn of NaN
            found = of(total, part)
        if total.dtype.kind not in "biu":
            zeros = (total == 0) & (part == 0)
            negative = np.signbit(total), np.signbit(part)
            sign = negative[0] & negative[1] if operation == "pmax" else negative[0] | negative[1]
            found = np.where(zeros, np.where(sign, -0.0, 0.0).astype(found.dtype), found)
        total = found
    return total


# Operations and programs.


def shift(n: int) -> list[tuple[int, int]]:
    """The permutation by which each rank sends to the next one."""
    return [(rank, (rank + 1) % n) for rank in range(n)]


def apply(operation: str, v: Any, axes: Any = "x", lib: Any = jax_intranode) -> Any:
    """Applies an operation to a rank's vector: tiled, or to the next rank."""
    if operation == "ppermute":
        return lib.ppermute(v, axes, shift(lax.axis_size(axes)))
    dimensions = (0, 0) if operation == "all_to_all" else ()
    options = {} if operation in KEEPS_SHAPE else {"tiled": True}
    return getattr(lib, operation)(v, axes, *dimensions, **options)


def reference(operation: str, parts: np.ndarray) -> np.ndarray:
    """The results of all ranks, if rank r has the vector parts[r]."""
    n = len(parts)
    if operation == "psum":
        return everywhere(oracle(parts), n)
    if operation in ("pmax", "pmin"):
        return everywhere(extreme(operation, parts), n)
    if operation == "ppermute":
        return np.roll(parts, 1, 0)
    if operation == "psum_scatter":
        return oracle(parts).reshape(n, -1)
    if operation == "all_to_all":
        return parts.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1)
    assert operation == "all_gather", f"no oracle for {operation}"
    return everywhere(parts.reshape(-1), n)


def sharded(f: Any, mesh: Mesh, in_specs: Any, out_specs: Any, check_vma: bool = False) -> Any:
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def psum_of(parts: np.ndarray, mesh: Mesh, *, jit: bool = True) -> jax.Array:
    """The results of all ranks of a psum over "x" to which rank r brings parts[r]."""
    f = sharded(lambda v: jax_intranode.psum(v, "x"), mesh, P("x"), P("x"))
    return (jax.jit(f) if jit else f)(put(mesh, P("x"), parts))


def compiled_of_ours(f: Any, *args: Any, **options: Any) -> Any:
    """Compiles a program and checks that all its collectives are ours."""
    program = jax.jit(f, **options).lower(*args).compile()
    text = program.as_text()
    assert "jax_intranode_" in text
    of_xla = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    assert not re.search(rf"\b({of_xla})(-start)?\(", text)
    return program


# Settings.


@contextlib.contextmanager
def forced(*algorithms: str) -> Iterator[None]:
    """Forces an algorithm at all sizes; of several, each selection takes the next one."""
    before = config.get()
    changed = itertools.cycle([dataclasses.replace(before, algorithm=a) for a in algorithms])
    with mock.patch.object(config, "get", lambda: next(changed)):
        yield


def ours_up_to(nbytes: int) -> Any:
    """Selects our algorithms on the CPU up to this size, even where lax is faster."""

    def longer(*rows: table.Row) -> tuple[table.Row, ...]:
        last = dataclasses.replace(rows[-1], nbytes=max(nbytes, rows[-1].nbytes))
        return *rows[:-1], last

    changed = {key: longer(*rows) for key, rows in table.TABLE.items() if key[0] == "cpu"}
    return mock.patch.object(table, "TABLE", table.TABLE | changed)


def in_segments(nbytes: int) -> Any:
    """Selects our algorithms at all sizes, in segments of at most this size."""

    def cut(operation: str, row: table.Row) -> table.Row:
        if operation not in SEGMENTED:
            return dataclasses.replace(row, nbytes=1 << 40)
        algorithm = RECORDS[operation].by_protocol("two_shot") or row.algorithm
        threads = min(row.threads, 32)  # so that a GPU has several blocks
        return table.Row(1 << 40, algorithm, threads, row.blocks, nbytes)

    changed = {key: (cut(key[2], rows[-1]),) for key, rows in table.TABLE.items()}
    return mock.patch.object(table, "TABLE", changed)


def segments_of(text: str) -> list[int]:
    """The number of segments of each of our calls in a compiled program."""
    return [int(number) for number in re.findall(r"segments = (\d+)", text)]


def set_epochs(mesh: Mesh, epoch: int) -> None:
    """Sets the epoch at which the next operation of each group of a mesh's devices begins.

    All ranks must call it, before their first operation.
    """
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    assert rendezvous.reason is None and not rendezvous.communicators
    module = extension.module(rendezvous.platform)
    blocks = max(row.blocks for rows in table.TABLE.values() for row in rows)
    for device_id, addresses in rendezvous.addresses.items():
        ordinal = agreed.native_ordinal(rendezvous.devices[device_id])
        region_bytes = rendezvous.region_bytes()
        for region in range(slabs.REGIONS):
            header = addresses[device_id] + slabs.PROBE_BYTES + region * region_bytes
            for block in range(blocks):
                module.write_word(ordinal, header + 4 * block, epoch)


def x64(dtype: str) -> Any:
    return jax.enable_x64(jax.config.jax_enable_x64 or dtype in ("float64", "int64", "uint64"))
