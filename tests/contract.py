"""The contract of `lax.psum`, row by row: what a program may do with it.

A row is a function of psum that builds and runs programs, and returns what a user can see of them:
arrays, types, errors. The test runs it with our psum and with lax's, and compares. docs/contract.md
has one line for each row.

All data are small integers, whatever their type: sums are exact in any order and both psums have to
give the same bits.

Run as a program, this file is a second process for the rows that need one.
"""

import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, serialize_executable
from jax.experimental.layout import Format, Layout
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.native import extension

Psum = Callable[..., Any]

REPLICATED, BY_X = P(), P("x")

# What our psum does; docs/contract.md explains the words.
ACCELERATED = "accelerated"
PARTLY = "accelerated in part"
# The transpose of shard_map itself, or of a cast to a varying type, may be a psum of JAX.
DERIVED = "accelerated, except sums that JAX inserts"
LAX = "falls back to lax"
TYPES = "same types"
ERROR = "same error"
AS_LAX = "as lax"
DIFFERS = "differs: an error that says to call `jax_intranode.initialize(mesh)` first"
HOW = (ACCELERATED, PARTLY, DERIVED, LAX, TYPES, ERROR, AS_LAX, DIFFERS)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: Name of the row and of its test.
        what: The use of psum that it tests, for the table.
        how: What our psum does; one of `HOW`.
        run: Builds and runs programs with a given psum; returns the results to compare.
        devices: Number of devices that it needs.
    """

    name: str
    what: str
    how: str
    run: Callable[[Psum], Any]
    devices: int


ROWS: dict[str, Row] = {}


def row(what: str, how: str, devices: int = 2) -> Callable[[Any], Any]:
    """Adds a row to the table, under the name of the function."""

    def add(function: Callable[[Psum], Any]) -> Callable[[Psum], Any]:
        name = function.__name__.strip("_").replace("_", "-")
        assert name not in ROWS and how in HOW
        ROWS[name] = Row(name, what, how, function, devices)
        return function

    return add


# Running a row and comparing its results.

# The HLO of each program that `run` compiled for the current row.
PROGRAMS: list[str] = []


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception that is the result of a row."""

    type: type[BaseException]
    message: str
    notes: str


def raised(function: Callable[[], Any]) -> Any:
    """The exception that a function raises, or else its result."""
    try:
        return jax.block_until_ready(function())
    except Exception as error:
        # JAX appends a remark about the filtered traceback.
        message = str(error).split("\n--------------------\n")[0]
        return Raised(type(error), message, "\n".join(getattr(error, "__notes__", [])))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a row with ours or with lax's psum."""

    result: Any
    programs: list[str]
    calls: int  # how often our handlers ran


def outcome(tested: Row, psum: Psum) -> Outcome:
    PROGRAMS.clear()
    before = extension.handler_calls()
    result = jax.block_until_ready(tested.run(psum))
    return Outcome(result, list(PROGRAMS), extension.handler_calls() - before)


def compare(ours: Any, theirs: Any, path: str = "result") -> None:
    """Compares everything that a user can see of two results."""
    assert type(ours) is type(theirs), f"{path}: {ours!r} is not {theirs!r}"
    if isinstance(ours, (tuple, list)):
        assert len(ours) == len(theirs), path
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            compare(a, b, f"{path}[{k}]")
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), path
        for key in ours:
            compare(ours[key], theirs[key], f"{path}[{key!r}]")
    elif isinstance(ours, Raised):
        assert ours.type is theirs.type, f"{path}: {ours} is not {theirs}"
    elif isinstance(ours, jax.Array):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, path
        assert ours.weak_type == theirs.weak_type, f"{path}: weak_type {ours.weak_type}"
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim), path
        assert type(ours.sharding) is type(theirs.sharding), path
        assert ours.committed == theirs.committed, path
        if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        for a, b in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            compare(np.asarray(a.data), np.asarray(b.data), f"{path} on {a.device}")
    elif isinstance(ours, (np.ndarray, np.generic)):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, path
        assert ours.tobytes() == theirs.tobytes(), f"{path}: {ours} is not {theirs}"
    else:
        assert ours == theirs, f"{path}: {ours!r} is not {theirs!r}"


# Helpers of the rows.


def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Compiles a function, records its HLO, and runs it."""
    program = jax.jit(function, **options).lower(*args).compile()
    PROGRAMS.append(program.as_text())
    return program(*args)


def kind(value: Any) -> str:
    """The type of a value as text: all properties of a tracer, the class of anything else."""
    if not isinstance(value, jax.core.Tracer):
        return f"{type(value).__name__} {value}"
    aval = jax.typeof(value)
    return f"{aval} {aval.weak_type=} {aval.manual_axis_type} {aval.sharding}"


def shmap(
    body: Callable[..., Any],
    mesh: Mesh | None = None,
    in_specs: Any = BY_X,
    out_specs: Any = REPLICATED,
    check_vma: bool = True,
    **options: Any,
) -> Any:
    return jax.shard_map(
        body,
        mesh=mesh or line(),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
        **options,
    )


def line(*, order: tuple[int, ...] = (0, 1)) -> Mesh:
    """A mesh of two devices in the given order."""
    return cases.make_mesh((2,), ("x",), order)


def square(order: tuple[int, ...] = (0, 1, 2, 3), kind: AxisType = AxisType.Auto) -> Mesh:
    """A 2 x 2 mesh."""
    devices = np.array(jax.devices()[:4])[list(order)].reshape(2, 2)
    return Mesh(devices, ("x", "y"), axis_types=(kind, kind))


def small(*shape: int, dtype: Any = np.float32, seed: int = 0, top: int = 4) -> np.ndarray:
    """Random integers in [0, top), as values of `dtype`."""
    return np.random.default_rng(seed).integers(0, top, shape).astype(dtype)


# The values of check_vma that `under_both` tries.
CHECK_VMA = [True, False]


def under_both(function: Callable[[bool], Any]) -> dict[str, Any]:
    """The results of a function with check_vma on and off."""
    return {f"check_vma={check}": function(check) for check in CHECK_VMA}


def types_inside(function: Callable[[Any], Any], value: Any = None) -> dict[str, Any]:
    """The types that a function returns inside shard_map, with check_vma on and off.

    The function gets an operand that varies over "x", with 3 columns.
    """
    value = small(4, 3) if value is None else value

    def under(check_vma: bool) -> list[Any]:
        seen = []

        def body(v: Any) -> Any:
            seen.append(jax.tree.map(kind, function(v)))
            return v

        jax.eval_shape(shmap(body, out_specs=P("x"), check_vma=check_vma), value)
        return seen

    return under_both(under)


# Operands.


@row("a pytree: dict, list, tuple, None, namedtuple, a registered class, nested", ACCELERATED)
def pytrees(psum: Psum) -> Any:
    Pair = collections.namedtuple("Pair", ["left", "right"])

    def body(v: Any) -> Any:
        tree = {"a": [v, None, (v + 1,)], "b": Pair(v * 2, {}), "c": jax.tree_util.Partial(max, v)}
        tree = psum(tree, "x")
        assert type(tree["b"]) is Pair and tree["a"][1] is None
        assert isinstance(tree["c"], jax.tree_util.Partial)
        return tree["a"], tuple(tree["b"]), tree["c"].args

    return under_both(lambda check: run(shmap(body, check_vma=check), small(4, 3)))


@row("a pytree of several dtypes and shapes, some of which are not accelerated", PARTLY)
def pytree_of_many_dtypes(psum: Psum) -> Any:
    names = ("float32", "bfloat16", "int16", "float32", "bool", "complex64", "int32", "float16")

    def body(v: Any) -> Any:
        leaves = [jnp.full((k % 3 + 1, k), v[0, 0]).astype(d) for k, d in enumerate(names)]
        return psum(leaves, "x")

    return under_both(lambda check: run(shmap(body, check_vma=check), small(4, 3)))


@row("a pytree of 40 arrays", ACCELERATED)
def pytree_of_many_arrays(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return psum([v[:, : k % 4] + k for k in range(40)], "x")

    return under_both(lambda check: run(shmap(body, check_vma=check), small(2, 3)))


@row("an empty pytree, and None", TYPES)
def empty_pytrees(psum: Psum) -> Any:
    return types_inside(lambda v: [psum(tree, "x") for tree in ([], (), {}, None, [None, ()])])


@row("Python and NumPy scalars and arrays: multiplied by the world size while tracing", TYPES)
def python_scalars(psum: Psum) -> Any:
    values = (1, 1.5, 2j, True, np.int8(3), np.float16(2), np.ones(3, np.int32), np.bool_(True))
    return types_inside(lambda v: [psum(value, "x") for value in values])


@row("`psum(1, axis)` is a Python int and can be used in shapes", ACCELERATED)
def axis_size_is_static(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return psum(v.reshape(psum(1, "x"), -1), "x")

    return under_both(lambda check: run(shmap(body, check_vma=check), small(4, 3)))


@row("Python scalars and traced arrays in one pytree: the scalars stay static", TYPES)
def scalars_beside_arrays(psum: Psum) -> Any:
    return types_inside(
        lambda v: psum({"a": v, "b": 1, "c": 2.5, "d": [np.float32(3), np.ones(3)]}, "x")
    )


@row("bool and other arrays in one pytree: bool becomes int32", TYPES)
def bool_beside_arrays(psum: Psum) -> Any:
    return types_inside(lambda v: psum({"a": v, "b": True, "c": v > 1}, "x"))


@row("a concrete `jax.Array` from outside shard_map", LAX)
def concrete_array(psum: Psum) -> Any:
    outside = jnp.asarray(small(3))
    return under_both(
        lambda check: run(shmap(lambda v: psum(outside, "x"), check_vma=check), small(4, 3))
    )


@row("an array that is created inside shard_map", ACCELERATED)
def constant_made_inside(psum: Psum) -> Any:
    return under_both(
        lambda check: run(
            shmap(lambda v: psum(jnp.full((3,), 2.0, v.dtype), "x"), check_vma=check), small(4, 3)
        )
    )


@row("weakly typed operands: the weak type is kept or dropped as by lax", TYPES)
def weak_types(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        weak = jnp.full((), 3.0), jnp.full((2,), 3)
        assert all(jax.typeof(value).weak_type for value in weak)
        varying = lax.while_loop(lambda c: c[0] < 3.0, lambda c: (c[0] + 1.0, v), (3.0, v))[0]
        assert jax.typeof(varying).weak_type
        return psum(weak, "x"), psum(weak[0], "x"), psum(varying, "x"), psum((v, *weak), "x")

    return types_inside(body)


@row("weak types of the results", ACCELERATED)
def weak_types_of_results(psum: Psum) -> Any:
    return under_both(
        lambda check: run(
            shmap(lambda v: (psum(v, "x"), psum(v, "x") + 1), in_specs=P(), check_vma=check), 3.0
        )
    )


def by_dtype(dtype: str) -> Callable[[Psum], Any]:
    def result(psum: Psum) -> Any:
        with cases.x64("float64" if jnp.dtype(dtype).itemsize >= 8 else dtype):
            values = small(4, 3, top=2).astype(dtype)
            f = shmap(lambda v: (kind(psum(v, "x")), psum(v, "x"))[1], check_vma=True)
            on = run(f, values)
            return on, run(shmap(lambda v: psum(v, "x"), check_vma=False), values)

    result.__name__ = f"dtype_{dtype}"
    return result


for _dtype in cases.DTYPES:
    row(f"{_dtype}", ACCELERATED)(by_dtype(_dtype))
for _dtype in ("bool", "int16", "uint16", "complex64", "complex128"):
    row(f"{_dtype}" + (" becomes int32" * (_dtype == "bool")), LAX)(by_dtype(_dtype))


EXOTIC = [
    *("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
]


def by_exotic_dtype(dtype: str) -> Callable[[Psum], Any]:
    def result(psum: Psum) -> Any:
        # Ones, because some of the types have no zero.
        values = np.ones((4, 3), np.float32)
        f = shmap(lambda v: psum(v.astype(dtype), "x").astype(jnp.float32), check_vma=False)
        return raised(lambda: run(f, values))

    result.__name__ = f"dtype_{dtype}"
    return result


for _dtype in EXOTIC:
    row(f"{_dtype}, where the platform sums it", AS_LAX)(by_exotic_dtype(_dtype))


@row("float0, alone and in a pytree", ERROR)
def float0(psum: Psum) -> Any:
    nothing = np.zeros((2,), jax.dtypes.float0)
    return [
        raised(lambda: types_inside(lambda v: psum(nothing, "x"))),
        raised(lambda: types_inside(lambda v: psum((v, nothing), "x"))),
    ]


@row("PRNG keys, inside shard_map", ERROR)
def prng_keys(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return psum(jax.random.wrap_key_data(v), "x")

    values = small(4, dtype=np.uint32)
    return under_both(lambda check: raised(lambda: run(shmap(body, check_vma=check), values)))


@row("values that are not arrays (str, object), alone and in a pytree", ERROR)
def no_arrays(psum: Psum) -> Any:
    trees = "abc", ["abc"], (1, object()), {"a": {1}}
    alone = [raised(lambda t=tree: types_inside(lambda v: psum(t, "x"))) for tree in trees]
    beside = [raised(lambda t=tree: types_inside(lambda v: psum((v, t), "x"))) for tree in trees]
    return alone, beside


@row("references (`new_ref`)", ERROR)
def references(psum: Psum) -> Any:
    return under_both(
        lambda check: raised(
            lambda: run(shmap(lambda v: psum(jax.new_ref(v), "x"), check_vma=check), small(4, 3))
        )
    )


@row("the values that references hold", ACCELERATED)
def held_by_references(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        ref = jax.new_ref(v)
        ref[...] += psum(ref[...], "x")
        return psum(ref[...], "x")

    return under_both(lambda check: run(shmap(body, check_vma=check), small(4, 3)))


@row("scalar arrays, and arrays of one element", ACCELERATED)
def scalar_arrays(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return psum(v[0, 0], "x"), psum(v[:1, :1], "x"), psum(v.sum(), "x")

    return under_both(lambda check: run(shmap(body, check_vma=check), small(4, 3)))


@row("zero-sized arrays, alone and in a pytree", AS_LAX)
def zero_sized(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return psum(v[:0], "x"), psum(v[:, :0], "x"), psum((v, v[:0].astype(jnp.int32)), "x")

    return under_both(lambda check: run(shmap(body, check_vma=check), small(4, 3)))


@row("arrays of many dimensions", ACCELERATED)
def many_dimensions(psum: Psum) -> Any:
    values = small(2, 1, 2, 3, 1, 2, 2)
    return under_both(lambda check: run(shmap(lambda v: psum(v, "x"), check_vma=check), values))


@row("transposed, strided and reversed operands", ACCELERATED)
def layouts_inside(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return psum(v.T, "x"), psum(v[::2, 1:3], "x"), psum(v[::-1], "x"), psum(v.T, "x").T

    values = np.asfortranarray(small(8, 6))[:, ::-1]
    return under_both(lambda check: run(shmap(body, check_vma=check), values))


@row("arguments and results with layouts that are not row-major", ACCELERATED)
def layouts_of_arguments(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        mesh = line()
        column_major = Layout(major_to_minor=(1, 0))
        argument = Format(column_major, NamedSharding(mesh, P("x")))
        value = jax.device_put(small(8, 6), argument)
        result = run(
            shmap(lambda v: psum(v, "x"), mesh, check_vma=check),
            value,
            in_shardings=argument,
            out_shardings=Format(column_major, NamedSharding(mesh, P())),
        )
        return result, str(result.format.layout)

    return under_both(under)


@row("arrays too large for our kernels", LAX)
def large_arrays(psum: Psum) -> Any:
    values = small(2, 4 << 20)
    return run(shmap(lambda v: psum(v, "x")[:, ::4096], check_vma=False), values)


# Axes.


@row("arguments by keyword; `axis_index_groups` by keyword only", TYPES)
def signature(psum: Psum) -> Any:
    parameters = [(p.name, p.kind, p.default) for p in inspect.signature(psum).parameters.values()]
    by_name = types_inside(lambda v: psum(x=v, axis_name="x", axis_index_groups=None))
    return parameters, by_name


@row("too few or too many arguments", ERROR)
def wrong_arguments(psum: Psum) -> Any:
    return [
        raised(lambda: types_inside(lambda v: psum(v))),
        raised(lambda: types_inside(lambda v: psum(v, "x", None))),
        raised(lambda: types_inside(lambda v: psum(v, "x", axis="x"))),
    ]


@row("axis names as a string, a tuple, a list", ACCELERATED)
def axis_names(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return psum(v, "x"), psum(v, ("x",)), psum(v, ["x"])

    return under_both(lambda check: run(shmap(body, check_vma=check), small(4, 3)))


class Name(enum.Enum):
    ROWS = 1


@row("axis names that are not strings", AS_LAX)
def axis_names_of_any_kind(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        mesh = Mesh(np.array(jax.devices()[:2]), (Name.ROWS,), axis_types=(AxisType.Auto,))
        f = shmap(lambda v: psum(v, Name.ROWS), mesh, P(Name.ROWS), check_vma=check)
        return raised(lambda: run(f, small(4, 3)))

    return under_both(under)


@row("several axes in any order; one axis of several", ACCELERATED, devices=4)
def several_axes(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        both = psum(v, ("x", "y")), psum(v, ["y", "x"]), psum(psum(v, "x"), "y")
        return both, psum(v, "x"), psum(v, ("y",))

    return under_both(
        lambda check: run(
            shmap(body, square(), P("x", "y"), (P(), P(None, "y"), P("x")), check), small(4, 6)
        )
    )


@row("no axes: returns the operand", TYPES)
def no_axes(psum: Psum) -> Any:
    return types_inside(lambda v: [psum(v, ()), psum((v, True), []), psum("abc", ()) == "abc"])


@row("an axis of size 1", LAX)
def axis_of_one_device(psum: Psum) -> Any:
    mesh = cases.make_mesh((1, 2), ("one", "x"))
    return under_both(
        lambda check: run(
            shmap(lambda v: psum(v, "one"), mesh, P("one", "x"), P(None, "x"), check), small(4, 6)
        )
    )


@row("an axis of size 1 together with a larger one", ACCELERATED)
def axis_of_one_device_beside(psum: Psum) -> Any:
    mesh = cases.make_mesh((1, 2), ("one", "x"))
    return under_both(
        lambda check: run(
            shmap(lambda v: psum(v, ("one", "x")), mesh, P("one", "x"), P(), check), small(4, 6)
        )
    )


@row("the same axis twice (lax traces it, but XLA cannot compile it)", TYPES)
def axis_named_twice(psum: Psum) -> Any:
    return types_inside(lambda v: psum({"a": v, "b": 1}, ("x", "x")))


@row("positional axes, with and without names", AS_LAX)
def positional_axes(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        return [
            raised(lambda a=axes: run(shmap(lambda v: psum(v, a), check_vma=check), small(4, 3)))
            for axes in (("x", 0), ("x", -1), (1, "x"), (0, "x", 1))
        ]

    return under_both(under)


@row("axis names of wrong types: None, a set, a dict, nested tuples", ERROR)
def no_names(psum: Psum) -> Any:
    return [
        raised(lambda a=axis: types_inside(lambda v: psum(v, a)))
        for axis in (None, {"x"}, {"x": 1}, (("x",),), (["x"],))
    ]


@row("an unbound axis inside shard_map, alone and with a bound one", ERROR)
def unbound_axis_inside(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        return [
            raised(
                lambda a=axis, o=operand: run(
                    shmap(lambda v: psum(o(v), a), check_vma=check), small(4, 3)
                )
            )
            for axis in ("nowhere", ("x", "nowhere"))
            for operand in (lambda v: v, lambda v: 1, lambda v: {"a": v, "b": v})
        ]

    return under_both(under)


@row("a call where no axis is bound: lax's error, with a hint", ERROR)
def unbound_axis_outside(psum: Psum) -> Any:
    value = small(3)
    return [
        raised(lambda: psum(value, "nowhere")),
        raised(lambda: psum(jnp.asarray(value), "nowhere")),
        raised(lambda: psum(1, "nowhere")),
        raised(lambda: psum({"a": value}, ("nowhere", "x"))),
        raised(lambda: jax.jit(lambda v: psum(v, "nowhere"))(value)),
        raised(lambda: jax.jit(lambda v: psum(v, "nowhere", axis_index_groups=[[0]]))(value)),
        raised(lambda: jax.grad(lambda v: psum(v, "nowhere").sum())(value)),
        raised(lambda: jax.vmap(lambda v: psum(v, "nowhere"), axis_name="i")(value)),
    ]


@row("a mesh axis that is not manual", ERROR, devices=4)
def axis_not_manual(psum: Psum) -> Any:
    def in_auto_part(check: bool) -> Any:
        f = shmap(lambda v: psum(v, "y"), square(), check_vma=check, axis_names={"x"})
        return raised(lambda: run(f, small(4, 3)))

    without = []
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(square(kind=axis_type)):
            without.append(raised(lambda: jax.jit(lambda v: psum(v, "x"))(small(4, 3))))
            without.append(raised(lambda: psum(1, "x")))
    return under_both(in_auto_part), without


@row("a name bound by vmap, without shard_map", LAX)
def vmapped_name(psum: Psum) -> Any:
    def f(v: Any) -> Any:
        return psum(v, "i"), psum(1, "i"), psum((v, True), ("i",)), psum(2.0, "i") * v

    mapped = jax.vmap(f, axis_name="i")
    return run(mapped, small(4, 3)), mapped(jnp.asarray(small(4, 3)))


@row("two names bound by vmap, an operand mapped over one of them, and `in_axes`", LAX)
def vmapped_names(psum: Psum) -> Any:
    def f(v: Any, w: Any) -> Any:
        return psum(v, "i"), psum(v, ("i", "j")), psum((v, w), "j"), psum(w, ("j", "i"))

    inner = jax.vmap(f, in_axes=(1, None), axis_name="j")
    return run(jax.vmap(inner, in_axes=(0, 1), axis_name="i"), small(4, 3, 2), small(5, 4))


@row("a name bound by vmap inside shard_map", AS_LAX)
def vmapped_name_inside(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return jax.vmap(lambda r: psum(r, "i"), axis_name="i")(v)

    return under_both(
        lambda check: raised(
            lambda: run(shmap(body, out_specs=P("x"), check_vma=check), small(4, 3))
        )
    )


@row("a name bound by vmap together with a mesh axis", AS_LAX)
def vmapped_name_mixed(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return jax.vmap(lambda r: psum((r, 1.0), ("i", "x")), axis_name="i")(v)[0]

    return under_both(
        lambda check: raised(
            lambda: run(shmap(body, out_specs=P("x"), check_vma=check), small(4, 3))
        )
    )


@row("a name bound by vmap that hides a mesh axis", AS_LAX)
def vmapped_name_hides_mesh_axis(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return jax.vmap(lambda r: psum(r, "x"), axis_name="x")(v)

    return under_both(
        lambda check: raised(
            lambda: run(shmap(body, out_specs=P("x"), check_vma=check), small(4, 3))
        )
    )


@row("a name bound by vmap around shard_map, whose mesh has an axis of that name", AS_LAX)
def vmapped_name_outside_is_mesh_axis(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        f = shmap(lambda v: psum({"a": v, "b": v[0]}, "x"), check_vma=check)
        return raised(lambda: run(jax.vmap(f, axis_name="x"), small(3, 4, 3)))

    return under_both(under)


@row("psum over a mesh axis under a vmap with another name", ACCELERATED)
def mesh_axis_under_named_vmap(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return jax.vmap(lambda r: psum(r, "x"), axis_name="i")(v)

    return under_both(lambda check: run(shmap(body, check_vma=check), small(4, 3)))


# axis_index_groups.


def with_groups(psum: Psum, groups: Any, check_vma: bool) -> Any:
    size = sum(len(group) for group in groups)
    mesh = cases.make_mesh((size,), ("x",))

    def body(v: Any) -> Any:
        tree = psum({"a": v, "b": v > 1, "c": v.astype(jnp.int32)}, "x", axis_index_groups=groups)
        return tree

    return run(shmap(body, mesh, out_specs=P("x"), check_vma=check_vma), small(2 * size, 3))


@row("`axis_index_groups` of equal sizes, `check_vma=False`", LAX, devices=4)
def groups_even(psum: Psum) -> Any:
    return [
        with_groups(psum, groups, False)
        for groups in ([[0, 1], [2, 3]], ((0, 2), (3, 1)), [[0, 1, 2, 3]], [[0], [1], [2], [3]])
    ]


@row("`axis_index_groups` of different sizes, `check_vma=False`", AS_LAX, devices=4)
def groups_uneven(psum: Psum) -> Any:
    return [
        raised(lambda g=groups: with_groups(psum, g, False))
        for groups in ([[0, 1, 2], [3]], [[2], [0, 1, 3]])
    ]


@row("`axis_index_groups` for two devices, `check_vma=False`", LAX)
def groups_of_two_devices(psum: Psum) -> Any:
    return [with_groups(psum, groups, False) for groups in ([[0], [1]], [[0, 1]], [[1, 0]])]


@row("`axis_index_groups`, `check_vma=True`", ERROR)
def groups_under_check_vma(psum: Psum) -> Any:
    return [
        raised(lambda g=groups: with_groups(psum, g, True)) for groups in ([[0], [1]], [[0, 1]])
    ]


@row(
    "`axis_index_groups` that repeat an index, or with positional axes or names bound by vmap",
    ERROR,
)
def groups_wrong(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        values = small(4, 3)

        def over(axes: Any, groups: Any) -> Any:
            return run(
                shmap(lambda v: psum(v, axes, axis_index_groups=groups), check_vma=check), values
            )

        return [
            raised(lambda: over("x", [[0, 0], [1, 1]])),
            raised(lambda: over("x", [["a"], ["b"]])),
            raised(lambda: over("x", 3)),
            raised(lambda: over(("x", 0), [[0], [1]])),
        ]

    def vmapped(v: Any) -> Any:
        return psum(v, "i", axis_index_groups=[[0, 1], [2, 3]])

    return under_both(under), raised(lambda: jax.vmap(vmapped, axis_name="i")(small(4, 3)))


@row("`axis_index_groups` that omit indices, or are empty", AS_LAX)
def groups_that_do_not_cover(psum: Psum) -> Any:
    def body(groups: Any) -> Any:
        return lambda v: psum(v, "x", axis_index_groups=groups)

    # It is not specified which rank gets which sum. Only the types are compared.
    return [
        raised(lambda g=groups, c=check: jax.eval_shape(shmap(body(g), check_vma=c), small(4, 3)))
        for groups in ([[0]], [])
        for check in (True, False)
    ]


@row("`axis_index_groups` and Python scalars", TYPES)
def groups_and_scalars(psum: Psum) -> Any:
    return types_inside(
        lambda v: [
            psum(1, "x", axis_index_groups=[[0], [1]]),
            psum(2.0, "x", axis_index_groups=[[0, 1]]),
        ]
    )


# Types within shard_map.


@row("types of results: the axes they vary over, with `check_vma` on and off", TYPES)
def types_of_results(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return [psum(v, "x"), psum((v, v.sum()), ("x",)), psum(v > 1, "x"), psum(v[:0], "x")]

    return types_inside(body)


@row("operands that vary over some of the mesh's axes", ACCELERATED, devices=4)
def partly_varying(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        seen = []

        def body(v: Any, w: Any, u: Any) -> Any:
            results = psum((v, u), ("x", "y")), psum((v, w), "x"), psum((w, u), "y")
            seen.append(jax.tree.map(kind, results))
            return psum(results[0], "x"), psum(results[1], "y"), psum(results[2], "x")

        values = [small(4, 6, seed=k) for k in range(3)]
        return run(shmap(body, square(), (P("x", "y"), P("x"), P()), P(), check), *values), seen

    return under_both(under)


@row("operands that vary over some of the summed axes, `check_vma=False`", ACCELERATED, devices=4)
def varying_over_some_axes(psum: Psum) -> Any:
    f = shmap(lambda v: psum((v, v * 2), ("x", "y")), square(), check_vma=False)
    return run(f, small(4, 6))


@row("operands that vary over some of the summed axes, `check_vma=True`", ERROR, devices=4)
def varying_over_some_axes_checked(psum: Psum) -> Any:
    return [
        raised(lambda t=tree: run(shmap(lambda v: psum(t(v), ("x", "y")), square()), small(4, 6)))
        for tree in (lambda v: v, lambda v: (v, v.astype(jnp.int32)), lambda v: v > 1)
    ]


@row("replicated operands", ACCELERATED)
def replicated(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        once = psum(v, "x")
        return once, psum(once, "x"), psum({"a": v * 2, "b": once}, "x")

    return under_both(lambda check: run(shmap(body, in_specs=P(), check_vma=check), small(4, 3)))


@row("replicated and varying operands in one pytree", ACCELERATED)
def replicated_beside_varying(psum: Psum) -> Any:
    def body(v: Any, w: Any) -> Any:
        return psum([v, w, jnp.ones(3), v * w], "x")

    return under_both(
        lambda check: run(
            shmap(body, in_specs=(P("x"), P()), check_vma=check), small(4, 3), small(1, 3)
        )
    )


@row("unreduced operands", LAX)
def unreduced(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return psum(lax.pcast(v, "x", to="unreduced"), "x")

    return run(shmap(body), small(4, 3)), raised(
        lambda: run(shmap(body, check_vma=False), small(4, 3))
    )


@row("reduced operands", ERROR)
def reduced(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return psum(lax.pcast(v, "x", to="reduced"), "x")

    return raised(lambda: run(shmap(body, in_specs=P()), small(4, 3)))


@row("a result that contradicts `out_specs`", ERROR, devices=4)
def wrong_out_specs(psum: Psum) -> Any:
    f = shmap(lambda v: psum(v, "x"), square(), P("x", "y"), P())
    return raised(lambda: run(f, small(4, 6)))


@row("partly manual meshes: the HLO has no all-gather", LAX, devices=4)
def partly_manual(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        mesh = square()
        f = shmap(lambda v: psum(v * 2, "x"), mesh, axis_names={"x"}, check_vma=check)
        value = jax.device_put(small(4, 6), NamedSharding(mesh, P("x", "y")))
        result = run(f, value)
        assert "all-gather" not in PROGRAMS[-1]
        return result

    return under_both(under)


@row("partly manual meshes with sharding constraints inside", LAX, devices=4)
def partly_manual_with_constraints(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        def body(v: Any) -> Any:
            return lax.with_sharding_constraint(psum(v * 2, "x"), P(None, "y"))

        mesh = square()
        f = shmap(body, mesh, axis_names={"x"}, check_vma=check)
        with jax.set_mesh(mesh):
            return run(f, jax.device_put(small(4, 6), NamedSharding(mesh, P("x", "y"))))

    return under_both(under)


@row("a partly manual mesh whose other axes have size 1", ACCELERATED)
def partly_manual_alone(psum: Psum) -> Any:
    mesh = cases.make_mesh((1, 2), ("one", "x"))
    return under_both(
        lambda check: run(
            shmap(lambda v: psum(v, "x"), mesh, axis_names={"x"}, check_vma=check), small(4, 6)
        )
    )


@row("shard_map inside shard_map", AS_LAX, devices=4)
def nested_shard_map(psum: Psum) -> Any:
    def inner(v: Any) -> Any:
        return psum(v, "y"), psum(v, ("x", "y"))

    def body(v: Any) -> Any:
        both = jax.shard_map(inner, in_specs=P(None, "y"), out_specs=P(), axis_names={"y"})
        over_y, over_both = both(v)
        return over_y, over_both, psum(v, "x")

    f = shmap(body, square(), P("x"), (P("x"), P(), P()), axis_names={"x"})
    return run(f, small(4, 6))


@row("meshes with Auto axes", ACCELERATED)
def auto_axes(psum: Psum) -> Any:
    with jax.set_mesh(line()):
        return run(
            jax.shard_map(lambda v: psum(v, "x"), in_specs=P("x"), out_specs=P()), small(4, 3)
        )


@row("meshes with Explicit axes: values, and shardings in types", ACCELERATED)
def explicit_axes(psum: Psum) -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Explicit,))
    seen = []

    def f(v: Any) -> Any:
        result = jax.shard_map(lambda v: psum(v, "x"), in_specs=P("x"), out_specs=P())(v)
        seen.append(kind(result))
        return result

    with jax.set_mesh(mesh):
        value = jax.device_put(small(4, 3), NamedSharding(mesh, P("x")))
        return run(f, value), seen


@row("meshes with Explicit axes, some of which stay Explicit inside", LAX, devices=4)
def explicit_and_manual_axes(psum: Psum) -> Any:
    mesh = square(kind=AxisType.Explicit)
    seen = []

    def body(v: Any) -> Any:
        result = psum(v, "x")
        seen.append(kind(result))
        return result

    def f(v: Any) -> Any:
        return jax.shard_map(body, in_specs=P("x"), out_specs=P(), axis_names={"x"})(v)

    with jax.set_mesh(mesh):
        value = jax.device_put(small(4, 6), NamedSharding(mesh, P("x", "y")))
        return run(f, value), seen


@row("meshes with Manual axes: under `set_mesh`, and the axis names inside", ACCELERATED)
def manual_axes(psum: Psum) -> Any:
    seen = []

    def body(v: Any) -> Any:
        seen.append(str(jax.sharding.get_abstract_mesh().axis_types))
        return psum(v, "x")

    return run(shmap(body), small(4, 3)), seen


@row("`pmap`: all kinds of axis names above", ACCELERATED)
def pmap(psum: Psum) -> Any:
    def f(v: Any) -> Any:
        return psum(v, "i"), psum({"a": v, "n": 1}, "i"), v / psum(1, "i"), psum(v[0], "i")

    devices = jax.devices()[:2]
    return jax.pmap(f, axis_name="i", devices=devices)(small(2, 6))


@row("`pmap` with `axis_index_groups`, with a name bound by vmap, and with an unbound name", AS_LAX)
def pmap_as_lax(psum: Psum) -> Any:
    devices = jax.devices()[:2]

    def grouped(v: Any) -> Any:
        return psum(v, "i", axis_index_groups=[[0], [1]])

    def mixed(v: Any) -> Any:
        return jax.vmap(lambda r: psum(r, ("i", "j")), axis_name="j")(v)

    return [
        raised(lambda f=f: jax.pmap(f, axis_name="i", devices=devices)(small(2, 2, 3)))
        for f in (grouped, mixed, lambda v: psum(v, "j"))
    ]


# Control flow.


def in_control_flow(body: Callable[..., Any]) -> dict[str, Any]:
    return under_both(
        lambda check: run(
            shmap(body, in_specs=(P("x"), P()), check_vma=check), small(4, 3), small(2, 3, seed=1)
        )
    )


@row("nested `jit`, inlined and not", ACCELERATED)
def nested_jit(psum: Psum) -> Any:
    def body(v: Any, w: Any) -> Any:
        def inner(u: Any) -> Any:
            return psum(u, "x")

        return jax.jit(inner)(v) + jax.jit(jax.jit(inner), inline=True)(v * w)

    return in_control_flow(body)


@row("eager, without `jit`", ACCELERATED)
def eager(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        return psum(v, "x"), psum({"a": v[0, 0], "b": 1.0}, "x")

    value = jax.device_put(small(4, 3), NamedSharding(line(), P("x")))
    return under_both(lambda check: shmap(body, check_vma=check)(value))


@row("`disable_jit`", ACCELERATED)
def disabled_jit(psum: Psum) -> Any:
    value = jax.device_put(small(4, 3), NamedSharding(line(), P("x")))
    with jax.disable_jit():
        return under_both(lambda check: shmap(lambda v: psum(v * 2, "x"), check_vma=check)(value))


@row("`while_loop`, in its body and in its condition", ACCELERATED)
def while_loop(psum: Psum) -> Any:
    def body(v: Any, w: Any) -> Any:
        def step(carry: Any) -> Any:
            k, value = carry
            return k + 1, value + psum(v * w, "x")

        def go_on(carry: Any) -> Any:
            return psum(carry[0] * jnp.int32(v[0, 0] * 0 + 1), "x") < 6

        return lax.while_loop(go_on, step, (0, w))

    return in_control_flow(body)


@row("`scan`, `fori_loop`, `map`", ACCELERATED)
def loops(psum: Psum) -> Any:
    def body(v: Any, w: Any) -> Any:
        scanned = lax.scan(lambda c, u: (c + psum(v, "x"), psum(v * u, "x")), w, jnp.arange(3.0))
        looped = lax.fori_loop(0, 3, lambda k, c: c + psum(v * k, "x"), w)
        return scanned, looped, lax.map(lambda u: psum(u, "x"), v)

    return in_control_flow(body)


def conditional(psum: Psum) -> Callable[..., Any]:
    def body(v: Any, w: Any) -> Any:
        total = psum(v, "x")
        positive = total.sum() > 0  # known at run time only
        one = lax.cond(positive, lambda: psum(v * w, "x"), lambda: total)
        both = lax.cond(positive, lambda: psum(v + w, "x"), lambda: psum(v * 2, "x"))
        index = jnp.int32(total[0, 0]) % 3
        branches = [lambda: psum(v, "x"), lambda: w, lambda: psum({"a": v}, "x")["a"]]
        return one, both, lax.switch(index, branches)

    return body


@row("`cond` and `switch` whose index is only known at run time", ACCELERATED)
def cond(psum: Psum) -> Any:
    return in_control_flow(conditional(psum))


@row("`cond` that runs repeatedly: XLA captures it into a conditional graph node", ACCELERATED)
def cond_replayed(psum: Psum) -> Any:
    def body(v: Any, w: Any) -> Any:
        def step(k: Any, carry: Any) -> Any:
            return lax.cond(
                carry.sum() % 2 < 1, lambda: psum(v * carry, "x") % 7, lambda: psum(v, "x") + carry
            )

        return lax.fori_loop(0, 4, step, w)

    program = jax.jit(shmap(body, in_specs=(P("x"), P())))
    program = program.lower(small(4, 3), small(2, 3, seed=1)).compile()
    PROGRAMS.append(program.as_text())
    # XLA captures a graph at the second run and replays it afterwards.
    return [program(small(4, 3, seed=k), small(2, 3, seed=k + 1)) for k in range(6)]


# Differentiation. The functions are polynomials of small integers, so gradients are exact.


def smap_2(body: Any, check_vma: bool, out_specs: Any = REPLICATED) -> Any:
    """shard_map of a function of a varying and a replicated operand."""
    return shmap(body, in_specs=(P("x"), P()), out_specs=out_specs, check_vma=check_vma)


def arguments() -> tuple[np.ndarray, np.ndarray]:
    return small(4, 3), small(2, 3, seed=1)


def layer(psum: Psum) -> Callable[..., Any]:
    """A layer with psums of a varying and of a replicated operand, alone and in a pytree."""

    def f(v: Any, w: Any) -> Any:
        tree = psum({"a": v * w, "b": w, "c": (v.sum(),)}, "x")
        return psum(v, "x") * w + tree["a"] * tree["b"] + tree["c"][0] + psum(w * w, "x")

    return f


def differentiated(psum: Psum, transform: Callable[[Any], Any]) -> Any:
    """Transforms the layer outside shard_map."""

    def under(check: bool) -> Any:
        return run(transform(smap_2(layer(psum), check)), *arguments())

    return under_both(under)


def differentiated_inside(psum: Psum, transform: Callable[[Any], Any], out_specs: Any) -> Any:
    """Transforms the layer inside shard_map."""

    def under(check: bool) -> Any:
        seen: list[Any] = []

        def body(v: Any, w: Any) -> Any:
            result = transform(layer(psum))(v, w)
            seen.append(jax.tree.map(kind, result))
            return result

        return run(smap_2(body, check, out_specs), *arguments()), seen

    return under_both(under)


def loss(f: Any) -> Any:
    return lambda v, w: (f(v, w) ** 2).sum()


@row("`grad` and `value_and_grad` outside shard_map, operands varying and replicated", DERIVED)
def grad_outside(psum: Psum) -> Any:
    return differentiated(psum, lambda f: jax.value_and_grad(loss(f), argnums=(0, 1)))


@row("`grad` and `value_and_grad` inside shard_map, operands varying and replicated", DERIVED)
def grad_inside(psum: Psum) -> Any:
    def transform(f: Any) -> Any:
        return jax.grad(loss(f), argnums=(0, 1))

    # Without check_vma the gradients of the replicated operand may differ from rank to rank.
    def under(check: bool) -> Any:
        def body(v: Any, w: Any) -> Any:
            for_v, for_w = transform(layer(psum))(v, w)
            return for_v, for_w if check else for_w[None]

        return run(smap_2(body, check, (P("x"), P() if check else P("x"))), *arguments())

    return under_both(under)


@row("gradients with respect to a varying operand only, to a replicated one only", DERIVED)
def grad_of_one_operand(psum: Psum) -> Any:
    return [differentiated(psum, lambda f, k=k: jax.grad(loss(f), argnums=k)) for k in (0, 1)]


@row("gradients through one psum, inside shard_map: their types and values", DERIVED)
def grad_through_one_psum(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        seen = []

        def body(v: Any, w: Any) -> Any:
            for_v = jax.grad(lambda u: (psum(u, "x") ** 2).sum())(v)
            for_w = jax.grad(lambda u: (psum(u, "x") ** 2).sum())(w)
            for_both = jax.grad(lambda u: (psum(u * v, "x") ** 2).sum())(w)
            results = for_v, for_w, for_both
            seen.append([kind(value) for value in results])
            return tuple(
                lax.all_gather(value, "x", tiled=True) if not check else value + 0 * v
                for value in results
            )

        return run(smap_2(body, check, P("x") if check else P()), *arguments()), seen

    return under_both(under)


@row("leaves of a pytree that are not differentiated, not used, or stopped", DERIVED)
def grad_of_some_leaves(psum: Psum) -> Any:
    def f(v: Any, w: Any) -> Any:
        used, unused, stopped, integer = psum(
            (v, v * w, lax.stop_gradient(v), (v > 1).astype(jnp.int32)), "x"
        )
        del unused
        return used * w + stopped * w + integer

    def under(check: bool) -> Any:
        mapped = smap_2(f, check)
        gradient = run(jax.grad(loss(mapped), argnums=(0, 1)), *arguments())
        primals = arguments()
        tangent = run(lambda v, w: jax.jvp(lambda u: mapped(u, w), (v,), (v,)), *primals)
        return gradient, tangent

    return under_both(under)


@row("gradients with respect to integers (`allow_int`)", DERIVED)
def grad_of_integers(psum: Psum) -> Any:
    def f(v: Any, n: Any) -> Any:
        return (psum(v, "x") * psum(n, "x")).sum()

    def under(check: bool) -> Any:
        mapped = smap_2(f, check)
        for_v, for_n = jax.grad(mapped, argnums=(0, 1), allow_int=True)(
            small(4, 3), small(2, 3, dtype=np.int32)
        )
        return for_v, kind(for_n)

    return under_both(under)


@row("gradients in bfloat16 and float16", DERIVED)
def grad_of_half_precision(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        f = smap_2(lambda v, w: psum(v * w, "x"), check)
        transform = jax.grad(lambda v, w: f(v, w).sum(), argnums=(0, 1))
        return [
            run(transform, *[a.astype(d) for a in arguments()]) for d in ("bfloat16", "float16")
        ]

    return under_both(under)


@row("gradients in complex64", LAX)
def grad_of_complex(psum: Psum) -> Any:
    # With check_vma off XLA:CPU aborts on lax's own program.
    f = smap_2(lambda v, w: psum(v * w, "x"), check_vma=True)
    transform = jax.grad(lambda v, w: jnp.real(f(v, w) ** 2).sum(), argnums=(0, 1))
    return run(transform, *[(a * (1 + 2j)).astype("complex64") for a in arguments()])


@row("`jvp`, outside and inside shard_map", ACCELERATED)
def jvp(psum: Psum) -> Any:
    def transform(f: Any) -> Any:
        return lambda v, w: jax.jvp(f, (v, w), (w[:1] + 0 * v, w))

    return differentiated(psum, transform), differentiated_inside(psum, transform, P())


@row("`jvp` of `grad`, `grad` of `jvp`", DERIVED)
def jvp_of_grad(psum: Psum) -> Any:
    def forward_over_reverse(f: Any) -> Any:
        return lambda v, w: jax.jvp(jax.grad(loss(f), argnums=(0, 1)), (v, w), (v, w))

    def reverse_over_forward(f: Any) -> Any:
        return jax.grad(lambda v, w: jax.jvp(loss(f), (v, w), (v, w))[1], argnums=(0, 1))

    return differentiated(psum, forward_over_reverse), differentiated(psum, reverse_over_forward)


@row("`grad` of `grad`, `jacfwd`, `jacrev`, `hessian`", DERIVED)
def jacobians(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        f = smap_2(lambda v, w: psum(v * v, "x")[0] * psum(w, "x")[0], check)
        total = loss(f)
        twice = jax.grad(lambda v, w: (jax.grad(total)(v, w) ** 2).sum())
        transformed = twice, jax.jacfwd(f), jax.jacrev(f, argnums=1), jax.hessian(total)
        return [run(t, *arguments()) for t in transformed]

    return under_both(under)


@row("`linearize`, outside and inside shard_map", ACCELERATED)
def linearize(psum: Psum) -> Any:
    def transform(f: Any) -> Any:
        def both(v: Any, w: Any) -> Any:
            value, tangent = jax.linearize(f, v, w)
            return value, tangent(v, w), tangent(2 * v, 0 * w)

        return both

    return differentiated(psum, transform), differentiated_inside(psum, transform, P())


@row("`vjp` and `linear_transpose`", DERIVED)
def transposes(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        linear = shmap(lambda v: psum({"a": v, "b": v * 2}, "x"), check_vma=check)

        def f(v: Any) -> Any:
            cotangents = {"a": jnp.ones((2, 3)), "b": 3 * jnp.ones((2, 3))}
            _, pullback = jax.vjp(linear, v)
            return pullback(cotangents), jax.linear_transpose(linear, v)(cotangents)

        def inside(v: Any, w: Any) -> Any:
            constant = w + 1
            transposed = jax.linear_transpose(lambda u: psum((u, constant, u * w), "x"), v)
            return transposed((w, constant, w * w))[0]

        return run(f, small(4, 3)), run(smap_2(inside, check, P("x")), *arguments())

    return under_both(under)


@row("`custom_vjp` around it, and psum in its backward pass", DERIVED)
def custom_vjp(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        @jax.custom_vjp
        def f(v: Any) -> Any:
            return psum(v * v, "x")

        def forward(v: Any) -> Any:
            return psum(v * v, "x"), v

        def backward(v: Any, cotangent: Any) -> Any:
            return (v * cotangent + psum(v, "x") + (0 * v),)

        f.defvjp(forward, backward)
        mapped = smap_2(lambda v, w: f(v) * w, check)
        inside = smap_2(lambda v, w: jax.grad(lambda u: (f(u) ** 2).sum())(v), check, P("x"))
        return run(jax.value_and_grad(loss(mapped)), *arguments()), run(inside, *arguments())

    return under_both(under)


@row("`custom_jvp` around it", DERIVED)
def custom_jvp(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        @jax.custom_jvp
        def f(v: Any) -> Any:
            return psum(v * v, "x")

        @f.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            (v,), (t,) = primals, tangents
            return f(v), psum(3 * v * t, "x")

        mapped = smap_2(lambda v, w: f(v) * w, check)
        return run(jax.value_and_grad(loss(mapped), argnums=(0, 1)), *arguments())

    return under_both(under)


@row(
    "partial evaluation: one psum of a value and its tangent, or of a constant and a variable",
    DERIVED,
)
def partly_known(psum: Psum) -> Any:
    policy = jax.checkpoint_policies

    def in_scan(f: Any) -> Any:
        return lambda v: lax.scan(lambda total, _: (total + f(v), None), 0 * f(v), length=2)[0]

    def under(check: bool) -> Any:
        @jax.custom_jvp
        def f(v: Any) -> Any:
            squares, v = psum((v * v, v), "x")
            return squares * v

        @f.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            (v,), (t,) = primals, tangents
            (squares, v), (of_squares, t) = psum(((v * v, v), (3 * v * t, 5 * t)), "x")
            return squares * v, of_squares * v + squares * t

        def gradient(wrap: Callable[[Any], Any]) -> Any:
            mapped = shmap(lambda v: wrap(f)(v) * v, out_specs=P("x"), check_vma=check)
            return run(jax.grad(lambda v: (mapped(v) ** 2).sum()), small(4, 3))

        def transposed(v: Any, constant: Any) -> Any:
            def linear(u: Any) -> Any:
                of_u, of_constant = psum((u, constant), "x")
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

    return under_both(under)


@row("`checkpoint`, and its policies", DERIVED)
def checkpoint(psum: Psum) -> Any:
    policy = jax.checkpoint_policies

    def transform(f: Any, keep: Any) -> Any:
        return jax.grad(loss(jax.checkpoint(f, policy=keep)), argnums=(0, 1))

    return [
        differentiated(psum, lambda f, keep=keep: transform(f, keep))
        for keep in (None, policy.everything_saveable)
    ]


@row("gradients through nested `jit`, `scan`, `cond`", DERIVED)
def grad_through_control_flow(psum: Psum) -> Any:
    def through_jit(v: Any, w: Any) -> Any:
        return jax.jit(layer(psum))(v, w)

    def through_scan(v: Any, w: Any) -> Any:
        return lax.scan(lambda c, k: (c + psum(v * k * w, "x"), None), w, jnp.arange(3.0))[0]

    def through_cond(v: Any, w: Any) -> Any:
        positive = psum(v, "x").sum() > 0
        return lax.cond(positive, lambda: psum(v * w, "x"), lambda: psum(v, "x"))

    def under(check: bool) -> Any:
        return [
            run(jax.value_and_grad(loss(smap_2(f, check)), argnums=(0, 1)), *arguments())
            for f in (through_jit, through_scan, through_cond)
        ]

    return under_both(under)


@row("`jvp` through `while_loop`, and `grad` of it refused", DERIVED)
def while_loop_differentiated(psum: Psum) -> Any:
    def body(v: Any, w: Any) -> Any:
        def step(carry: Any) -> Any:
            return carry[0] + 1, carry[1] + psum(v * w, "x")

        return lax.while_loop(lambda carry: carry[0] < 3, step, (0, w))[1]

    def under(check: bool) -> Any:
        mapped = smap_2(body, check)
        forward = run(lambda v, w: jax.jvp(mapped, (v, w), (v, w)), *arguments())
        return forward, raised(lambda: run(jax.grad(loss(mapped)), *arguments()))

    return under_both(under)


# Batching.


@row("`vmap` inside shard_map: any axis, some operands, some leaves, nested", ACCELERATED)
def vmap_inside(psum: Psum) -> Any:
    def body(v: Any, w: Any) -> Any:
        rows = jax.vmap(lambda r: psum(r, "x"))(v)
        columns = jax.vmap(lambda c: psum(c, "x"), in_axes=1, out_axes=1)(v)
        some = jax.vmap(lambda r, s: psum((r, s, r * s), "x"), in_axes=(0, None))(v, w)
        mixed = jax.vmap(lambda r, s: psum({"r": r, "s": s}, "x"), in_axes=(0, 1))(v, w.T)
        nested = jax.vmap(jax.vmap(lambda e: psum((e, 1), "x")[0]))(v)
        unbatched = jax.vmap(lambda r: psum(w, "x") + r)(v)
        return rows, columns, some, mixed, nested, psum(unbatched, "x")

    return under_both(lambda check: run(smap_2(body, check), *arguments()))


@row("`vmap` of shard_map, with and without `spmd_axis_name`", ACCELERATED, devices=4)
def vmap_outside(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        f = shmap(lambda v: psum(v, "x"), square(), check_vma=check)
        batch = small(2, 4, 3)
        return run(jax.vmap(f), batch), run(jax.vmap(f, spmd_axis_name="y"), batch)

    return under_both(under)


@row("`vmap` of `grad`, `grad` of `vmap`, per-example gradients", DERIVED)
def vmap_of_grad(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        f = loss(smap_2(layer(psum), check))
        v, w = arguments()
        batch = np.stack([w, 2 * w])
        outside = run(jax.vmap(jax.grad(f, argnums=(0, 1)), in_axes=(None, 0)), v, batch)
        summed = run(
            jax.grad(lambda v, ws: jax.vmap(f, in_axes=(None, 0))(v, ws).sum(), argnums=(0, 1)),
            v,
            batch,
        )

        def body(v: Any, w: Any) -> Any:
            return jax.vmap(jax.grad(lambda r: (psum(r * w[0], "x") ** 2).sum()))(v)

        return outside, summed, run(smap_2(body, check, P("x")), v, w)

    return under_both(under)


@row("`cond` under `vmap`, with a batched predicate", ACCELERATED)
def vmap_of_cond(psum: Psum) -> Any:
    def body(v: Any, w: Any) -> Any:
        def one(r: Any) -> Any:
            return lax.cond(r.sum() > 4, lambda: psum(v, "x") * 2, lambda: psum(v, "x")) + r

        return jax.vmap(one)(w)

    return in_control_flow(body)


@row("`checkify`", ACCELERATED)
def checkified(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        error, result = checkify.checkify(lambda u: psum(u, "x"))(v)
        del error
        return result

    return under_both(lambda check: raised(lambda: run(shmap(body, check_vma=check), small(4, 3))))


# Memory.


@row("donated arguments: aliased and deleted as with lax", ACCELERATED)
def donation(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        mesh = line()
        sharding = NamedSharding(mesh, P("x"))

        def body(v: Any, w: Any) -> Any:
            total = psum(v, "x")
            return total + 0 * v, w + psum(w, "x")

        f = jax.jit(
            shmap(body, mesh, (P("x"), P("x")), P("x"), check_vma=check), donate_argnums=(0, 1)
        )
        operands = [jax.device_put(small(4, 3, seed=k), sharding) for k in range(2)]
        program = f.lower(*operands).compile()
        PROGRAMS.append(program.as_text())
        aliased = program.memory_analysis().alias_size_in_bytes
        results = f(*operands)
        return results, [operand.is_deleted() for operand in operands], aliased

    return under_both(under)


@row("one array as several operands, used after, returned twice", ACCELERATED)
def aliasing(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        def body(v: Any) -> Any:
            total = psum(v, "x")
            twice = psum((v, v, v.T), "x")
            return (twice, total, total, psum(total, "x"), psum(v, "x")), v

        value = jax.device_put(small(4, 3), NamedSharding(line(), P("x")))
        return run(shmap(body, out_specs=(P(), P("x")), check_vma=check), value), value

    return under_both(under)


# Tracing, lowering, compiling.


@row("`eval_shape`", TYPES)
def eval_shape(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        f = shmap(lambda v: psum({"a": v, "b": v > 1, "c": v[:0]}, "x"), check_vma=check)
        shapes = jax.eval_shape(f, jax.ShapeDtypeStruct((4, 3), jnp.bfloat16))
        return jax.tree.map(lambda s: (s, s.weak_type, str(s.sharding)), shapes)

    return under_both(under)


@row("`make_jaxpr`: types and effects of the program", TYPES)
def make_jaxpr(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        f = shmap(lambda v: psum({"a": v, "b": v.sum()}, "x"), check_vma=check)
        jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)(small(4, 3))
        vmapped = jax.make_jaxpr(jax.vmap(lambda v: psum(v, "i"), axis_name="i"))(small(4, 3))
        return (
            [str(aval) for aval in jaxpr.out_avals],
            str(jaxpr.effects),
            jax.tree.map(str, shapes),
            str(vmapped),
        )

    return under_both(under)


@row("`make_jaxpr` inside shard_map: effects", TYPES)
def make_jaxpr_inside(psum: Psum) -> Any:
    def effects(v: Any) -> list[str]:
        trees = v, {"a": v, "b": v > 1}
        return [str(jax.make_jaxpr(lambda t: psum(t, "x"))(tree).effects) for tree in trees]

    return types_inside(effects)


@row("`jax.sharding.no_collectives`, where jax has it", AS_LAX)
def forbidden_collectives(psum: Psum) -> Any:
    # Not in jax 0.10.2.
    forbid = getattr(jax.sharding, "no_collectives", lambda axes: contextlib.nullcontext())

    def under(check: bool) -> Any:
        with forbid({"x"}):
            return raised(lambda: run(shmap(lambda v: psum(v, "x"), check_vma=check), small(4, 3)))

    return under_both(under)


@row("`make_jaxpr`, evaluated by `eval_jaxpr` and as a function", ACCELERATED)
def evaluated_jaxpr(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        closed = jax.make_jaxpr(shmap(lambda v: psum(v * 2, "x"), check_vma=check))(small(4, 3))
        return run(jax.extend.core.jaxpr_as_fun(closed), small(4, 3))

    return under_both(under)


@row("`closure_convert` and `named_call` around it", ACCELERATED)
def wrapped(psum: Psum) -> Any:
    def body(v: Any) -> Any:
        f, consts = jax.closure_convert(lambda u: psum(u * v, "x"), v)
        return f(v, *consts), jax.named_call(lambda u: psum(u, "x"), name="named")(v)

    return under_both(lambda check: run(shmap(body, check_vma=check), small(4, 3)))


@row("AOT `lower().compile()` from shapes; its layouts, shardings and trees", ACCELERATED)
def ahead_of_time(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        mesh = line()
        shape = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=NamedSharding(mesh, P("x")))
        f = jax.jit(shmap(lambda v: psum({"a": v, "b": v.sum()}, "x"), mesh, check_vma=check))
        lowered = f.lower(shape)
        program = lowered.compile()
        PROGRAMS.append(program.as_text())
        told = (
            str(lowered.out_info),
            str(lowered.in_tree),
            str(program.out_tree),
            str(program.input_shardings),
            str(program.output_shardings),
            str(program.output_formats),
        )
        value = jax.device_put(small(4, 3), NamedSharding(mesh, P("x")))
        wrong = raised(lambda: program(jnp.zeros((8, 3))))
        return program(value), told, wrong

    return under_both(under)


@row("lowering for another platform, and for several", LAX)
def other_platforms(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        traced = jax.jit(shmap(lambda v: psum(v, "x"), check_vma=check)).trace(small(4, 3))
        alone = traced.lower(lowering_platforms=("tpu",)).as_text()
        several = traced.lower(lowering_platforms=("cpu", "cuda", "tpu")).as_text()
        assert "jax_intranode_psum" not in alone
        return "all_reduce" in alone, "all_reduce" in several

    return under_both(under)


@row("lowering for an `AbstractMesh`, without devices", LAX)
def abstract_mesh(psum: Psum) -> Any:
    mesh = AbstractMesh((2,), ("x",))
    shape = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=NamedSharding(mesh, P("x")))

    def under(check: bool) -> Any:
        traced = jax.jit(shmap(lambda v: psum(v, "x"), mesh, check_vma=check)).trace(shape)
        texts = [traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")]
        return ["all_reduce" in text for text in texts]

    return under_both(under)


def exported(psum: Psum, check: bool) -> tuple[Any, jax.Array]:
    mesh = line()
    f = jax.jit(shmap(lambda v: psum((v * v, v.sum()), "x"), mesh, check_vma=check))
    value = jax.device_put(small(4, 3), NamedSharding(mesh, P("x")))
    program = jax.export.export(f, platforms=("cpu", "cuda", "tpu"))(value)
    assert "jax_intranode_psum" not in program.mlir_module()
    return program, value


@row("`jax.export`: exported for several platforms, and called", LAX)
def export(psum: Psum) -> Any:
    def under(check: bool) -> Any:
        program, value = exported(psum, check)
        return str(program.out_avals), run(program.call, value)

    return under_both(under)


@row("`jax.export`: serialized, called, and differentiated", LAX)
def export_serialized(psum: Psum) -> Any:
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")

    def under(check: bool) -> Any:
        program, value = exported(psum, check)
        again = jax.export.deserialize(program.serialize(vjp_order=1))
        gradient = run(jax.grad(lambda v: again.call(v)[0].sum()), value)
        return str(again.out_avals), run(again.call, value), gradient

    return under_both(under)


@row("`jax.export` with symbolic shapes", LAX)
def export_symbolic(psum: Psum) -> Any:
    mesh = line()
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(shmap(lambda v: psum({"a": v * v, "b": v}, "x"), mesh))
    shape = jax.ShapeDtypeStruct((4, n), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    program = jax.export.export(f)(shape)
    value = jax.device_put(small(4, 3), NamedSharding(mesh, P("x")))
    return str(program.out_avals), run(program.call, value)


# Meshes.


@row("the device order changes after tracing: no stale ids", PARTLY, devices=4)
def device_order_changed(psum: Psum) -> Any:
    @jax.jit
    def f(v: Any) -> Any:
        body = jax.shard_map(lambda u: psum(u, "x"), in_specs=P("x", "y"), out_specs=P(None, "y"))
        return body(v)

    values, results = small(4, 6), []
    # With stale device ids the groups of "x" would be wrong.
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2), (0, 1, 2, 3)):
        mesh = square(order)
        with jax.set_mesh(mesh):
            results.append(f(jax.device_put(values, NamedSharding(mesh, P("x", "y")))))
            PROGRAMS.append(f.lower(values).compile().as_text())
    return results


def on_square(order: tuple[int, ...], values: np.ndarray) -> tuple[Mesh, jax.Array]:
    mesh = square(order)
    return mesh, jax.device_put(values, NamedSharding(mesh, P("x", "y")))


@row("a jaxpr of an abstract mesh, run under one mesh after another", AS_LAX, devices=4)
def jaxpr_under_meshes(psum: Psum) -> Any:
    body = jax.shard_map(
        lambda u: psum(u, "x"),
        mesh=square((0, 1, 2, 3)).abstract_mesh,
        in_specs=P("x", "y"),
        out_specs=P(None, "y"),
    )
    values, results = small(4, 6), []
    program = jax.jit(jaxpr_as_fun(jax.make_jaxpr(body)(values)))
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        mesh, x = on_square(order, values)
        with jax.set_mesh(mesh):
            results.append(program(x))
    return results


@row("linearized under one mesh, applied under another", AS_LAX, devices=4)
def linearized_under_meshes(psum: Psum) -> Any:
    values = small(4, 6)
    mesh, x = on_square((0, 1, 2, 3), values)
    with jax.set_mesh(mesh):
        squares = jax.jit(
            jax.shard_map(lambda u: psum(u * u, "x"), in_specs=P("x", "y"), out_specs=P(None, "y"))
        )
        value, push = jax.linearize(squares, x)
    other, _ = on_square((0, 2, 1, 3), values)
    with jax.set_mesh(other):
        return value, raised(lambda: push(x))


@row("two meshes of the same devices in one program", ACCELERATED, devices=4)
def two_meshes(psum: Psum) -> Any:
    flat, folded = cases.make_mesh((4,), ("i",)), square()

    def under(check: bool) -> Any:
        over_flat = shmap(lambda v: psum(v, "i"), flat, P("i"), check_vma=check)
        over_x = shmap(lambda v: psum(v, "x"), folded, P("x", "y"), P(None, "y"), check)
        return run(
            lambda v: (over_flat(v), over_x(v) * 2, over_x(over_flat(v).reshape(2, 4))), small(4, 8)
        )

    return under_both(under)


@row("arguments and results on another mesh of the same devices", ACCELERATED, devices=4)
def arguments_on_another_mesh(psum: Psum) -> Any:
    flat = NamedSharding(cases.make_mesh((4,), ("i",)), P("i"))

    def under(check: bool) -> Any:
        f = shmap(lambda v: psum(v, "x"), square(), P("x", "y"), P(None, "y"), check)
        value = jax.device_put(small(4, 6), flat)
        constrained = run(lambda v: lax.with_sharding_constraint(f(v).T[:4], flat), small(4, 6))
        return run(f, value), constrained

    return under_both(under)


@row("two meshes in one program that differ in their devices or device order", ERROR, devices=4)
def two_meshes_that_differ(psum: Psum) -> Any:
    def over(mesh: Mesh, check: bool) -> Any:
        return shmap(lambda v: psum(v, mesh.axis_names), mesh, P(mesh.axis_names), check_vma=check)

    def under(check: bool) -> Any:
        return [
            raised(lambda b=b: run(lambda v: (over(line(), check)(v), over(b, check)(v)), small(4)))
            for b in (line(order=(1, 0)), square())
        ]

    return under_both(under)


@row("programs on two meshes, in turn", ACCELERATED, devices=4)
def meshes_in_turn(psum: Psum) -> Any:
    meshes = cases.make_mesh((4,), ("i",)), square(), square((3, 1, 2, 0)), line()
    fs = [
        jax.jit(
            shmap(
                lambda v, m=mesh: psum(v, m.axis_names[-1]),
                mesh,
                P(mesh.axis_names),
                P(mesh.axis_names[:-1]),
            )
        )
        for mesh in meshes
    ]
    return [f(small(4, 3, seed=k)) for k in range(3) for f in fs]


@row("arrays on other devices than the mesh's", ERROR, devices=4)
def wrong_devices(psum: Psum) -> Any:
    elsewhere = Mesh(np.array(jax.devices()[2:4]), ("x",), axis_types=(AxisType.Auto,))
    value = jax.device_put(small(4, 3), NamedSharding(elsewhere, P("x")))
    return raised(lambda: jax.jit(shmap(lambda v: psum(v, "x")))(value))


# Other processes.


def child(psum: str, folder: str) -> None:
    """Compiles and runs a program with a persistent cache; loads a serialized one, or saves it.

    Prints a report as JSON.
    """
    report: dict[str, Any] = {"hits": 0, "misses": 0}

    def count(event: str, **_: Any) -> None:
        for name in ("hits", "misses"):
            report[name] += event == f"/jax/compilation_cache/cache_{name}"

    jax.monitoring.register_event_listener(count)
    jax.config.update("jax_compilation_cache_dir", str(Path(folder, "cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    function = jax_intranode.psum if psum == "ours" else lax.psum
    mesh = line()

    def body(v: Any) -> Any:
        total = function({"a": v, "b": v.sum()}, "x")
        return total["a"] * function(v, "x") + total["b"]

    value = jax.device_put(small(4, 3), NamedSharding(mesh, P("x")))
    saved = Path(folder, "executable")
    if saved.exists():  # load it before this process lowers anything else
        for name in ("loaded", "loaded after initialize"):
            if name != "loaded":
                jax_intranode.initialize(mesh)
            loaded = raised(
                lambda: serialize_executable.deserialize_and_load(
                    *pickle.loads(saved.read_bytes()), execution_devices=list(mesh.devices.flat)
                )(value)
            )
            report[name] = str(loaded) if isinstance(loaded, Raised) else loaded.tolist()
    before = report["hits"], report["misses"]
    program = jax.jit(shmap(body, mesh)).lower(value).compile()
    report["hits"], report["misses"] = report["hits"] - before[0], report["misses"] - before[1]
    report["ours"] = "jax_intranode_psum" in program.as_text()
    report["values"] = program(value).tolist()
    if not saved.exists():
        try:
            saved.write_bytes(pickle.dumps(serialize_executable.serialize(program)))
        except Exception as error:
            report["serialized"] = f"{type(error).__name__}: {error}"
        else:
            report["serialized"] = "yes"
    print(json.dumps(report))


@functools.cache
def two_processes(psum: Psum) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reports of two processes that run one after the other and share a cache."""
    name = "ours" if psum is jax_intranode.psum else "lax"
    # This process may have reserved most of the GPUs' memory.
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, __file__, name, folder],
                env=env,
                capture_output=True,
                text=True,
                timeout=200,
            )
            assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
            reports.append(json.loads(done.stdout.splitlines()[-1]))
    return reports[0], reports[1]


@row("the persistent compilation cache: a second process hits it and works", AS_LAX)
def persistent_cache(psum: Psum) -> Any:
    first, second = two_processes(psum)
    ours = psum is jax_intranode.psum
    assert first["ours"] is second["ours"] is ours
    return [
        (report["values"], report["hits"] > 0, report["misses"] > 0) for report in (first, second)
    ]


@row("`serialize_executable`: a second process loads a program and runs it", DIFFERS)
def serialized_executable(psum: Psum) -> Any:
    first, second = two_processes(psum)
    return first["serialized"], second.get("loaded")


@row("`serialize_executable`: the same, after `jax_intranode.initialize`", AS_LAX)
def serialized_executable_after_initialize(psum: Psum) -> Any:
    first, second = two_processes(psum)
    return first["serialized"], second.get("loaded after initialize")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    child(*sys.argv[1:])
