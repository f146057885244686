"""Cases of the collective matmuls, on which nothing is overlapped or everything may be."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from cases import (
    LAX_MATMULS,
    case,
    check,
    check_like,
    everywhere,
    float32_products,
    line,
    make_mesh,
    oracle,
    put,
    random,
    sharded,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.native import extension
from jax_intranode._src.selection import table


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
        part = jax_intranode.matmul_reduce_scatter(long[0], w[0], "x", scatter_dimension=1)
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
        return jax_intranode.matmul_reduce_scatter(jnp.tanh(h), w2, "x", scatter_dimension=1)

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
            y = lib.matmul_reduce_scatter(jnp.tanh(a) * b, w.T, "x", scatter_dimension=1)
            return y * lib.matmul_all_reduce(y, w, "x").sum(-1, keepdims=True)

        f = sharded(layer, mesh, specs, P("data", "x"), check_vma)
        return jax.jit(jax.value_and_grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1)))

    arrays = [put(mesh, spec, v) for spec, v in zip(specs, values, strict=True)]
    before = extension.handler_calls()
    ours = jax.block_until_ready(program(jax_intranode)(*arrays))
    assert extension.handler_calls() > before, "ours did not run"
    check_like(ours, program(LAX_MATMULS)(*arrays), 1e-4)
