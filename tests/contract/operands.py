"""Rows of the contract: pytrees, dtypes, values that are not arrays, shapes and layouts."""

import collections
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from contract import rows
from contract.rows import How, each, each_raised, inside, line, row, run, shmap, small, types_inside
from jax_intranode._src import operations

# Pytrees.


@row("a pytree: dict, list, tuple, None, namedtuple, a class, nested, 40 arrays", How.ACCELERATED)
def pytrees(lib: Any) -> Any:
    Pair = collections.namedtuple("Pair", ["left", "right"])

    def body(v: Any) -> Any:
        partial = jax.tree_util.Partial(max, v)
        results = each(lib, {"a": [v, None, (v + 1,)], "b": Pair(v * 2, {}), "c": partial})
        for result in results.values():
            assert type(result["b"]) is Pair and result["a"][1] is None
            assert isinstance(result["c"], jax.tree_util.Partial)
        many = lib.psum([v[:, : k % 4] + k for k in range(40)], "x")
        return [(r["a"], tuple(r["b"]), r["c"].args) for r in results.values()], many

    return inside(body)


@row("a pytree of many dtypes and shapes, of which only some leaves are accelerated", How.PARTLY)
def parts_of_some_leaves(lib: Any) -> Any:
    names = "float32", "bfloat16", "int16", "float32", "bool", "complex64", "int32", "float16"

    def body(v: Any) -> Any:
        leaves = [jnp.full((k % 3 + 1, k), v[0, 0]).astype(d) for k, d in enumerate(names)]
        short = v, v.astype(jnp.int16)
        extremes = lib.pmax(short, "x"), lib.pmin(short, "x")  # XLA has none of complex numbers
        parts = each(lib, [*short, v.astype(jnp.complex64)], without=rows.EXTREMES)
        return lib.psum(leaves, "x"), parts, extremes

    return inside(body)


@row("an empty pytree, and None", How.TYPES)
def empty_pytrees(lib: Any) -> Any:
    return types_inside(lambda v: [each(lib, tree) for tree in ([], (), {}, None, [None, ()])])


# Constants.


@row(
    "Python and NumPy scalars and arrays, alone and beside arrays: `psum` multiplies them while "
    "tracing, so `psum(1, axis)` can be used in shapes",
    How.TYPES,
)
def python_scalars(lib: Any) -> Any:
    arrays = np.ones(3, np.int32), np.ones((4, 3), np.int32), jnp.asarray(small(4, 3))
    scalars = 1, 1.5, 2j, True, np.int8(3), np.float16(2), np.bool_(True)

    def body(v: Any) -> Any:
        tree = {"a": v, "b": 1, "c": 2.5, "d": [np.float32(3), np.ones(3)], "e": True, "f": v > 1}
        return lib.psum(tree, "x"), lib.psum(v.reshape(lib.psum(1, "x"), -1), "x")

    return types_inside(body), [
        types_inside(lambda v, c=value: each_raised(lib, lambda f: f(c, "x")))
        for value in (*scalars, *arrays, {"a": arrays[2], "b": 2})
    ]


@row("NumPy arrays and arrays from outside shard_map", How.LAX)
def constants(lib: Any) -> Any:
    outside = jnp.asarray(small(4, 3))
    return inside(lambda v: each(lib, outside)), inside(lambda v: each(lib, np.ones(4)))


@row("weakly typed operands: the weak type is kept or dropped as by lax", How.TYPES)
def weak_types(lib: Any) -> Any:
    def body(v: Any) -> Any:
        weak = jnp.full((), 3.0), jnp.full((2,), 3)
        assert all(jax.typeof(value).weak_type for value in weak)
        varying = lax.while_loop(lambda c: c[0] < 3.0, lambda c: (c[0] + 1.0, v), (3.0, v))[0]
        assert jax.typeof(varying).weak_type
        return (
            [f(tree, "x") for f in (lib.psum, lib.pmean) for tree in (weak, varying, (v, *weak))],
            lib.psum(weak[0], "x"),
            lib.pmean((varying, v), "x"),
            lib.all_gather(varying, "x"),
            lib.all_gather((v[0, 0], varying), "x"),
            each(lib, jnp.full((4,), 3)),
        )

    return types_inside(body)


@row("an array that is created inside shard_map, and one that a reference holds", How.ACCELERATED)
def made_inside(lib: Any) -> Any:
    def body(v: Any) -> Any:
        ref = jax.new_ref(v)
        ref[...] += lib.psum(ref[...], "x")
        return each(lib, ref[...]), each(lib, jnp.full((4,), 2.0, v.dtype))

    return inside(body)


# Dtypes.


@row("all accelerated dtypes of each function, in one pytree", How.ACCELERATED)
def every_dtype(lib: Any) -> Any:
    def bits(r: Any) -> Any:
        return lax.bitcast_convert_type(r, jnp.uint8) if r.dtype.name.startswith("float8") else r

    def body(v: Any) -> Any:
        sent = {d: v.astype(d) for d in operations.EXCHANGED}
        copied = {d: sent[d] for d in cases.COPIED_DTYPES}
        summed = {d: sent[d] for d in cases.DTYPES}
        infinite = {d: jnp.where(v > 2, v, -np.inf).astype(d) for d in cases.FLOATS}
        with_zero = {d: u for d, u in sent.items() if d != "float8_e8m0fnu"}
        exchanged = lib.all_to_all(sent, "x", 0, 1, tiled=True)
        assert all(r.dtype == d for d, r in exchanged.items())
        permuted = lib.ppermute(sent, "x", [(0, 1), (1, 0)]), lib.ppermute(with_zero, "x", [(0, 1)])
        return (
            {d: r.astype("float32") if d.startswith("float8") else r for d, r in exchanged.items()},
            jax.tree.map(bits, permuted),
            lib.all_gather(copied, "x"),
            lib.psum_scatter(summed, "x", tiled=True),
            [f(summed, "x") for f in (lib.psum, lib.pmean)],
            [f([summed, infinite], "x") for f in (lib.pmax, lib.pmin)],
        )

    with cases.x64("float64"):
        return inside(body)


@row("bool, int16, uint16, complex: reduced by lax", How.LAX)
def other_dtypes(lib: Any) -> Any:
    def body(v: Any) -> Any:
        short = {d: v.astype(d) for d in ("int16", "uint16")}
        tree = short | {d: v.astype(d) for d in ("complex64", "complex128")}
        scattered = lib.psum_scatter(tree, "x", tiled=True)
        extremes = [f(short | {"bool": v > 1}, "x") for f in (lib.pmax, lib.pmin)]
        whole = {**tree, "bool": v > 1}
        sums = {d: lib.psum(u, "x") for d, u in whole.items()}
        return scattered, extremes, lib.pmean(whole, "x"), sums

    with cases.x64("float64"):
        wrong = types_inside(lambda v: rows.raised(lambda: lib.psum_scatter(v > 1, "x")))
        return inside(body), wrong


EXOTIC = [
    *("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
]


@row("small floats and integers (float8, int4), where the platform has them", How.AS_LAX)
def parts_of_exotic_dtypes(lib: Any) -> Any:
    def summed(dtype: str) -> Any:
        # Ones, because some of the types have no zero.
        f = shmap(lambda v: lib.psum(v.astype(dtype), "x").astype(jnp.float32), check_vma=False)
        return rows.raised(lambda: run(f, np.ones((4, 3), np.float32)))

    def gathered(dtype: str) -> Any:
        def body(v: Any) -> Any:
            return lib.all_gather(v.astype(dtype), "x").astype(jnp.float32)

        return rows.raised(lambda: run(shmap(body, out_specs=P("x"), check_vma=False), small(8, 3)))

    of_gathers = [gathered(dtype) for dtype in ("float8_e4m3fn", "float8_e5m2", "int4")]
    return of_gathers, {dtype: summed(dtype) for dtype in EXOTIC}


# Values that are not arrays of numbers.


@row("float0, PRNG keys, references, values that are not arrays", How.AS_LAX)
def parts_of_no_arrays(lib: Any) -> Any:
    nothing = np.zeros((4,), jax.dtypes.float0)

    def types(value: Callable[[Any], Any]) -> Any:
        return each_raised(lib, lambda f: types_inside(lambda v: f(value(v), "x")))

    keys = small(8, 2, dtype=np.uint32)

    def keyed(f: Any) -> Any:
        return types_inside(lambda v: f(jax.random.wrap_key_data(v), "x"), keys)

    return (
        [types(lambda v, t=t: t) for t in (nothing, "abc", ["abc"], object())],
        [types(lambda v, t=t: (v, t)) for t in (nothing, "abc", object())],
        types(jax.new_ref),
        each_raised(lib, keyed),
    )


# Shapes and layouts.


@row("arrays of one element, of many dimensions, transposed, strided, reversed", How.ACCELERATED)
def shapes(lib: Any) -> Any:
    def of_one(v: Any) -> Any:
        results = (
            [f([v[0, 0], v[:1, :1], v.sum()], "x") for f in (lib.psum, lib.pmean, lib.all_gather)],
            lib.psum_scatter(v[:2, 0], "x"),
            lib.psum_scatter(v[:2, :1], "x", tiled=True),
        )
        return jax.tree.map(lambda r: r[None], results)

    def of_views(v: Any) -> Any:
        return [each(lib, u) for u in (v.T, v[::2, 1:3], v[::-1], v.reshape(4, 1, 2, 1, 3))]

    return inside(of_one), inside(of_views, np.asfortranarray(small(8, 6))[:, ::-1])


@row("zero-sized arrays, alone and in a pytree", How.AS_LAX)
def parts_of_nothing(lib: Any) -> Any:
    cuts = (lambda v: v[:0]), (lambda v: v[:, :0]), (lambda v: (v, v[:0].astype(jnp.int32)))
    return [
        each_raised(lib, lambda f, c=cut: rows.inside_raised(lambda v: f(c(v), "x")))
        for cut in cuts
    ]


@row("arguments and results with layouts that are not row-major", How.ACCELERATED)
def layouts_of_arguments(lib: Any, check: bool) -> Any:
    mesh = line()
    column_major = Layout(major_to_minor=(1, 0))
    argument = Format(column_major, NamedSharding(mesh, P("x")))
    value = jax.device_put(small(8, 6), argument)
    result = run(
        shmap(lambda v: lib.psum(v, "x"), mesh, check_vma=check),
        value,
        in_shardings=argument,
        out_shardings=Format(column_major, NamedSharding(mesh, P())),
    )
    return result, str(result.format.layout)


@row("arrays too large for our kernels", How.LAX)
def large_arrays(lib: Any) -> Any:
    def body(v: Any) -> Any:
        return [r[:, ::4096] for r in each(lib, v).values()]

    columns = 3 << (20 if jax.devices()[0].platform == "cpu" else 23)
    return run(shmap(body, out_specs=P("x"), check_vma=False), small(4, columns))
