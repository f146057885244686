"""Cases of the collective matmuls, on which nothing is overlapped or everything may be."""

from typing import Any
from unittest import mock

import jax
import numpy as np
from cases import case, check, everywhere, line, oracle, put, random, sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.selection import table


@case(rows=(1, 17, 64))
def sums_of_few_rows(rows: int) -> None:
    """Products and sums of few rows, after each other. All of them are exact in bfloat16."""
    mesh = line()
    n = mesh.size
    generator = np.random.default_rng(rows)
    x, w = (
        generator.integers(-1, 2, (n, *shape)).astype("bfloat16")
        for shape in ((rows, 1000), (1000, 264))
    )

    def f(x: Any, w: Any) -> Any:
        x, w = x[0], w[0]
        product = jax_intranode.column_parallel_matmul(x, w, "x")
        totals = [jax_intranode.matmul_all_reduce(v, w, "x") for v in (x, x[:1], x, x[-1:])]
        return [v[None] for v in (product, *totals)]

    program = jax.jit(sharded(f, mesh, P("x"), P("x")))
    arrays = [put(mesh, P("x"), v) for v in (x, w)]
    operations = ("column_parallel_matmul", "matmul_all_reduce")
    taken = {("hopper", name, n): (table.FewRows(1 << 40, 64),) for name in operations}
    with mock.patch.object(table, "FEW_ROWS", taken):
        for _ in range(4):  # eager, captured, and replayed
            found = program(*arrays)
    products = x.astype(np.float32) @ w.astype(np.float32)
    total = everywhere(products.sum(0), n)
    wanted = products, total, total[:, :1], total, total[:, -1:]
    for result, want in zip(found, wanted, strict=True):
        check(result, want.astype("bfloat16"))


@case(dtype=("float32", "bfloat16"))
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

    with jax.default_matmul_precision("highest"):  # no TF32, the default on GPUs
        program = jax.jit(sharded(f, mesh, P("x"), P("x")))
        products, part, total = program(*(put(mesh, P("x"), v) for v in (x, w)))
    spread = jax.jit(lambda v: v, out_shardings=NamedSharding(mesh, P()))(products)
    want = oracle(np.asarray(spread.addressable_data(0)))
    check(part, want.reshape(part.shape))
    check(total, everywhere(want, n))
