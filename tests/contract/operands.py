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

from contract.rows import (
    ACCELERATED,
    AS_LAX,
    EXTREMES,
    LAX,
    PARTLY,
    TYPES,
    each,
    each_raised,
    inside,
    inside_raised,
    line,
    raised,
    row,
    run,
    shmap,
    small,
    types_inside,
    under_both,
)
from jax_intranode._src import operations

# Pytrees.


@row("a pytree: dict, list, tuple, None, namedtuple, a registered class, nested", ACCELERATED)
def pytrees(lib: Any) -> Any:
    Pair = collections.namedtuple("Pair", ["left", "right"])

    def body(v: Any) -> Any:
        partial = jax.tree_util.Partial(max, v)
        results = each(lib, {"a": [v, None, (v + 1,)], "b": Pair(v * 2, {}), "c": partial})
        for result in results.values():
            assert type(result["b"]) is Pair and result["a"][1] is None
            assert isinstance(result["c"], jax.tree_util.Partial)
        return [(r["a"], tuple(r["b"]), r["c"].args) for r in results.values()]

    return inside(body)


@row("a pytree of several dtypes and shapes, some of which are not accelerated", PARTLY)
def pytree_of_many_dtypes(lib: Any) -> Any:
    names = ("float32", "bfloat16", "int16", "float32", "bool", "complex64", "int32", "float16")

    def body(v: Any) -> Any:
        leaves = [jnp.full((k % 3 + 1, k), v[0, 0]).astype(d) for k, d in enumerate(names)]
        return lib.psum(leaves, "x")

    return inside(body, small(4, 3), out_specs=P())


@row("a pytree of which only some leaves are accelerated", PARTLY)
def parts_of_some_leaves(lib: Any) -> Any:
    def body(v: Any) -> Any:
        short = v, v.astype(jnp.int16)
        extremes = lib.pmax(short, "x"), lib.pmin(short, "x")  # XLA has none of complex numbers
        return each(lib, [*short, v.astype(jnp.complex64)], without=EXTREMES), extremes

    return inside(body)


@row("a pytree of 40 arrays", ACCELERATED)
def pytree_of_many_arrays(lib: Any) -> Any:
    def body(v: Any) -> Any:
        return lib.psum([v[:, : k % 4] + k for k in range(40)], "x")

    return inside(body, small(2, 3), out_specs=P())


@row("an empty pytree, and None", TYPES)
def empty_pytrees(lib: Any) -> Any:
    return types_inside(lambda v: [each(lib, tree) for tree in ([], (), {}, None, [None, ()])])


# Constants.


@row("Python and NumPy scalars and arrays: `psum` multiplies them while tracing", TYPES)
def python_scalars(lib: Any) -> Any:
    arrays = np.ones(3, np.int32), np.ones((4, 3), np.int32), jnp.asarray(small(4, 3))
    scalars = 1, 1.5, 2j, True, np.int8(3), np.float16(2), np.bool_(True)
    return [
        types_inside(lambda v, c=value: each_raised(lib, lambda f: f(c, "x")))
        for value in (*scalars, *arrays, {"a": arrays[2], "b": 2})
    ]


@row("`psum(1, axis)` is a Python int and can be used in shapes", ACCELERATED)
def axis_size_is_static(lib: Any) -> Any:
    def body(v: Any) -> Any:
        return lib.psum(v.reshape(lib.psum(1, "x"), -1), "x")

    return inside(body, small(4, 3), out_specs=P())


@row("Python scalars and traced arrays in one pytree: the scalars stay static", TYPES)
def scalars_beside_arrays(lib: Any) -> Any:
    return types_inside(
        lambda v: lib.psum({"a": v, "b": 1, "c": 2.5, "d": [np.float32(3), np.ones(3)]}, "x")
    )


@row("bool and other arrays in one pytree: bool becomes int32", TYPES)
def bool_beside_arrays(lib: Any) -> Any:
    return types_inside(lambda v: lib.psum({"a": v, "b": True, "c": v > 1}, "x"))


@row("a concrete `jax.Array` from outside shard_map", LAX)
def concrete_array(lib: Any) -> Any:
    outside = jnp.asarray(small(3))
    return inside(lambda v: lib.psum(outside, "x"), small(4, 3), out_specs=P())


@row("NumPy arrays and arrays from outside shard_map", AS_LAX)
def parts_of_constants(lib: Any) -> Any:
    outside = jnp.asarray(small(4, 3))
    return inside(lambda v: each(lib, outside)), inside(lambda v: each(lib, np.ones(4)))


@row("an array that is created inside shard_map", ACCELERATED)
def constant_made_inside(lib: Any) -> Any:
    return inside(lambda v: each(lib, jnp.full((4,), 2.0, v.dtype)))


@row("weakly typed operands: the weak type is kept or dropped as by lax", TYPES)
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


@row("weak types of the results", ACCELERATED)
def weak_types_of_results(lib: Any) -> Any:
    return inside(
        lambda v: (lib.psum(v, "x"), lib.psum(v, "x") + 1), 3.0, in_specs=P(), out_specs=P()
    )


# Dtypes.


@row("all accelerated dtypes, in one pytree and alone", ACCELERATED)
def parts_of_every_dtype(lib: Any) -> Any:
    def body(v: Any) -> Any:
        summed = {d: v.astype(d) for d in cases.DTYPES}
        copied = {d: v.astype(d) for d in cases.COPIED_DTYPES}
        scattered = lib.psum_scatter(summed, "x", tiled=True)
        alone = {d: lib.psum(u, "x") for d, u in summed.items()}
        return scattered, lib.all_gather(copied, "x"), lib.pmean(summed, "x"), alone

    with cases.x64("float64"):
        return inside(body)


@row("`all_to_all` of every dtype that `all_gather` takes, and of the float8 dtypes", ACCELERATED)
def exchange_of_every_dtype(lib: Any) -> Any:
    def body(v: Any) -> Any:
        copied = {d: v.astype(d) for d in operations.EXCHANGED}
        exchanged = lib.all_to_all(copied, "x", 0, 1, tiled=True)
        assert all(r.dtype == d for d, r in exchanged.items())
        small_floats = (d for d in exchanged if d.startswith("float8"))
        return exchanged | {d: exchanged[d].astype(jnp.float32) for d in small_floats}

    with cases.x64("float64"):
        return inside(body)


@row("`ppermute` of the same dtypes", ACCELERATED)
def permutes_of_every_dtype(lib: Any) -> Any:
    def body(v: Any) -> Any:
        tree = {d: v.astype(d) for d in operations.EXCHANGED}
        swapped = lib.ppermute(tree, "x", [(0, 1), (1, 0)])
        del tree["float8_e8m0fnu"]  # it has no zero
        results = swapped, lib.ppermute(tree, "x", [(0, 1)])
        assert all(r.dtype == d for sent in results for d, r in sent.items())
        return [
            {
                d: lax.bitcast_convert_type(r, jnp.uint8) if d.startswith("float8") else r
                for d, r in sent.items()
            }
            for sent in results
        ]

    with cases.x64("float64"):
        return inside(body)


@row("`pmax` and `pmin` of all dtypes of sums, with infinities", ACCELERATED)
def extremes_of_every_dtype(lib: Any) -> Any:
    def body(v: Any) -> Any:
        tree = {d: v.astype(d) for d in cases.DTYPES}
        tree |= {f"inf {d}": jnp.where(v > 2, v, -np.inf).astype(d) for d in cases.FLOATS}
        return lib.pmax(tree, "x"), lib.pmin(tree, "x")

    with cases.x64("float64"):
        return inside(body)


@row("`pmax` and `pmin` of bool, int16, uint16: by lax", LAX)
def extremes_of_other_dtypes(lib: Any) -> Any:
    def body(v: Any) -> Any:
        tree = {"bool": v > 1, **{d: v.astype(d) for d in ("int16", "uint16")}}
        return lib.pmax(tree, "x"), lib.pmin(tree, "x")

    return inside(body)


@row("bool, int16, uint16, complex: summed by lax", LAX)
def parts_of_other_dtypes(lib: Any) -> Any:
    def body(v: Any) -> Any:
        tree = {d: v.astype(d) for d in ("int16", "uint16", "complex64", "complex128")}
        scattered = lib.psum_scatter(tree, "x", tiled=True)
        whole = {**tree, "bool": v > 1}
        return scattered, lib.pmean(whole, "x"), {d: lib.psum(u, "x") for d, u in whole.items()}

    with cases.x64("float64"):
        wrong = types_inside(lambda v: raised(lambda: lib.psum_scatter(v > 1, "x")))
        return inside(body), wrong


EXOTIC = [
    *("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
]


@row("small floats and integers (float8, int4), where the platform has them", AS_LAX)
def parts_of_exotic_dtypes(lib: Any) -> Any:
    def summed(dtype: str) -> Any:
        # Ones, because some of the types have no zero.
        f = shmap(lambda v: lib.psum(v.astype(dtype), "x").astype(jnp.float32), check_vma=False)
        return raised(lambda: run(f, np.ones((4, 3), np.float32)))

    def gathered(dtype: str) -> Any:
        def body(v: Any) -> Any:
            return lib.all_gather(v.astype(dtype), "x").astype(jnp.float32)

        return raised(lambda: run(shmap(body, out_specs=P("x"), check_vma=False), small(8, 3)))

    of_gathers = [gathered(dtype) for dtype in ("float8_e4m3fn", "float8_e5m2", "int4")]
    return of_gathers, {dtype: summed(dtype) for dtype in EXOTIC}


# Values that are not arrays of numbers.


@row("float0, PRNG keys, references, values that are not arrays", AS_LAX)
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


@row("the values that references hold", ACCELERATED)
def held_by_references(lib: Any) -> Any:
    def body(v: Any) -> Any:
        ref = jax.new_ref(v)
        ref[...] += lib.psum(ref[...], "x")
        return each(lib, ref[...])

    return inside(body)


# Shapes and layouts.


@row("scalar arrays, and arrays of one element", ACCELERATED)
def scalar_arrays(lib: Any) -> Any:
    def body(v: Any) -> Any:
        results = (
            [f([v[0, 0], v[:1, :1], v.sum()], "x") for f in (lib.psum, lib.pmean)],
            lib.psum(v[0, 0], "x"),
            lib.all_gather((v[0, 0], v[:1, :1]), "x"),
            lib.psum_scatter(v[:2, 0], "x"),
            lib.psum_scatter(v[:2, :1], "x", tiled=True),
        )
        return jax.tree.map(lambda r: r[None], results)

    return inside(body)


@row("zero-sized arrays, alone and in a pytree", AS_LAX)
def parts_of_nothing(lib: Any) -> Any:
    cuts = (lambda v: v[:0]), (lambda v: v[:, :0]), (lambda v: (v, v[:0].astype(jnp.int32)))
    return [
        each_raised(lib, lambda f, c=cut: inside_raised(lambda v: f(c(v), "x"))) for cut in cuts
    ]


@row("arrays of many dimensions", ACCELERATED)
def many_dimensions(lib: Any) -> Any:
    return inside(lambda v: each(lib, v), small(4, 1, 2, 3, 1, 2, 2))


@row("transposed, strided and reversed operands", ACCELERATED)
def layouts_inside(lib: Any) -> Any:
    values = np.asfortranarray(small(8, 6))[:, ::-1]
    return inside(lambda v: [each(lib, u) for u in (v.T, v[::2, 1:3], v[::-1])], values)


@row("arguments and results with layouts that are not row-major", ACCELERATED)
def layouts_of_arguments(lib: Any) -> Any:
    def under(check: bool) -> Any:
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

    return under_both(under)


@row("arrays too large for our kernels", LAX)
def large_arrays(lib: Any) -> Any:
    def body(v: Any) -> Any:
        return [r[:, ::4096] for r in each(lib, v).values()]

    return run(shmap(body, out_specs=P("x"), check_vma=False), small(4, 3 << 20))
