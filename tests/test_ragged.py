"""ragged_all_to_all: groups, bad tables, and where lax can't run it.

cases_of_ragged.py compares its results with NumPy's, for random tables; the contract has gradients
and transformations.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_tables
from cases import line, make_mesh, sharded
from devices import need_devices
from jax import export, lax
from jax.sharding import PartitionSpec as P
from ragged_tables import program

import jax_intranode

pytestmark = pytest.mark.one_version

# The example of lax's documentation.
OPERAND = np.array([[1, 2, 2], [3, 4, 0]], np.int32)
OUTPUT = np.zeros((2, 4), np.int32)
TABLES = [
    np.array(table, np.int32)
    for table in ([[0, 1], [0, 1]], [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]])
]
RESULT = np.array([[1, 3, 0, 0], [2, 2, 4, 0]], np.int32)


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    need_devices(2)
    yield


def need_cpu() -> None:
    if jax.devices()[0].platform == "gpu":
        pytest.skip("a failure ends the process's CUDA context; test_failures.py has that of GPUs")


def algorithms(f: Callable[..., Any], *args: Any) -> list[str]:
    return [call.algorithm for call in jax_intranode.explain(f)(*args)]


# What JAX's own tests of lax's function check (tests/ragged_collective_test.py). They skip CPUs.


@pytest.mark.parametrize("library", [jax_intranode, lax])
@pytest.mark.parametrize("check_vma", [True, False])
def test_example_of_lax(library: Any, check_vma: bool) -> None:
    f = jax.jit(program(2, library, check_vma))
    # Unedited programs on GPUs keep lax's of integers: which is faster was not measured.
    operand, output = (x.astype(np.float32) for x in (OPERAND, OUTPUT))
    with jax_intranode.accelerate():
        assert algorithms(f, operand, output, *TABLES) == ["ragged"]
        np.testing.assert_array_equal(f(operand, output, *TABLES), RESULT)


@pytest.mark.parametrize("library", [jax_intranode, lax])
@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 2), (3, 1)), ((0,), (1,), (2,), (3,))])
def test_axis_index_groups(library: Any, groups: tuple[tuple[int, ...], ...]) -> None:
    need_devices(4)
    operand = np.stack([*OPERAND, *10 * OPERAND])
    output = np.zeros((4, 4), np.int32)
    size = len(groups[0])
    tables = [np.concatenate([table, table])[:, :size] for table in TABLES]
    if size == 1:
        tables[3] = tables[1]
    f = jax.jit(program(4, library, axis_index_groups=groups))
    if library is jax_intranode and size == 1:
        as_array = jax.jit(program(4, library, axis_index_groups=np.array(groups)))
        np.testing.assert_array_equal(*(g(operand, output, *tables) for g in (f, as_array)))
    strict = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with jax_intranode.accelerate(), strict[0], strict[1]:
        found = f(operand, output, *tables)
    for group in groups:
        ranks = list(group)
        of_group = [table[ranks] for table in tables]
        if size == 2:  # each rank gets what its place in the group says, whoever it is
            of_group[3] = ragged_tables.received(of_group[1])
        wanted = ragged_tables.expected(operand[ranks], output[ranks], of_group)
        np.testing.assert_array_equal(found[jnp.array(ranks)], wanted)


# Errors that lax does not have.


def test_groups_of_different_sizes() -> None:
    need_devices(3)
    xs = [np.zeros((3, *x.shape[1:]), x.dtype) for x in (OPERAND, OUTPUT, *TABLES)]
    with pytest.raises(ValueError, match=r"groups of different sizes: \(\(0,\), \(1, 2\)\)"):
        program(3, axis_index_groups=[[0], [1, 2]])(*xs)


# Bad tables. The operand has 3 rows, the output 4.
BAD = {
    "negative size": (1, -1, "update 0 from rank 1 to rank 0 has -1 rows"),
    "size": (1, 4, "has 4 rows from row 0 of an operand with 3 rows to row 1 of an output with 4"),
    "negative start": (0, -1, "has 1 rows from row -1 of an operand"),
    "start": (0, 3, "has 1 rows from row 3 of an operand with 3 rows"),
    "negative place": (2, -2, "to row -2 of an output"),
    "place": (2, 4, "to row 4 of an output with 4 rows"),
    "largest": (2, 2**31 - 1, "to row 2147483647 of an output"),
    "other size": (3, 1, "0 to rank 1 has 2 rows .* recv_sizes of rank 1 says 1 rows"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tables_are_failures(name: str) -> None:
    """Both ranks find it; no row is written outside; and the group goes on."""
    need_cpu()
    table, value, text = BAD[name]
    tables = [t.copy() for t in TABLES]
    tables[table][1, 0] = value
    if table == 1:
        tables[3][0, 1] = value
    f = jax.jit(program(2))
    good = f(OPERAND, OUTPUT, *TABLES)
    call = r"ragged_all_to_all of 12 bytes \(.*ragged_tables.py:\d+ \(body\).*\) failed: "
    with pytest.raises(Exception, match=f"{call}.*{text}"):
        jax.block_until_ready(f(OPERAND, OUTPUT, *tables))
    np.testing.assert_array_equal(good, RESULT)
    np.testing.assert_array_equal(f(OPERAND, OUTPUT, *TABLES), RESULT)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "uint64", "int16"])
def test_tables_of_other_dtypes(dtype: str) -> None:
    with jax.enable_x64(True):
        tables = [t.astype(dtype) for t in TABLES]
        f = jax.jit(program(2))
        np.testing.assert_array_equal(f(OPERAND, OUTPUT, *tables), RESULT)
        if dtype.endswith("64"):
            need_cpu()
            tables[0][1, 0] = 1 << 32  # which is no 0
            with pytest.raises(Exception, match="from row 2147483647 of an operand"):
                jax.block_until_ready(f(OPERAND, OUTPUT, *tables))


def test_operand_and_output_may_be_the_same_array() -> None:
    x = np.pad(OPERAND, ((0, 0), (0, 1))).astype(np.float32)

    def body(x: Any, *tables: Any) -> Any:
        v = x[0] * 2
        found = jax_intranode.ragged_all_to_all(v, v, *(t[0] for t in tables), axis_name="x")
        return jnp.stack([found, v])[None]

    found = jax.jit(sharded(body, line(2), P("x"), P("x")))(x, *TABLES)
    np.testing.assert_array_equal(found[:, 0], ragged_tables.expected(2 * x, 2 * x, TABLES))
    np.testing.assert_array_equal(found[:, 1], 2 * x)


@pytest.mark.parametrize(
    ("table", "batch", "value", "row"),
    [(0, 1, -1, -1), (0, 0, 3, 9), (0, 0, 2**31 - 7, 2**31 - 1), (2, 1, -1, -1), (2, 0, 4, 12)],
)
def test_bad_tables_in_a_batch_are_failures(table: int, batch: int, value: int, row: int) -> None:
    """A row before or behind those of a batch is no row of the batch next to it.

    A row behind them is named as one that is as far behind those of all batches.
    """
    need_cpu()
    tables = [np.stack([t, t], 1) for t in TABLES]
    operand, output = (np.stack([x, x], 1) for x in (OPERAND, OUTPUT))

    def body(*xs: Any) -> Any:
        call = partial(jax_intranode.ragged_all_to_all, axis_name="x")
        return jax.vmap(call)(*(x[0] for x in xs))[None]

    f = jax.jit(sharded(body, line(2), P("x"), P("x")))
    good = f(operand, output, *tables)
    np.testing.assert_array_equal(good, np.stack([RESULT, RESULT], 1))
    tables[table][1, batch, 0] = value
    with pytest.raises(Exception, match=f"from rank 1 to rank 0 has 1 rows .*row {row} of an"):
        jax.block_until_ready(f(operand, output, *tables))


# Gradients.


def test_gradients_of_reads_are_summed_in_rank_order_and_rounded_once() -> None:
    n = min(8, len(jax.devices()))
    rng = np.random.default_rng(0)
    operand, output = np.zeros((n, 3), jnp.bfloat16), np.zeros((n, n * 3), jnp.bfloat16)
    sizes = np.full((n, n), 3, np.int32)  # each rank sends all it has to all
    tables = [0 * sizes, sizes, np.repeat(3 * np.arange(n, dtype=np.int32)[:, None], n, 1), sizes]
    ct = rng.normal(size=output.shape).astype(jnp.bfloat16)
    _, back = jax.vjp(lambda x: jax.jit(program(n))(x, output, *tables), operand)
    (found,) = back(ct)
    total = np.zeros((n, 3), np.float32)
    for of_rank in ct.reshape(n, n, 3):
        total += of_rank.astype(np.float32)
    np.testing.assert_array_equal(found, total.astype(jnp.bfloat16))


# Transformations.


def test_axis_of_vmap() -> None:
    """The axis is no mesh axis: all-gathers run it."""
    call = lambda *xs: jax_intranode.ragged_all_to_all(*xs, axis_name="x")  # noqa: E731
    found = jax.jit(jax.vmap(call, axis_name="x"))(OPERAND, OUTPUT, *TABLES)
    np.testing.assert_array_equal(found, RESULT)


def test_output_that_does_not_vary() -> None:
    """Its type would be that of the result in lax; the result varies."""

    def body(x: Any, *tables: Any) -> Any:
        rest = [t[0] for t in tables]
        found = jax_intranode.ragged_all_to_all(x[0], jnp.zeros(4), *rest, axis_name="x")
        assert "x" in jax.typeof(found).manual_axis_type.varying
        return found[None]

    f = jax.jit(sharded(body, line(2), P("x"), P("x"), check_vma=True))
    found = f(OPERAND.astype(np.float32), *TABLES)
    np.testing.assert_array_equal(found, RESULT)


# Where lax runs it in place of us, and lax can't.


@pytest.mark.parametrize("library", [jax_intranode, lax])
def test_arrays_without_rows(library: Any) -> None:
    if library is lax and jax.devices()[0].platform == "gpu":
        pytest.skip("unedited programs keep them, and XLA of jax 0.11 crashes")
    tables = [np.zeros((2, 2), np.int32)] * 4
    with jax_intranode.accelerate():
        for rows in ((0, 3), (3, 0)):
            xs = [np.ones((2, count, 2), np.float32) for count in rows]
            np.testing.assert_array_equal(jax.jit(program(2, library))(*xs, *tables), xs[1])


@pytest.mark.parametrize("kind", ["apart", "over", "same"])
def test_more_updates_than_kernels_take(kind: str) -> None:
    tables = ragged_tables.tables(np.random.default_rng(0), 2, 600, 5, 9, kind)
    xs = ragged_tables.operands(np.random.default_rng(1), 2, (5, 9), (2,), "float32")
    f = jax.jit(program(2))
    assert algorithms(f, *xs, *tables) == ["lax"]
    np.testing.assert_array_equal(f(*xs, *tables), ragged_tables.expected(*xs, tables))


@pytest.mark.parametrize("library", [jax_intranode, lax])
def test_partly_manual_mesh(library: Any) -> None:
    need_devices(4)

    def body(*xs: Any) -> Any:
        return library.ragged_all_to_all(*(x[0] for x in xs), axis_name="x")[None]

    options: Any = {"in_specs": P("x"), "out_specs": P("x"), "axis_names": {"x"}}
    mesh = make_mesh((2, 2), ("x", "left to XLA"))
    f = jax.jit(jax.shard_map(body, mesh=mesh, check_vma=False, **options))
    with jax_intranode.accelerate():
        assert algorithms(f, OPERAND, OUTPUT, *TABLES) == ["lax"]
        np.testing.assert_array_equal(f(OPERAND, OUTPUT, *TABLES), RESULT)


@pytest.mark.parametrize("platforms", [["cpu"], ["cpu", "cuda"]])
def test_export(platforms: list[str]) -> None:
    if jax.devices()[0].platform == "gpu" and "cuda" not in platforms:
        pytest.skip("the exported program is for CPU devices")
    args = (OPERAND, OUTPUT, *TABLES)
    exported = export.export(jax.jit(program(2)), platforms=platforms)(*args)
    again = export.deserialize(exported.serialize())
    mesh = line(2)
    placed = [jax.device_put(x, jax.NamedSharding(mesh, P("x"))) for x in args]
    np.testing.assert_array_equal(jax.jit(again.call)(*placed), RESULT)


# Unedited programs.


def test_unedited_gradient() -> None:
    """lax's rules have been applied: the operand's gradient is a ragged all-to-all, too."""
    operand, output = OPERAND.astype(np.float32), OUTPUT.astype(np.float32)

    def loss(x: Any, library: Any) -> Any:
        return (program(2, library)(x, output, *TABLES) ** 2).sum()

    with jax_intranode.accelerate():
        found = jax.jit(jax.grad(lambda x: loss(x, lax)))
        calls = jax_intranode.explain(found)(operand)
        ragged = [call.algorithm for call in calls if call.operation == "ragged_all_to_all"]
        assert len(ragged) >= 2 and "lax" not in ragged
        gradient = found(operand)
    np.testing.assert_array_equal(gradient, jax.grad(lambda x: loss(x, jax_intranode))(operand))
