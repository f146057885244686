"""Rows of the contract: arguments, dimensions, axis names, names bound by vmap, and groups."""

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from contract import rows
from contract.rows import How, each, each_raised, inside, inside_raised, raised, row, run, small

# Arguments.


@row("arguments by keyword and their defaults; `axis_index_groups` by keyword only", How.TYPES)
def signature(lib: Any) -> Any:
    functions = {name: getattr(lib, name) for name in rows.NAMES}
    signatures = {
        name: [
            (p.name, p.kind, p.default)
            for p in inspect.signature(f).parameters.values()
            if p.name != "overlap"  # ours alone
        ]
        for name, f in functions.items()
    }
    dimensions = {"all_to_all": {"split_axis": 0, "concat_axis": 0}}
    by_name = rows.types_inside(
        lambda v: [
            f(x=v[:2], axis_name="x", axis_index_groups=None, **dimensions.get(name, {}))
            for name, f in functions.items()
        ]
    )
    return signatures, by_name


@row("too few, too many or unknown arguments", How.ERROR)
def wrong_arguments(lib: Any) -> Any:
    def refused(f: Any, *args: Any, **options: Any) -> Any:
        return raised(lambda: rows.types_inside(lambda v: f(v, *args, **options)))

    return [
        (
            refused(f),
            refused(f, "x", 0),
            refused(f, "x", None),
            refused(f, "x", dimension=0),
            refused(f, "x", axes="x"),
        )
        for f in (getattr(lib, name) for name in rows.NAMES)
    ]


# Dimensions.


@row("each dimension scattered, gathered, exchanged, negative too, tiled or not", How.ACCELERATED)
def dimensions(lib: Any) -> Any:
    # lax of jax 0.10 can't lower negative dimensions of all_to_all.
    negative = [(-1, 0), (1, -3), (-2, -2)] if jax.__version_info__ >= (0, 11) else []
    pairs = [(s, c) for s in range(3) for c in range(3)] + negative
    one = jnp.asarray(1)

    def body(v: Any) -> Any:
        v = v.reshape(2, 2, 6)
        return jax.tree.map(
            lambda r: r[None],
            (
                [lib.psum_scatter(v, "x", scatter_dimension=d, tiled=True) for d in range(3)],
                [lib.psum_scatter(v, "x", scatter_dimension=d) for d in (0, 1)],
                [lib.all_gather(v, "x", axis=a) for a in (0, 1, 2, 3, -1, -2, -4)],
                [lib.all_gather(v, "x", axis=a, tiled=True) for a in (0, 1, 2, -1, -3)],
                [lib.all_gather(v, "x", axis=a, tiled=1) for a in (np.int64(1), one)],
                [lib.all_to_all(v, "x", s, c, tiled=True) for s, c in pairs],
                [lib.all_to_all(v, "x", s, c) for s, c in pairs if v.shape[s] == 2],
                lib.all_to_all(v, "x", np.int64(1), np.int64(0), tiled=1),
            ),
        )

    return inside(body, small(4, 12))


@row("dimensions that are not there, no integers, or not divisible by the ranks", How.ERROR)
def wrong_dimensions(lib: Any) -> Any:
    def refused(name: str, part: Callable[[Any], Any], *args: Any, **options: Any) -> Any:
        return inside_raised(lambda v: getattr(lib, name)(part(v), "x", *args, **options))

    names = "psum_scatter", "all_gather", "all_to_all"
    scatter, gather, exchange = (functools.partial(refused, name) for name in names)
    whole, three, total = (lambda v: v), (lambda v: v[:3]), (lambda v: v.sum())
    both = lambda v: (v, v[:3])  # noqa: E731
    wrong = (2, 0), (0, 3), (-3, 0), (0, -4), (1.0, 0), (0, None), ("0", 0)
    return [
        *(scatter(part, tiled=True) for part in (three, both)),
        *(scatter(part) for part in (whole, total, lambda v: v[:1])),
        scatter(whole, scatter_dimension=1, tiled=True),
        *(gather(whole, axis=a) for a in (3, -4, 1.0, None, "0")),
        *(gather(whole, axis=a, tiled=True) for a in (2, -3, 0.5)),
        gather(total, tiled=True),
        *(exchange(lambda v: v[:2], *d, tiled=t) for d in wrong for t in (True, False)),
        *(exchange(part, 0, 0, tiled=True) for part in (total, both)),
        exchange(three, 0, 1, tiled=True),
        exchange(whole, 1, 0, tiled=True),
        exchange(whole, 0, 0),
    ]


@row("`psum_scatter` over negative dimensions, or dimensions that are not integers", How.AS_LAX)
def scatter_dimensions_of_any_kind(lib: Any) -> Any:
    def scatter(d: Any, tiled: bool) -> Any:
        return inside_raised(
            lambda v: lib.psum_scatter(v, "x", scatter_dimension=d, tiled=tiled)[None], small(4, 2)
        )

    dimensions = -1, -2, -3, 2, np.int64(1), 1.0, None, "0"
    return [scatter(d, tiled) for d in dimensions for tiled in (True, False)]


@row("`to` of `all_gather`: reduced, invarying, and invalid values", How.AS_LAX)
def gather_to(lib: Any) -> Any:
    def gather(to: Any, **options: Any) -> Any:
        seen: list[str] = []

        def body(v: Any) -> Any:
            result = lib.all_gather(v, "x", to=to, **options)
            seen.append(rows.kind(result))
            return result * 2

        return inside_raised(body, out_specs=P(None, "x") if to != "varying" else P("x")), seen

    tos = "varying", "reduced", "invarying", "nothing", None
    with_groups = gather("reduced", axis_index_groups=[[0], [1]])
    return [gather(to, tiled=tiled) for to in tos for tiled in (True, False)], with_groups


@row("an invariant result of `all_gather` where `out_specs` has no axis", How.LAX)
def gather_to_invarying(lib: Any) -> Any:
    f = rows.shmap(lambda v: lib.all_gather(v, "x", tiled=True, to="invarying"))
    return run(f, small(8, 3)), run(jax.grad(lambda v: (f(v) ** 2).sum()), small(8, 3))


# Ragged all-to-alls. lax has no values of them on CPU devices: tests/test_ragged.py has ours.


def ragged(lib: Any, v: Any, *tables: Any, **options: Any) -> Any:
    """The type of the result, or the error."""
    of = tables or (jnp.zeros(2, jnp.int32),) * 4

    def body(v: Any) -> Any:
        return lib.ragged_all_to_all(v, v[:3], *of, **{"axis_name": "x", **options})

    return raised(lambda: str(jax.eval_shape(rows.shmap(body, out_specs=P("x")), v)))


@row("types of `ragged_all_to_all`: shapes, dtypes, an axis name and a tuple", How.TYPES)
def ragged_types(lib: Any) -> Any:
    values = small(8, 3), small(8), small(8, 2, 3).astype(np.float16), small(8).astype(np.int8)
    of_tables = [(jnp.zeros(4, dtype),) * 4 for dtype in (np.int8, np.uint32)]
    return [
        *(ragged(lib, v) for v in values),
        *(ragged(lib, values[0], *tables) for tables in of_tables),
        ragged(lib, values[0], axis_name=("x",)),
    ]


@row("`ragged_all_to_all` with tables that are not integers, not vectors, or empty", How.ERROR)
def ragged_with_wrong_tables(lib: Any) -> Any:
    right = jnp.zeros(2, jnp.int32)
    wrong = jnp.zeros(2), jnp.zeros((1, 2), jnp.int32), jnp.zeros(0, jnp.int32)
    return [
        ragged(lib, small(8, 3), *[right] * k, table, *[right] * (3 - k))
        for k in range(4)
        for table in wrong
    ]


# Permutations.


@row("`ppermute` of pytrees by permutations of any ranks, twice", How.ACCELERATED, 4)
def permutations(lib: Any) -> Any:
    perms = (
        *([(0, 1)], [(2, 0), (0, 3)], [[3, 2], [1, 1]], [(r, 3 - r) for r in range(4)]),
        *(cases.shift(4), tuple(cases.shift(4)[::-1]), [(np.int8(1), np.int64(0))], [(True, 0)]),
        *([], [(0, 0)], [(r, r) for r in range(4)]),
    )

    def body(v: Any) -> Any:
        tree = {"a": v, "b": [v.astype(jnp.bfloat16), v * 2, v[:, 0] > 1]}
        return [lib.ppermute(tree, "x", perm) for perm in perms], lib.ppermute(
            lib.ppermute(v, "x", perms[0]), "x", perms[3]
        )

    return inside(body, small(8, 3), mesh=cases.make_mesh((4,), ("x",)))


@row("`ppermute` over several axes, in the mesh's order and in another", How.AS_LAX, devices=4)
def permutations_over_axes(lib: Any) -> Any:
    # With jax up to 0.11 the order of the names is not that of the ranks.
    def over(axes: Any) -> Any:
        n = 2 if isinstance(axes, str) else 4
        perms = cases.shift(n), [(1, 0), (n - 2, n - 1)]
        f = lambda v: [lib.ppermute(v, axes, perm) for perm in perms]  # noqa: E731
        both = P(("x", "y"))
        return inside_raised(f, small(16, 3), mesh=rows.square(), in_specs=both, out_specs=both)

    return [over(axes) for axes in ("x", "y", ("x", "y"), ("y", "x"))]


@row("`ppermute` of negative ranks, of permutations that are no lists or tuples", How.AS_LAX)
def permutations_of_any_kind(lib: Any) -> Any:
    perms = [(-1, 0)], [(0, -1), (1, 0)], {0: 1}, {(0, 1)}, "ab", np.array([[0, 1], [1, 0]]), None
    return [inside_raised(lambda v, p=p: lib.ppermute(v, "x", p)) for p in perms]


@row("`ppermute` with a rank twice, out of range, or no integer, and no pairs", How.ERROR)
def wrong_permutations(lib: Any) -> Any:
    perms = (
        *([(0, 1), (0, 0)], [(0, 1), (1, 1)], [(0, 0), (2, 1)], [(0, 2)], [(2, 0)]),
        *([(0, 1, 1)], [(0,)], [0, 1], [("a", "b")], [(0.5, 1)], [(None, 1)]),
    )
    return [inside_raised(lambda v, p=p: lib.ppermute((v, v), "x", p)) for p in perms]


# Axis names.


class Name(enum.Enum):
    ROWS = 1


class Sortable(enum.Enum):
    ROWS = 1

    def __lt__(self, other: object) -> bool:
        return False


@row("axis names that are not strings", How.AS_LAX)
def axis_names_of_any_kind(lib: Any) -> Any:
    def over(name: Any) -> Any:
        mesh = Mesh(np.array(jax.devices()[:2]), (name,), axis_types=(AxisType.Auto,))
        of = {"mesh": mesh, "in_specs": P(name), "out_specs": P(name)}
        return inside_raised(lambda v: lib.psum(v, name), **of), inside_raised(
            lambda v: each(lib, v, name), **of
        )

    return [over(name) for name in (Name.ROWS, Sortable.ROWS)]


@row("several axes in any order, one of several; string, tuple, list", How.ACCELERATED, 4)
def several_axes(lib: Any) -> Any:
    def body(v: Any) -> Any:
        of_lists = [lib.psum(v, ["y", "x"]), lib.pmean(lib.psum(v, ["x"]), "y")]
        reordered = each(lib, v, ("y", "x"), without=["ppermute"])  # lax refuses it
        return [each(lib, v, axes) for axes in ("x", ("y",), ("x", "y"))], reordered, of_lists

    both = P(("x", "y"))
    return inside(body, small(16, 3), mesh=rows.square(), in_specs=both, out_specs=both)


@row("an axis of size 1", How.LAX)
def axis_of_one_device(lib: Any) -> Any:
    mesh = cases.make_mesh((1, 2), ("one", "x"))
    specs = P(("one", "x"))
    return inside(lambda v: each(lib, v, "one"), mesh=mesh, in_specs=specs, out_specs=specs)


@row(
    "an axis of size 1 together with a larger one, also under "
    "`jax_remove_size_one_mesh_axis_from_type`",
    How.ACCELERATED,
)
def axis_of_one_device_beside(lib: Any) -> Any:
    def body(v: Any) -> Any:
        both = lib.psum(v, ("one", "x")), lib.psum_scatter(v, ("x", "one"), tiled=True)
        return both, each(lib, v), jax.grad(lambda u: lib.psum(u, ("one", "x")).sum())(v)

    mesh, specs = cases.make_mesh((1, 2), ("one", "x")), P(("one", "x"))
    of = {"mesh": mesh, "in_specs": specs, "out_specs": specs}
    with jax.remove_size_one_mesh_axis_from_type(True):
        removed = inside(body, **of)
    return inside(lambda v: each(lib, v, ("one", "x")), **of), removed


@row("operands that vary over the axes, with `jax_auto_pcast=False`", How.ACCELERATED)
def operands_cast_by_the_program(lib: Any) -> Any:
    with jax.auto_pcast(False):
        return inside(lambda v: (each(lib, v), jax.grad(lambda u: lib.psum(u, "x").sum())(v)))


@row(
    "no axes, the same axis twice, positional axes with and without names; None, a set, a dict, a "
    "list, nested tuples",
    How.AS_LAX,
)
def odd_axes(lib: Any) -> Any:
    axes: list[Any] = [(), [], ("x", "x"), ("x", 0), (0, "x"), 0, -1, (1,)]
    axes += [None, {"x"}, {"x": 1}, (("x",),), (["x"],)]
    if jax.__version_info__ >= (0, 12):  # older pmax and pmin of lax refuse a list, which ours take
        axes.append(["x"])
    operands = (lambda v: v), (lambda v: {"a": v, "b": 1})

    def types(f: Any, operand: Any, axes: Any) -> Any:
        return rows.types_inside(lambda v: f(operand(v), axes), small(8, 3))

    found = [each_raised(lib, lambda f, o=o, a=a: types(f, o, a)) for a in axes for o in operands]
    return found, lib.psum("abc", ()) == "abc"


def name_error(lib: Any, found: Any) -> Any:
    """The error of an unbound axis: of lax, as ours is. Under check_vma=True it has other types."""
    if lib is lax and isinstance(found, rows.Raised):
        assert found.type in (NameError, AssertionError, ValueError), found
        return dataclasses.replace(found, type=NameError)
    return found


@row("an unbound axis inside shard_map, alone and with a bound one: always a NameError", How.ERROR)
def unbound_axis_inside(lib: Any) -> Any:
    def types(body: Callable[[Any], Any]) -> Any:
        def of(check: bool) -> Any:
            f = rows.shmap(body, out_specs=P("x"), check_vma=check)
            return name_error(lib, raised(lambda: jax.eval_shape(f, small(8, 3))))

        return rows.under_both(of)

    found = [
        each_raised(lib, lambda f, a=axes, o=operand: types(lambda v: f(o(v), a)))
        for axes in ("nowhere", ("x", "nowhere"))
        for operand in (lambda v: v, lambda v: {"a": v, "b": v}, lambda v: np.ones(4))
    ]
    return found, [types(lambda v, a=axes: lib.psum(1, a)) for axes in ("n", ("x", "n"))]


@row("a call where no axis is bound: lax's error, with a hint", How.ERROR)
def unbound_axis_outside(lib: Any) -> Any:
    value = jnp.asarray(small(4))
    return [
        raised(lambda: lib.psum(1, "nowhere")),
        each_raised(lib, lambda f: f(small(4), "nowhere")),
        each_raised(lib, lambda f: f(value, "nowhere")),
        each_raised(lib, lambda f: f({"a": small(4)}, ("nowhere", "x"))),
        each_raised(lib, lambda f: jax.jit(lambda v: f(v, "nowhere"))(value)),
        each_raised(lib, lambda f: jax.jit(lambda v: f(v, "n", axis_index_groups=[[0]]))(value)),
        each_raised(lib, lambda f: jax.grad(lambda v: f(v, "nowhere").sum())(value)),
        each_raised(lib, lambda f: jax.vmap(lambda v: f(v, "nowhere"), axis_name="i")(value)),
    ]


@row("a mesh axis that is not manual: always a NameError", How.ERROR, devices=4)
def axis_not_manual(lib: Any) -> Any:
    def in_auto_part(check: bool) -> Any:
        def body(f: Any) -> Any:
            of = {"out_specs": P("x"), "axis_names": {"x"}, "check_vma": check}
            return run(rows.shmap(lambda v: f(v, "y"), rows.square(), **of), small(8, 3))

        return {k: name_error(lib, found) for k, found in each_raised(lib, body).items()}

    without = []
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(rows.square(kind=axis_type)):
            without.append(each_raised(lib, lambda f: jax.jit(lambda v: f(v, "x"))(small(4, 3))))
            without.append(raised(lambda: lib.psum(1, "x")))
    return rows.under_both(in_auto_part), without


# Names bound by vmap.


@row("a name bound by vmap, without shard_map", How.LAX)
def vmapped_name(lib: Any) -> Any:
    def f(v: Any) -> Any:
        exchanged = lib.all_to_all(v[:4], ("i",), 0, 1)
        gathered = lib.all_gather(v, ("i",), axis=1)
        sums = lib.psum(1, "i"), lib.psum((v, True), ("i",)), lib.psum(2.0, "i") * v
        return each(lib, v, "i"), sums, gathered, lib.psum_scatter(v[:4], "i"), exchanged

    mapped = jax.vmap(f, axis_name="i")
    return run(mapped, small(4, 8, 3)), jax.vmap(f, 1, axis_name="i")(jnp.asarray(small(8, 4, 3)))


@row("a name bound by vmap inside shard_map: alone, beside a mesh axis, hiding one", How.AS_LAX)
def vmapped_name_inside(lib: Any) -> Any:
    def mapped(name: str, axes: Any, **options: Any) -> Any:
        def body(f: Any) -> Any:
            def inner(v: Any) -> Any:
                return jax.vmap(lambda r: f(r, axes), axis_name=name, **options)(v)

            return inside_raised(inner, small(8, 4))

        return each_raised(lib, body)

    hiding = [mapped("x", "x", out_axes=a, in_axes=b) for a, b in ((0, 0), (None, 0), (1, 1))]
    return mapped("i", "i"), mapped("i", ("i", "x")), hiding


@row("a mesh axis under a vmap with another name", How.ACCELERATED)
def mesh_axis_under_named_vmap(lib: Any) -> Any:
    return inside(lambda v: jax.vmap(lambda c: each(lib, c), 1, 1, axis_name="i")(v))


# axis_index_groups.


@row("`axis_index_groups` of equal sizes, `check_vma=False`; of Python scalars, too", How.LAX, 4)
def groups_even(lib: Any) -> Any:
    def of(groups: Any) -> Any:
        def body(v: Any) -> Any:
            of = {"axis_index_groups": groups}
            tree = {"a": v, "b": v.astype(jnp.int32)}
            sums = lib.psum(v > 1, "x", **of), lib.psum(1, "x", **of) + lib.psum(2.0, "x", **of) * v
            return each(lib, tree, without=["ppermute"], **of), sums

        mesh = cases.make_mesh((4,), ("x",))
        return run(rows.shmap(body, mesh, out_specs=P("x"), check_vma=False), small(16, 3))

    groups = [[0, 1], [2, 3]], ((0, 2), (3, 1)), [[0, 1, 2, 3]], [[0], [1], [2], [3]]
    return [of(g) for g in groups]


@row("wrong `axis_index_groups`: uneven, empty, no integers; over other axes", How.AS_LAX)
def groups_of_parts_that_are_wrong(lib: Any) -> Any:
    wrong = [[0, 1, 2], [3]], [[0]], [[0, 0], [1, 1]], [["a"], ["b"]], 3, []

    def types(f: Any, axes: Any, groups: Any) -> Any:
        return rows.types_inside(lambda v: f(v, axes, axis_index_groups=groups), small(8, 3))

    def mapped(f: Any) -> Any:
        return jax.vmap(lambda v: f(v, "i", axis_index_groups=[[0, 1], [2, 3]]), axis_name="i")

    return (
        [each_raised(lib, lambda f, g=g: types(f, "x", g)) for g in wrong],
        each_raised(lib, lambda f: types(f, ("x", 0), [[0], [1]])),
        each_raised(lib, lambda f: mapped(f)(small(4, 8, 3))),
    )
