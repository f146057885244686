"""Cases of the collectives, for one process with all devices and for one process per device.

A case is a function that uses all devices of the program, or the first few of them, and raises an
error if a result is wrong. Each process compares the results on its own devices. They must have the
bits of the oracle (a sum in rank order, rounded once), or be close to the result of `jax.lax`.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.native import extension
from jax_intranode._src.ops import collective
from jax_intranode._src.ops.psum import selection
from jax_intranode._src.selection import config, table

FLOATS = ("float32", "bfloat16", "float16")
DTYPES = (*FLOATS, "float64", "int8", "uint8", "int32", "uint32", "int64", "uint64")
COPIED_DTYPES = (*DTYPES, "bool", "int16", "uint16", "complex64", "complex128")
OPERATIONS = ("psum", "psum_scatter", "all_gather", "all_to_all")
# Those whose operand has a part for each rank.
DIVIDED = ("psum_scatter", "all_to_all")


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


# Helpers.


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


def takes_part(mesh: Mesh) -> bool:
    return any(d.process_index == jax.process_index() for d in mesh.devices.flat)


def put(mesh: Mesh, spec: P, value: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, spec), lambda index: value[index]
    )


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


def random(dtype: str, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if np.issubdtype(kind, np.integer):
        info = np.iinfo(kind)
        return generator.integers(info.min, info.max, shape, dtype=kind, endpoint=True)
    return generator.uniform(-1, 1, shape).astype(kind)


def oracle(parts: np.ndarray) -> np.ndarray:
    """The sum over the first axis, in rank order starting from rank 0's value, rounded once."""
    dtype = parts.dtype
    wide = np.float32 if dtype.name in FLOATS else dtype
    total = parts[0].astype(wide)
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total = total + part.astype(wide)
        return total.astype(dtype)


def apply(operation: str, v: Any, axes: Any = "x", lib: Any = jax_intranode) -> Any:
    """Applies an operation to a rank's vector; all but psum are tiled."""
    dimensions = (0, 0) if operation == "all_to_all" else ()
    options = {} if operation == "psum" else {"tiled": True}
    return getattr(lib, operation)(v, axes, *dimensions, **options)


def reference(operation: str, parts: np.ndarray) -> np.ndarray:
    """The results of all ranks, if rank r has the vector parts[r]."""
    n = len(parts)
    if operation == "psum":
        return everywhere(oracle(parts), n)
    if operation == "psum_scatter":
        return oracle(parts).reshape(n, -1)
    if operation == "all_to_all":
        return parts.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1)
    return everywhere(parts.reshape(-1), n)


def compiled_of_ours(f: Any, *args: Any, **options: Any) -> Any:
    """Compiles a program and checks that all its collectives are ours."""
    program = jax.jit(f, **options).lower(*args).compile()
    text = program.as_text()
    assert "jax_intranode_" in text
    assert not re.search(r"\b(all-reduce|all-gather|reduce-scatter|all-to-all)(-start)?\(", text)
    return program


def everywhere(value: np.ndarray, world: int) -> np.ndarray:
    """The sharded result of all ranks, if each rank has the same value."""
    return np.concatenate([value[None]] * world)


@contextlib.contextmanager
def forced(*algorithms: str) -> Iterator[None]:
    """Forces an algorithm at all sizes; of several, each selection takes the next one."""
    before = config.get()
    changed = itertools.cycle([dataclasses.replace(before, algorithm=a) for a in algorithms])
    with mock.patch.object(config, "get", lambda: next(changed)):
        yield


@contextlib.contextmanager
def x64(dtype: str) -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", before or dtype in ("float64", "int64", "uint64"))
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def sharded(f: Any, mesh: Mesh, in_specs: Any, out_specs: Any, check_vma: bool = False) -> Any:
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def psum_of(parts: np.ndarray, mesh: Mesh, *, jit: bool = True) -> jax.Array:
    """The results of all ranks of a psum over "x" to which rank r brings parts[r]."""
    f = sharded(lambda v: jax_intranode.psum(v, "x"), mesh, P("x"), P("x"))
    return (jax.jit(f) if jit else f)(put(mesh, P("x"), parts))


def check_psum(parts: np.ndarray, mesh: Mesh, algorithm: str) -> None:
    with forced(algorithm):
        chosen = selection(mesh, ("x",), (1, *parts.shape[1:]), parts.dtype)
        assert chosen.algorithm == algorithm, chosen
        result = psum_of(parts, mesh)
    check(result, everywhere(oracle(parts), len(parts)))


# Values.


@case(dtype=DTYPES, algorithm=("one_shot", "two_shot"))
def every_dtype_and_count(dtype: str, algorithm: str) -> None:
    mesh = line()
    n = mesh.size
    parts = [random(dtype, (n, count), count) for count in (1, 2, 7, 8, 9, 31, 1000, 2051)]
    f = sharded(lambda vs: [jax_intranode.psum(v, "x") for v in vs], mesh, P("x"), P("x"))
    with x64(dtype), forced(algorithm):
        for part in parts:
            chosen = selection(mesh, ("x",), (1, *part.shape[1:]), part.dtype)
            assert chosen.algorithm == algorithm, chosen
        arrays = [put(mesh, P("x"), part) for part in parts]
        results = compiled_of_ours(f, arrays)(arrays)
    for result, part in zip(results, parts, strict=True):
        check(result, reference("psum", part))


@case(world=(2, 3, 4, 5, 6, 7, 8), algorithm=("one_shot", "two_shot"))
def every_world_size(world: int, algorithm: str) -> None:
    mesh = line(world)
    if takes_part(mesh):
        for dtype, count in (("float32", 1023), ("bfloat16", 77), ("int32", 500)):
            check_psum(random(dtype, (world, count), world), mesh, algorithm)


def special(dtype: str) -> np.ndarray:
    """The extreme values of a type, and the value whose bits are those of an empty word."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return np.array([True, False])
    if kind.kind == "c":
        real = special(kind.type(0).real.dtype.name)
        pairs = np.stack(np.meshgrid(real, real), -1)
        return pairs.view(kind).reshape(-1)
    unsigned = f"u{kind.itemsize}"
    ones = np.array([np.iinfo(unsigned).max], unsigned).view(kind)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        values = np.array([info.min, info.max, 0, 1, info.max - 1], kind)
        return np.concatenate([values, ones])
    finfo = ml_dtypes.finfo(kind)
    values = np.array(
        [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, finfo.max, finfo.min, finfo.tiny], kind
    )
    subnormals = np.array([1, 2, 3], unsigned).view(kind)
    return np.concatenate([values, subnormals, -subnormals, ones])


@case(how=("one_shot", "two_shot", "psum_scatter", "all_gather", "all_to_all"))
def special_values(how: str) -> None:
    """NaN, infinities, signed zeros, subnormals, extreme integers, words of all ones."""
    mesh = line()
    n = mesh.size
    operation = how if how in OPERATIONS else "psum"
    generator = np.random.default_rng(3)
    parts = {}
    for dtype in COPIED_DTYPES if how in ("all_gather", "all_to_all") else DTYPES:
        values = special(dtype)
        count = {"all_gather": 61, "all_to_all": 30 * n}.get(how, 61 * n)
        parts[dtype] = values[generator.integers(0, len(values), (n, count))]
        if np.dtype(dtype).kind not in "biuc":
            parts[dtype][:, :3] = np.array(-0.0, dtype)  # the sum of negative zeros is -0.0
            parts[dtype][:, 3:6] = np.array([1, 2, 3], f"u{np.dtype(dtype).itemsize}").view(dtype)

    def f(tree: Any) -> Any:
        if operation == "psum":  # one psum of the whole tree
            return jax_intranode.psum(tree, "x")
        return {k: apply(operation, v[0])[None] for k, v in tree.items()}

    with x64("float64"):
        arrays = {dtype: put(mesh, P("x"), part) for dtype, part in parts.items()}
        with forced(how if operation == "psum" else "auto"):
            results = compiled_of_ours(sharded(f, mesh, P("x"), P("x")), arrays)(arrays)
        for dtype, part in parts.items():
            check(results[dtype], reference(operation, part))


@case()
def shapes() -> None:
    mesh = line()
    n = mesh.size
    for shape in ((), (1,), (3, 5), (2, 3, 4), (0,), (4, 0)):
        parts = random("float32", (n, *shape), 5)

        def f(v: Any) -> Any:
            return jax_intranode.psum(v[0], "x")[None]

        result = jax.jit(sharded(f, mesh, P("x"), P("x")))(put(mesh, P("x"), parts))
        check(result, everywhere(oracle(parts), n))


@case()
def same_bits_by_every_algorithm() -> None:
    mesh = line()
    parts = random("bfloat16", (mesh.size, 1001), 6) * 100
    results = []
    for algorithm in ("one_shot", "two_shot"):
        with forced(algorithm):
            for jit in (True, False):
                results.append(psum_of(parts, mesh, jit=jit))
    for result in results:
        check(result, everywhere(oracle(parts), mesh.size))


# Groups.


@case(algorithm=("auto", "one_shot", "two_shot"), leaves=(2, 300))
def trees(algorithm: str, leaves: int) -> None:
    """A psum of a pytree has the bits of its leaves' psums, and needs the fewest operations."""
    mesh = line()
    n = mesh.size
    generator = np.random.default_rng(leaves)
    shapes = [(), (1, 1, 3)] + [(int(k),) for k in generator.integers(1, 40, leaves)]
    # jax 0.11.2 crashes when it compiles this, also with lax.psum.
    if jax.devices()[0].platform == "cpu" and jax.__version__ != "0.11.2":
        shapes.insert(1, (0,))
    parts = [
        random(dtype, (n, *shape), 100 + i)
        for i, (dtype, shape) in enumerate(
            (dtype, shape)
            for dtype in ("float32", "bfloat16", "int32")
            for shape in shapes[: 4 + leaves // (1 if dtype == "float32" else 2)]
        )
    ]
    arguments = [put(mesh, P("x"), part) for part in parts]
    f = sharded(lambda xs: jax_intranode.psum({"tree": xs}, "x")["tree"], mesh, P("x"), P("x"))
    with forced(algorithm):
        program = jax.jit(f).lower(arguments).compile()
    operations = sum(
        "custom-call(" in line and "jax_intranode_psum" in line
        for line in program.as_text().splitlines()
    )
    names = [part.dtype.name for part in parts if part.size > 0]
    fewest = sum(math.ceil(names.count(name) / 128) for name in set(names))
    if algorithm == "auto" and leaves > 128:
        assert fewest <= operations < len(parts) / 20  # split into sizes that are faster than lax
    else:
        assert operations == fewest
    for result, part in zip(program(arguments), parts, strict=True):
        check(result, everywhere(oracle(part), n))


@case(devices=4)
def groups_of_a_two_axis_mesh() -> None:
    n = len(jax.devices()) // 2 * 2
    mesh = make_mesh((2, n // 2), ("d", "t"))
    parts = random("float32", (2, n // 2, 130), 7)

    def f(v: Any) -> Any:
        psum = jax_intranode.psum
        return psum(v, "t"), psum(v, "d"), psum(v, ("d", "t")), psum(v, ("t", "d"))

    specs = (P("d", "t"),) * 4
    results = jax.jit(sharded(f, mesh, P("d", "t"), specs))(put(mesh, P("d", "t"), parts))
    over_t = np.stack([oracle(parts[i]) for i in range(2)])[:, None]
    over_d = oracle(parts)[None]
    row_major = oracle(parts.reshape(n, -1))
    column_major = oracle(parts.transpose(1, 0, 2).reshape(n, -1))
    expected = (over_t, over_d, row_major, column_major)
    for result, want in zip(results, expected, strict=True):
        check(result, np.broadcast_to(want, parts.shape))


@contextlib.contextmanager
def ours_up_to(nbytes: int) -> Iterator[None]:
    """Selects our algorithms on the CPU up to this size, even where lax is faster."""
    table_before = table.TABLE
    table.TABLE = {
        key: (*rows[:-1], dataclasses.replace(rows[-1], nbytes=max(nbytes, rows[-1].nbytes)))
        if key[0] == "cpu"
        else rows
        for key, rows in table_before.items()
    }
    try:
        yield
    finally:
        table.TABLE = table_before


# Operations in segments.


@contextlib.contextmanager
def in_segments(nbytes: int) -> Iterator[None]:
    """Selects our algorithms at all sizes, in segments of at most this size."""

    def cut(operation: str, row: table.Row) -> table.Row:
        algorithm = "two_shot" if operation == "psum" else row.algorithm
        threads = min(row.threads, 32)  # so that a GPU has several blocks
        return table.Row(1 << 40, algorithm, threads, row.blocks, nbytes)

    table_before = table.TABLE
    table.TABLE = {key: (cut(key[2], rows[-1]),) for key, rows in table_before.items()}
    try:
        yield
    finally:
        table.TABLE = table_before


def segments_of(text: str) -> list[int]:
    """The number of segments of each of our calls in a compiled program."""
    return [int(number) for number in re.findall(r"segments = (\d+)", text)]


@case(operation=OPERATIONS, dtype=DTYPES)
def segments_of_every_dtype(operation: str, dtype: str) -> None:
    """Sizes around the bounds of segments, and a donated operand."""
    mesh = line()
    n = mesh.size
    item = np.dtype(dtype).itemsize
    counts = [k // item for k in (8, 256, 256 + item, 512, 1000, 2048 - item, 5000)]
    if operation in DIVIDED:
        counts = [k * n for k in counts]
    parts = [random(dtype, (n, count), count) for count in counts]

    def f(vs: Any) -> Any:
        return [apply(operation, v[0])[None] for v in vs]

    with x64(dtype), in_segments(256):
        arrays = [put(mesh, P("x"), part) for part in parts]
        program = compiled_of_ours(
            sharded(f, mesh, P("x"), P("x")), arrays, donate_argnums=0, keep_unused=True
        )
        assert sorted(segments_of(program.as_text())) == [1, 1, 2, 2, 4, 8, 32]
        results = program(arrays)
    for result, part in zip(results, parts, strict=True):
        check(result, reference(operation, part))


@case()
def trees_in_segments() -> None:
    """Trees are summed by one operation, whose segments begin in any of the arrays."""
    mesh = line()
    n = mesh.size
    counts = [*(int(k) for k in np.random.default_rng(7).integers(1, 300, 40)), 9000]
    parts = {
        dtype: [random(dtype, (n, count), count) for count in counts]
        for dtype in ("float32", "bfloat16", "int8")
    }
    arrays = {
        dtype: [put(mesh, P("x"), part) for part in of_dtype] for dtype, of_dtype in parts.items()
    }
    f = sharded(lambda tree: jax_intranode.psum(tree, "x"), mesh, P("x"), P("x"))
    with in_segments(1 << 12):
        program = compiled_of_ours(f, arrays)
        assert sorted(segments_of(program.as_text())) == [4, 8, 16]
        results = program(arrays)
    for dtype, of_dtype in parts.items():
        for result, part in zip(results[dtype], of_dtype, strict=True):
            check(result, reference("psum", part))


@case(which=(0, 1))
def random_program_in_segments(which: int) -> None:
    """Operations of one epoch and of many follow each other, and the epoch passes 2^32."""
    mesh = meshes()[which % len(meshes())]
    if not takes_part(mesh):
        return
    jax_intranode.shutdown()
    jax.clear_caches()
    set_epochs(mesh, 2**32 - 30)
    calls = random_calls(60 + which, 15, mesh)
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


@case(devices=4, seed=(0, 1))
@ours_up_to(2048)
def permuted_devices(seed: int) -> None:
    n = len(jax.devices())
    order = np.random.default_rng(seed).permutation(n)
    mesh = make_mesh((n,), ("x",), order)
    check_psum(random("float32", (n, 99), seed), mesh, "one_shot")
    check_psum(random("float32", (n, 99), seed), mesh, "two_shot")
    parts = random("float32", (n, 33 * n), seed)
    value = put(mesh, P("x"), parts)
    for operation in OPERATIONS[1:]:
        f = sharded(lambda v, o=operation: apply(o, v[0])[None], mesh, P("x"), P("x"))
        check(compiled_of_ours(f, value)(value), reference(operation, parts))


@case()
def device_order_changed_after_tracing() -> None:
    n = len(jax.devices())

    @jax.jit
    def f(v: Any) -> Any:
        body = jax.shard_map(
            lambda w: jax_intranode.psum(w, "x"), in_specs=P("x"), out_specs=P("x"), check_vma=False
        )
        return body(v)

    # Rounding reveals the rank order. If the order is not that of tracing, lax computes the sum.
    parts = random("float32", (n, 200), 8)
    for order in (range(n), range(n)[::-1], range(n)):
        mesh = make_mesh((n,), ("x",), list(order))
        with jax.set_mesh(mesh):
            result = f(put(mesh, P("x"), parts))
        check(result, everywhere(oracle(parts), n), exact=order == range(n))


# Transformations, compared with lax.


def transformed(psum: Any, mesh: Mesh, check_vma: bool) -> dict[str, Any]:
    """Functions of (x, w) that use psum in many ways."""
    x_spec, w_spec = P(None, "x"), P("x", None)

    def layer(x: Any, w: Any) -> Any:
        return psum(jnp.tanh(x @ w), "x")

    smap = functools.partial(sharded, mesh=mesh, check_vma=check_vma)
    replicated = functools.partial(smap, in_specs=(x_spec, w_spec), out_specs=P())

    def total(f: Any) -> Any:
        return lambda x, w: (f(x, w) ** 2).sum()

    def scanned(x: Any, w: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            y = psum(jnp.tanh(carry @ w), "x")
            return carry + 0.1 * y @ w.T, y

        return lax.scan(step, x, None, length=3)[1].sum(0)

    def conditional(x: Any, w: Any) -> Any:
        return lax.cond(w.shape[0] > 0, lambda: psum(x @ w, "x"), lambda: psum(x @ w * 2, "x"))

    def runtime_conditional(x: Any, w: Any) -> Any:
        flag = psum(jnp.sum(x * x), "x") > 0
        return lax.cond(flag, lambda: psum(x @ w, "x"), lambda: psum(x @ w * 2, "x"))

    def inner_gradient(x: Any, w: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda v: (layer(v, w) ** 2).sum())(x)
        return psum(gradient @ w, "x") + value

    def batched(x: Any, w: Any) -> Any:
        return jax.vmap(lambda row: psum(row @ w, "x"))(x)

    def tree(x: Any, w: Any) -> Any:
        a, b = psum({"a": x @ w, "b": (x.sum(),)}, "x").values()
        return a + b[0]

    def replicated_operand(x: Any, w: Any) -> Any:
        return psum(jnp.full((4,), x.shape[0], x.dtype), "x") + psum(w.sum() * x.sum(), "x")

    functions = {
        "forward": replicated(layer),
        "scan": replicated(scanned),
        "cond": replicated(conditional),
        "runtime_cond": replicated(runtime_conditional),
        "remat": replicated(jax.checkpoint(layer)),
        "vmap": replicated(batched),
        "tree": replicated(tree),
        "nested_jit": replicated(jax.jit(layer)),
        "replicated_operand": replicated(replicated_operand),
        "inner_gradient": replicated(inner_gradient),
    }
    for name in ("forward", "scan", "remat", "vmap", "tree", "nested_jit"):
        functions[f"grad_{name}"] = jax.grad(total(functions[name]), argnums=(0, 1))
    functions["value_and_grad"] = jax.value_and_grad(total(functions["forward"]), argnums=1)
    functions["jvp"] = lambda x, w: jax.jvp(functions["forward"], (x, w), (w.T @ w @ w.T, w))
    functions["hessian_vector"] = lambda x, w: jax.jvp(
        jax.grad(total(functions["forward"])), (x, w), (x, w)
    )
    functions["vmap_of_grad"] = jax.vmap(
        lambda x, w: jax.grad(total(functions["forward"]))(x, w), in_axes=(None, 0)
    )
    return functions


TRANSFORMED = (
    "forward",
    "scan",
    "cond",
    "runtime_cond",
    "remat",
    "vmap",
    "tree",
    "nested_jit",
    "replicated_operand",
    "inner_gradient",
    "grad_forward",
    "grad_scan",
    "grad_remat",
    "grad_vmap",
    "grad_tree",
    "grad_nested_jit",
    "value_and_grad",
    "jvp",
    "hessian_vector",
    "vmap_of_grad",
)


@case(name=TRANSFORMED, check_vma=(True, False))
def like_lax(name: str, check_vma: bool) -> None:
    mesh = line()
    n = mesh.size
    x, w = random("float32", (4, 4 * n), 9), random("float32", (4 * n, 4), 10)
    shared = [put(mesh, P(None, "x"), x), put(mesh, P("x", None), w)]
    if name == "vmap_of_grad":
        shared[1] = put(mesh, P(None, "x", None), np.stack([w, 2 * w]))
    before = extension.handler_calls()
    ours = jax.jit(transformed(jax_intranode.psum, mesh, check_vma)[name])(*shared)
    jax.block_until_ready(ours)
    assert extension.handler_calls() > before, "our psum did not run"
    theirs = jax.jit(transformed(lax.psum, mesh, check_vma)[name])(*shared)
    check_like(ours, theirs, 1e-4)


@case()
def what_is_not_ours_is_lax() -> None:
    n = len(jax.devices()) // 2 * 2
    mesh = line(n)
    halves = range(n // 2), range(n // 2, n)

    def f(v: Any) -> Any:
        assert jax_intranode.psum(1, "x") == n and type(jax_intranode.psum(1, "x")) is int
        return (
            jax_intranode.psum(v > 0, "x"),
            jax_intranode.psum(v.astype(jnp.complex64), "x"),
            jax_intranode.psum(v.astype(jnp.int16), "x"),
            jax_intranode.psum(v, "x", axis_index_groups=[list(half) for half in halves]),
        )

    parts = random("float32", (n, 20), 11)
    before = extension.handler_calls()
    positive, complex_, short, by_half = jax.jit(sharded(f, mesh, P("x"), (P("x"),) * 4))(
        put(mesh, P("x"), parts)
    )
    jax.block_until_ready((short, by_half))
    assert extension.handler_calls() == before
    check(positive, everywhere((parts > 0).sum(0, dtype=np.int32), n))
    assert complex_.dtype == jnp.complex64
    sums = [everywhere(oracle(parts[list(half)]), n // 2) for half in halves]
    check(by_half, np.concatenate(sums), exact=False)


# psum_scatter, all_gather and all_to_all.


@case(dtype=("bfloat16", "int8", "float64"), operation=("all_to_all",))
@case(dtype=DTYPES, operation=("psum_scatter", "all_gather"))
def every_dtype_and_count_of_parts(dtype: str, operation: str) -> None:
    mesh = line()
    n = mesh.size
    choose = collective.chooser(operation, mesh, ("x",), np.dtype(dtype))
    counts = [
        count
        for count in (1, 3, 16, 17, 61, 250, 2048)
        if count <= 61 or choose(count * np.dtype(dtype).itemsize).algorithm != "lax"
    ]
    each = n if operation in DIVIDED else 1
    parts = [random(dtype, (n, count * each), count) for count in counts]
    f = sharded(lambda vs: [apply(operation, v[0])[None] for v in vs], mesh, P("x"), P("x"))
    with x64(dtype):
        arrays = [put(mesh, P("x"), part) for part in parts]
        results = compiled_of_ours(f, arrays)(arrays)
    for result, part in zip(results, parts, strict=True):
        check(result, reference(operation, part))


@case(world=(2, 3, 4, 5, 6, 7, 8))
def every_world_size_of_parts(world: int) -> None:
    mesh = line(world)
    if not takes_part(mesh):
        return
    for dtype in ("bfloat16", "int32"):
        parts = random(dtype, (world, world * 7, 5), world)

        def f(v: Any) -> Any:
            scattered = jax_intranode.psum_scatter(v[0], "x", tiled=True)
            whole = jax_intranode.all_gather(scattered, "x", tiled=True)
            exchanged = jax_intranode.all_to_all(v[0], "x", 0, 0, tiled=True)
            return whole[None], exchanged[None]

        whole, exchanged = jax.jit(sharded(f, mesh, P("x"), (P("x"),) * 2))(
            put(mesh, P("x"), parts)
        )
        check(whole, everywhere(oracle(parts), world))
        flat = reference("all_to_all", parts.reshape(world, -1))
        check(exchanged, flat.reshape(parts.shape))


def gathered(name: str, lib: Any, mesh: Mesh, check_vma: bool) -> Any:
    """Functions of (x, w) that use psum_scatter and all_gather in many ways."""
    n = mesh.size
    smap = functools.partial(sharded, mesh=mesh, check_vma=check_vma)
    x_spec = P("x", None, None)

    def both(axis: int, tiled: bool) -> Any:
        def f(x: Any, w: Any) -> Any:
            y = jnp.tanh(x * w)
            if tiled:
                s = lib.psum_scatter(y, "x", scatter_dimension=axis, tiled=True)
            else:
                cut = y.reshape(*y.shape[:axis], n, -1, *y.shape[axis + 1 :])
                s = lib.psum_scatter(cut, "x", scatter_dimension=axis)
            g = lib.all_gather(s * s, "x", axis=axis, tiled=tiled)
            return (g.reshape(y.shape) * y).sum((1, 2))

        return smap(f, in_specs=(x_spec, x_spec), out_specs=P("x"))

    def layer(x: Any, w: Any) -> Any:
        full = lib.all_gather(x, "x", axis=0, tiled=True)
        return lib.psum_scatter(jnp.sin(full * w.sum()), "x", scatter_dimension=0, tiled=True)

    def scanned(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: (layer(c, w) / n, c.sum()), x, None, length=3)[0]

    plain = smap(layer, in_specs=(x_spec, x_spec), out_specs=x_spec)
    functions = {
        **{
            f"axis{axis}_{'tiled' if tiled else 'stacked'}": both(axis, tiled)
            for axis in (0, 1, 2)
            for tiled in (True, False)
        },
        "layer": plain,
        "scan": smap(scanned, in_specs=(x_spec, x_spec), out_specs=x_spec),
        "remat": smap(jax.checkpoint(layer), in_specs=(x_spec, x_spec), out_specs=x_spec),
        "vmap": smap(
            lambda x, w: jax.vmap(layer, in_axes=(2, 2), out_axes=1)(x, w),
            in_specs=(x_spec, x_spec), out_specs=x_spec,
        ),
        "pmean": smap(
            lambda x, w: lib.pmean({"a": x[:, :1, :9], "b": (w.sum(),)}, "x")["a"]
            * lib.pmean(w[:, :1, :9], "x"),
            in_specs=(x_spec, x_spec), out_specs=P() if check_vma else x_spec,
        ),
        "tree": smap(
            lambda x, w: sum(v.sum() for v in lib.all_gather((x, {"w": w}), "x")[1].values()) + x,
            in_specs=(x_spec, x_spec), out_specs=x_spec,
        ),
        "exchanged": smap(
            lambda x, w: lib.all_to_all(lib.all_to_all(x * w, "x", 1, 2, tiled=True), "x", 0, 0)
            .reshape(-1, n, n), in_specs=(x_spec, x_spec), out_specs=x_spec,
        ),
        "replicated": smap(
            lambda x, w: lib.all_gather(jnp.ones((2, 3)), "x", axis=1).sum() * x,
            in_specs=(x_spec, x_spec), out_specs=x_spec,
        ),
    }  # fmt: skip
    if name.startswith("grad_"):
        f = functions[name.removeprefix("grad_")]
        return jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))
    if name == "jvp":
        return lambda x, w: jax.jvp(plain, (x, w), (w, x))
    return functions[name]


GATHERED = (
    *("axis1_tiled", "axis2_stacked", "grad_axis0_stacked", "grad_axis2_tiled"),
    *("layer", "scan", "remat", "vmap", "pmean", "tree", "exchanged", "replicated", "jvp"),
    *("grad_layer", "grad_scan", "grad_remat", "grad_vmap", "grad_pmean"),
    "grad_exchanged",
)


@case(name=GATHERED, check_vma=(True, False))
@ours_up_to(2048)
def parts_like_lax(name: str, check_vma: bool) -> None:
    mesh = line()
    n = mesh.size
    shape = (n * n, n, n)
    x, w = (put(mesh, P("x"), random("float32", shape, seed) / 4) for seed in (21, 22))
    before = extension.handler_calls()
    ours = jax.jit(gathered(name, jax_intranode, mesh, check_vma))(x, w)
    jax.block_until_ready(ours)
    assert extension.handler_calls() > before, "ours did not run"
    check_like(ours, jax.jit(gathered(name, lax, mesh, check_vma))(x, w), 1e-4)


def runs_as_often_as_explained(f: Any, args: Sequence[Any]) -> None:
    """Checks that this process executes each operation of `f` as often as `explain` says."""
    calls = jax_intranode.explain(f)(*args)
    program = jax.jit(f)
    jax.block_until_ready(program(*args))
    before = jax_intranode.usage_counter()
    jax.block_until_ready(program(*args))
    ours = sum(call.times for call in calls if call.algorithm != "lax")
    assert ours > 0, calls
    here = sum(d.process_index == jax.process_index() for d in args[0].sharding.device_set)
    assert jax_intranode.usage_counter() - before == ours * here, calls


@case()
def results_that_a_scan_stacks() -> None:
    """A scan stacks results for its backward pass that others use too. Each call runs once."""
    mesh = line()

    def step(v: Any, w: Any) -> Any:
        whole = jax_intranode.all_gather(v, "x", axis=0, tiled=True)
        part = jax_intranode.psum_scatter(whole * whole * w, "x", scatter_dimension=0, tiled=True)
        total = jax_intranode.psum(part, "x")
        return part * part * total, None

    f = sharded(lambda v, ws: lax.scan(step, v, ws)[0], mesh, (P("x"), P()), P("x"))
    args = (
        put(mesh, P("x"), random("float32", (8 * mesh.size, 128), 23)),
        put(mesh, P(), random("float32", (3, 128), 24)),
    )
    runs_as_often_as_explained(jax.grad(lambda *vs: f(*vs).sum(), argnums=(0, 1)), args)


# Collective matmuls.


def _all_gather_matmul(x: Any, w: Any, axis: Any, *, gather_axis: int = 0) -> Any:
    whole = lax.all_gather(x, axis, axis=gather_axis % x.ndim, tiled=True)
    return [whole @ each for each in w] if isinstance(w, list) else whole @ w


def _matmul_reduce_scatter(x: Any, w: Any, axis: Any, *, scatter_axis: int = 0) -> Any:
    return lax.psum_scatter(x @ w, axis, scatter_dimension=scatter_axis % x.ndim, tiled=True)


def float32_products(function: Any) -> Any:
    """Decorates a case: matmuls of float32 don't use TF32, the default on GPUs."""

    @functools.wraps(function)
    def precise(**chosen: Any) -> None:
        with jax.default_matmul_precision("highest"):
            function(**chosen)

    return precise


# The same functions made of jax.lax.
LAX_MATMULS = types.SimpleNamespace(
    all_gather_matmul=_all_gather_matmul,
    matmul_reduce_scatter=_matmul_reduce_scatter,
    matmul_all_reduce=lambda x, w, axis: lax.psum(x @ w, axis),
)


@case(rows=(1, 127, 129), dtype=("float32", "bfloat16"))
def exact_matmuls(rows: int, dtype: str) -> None:
    """Sums of products of zeros and ones are exact in each dtype."""
    mesh = line()
    n = mesh.size
    generator = np.random.default_rng(rows)

    def ones(*shape: int) -> np.ndarray:
        return generator.integers(0, 2, (n, *shape)).astype(dtype)

    x, long, w, wide = ones(2, rows, 9), ones(2, rows * n, 9), ones(9, 5), ones(9, 13)

    def f(x: Any, long: Any, w: Any, wide: Any) -> Any:
        both, whole = jax_intranode.all_gather_matmul(
            x[0], [w[0], wide[0]], "x", gather_axis=1, return_gathered=True
        )
        part = jax_intranode.matmul_reduce_scatter(long[0], w[0], "x", scatter_axis=1)
        total = jax_intranode.matmul_all_reduce(x[0], wide[0], "x")
        return [v[None] for v in (*both, whole, part, total)]

    arrays = [put(mesh, P("x"), v) for v in (x, long, w, wide)]
    results = jax.jit(sharded(f, mesh, P("x"), P("x")))(*arrays)
    whole = np.concatenate(list(x), 1)
    products = long.astype(np.float32) @ w[:, None].astype(np.float32)
    totals = (x.astype(np.float32) @ wide[:, None].astype(np.float32)).sum(0)
    expected = [
        *(whole[None].astype(np.float32) @ v[:, None].astype(np.float32) for v in (w, wide)),
        everywhere(whole, n),
        np.stack(np.split(products.sum(0), n, axis=1)),
        everywhere(totals, n),
    ]
    for result, want in zip(results, expected, strict=True):
        check(result, want.astype(dtype))


@case(dtype=("float32", "bfloat16"))
@float32_products
def sums_of_products_in_rank_order(dtype: str) -> None:
    """Each rank rounds its product. The products are then summed like any other arrays."""
    mesh = line()
    n = mesh.size
    x, w = random(dtype, (n, 8 * n, 33), 1), random(dtype, (n, 33, 7), 2)

    def f(x: Any, w: Any) -> Any:
        x, w = x[0], w[0]
        part = jax_intranode.matmul_reduce_scatter(x, w, "x")
        total = jax_intranode.matmul_all_reduce(x, w, "x")
        return (x @ w)[None], part[None], total[None]

    program = jax.jit(sharded(f, mesh, P("x"), P("x")))
    products, part, total = program(*(put(mesh, P("x"), v) for v in (x, w)))
    spread = jax.jit(lambda v: v, out_shardings=NamedSharding(mesh, P()))(products)
    want = oracle(np.asarray(spread.addressable_data(0)))
    check(part, want.reshape(part.shape))
    check(total, everywhere(want, n))


@case(check_vma=(True, False), how=("reduce_scatter", "all_reduce"))
@float32_products
def gradients_of_matmuls(check_vma: bool, how: str) -> None:
    """Gradients of a tensor-parallel layer in float32 match those of the whole layer in float64."""
    mesh = line()
    n = mesh.size
    shapes = ((3, 2 * n, 9), (9, 3 * n), (3 * n, 9), (3, 2 * n, 9))
    x, w1, w2, c = (random("float32", shape, seed) for seed, shape in enumerate(shapes))

    def layer(x: Any, w1: Any, w2: Any) -> Any:
        if how == "all_reduce":
            return jax_intranode.matmul_all_reduce(jnp.tanh(x @ w1), w2, "x")
        h = jax_intranode.all_gather_matmul(x, w1, "x", gather_axis=1)
        return jax_intranode.matmul_reduce_scatter(jnp.tanh(h), w2, "x", scatter_axis=1)

    by_rows = P() if how == "all_reduce" else P(None, "x")
    specs = (by_rows, P(None, "x"), P("x"))
    f = sharded(layer, mesh, specs, by_rows, check_vma)
    gradient = jax.jit(jax.grad(lambda x, w1, w2, c: (f(x, w1, w2) * c).sum(), argnums=(0, 1, 2)))
    arrays = [put(mesh, spec, v) for spec, v in zip((*specs, by_rows), (x, w1, w2, c), strict=True)]
    results = gradient(*arrays)
    x, w1, w2, c = (v.astype(np.float64) for v in (x, w1, w2, c))
    h = np.tanh(x @ w1)
    dh = c @ w2.T * (1 - h**2)
    expected = [dh @ w1.T, np.einsum("bsk,bsn->kn", x, dh), np.einsum("bsk,bsn->kn", h, c)]
    for result, want in zip(results, expected, strict=True):
        check(result, want.astype(np.float32), exact=False)


@case(how=("sequence", "columns"))
@float32_products
def gradients_of_matmuls_of_global_arrays(how: str) -> None:
    """A layer under plain jit: its gradients match those in float64."""
    mesh = Mesh(line().devices, ("x",), axis_types=(AxisType.Explicit,))
    n = mesh.size
    shapes = ((3, 2 * n, 9), (9, 3 * n), (3 * n, 9), (3, 2 * n, 9))
    x, w1, w2, c = (random("float32", shape, seed) for seed, shape in enumerate(shapes))
    axis = 1 if how == "sequence" else None
    by_rows = P(None, "x") if how == "sequence" else P()

    def loss(x: Any, w1: Any, w2: Any, c: Any) -> Any:
        h = jax_intranode.column_parallel_matmul(x, w1, "x", sequence_axis=axis)
        y = jax_intranode.row_parallel_matmul(jnp.tanh(h), w2, "x", sequence_axis=axis)
        return (y * c).sum()

    specs = (by_rows, P(None, "x"), P("x"), by_rows)
    arrays = [put(mesh, spec, v) for spec, v in zip(specs, (x, w1, w2, c), strict=True)]
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        calls = jax_intranode.explain(gradient)(*arrays)
        results = gradient(*arrays)
    assert {call.operation for call in calls} == (
        {"all_gather_matmul", "matmul_reduce_scatter"}
        if how == "sequence"
        else {"matmul_all_reduce"}
    )
    x, w1, w2, c = (v.astype(np.float64) for v in (x, w1, w2, c))
    h = np.tanh(x @ w1)
    dh = c @ w2.T * (1 - h**2)
    expected = [dh @ w1.T, np.einsum("bsk,bsn->kn", x, dh), np.einsum("bsk,bsn->kn", h, c)]
    for result, want in zip(results, expected, strict=True):
        check(result, want.astype(np.float32), exact=False)


@case(devices=4, check_vma=(True, False))
@float32_products
def matmuls_on_a_data_and_tensor_mesh(check_vma: bool) -> None:
    """Gradients match lax's with weights replicated over "data" and devices in a random order."""
    n = len(jax.devices()) // 2
    order = np.random.default_rng(5).permutation(2 * n)
    mesh = make_mesh((2, n), ("data", "x"), order)
    values = (random("float32", (4, 3 * n, 5), 1), random("float32", (5, 2 * n), 2))
    specs = (P("data", "x"), P(None, "x"))

    def program(lib: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            a, b = lib.all_gather_matmul(x, [w, jnp.sin(w[:, :1])], "x", gather_axis=1)
            y = lib.matmul_reduce_scatter(jnp.tanh(a) * b, w.T, "x", scatter_axis=1)
            return y * lib.matmul_all_reduce(y, w, "x").sum(-1, keepdims=True)

        f = sharded(layer, mesh, specs, P("data", "x"), check_vma)
        return jax.jit(jax.value_and_grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1)))

    arrays = [put(mesh, spec, v) for spec, v in zip(specs, values, strict=True)]
    before = extension.handler_calls()
    ours = jax.block_until_ready(program(jax_intranode)(*arrays))
    assert extension.handler_calls() > before, "ours did not run"
    check_like(ours, program(LAX_MATMULS)(*arrays), 1e-4)


# Random programs: chains of calls, each of which reads the result of the one before.

WORDS = 64  # size of the carry that each call hands to the next one


@dataclasses.dataclass(frozen=True)
class Call:
    """An operation over axes of a mesh.

    `count` is the number of elements of the operand; of DIVIDED that of a part of it.
    """

    operation: str
    axes: tuple[str, ...]
    dtype: str
    count: int


def random_calls(seed: int, count: int, mesh: Mesh) -> list[Call]:
    """Random calls over single axes of a mesh and over all axes in both orders."""
    generator = np.random.default_rng(seed)
    names = mesh.axis_names
    axes = [(name,) for name in names] + [names, names[::-1]] * (len(names) > 1)
    calls = []
    for _ in range(count):
        operation = str(generator.choice(OPERATIONS))
        copies = operation in ("all_gather", "all_to_all")
        dtypes = (*DTYPES, "int16", "uint16") if copies else DTYPES
        most = {"psum": 1500, "all_to_all": 60}.get(operation, 120)
        calls.append(
            Call(
                operation,
                axes[generator.integers(len(axes))],
                str(generator.choice(dtypes)),
                int(generator.integers(1, most)),
            )
        )
    return calls


def operand(carry: Any, call: Call, k: int, size: int) -> Any:
    """The operand of call k: a hash of the carry, as finite values of the call's dtype."""
    index = np.arange(call.count * (size if call.operation in DIVIDED else 1))
    words = carry[index * 7 % WORDS] * np.uint32(2654435761)
    words = words + (index * 40503 + k).astype(np.uint32)
    words = words ^ (words >> np.uint32(15))
    if call.dtype == "float32":
        return ((words & np.uint32(0x80FFFFFF)) | np.uint32(0x3E000000)).view(np.float32)
    if call.dtype in FLOATS:
        short = ((words & np.uint32(0x83FF)) | np.uint32(0x3C00)).astype(np.uint16)
        return short.view(np.dtype(call.dtype))
    if call.dtype == "float64":
        long = words.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mask, one = np.uint64(0x800FFFFFFFFFFFFF), np.uint64(0x3FE0000000000000)
        return ((long & mask) | one).view(np.float64)
    return words.astype(call.dtype)


def folded(xp: Any, carry: Any, result: Any) -> Any:
    """The next carry. It depends on each bit of the result and on the bit's position."""
    words = result.view(np.dtype(f"u{result.dtype.itemsize}"))
    if words.dtype.itemsize == 8:
        words = words ^ (words >> np.uint64(32))
    words = words.astype(np.uint32) * (np.arange(words.size) * 2 + 1).astype(np.uint32)
    words = xp.pad(words, (0, -words.size % WORDS)).reshape(-1, WORDS)
    return carry * np.uint32(5) + words.sum(0, dtype=np.uint32)


def group_size(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def chain(calls: Sequence[Call], mesh: Mesh) -> Any:
    """The function from all ranks' carries to the carries after the calls."""

    def f(v: Any) -> Any:
        carry = v[0]
        for k, call in enumerate(calls):
            x = operand(carry, call, k, group_size(mesh, call.axes))
            carry = folded(jnp, carry, apply(call.operation, x, call.axes))
        return carry[None]

    return sharded(f, mesh, P(mesh.axis_names), P(mesh.axis_names))


def expected_of_chain(calls: Sequence[Call], mesh: Mesh, carries: np.ndarray) -> np.ndarray:
    ranks = np.arange(mesh.size).reshape(mesh.devices.shape)
    carries = carries.copy()
    for k, call in enumerate(calls):
        others = [name for name in mesh.axis_names if name not in call.axes]
        order = [mesh.axis_names.index(name) for name in (*others, *call.axes)]
        size = group_size(mesh, call.axes)
        for group in ranks.transpose(order).reshape(-1, size):
            operands = np.stack([operand(carries[r], call, k, size) for r in group])
            results = reference(call.operation, operands)
            carries[group] = [
                folded(np, carries[r], result) for r, result in zip(group, results, strict=True)
            ]
    return carries


def random_carries(mesh: Mesh, seed: int) -> tuple[np.ndarray, jax.Array]:
    carries = random("uint32", (mesh.size, WORDS), seed)
    return carries, put(mesh, P(mesh.axis_names), carries)


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


@case()
def explained_alike() -> None:
    """All processes get the same explanation, and the program holds what it says."""
    mesh = line()
    n = mesh.size

    def f(v: Any) -> Any:
        total = jax_intranode.psum((v, v.astype(jnp.int32)), "x")[0]
        part = jax_intranode.psum_scatter(v, "x", scatter_dimension=1, tiled=True)
        return total + jax_intranode.all_gather(part, "x", axis=1, tiled=True)

    program = sharded(f, mesh, P("x"), P("x"))
    argument = jax.ShapeDtypeStruct((n, n), np.float32, sharding=NamedSharding(mesh, P("x")))
    text = str(explanation := jax_intranode.explain(program)(argument))
    assert [call.operation for call in explanation] == ["psum", "psum_scatter", "all_gather"], text
    assert all(call.algorithm != "lax" for call in explanation), text
    assert jax.jit(program).lower(argument).as_text().count("@jax_intranode_") == 3
    digest = np.frombuffer(text.encode().ljust(-len(text) % 4 + len(text)), np.int32)
    mine = jax.make_array_from_callback(
        (n, len(digest)), NamedSharding(mesh, P("x")), lambda _: digest[None]
    )
    spread = sharded(lambda v: lax.pmax(v, "x") - lax.pmin(v, "x"), mesh, P("x"), P("x"))
    check(jax.jit(spread)(mine), np.zeros((n, len(digest)), np.int32))


# Order of calls, delays, replay of CUDA graphs.


@case()
def back_to_back() -> None:
    """Calls of alternating sizes, dtypes and algorithms, without a pause between them."""
    mesh = line()
    n = mesh.size
    generator = np.random.default_rng(12)
    programs, inputs, wants = [], [], []
    for k in range(6):
        kinds = generator.choice(["float32", "bfloat16", "int32", "int8", "float16"], 8)
        parts = [random(d, (n, int(generator.integers(1, 5000))), k) for d in kinds]
        with forced("one_shot" if k % 2 else "two_shot"):
            f = sharded(
                lambda *vs: tuple(jax_intranode.psum(v, "x") for v in vs), mesh, P("x"), P("x")
            )
            arrays = [put(mesh, P("x"), p) for p in parts]
            programs.append(jax.jit(f).lower(*arrays).compile())
        inputs.append(arrays)
        wants.append([everywhere(oracle(p), n) for p in parts])
    # More than 32 executions in flight on 8 CPU devices hang XLA itself, also with lax.psum.
    for _ in range(4):
        order = [k for _ in range(4) for k in generator.permutation(6)]
        results = [(k, programs[k](*inputs[k])) for k in order]
        for k, result in results:
            for got, want in zip(result, wants[k], strict=True):
                check(got, want)


@case(operation=OPERATIONS)
def chain_with_delays(operation: str) -> None:
    """Each rank in turn is late by a random time. Each call reads the result of the last one."""
    mesh = line()
    n = mesh.size
    steps = 4 * n
    count = {"psum": 300, "all_gather": 40}.get(operation, 40 * n)
    late = np.zeros((steps, n), np.int32)
    late[np.arange(steps), np.arange(steps) % n] = np.random.default_rng(13).integers(
        1, 5000, steps
    )

    def following(result: Any) -> Any:
        """The next operand of a rank, made from its result."""
        if operation == "all_gather":
            return result.reshape(n, count).sum(0) % 1000
        return (result % 1000).repeat(count // result.size)

    def f(v: Any) -> Any:
        rank = lax.axis_index("x")

        def step(carry: Any, loops: Any) -> Any:
            start = carry[0] * 0.0 + 0.5
            waste = lax.fori_loop(0, loops[rank], lambda i, s: jnp.sin(s + i), start)
            carry = carry + 0 * waste
            result = apply(operation, carry + rank.astype(carry.dtype))
            return following(result), result

        return lax.scan(step, v[0], late)[1][None]

    parts = random("uint32", (n, count), 13).astype(np.float32) // 2**20
    result = jax.jit(sharded(f, mesh, P("x"), P("x")))(put(mesh, P("x"), parts))
    carry, want = parts, []
    ranks = np.arange(n, dtype=np.float32)[:, None]
    for _ in range(steps):
        want.append(reference(operation, carry + ranks))
        carry = np.stack([following(of_rank) for of_rank in want[-1]])
    check(result, np.stack(want, 1))


@case(devices=2, world=(2, 4, 8))
def independent_calls_of_unequal_cost(world: int) -> None:
    """12 independent calls, which each device may start in an order of its own."""
    mesh = line(world)
    if not takes_part(mesh):
        return

    def f(x: Any, *ws: Any) -> Any:
        total = 0.0
        for w in ws:
            total += jax_intranode.psum(jnp.tanh(x @ w) @ w.T, "x")
        return total

    sizes = np.random.default_rng(14).permutation(
        [8, 16, 64, 128, 256, 512, 8, 700, 300, 32, 1024, 48]
    )
    x = put(mesh, P("x"), random("float32", (16 * world, 128), 15))
    ws = [put(mesh, P(), random("float32", (128, int(s)), int(s)) * 0.1) for s in sizes]
    ours = jax.jit(sharded(f, mesh, (P("x"), *(P() for _ in ws)), P("x")))
    for _ in range(3):
        result = ours(x, *ws)
    with mock.patch.object(jax_intranode, "psum", lax.psum):
        theirs = jax.jit(sharded(lambda *a: f(*a), mesh, (P("x"), *(P() for _ in ws)), P("x")))(
            x, *ws
        )
    check_like(result, theirs, 1e-3)


@case()
def replay_and_eager() -> None:
    """On GPUs XLA replays the graph of a program without calling the handlers."""
    mesh = line()
    n = mesh.size
    parts = random("float32", (n, 700), 16)
    step = np.float32(1 / 64)

    def f(v: Any) -> Any:
        for _ in range(8):
            v = jax_intranode.psum(v, "x") * step
        return v

    program = jax.jit(sharded(f, mesh, P("x"), P("x")))
    value = put(mesh, P("x"), parts)
    want = parts
    for _ in range(8):
        want = everywhere(oracle(want) * step, n)
    counts = []
    for _ in range(12):
        jax.block_until_ready(result := program(value))
        check(result, want)
        del result
        counts.append(extension.handler_calls())
    if jax.devices()[0].platform == "gpu":
        assert counts[-1] == counts[-4], f"handlers are still called: {counts}"
    for _ in range(3):  # eager calls among replayed ones
        check(psum_of(parts, mesh, jit=False), everywhere(oracle(parts), n))
        check(program(value), want)


@case()
def conditional_in_a_graph() -> None:
    """On GPUs XLA captures both branches of a cond and replays the one that is taken."""
    mesh = line()
    n = mesh.size
    parts = random("float32", (n, 300), 17)
    step = np.float32(1 / 64)

    def f(flag: Any, v: Any) -> Any:
        for _ in range(6):
            v = lax.cond(
                flag,
                lambda v: jax_intranode.psum(v, "x") * step,
                lambda v: jax_intranode.psum(v * 2, "x") * step,
                v,
            )
        return v

    program = jax.jit(sharded(f, mesh, (P(), P("x")), P("x")))
    value = put(mesh, P("x"), parts)
    flags = {flag: put(mesh, P(), np.array(flag)) for flag in (True, False)}
    want = {True: parts, False: parts}
    for _ in range(6):
        want = {
            flag: everywhere(oracle(w if flag else 2 * w) * step, n) for flag, w in want.items()
        }
    counts = []
    for k in range(14):
        flag = k % 3 != 0
        jax.block_until_ready(result := program(flags[flag], value))
        check(result, want[flag])
        del result
        counts.append(extension.handler_calls())
    if jax.devices()[0].platform == "gpu":
        assert counts[-1] == counts[-4], f"handlers are still called: {counts}"


@case()
def donated_input() -> None:
    mesh = line()
    n = mesh.size
    parts = random("float32", (n, 512), 17)
    f = jax.jit(
        sharded(lambda v: jax_intranode.psum(v, "x") * 2, mesh, P("x"), P("x")), donate_argnums=0
    )
    for _ in range(5):
        result = f(put(mesh, P("x"), parts))
        check(result, everywhere(oracle(parts) * 2, n))
        result.delete()


@case(operation=OPERATIONS)
@ours_up_to(2048)
def input_overwritten(operation: str) -> None:
    """The operand of a call is overwritten at once, by its own program and by the next one."""
    mesh = line()
    n = mesh.size
    parts = random("uint32", (n, 40 * n), 17).astype(np.float32) // 2**20

    def f(v: Any) -> Any:
        return v + 1, apply(operation, v[0])[None]

    value = put(mesh, P("x"), parts)
    program = compiled_of_ours(sharded(f, mesh, P("x"), P("x")), value, donate_argnums=0)
    assert "input_output_alias" in program.as_text()
    overwrite = jax.jit(lambda v: v + 1, donate_argnums=0)
    alone = jax.jit(sharded(lambda v: apply(operation, v[0])[None], mesh, P("x"), P("x")))
    results = []
    for _ in range(5):
        results.append(alone(value))
        value, result = program(overwrite(value))
        results.append(result)
    for k, result in enumerate(results):
        check(result, reference(operation, parts + k))


@case(operation=OPERATIONS)
def beside_lax(operation: str) -> None:
    """XLA's own collectives right before and right after ours, on the same buffers."""
    mesh = line()
    n = mesh.size
    parts = (random("uint32", (n, 40 * n), 18) // 2**28).astype(np.float32)

    def f(v: Any) -> Any:
        theirs = lax.psum(v[0], "x")
        ours = apply(operation, theirs + v[0])
        after = lax.all_gather(ours, "x").sum(0)
        again = apply(operation, v[0])
        return tuple(r[None] for r in (theirs, ours, after, again, lax.psum(again, "x")))

    program = jax.jit(sharded(f, mesh, P("x"), (P("x"),) * 5))
    value = put(mesh, P("x"), parts)
    total = reference("psum", parts)
    ours, again = reference(operation, total + parts), reference(operation, parts)
    wants = total, ours, reference("psum", ours), again, reference("psum", again)
    for results in [program(value) for _ in range(5)]:
        for result, want in zip(results, wants, strict=True):
            check(result, want)


@case(dtype=("int8", "bfloat16", "int32"))
def results_amid_other_data(dtype: str) -> None:
    """Results of odd sizes go to odd offsets of a larger array. Nothing else in it changes."""
    mesh = line()
    n = mesh.size
    poison = np.array(77, dtype)
    parts = (random("uint8", (n, 40 * n), 19) % 8).astype(dtype)

    def write(xp: Any, result_of: Any, canvas: Any, part: Any) -> Any:
        at = 1
        for k, count in enumerate((1, 3, 9, 17, 31, 33)):
            operation = OPERATIONS[k % len(OPERATIONS)]
            size = n * count if operation in DIVIDED else count
            result = result_of(operation, part[..., k : k + size])
            if xp is np:
                canvas[:, at : at + result.shape[-1]] = result
            else:
                canvas = lax.dynamic_update_slice(canvas, result, (at,))
            at += result.shape[-1] + 1 + k % 2
        return canvas

    def f(canvas: Any, v: Any) -> Any:
        return write(jnp, apply, canvas[0], v[0])[None]

    poisoned = np.full((n, 100 * n), poison)
    arguments = put(mesh, P("x"), poisoned), put(mesh, P("x"), parts)
    f = sharded(f, mesh, (P("x"), P("x")), P("x"))
    program = compiled_of_ours(f, *arguments, donate_argnums=0)
    check(program(*arguments), write(np, reference, poisoned.copy(), parts))


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


@case(operation=OPERATIONS)
@in_segments(256)
def delays_in_segments(operation: str) -> None:
    """As `chain_with_delays`, with several epochs a call."""
    chain_with_delays(operation)


@case()
@in_segments(256)
def graphs_of_segments_in_turn() -> None:
    """As `graphs_in_turn`, with several epochs in most calls."""
    graphs_in_turn()


@case()
def compiling_while_others_wait() -> None:
    """New programs are compiled, loaded and launched while kernels wait for their peers."""
    mesh = line()
    n = mesh.size

    def slow(v: Any) -> Any:
        rank = lax.axis_index("x")
        for k in range(3 * n):
            loops = jnp.where(rank == k % n, 1000, 0)
            late = lax.fori_loop(0, loops, lambda i, s: jnp.sin(s + i), v[0, 0] * 0.0 + 0.5)
            v = jax_intranode.psum(v + 0 * late, "x") / n
        return v

    parts = np.full((n, 64), 3.0, np.float32)
    waiting = jax.jit(sharded(slow, mesh, P("x"), P("x")))
    value = put(mesh, P("x"), parts)
    jax.block_until_ready(waiting(value))
    running = [waiting(value) for _ in range(2)]
    for count in (5, 17, 130, 555):  # each size is a program of its own
        data = random("float32", (n, count), count)
        check(psum_of(data, mesh), everywhere(oracle(data), n))
        running.append(waiting(value))
    for result in running:
        check(result, parts)


def set_epochs(mesh: Mesh, epoch: int) -> None:
    """Sets the epoch at which the next operation of each group of a mesh's devices begins.

    All ranks must call it, before their first operation.
    """
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    assert rendezvous.reason is None and not rendezvous.communicators
    module = extension.module(rendezvous.platform)
    blocks = max(row.blocks for rows in table.TABLE.values() for row in rows)
    for device_id, addresses in rendezvous.addresses.items():
        ordinal = rendezvous_lib.native_ordinal(rendezvous.devices[device_id])
        region_bytes = rendezvous.region_bytes()
        for region in range(rendezvous_lib.REGIONS):
            header = addresses[device_id] + rendezvous_lib.PROBE_BYTES + region * region_bytes
            for block in range(blocks):
                module.write_word(ordinal, header + 4 * block, epoch)


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
