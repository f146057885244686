"""Ragged all-to-alls of random tables: the bits of NumPy's."""

import contextlib
import re
from typing import Any

import jax
import numpy as np
import pytest
import ragged_tables
from cases import case, check, compiled_of_ours, group, line, put, sharded
from jax.sharding import PartitionSpec as P

import jax_intranode

# Updates for each rank, rows of operand and output, shape of a row, dtype. Streams of the last one
# have more windows than an epoch buffer has room for, and rows of no whole packet.
SHAPES: tuple[tuple[int, tuple[int, int], tuple[int, ...], str], ...] = (
    (1, (24, 40), (4,), "float32"),
    (2, (9, 17), (3, 5), "bfloat16"),
    (5, (33, 21), (), "int8"),
    (1, (150, 300), (1001,), "int32"),
)
TABLES = 36  # of each shape


@case(world=(2, 3, 4, 5, 6, 7, 8), shape=(0, 1, 2, 3))
def ragged_of_random_tables(world: int, shape: int) -> None:
    mesh = group(world)
    updates, rows, row, dtype = SHAPES[shape]
    rng = np.random.default_rng([world, shape])
    run: Any = None
    for number in range(TABLES if shape < 3 else 5):
        kind = ragged_tables.KINDS[number % len(ragged_tables.KINDS)]
        tables = ragged_tables.tables(rng, world, updates, *rows, kind)
        operand, output = ragged_tables.operands(rng, world, rows, row, dtype)
        args = [put(mesh, P("x"), x) for x in (operand, output, *tables)]
        run = run or compiled_of_ours(ragged_tables.program(world, mesh=mesh), *args)
        check(run(*args), ragged_tables.expected(operand, output, tables))


@case(world=(2, 3, 4, 5, 6, 7, 8))
def ragged_of_tables_in_a_loop(world: int) -> None:
    """One program, replayed, whose tables are data of each step.

    The bytes of a result are a multiple of 256, so XLA:GPU has each step write into its part of all
    results.
    """
    mesh = group(world)
    rng = np.random.default_rng(world)
    rows = (60, 90)
    operand, output = ragged_tables.operands(rng, world, rows, (64,), "bfloat16")
    kinds = ragged_tables.KINDS * 8
    of_steps = [ragged_tables.tables(rng, world, 3, *rows, kind) for kind in kinds]

    def body(x: Any, y: Any, *tables: Any) -> Any:
        def step(_: Any, of_step: Any) -> Any:
            return None, jax_intranode.ragged_all_to_all(x[0], y[0], *of_step, axis_name="x")

        return jax.lax.scan(step, None, tuple(table[0] for table in tables))[1][None]

    stacked = [np.stack(of_all, 1) for of_all in zip(*of_steps, strict=True)]
    args = [put(mesh, P("x"), x) for x in (operand, output, *stacked)]
    f = compiled_of_ours(sharded(body, mesh, P("x"), P("x")), *args)
    wanted = np.stack([ragged_tables.expected(operand, output, t) for t in of_steps], 1)
    for _ in range(2):
        check(f(*args), wanted)


@case()
def ragged_of_a_bad_table() -> None:
    """The two ranks of the update fail, and say why; the others don't, and the group goes on.

    test_failures.py has what GPUs do.
    """
    if jax.devices()[0].platform == "gpu":
        pytest.skip("the failure of a kernel ends the process's CUDA context")
    mesh = line()
    n = len(jax.devices())
    rng = np.random.default_rng(0)
    operand, output = ragged_tables.operands(rng, n, (8, 8 * n), (4,), "float32")
    sizes = np.full((n, n), 2, np.int32)
    places = np.repeat(8 * np.arange(n, dtype=np.int32)[:, None], n, 1)
    good = [2 * sizes, sizes, places, sizes]
    bad = [*good[:2], places.copy(), sizes]
    bad[2][1, 0] = 8 * n - 1
    f = jax.jit(ragged_tables.program(n, mesh=mesh))

    def run(tables: Any) -> Any:
        args = [put(mesh, P("x"), x) for x in (operand, output, *tables)]
        return jax.block_until_ready(f(*args))

    involved = any(d.process_index == jax.process_index() for d in mesh.devices.flat[:2])
    with pytest.raises(Exception) if involved else contextlib.nullcontext() as error:
        run(bad)
    text = (
        f"update 0 from rank 1 to rank 0 has 2 rows from row 4 .* to row {8 * n - 1} of an output"
    )
    assert not involved or re.search(text, str(error.value))
    check(run(good), ragged_tables.expected(operand, output, good))
