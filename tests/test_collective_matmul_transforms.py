"""Collective matmuls under transformations, on other meshes, eager and donated."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LAX_MATMULS
from collective_matmuls import (  # noqa: F401
    BOTH,
    GATHER,
    MOSTLY_CHECKED,
    SCATTER,
    SUM,
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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import full

import jax_intranode
from jax_intranode import explain

# Transformations.


def three(lib: Any, x: Any, w: Any) -> Any:
    """The sum of a number from each of the three operations."""
    return (
        (lib.all_gather_matmul(x, w, "x") ** 2).sum()
        + (lib.all_gather_matmul(x, [w, w[:, :2]], "x", gather_axis=-2)[1] ** 3).sum()
        + jnp.sin(lib.matmul_reduce_scatter(x, w, "x")).sum()
        + jnp.sin(lib.matmul_all_reduce(x, w, "x")).sum()
    )


@MOSTLY_CHECKED
@pytest.mark.parametrize("in_axes", [*(full(a) for a in ((1, None), (None, 2))), (2, 1)])
def test_vmap(in_axes: tuple[int | None, int | None], check_vma: bool) -> None:
    """Batches of x, of w and of both; around the function and around its gradient."""
    x, w = values((N, 5), (5, 3))
    x, w = (
        v if d is None else np.stack([v, v * 2, 1 - v], d)
        for v, d in zip((x, w), in_axes, strict=True)
    )

    def program(lib: Any) -> Any:
        f = functools.partial(three, lib)

        def over_ranks(f: Any) -> Any:
            def body(x: Any, w: Any) -> Any:
                return jax.tree.map(lambda v: v[None], jax.vmap(f, in_axes)(x, w))

            return over_x(body, (P(), P()), check_vma=check_vma)

        around, inside = over_ranks(f), over_ranks(jax.grad(f, (0, 1)))
        return lambda x, w: (with_gradients(around, (0, 1))(x, w), inside(x, w))

    like_lax(program, x, w)


@MOSTLY_CHECKED
@pytest.mark.parametrize("remat", [True, False])
def test_scan(remat: bool, check_vma: bool) -> None:
    """A scan over layers has the collectives of one layer."""

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any, v: Any) -> Any:
            def layer(x: Any, weights: Any) -> Any:
                h = jnp.tanh(lib.all_gather_matmul(x, weights[0], "x"))
                return x + lib.matmul_reduce_scatter(h, weights[1], "x"), x.sum()

            layer = jax.checkpoint(layer) if remat else layer
            return lax.scan(layer, x, (w, v))[0]

        specs = (P("x"), P(None, None, "x"), P(None, "x"))
        return with_gradients(over_x(body, specs, P("x"), check_vma), (0, 1, 2))

    args = values((2 * N, 5), (3, 5, 3 * N), (3, 3 * N, 5))
    like_lax(program, *args)
    expected = {GATHER: 3 if remat else 2, SCATTER: 2}
    assert collectives(program(jax_intranode), *args) == expected


@MOSTLY_CHECKED
def test_derivatives_of_higher_order(check_vma: bool) -> None:
    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            columns = lib.matmul_reduce_scatter(x, jnp.sin(w[:, :N]), "x", scatter_dimension=-1)
            return three(lib, x, w)[None] + (columns**2).sum()

        f = over_x(body, (P("x"), P(None, "x")), P("x"), check_vma)

        def both(x: Any, w: Any) -> Any:
            gradient = jax.grad(lambda x, w: f(x, w).sum(), (0, 1))
            along = jax.jvp(gradient, (x, w), (jnp.cos(x), jnp.sin(w)))
            twice = jax.grad(lambda x, w: sum((g**2).sum() for g in gradient(x, w)), (0, 1))
            return along, twice(x, w)

        return both

    like_lax(program, *values((N * N, 3), (3, N * N)))


@pytest.mark.parametrize("transform", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
@BOTH
def test_value_and_tangent_in_one_call(check_vma: bool, transform: Any) -> None:
    """A custom_jvp's rule makes one call of which the value is known and the tangent is not."""

    def program(lib: Any) -> Callable[..., Any]:
        @jax.custom_jvp
        def f(x: Any, w: Any) -> Any:
            return lib.all_gather_matmul(x, w, "x")

        @f.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            (x, w), (_, dw) = primals, tangents
            return tuple(lib.all_gather_matmul(x, [w, 3 * dw], "x"))

        body = transform(lambda x, w: jnp.sin(f(x, w)))
        mapped = over_x(body, (P("x"), P(None, "x")), P(None, "x"), check_vma)
        return with_gradients(mapped, (1,))

    like_lax(program, *values((2 * N, 3), (3, 2 * N)))


def test_linear_transpose() -> None:
    """The operations are linear in x, and in w."""
    x, w = values((2 * N, 5), (5, 3 * N))

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            def by(f: Callable[..., Any], v: Any) -> Any:
                return jax.linear_transpose(f, v)(jax.tree.map(jnp.cos, f(v)))

            return [
                by(lambda x: lib.all_gather_matmul(x, [w, w], "x")[1:], x),
                by(lambda w: lib.all_gather_matmul(x, [w, w * 2], "x"), w),
                by(lambda w: lib.matmul_reduce_scatter(x[:N], w, "x"), w),
                by(lambda x: lib.matmul_reduce_scatter(x, w, "x"), x),
                by(lambda w: lib.matmul_all_reduce(x, w, "x"), w),
                by(lambda x: lib.matmul_all_reduce(x, w, "x"), x),
            ]

        return over_x(body, (P(), P()))

    like_lax(program, x, w)


@pytest.mark.parametrize("spec", [P(None, "auto"), P("auto", None)])
def test_operands_sharded_over_explicit_axes_are_laxs(spec: P) -> None:
    """lax decides how a product is sharded, along N and along the contracted dimension."""
    need_devices(4)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("auto", "x"), axis_types=(AxisType.Explicit,) * 2)
    x, w = values((8, 4), (4, 4))

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return lib.matmul_all_reduce(x, w, "x")

        f = jax.shard_map(
            body, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}, check_vma=False
        )
        return jax.jit(with_gradients(f, (0, 1)))

    with jax.set_mesh(mesh):
        args = jax.reshard(x, P("x", None)), jax.reshard(w, spec)
        ours, theirs = (program(lib)(*args) for lib in (jax_intranode, LAX_MATMULS))
        (call, *_) = explain(lambda *args: program(jax_intranode)(*args)[0])(*args)
    same(ours, theirs)
    assert [v.sharding.spec for v in jax.tree.leaves(ours)] == [
        v.sharding.spec for v in jax.tree.leaves(theirs)
    ]
    assert call.algorithm == "lax" and "sharded over explicit axes" in call.reason
