"""Cases of the collectives: values, groups, and calls in any order."""

import math
from collections.abc import Sequence
from typing import Any

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from cases import OPERATIONS, apply, case, check, compiled_of_ours, line, put, random, sharded, x64
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.ops import collective

# Values.


def check_counts(mesh: Mesh, dtype: str, how: str, counts: Sequence[int]) -> None:
    """Vectors of each length, by a psum by an algorithm, or by another operation."""
    n = mesh.size
    operation, algorithm = (how, "auto") if how in OPERATIONS else ("psum", how)
    of_rank = n if operation in cases.DIVIDED else 1
    with x64(dtype), cases.forced(algorithm):
        choose = collective.chooser(operation, mesh, ("x",), np.dtype(dtype))
        chosen = {k: choose(k * np.dtype(dtype).itemsize).algorithm for k in counts}
        assert operation != "psum" or set(chosen.values()) == {algorithm}, chosen
        assert all(chosen[count] != "lax" for count in counts if count <= 61), chosen
        parts = [
            random(dtype, (n, count * of_rank), count) for count in counts if chosen[count] != "lax"
        ]
        f = sharded(lambda vs: [apply(operation, v[0])[None] for v in vs], mesh, P("x"), P("x"))
        arrays = [put(mesh, P("x"), part) for part in parts]
        results = compiled_of_ours(f, arrays)(arrays)
    for result, part in zip(results, parts, strict=True):
        check(result, cases.reference(operation, part))


@case(dtype=("bfloat16", "int8", "float64"), how=("all_to_all", "ppermute"))
@case(
    dtype=cases.DTYPES, how=("one_shot", "two_shot", "psum_scatter", "all_gather", "pmax", "pmin")
)
def every_dtype_and_count(dtype: str, how: str) -> None:
    check_counts(line(), dtype, how, (1, 2, 7, 16, 17, 61, 2051))


@case(world=(2, 3, 4, 5, 6, 7, 8))
def every_world_size(world: int) -> None:
    mesh = line(world)
    if cases.takes_part(mesh):
        for how in ("one_shot", "two_shot", "psum_scatter", "all_gather", "all_to_all"):
            for dtype in ("float32", "bfloat16", "int32"):
                check_counts(mesh, dtype, how, (35, 1023))


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


@case(how=("one_shot", "two_shot", *(o for o in OPERATIONS[1:] if o not in cases.EXTREMES)))
@case(how=("pmax", "pmin"), algorithm=("one_shot", "two_shot"))
def special_values(how: str, algorithm: str = "auto") -> None:
    """NaN, infinities, signed zeros, subnormals, extreme integers, words of all ones."""
    mesh = line()
    n = mesh.size
    operation = how if how in OPERATIONS else "psum"
    generator = np.random.default_rng(3)
    parts = {}
    for dtype in cases.DTYPES if RECORDS[operation].reduction else cases.COPIED_DTYPES:
        values = special(dtype)
        count = {"all_gather": 61, "all_to_all": 30 * n, "ppermute": 61}.get(how, 61 * n)
        parts[dtype] = values[generator.integers(0, len(values), (n, count))]
        if np.dtype(dtype).kind not in "biuc":
            parts[dtype][:, :3] = np.array(-0.0, dtype)  # the sum of negative zeros is -0.0
            parts[dtype][:, 3:6] = np.array([1, 2, 3], f"u{np.dtype(dtype).itemsize}").view(dtype)

    def f(tree: Any) -> Any:
        if operation in cases.KEEPS_SHAPE:  # one call with the whole tree
            return apply(operation, tree)
        return {k: apply(operation, v[0])[None] for k, v in tree.items()}

    with x64("float64"):
        arrays = {dtype: put(mesh, P("x"), part) for dtype, part in parts.items()}
        with cases.forced(how if operation == "psum" else algorithm):
            results = compiled_of_ours(sharded(f, mesh, P("x"), P("x")), arrays)(arrays)
        for dtype, part in parts.items():
            check(results[dtype], cases.reference(operation, part))


@case(operation=("all_gather", "all_to_all", "ppermute"))
def word_of_no_data(operation: str) -> None:
    """0xFFFFFFFF, which means that no data have come, arrives as the NaN that contract.md names."""
    mesh = line()
    n = mesh.size
    x = put(mesh, P("x"), np.full((n, 8 * n), 0xFFFFFFFF, np.uint32).view(np.float32))
    f = sharded(lambda v: apply(operation, v[0])[None], mesh, P("x"), P("x"))
    with cases.forced("auto"):
        result = compiled_of_ours(f, x)(x)
    for shard in result.addressable_shards:
        bits = np.asarray(shard.data).view(np.uint32)
        np.testing.assert_array_equal(bits, np.full_like(bits, 0x7FFF7FFF))


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
    with cases.forced(algorithm):
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
        check(result, cases.everywhere(cases.oracle(part), n))


# How often calls run, and what explain says of them.


@case()
def results_that_a_scan_stacks() -> None:
    """A scan stacks results for its backward pass that others use too.

    Each process executes each operation as often as `explain` says.
    """
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
    program = jax.jit(jax.grad(lambda *vs: f(*vs).sum(), argnums=(0, 1)))
    calls = jax_intranode.explain(program)(*args)
    ours = sum(call.times for call in calls if call.algorithm != "lax")
    jax.block_until_ready(program(*args))
    before = jax_intranode.usage_counter()
    jax.block_until_ready(program(*args))
    here = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
    assert jax_intranode.usage_counter() - before == ours * here > 0, calls


# Order of calls, and what is beside them.


@case(devices=2, world=(2, 4, 8))
def independent_calls_of_unequal_cost(world: int) -> None:
    """12 independent calls, which each device may start in an order of its own."""
    mesh = line(world)
    if not cases.takes_part(mesh):
        return

    def program(lib: Any) -> Any:
        def f(x: Any, *ws: Any) -> Any:
            return sum(lib.psum(jnp.tanh(x @ w) @ w.T, "x") for w in ws)

        return sharded(f, mesh, (P("x"), *(P() for _ in sizes)), P("x"))

    sizes = np.random.default_rng(14).permutation(
        [8, 16, 64, 128, 256, 512, 8, 700, 300, 32, 1024, 48]
    )
    x = put(mesh, P("x"), random("float32", (16 * world, 128), 15))
    ws = [put(mesh, P(), random("float32", (128, int(s)), int(s)) * 0.1) for s in sizes]
    ours = jax.jit(program(jax_intranode))
    for _ in range(3):
        result = ours(x, *ws)
    cases.check_like(result, jax.jit(program(lax))(x, *ws), 1e-3)


@case(operation=OPERATIONS)
@cases.ours_up_to(2048)
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
        check(result, cases.reference(operation, parts + k))


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
    total = cases.reference("psum", parts)
    ours, again = cases.reference(operation, total + parts), cases.reference(operation, parts)
    wants = total, ours, cases.reference("psum", ours), again, cases.reference("psum", again)
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
            size = n * count if operation in cases.DIVIDED else count
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
    check(program(*arguments), write(np, cases.reference, poisoned.copy(), parts))


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
        check(cases.psum_of(data, mesh), cases.everywhere(cases.oracle(data), n))
        running.append(waiting(value))
    for result in running:
        check(result, parts)
