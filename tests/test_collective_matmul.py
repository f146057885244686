"""Collective matmuls: both gradients as one equation, what is kept, odd sizes, rounding."""

import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_matmuls import (  # noqa: F401
    BOTH,
    GATHER,
    MOSTLY_CHECKED,
    SCATTER,
    N,
    collectives,
    float32_products,
    like_lax,
    over_x,
    same,
    values,
    with_gradients,
)
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode import all_gather_matmul, explain, matmul_all_reduce, matmul_reduce_scatter
from jax_intranode._src.jax_private import jaxpr_walk

# Both gradients as one equation.

BOTH_OF_GATHER = "intranode_gradients_of_all_gather_matmul"
BOTH_OF_SCATTER = "intranode_gradients_of_matmul_reduce_scatter"
TANGENT_OF_GATHER = "intranode_tangent_of_all_gather_matmul"


def equations(f: Callable[..., Any], *args: Any) -> list[Any]:
    """The equations of our primitives in all jaxprs of a program, without dead code."""

    def within(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            if equation.primitive.name.startswith("intranode_"):
                yield equation
            for inner in jax.tree.leaves(list(equation.params.values())):
                inner = getattr(inner, "jaxpr", inner)
                if isinstance(inner, jax.extend.core.Jaxpr):
                    yield from within(inner)

    return list(within(jaxpr_walk.without_dead_code(jax.jit(f).trace(*args).jaxpr)))


def names_of(f: Callable[..., Any], *args: Any) -> list[str]:
    return [equation.primitive.name for equation in equations(f, *args)]


def gradients_apart(lib: Any) -> Any:
    """The same matmuls, but each gradient is a call of its own: lax's, or ours."""

    def apart(operation: Any) -> Any:
        def call(x: Any, w: Any, axis: Any) -> Any:
            def run(x: Any, w: Any) -> Any:
                return operation(x, w, axis)

            def backward(kept: Any, ct: Any) -> Any:
                x, w = kept
                (dgrad,) = jax.vjp(lambda x: run(x, w), x)[1](ct)
                (wgrad,) = jax.vjp(lambda w: run(x, w), w)[1](ct)
                return dgrad, wgrad

            f = jax.custom_vjp(run)
            f.defvjp(lambda x, w: (run(x, w), (x, w)), backward)
            return f(x, w)

        return call

    return types.SimpleNamespace(
        all_gather_matmul=apart(lib.all_gather_matmul),
        matmul_reduce_scatter=apart(lib.matmul_reduce_scatter),
    )


@MOSTLY_CHECKED
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_gradients_are_one_equation(dtype: str, check_vma: bool) -> None:
    """Its bits are those of the gradients computed one after another."""

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any, u: Any, v: Any) -> Any:
            a, b = lib.all_gather_matmul(x, [w, u], "x")
            y = lib.all_gather_matmul(x, w, "x")
            return lib.matmul_reduce_scatter(jnp.tanh(a * b + y), v, "x")

        columns = P(None, "x")
        f = over_x(body, (P("x"), columns, columns, P("x")), P("x"), check_vma)
        return with_gradients(f, (0, 1, 2, 3))

    args = values((16 * N, 72), (72, 24 * N), (72, 24 * N), (24 * N, 40), dtype=dtype)
    found = Counter(names_of(program(jax_intranode), *args))
    assert found == {
        "intranode_all_gather_matmul": 2,
        "intranode_matmul_reduce_scatter": 1,
        BOTH_OF_GATHER: 2,
        BOTH_OF_SCATTER: 1,
    }
    if dtype == "float32":
        like_lax(program, *args)
    apart = program(gradients_apart(jax_intranode))
    assert not {BOTH_OF_GATHER, BOTH_OF_SCATTER}.intersection(names_of(apart, *args))
    both = jax.jit(program(jax_intranode))(*args)
    for a, b in zip(*map(jax.tree.leaves, (both, jax.jit(apart)(*args))), strict=True):
        np.testing.assert_array_equal(a, b)


@BOTH
def test_gradients_that_are_not_used(check_vma: bool) -> None:
    """Nothing is sent or multiplied for gradients that are unused or known to be zero."""
    columns = P(None, "x")

    def gathers(x: Any, w: Any, u: Any) -> Any:
        return all_gather_matmul(x, [w, u], "x")

    def scatters(x: Any, w: Any) -> Any:
        return matmul_reduce_scatter(x, w, "x")

    gather = over_x(gathers, (P("x"), columns, columns), columns, check_vma)
    scatter = over_x(scatters, (columns, P("x")), P("x"), check_vma)
    to_gather = values((2 * N, 5), (5, 3 * N), (5, 7 * N))
    to_scatter = values((2 * N, 5 * N), (5 * N, 3))

    def some(f: Any, used: Sequence[int]) -> Any:
        def of(*args: Any) -> Any:
            gradients = jax.vjp(f, *args)[1](jax.tree.map(jnp.ones_like, jax.eval_shape(f, *args)))
            return [gradients[i] for i in used]

        return of

    def backward(f: Any, args: Any) -> tuple[list[str], int, list[Any]]:
        found = [e for e in equations(f, *args) if "gradients" in e.primitive.name]
        text = jax.jit(f).lower(*args).as_text()
        params = [e.params["params"] for e in found]
        return (
            sorted(collectives(f, *args)),
            text.count("stablehlo.dot_general"),
            [(p.dgrad, p.wgrads) for p in params],
        )

    # Which gradients are used (0: of x, others: of the matrices), and the number of products.
    used = {(0, 1, 2): 4, (0, 2): 3, (0,): 2, (1, 2): 2, (2,): 1}
    for which, dots in used.items():
        sent = {GATHER} if which != (0,) else set()  # the gathered x
        sent |= {SCATTER} if 0 in which else set()
        wgrads = tuple(k - 1 for k in which if k > 0) if 0 in which else tuple(range(len(which)))
        expected = sorted(sent), dots, [(0 in which, wgrads)]
        assert backward(some(gather, which), to_gather) == expected, which
    by_both = {(0, 1): (2, [(True, (0,))]), (0,): (1, [(True, ())]), (1,): (1, [(False, (0,))])}
    for which, expected_of in by_both.items():
        found = backward(some(scatter, which), to_scatter)
        assert found == ([GATHER], *expected_of), which
    for f, args, which in ((gather, to_gather, (0, 2)), (scatter, to_scatter, (1,))):
        everything = jax.jit(some(f, range(len(args))))(*args)
        same(jax.jit(some(f, which))(*args), [everything[i] for i in which])

    # Only one operand is differentiated.
    frozen = jax.grad(lambda x: sum(v.sum() for v in gather(x, *to_gather[1:])))
    assert names_of(frozen, to_gather[0])[-1] == "intranode_matmul_reduce_scatter"
    frozen = jax.grad(lambda w: gather(to_gather[0], w, to_gather[2])[0].sum())
    assert names_of(frozen, to_gather[1]) == ["intranode_all_gather_matmul"]
    # The cotangent of one product is zero.
    half = jax.grad(lambda x, w: gather(x, w, to_gather[2])[0].sum(), (0, 1))
    *_, equation = equations(half, *to_gather[:2])
    assert equation.primitive.name == BOTH_OF_GATHER
    params = equation.params["params"]
    assert (params.matmul.terms, params.wgrads) == (1, (0,))
    # The matrix of the nonzero cotangent is not differentiated.
    other = jax.grad(lambda x, w: gather(x, w, to_gather[2])[1].sum(), (0, 1))
    assert names_of(other, *to_gather[:2])[-1] == "intranode_matmul_reduce_scatter"


@BOTH
def test_tangents_that_are_not_used(check_vma: bool) -> None:
    columns = P(None, "x")
    f = over_x(
        lambda x, w, u: all_gather_matmul(x, [w, u], "x"),
        (P("x"), columns, columns),
        columns,
        check_vma,
    )
    args = values((2 * N, 5), (5, 3 * N), (5, 7 * N))

    def tangents(x: Any, w: Any, u: Any) -> Any:
        return jax.jvp(lambda x, w: f(x, w, u), (x, w), (jnp.cos(x), jnp.sin(w)))[1]

    for used, moving in ((slice(None), (0,)), (slice(1), (0,)), (slice(1, None), ())):

        def some(*args: Any, used: slice = used) -> Any:
            return tangents(*args)[used]

        *_, equation = equations(some, *args)
        assert equation.primitive.name == TANGENT_OF_GATHER
        assert equation.params["params"].moving == moving
        # If a matrix has a tangent, the gathered x is needed.
        assert collectives(some, *args) == {GATHER: 1 + bool(moving)}
        same(jax.jit(some)(*args), jax.jit(tangents)(*args)[used])

    # The matrix of the second product moves, which becomes the first one.
    def of_second(x: Any, w: Any, u: Any) -> Any:
        return jax.jvp(lambda x, u: f(x, w, u), (x, u), (jnp.cos(x), jnp.sin(u)))[1][1]

    *_, equation = equations(of_second, *args)
    assert equation.params["params"].moving == (0,)


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


@MOSTLY_CHECKED
@pytest.mark.parametrize("name", REMAT)
def test_remat(name: str, check_vma: bool) -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        h = jnp.tanh(checkpoint_name(all_gather_matmul(x, w, "x"), "hidden"))
        return jnp.sin(checkpoint_name(matmul_reduce_scatter(h, v, "x"), "sum"))

    policy, expected = REMAT[name]
    specs = (P("x"), P(None, "x"), P("x"))

    def program(body: Any) -> Any:
        return with_gradients(over_x(body, specs, P("x"), check_vma), (0, 1, 2))

    args = values((2 * N, 5), (5, 3 * N), (3 * N, 5))
    again = jax.jit(program(jax.checkpoint(body, policy=policy)))
    calls = Counter(
        {"all_gather": GATHER, "all_gather_matmul": GATHER}.get(call.operation, SCATTER)
        for call in explain(again)(*args)
    )
    assert calls == collectives(again, *args) == expected
    same(again(*args), jax.jit(program(body))(*args))


def test_gathering_again_multiplies_nothing() -> None:
    """Here the backward pass needs only the gathered x to be computed again."""
    body = jax.checkpoint(lambda x, w: all_gather_matmul(x, [w, w], "x")[0])
    f = with_gradients(over_x(body, (P("x"), P(None, "x"))), (0, 1))
    args = values((2 * N, 5), (5, 3 * N))
    called = [call.operation for call in explain(f)(*args)]
    assert called == ["all_gather_matmul", "all_gather", "matmul_reduce_scatter"]
    # Forward, input gradient, weight gradient.
    assert jax.jit(f).lower(*args).as_text().count("stablehlo.dot_general") == 3


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
