"""Rows of the contract: control flow, batching, and memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

from contract import rows
from contract.differentiation import arguments, loss, over_both
from contract.rows import PROGRAMS, How, each, inside, on_line, raised, row, run, shmap, small

# Control flow.


@row("nested `jit`, inlined and not; `closure_convert`; `named_call`", How.ACCELERATED)
def nested_jit(lib: Any) -> Any:
    def body(v: Any) -> Any:
        def inner(u: Any) -> Any:
            return each(lib, u)

        f, consts = jax.closure_convert(lambda u: each(lib, u * v), v)
        named = jax.named_call(inner, name="named")(v)
        return jax.jit(inner)(v), jax.jit(jax.jit(inner), inline=True)(v * 2), f(v, *consts), named

    return inside(body)


@row("eager, without `jit`, and under `disable_jit`", How.ACCELERATED)
def eager(lib: Any, check: bool) -> Any:
    def body(v: Any) -> Any:
        return each(lib, v), lib.psum({"a": v[:1], "b": 1.0}, "x")["a"]

    f, value = shmap(body, None, P("x"), P("x"), check), on_line(small(8, 3))
    with jax.disable_jit():
        disabled = f(value)
    return f(value), disabled


@row("`while_loop`, in its body and in its condition; `scan`, `fori_loop`, `map`", How.ACCELERATED)
def loops(lib: Any) -> Any:
    def both(v: Any) -> Any:
        half = lib.psum_scatter(v, "x", tiled=True)
        whole = lib.all_gather(half, "x", tiled=True)
        return lib.all_to_all(whole, "x", 0, 0, tiled=True) - lib.pmean(v, "x")

    def body(v: Any, w: Any) -> Any:
        def step(carry: Any) -> Any:
            return carry[0] + 1, both(carry[1]) + lib.psum(v * w, "x")

        def go_on(carry: Any) -> Any:
            return lib.psum(carry[0] * jnp.int32(v[0, 0] * 0 + 1), "x") < 6

        of_while = lax.while_loop(go_on, step, (0, v))[1]
        scanned = lax.scan(lambda c, k: (both(c), lib.psum(v * k, "x")), v + w, jnp.arange(3.0))
        looped = lax.fori_loop(0, 2, lambda k, c: c + lib.psum(v * k, "x"), w)
        each_row = lax.map(lambda u: each(lib, u), v.T)
        return of_while, scanned[0], scanned[1].sum(0), looped, each_row

    return inside(body, small(8, 4, top=2), small(4, 4, seed=1), in_specs=(P("x"), P()))


@row("`cond` and `switch` whose index is only known at run time", How.ACCELERATED)
def cond(lib: Any) -> Any:
    def body(v: Any, w: Any) -> Any:
        total = lib.psum(v, "x")
        flag = lib.pmean(v, "x").sum() > 0  # known at run time only
        one = lax.cond(flag, lambda: each(lib, v), lambda: each(lib, v * 2))
        two = lax.cond(flag, lambda: lib.psum(v * w, "x"), lambda: total)
        index = jnp.int32(total[0, 0]) % 3
        sums = [lambda: lib.psum(v, "x"), lambda: w, lambda: lib.psum({"a": v}, "x")["a"]]
        scatters = [lambda k=k: lib.psum_scatter(v + k, "x", tiled=True) for k in range(3)]
        return one, two, lax.switch(index, sums), lax.switch(index, scatters)

    return inside(body, small(8, 3), small(4, 3, seed=1), in_specs=(P("x"), P()))


@row("`cond` that runs repeatedly: XLA captures it into a conditional graph node", How.ACCELERATED)
def cond_replayed(lib: Any) -> Any:
    def body(v: Any, w: Any) -> Any:
        def step(k: Any, carry: Any) -> Any:
            return lax.cond(
                carry.sum() % 2 < 1,
                lambda: lib.psum(v * carry, "x") % 7,
                lambda: lib.psum(v, "x") + carry,
            )

        return lax.fori_loop(0, 4, step, w)

    program = jax.jit(shmap(body, in_specs=(P("x"), P())))
    program = program.lower(small(4, 3), small(2, 3, seed=1)).compile()
    PROGRAMS.append(program.as_text())
    # XLA captures a graph at the second run and replays it afterwards.
    return [program(small(4, 3, seed=k), small(2, 3, seed=k + 1)) for k in range(6)]


# Batching.


@row("`vmap` inside shard_map: any axis, some operands or leaves, nested, `cond`", How.ACCELERATED)
def vmap_inside(lib: Any) -> Any:
    def body(v: Any, w: Any) -> Any:
        of_rows = jax.vmap(lambda r: lib.psum(r, "x"))(v)
        columns = jax.vmap(lambda c: lib.psum(c, "x"), in_axes=1, out_axes=1)(v)
        some = jax.vmap(lambda r, s: each(lib, (r, s, r * s)), in_axes=(1, None))(v, w[:, 0])
        mixed = jax.vmap(lambda r, s: lib.psum({"r": r, "s": s}, "x"), in_axes=(0, 1))(v, w.T)
        pairs = jax.vmap(jax.vmap(lambda e: lib.psum((e, 1), "x")[0]))(v)
        nested = jax.vmap(jax.vmap(lambda e: lib.all_gather(e, "x")))(v)
        unbatched = jax.vmap(lambda r: each(lib, w))(v)
        again = lib.psum(jax.vmap(lambda r: lib.psum(w, "x") + r)(v), "x")

        def of_cond(r: Any) -> Any:  # with a batched predicate
            return lax.cond(r.sum() > 3, lambda: each(lib, v), lambda: each(lib, v * 2)), r

        chosen = jax.tree.map(lambda r: r[None], jax.vmap(of_cond)(w))
        return of_rows, columns, some, mixed, pairs, nested, unbatched, again, chosen

    return inside(body, *arguments(), in_specs=(P("x"), P()))


@row("`vmap` over each dimension, for each dimension scattered or gathered", How.ACCELERATED)
def vmap_of_parts(lib: Any) -> Any:
    def body(v: Any) -> Any:
        results = []
        v = v.reshape(2, 2, 2)
        for d in range(3):
            for k in range(2):
                fs = [
                    lambda u, k=k: lib.psum_scatter(u, "x", scatter_dimension=k, tiled=True),
                    lambda u, k=k: lib.all_gather(u, "x", axis=k, tiled=True),
                    lambda u, k=k: lib.all_gather(u, "x", axis=k - 1),
                    lambda u, k=k: lib.all_to_all(u, "x", k, 1 - k, tiled=True),
                    lambda u, k=k: lib.all_to_all(u, "x", k, 1),
                    lambda u: lib.pmean(u, "x"),
                ]
                if d <= k:  # for later dimensions lax's own rule is wrong
                    fs.append(lambda u, k=k: lib.psum_scatter(u, "x", scatter_dimension=k))
                results += [jax.vmap(f, d, 1)(v) for f in fs]
        return results

    return inside(lambda v: [r[None] for r in body(v)], small(4, 4))


@row("`vmap` of shard_map, with and without `spmd_axis_name`", How.ACCELERATED, devices=4)
def vmap_outside(lib: Any, check: bool) -> Any:
    f = shmap(lambda v: each(lib, v), rows.square(), P("x"), P("x"), check)
    batch = small(2, 8, 3)
    return run(jax.vmap(f), batch), run(jax.vmap(f, spmd_axis_name="y"), batch)


@row("`vmap` of `grad`, `grad` of `vmap`, per-example gradients, `cond` under `vmap`", How.DERIVED)
def vmap_of_grad(lib: Any, check: bool) -> Any:
    f = loss(over_both(lib, check))
    v, w = arguments()
    batch = jnp.stack([w, 2 * w])
    outside = jax.vmap(jax.grad(f, argnums=(0, 1)), in_axes=(None, 0))

    def summed(v: Any, ws: Any) -> Any:
        return jax.vmap(f, in_axes=(None, 0))(v, ws).sum()

    def per_example(v: Any, w: Any) -> Any:
        return jax.vmap(jax.grad(lambda r: (lib.psum(r * w[0], "x") ** 2).sum()))(v)

    gradient = jax.grad(summed, argnums=(0, 1))
    return (
        run(outside, v, batch),
        run(gradient, v, batch),
        run(over_both(lib, check, per_example), v, w),
    )


@row("`checkify`", How.ACCELERATED)
def checkified(lib: Any, check: bool) -> Any:
    def body(v: Any) -> Any:
        error, result = checkify.checkify(lambda u: each(lib, u))(v)
        del error
        return result

    return raised(lambda: run(shmap(body, None, P("x"), P("x"), check), small(8, 3)))


# Memory.


@row("donated arguments: aliased and deleted as with lax", How.ACCELERATED)
def donation(lib: Any, check: bool) -> Any:
    def body(v: Any, w: Any) -> Any:
        results = each(lib, v)
        return results, results["psum"] + 0 * v, w + lib.psum(w, "x")

    f = jax.jit(shmap(body, None, (P("x"), P("x")), P("x"), check), donate_argnums=(0, 1))
    operands = [on_line(small(8, 3, seed=k)) for k in range(2)]
    program = f.lower(*operands).compile()
    PROGRAMS.append(program.as_text())
    aliased = program.memory_analysis().alias_size_in_bytes
    results = f(*operands)
    return results, [operand.is_deleted() for operand in operands], aliased


@row("one array as several operands, used after, returned twice", How.ACCELERATED)
def aliasing(lib: Any, check: bool) -> Any:
    def body(v: Any) -> Any:
        results = each(lib, (v, v, v * 2))
        total = lib.psum(v, "x")
        again = each(lib, results["psum"]), lib.psum((v, v, v.T), "x")
        return results, total, total, again, v * 3, v

    value = on_line(small(8, 3))
    return run(shmap(body, None, P("x"), P("x"), check), value), value
