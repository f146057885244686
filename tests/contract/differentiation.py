"""Rows of the contract: gradients, tangents and their transposes.

The functions are polynomials of small integers, so gradients are exact.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from contract import rows
from contract.rows import EXTREMES, How, each, inside, kind, row, run, shmap, small, under_both

# Layers of all operations, whose results vary.


def layer(lib: Any) -> Callable[..., Any]:
    """A layer of a varying and a replicated operand, alone and in pytrees."""

    def f(v: Any, w: Any) -> Any:
        cut = (v * w).reshape(2, 2, 3)
        scattered = lib.psum_scatter({"a": v * w, "b": w * w}, "x", tiled=True)
        untiled = lib.psum_scatter(cut, "x", scatter_dimension=1)
        gathered = lib.all_gather((v[:1] * w[1:2], w[:1]), "x", tiled=True)
        stacked = lib.all_gather(untiled, "x", axis=1)
        exchanged = lib.all_to_all((v, w), "x", 0, 1, tiled=True)
        shifted = lib.ppermute((v[:2], w[2:]), "x", [(1, 0)])
        mean = lib.pmean((v[:2] * 2, w[2:] * 4), "x")
        return (
            scattered["a"] * scattered["b"] + gathered[0] * gathered[1] + stacked.sum(1)
            + untiled * mean[0] + mean[1] * v[2:] + exchanged[0][:, :3] * exchanged[1][:, 3:]
            + sums(lib)(v[:2], w[:2]) + shifted[0] * shifted[1]
        )  # fmt: skip

    return f


def sums(lib: Any) -> Callable[..., Any]:
    """A layer of psums, whose result is the same on all ranks."""

    def f(v: Any, w: Any) -> Any:
        tree = lib.psum({"a": v * w, "b": w, "c": (v.sum(),)}, "x")
        return lib.psum(v, "x") * w + tree["a"] * tree["b"] + tree["c"][0] + lib.psum(w * w, "x")

    return f


def over_both(lib: Any, check: bool, f: Any = None) -> Any:
    """shard_map of the layer, or of another function of a varying and a replicated operand."""
    return shmap(f or layer(lib), None, (P("x"), P()), P("x"), check)


def arguments() -> tuple[np.ndarray, np.ndarray]:
    return small(8, 3, top=3), small(4, 3, seed=1, top=3)


def differentiated(lib: Any, transform: Callable[[Any], Any]) -> Any:
    """Transforms the layer outside shard_map."""
    return under_both(lambda check: run(transform(over_both(lib, check)), *arguments()))


def differentiated_inside(lib: Any, transform: Callable[[Any], Any]) -> Any:
    """Transforms the layer inside shard_map. Types, too."""

    def under(check: bool) -> Any:
        seen: list[Any] = []

        def body(v: Any, w: Any) -> Any:
            result = transform(layer(lib))(v, w)
            seen.append(jax.tree.map(kind, result))
            return result

        return run(over_both(lib, check, body), *arguments()), seen

    return under_both(under)


# Functions of psum alone, whose result is replicated.


def smap_2(body: Any, check_vma: bool, out_specs: Any = rows.REPLICATED) -> Any:
    """shard_map of a function of a varying and a replicated operand."""
    return shmap(body, in_specs=(P("x"), P()), out_specs=out_specs, check_vma=check_vma)


def operands() -> tuple[np.ndarray, np.ndarray]:
    return small(4, 3), small(2, 3, seed=1)


def differentiated_sums(lib: Any, transform: Callable[[Any], Any]) -> Any:
    return under_both(lambda check: run(transform(smap_2(sums(lib), check)), *operands()))


def loss(f: Any) -> Any:
    return lambda v, w: (f(v, w) ** 2).sum()


# Gradients.


@row("`grad` and `value_and_grad` outside, of varying and replicated operands", How.DERIVED)
def grad_outside(lib: Any) -> Any:
    def transform(f: Any) -> Any:
        return jax.value_and_grad(loss(f), argnums=(0, 1))

    some = [differentiated_sums(lib, lambda f, k=k: jax.grad(loss(f), argnums=k)) for k in (0, 1)]
    return differentiated(lib, transform), differentiated_sums(lib, transform), some


@row("`grad` inside shard_map, operands varying and replicated: types and values", How.DERIVED)
def grad_inside(lib: Any) -> Any:
    return differentiated_inside(lib, lambda f: jax.grad(loss(f), argnums=(0, 1)))


@row("leaves that are not differentiated, not used, stopped, or integers", How.DERIVED)
def grad_of_some_leaves(lib: Any, check: bool) -> Any:
    def f(v: Any, w: Any) -> Any:
        tree = v, v * w, lax.stop_gradient(v), (v > 1).astype(jnp.int32)
        total = 0.0
        for name, result in each(lib, tree, without=EXTREMES).items():
            used, _, stopped, integer = result
            total += (used * stopped + integer).sum() * len(name)
        return total[None]

    g = over_both(lib, check, f)
    gradient = run(jax.grad(lambda v, w: g(v, w).sum(), argnums=(0, 1)), *arguments())
    tangent = run(lambda v, w: jax.jvp(lambda u: g(u, w), (v,), (v,)), *arguments())
    return gradient, tangent


@row("gradients with respect to integers (`allow_int`)", How.DERIVED)
def grad_of_integers(lib: Any, check: bool) -> Any:
    def f(v: Any, n: Any) -> Any:
        return (lib.psum(v, "x") * lib.psum(n, "x")).sum()

    mapped = smap_2(f, check)
    for_v, for_n = jax.grad(mapped, argnums=(0, 1), allow_int=True)(
        small(4, 3), small(2, 3, dtype=np.int32)
    )
    return for_v, kind(for_n)


@row("gradients in bfloat16 and in complex64", How.AS_LAX)
def grad_of_parts_of_other_types(lib: Any) -> Any:
    def total(v: Any, w: Any) -> Any:
        results = each(lib, v * w, without=EXTREMES)
        return sum(jnp.real(r * r).astype(jnp.float32).sum() for r in results.values())[None]

    # With check_vma off XLA:CPU aborts on lax's own program of complex numbers.
    g = over_both(lib, True, total)
    transform = jax.grad(lambda v, w: g(v, w).sum(), argnums=(0, 1))
    return [run(transform, *[a.astype(d) for a in arguments()]) for d in ("bfloat16", "complex64")]


# Tangents.


@row("`jvp` and `linearize`, outside and inside shard_map", How.ACCELERATED)
def tangents(lib: Any) -> Any:
    def along(f: Any) -> Any:
        return lambda v, w: jax.jvp(f, (v, w), (v * 2, w))

    def linearized(f: Any) -> Any:
        def both(v: Any, w: Any) -> Any:
            value, push = jax.linearize(f, v, w)
            return value, push(v, w), push(2 * v, 0 * w)

        return both

    return [
        how(lib, transform)
        for transform in (along, linearized)
        for how in (differentiated, differentiated_inside)
    ]


@row("`jvp` of `grad`, `grad` of `jvp` and `grad`, `jacfwd`, `jacrev`, `hessian`", How.DERIVED)
def jacobians(lib: Any, check: bool) -> Any:
    def f(v: Any, w: Any) -> Any:
        half = lib.psum_scatter(v * v * w, "x", tiled=True)[0, :1]
        return half * lib.pmean(v, "x")[0, 1:] + (lib.psum(v * v, "x") * lib.psum(w, "x"))[0, 1:]

    g = over_both(lib, check, f)
    total = loss(g)

    def forward_over_reverse(v: Any, w: Any) -> Any:
        return jax.jvp(jax.grad(total, argnums=(0, 1)), (v, w), (v, w))

    def reverse_over_forward(v: Any, w: Any) -> Any:
        forward = lambda v, w: jax.jvp(total, (v, w), (v, w))[1]  # noqa: E731
        return jax.grad(forward, argnums=(0, 1))(v, w)

    twice = jax.grad(lambda v, w: (jax.grad(total)(v, w) ** 2).sum())
    jacobians = jax.jacrev(g), jax.jacfwd(g, argnums=1), jax.hessian(total)
    transformed = forward_over_reverse, reverse_over_forward, twice, *jacobians
    return [run(t, small(8, 3, top=2), small(4, 3, top=2)) for t in transformed]


# Transposes.


@row("`vjp` and `linear_transpose` of each, on each dimension", How.DERIVED)
def transposes(lib: Any) -> Any:
    def f(v: Any) -> Any:
        return (
            *(lib.psum_scatter(v, "x", scatter_dimension=d, tiled=True) for d in (0, 1)),
            *(lib.psum_scatter(v, "x", scatter_dimension=d) for d in (0, 1)),
            *(lib.all_gather(v, "x", axis=a, tiled=True) for a in (0, 1)),
            *(lib.all_gather(v, "x", axis=a) for a in (0, 1, -1)),
            *(lib.all_to_all(v, "x", s, 1, tiled=True) for s in (0, 1)),
            *(lib.all_to_all(v, "x", d, d) for d in (0, 1)),
            lib.pmean(v, "x"),
            lib.psum({"a": v, "b": v * 2}, "x"),
            lib.ppermute({"a": v, "b": v * 3}, "x", [(0, 1)]),
            lib.ppermute(v, "x", [(0, 1), (1, 0)]),
        )

    def body(v: Any) -> Any:
        results, pullback = jax.vjp(f, v)
        (transposed,) = jax.linear_transpose(f, v)(results)
        return pullback(jax.tree.map(lambda r: r * 2, results)), transposed

    def with_constants(v: Any, w: Any) -> Any:
        constant = w + 1
        transposed = jax.linear_transpose(lambda u: lib.psum((u, constant, u * w), "x"), v)
        return transposed((w, constant, w * w))[0]

    def outside(check: bool) -> Any:
        linear = shmap(lambda v: lib.psum({"a": v, "b": v * 2}, "x"), check_vma=check)

        def f(v: Any) -> Any:
            cotangents = {"a": jnp.ones((2, 3)), "b": 3 * jnp.ones((2, 3))}
            _, pullback = jax.vjp(linear, v)
            return pullback(cotangents), jax.linear_transpose(linear, v)(cotangents)

        return run(f, small(4, 3))

    of_constants = inside(with_constants, *operands(), in_specs=(P("x"), P()))
    return inside(body, small(4, 2)), of_constants, under_both(outside)


@row("`pmax` and `pmin` have no derivative", How.ERROR)
def derivatives_of_extremes(lib: Any, check: bool) -> Any:
    def refused(f: Any, transform: Any) -> Any:
        mapped = shmap(transform(lambda v: f({"a": v * v}, "x")["a"].sum()), check_vma=check)
        return rows.raised(lambda: run(mapped, small(4, 3)))

    transforms = jax.grad, lambda g: lambda v: jax.jvp(g, (v,), (v,))[1]
    return [refused(f, t) for f in (lib.pmax, lib.pmin) for t in transforms]


@row("`pmax` and `pmin` of what is not differentiated", How.DERIVED)
def extremes_in_gradients(lib: Any, check: bool) -> Any:
    def f(v: Any, w: Any) -> Any:
        scale = lib.pmax(lax.stop_gradient(v * w), "x") + lib.pmin(jnp.ones((4, 3)), "x")
        return v * v * scale * w

    return run(jax.grad(loss(over_both(lib, check, f)), argnums=(0, 1)), *arguments())


@row(
    "partial evaluation, also by `checkpoint` and its policies: one psum of a value and its "
    "tangent, or of a constant and a variable",
    How.DERIVED,
)
def partly_known(lib: Any, check: bool) -> Any:
    policy = jax.checkpoint_policies

    def in_scan(f: Any) -> Any:
        return lambda v: lax.scan(lambda total, _: (total + f(v), None), 0 * f(v), length=2)[0]

    @jax.custom_jvp
    def f(v: Any) -> Any:
        squares, v = lib.psum((v * v, v), "x")
        return squares * v

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (v,), (t,) = primals, tangents
        (squares, v), (of_squares, t) = lib.psum(((v * v, v), (3 * v * t, 5 * t)), "x")
        return squares * v, of_squares * v + squares * t

    def gradient(wrap: Callable[[Any], Any]) -> Any:
        mapped = shmap(lambda v: wrap(f)(v) * v, out_specs=P("x"), check_vma=check)
        return run(jax.grad(lambda v: (mapped(v) ** 2).sum()), small(4, 3))

    def transposed(v: Any, constant: Any) -> Any:
        def linear(u: Any) -> Any:
            of_u, of_constant = lib.psum((u, constant), "x")
            return of_u * of_constant

        return jax.linear_transpose(linear, v)(linear(v))[0]

    over_x = shmap(transposed, in_specs=(P("x"), P("x")), out_specs=P("x"), check_vma=check)
    return run(over_x, small(4, 3), small(4, 3, seed=1)), [
        gradient(wrap)
        for wrap in (
            lambda f: f,
            jax.jit,
            in_scan,
            jax.checkpoint,
            lambda f: jax.checkpoint(jax.checkpoint(f)),
            functools.partial(jax.checkpoint, policy=policy.everything_saveable),
            functools.partial(jax.checkpoint, policy=lambda p, *_, **__: "psum" in p.name),
        )
    ]


@row("gradients through nested `jit`, `scan`, `cond`, `checkpoint`, `custom_vjp`", How.DERIVED)
def grad_through_control_flow(lib: Any, check: bool) -> Any:
    def layered(v: Any, w: Any) -> Any:
        return jax.checkpoint(jax.jit(layer(lib)))(v, w)

    def scanned(v: Any, w: Any) -> Any:
        def step(c: Any, k: Any) -> Any:
            half = lib.psum_scatter(c * k * w, "x", tiled=True)
            total = lib.psum(v * k, "x") + lib.all_gather(half, "x", tiled=True)
            return total, lib.pmean(c, "x").sum()

        return lax.scan(step, v + 0 * w, jnp.arange(1.0, 3.0))[0]

    def conditional(v: Any, w: Any) -> Any:
        flag = lib.psum(v, "x").sum() > 0
        f = functools.partial(lib.psum_scatter, tiled=True)
        total = lax.cond(flag, lambda: lib.psum(v * w, "x"), lambda: lib.psum(v, "x"))
        return lax.cond(flag, lambda: f(v * w, "x"), lambda: f(v * 2, "x")) + total[:2]

    @jax.custom_vjp
    def squares(v: Any) -> Any:
        return lib.psum(v * v, "x")

    def backward(v: Any, ct: Any) -> Any:
        return (v * ct + lib.psum(v, "x"),)

    squares.defvjp(lambda v: (squares(v), v), backward)
    by_rules = lambda v, w: squares(v) * w + 0 * v  # noqa: E731
    return [
        run(jax.value_and_grad(loss(over_both(lib, check, f)), argnums=(0, 1)), *arguments())
        for f in (layered, scanned, conditional, by_rules)
    ]


@row("`jvp` through `while_loop`, and `grad` of it refused", How.DERIVED)
def while_loop_differentiated(lib: Any, check: bool) -> Any:
    def body(v: Any, w: Any) -> Any:
        def step(carry: Any) -> Any:
            return carry[0] + 1, carry[1] + lib.psum(v * w, "x")

        return lax.while_loop(lambda carry: carry[0] < 3, step, (0, w))[1]

    mapped = smap_2(body, check)
    forward = run(lambda v, w: jax.jvp(mapped, (v, w), (v, w)), *operands())
    return forward, rows.raised(lambda: run(jax.grad(loss(mapped)), *operands()))
