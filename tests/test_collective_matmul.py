"""Collective matmuls: what is not used, what is kept, odd sizes, rounding."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import collective_matmuls as matmuls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_matmuls import GATHER, SCATTER, N, float32_products, over_x, values  # noqa: F401
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode import all_gather_matmul, explain, matmul_all_reduce, matmul_reduce_scatter

# What is not used is neither sent nor multiplied.

COLUMNS = P(None, "x")


def gathering(lib: Any, check_vma: bool) -> Callable[..., Any]:
    def body(x: Any, w: Any, u: Any) -> Any:
        return lib.all_gather_matmul(x, [w, u], "x")

    return over_x(body, (P("x"), COLUMNS, COLUMNS), COLUMNS, check_vma)


def scattering(lib: Any, check_vma: bool) -> Callable[..., Any]:
    def body(x: Any, w: Any) -> Any:
        return [lib.matmul_reduce_scatter(x, w, "x")]

    return over_x(body, (COLUMNS, P("x")), P("x"), check_vma)


TO_GATHER, TO_SCATTER = ((2 * N, 5), (5, 3 * N), (5, 7 * N)), ((2 * N, 5 * N), (5 * N, 3))


@matmuls.BOTH
@pytest.mark.parametrize(
    ("used", "results", "sent", "products"),
    [
        *(((0, 1, 2), (0, 1), {GATHER, SCATTER}, 4), ((0, 2), (0, 1), {GATHER, SCATTER}, 3)),
        *(((0,), (0, 1), {SCATTER}, 2), ((1, 2), (0, 1), {GATHER}, 2), ((2,), (0, 1), {GATHER}, 1)),
        # The cotangent of the other product is zero.
        *(((0, 1), (0,), {GATHER, SCATTER}, 2), ((0, 1), (1,), {SCATTER}, 1)),
        *(((0, 1), None, {GATHER}, 2), ((0,), None, {GATHER}, 1), ((1,), None, {GATHER}, 1)),
    ],
)
def test_gradients_that_are_not_used(
    used: tuple[int, ...], results: Any, sent: set[str], products: int, check_vma: bool
) -> None:
    """Of all gradients some are used, or only some are asked for; without results of a scatter."""
    make, shapes = (gathering, TO_GATHER) if results else (scattering, TO_SCATTER)

    def program(lib: Any, argnums: Sequence[int]) -> Any:
        f = make(lib, check_vma)

        def loss(*args: Any) -> Any:
            found = f(*args)
            return sum(found[k].sum() for k in results or (0,))

        def gradients(*args: Any) -> Any:
            found = dict(zip(argnums, jax.grad(loss, argnums)(*args), strict=True))
            return [found[k] for k in used]

        return gradients

    args = values(*shapes)
    for argnums in (range(len(args)), used):
        ours = jax.jit(program(jax_intranode, argnums))
        assert matmuls.collectives(ours, *args) == dict.fromkeys(sent, 1)
        assert ours.lower(*args).as_text().count("stablehlo.dot_general") == products
        matmuls.like_lax(lambda lib, argnums=argnums: program(lib, argnums), *args)


@matmuls.BOTH
@pytest.mark.parametrize(
    ("moves", "used", "gathers"),
    [((0, 1), (0, 1), 2), ((0, 1), (0,), 2), ((0, 1), (1,), 1), ((0, 2), (1,), 2)],
)
def test_tangents_that_are_not_used(
    moves: tuple[int, ...], used: tuple[int, ...], gathers: int, check_vma: bool
) -> None:
    """If the matrix of a result has a tangent, the gathered x is needed, too."""

    def program(lib: Any) -> Any:
        f = gathering(lib, check_vma)

        def tangents(*args: Any) -> Any:
            def of(*moving: Any) -> Any:
                return f(*(dict(zip(moves, moving, strict=True)).get(k, args[k]) for k in range(3)))

            moving = [args[k] for k in moves]
            found = jax.jvp(of, moving, [jnp.cos(v) for v in moving])[1]
            return [found[k] for k in used]

        return tangents

    args = values(*TO_GATHER)
    assert matmuls.collectives(program(jax_intranode), *args) == {GATHER: gathers}
    matmuls.like_lax(program, *args)


# What the backward pass keeps.


POLICIES = jax.checkpoint_policies
REMAT = {
    # All is computed again except the last sum, whose value no gradient needs.
    "nothing": (None, {GATHER: 3, SCATTER: 3}),
    # x is gathered again, and nothing else.
    "results": (POLICIES.save_only_these_names("hidden", "sum"), {GATHER: 3, SCATTER: 2}),
    "gathered": (
        POLICIES.save_only_these_names("jax_intranode.gathered", "hidden", "sum"),
        {GATHER: 2, SCATTER: 2},
    ),
    "everything": (POLICIES.everything_saveable, {GATHER: 2, SCATTER: 2}),
}


@matmuls.MOSTLY_CHECKED
@pytest.mark.parametrize("name", REMAT)
def test_remat(name: str, check_vma: bool) -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        h = jnp.tanh(checkpoint_name(all_gather_matmul(x, w, "x"), "hidden"))
        return jnp.sin(checkpoint_name(matmul_reduce_scatter(h, v, "x"), "sum"))

    policy, expected = REMAT[name]
    specs = (P("x"), P(None, "x"), P("x"))

    def program(body: Any) -> Any:
        return matmuls.with_gradients(over_x(body, specs, P("x"), check_vma), (0, 1, 2))

    args = values((2 * N, 5), (5, 3 * N), (3 * N, 5))
    again = jax.jit(program(jax.checkpoint(body, policy=policy)))
    calls = Counter(
        {"all_gather": GATHER, "all_gather_matmul": GATHER}.get(call.operation, SCATTER)
        for call in explain(again)(*args)
    )
    assert calls == matmuls.collectives(again, *args) == expected
    matmuls.same(again(*args), jax.jit(program(body))(*args))


def test_gathering_again_multiplies_nothing() -> None:
    """Here the backward pass needs only the gathered x to be computed again."""
    body = jax.checkpoint(lambda x, w: all_gather_matmul(x, [w, w], "x")[0])
    f = matmuls.with_gradients(over_x(body, (P("x"), P(None, "x"))), (0, 1))
    args = values((2 * N, 5), (5, 3 * N))
    called = [call.operation for call in explain(f)(*args)]
    assert called == ["all_gather_matmul", "all_gather", "matmul_reduce_scatter"]
    # Forward, input gradient, weight gradient.
    assert jax.jit(f).lower(*args).as_text().count("stablehlo.dot_general") == 3


# Shapes and dimensions.


@matmuls.MOSTLY_CHECKED
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
    ours, alone = (jax.jit(matmuls.with_gradients(g, (0, 1))) for g in (f, alone))
    matmuls.same(ours(*args), alone(*args))


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
    lines = jax.jit(matmuls.with_gradients(f, (0,))).lower(*args).as_text().splitlines()
    (add,) = [line for line in lines if "stablehlo.add " in line]
    assert add.endswith(f"tensor<{2 * N}x5xf32>")
    (scatter,) = [line for line in lines if "@jax_intranode_psum_scatter" in line]
    assert scatter.endswith("tensor<2x5xbf16>")


def test_precision_is_that_of_the_call() -> None:
    def body(x: Any, w: Any) -> Any:
        with jax.default_matmul_precision("high"):
            y = all_gather_matmul(x, w, "x")
            return matmul_reduce_scatter(y, w, "x") + matmul_all_reduce(x, w, "x")

    f = matmuls.with_gradients(over_x(body, (P("x"), P())), (0, 1))
    text = jax.jit(f).lower(*values((2 * N, 4), (4, 4))).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 9
    assert all("precision = [HIGH, HIGH]" in line for line in products)
