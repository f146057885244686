"""Collective matmuls in one process: shapes, numerics, what lax runs, and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_matmuls import (  # noqa: F401
    BOTH,
    MOSTLY_CHECKED,
    N,
    collectives,
    float32_products,
    like_lax,
    over_x,
    same,
    values,
    with_gradients,
)
from jax.sharding import PartitionSpec as P

from jax_intranode import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

# Shapes and dimensions.


@MOSTLY_CHECKED
@pytest.mark.parametrize("m, k, n", [(0, 3, 4), (1, 0, 4), (1, 3, 0), (0, 0, 0), (129, 33, 1)])
def test_sizes(m: int, k: int, n: int, check_vma: bool) -> None:
    """Odd dimensions, and empty ones, which XLA's collectives refuse."""
    if 0 in (m, k, n) and jax.devices()[0].platform == "gpu":
        pytest.skip("XLA:GPU crashes when it compiles this, also with jax.lax (jaxlib 0.11.2)")

    def body(x: Any, w: Any, one: Any) -> Any:
        y = matmul_reduce_scatter(all_gather_matmul(x, w, "x"), w.T, "x")
        wide = jnp.concatenate([w] * N, 1)
        part = matmul_reduce_scatter(x, wide, "x", scatter_dimension=1)
        # XLA itself fails where all operands of a shard_map are empty.
        return y * one[0], part * one[0], matmul_all_reduce(x, w, "x")

    f = over_x(body, (P("x"), P(None, "x"), P()), (P("x"), P(None, "x"), P()), check_vma)

    def alone(x: Any, w: Any, one: Any) -> Any:
        pairs = zip(jnp.split(x, N), jnp.split(w, N, 1), strict=True)
        total = sum(a @ b for a, b in pairs)
        return x @ w @ w.T, jnp.concatenate([total] * N, 1), total

    args = *values((m * N, k), (k, n * N)), np.ones(1, np.float32)
    ours, alone = (jax.jit(with_gradients(g, (0, 1))) for g in (f, alone))
    same(ours(*args), alone(*args))


# Numerics.


def test_list_is_summed_before_it_is_rounded() -> None:
    """The input gradient of a list of matrices is summed in float32 and scattered in bfloat16."""
    by_columns = P(None, "x")
    f = over_x(
        lambda x, *ws: all_gather_matmul(x, list(ws), "x"),
        (P("x"), by_columns, by_columns),
        by_columns,
    )
    args = values((2 * N, 5), (5, 3 * N), (5, N), dtype="bfloat16")
    lines = jax.jit(with_gradients(f, (0,))).lower(*args).as_text().splitlines()
    (add,) = [line for line in lines if "stablehlo.add " in line]
    assert add.endswith(f"tensor<{2 * N}x5xf32>")
    (scatter,) = [line for line in lines if "@jax_intranode_psum_scatter" in line]
    assert scatter.endswith("tensor<2x5xbf16>")


def test_precision_is_that_of_the_call() -> None:
    def body(x: Any, w: Any) -> Any:
        with jax.default_matmul_precision("high"):
            y = all_gather_matmul(x, w, "x")
            return matmul_reduce_scatter(y, w, "x") + matmul_all_reduce(x, w, "x")

    f = with_gradients(over_x(body, (P("x"), P())), (0, 1))
    text = jax.jit(f).lower(*values((2 * N, 4), (4, 4))).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 9
    assert all("precision = [HIGH, HIGH]" in line for line in products)


# Calls that jax.lax runs.
