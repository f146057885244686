"""Collective matmuls in one process: results as with jax.lax, and no needless collectives."""

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LAX_MATMULS, line, make_mesh, random, sharded
from devices import need_devices
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lowered import in_lowered

import jax_intranode
from jax_intranode import all_gather_matmul, explain, matmul_all_reduce, matmul_reduce_scatter
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.jax_private import jaxpr_walk
from jax_intranode._src.ops import overlapped
from jax_intranode._src.ops.collective import (
    AllGatherParams,
    PsumScatterParams,
    all_gather_p,
    psum_scatter_p,
)
from jax_intranode._src.selection import overlap

N = min(4, len(jax.devices()))
BOTH = pytest.mark.parametrize("check_vma", [True, False])
MOSTLY_CHECKED = pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.full)]
)


@pytest.fixture(autouse=True)
def float32_products() -> Iterator[None]:
    """Multiplies in float32; the default on GPUs is TF32."""
    need_devices(2)
    with jax.default_matmul_precision("highest"):
        yield


def values(*shapes: Sequence[int], dtype: str = "float32") -> list[np.ndarray]:
    return [random(dtype, shape, seed) for seed, shape in enumerate(shapes)]


BY_X = P("x")


def over_x(body: Any, in_specs: Any, out_specs: Any = BY_X, check_vma: bool = False) -> Any:
    return sharded(body, line(N), in_specs, out_specs, check_vma)


def with_gradients(f: Callable[..., Any], argnums: Sequence[int]) -> Callable[..., Any]:
    """A function that returns results, and gradients of a loss that is not linear in them."""

    def both(*args: Any) -> Any:
        def of_some(*some: Any) -> Any:
            given = dict(zip(argnums, some, strict=True))
            return f(*(given.get(i, arg) for i, arg in enumerate(args)))

        results, pull_back = jax.vjp(of_some, *(args[i] for i in argnums))
        return results, pull_back(jax.tree.map(jnp.cos, results))

    return both


def same(ours: Any, theirs: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = (
            np.asarray(v).astype("complex128" if v.dtype.kind == "c" else float) for v in (a, b)
        )
        scale = max(1, np.abs(b).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


def like_lax(program: Callable[[Any], Callable[..., Any]], *args: Any) -> None:
    """Compares a program with ours to one with lax's; ours has to have custom calls."""
    ours = jax.jit(program(jax_intranode))
    assert collectives(ours, *args)
    same(ours(*args), jax.jit(program(LAX_MATMULS))(*args))


def collectives(f: Callable[..., Any], *args: Any) -> Counter[str]:
    """Counts the collectives of a program: ours by name, lax's as "lax" and StableHLO's name."""
    ours = "jax_intranode_"
    found = in_lowered(jax.jit(f).lower(*args).as_text())
    return Counter(
        {
            name.removeprefix(ours) if name.startswith(ours) else f"lax {name}": k
            for name, k in found.items()
        }
    )


# Shapes and dimensions.


@MOSTLY_CHECKED
@pytest.mark.parametrize(
    "leading",
    [(2 * N,), pytest.param((N, 2 * N), marks=pytest.mark.full), (N, 2 * N, 3 * N)],
)
def test_every_axis(leading: tuple[int, ...], check_vma: bool) -> None:
    """Every axis that can be gathered or scattered, including the product's last."""
    rank = len(leading) + 1

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            gathered = [
                lib.all_gather_matmul(x, w, "x", gather_axis=axis)
                for axis in (*range(rank - 1), -rank)
            ]
            scattered = [
                lib.matmul_reduce_scatter(x, w, "x", scatter_axis=axis)
                for axis in (*range(rank), -1)
            ]
            total = lib.matmul_all_reduce(x, w, "x")
            return [v.sum(axis=-1)[None] for v in (*gathered, *scattered, total)]

        return with_gradients(over_x(body, (P(), P()), check_vma=check_vma), (0, 1))

    like_lax(program, *values((*leading, 5), (5, 3 * N)))


@MOSTLY_CHECKED
@pytest.mark.parametrize("m, k, n", [(0, 3, 4), (1, 0, 4), (1, 3, 0), (0, 0, 0), (129, 33, 1)])
def test_sizes(m: int, k: int, n: int, check_vma: bool) -> None:
    """Odd dimensions, and empty ones, which XLA's collectives refuse."""

    def body(x: Any, w: Any, one: Any) -> Any:
        y = matmul_reduce_scatter(all_gather_matmul(x, w, "x"), w.T, "x")
        wide = jnp.concatenate([w] * N, 1)
        part = matmul_reduce_scatter(x, wide, "x", scatter_axis=1)
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


@BOTH
def test_lists_of_matrices_of_unequal_widths(check_vma: bool) -> None:
    def program(lib: Any) -> Any:
        def body(x: Any, ws: Any) -> Any:
            q, k, v = lib.all_gather_matmul(x, ws, "x")
            (alone,) = lib.all_gather_matmul(x, ws[:1], "x")
            return q.sum(1) * k[:, 0] + v[:, 1] + alone.sum(1)

        return with_gradients(over_x(body, (P("x"), P(None, "x")), P("x"), check_vma), (0, 1))

    x, *ws = values((2 * N, 5), (5, 3 * N), (5, 7 * N), (5, 2 * N))
    like_lax(program, x, ws)


@BOTH
def test_the_gathered_array_is_a_result(check_vma: bool) -> None:
    x, w = values((2 * N, 5), (5, 3))

    def ours(x: Any, w: Any) -> Any:
        (y,), whole = all_gather_matmul(x, [w], "x", return_gathered=True)
        z, again = all_gather_matmul(x, w, "x", return_gathered=True)
        return y.sum(1) + whole[:, 0], z * again[:, :3]

    def theirs(x: Any, w: Any) -> Any:
        whole = lax.all_gather(x, "x", tiled=True)
        y = whole @ w
        return y.sum(1) + whole[:, 0], y * whole[:, :3]

    def program(body: Any) -> Any:
        return jax.jit(with_gradients(over_x(body, (P("x"), P()), P("x"), check_vma), (0, 1)))

    same(program(ours)(x, w), program(theirs)(x, w))


@BOTH
def test_over_two_axes_of_a_mesh(check_vma: bool) -> None:
    need_devices(4)
    mesh = make_mesh((2, 2), ("a", "b"), (2, 0, 3, 1))

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any, r: Any) -> Any:
            y = lib.all_gather_matmul(x, w, ("b", "a"))  # w varies over one of them
            z = lib.matmul_reduce_scatter(y, r, ("b", "a"))
            return z + lib.matmul_reduce_scatter(lib.all_gather_matmul(x, r, "a"), w, "a")

        specs = (P(("b", "a")), P("a"), P())
        return with_gradients(sharded(body, mesh, specs, P(("b", "a")), check_vma), (0, 1, 2))

    like_lax(program, *values((8, 3), (6, 3), (3, 3)))


def test_results_that_vary_over_different_axes() -> None:
    """The types are lax's: a result that does not vary over "a" may be replicated over it."""
    need_devices(4)
    mesh = make_mesh((2, 2), ("a", "b"))

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any, v: Any) -> Any:
            return lib.all_gather_matmul(x, [w, v], "b")

        f = sharded(body, mesh, (P("b"), P("a"), P()), [P(("a", "b")), P("b")], True)
        return with_gradients(f, (0, 1, 2))

    args = values((4, 3), (6, 3), (3, 3))
    (call,) = explain(lambda *args: program(jax_intranode)(*args)[0])(*args)
    assert (call.operation, call.algorithm) == ("all_gather_matmul", "lax")
    assert call.reason == "results that vary over different axes"
    same(jax.jit(program(jax_intranode))(*args), jax.jit(program(LAX_MATMULS))(*args))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("all_gather_matmul", ((4, 0), (0, 4))),
        ("all_gather_matmul", ((0, 3), (3, 4))),
        ("matmul_reduce_scatter", ((4, 3), (3, 0))),
    ],
)
def test_empty_results_vary_as_laxs(name: str, shapes: Any) -> None:
    """Also for operands that vary over some or none of the axes, for which lax runs the call."""
    need_devices(4)
    mesh = make_mesh((2, 2), ("a", "b"))

    def type_of(lib: Any) -> Any:
        found = []

        def body(one: Any) -> Any:
            x, w = (jnp.ones(s) for s in shapes)
            if name == "all_gather_matmul":
                result = lib.all_gather_matmul(x * one, w, ("a", "b"))
            else:
                # No int16 kernel: lax runs it.
                result = lib.matmul_reduce_scatter(x.astype("int16"), w.astype("int16"), "a")
            found.append(jax.typeof(result))
            return one

        jax.eval_shape(
            jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a")), np.ones(2)
        )
        return found[0]

    ours, theirs = type_of(jax_intranode), type_of(LAX_MATMULS)
    assert ours == theirs and ours.manual_axis_type.varying


# Numerics.


@pytest.mark.parametrize(
    ("dtype", "preferred", "promotion"),
    [
        ("bfloat16", None, "standard"),
        ("bfloat16", "float32", "standard"),
        ("float16", None, "standard"),
        ("float16", "float32", "standard"),
        # JAX would not promote these cotangents to the dtype that they are multiplied with.
        ("bfloat16", "float32", "strict"),
        ("float8_e4m3fn", "float32", "standard"),
        ("float8_e5m2", "bfloat16", "standard"),
    ],
)
def test_dtypes_of_results_and_gradients(dtype: str, preferred: Any, promotion: Any) -> None:
    x, w = (v.astype(dtype) for v in values((2 * N, 6), (6, 3 * N)))

    def ours(x: Any, w: Any) -> Any:
        y = all_gather_matmul(x, w, "x", preferred_element_type=preferred)
        z = matmul_reduce_scatter(x, w, "x", scatter_axis=1, preferred_element_type=preferred)
        return y, z, matmul_all_reduce(x, w, "x", preferred_element_type=preferred)

    def theirs(x: Any, w: Any) -> Any:
        y = jnp.matmul(lax.all_gather(x, "x", tiled=True), w, preferred_element_type=preferred)
        z = jnp.matmul(x, w, preferred_element_type=preferred)
        return y, lax.psum_scatter(z, "x", scatter_dimension=1, tiled=True), lax.psum(z, "x")

    def program(body: Any) -> Any:
        return jax.jit(with_gradients(over_x(body, (P("x"), P()), P("x")), (0, 1)))

    with jax.numpy_dtype_promotion(promotion):
        results, gradients = program(ours)(x, w)
        of_lax = program(theirs)(x, w)
    assert all(v.dtype == (preferred or dtype) for v in results)
    assert all(v.dtype == dtype for v in gradients)
    same((results, gradients), of_lax, 0.3 if dtype.startswith("float8") else 0.02)


@pytest.mark.parametrize("weak", ["x", "w", "xw"])
@pytest.mark.parametrize(
    ("scalar", "preferred"), [(2, None), (2.0, None), (2.0, "float32"), (2j, None)]
)
def test_weak_types_of_results(scalar: Any, preferred: Any, weak: str) -> None:
    """Results are weakly typed where lax's are, also gradients and empty arrays."""
    of = {"preferred_element_type": preferred}

    def ours(x: Any, w: Any) -> Any:
        products = all_gather_matmul(x, [w, w], "x", **of)
        kept = all_gather_matmul(x, w, "x", return_gathered=True, **of)
        sums = matmul_reduce_scatter(x, w, "x", **of), matmul_all_reduce(x, w, "x", **of)
        return products, kept, sums

    def theirs(x: Any, w: Any) -> Any:
        whole = lax.all_gather(x, "x", tiled=True)
        y, z = jnp.matmul(whole, w, **of), jnp.matmul(x, w, **of)
        return [y, y], (y, whole), (lax.psum_scatter(z, "x", tiled=True), lax.psum(z, "x"))

    def types_of(rows: int, matmuls: Any) -> Any:
        found = []

        def body(one: Any) -> Any:
            operands = {"x": jnp.full((rows, 3), scalar), "w": jnp.full((3, N), scalar)}
            for name, v in operands.items():
                v = v if name in weak else v.astype(v.dtype)
                operands[name] = v * one  # makes it a tracer, as weak as before
            x, w = operands.values()
            results = matmuls(x, w)
            if weak == "xw" and not isinstance(scalar, int):
                results, pull_back = jax.vjp(matmuls, x, w)
                results = results, pull_back(results)
            found.extend((v.dtype, v.weak_type) for v in jax.tree.leaves(results))
            return one

        jax.eval_shape(over_x(body, P(), P(), True), np.ones((), bool))
        return found

    for rows in (2 * N, 0):
        assert types_of(rows, ours) == types_of(rows, theirs)


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


# Collectives of gradients and tangents.


GATHER, SCATTER, SUM = "all_gather", "psum_scatter", "psum"


def steps(name: str) -> tuple[Callable[..., Any], Any, Any]:
    """A function of a rank's x and ws, and the specs of x and of its results."""
    if name == "all_gather_matmul":
        return (lambda x, *ws: all_gather_matmul(x, list(ws), "x")), P("x"), P(None, "x")
    if name == "matmul_reduce_scatter":
        return (lambda x, w, _: matmul_reduce_scatter(x, w, "x")), P(None, "x"), P("x")
    return (lambda x, w, _: matmul_all_reduce(x, w, "x")), P(None, "x"), P()


@BOTH
@pytest.mark.parametrize(
    "name, forward, backward",
    [
        ("all_gather_matmul", {GATHER: 1}, {"x": {SCATTER: 1}, "w": {}, "xw": {SCATTER: 1}}),
        ("matmul_reduce_scatter", {SCATTER: 1}, {by: {GATHER: 1} for by in ("x", "w", "xw")}),
        ("matmul_all_reduce", {SUM: 1}, dict.fromkeys(("x", "w", "xw"), None)),
    ],
)
def test_collectives_of_gradients(
    name: str, forward: dict[str, int], backward: dict[str, Any], check_vma: bool
) -> None:
    f, of_x, of_result = steps(name)
    of_w = P("x") if name != "all_gather_matmul" else P(None, "x")
    g = over_x(f, (of_x, of_w, of_w), of_result, check_vma)
    args = values((2 * N, 2 * N), (2 * N, 3 * N), (2 * N, 5 * N))
    assert collectives(g, *args) == forward
    for by, argnums in (("x", (0,)), ("w", (1, 2)), ("xw", (0, 1, 2))):
        expected = backward[by]
        if expected is None:  # as for lax.psum: none if the cotangent is the same on all ranks
            expected = {} if check_vma else {SUM: 1}
        found = collectives(with_gradients(g, argnums), *args)
        assert found == Counter(forward) + Counter(expected), by

        def tangent(*args: Any, argnums: Any = argnums) -> Any:
            moved = [jnp.cos(v) if i in argnums else jnp.zeros_like(v) for i, v in enumerate(args)]
            return jax.jvp(g, args, tuple(moved))

        assert collectives(tangent, *args) == {key: 2 * k for key, k in forward.items()}, by


@BOTH
def test_gathered_result_adds_no_collective(check_vma: bool) -> None:
    """Its cotangent is summed together with those of the products."""

    def body(x: Any, w: Any) -> Any:
        ys, whole = all_gather_matmul(x, [w, w], "x", return_gathered=True)
        return ys[0] * ys[1] * whole[:, :1]

    f = with_gradients(over_x(body, (P("x"), P(None, "x")), P("x"), check_vma), (0, 1))
    assert collectives(f, *values((2 * N, 5), (5, 3 * N))) == {GATHER: 1, SCATTER: 1}


@BOTH
def test_replicated_matrices_get_the_sum(check_vma: bool) -> None:
    """lax's all-reduces are the transposes of jax.shard_map, or of the cast of the matrix."""

    def body(x: Any, w: Any, v: Any) -> Any:
        return matmul_reduce_scatter(jnp.tanh(all_gather_matmul(x, w, "x")), v, "x")

    f = with_gradients(over_x(body, (P("x"), P(), P()), P("x"), check_vma), (0, 1, 2))
    args = values((2 * N, 5), (5, 3), (3, 5))
    found = collectives(f, *args)
    assert 1 <= found.pop("lax all_reduce") <= 2
    assert found == {GATHER: 2, SCATTER: 2}

    def alone(x: Any, w: Any, v: Any) -> Any:  # on one device; each rank adds the same
        return N * jnp.tanh(x @ w) @ v

    same(jax.jit(f)(*args), with_gradients(alone, (0, 1, 2))(*args))


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


@MOSTLY_CHECKED
def test_linear_transpose_of_gradients(check_vma: bool) -> None:
    """Transposes a tangent, and gradients, which are linear in cotangents."""

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any, y: Any) -> Any:
            def by(f: Callable[..., Any], v: Any) -> Any:
                return jax.linear_transpose(f, v)(jax.tree.map(jnp.cos, f(v)))

            def gather(x: Any, w: Any) -> Any:
                return lib.all_gather_matmul(x, [w, jnp.sin(w)], "x")

            def scatter(x: Any, w: Any) -> Any:
                return lib.matmul_reduce_scatter(x, w, "x")

            left = y.T[: 2 * N]
            product, part = gather(x, w)[0], scatter(left, y)
            of_gather, of_scatter = jax.vjp(gather, x, w)[1], jax.vjp(scatter, left, y)[1]
            return [
                by(lambda t: jax.jvp(gather, (x, w), (t, t[0, 0] * jnp.sin(w)))[1], x),
                by(lambda t: jax.jvp(gather, (x, w), (t[0, 0] * jnp.cos(x), t))[1], w),
                by(lambda ct: of_gather([ct, 2 * ct]), product),
                by(lambda ct: of_gather([ct, ct])[1], product),
                by(of_scatter, part),
                by(lambda ct: of_scatter(ct)[0], part),
            ]

        return over_x(body, P("x"), check_vma=check_vma)

    like_lax(program, *values((2 * N, 5), (5 * N, 3 * N), (2 * N * N, 3 * N)))


@BOTH
def test_vmap_of_gradients_hides_the_axis(check_vma: bool) -> None:
    """Batches jaxprs with both gradients, or with a tangent, over an axis of that name."""
    x, w = values((N, 2 * N, 5), (5, 5))

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            def f(x: Any, w: Any) -> Any:
                y = lib.matmul_reduce_scatter(lib.all_gather_matmul(x, w, "x"), w.T, "x")
                return (y * jnp.cos(x)).sum()

            def gradient_and_tangent(x: Any, w: Any) -> Any:
                moved = jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w)))[1]
                return jax.grad(f, (0, 1))(x, w), moved[None]

            traced = jax.make_jaxpr(gradient_and_tangent)(x[0], w)
            if lib is jax_intranode:
                names = {equation.primitive.name for equation in traced.jaxpr.eqns}
                assert names >= {BOTH_OF_GATHER, BOTH_OF_SCATTER, TANGENT_OF_GATHER}
            run = jax.extend.core.jaxpr_as_fun(traced)
            return jax.vmap(lambda x: run(x, w), axis_name="x", axis_size=N)(x)

        return over_x(body, (P(None, "x"), P("x")), P(None, "x"), check_vma)

    args = x, np.concatenate([w] * N)
    ours, theirs = (jax.jit(program(lib)) for lib in (jax_intranode, LAX_MATMULS))
    assert not collectives(ours, *args)
    same(ours(*args), theirs(*args))


@MOSTLY_CHECKED
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (1, 1)])
def test_vmap_of_gradients(in_axes: tuple[int | None, int | None], check_vma: bool) -> None:
    x, w, ct = values((2 * N, 5), (5, 3 * N), (2 * N, 3 * N))

    def body(x: Any, w: Any, ct: Any) -> Any:
        def gradients(x: Any, w: Any) -> Any:
            return jax.vjp(lambda x, w: all_gather_matmul(x, w, "x"), x, w)[1](ct)

        return jax.vmap(gradients, in_axes)(x, w)

    columns = P(None, "x"), P(None, None, "x")
    specs = columns[0] if in_axes[0] == 0 else P("x"), columns[in_axes[1] is not None], columns[0]
    f = over_x(body, specs, columns, check_vma)

    def batch(v: Any, d: int | None) -> Any:
        return v if d is None else np.stack([v, v * 2], d)

    dgrad, wgrad = jax.jit(f)(batch(x, in_axes[0]), batch(w, in_axes[1]), ct)
    for k in range(2):
        one_x, one_w = (
            v if d is None else v * (k + 1) for v, d in zip((x, w), in_axes, strict=True)
        )
        same((dgrad[k], wgrad[k]), (ct @ one_w.T, one_x.T @ ct))


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
@pytest.mark.parametrize(
    "in_axes",
    [(1, None), *(pytest.param(a, marks=pytest.mark.full) for a in ((2, None), (None, 2))), (2, 1)],
)
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
@pytest.mark.parametrize(
    "jacobian", [jax.jacfwd, jax.jacrev, pytest.param(jax.hessian, marks=pytest.mark.full)]
)
def test_jacobians(jacobian: Callable[..., Any], check_vma: bool) -> None:
    """Jacobians batch tangents, and operations none of whose operands is batched."""

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            of_both = jacobian(functools.partial(three, lib), (0, 1))(x, w)
            gathered = jacobian(lambda w: lib.all_gather_matmul(x, w, "x"))(w)
            return jax.tree.map(lambda v: v[None], (of_both, gathered))

        return over_x(body, (P(), P()), check_vma=check_vma)

    like_lax(program, *values((N, 5), (5, 3)))


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_adds_no_collectives(in_axes: tuple[int | None, int | None]) -> None:
    def body(x: Any, w: Any) -> Any:
        def f(x: Any, w: Any) -> Any:
            y = jnp.tanh(all_gather_matmul(x, w, "x"))
            return y, matmul_reduce_scatter(x, w, "x"), matmul_all_reduce(x, w, "x")

        return jax.vmap(f, in_axes)(x, w)

    f = with_gradients(over_x(body, (P(), P()), P(None, "x")), (0, 1))
    x, w = values((N, 5), (5, 3))
    x, w = (v if d is None else np.stack([v, v]) for v, d in zip((x, w), in_axes, strict=True))
    found = collectives(f, x, w)
    assert 1 <= found.pop("lax all_reduce") <= 2  # replicated arguments of jax.shard_map
    assert found == {GATHER: 2, SCATTER: 2, SUM: 2}


def test_vmap_around_shard_map() -> None:
    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return lib.matmul_reduce_scatter(lib.all_gather_matmul(x, w, "x"), w.T, "x")

        f = over_x(body, (P("x"), P(None, "x")), P("x"), True)
        return with_gradients(jax.vmap(f, (1, None)), (0, 1))

    like_lax(program, *values((2 * N, 3, 5), (5, 3 * N)))


@pytest.mark.parametrize(
    "in_axes", [*(pytest.param(a, marks=pytest.mark.full) for a in ((0, None), (None, 0))), (0, 0)]
)
def test_vmap_around_shard_map_over_a_mesh_axis(in_axes: tuple[int | None, int | None]) -> None:
    """A batched operand varies over one axis more; gradients of others are summed over that axis.

    Also inside shard_map, where a gradient has the type of its operand.
    """
    need_devices(4)
    mesh = make_mesh((2, 2), ("data", "x"))

    def program(lib: Any, inside: bool) -> Any:
        def several(x: Any, w: Any) -> Any:
            y, z = lib.all_gather_matmul(x, [w, jnp.sin(w)], "x")
            scattered = lib.matmul_reduce_scatter(y, w.T, "x")
            return scattered + z.sum() + lib.matmul_all_reduce(y, w.T, "x").mean()

        def gradients(x: Any, w: Any) -> Any:
            return jax.grad(lambda x, w: jnp.sin(several(x, w)).sum(), (0, 1))(x, w)

        specs = P("x"), P(None, "x")
        body, out_specs = (gradients, specs) if inside else (several, P("x"))
        f = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs)
        f = jax.vmap(f, in_axes, spmd_axis_name="data")
        return f if inside else with_gradients(f, (0, 1))

    shapes = [(8, 6), (6, 4)]
    args = values(*((2, *s) if d == 0 else s for s, d in zip(shapes, in_axes, strict=True)))
    like_lax(lambda lib: program(lib, False), *args)
    like_lax(lambda lib: program(lib, True), *args)


def test_axis_of_vmap() -> None:
    """lax runs the collective, also where the axis of vmap hides a mesh axis."""
    x, w = values((N, N, 5), (5, 3))

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            y = lib.matmul_reduce_scatter(lib.all_gather_matmul(x, w, "v"), w.T, "v")
            return y + lib.matmul_all_reduce(x, w @ w.T, "v")

        return with_gradients(jax.vmap(body, (0, None), axis_name="v"), (0, 1))

    same(jax.jit(program(jax_intranode))(x, w), jax.jit(program(LAX_MATMULS))(x, w))

    def hidden(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            def f(x: Any) -> Any:
                y = lib.matmul_reduce_scatter(lib.all_gather_matmul(x, w, "x"), w.T, "x")
                return y + lib.matmul_all_reduce(x, w @ w.T, "x")

            return jax.vmap(f, axis_name="x")(x)

        return with_gradients(over_x(body, (P(None, "x"), P()), P(None, "x")), (0, 1))

    same(jax.jit(hidden(jax_intranode))(x, w), jax.jit(hidden(LAX_MATMULS))(x, w))


def test_trace_before_vmap_hides_the_axis() -> None:
    """Batches a jaxpr with our primitives over an axis that has the mesh axis' name."""

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            def f(x: Any, w: Any) -> Any:
                y = lib.matmul_reduce_scatter(lib.all_gather_matmul(x, w, "x"), w.T, "x")
                return y + lib.matmul_all_reduce(x, w @ w.T, "x")

            traced = jax.make_jaxpr(f)(x[0], w)
            run = jax.extend.core.jaxpr_as_fun(traced)
            return jax.vmap(lambda x: run(x, w)[0], axis_name="x", axis_size=N)(x)

        return over_x(body, (P(), P()), P(None, "x"))

    x, w = values((N, N, 5), (5, 3))
    ours, theirs = (jax.jit(program(lib)) for lib in (jax_intranode, LAX_MATMULS))
    assert not collectives(ours, x, w)
    same(ours(x, w), theirs(x, w))


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


@BOTH
def test_gradient_inside_of_shard_map(check_vma: bool) -> None:
    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            value, gradients = jax.value_and_grad(functools.partial(three, lib), (0, 1))(x, w)
            return value[None], [v[None] for v in gradients]

        return over_x(body, (P("x"), P(None, "x")), P("x"), check_vma)

    like_lax(program, *values((N * N, 5), (5, 3 * N)))


@MOSTLY_CHECKED
def test_derivatives_of_higher_order(check_vma: bool) -> None:
    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            columns = lib.matmul_reduce_scatter(x, jnp.sin(w[:, :N]), "x", scatter_axis=-1)
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


def test_mesh_of_set_mesh_with_explicit_axes() -> None:
    """Results are right for any order of devices, also one that was not traced."""
    x, w = values((2 * N, 5), (5, 3 * N))
    specs = (P("x"), P(None, "x"))

    def body(x: Any, w: Any) -> Any:
        return matmul_reduce_scatter(jnp.tanh(all_gather_matmul(x, w, "x")), w.T, "x")

    f = jax.shard_map(body, in_specs=specs, out_specs=P("x"))
    g = jax.jit(with_gradients(f, (0, 1)))
    for order in (range(N), reversed(range(N))):
        devices = np.array(jax.devices()[:N])[list(order)]
        mesh = jax.sharding.Mesh(devices, ("x",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            args = [jax.device_put(v, P(*spec)) for v, spec in zip((x, w), specs, strict=True)]
            results = g(*args)
            text = g.lower(*args).as_text()
        same(results, with_gradients(lambda x, w: jnp.tanh(x @ w) @ w.T, (0, 1))(x, w))
        if devices[0].id == 0:
            assert Counter(in_lowered(text)) == {
                "jax_intranode_all_gather": 2,
                "jax_intranode_psum_scatter": 2,
            }


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


def test_eager() -> None:
    x, w = values((2 * N, 5), (5, 3))
    f = over_x(lambda x, w: three(jax_intranode, x, w)[None], (P(), P()))
    same(f(x, w), jax.jit(f)(x, w))


def test_donation() -> None:
    x, w = values((2 * N, 5), (5, 5))

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return x + lib.matmul_reduce_scatter(lib.all_gather_matmul(x, w, "x"), w, "x")

        return over_x(body, (P("x"), P()))

    sharding = jax.NamedSharding(line(N), P("x"))
    carried = jax.device_put(x, sharding)
    ours = jax.jit(program(jax_intranode), donate_argnums=0)
    for _ in range(3):
        before, carried = carried, ours(carried, w)
        x = jax.jit(program(LAX_MATMULS))(x, w)
        assert before.is_deleted()
    same(carried, x)


# An overlapped all-reduce. On CPUs nothing is overlapped: a dot and our psum_scatter stand in.


@pytest.fixture
def overlapping() -> Iterator[None]:
    def find(
        operation: str, site: Any, traced_over: Any, axes: Any, request: overlapped.Request
    ) -> overlapped.Overlapped:
        groups = partition_lib.partition(site.mesh, tuple(axes))

        class StandIn(overlapped.Overlapped):
            def __call__(self, *operands: Any) -> list[Any]:
                terms = len(request.ks)
                reshaped = request.operands(*operands)
                xs, ws = reshaped[:terms], reshaped[terms:]
                if request.transposed:
                    ws = [w.T for w in ws]
                for x, k in zip(xs, request.ks, strict=True):
                    assert x.shape == (request.rows * groups.group_size, k)
                return psum_scatter_p.bind_as_traced(
                    sum(x @ w for x, w in zip(xs, ws, strict=True)),
                    params=PsumScatterParams(axes, request.axis, True, groups.group_size),
                    traced_over=traced_over,
                )

        assert operation == "matmul_reduce_scatter"
        return StandIn(operation, groups, request, overlap.Plan())

    with mock.patch.object(overlapped, "find", find):
        yield


@BOTH
@pytest.mark.parametrize("leading", [(2 * N,), (3, N), (N // 2, 6)])
def test_overlapped_sum(overlapping: None, leading: tuple[int, ...], check_vma: bool) -> None:
    """It, its tangents and batches are a reduce-scatter and an all-gather of all rows."""

    def program(lib: Any) -> Any:
        by_columns = P(*[None] * len(leading), "x")

        def body(x: Any, w: Any) -> Any:
            return lib.matmul_all_reduce(x, w, "x")

        f = over_x(body, (by_columns, P("x")), P(), check_vma)

        def both(x: Any, w: Any) -> Any:
            tangents = jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w)))
            batch = jax.vmap(f, (0, None))(jnp.stack([x, -x]), w)
            return with_gradients(f, (0, 1))(x, w), tangents, batch

        return both

    args = values((*leading, 2 * N), (2 * N, 3))
    like_lax(program, *args)
    # 1 forward, 2 with tangents, 1 for the batch. Backward as without overlap.
    expected = {SCATTER: 4, GATHER: 4} | ({} if check_vma else {SUM: 1})
    assert collectives(program(jax_intranode), *args) == expected


def test_overlapped_sum_over_some_axes(overlapping: None) -> None:
    need_devices(4)
    mesh = make_mesh((2, 2), ("a", "b"), (2, 0, 3, 1))

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return [lib.matmul_all_reduce(x, w, axes)[None] for axes in ("a", "b", ("b", "a"))]

        return sharded(body, mesh, (P("b"), P("a")), P(("a", "b")), False)

    like_lax(program, *values((8, 3), (6, 5)))


def test_overlapped_gradient_of_column_parallel_matmul(overlapping: None) -> None:
    """The gradient of an x that all ranks have is one sum for all matrices; overlapped, too."""
    x, *ws = values((3, 2 * N, 6), (6, 4 * N), (6, 2 * N))

    def ours(x: Any, ws: Any) -> Any:
        return jax_intranode.column_parallel_matmul(x, ws, "x")

    gradient = with_gradients(ours, (0, 1))
    with jax.set_mesh(line(N)):
        found = jax.jit(gradient)(x, ws)
        assert collectives(gradient, x, ws) == {SCATTER: 1, GATHER: 1}
    same(found, with_gradients(lambda x, ws: [x @ w for w in ws], (0, 1))(x, ws))


def test_explain_of_an_overlapped_sum(overlapping: None) -> None:
    def body(x: Any, w: Any) -> Any:
        return matmul_all_reduce(x, w, "x"), matmul_all_reduce(x[1:], w, "x")

    x, w = values((2 * N, 5), (5, 3))
    total, gathered, odd = explain(over_x(body, (P(), P())))(x, w)
    assert (total.operation, total.algorithm) == ("matmul_all_reduce", "matmul_reduce_scatter")
    assert total.reason.startswith("overlapped") and total.nbytes == 2 * N * 3 * 4
    assert (gathered.operation, gathered.algorithm) == ("all_gather", "all_gather")
    assert gathered.shapes == ((2, 3),) and gathered.source == total.source
    assert (odd.operation, odd.algorithm) == ("matmul_all_reduce", "one_shot")
    why = f"psum after the matmul, not overlapped ({2 * N - 1} rows, no multiple of {N} ranks); "
    assert odd.reason.startswith(why)


# Both gradients as one call. On CPUs nothing is overlapped: collectives and dots stand in.


@pytest.fixture
def both_in_one_call() -> Iterator[list[overlapped.Request]]:
    """Yields the requests that were granted."""
    granted = []

    def find(
        operation: str, site: Any, traced_over: Any, axes: Any, request: overlapped.Request
    ) -> overlapped.Overlapped | str:
        if not request.wgrads:
            return "one gradient alone"
        groups = partition_lib.partition(site.mesh, tuple(axes))
        size = groups.group_size
        granted.append(request)
        assert request.transposed and not request.gathered

        class StandIn(overlapped.Overlapped):
            def __call__(self, *operands: Any) -> list[Any]:
                terms = len(request.ks)
                *factors, ct = request.operands(*operands)
                xs, ws = factors[:terms], factors[terms:]
                assert [x.shape[-1] for x in xs] == list(request.ks)
                assert ct.shape[-1] == request.ns[0]
                assert {w.shape for w in ws} == {(request.ns[0], k) for k in request.ks}
                rows = tuple(range(ct.ndim - 1))
                if operation == "all_gather_matmul":
                    assert xs[0].size == request.outer * request.rows * request.ks[0]
                    (whole,) = all_gather_p.bind_as_traced(
                        xs[0],
                        params=AllGatherParams(axes, request.axis, True, size),
                        traced_over=traced_over,
                    )
                    return [whole @ ws[0].T, jnp.tensordot(ct, whole, (rows, rows))]
                assert xs[0].size == request.outer * request.rows * size * request.ks[0]
                total = sum(x @ w.T for x, w in zip(xs, ws, strict=True))
                (part,) = psum_scatter_p.bind_as_traced(
                    total,
                    params=PsumScatterParams(axes, request.axis, True, size),
                    traced_over=traced_over,
                )
                wgrads = [jnp.tensordot(ct, x, (rows, rows)) for x in xs[: request.wgrads]]
                return [part, *wgrads]

        return StandIn(operation, groups, request, overlap.Plan(tile_columns=128, wgrad=True))

    with mock.patch.object(overlapped, "find", find):
        yield granted


@BOTH
@pytest.mark.parametrize("leading", [(), (3,)])
def test_both_gradients_in_one_call(
    both_in_one_call: list[overlapped.Request], leading: tuple[int, ...], check_vma: bool
) -> None:
    axis = len(leading)
    none = [None] * axis

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any, u: Any, v: Any) -> Any:
            # The first matrix is no argument: terms with weight gradients are moved before it.
            a, b, c = lib.all_gather_matmul(x, [jnp.ones((5, 4)), w, u], "x", gather_axis=axis)
            y = jnp.tanh(a[..., :3] * b + c[..., :3])
            return lib.matmul_reduce_scatter(y, v, "x", scatter_axis=axis)

        columns = P(None, "x")
        f = over_x(body, (P(*none, "x"), columns, columns, P("x")), P(*none, "x"), check_vma)
        return with_gradients(f, (0, 1, 2, 3))

    args = values((*leading, 2 * N, 5), (5, 3 * N), (5, 7 * N), (3 * N, 6))
    like_lax(program, *args)
    assert collectives(program(jax_intranode), *args) == {GATHER: 2, SCATTER: 2}
    of_scatter, of_gather = both_in_one_call[-2:]
    for request in (of_scatter, of_gather):
        assert (request.axis, request.outer, request.rows) == (axis, 3 if leading else 1, 2)
    found = [(r.ks, r.ns, r.wgrads) for r in (of_scatter, of_gather)]
    assert found == [((6,), (3,), 1), ((3, 7, 4), (5,), 2)]


def test_explain_of_both_gradients(both_in_one_call: list[overlapped.Request]) -> None:
    """Gradients are presented as the collective matmuls that compute them."""

    def body(x: Any, w: Any, v: Any) -> Any:
        return matmul_reduce_scatter(jnp.tanh(all_gather_matmul(x, w, "x")), v, "x")

    f = with_gradients(over_x(body, (P("x"), P(None, "x"), P("x"))), (0, 1, 2))
    args = values((2 * N, 5), (5, 3 * N), (3 * N, 5))
    calls = explain(f)(*args)
    ones = [("all_gather_matmul", ((2, 5), (5, 3)), 2 * 5 * 4)]
    twos = [("matmul_reduce_scatter", ((2 * N, 3), (3, 5)), 2 * N * 5 * 4)]
    backward = [
        ("all_gather_matmul", ((2, 5), (3, 5)), 2 * 5 * 4),
        ("matmul_reduce_scatter", ((2 * N, 3), (5, 3)), 2 * N * 5 * 4),
    ]
    got = [(call.operation, call.shapes, call.nbytes) for call in calls]
    assert got == [*ones, *twos, *backward]
    for call in calls[:2]:
        assert "not overlapped (one gradient alone)" in call.reason
    for call in calls[2:]:
        assert call.algorithm == call.operation
        assert call.reason == f"overlapped, {overlap.Plan(tile_columns=128, wgrad=True)}"


def test_gradients_that_are_not_one_call(both_in_one_call: list[overlapped.Request]) -> None:
    """A reduce-scatter along the last dimension, and one gradient alone."""

    def scatters(x: Any, w: Any) -> Any:
        return matmul_reduce_scatter(x, w, "x", scatter_axis=1)

    def products(x: Any, w: Any, v: Any) -> Any:
        return matmul_reduce_scatter(all_gather_matmul(x, w, "x"), v, "x")

    columns = P(None, "x")
    args = values((2 * N, 5), (5, 3 * N), (3 * N, 5))
    calls = [*explain(with_gradients(over_x(scatters, P(), columns), (0, 1)))(*args[:2])]
    f = over_x(products, (P("x"), columns, P("x")))
    for argnum in range(3):
        calls += explain(with_gradients(f, (argnum,)))(*args)
    assert not both_in_one_call
    assert not any(call.reason.startswith("overlapped") for call in calls)


# Calls that jax.lax runs.


def test_explain() -> None:
    def body(x: Any, w: Any) -> Any:
        y = matmul_reduce_scatter(all_gather_matmul(x, [w, w], "x")[0], w.T, "x")
        return matmul_all_reduce(y, w, "x")

    x, w = values((2 * N, 5), (5, 3 * N))
    calls = explain(over_x(body, (P("x"), P(None, "x"))))(x, w)
    # Dead code elimination removes the matrix whose product is unused.
    got = [(c.operation, c.algorithm, c.nbytes, c.group_size, len(c.shapes)) for c in calls]
    assert got == [
        ("all_gather_matmul", "all_gather", 2 * 5 * 4, N, 2),
        ("matmul_reduce_scatter", "reduce_scatter", 2 * N * 5 * 4, N, 2),
        ("matmul_all_reduce", "one_shot", 2 * 3 * 4, N, 2),
    ]
    for call, words in zip(
        calls,
        ("all_gather before the matmul", "psum_scatter after the matmul", "psum after the matmul"),
        strict=True,
    ):
        assert call.reason.startswith(f"{words}, not overlapped ("), call.reason
        assert f"bytes of float32 among {N} ranks" in call.reason


def test_dtype_that_has_no_kernel() -> None:
    """explain shows lax's collective under our name, with the reason."""
    x, w = values((2 * N, 5), (5, 3), dtype="complex64")

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return lib.matmul_reduce_scatter(x, w, "x"), lib.matmul_all_reduce(x, w, "x")

        return over_x(body, (P(), P()))

    same(jax.jit(program(jax_intranode))(x, w), jax.jit(program(LAX_MATMULS))(x, w))
    scatter, total = explain(program(jax_intranode))(x, w)
    assert (scatter.operation, scatter.algorithm) == ("matmul_reduce_scatter", "lax")
    assert (total.operation, total.algorithm) == ("matmul_all_reduce", "lax")
    assert "dtype complex64" in scatter.reason and "dtype complex64" in total.reason


def test_partly_manual_mesh_is_lax() -> None:
    need_devices(4)
    mesh = make_mesh((2, 2), ("auto", "x"))

    def body(x: Any, w: Any) -> Any:
        return matmul_reduce_scatter(all_gather_matmul(x, w, "x"), w.T, "x")

    f = jax.shard_map(
        body, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P("x"), axis_names={"x"}
    )
    x, w = values((4, 6), (6, 4))
    assert {call.algorithm for call in explain(f)(x, w)} == {"lax"}
    assert not any(name in collectives(f, x, w) for name in (GATHER, SCATTER))
    same(jax.jit(f)(x, w), x @ w @ w.T)


def test_export_is_lax() -> None:
    f = over_x(lambda x, w: all_gather_matmul(x, w, "x"), (P("x"), P(None, "x")), P(None, "x"))
    x, w = values((2 * N, 5), (5, 3 * N))
    module = jax.export.export(jax.jit(f))(x, w).mlir_module()
    assert "@jax_intranode" not in module and "stablehlo.all_gather" in module


# Errors.

X, W = np.ones((N, 4), np.float32), np.ones((4, 4), np.float32)
REFUSED = {
    "no array": (all_gather_matmul, (3.0, W), {}, TypeError, "x is a float; pass an array"),
    "only a type": (
        matmul_all_reduce, (jax.ShapeDtypeStruct((4, 4), np.float32), W), {}, TypeError,
        "x is a ShapeDtypeStruct; pass an array",
    ),
    "rank of x": (all_gather_matmul, (X[0], W), {}, ValueError, r"x has the shape \(4,\); it need"),
    "rank of w": (matmul_all_reduce, (X, W[None]), {}, ValueError, r"w has the shape \(1, 4"),
    "no matrices": (all_gather_matmul, (X, []), {}, ValueError, "w is an empty list; pass at "),
    "a list": (matmul_all_reduce, (X, [W]), {}, TypeError, "w is a list; pass an array"),
    "contracted": (matmul_reduce_scatter, (X, W[1:]), {}, ValueError, r"\(3, 4\); they must be"),
    "of a list": (all_gather_matmul, (X, [W, W[1:]]), {}, ValueError, r"first of w\[1\], of shape"),
    "dtypes": (
        all_gather_matmul, (X, W.astype("bfloat16")), {}, TypeError,
        "x is float32, w is bfloat16; cast one",
    ),
    "preferred": (
        matmul_all_reduce, (X, W), {"preferred_element_type": "int32"}, TypeError,
        "preferred_element_type is int32, and the operands are float32; take",
    ),
    "no dtype": (
        matmul_all_reduce, (X, W), {"preferred_element_type": "foo"}, TypeError,
        "preferred_element_type is 'foo'; pass a dtype",
    ),
    "no axis": (
        all_gather_matmul, (X, W), {"gather_axis": None}, TypeError,
        "gather_axis is None; pass an integer",
    ),
    "no integer": (
        matmul_reduce_scatter, (X, W), {"scatter_axis": 0.0}, TypeError,
        "scatter_axis is 0.0; pass an integer",
    ),
    "gathered axis": (
        all_gather_matmul, (X, W), {"gather_axis": 2}, ValueError,
        "gather_axis is 2; with 2 dimensions it must be from -2 to 1",
    ),
    "gathered contracted": (
        all_gather_matmul, (X, W), {"gather_axis": -1}, ValueError,
        r"gather_axis is -1, the last dimension of x, of shape \(\d, 4\), which is contracted",
    ),
    "scattered axis": (
        matmul_reduce_scatter, (X, W), {"scatter_axis": -3}, ValueError,
        "scatter_axis is -3; with 2 dimensions it must be from -2 to 1",
    ),
    "not divisible": (
        matmul_reduce_scatter, (np.ones((N + 1, 4), np.float32), W), {}, ValueError,
        rf"scatter_axis 0 of the product has {N + 1} elements; it must be a multiple of the {N} r",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_while_tracing(name: str) -> None:
    function, args, options, error, message = REFUSED[name]

    def body(v: Any) -> Any:
        def traced(a: Any) -> Any:
            return a + v.astype(a.dtype) if isinstance(a, np.ndarray) else a

        return function(*jax.tree.map(traced, args), "x", **options)

    with pytest.raises(error, match=f"{function.__name__}: .*{message}"):
        jax.eval_shape(over_x(body, P()), np.float32(0))


@pytest.mark.parametrize("f", [all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce])
def test_unbound_axis_is_laxs_error(f: Callable[..., Any]) -> None:
    with pytest.raises(NameError, match=r"unbound axis name: nowhere\. .*jax\.shard_map"):
        f(X, W, "nowhere")
