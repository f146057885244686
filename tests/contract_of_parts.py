"""The contract of psum_scatter, all_gather, all_to_all and pmean of lax, as in contract.py.

A row here is a function of a library: `jax_intranode`, or `jax.lax`.
"""

import collections
import functools
import inspect
from collections.abc import Callable
from typing import Any

import cases
import contract
import jax
import jax.numpy as jnp
import numpy as np
from contract import (
    ACCELERATED,
    AS_LAX,
    DERIVED,
    ERROR,
    LAX,
    PARTLY,
    TYPES,
    Row,
    kind,
    line,
    on_square,
    raised,
    run,
    shmap,
    small,
    square,
    types_inside,
    under_both,
)
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.selection import select

ROWS: dict[str, Row] = {}
NAMES = ("psum_scatter", "all_gather", "all_to_all", "pmean")
BY_X = contract.BY_X


def row(what: str, how: str, devices: int = 2) -> Callable[[Any], Any]:
    """Adds a row to the table, under the name of the function."""

    def add(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = function.__name__.strip("_").replace("_", "-")
        assert name not in ROWS and name not in contract.ROWS and how in contract.HOW

        def run_with(psum: Any) -> Any:
            return function(jax_intranode if psum is jax_intranode.psum else lax)

        ROWS[name] = Row(name, what, how, run_with, devices)
        return function

    return add


# Helpers.


def operations(lib: Any) -> dict[str, Any]:
    """The operations as functions of an operand and axes; tiled."""
    return {
        "psum_scatter": functools.partial(lib.psum_scatter, tiled=True),
        "all_gather": functools.partial(lib.all_gather, tiled=True),
        "all_to_all": functools.partial(lib.all_to_all, split_axis=0, concat_axis=0, tiled=True),
        "pmean": lib.pmean,
    }


def each(lib: Any, v: Any, axes: Any = "x", **options: Any) -> dict[str, Any]:
    """The results of the operations."""
    return {name: f(v, axes, **options) for name, f in operations(lib).items()}


def each_raised(lib: Any, function: Callable[[Any], Any]) -> dict[str, Any]:
    """The result of a function for each operation, or the error that it raises."""
    return {name: raised(lambda f=f: function(f)) for name, f in operations(lib).items()}


def inside(
    body: Callable[..., Any],
    *values: Any,
    mesh: Mesh | None = None,
    in_specs: Any = BY_X,
    out_specs: Any = BY_X,
) -> dict[str, Any]:
    """Runs a body inside shard_map, with check_vma on and off."""
    values = values or (small(8, 3),)
    return under_both(lambda check: run(shmap(body, mesh, in_specs, out_specs, check), *values))


def inside_raised(body: Callable[..., Any], *values: Any, **options: Any) -> dict[str, Any]:
    """Like the function above, for a body that may raise an error."""
    values = values or (small(8, 3),)
    options = {"out_specs": P("x"), **options}
    return under_both(
        lambda check: raised(lambda: run(shmap(body, check_vma=check, **options), *values))
    )


# Operands.


@row("a pytree: dict, list, tuple, None, namedtuple, nested, empty", ACCELERATED)
def parts_of_pytrees(lib: Any) -> Any:
    Pair = collections.namedtuple("Pair", ["left", "right"])

    def body(v: Any) -> Any:
        results = each(lib, {"a": [v, None, (v + 1,)], "b": Pair(v * 2, {})})
        for result in results.values():
            assert type(result["b"]) is Pair and result["a"][1] is None
        assert each(lib, ()) == {name: () for name in NAMES}
        return [(r["a"], tuple(r["b"])) for r in results.values()]

    return inside(body)


@row("all accelerated dtypes in one pytree", ACCELERATED)
def parts_of_every_dtype(lib: Any) -> Any:
    def body(v: Any) -> Any:
        summed = {d: v.astype(d) for d in cases.DTYPES}
        copied = {d: v.astype(d) for d in cases.COPIED_DTYPES}
        scattered = lib.psum_scatter(summed, "x", tiled=True)
        return scattered, lib.all_gather(copied, "x"), lib.pmean(summed, "x")

    with cases.x64("float64"):
        return inside(body)


@row("bool, int16, uint16, complex: summed by lax", LAX)
def parts_of_other_dtypes(lib: Any) -> Any:
    def body(v: Any) -> Any:
        tree = {d: v.astype(d) for d in ("int16", "uint16", "complex64")}
        scattered = lib.psum_scatter(tree, "x", tiled=True)
        return scattered, lib.pmean({**tree, "bool": v > 1}, "x")

    return inside(body), types_inside(lambda v: raised(lambda: lib.psum_scatter(v > 1, "x")))


@row("a pytree of which only some leaves are accelerated", PARTLY)
def parts_of_some_leaves(lib: Any) -> Any:
    return inside(lambda v: each(lib, [v, v.astype(jnp.int16), v.astype(jnp.complex64)]))


@row("small floats and integers (float8, int4), where the platform has them", AS_LAX)
def parts_of_exotic_dtypes(lib: Any) -> Any:
    def gathered(dtype: str) -> Any:
        def body(v: Any) -> Any:
            return lib.all_gather(v.astype(dtype), "x").astype(jnp.float32)

        return raised(lambda: run(shmap(body, out_specs=P("x"), check_vma=False), small(8, 3)))

    return [gathered(dtype) for dtype in ("float8_e4m3fn", "float8_e5m2", "int4")]


@row("Python and NumPy scalars and arrays, and arrays from outside shard_map", AS_LAX)
def parts_of_constants(lib: Any) -> Any:
    outside = jnp.asarray(small(4, 3))
    values = 1, 1.5, True, np.int8(3), np.ones((4, 3), np.int32), outside, {"a": outside, "b": 2}
    types = [types_inside(lambda v, c=c: each_raised(lib, lambda f: f(c, "x"))) for c in values]
    return types, inside(lambda v: each(lib, outside)), inside(lambda v: each(lib, np.ones(4)))


@row("an array that is created inside shard_map", ACCELERATED)
def parts_of_constant_made_inside(lib: Any) -> Any:
    return inside(lambda v: each(lib, jnp.full((4,), 2.0, v.dtype)))


@row("weakly typed operands: the weak type is kept or dropped as by lax", TYPES)
def weak_types_of_parts(lib: Any) -> Any:
    def body(v: Any) -> Any:
        weak = lax.while_loop(lambda c: c[0] < 3.0, lambda c: (c[0] + 1.0, v), (3.0, v))[0]
        stacked = lib.all_gather(weak, "x"), lib.all_gather((v[0, 0], weak), "x")
        made = jnp.full((4,), 3)
        return stacked, lib.pmean((weak, v), "x"), each(lib, made)

    return types_inside(body)


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


@row("scalar arrays, and arrays of one element", ACCELERATED)
def parts_of_scalars(lib: Any) -> Any:
    def body(v: Any) -> Any:
        return (
            lib.all_gather((v[0, 0], v[:1, :1]), "x"),
            lib.pmean((v[0, 0], v[:1, :1]), "x")[1],
            lib.psum_scatter(v[:2, 0], "x")[None],
            lib.psum_scatter(v[:2, :1], "x", tiled=True),
        )

    return inside(body)


@row("zero-sized arrays, alone and in a pytree", AS_LAX)
def parts_of_nothing(lib: Any) -> Any:
    return [
        inside_raised(lambda v, cut=cut: each(lib, cut(v)))
        for cut in (lambda v: v[:0], lambda v: v[:, :0], lambda v: (v, v[:0].astype(jnp.int32)))
    ]


@row("transposed, strided and reversed operands", ACCELERATED)
def parts_of_other_layouts(lib: Any) -> Any:
    values = np.asfortranarray(small(8, 6))[:, ::-1]
    return inside(lambda v: [each(lib, u) for u in (v.T, v[::2, 1:3], v[::-1])], values)


@row("arrays too large for our kernels", LAX)
def parts_of_large_arrays(lib: Any) -> Any:
    def body(v: Any) -> Any:
        results = each(lib, v)
        return [r[:, ::4096] for r in results.values()]

    return run(shmap(body, out_specs=P("x"), check_vma=False), small(4, 3 << 20))


# Parameters.


@row("arguments by keyword and their defaults; too few, too many, unknown arguments", TYPES)
def signatures_of_parts(lib: Any) -> Any:
    signatures = {
        name: [
            (p.name, p.kind, p.default)
            for p in inspect.signature(getattr(lib, name)).parameters.values()
        ]
        for name in NAMES
    }
    functions = {name: getattr(lib, name) for name in NAMES}
    wrong = [
        raised(lambda f=f, a=a, o=o: types_inside(lambda v: f(v, *a, **o)))
        for f in functions.values()
        for a, o in (((), {}), (("x", 0), {}), (("x",), {"dimension": 0}))
    ]
    dimensions = {"all_to_all": {"split_axis": 0, "concat_axis": 0}}
    by_name = types_inside(
        lambda v: [
            f(x=v[:2], axis_name="x", axis_index_groups=None, **dimensions.get(name, {}))
            for name, f in functions.items()
        ]
    )
    return signatures, wrong, by_name


@row("`psum_scatter` over each dimension, tiled or not", ACCELERATED)
def scatter_dimensions(lib: Any) -> Any:
    def body(v: Any) -> Any:
        v = v.reshape(4, 2, 2)
        tiled = [lib.psum_scatter(v, "x", scatter_dimension=d, tiled=True) for d in range(3)]
        return tiled, [lib.psum_scatter(v, "x", scatter_dimension=d) for d in (1, 2)]

    return inside(body, small(8, 4))


@row("`psum_scatter` over negative dimensions, or dimensions that are not integers", AS_LAX)
def scatter_dimensions_of_any_kind(lib: Any) -> Any:
    def scatter(d: Any, tiled: bool) -> Any:
        return inside_raised(
            lambda v: lib.psum_scatter(v, "x", scatter_dimension=d, tiled=tiled)[None],
            small(4, 2),
        )

    dimensions = -1, -2, -3, 2, np.int64(1), 1.0, None, "0"
    return [scatter(d, tiled) for d in dimensions for tiled in (True, False)]


@row("`psum_scatter` over dimensions that the world size does not divide, and of a scalar", ERROR)
def scatter_of_wrong_shapes(lib: Any) -> Any:
    def scatter(part: Callable[[Any], Any], **options: Any) -> Any:
        return inside_raised(lambda v: lib.psum_scatter(part(v), "x", **options))

    return [
        scatter(lambda v: v[:3], tiled=True),
        scatter(lambda v: v, scatter_dimension=1, tiled=True),
        scatter(lambda v: v),
        scatter(lambda v: v[:1]),
        scatter(lambda v: v.sum()),
        scatter(lambda v: (v, v[:3]), tiled=True),
    ]


@row("`all_gather` on each axis, negative ones too, tiled or not", ACCELERATED)
def gather_axes(lib: Any) -> Any:
    one = jnp.asarray(1)

    def body(v: Any) -> Any:
        v = v.reshape(2, 3, 1)
        stacked = [lib.all_gather(v, "x", axis=a) for a in (0, 1, 2, 3, -1, -2, -4)]
        tiled = [lib.all_gather(v, "x", axis=a, tiled=True) for a in (0, 1, 2, -1, -3)]
        of_any_kind = [lib.all_gather(v, "x", axis=a, tiled=1) for a in (np.int64(1), one)]
        return stacked, tiled, of_any_kind

    return inside(body, small(4, 3))


@row("`all_gather` on axes that the result does not have, or that are not integers", ERROR)
def gather_on_wrong_axes(lib: Any) -> Any:
    def gather(**options: Any) -> Any:
        return inside_raised(lambda v: lib.all_gather(v, "x", **options))

    return [
        *(gather(axis=a) for a in (3, -4, 1.0, None, "0")),
        *(gather(axis=a, tiled=True) for a in (2, -3, 0.5)),
        inside_raised(lambda v: lib.all_gather(v.sum(), "x", tiled=True)),
    ]


@row("`to` of `all_gather`: reduced, invarying, and invalid values", AS_LAX)
def gather_to(lib: Any) -> Any:
    def gather(to: Any, **options: Any) -> Any:
        seen: list[str] = []

        def body(v: Any) -> Any:
            result = lib.all_gather(v, "x", to=to, **options)
            seen.append(kind(result))
            return result * 2

        return inside_raised(body, out_specs=P(None, "x") if to != "varying" else P("x")), seen

    tos = "varying", "reduced", "invarying", "nothing", None
    with_groups = gather("reduced", axis_index_groups=[[0], [1]])
    return [gather(to, tiled=tiled) for to in tos for tiled in (True, False)], with_groups


@row("an invariant result of `all_gather` where `out_specs` has no axis", LAX)
def gather_to_invarying(lib: Any) -> Any:
    f = shmap(lambda v: lib.all_gather(v, "x", tiled=True, to="invarying"))
    return run(f, small(8, 3)), run(jax.grad(lambda v: (f(v) ** 2).sum()), small(8, 3))


@row("`all_to_all` of each pair of dimensions, negative ones too, tiled or not", ACCELERATED)
def exchange_axes(lib: Any) -> Any:
    # lax of jax 0.10 can't lower negative dimensions.
    negative = [(-1, 0), (1, -3), (-2, -2)] if jax.__version_info__ >= (0, 11) else []

    def body(v: Any) -> Any:
        v = v.reshape(2, 2, 6)
        pairs = [(s, c) for s in range(3) for c in range(3)] + negative
        tiled = [lib.all_to_all(v, "x", s, c, tiled=True) for s, c in pairs]
        pairs = [(s, c) for s, c in pairs if v.shape[s] == 2]
        stacked = [lib.all_to_all(v, "x", s, c) for s, c in pairs]
        of_any_kind = lib.all_to_all(v, "x", np.int64(1), np.int64(0), tiled=1)
        return [r[None] for r in (*tiled, *stacked, of_any_kind)]

    return inside(body, small(4, 12))


@row("`all_to_all` of every dtype that `all_gather` takes, and of the float8 dtypes", ACCELERATED)
def exchange_of_every_dtype(lib: Any) -> Any:
    def body(v: Any) -> Any:
        copied = {d: v.astype(d) for d in select.EXCHANGED_DTYPES}
        exchanged = lib.all_to_all(copied, "x", 0, 1, tiled=True)
        assert all(r.dtype == d for d, r in exchanged.items())
        small_floats = (d for d in exchanged if d.startswith("float8"))
        return exchanged | {d: exchanged[d].astype(jnp.float32) for d in small_floats}

    with cases.x64("float64"):
        return inside(body)


@row("`all_to_all` of dimensions that are not there, not integers, or of other lengths", ERROR)
def exchange_of_wrong_shapes(lib: Any) -> Any:
    def exchange(part: Callable[[Any], Any], split: Any, concat: Any, **options: Any) -> Any:
        return inside_raised(lambda v: lib.all_to_all(part(v), "x", split, concat, **options))

    return [
        *(
            exchange(lambda v: v[:2], s, c, tiled=tiled)
            for s, c in ((2, 0), (0, 3), (-3, 0), (0, -4), (1.0, 0), (0, None), ("0", 0))
            for tiled in (True, False)
        ),
        exchange(lambda v: v[:3], 0, 1, tiled=True),
        exchange(lambda v: v, 1, 0, tiled=True),
        exchange(lambda v: v, 0, 0),
        exchange(lambda v: v.sum(), 0, 0, tiled=True),
        exchange(lambda v: (v, v[:3]), 0, 0, tiled=True),
    ]


# Axes.


@row("axis names as a string, a tuple", ACCELERATED)
def parts_axis_names(lib: Any) -> Any:
    return inside(lambda v: (each(lib, v, "x"), each(lib, v, ("x",)), lib.pmean(v, ["x"])))


class Name:
    """An axis name that is not a string."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name)

    def __lt__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return "Name"


@row("axis names that are not strings", AS_LAX)
def parts_axis_names_of_any_kind(lib: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), (Name(),), axis_types=(AxisType.Auto,))
    return inside_raised(
        lambda v: each(lib, v, Name()), mesh=mesh, in_specs=P(Name()), out_specs=P(Name())
    )


@row("several axes in any order; one axis of several", ACCELERATED, devices=4)
def parts_of_several_axes(lib: Any) -> Any:
    def body(v: Any) -> Any:
        return [each(lib, v, axes) for axes in ("x", "y", ("x", "y"), ("y", "x"))]

    both = P(("x", "y"))
    return inside(body, small(16, 3), mesh=square(), in_specs=both, out_specs=both)


@row("no axes, the same axis twice, positional axes with and without names", AS_LAX)
def parts_of_odd_axes(lib: Any) -> Any:
    axes = (), ("x", "x"), ("x", 0), (0, "x"), 0, -1, (1,)
    return [
        each_raised(lib, lambda f, a=a: types_inside(lambda v: f(v, a), small(8, 3))) for a in axes
    ]


@row("an axis of size 1", LAX)
def parts_of_one_device(lib: Any) -> Any:
    mesh = cases.make_mesh((1, 2), ("one", "x"))
    specs = P(("one", "x"))
    return inside(lambda v: each(lib, v, "one"), mesh=mesh, in_specs=specs, out_specs=specs)


@row("an axis of size 1 together with a larger one", ACCELERATED)
def parts_of_one_device_beside(lib: Any) -> Any:
    mesh = cases.make_mesh((1, 2), ("one", "x"))
    specs = P(("one", "x"))
    return inside(lambda v: each(lib, v, ("one", "x")), mesh=mesh, in_specs=specs, out_specs=specs)


@row("axis names of wrong types: None, a set, a dict, a list, nested tuples", AS_LAX)
def parts_of_no_names(lib: Any) -> Any:
    axes = None, {"x"}, {"x": 1}, ["x"], (("x",),), (["x"],)
    return [each_raised(lib, lambda f, a=a: types_inside(lambda v: f(v, a))) for a in axes]


@row("an unbound axis inside shard_map, alone and with a bound one", ERROR)
def parts_of_unbound_axis_inside(lib: Any) -> Any:
    return [
        each_raised(lib, lambda f, a=axes, o=operand: types_inside(lambda v: f(o(v), a)))
        for axes in ("nowhere", ("x", "nowhere"))
        for operand in (lambda v: v, lambda v: {"a": v, "b": v}, lambda v: np.ones(4))
    ]


@row("a call where no axis is bound", ERROR)
def parts_of_unbound_axis_outside(lib: Any) -> Any:
    value = jnp.asarray(small(4))
    return [
        each_raised(lib, lambda f: f(value, "nowhere")),
        each_raised(lib, lambda f: f({"a": small(4)}, ("nowhere", "x"))),
        each_raised(lib, lambda f: jax.jit(lambda v: f(v, "nowhere"))(value)),
        each_raised(lib, lambda f: jax.jit(lambda v: f(v, "n", axis_index_groups=[[0]]))(value)),
        each_raised(lib, lambda f: jax.grad(lambda v: f(v, "nowhere").sum())(value)),
        each_raised(lib, lambda f: jax.vmap(lambda v: f(v, "nowhere"), axis_name="i")(value)),
    ]


@row("a mesh axis that is not manual", ERROR, devices=4)
def parts_of_axis_not_manual(lib: Any) -> Any:
    def body(f: Any) -> Any:
        g = shmap(lambda v: f(v, "y"), square(), out_specs=P("x"), axis_names={"x"})
        return run(g, small(8, 3))

    return each_raised(lib, body)


@row("a name bound by vmap, without shard_map", LAX)
def parts_of_vmapped_name(lib: Any) -> Any:
    def f(v: Any) -> Any:
        exchanged = lib.all_to_all(v[:4], ("i",), 0, 1)
        gathered = lib.all_gather(v, ("i",), axis=1)
        return each(lib, v, "i"), gathered, lib.psum_scatter(v[:4], "i"), exchanged

    mapped = jax.vmap(f, axis_name="i")
    return run(mapped, small(4, 8, 3)), jax.vmap(f, 1, axis_name="i")(jnp.asarray(small(8, 4, 3)))


@row("a name bound by vmap inside shard_map: alone, together with a mesh axis, hiding one", AS_LAX)
def parts_of_vmapped_name_inside(lib: Any) -> Any:
    def mapped(name: str, axes: Any, **options: Any) -> Any:
        def body(f: Any) -> Any:
            def inner(v: Any) -> Any:
                return jax.vmap(lambda r: f(r, axes), axis_name=name, **options)(v)

            return inside_raised(inner, small(8, 4))

        return each_raised(lib, body)

    hiding = [mapped("x", "x", out_axes=a, in_axes=b) for a, b in ((0, 0), (None, 0), (1, 1))]
    return mapped("i", "i"), mapped("i", ("i", "x")), hiding


@row("a mesh axis under a vmap with another name", ACCELERATED)
def parts_under_named_vmap(lib: Any) -> Any:
    return inside(lambda v: jax.vmap(lambda c: each(lib, c), 1, 1, axis_name="i")(v))


# axis_index_groups.


def with_groups(lib: Any, groups: Any, check: bool) -> Any:
    size = max(2, sum(len(group) for group in groups))
    f = shmap(
        lambda v: each(lib, {"a": v, "b": v.astype(jnp.int32)}, axis_index_groups=groups),
        cases.make_mesh((size,), ("x",)),
        out_specs=P("x"),
        check_vma=check,
    )
    return run(f, small(4 * size, 3))


@row("`axis_index_groups` of equal sizes, `check_vma=False`", LAX, devices=4)
def groups_of_parts(lib: Any) -> Any:
    groups = [[0, 1], [2, 3]], ((0, 2), (3, 1)), [[0, 1, 2, 3]], [[0], [1], [2], [3]]
    return [with_groups(lib, g, False) for g in groups]


@row("`axis_index_groups` of different sizes, that omit an index, repeat one, or are empty", AS_LAX)
def groups_of_parts_that_are_wrong(lib: Any) -> Any:
    wrong = [[0, 1, 2], [3]], [[0]], [[0, 0], [1, 1]], [["a"], ["b"]], 3, []

    def types(f: Any, groups: Any) -> Any:
        return types_inside(lambda v: f(v, "x", axis_index_groups=groups), small(8, 3))

    return [each_raised(lib, lambda f, g=g: types(f, g)) for g in wrong]


@row("`axis_index_groups`, `check_vma=True`", AS_LAX)
def groups_of_parts_under_check_vma(lib: Any) -> Any:
    return [
        each_raised(
            lib,
            lambda f, g=groups: run(
                shmap(lambda v: f(v, "x", axis_index_groups=g), out_specs=P("x")), small(8, 3)
            ),
        )
        for groups in ([[0], [1]], [[0, 1]])
    ]


# Types within shard_map.


@row("types of results: the axes they vary over, with `check_vma` on and off", TYPES)
def types_of_parts(lib: Any) -> Any:
    def body(v: Any) -> Any:
        return each(lib, v), each(lib, (v, v.astype(jnp.int32)), ("x",)), each(lib, v[:0])

    return types_inside(body, small(8, 3))


@row("operands that vary over some of the mesh's axes", ACCELERATED, devices=4)
def parts_of_partly_varying(lib: Any) -> Any:
    def under(check: bool) -> Any:
        seen = []

        def body(v: Any, w: Any, u: Any) -> Any:
            results = each(lib, (w, u), "x"), each(lib, (v, w), "y"), each(lib, u, ("x", "y"))
            seen.append(jax.tree.map(kind, results))
            return results

        specs = P("x", "y"), P("x"), P()
        values = [small(8, 8, seed=k) for k in range(3)]
        return run(shmap(body, square(), specs, P(("x", "y")), check), *values), seen

    return under_both(under)


@row("operands that vary over some of the given axes", AS_LAX, devices=4)
def parts_of_varying_over_some_axes(lib: Any) -> Any:
    return each_raised(
        lib,
        lambda f: inside_raised(lambda v: f(v, ("x", "y")), mesh=square(), out_specs=P(("x", "y"))),
    )


@row("replicated operands, alone and with others", ACCELERATED)
def parts_of_replicated(lib: Any) -> Any:
    return inside(
        lambda v, w: (each(lib, w), each(lib, [v, w, jnp.ones(4), lib.pmean(v, "x")])),
        small(8, 3),
        small(4, 3),
        in_specs=(P("x"), P()),
    )


@row("unreduced and reduced operands", AS_LAX)
def parts_of_unreduced(lib: Any) -> Any:
    return [
        each_raised(
            lib,
            lambda f, to=to, specs=specs: inside_raised(
                lambda v: f(lax.pcast(v, "x", to=to), "x"), in_specs=specs
            ),
        )
        for to, specs in (("unreduced", P("x")), ("reduced", P()))
    ]


@row("results that contradict `out_specs`", ERROR)
def parts_of_wrong_out_specs(lib: Any) -> Any:
    return [
        raised(lambda f=f: run(shmap(lambda v: f(v, "x")), small(8, 3)))
        for name, f in operations(lib).items()
        if name != "pmean"  # its result is the same on all ranks
    ]


@row("partly manual meshes", LAX, devices=4)
def parts_of_partly_manual(lib: Any) -> Any:
    def under(check: bool) -> Any:
        mesh = square()
        f = shmap(lambda v: each(lib, v * 2), mesh, P("x"), P("x"), check, axis_names={"x"})
        return run(f, jax.device_put(small(8, 6), NamedSharding(mesh, P("x", "y"))))

    return under_both(under)


@row("shard_map inside shard_map", AS_LAX, devices=4)
def parts_of_nested_shard_map(lib: Any) -> Any:
    def body(v: Any) -> Any:
        inner = jax.shard_map(
            lambda u: each(lib, u, "y"), in_specs=P(None, "y"), out_specs=P("y"), axis_names={"y"}
        )
        return inner(v), each(lib, v)

    return run(shmap(body, square(), P("x"), P("x"), axis_names={"x"}), small(8, 6))


@row("meshes with Explicit axes: values, and shardings in types", ACCELERATED)
def parts_of_explicit_axes(lib: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Explicit,))
    seen = []

    def f(v: Any) -> Any:
        result = jax.shard_map(lambda u: each(lib, u), in_specs=P("x"), out_specs=P("x"))(v)
        seen.append(jax.tree.map(kind, result))
        return result

    with jax.set_mesh(mesh):
        return run(f, jax.device_put(small(8, 3), NamedSharding(mesh, P("x")))), seen


@row("`pmap`", ACCELERATED)
def parts_of_pmap(lib: Any) -> Any:
    f = jax.pmap(lambda v: each(lib, v, "i"), axis_name="i", devices=jax.devices()[:2])
    return f(small(2, 4, 3))


@row("`pmap` with `axis_index_groups`, with a name bound by vmap, and with an unbound name", AS_LAX)
def parts_of_pmap_as_lax(lib: Any) -> Any:
    def mapped(g: Any) -> Any:
        return jax.pmap(g, axis_name="i", devices=jax.devices()[:2])(small(2, 4, 3))

    def both(f: Any, v: Any) -> Any:
        return jax.vmap(lambda r: f(r, ("i", "j")), 1, axis_name="j")(v)

    return [
        each_raised(lib, lambda f: mapped(lambda v: f(v, "i", axis_index_groups=[[0], [1]]))),
        each_raised(lib, lambda f: mapped(lambda v: both(f, v))),
        each_raised(lib, lambda f: mapped(lambda v: f(v, "j"))),
    ]


# Control flow.


@row("nested `jit`, inlined and not; `disable_jit`; eager", ACCELERATED)
def parts_of_nested_jit(lib: Any) -> Any:
    def body(v: Any) -> Any:
        f = functools.partial(each, lib)
        return jax.jit(f)(v), jax.jit(jax.jit(f), inline=True)(v * 2)

    value = jax.device_put(small(8, 3), NamedSharding(line(), P("x")))
    eager = under_both(lambda c: shmap(lambda v: each(lib, v), None, P("x"), P("x"), c)(value))
    with jax.disable_jit():
        disabled = under_both(
            lambda c: shmap(lambda v: each(lib, v), None, P("x"), P("x"), c)(value)
        )
    return inside(body), eager, disabled


@row("`while_loop`, `scan`, `map`", ACCELERATED)
def parts_of_loops(lib: Any) -> Any:
    def both(v: Any) -> Any:
        half = lib.psum_scatter(v, "x", tiled=True)
        return lib.all_gather(half, "x", tiled=True) - lib.pmean(v, "x")

    def body(v: Any) -> Any:
        looped = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, both(c[1])), (0, v))[1]
        scanned = lax.scan(lambda c, k: (both(c), lib.pmean(c * k, "x")), v, jnp.arange(3.0))
        return looped, scanned[0], scanned[1].sum(0), lax.map(lambda u: each(lib, u), v.T)

    return inside(body, small(8, 4, top=2))


@row("`cond` and `switch` whose index is only known at run time", ACCELERATED)
def parts_of_cond(lib: Any) -> Any:
    def body(v: Any) -> Any:
        flag = lib.pmean(v, "x").sum() > 0
        one = lax.cond(flag, lambda: each(lib, v), lambda: each(lib, v * 2))
        index = jnp.int32(lib.pmean(v, "x")[0, 0]) % 2
        scatter = functools.partial(lib.psum_scatter, tiled=True)
        two = lax.switch(index, [lambda: scatter(v, "x"), lambda: scatter(v + 1, "x")])
        return one, two

    return inside(body)


# Differentiation. The functions are polynomials of small integers, so gradients are exact.


def layer(lib: Any) -> Callable[..., Any]:
    """A layer of a varying and a replicated operand, whose results vary."""

    def f(v: Any, w: Any) -> Any:
        cut = (v * w).reshape(2, 2, 3)
        scattered = lib.psum_scatter({"a": v * w, "b": w * w}, "x", tiled=True)
        untiled = lib.psum_scatter(cut, "x", scatter_dimension=1)
        gathered = lib.all_gather((v[:1] * w[1:2], w[:1]), "x", tiled=True)
        stacked = lib.all_gather(untiled, "x", axis=1)
        exchanged = lib.all_to_all((v, w), "x", 0, 1, tiled=True)
        mean = lib.pmean((v[:2] * 2, w[2:] * 4), "x")
        return (
            scattered["a"] * scattered["b"] + gathered[0] * gathered[1] + stacked.sum(1)
            + untiled * mean[0] + mean[1] * v[2:] + exchanged[0][:, :3] * exchanged[1][:, 3:]
        )  # fmt: skip

    return f


def mapped(lib: Any, check: bool, f: Any = None) -> Any:
    return shmap(f or layer(lib), None, (P("x"), P()), P("x"), check)


def arguments() -> tuple[np.ndarray, np.ndarray]:
    return small(8, 3, top=3), small(4, 3, seed=1, top=3)


def differentiated(lib: Any, transform: Callable[[Any], Any]) -> Any:
    """Transforms the layer outside shard_map."""
    return under_both(lambda check: run(transform(mapped(lib, check)), *arguments()))


def loss(f: Any) -> Any:
    return lambda v, w: (f(v, w) ** 2).sum()


@row("`grad` and `value_and_grad` outside shard_map, operands varying and replicated", DERIVED)
def grad_of_parts_outside(lib: Any) -> Any:
    return differentiated(lib, lambda f: jax.value_and_grad(loss(f), argnums=(0, 1)))


@row("`grad` inside shard_map: types and values", DERIVED)
def grad_of_parts_inside(lib: Any) -> Any:
    def under(check: bool) -> Any:
        seen = []

        def body(v: Any, w: Any) -> Any:
            gradients = jax.grad(loss(layer(lib)), argnums=(0, 1))(v, w)
            seen.append([kind(g) for g in gradients])
            return gradients

        return run(mapped(lib, check, body), *arguments()), seen

    return under_both(under)


@row("`linearize` outside shard_map, `jvp` inside", ACCELERATED)
def jvp_of_parts(lib: Any) -> Any:
    def forward(v: Any, w: Any) -> Any:
        return jax.jvp(layer(lib), (v, w), (v * 2, w))

    def linearized(f: Any) -> Any:
        def both(v: Any, w: Any) -> Any:
            value, push = jax.linearize(f, v, w)
            return value, push(v, w), push(2 * v, 0 * w)

        return both

    inner = under_both(lambda check: run(mapped(lib, check, forward), *arguments()))
    return differentiated(lib, linearized), inner


@row("`vjp` and `linear_transpose` of each, on each dimension", DERIVED)
def transposes_of_parts(lib: Any) -> Any:
    def f(v: Any) -> Any:
        return (
            *(lib.psum_scatter(v, "x", scatter_dimension=d, tiled=True) for d in (0, 1)),
            *(lib.psum_scatter(v, "x", scatter_dimension=d) for d in (0, 1)),
            *(lib.all_gather(v, "x", axis=a, tiled=True) for a in (0, 1)),
            *(lib.all_gather(v, "x", axis=a) for a in (0, 1, -1)),
            *(lib.all_to_all(v, "x", s, 1, tiled=True) for s in (0, 1)),
            *(lib.all_to_all(v, "x", d, d) for d in (0, 1)),
            lib.pmean(v, "x"),
        )

    def body(v: Any) -> Any:
        results, pullback = jax.vjp(f, v)
        (transposed,) = jax.linear_transpose(f, v)(results)
        return pullback(jax.tree.map(lambda r: r * 2, results)), transposed

    return inside(body, small(4, 2))


@row("`grad` of `grad`, `jvp` of `grad`, `jacrev`, `jacfwd`", DERIVED)
def second_derivatives_of_parts(lib: Any) -> Any:
    def f(v: Any, w: Any) -> Any:
        return lib.psum_scatter(v * v * w, "x", tiled=True)[0, :1] * lib.pmean(v, "x")[0, 1:]

    def under(check: bool) -> Any:
        g = mapped(lib, check, f)
        twice = jax.grad(lambda v, w: (jax.grad(loss(g))(v, w) ** 2).sum())

        def forward_over_reverse(v: Any, w: Any) -> Any:
            return jax.jvp(jax.grad(loss(g), argnums=(0, 1)), (v, w), (v, w))

        transformed = twice, forward_over_reverse, jax.jacrev(g), jax.jacfwd(g, argnums=1)
        return [run(t, small(8, 3, top=2), small(4, 3, top=2)) for t in transformed]

    return under_both(under)


@row("leaves that are not differentiated, not used, stopped, or integers", DERIVED)
def grad_of_some_parts(lib: Any) -> Any:
    def f(v: Any, w: Any) -> Any:
        tree = v, v * w, lax.stop_gradient(v), (v > 1).astype(jnp.int32)
        total = 0.0
        for name, result in each(lib, tree).items():
            used, _, stopped, integer = result
            total += (used * stopped + integer).sum() * len(name)
        return total[None]

    def under(check: bool) -> Any:
        g = mapped(lib, check, f)
        return run(jax.grad(lambda v, w: g(v, w).sum(), argnums=(0, 1)), *arguments())

    return under_both(under)


@row("gradients in bfloat16 and in complex64", AS_LAX)
def grad_of_parts_of_other_types(lib: Any) -> Any:
    def total(v: Any, w: Any) -> Any:
        results = each(lib, v * w)
        return sum(jnp.real(r * r).astype(jnp.float32).sum() for r in results.values())[None]

    # With check_vma off XLA:CPU aborts on lax's own program of complex numbers.
    g = mapped(lib, True, total)
    transform = jax.grad(lambda v, w: g(v, w).sum(), argnums=(0, 1))
    return [run(transform, *[a.astype(d) for a in arguments()]) for d in ("bfloat16", "complex64")]


@row("gradients through nested `jit`, `scan`, `cond`, `checkpoint`", DERIVED)
def grad_of_parts_through_control_flow(lib: Any) -> Any:
    def scanned(v: Any, w: Any) -> Any:
        def step(c: Any, k: Any) -> Any:
            half = lib.psum_scatter(c * k * w, "x", tiled=True)
            return lib.all_gather(half, "x", tiled=True), lib.pmean(c, "x").sum()

        return lax.scan(step, v + 0 * w, jnp.arange(1.0, 3.0))[0]

    def conditional(v: Any, w: Any) -> Any:
        flag = lib.pmean(v, "x").sum() > 0
        f = functools.partial(lib.psum_scatter, tiled=True)
        return lax.cond(flag, lambda: f(v * w, "x"), lambda: f(v * 2, "x"))

    def layered(v: Any, w: Any) -> Any:
        return jax.checkpoint(jax.jit(layer(lib)))(v, w)

    return under_both(
        lambda check: [
            run(jax.grad(loss(mapped(lib, check, f)), argnums=(0, 1)), *arguments())
            for f in (layered, scanned, conditional)
        ]
    )


# Batching.


@row("`vmap` over each dimension, for each dimension scattered or gathered", ACCELERATED)
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


@row("`vmap` of some operands, nested, of shard_map, with `spmd_axis_name`", ACCELERATED, devices=4)
def vmap_of_parts_of_many_kinds(lib: Any) -> Any:
    def body(v: Any, w: Any) -> Any:
        some = jax.vmap(lambda r, s: each(lib, (r, s, r * s)), in_axes=(1, None))(v, w[:, 0])
        nested = jax.vmap(jax.vmap(lambda e: lib.all_gather(e, "x")))(v)
        return some, nested, jax.vmap(lambda r: each(lib, w))(v)

    f = shmap(lambda v: each(lib, v), square(), P("x"), P("x"), check_vma=False)
    batch = small(2, 8, 3)
    outside = run(jax.vmap(f), batch), run(jax.vmap(f, spmd_axis_name="y"), batch)
    return inside(body, *arguments(), in_specs=(P("x"), P())), outside


@row("`vmap` of `grad`, `grad` of `vmap`, `cond` under `vmap`", DERIVED)
def vmap_of_grad_of_parts(lib: Any) -> Any:
    def under(check: bool) -> Any:
        f = loss(mapped(lib, check))
        v, w = arguments()
        batch = np.stack([w, 2 * w])
        outside = jax.vmap(jax.grad(f, argnums=(0, 1)), in_axes=(None, 0))

        def summed(v: Any, ws: Any) -> Any:
            return jax.vmap(f, in_axes=(None, 0))(v, ws).sum()

        def conditional(v: Any, w: Any) -> Any:
            def one(r: Any) -> Any:
                return lax.cond(r.sum() > 3, lambda: each(lib, v), lambda: each(lib, v * 2))

            return jax.tree.map(lambda r: r[None], jax.vmap(one)(w))

        gradient = jax.grad(summed, argnums=(0, 1))
        return (
            run(outside, v, batch),
            run(gradient, v, batch),
            run(mapped(lib, check, conditional), v, w),
        )

    return under_both(under)


# Memory, tracing, lowering, compiling.


@row("donated arguments; one array as several operands, used after, returned twice", ACCELERATED)
def donation_of_parts(lib: Any) -> Any:
    def under(check: bool) -> Any:
        sharding = NamedSharding(line(), P("x"))

        def body(v: Any) -> Any:
            results = each(lib, (v, v, v * 2))
            return results, results["pmean"][0] + v, v * 3, each(lib, results["pmean"])

        f = jax.jit(shmap(body, None, P("x"), P("x"), check), donate_argnums=0)
        program = f.lower(jax.device_put(small(8, 3), sharding)).compile()
        contract.PROGRAMS.append(program.as_text())
        operand = jax.device_put(small(8, 3), sharding)
        results = f(operand)
        return results, operand.is_deleted(), program.memory_analysis().alias_size_in_bytes

    return under_both(under)


@row("`eval_shape`, `make_jaxpr`: types and effects", TYPES)
def traces_of_parts(lib: Any) -> Any:
    def effects(v: Any) -> list[str]:
        return [
            str(jax.make_jaxpr(lambda t, f=f: f(t, "x"))({"a": v, "b": v * 2}).effects)
            for f in operations(lib).values()
        ]

    def under(check: bool) -> Any:
        f = shmap(lambda v: each(lib, v), None, P("x"), P("x"), check)
        shapes = jax.eval_shape(f, jax.ShapeDtypeStruct((8, 3), jnp.bfloat16))
        jaxpr = jax.make_jaxpr(f)(small(8, 3))
        described = jax.tree.map(lambda s: (s, s.weak_type, str(s.sharding)), shapes)
        return described, [str(aval) for aval in jaxpr.out_avals], str(jaxpr.effects)

    return under_both(under), types_inside(effects, small(8, 3))


@row("`jax.sharding.no_collectives`, where jax has it", AS_LAX)
def forbidden_parts(lib: Any) -> Any:
    forbid = getattr(jax.sharding, "no_collectives", None)
    if forbid is None:
        return None

    def under(f: Any) -> Any:
        with forbid({"x"}):
            return run(shmap(lambda v: f(v, "x"), out_specs=P("x")), small(8, 3))

    return each_raised(lib, under)


@row("a jaxpr as a function; AOT compilation from shapes", ACCELERATED)
def evaluated_jaxpr_of_parts(lib: Any) -> Any:
    def under(check: bool) -> Any:
        f = shmap(lambda v: each(lib, v * 2), None, P("x"), P("x"), check)
        again = run(jaxpr_as_fun(jax.make_jaxpr(f)(small(8, 3))), small(8, 3))
        lowered = jax.jit(f).lower(
            jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(line(), P("x")))
        )
        program = lowered.compile()
        contract.PROGRAMS.append(program.as_text())
        told = str(lowered.out_info), str(program.output_shardings)
        return again, told

    return under_both(under)


@row("lowering for another platform, for several, for an `AbstractMesh`; `jax.export`", LAX)
def parts_on_other_platforms(lib: Any) -> Any:
    abstract = AbstractMesh((2,), ("x",))
    shape = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(abstract, P("x")))

    def collectives(text: str) -> list[bool]:
        assert "@jax_intranode" not in text
        return [name in text for name in ("reduce_scatter", "all_gather", "all_reduce")]

    def under(check: bool) -> Any:
        f = jax.jit(shmap(lambda v: each(lib, v), None, P("x"), P("x"), check))
        traced = f.trace(small(8, 3))
        on_abstract = jax.jit(shmap(lambda v: each(lib, v), abstract, P("x"), P("x"), check))
        texts = [
            traced.lower(lowering_platforms=("tpu",)).as_text(),
            traced.lower(lowering_platforms=("cpu", "cuda", "tpu")).as_text(),
            on_abstract.trace(shape).lower(lowering_platforms=("cpu",)).as_text(),
        ]
        value = jax.device_put(small(8, 3), NamedSharding(line(), P("x")))
        exported = jax.export.export(f)(value)
        texts.append(exported.mlir_module())
        return [collectives(t) for t in texts], str(exported.out_avals), run(exported.call, value)

    return under_both(under)


# Meshes.


@row("the order of the devices changed after tracing", PARTLY, devices=4)
def parts_of_changed_device_order(lib: Any) -> Any:
    @jax.jit
    def f(v: Any) -> Any:
        return jax.shard_map(lambda u: each(lib, u), in_specs=P("x", "y"), out_specs=P("x", "y"))(v)

    values, results = small(8, 6), []
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2), (0, 1, 2, 3)):
        mesh, x = on_square(order, values)
        with jax.set_mesh(mesh):
            results.append(f(x))
            contract.PROGRAMS.append(f.lower(values).compile().as_text())
    return results


@row("two meshes of the same devices in one program, and programs on them in turn", ACCELERATED,
     devices=4)  # fmt: skip
def parts_of_two_meshes(lib: Any) -> Any:
    flat, folded = cases.make_mesh((4,), ("i",)), square()

    def under(check: bool) -> Any:
        over_flat = shmap(lambda v: each(lib, v, "i"), flat, P("i"), P("i"), check)
        over_x = shmap(lambda v: each(lib, v, "x"), folded, P(("x", "y")), P(("x", "y")), check)
        both = run(lambda v: (over_flat(v), over_x(v)), small(16, 3))
        return both, [
            f(small(16, 3, seed=k)) for k in range(2) for f in map(jax.jit, (over_flat, over_x))
        ]

    return under_both(under)
