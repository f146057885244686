"""Collective matmuls in one process: shapes, numerics, what lax runs, and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LAX_MATMULS, make_mesh, sharded
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
from devices import need_devices
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import full

import jax_intranode
from jax_intranode import all_gather_matmul, explain, matmul_all_reduce, matmul_reduce_scatter

# Shapes and dimensions.


@MOSTLY_CHECKED
@pytest.mark.parametrize("leading", [(2 * N,), full((N, 2 * N)), (N, 2 * N, 3 * N)])
def test_every_axis(leading: tuple[int, ...], check_vma: bool) -> None:
    """Every axis that can be gathered or scattered, including the product's last."""
    rank = len(leading) + 1

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            gathered = [
                lib.all_gather_matmul(x, w, "x", gather_axis=axis)
                for axis in (*range(rank - 1), -rank)
            ]
            scattered = [
                lib.matmul_reduce_scatter(x, w, "x", scatter_dimension=axis)
                for axis in (*range(rank), -1)
            ]
            total = lib.matmul_all_reduce(x, w, "x")
            return [v.sum(axis=-1)[None] for v in (*gathered, *scattered, total)]

        return with_gradients(over_x(body, (P(), P()), check_vma=check_vma), (0, 1))

    like_lax(program, *values((*leading, 5), (5, 3 * N)))


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


@BOTH
def test_lists_of_matrices_of_unequal_widths(check_vma: bool) -> None:
    def program(lib: Any) -> Any:
        def body(x: Any, ws: Any) -> Any:
            q, k, v = lib.all_gather_matmul(x, ws, "x")
            (alone,) = lib.all_gather_matmul(x, ws[:1], "x")
            return q.sum(1) * k[:, 0] + v[:, 1] + alone.sum(1)

        return with_gradients(over_x(body, (P("x"), P(None, "x")), P("x"), check_vma), (0, 1))

    x, *ws = values((2 * N, 5), (5, 3 * N), (5, 7 * N), (5, 2 * N))
    like_lax(program, x, ws)


@BOTH
def test_the_gathered_array_is_a_result(check_vma: bool) -> None:
    x, w = values((2 * N, 5), (5, 3))

    def ours(x: Any, w: Any) -> Any:
        (y,), whole = all_gather_matmul(x, [w], "x", return_gathered=True)
        z, again = all_gather_matmul(x, w, "x", return_gathered=True)
        return y.sum(1) + whole[:, 0], z * again[:, :3]

    def theirs(x: Any, w: Any) -> Any:
        whole = lax.all_gather(x, "x", tiled=True)
        y = whole @ w
        return y.sum(1) + whole[:, 0], y * whole[:, :3]

    def program(body: Any) -> Any:
        return jax.jit(with_gradients(over_x(body, (P("x"), P()), P("x"), check_vma), (0, 1)))

    same(program(ours)(x, w), program(theirs)(x, w))


def test_results_that_vary_over_different_axes() -> None:
    """The types are lax's: a result that does not vary over "a" may be replicated over it."""
    need_devices(4)
    mesh = make_mesh((2, 2), ("a", "b"))

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any, v: Any) -> Any:
            return lib.all_gather_matmul(x, [w, v], "b")

        f = sharded(body, mesh, (P("b"), P("a"), P()), [P(("a", "b")), P("b")], True)
        return with_gradients(f, (0, 1, 2))

    args = values((4, 3), (6, 3), (3, 3))
    (call,) = explain(lambda *args: program(jax_intranode)(*args)[0])(*args)
    assert (call.operation, call.algorithm) == ("all_gather_matmul", "lax")
    assert call.reason == "results that vary over different axes"
    same(jax.jit(program(jax_intranode))(*args), jax.jit(program(LAX_MATMULS))(*args))


# Numerics.


@pytest.mark.parametrize(
    ("dtype", "preferred", "promotion"),
    [
        ("bfloat16", None, "standard"),
        ("bfloat16", "float32", "standard"),
        full("float16", None, "standard"),
        full("float16", "float32", "standard"),
        # JAX would not promote these cotangents to the dtype that they are multiplied with.
        ("bfloat16", "float32", "strict"),
        ("float8_e4m3fn", "float32", "standard"),
        ("float8_e5m2", "bfloat16", "standard"),
    ],
)
def test_dtypes_of_results_and_gradients(dtype: str, preferred: Any, promotion: Any) -> None:
    x, w = (v.astype(dtype) for v in values((2 * N, 6), (6, 3 * N)))

    def ours(x: Any, w: Any) -> Any:
        y = all_gather_matmul(x, w, "x", preferred_element_type=preferred)
        z = matmul_reduce_scatter(x, w, "x", scatter_dimension=1, preferred_element_type=preferred)
        return y, z, matmul_all_reduce(x, w, "x", preferred_element_type=preferred)

    def theirs(x: Any, w: Any) -> Any:
        y = jnp.matmul(lax.all_gather(x, "x", tiled=True), w, preferred_element_type=preferred)
        z = jnp.matmul(x, w, preferred_element_type=preferred)
        return y, lax.psum_scatter(z, "x", scatter_dimension=1, tiled=True), lax.psum(z, "x")

    def program(body: Any) -> Any:
        return jax.jit(with_gradients(over_x(body, (P("x"), P()), P("x")), (0, 1)))

    with jax.numpy_dtype_promotion(promotion):
        results, gradients = program(ours)(x, w)
        of_lax = program(theirs)(x, w)
    assert all(v.dtype == (preferred or dtype) for v in results)
    assert all(v.dtype == dtype for v in gradients)
    same((results, gradients), of_lax, 0.3 if dtype.startswith("float8") else 0.02)


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


def test_explain() -> None:
    def body(x: Any, w: Any) -> Any:
        y = matmul_reduce_scatter(all_gather_matmul(x, [w, w], "x")[0], w.T, "x")
        return matmul_all_reduce(y, w, "x")

    x, w = values((2 * N, 5), (5, 3 * N))
    calls = explain(over_x(body, (P("x"), P(None, "x"))))(x, w)
    # Dead code elimination removes the matrix whose product is unused.
    got = [(c.operation, c.algorithm, c.nbytes, c.group_size, len(c.shapes)) for c in calls]
    assert got == [
        ("all_gather_matmul", "all_gather", 2 * 5 * 4, N, 2),
        ("matmul_reduce_scatter", "reduce_scatter", 2 * N * 5 * 4, N, 2),
        ("matmul_all_reduce", "one_shot", 2 * 3 * 4, N, 2),
    ]
    for call, words in zip(
        calls,
        ("all_gather before the matmul", "psum_scatter after the matmul", "psum after the matmul"),
        strict=True,
    ):
        assert call.reason.startswith(f"{words}, not overlapped ("), call.reason
        assert f"bytes of float32 among {N} ranks" in call.reason
