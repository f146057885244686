"""Ragged all-to-alls of random tables: the bits of NumPy's."""

from typing import Any

import jax
import numpy as np
import pytest
import ragged_tables
from cases import case, check, compiled_of_ours, line, put
from jax.sharding import PartitionSpec as P

import jax_intranode

KINDS = ("apart", "over", "to one", "same", "empty")
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
    mesh = line(world)
    if 1 < jax.process_count() != world:
        pytest.skip("each number of processes runs the groups of its size")
    updates, rows, row, dtype = SHAPES[shape]
    rng = np.random.default_rng([world, shape])
    run: Any = None
    for number in range(TABLES if shape < 3 else 5):
        kind = KINDS[number % len(KINDS)]
        tables = ragged_tables.tables(rng, world, updates, *rows, kind)
        operand, output = ragged_tables.operands(rng, world, rows, row, dtype)
        args = [put(mesh, P("x"), x) for x in (operand, output, *tables)]
        run = run or compiled_of_ours(ragged_tables.program(world, mesh=mesh), *args)
        check(run(*args), ragged_tables.expected(operand, output, tables))


@case()
def ragged_beside_others() -> None:
    """Its epochs go on with those of other operations, and its windows are empty for them."""
    mesh = line()
    n = len(jax.devices())
    rng = np.random.default_rng(0)
    rows = (400, 800)
    operand, output = ragged_tables.operands(rng, n, rows, (64,), "float32")
    tables = ragged_tables.tables(rng, n, 2, *rows, "apart")
    ragged = ragged_tables.program(n, mesh=mesh)
    args = [put(mesh, P("x"), x) for x in (operand, output, *tables)]

    @jax.jit
    def f(x: Any, y: Any, *tables: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            total = jax.shard_map(
                lambda v: jax.lax.psum(v[:, :2], "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"),
                check_vma=False,
            )(carry)  # fmt: skip
            moved = ragged(x, carry, *tables)
            return moved + 0 * total.sum(), None

        return jax.lax.scan(step, y, None, length=5)[0]

    with jax_intranode.accelerate():
        found = f(*args)
    check(found, ragged_tables.expected(operand, output, tables))
