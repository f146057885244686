"""Which matmuls join a collective, which do not, and that the results stay the same.

On CPU devices nothing is overlapped. So selection is made to say that everything is. Lowering then
asks the real selection, and computes the operations unfused.
"""

import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, make_mesh, sharded
from devices import need_devices
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P
from lowered import in_lowered
from test_rewriting import names, rewritten, rewritten_body

import jax_intranode
from jax_intranode._src.jax_private import jaxpr_walk
from jax_intranode._src.ops.primitive import BY_PRIMITIVE, OpPrimitive
from jax_intranode._src.rewrite import gathers, sums

N = len(jax.devices())
T, F, H = 2, 8, 16  # rows and columns of a rank's x, columns of a rank's w
TOOL = Path(__file__).parent.parent.parent / "tools" / "compare_lowered.py"


@pytest.fixture(autouse=True)
def overlapped() -> Iterator[None]:
    need_devices(2)
    with (
        mock.patch.object(OpPrimitive, "is_overlapped", lambda *_, **__: True),
        jax.default_matmul_precision("highest"),
    ):
        yield


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def check_values(f: Callable[..., Any], *args: Any) -> None:
    """The rewritten function has the results of the untouched one, to rounding."""
    wanted = jax.jit(f)(*args)
    with jax_intranode.accelerate():
        found = jax.jit(f)(*args)
    for w, v in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert w.dtype == v.dtype and w.shape == v.shape and w.sharding == v.sharding
        tolerance = 1e-5 if w.dtype == "float32" else 0.05
        a, b = (np.asarray(u).astype(np.float64) for u in (w, v))
        scale = max(1, np.abs(a).max(initial=0))
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=tolerance)


def golden(jaxpr: Any) -> list[str]:
    """A line for each equation; ours with what matters of their parameters."""
    found = []
    for equation in jaxpr.eqns:
        own = BY_PRIMITIVE.get(equation.primitive)
        name = str(equation.primitive.name)
        if own is not None:
            params = equation.params["params"]
            matmul = getattr(params, "matmul", params)
            details = [f"{k}={getattr(matmul, k)}" for k in ("axis",) if hasattr(matmul, k)]
            details += [k for k in ("transposed", "gathered") if getattr(matmul, k, False)]
            details += [f"terms={matmul.terms}"] if getattr(matmul, "terms", 1) > 1 else []
            name = " ".join([own.operation, *details])
            types = [v.aval.str_short(short_dtypes=True) for v in equation.invars]
            name += f" ({', '.join(t.split('{')[0] for t in types)})"
        found.append(name)
    return found


def check(
    body: Callable[..., Any],
    args: Any,
    wanted: list[str],
    *,
    in_specs: Any = None,
    out_specs: Any,
    check_vma: bool = False,
) -> None:
    """Checks the rewritten body of a function of global arrays, equation by equation."""
    f = sharded(body, line(), in_specs or (P("x"),) * len(args), out_specs, check_vma)
    before, after, record = rewritten(f, *args)
    assert golden(after) == wanted, after
    assert [v.aval for v in before.outvars] == [v.aval for v in after.outvars]
    defined = set(after.invars)
    for equation in after.eqns:  # nothing is used before it is computed
        assert all(v in defined for v in equation.invars if not hasattr(v, "val")), equation
        defined.update(equation.outvars)
    replaced = sum("matmul" in line for line in wanted)
    assert len(record.decisions) == len([n for n in names(before)])
    assert sum(d.reason is None for d in record.decisions) >= replaced
    check_values(f, *args)


def check_left(body: Callable[..., Any], args: Any, **how: Any) -> None:
    """No matmul joins a collective."""
    specs = how.pop("in_specs", (P("x"),) * len(args))
    f = sharded(body, line(), specs, how.pop("out_specs", P("x")), how.pop("check_vma", False))
    before, after, _ = rewritten(f, *args)
    assert not any("matmul" in name or "gradients" in name for name in golden(after)), after
    assert sum(e.primitive.name == "dot_general" for e in before.eqns) == sum(
        e.primitive.name == "dot_general" for e in after.eqns
    )
    check_values(f, *args)


def gather(v: Any, axis: int = 0, tiled: bool = True) -> Any:
    return lax.all_gather(v, "x", axis=axis, tiled=tiled)


def scatter(v: Any, axis: int = 0, tiled: bool = True) -> Any:
    return lax.psum_scatter(v, "x", scatter_dimension=axis, tiled=tiled)


ROWS, COLUMNS = P("x"), P(None, "x")
X, W = normal(T * N, F), normal(F, H * N, seed=1)
V = normal(H * N, F, seed=2)
XW = (ROWS, COLUMNS)
AG = "all_gather_matmul"
RS = "matmul_reduce_scatter"
X_SHARD, W_SHARD = f"f32[{T},{F}]", f"f32[{F},{H}]"


# All-gathers.


@pytest.mark.parametrize("check_vma", [True, False])
def test_gather_and_matmul(check_vma: bool) -> None:
    check(
        lambda x, w: gather(x) @ w,
        (X, W),
        [f"{AG} axis=0 ({X_SHARD}, {W_SHARD})"],
        in_specs=XW,
        out_specs=COLUMNS,
        check_vma=check_vma,
    )


def test_a_list_of_matrices() -> None:
    def body(x: Any, w: Any) -> Any:
        whole = gather(x)
        query = jnp.sin(whole @ w)
        return query * (whole @ jnp.cos(w)), whole.sum()[None]

    check(
        body,
        (X, W),
        [
            "cos",
            f"{AG} axis=0 gathered ({X_SHARD}, {W_SHARD}, {W_SHARD})",
            "sin",
            "mul",
            "reduce_sum",
            "broadcast_in_dim",
        ],
        in_specs=XW,
        out_specs=(COLUMNS, ROWS),
    )


# For each: the body, the global shape of x, its spec, and the operation.
GATHERS: dict[str, tuple[Callable[..., Any], tuple[int, ...], P, str]] = {
    "another_axis": (
        lambda x, w: gather(x, 1) @ w,
        (3, T * N, F),
        P(None, "x"),
        f"{AG} axis=1 (f32[3,{T},{F}], {W_SHARD})",
    ),
    "rows_joined": (
        lambda x, w: gather(x, 1).reshape(3 * T * N, F) @ w,
        (3, T * N, F),
        P(None, "x"),
        f"{AG} axis=1 (f32[3,{T},{F}], {W_SHARD})",
    ),
    "rows_split": (
        lambda x, w: gather(x).reshape(N, T, F) @ w,
        (T * N, F),
        ROWS,
        f"{AG} axis=0 ({X_SHARD}, {W_SHARD})",
    ),
    "stacked": (
        lambda x, w: gather(x, tiled=False).reshape(-1, F) @ w,
        (T * N, F),
        ROWS,
        f"{AG} axis=0 ({X_SHARD}, {W_SHARD})",
    ),
    "stacked_in_the_middle": (
        lambda x, w: gather(x, 1, tiled=False) @ w,
        (T * N, F),
        ROWS,
        f"{AG} axis=1 (f32[{T},1,{F}], {W_SHARD})",
    ),
    "ranks_inside": (
        lambda x, w: gather(x, tiled=False).transpose(1, 0, 2).reshape(-1, F) @ w,
        (T * N, F),
        ROWS,
        f"{AG} axis=1 (f32[{T},1,{F}], {W_SHARD})",
    ),
    "transposed": (
        lambda x, w: gather(x, 1).T @ w,
        (F, T * N),
        COLUMNS,
        f"{AG} axis=0 ({X_SHARD}, {W_SHARD})",
    ),
    "several_contracted": (
        lambda x, w: jnp.einsum("tab,abh->th", gather(x), w.reshape(2, F // 2, H)),
        (T * N, 2, F // 2),
        ROWS,
        f"{AG} axis=0 ({X_SHARD}, {W_SHARD})",
    ),
    "heads": (
        lambda x, w: jnp.einsum("tf,fhd->htd", gather(x), w.reshape(F, 4, H // 4)).sum(0),
        (T * N, F),
        ROWS,
        f"{AG} axis=0 ({X_SHARD}, {W_SHARD})",
    ),
    "second_operand": (
        lambda x, w: (w.T @ gather(x).T).T,
        (T * N, F),
        ROWS,
        f"{AG} axis=0 ({X_SHARD}, {W_SHARD})",
    ),
    "matrix_transposed": (
        lambda x, w: gather(x) @ jnp.sin(w.T).T,
        (T * N, F),
        ROWS,
        f"{AG} axis=0 transposed ({X_SHARD}, f32[{H},{F}])",
    ),
    "batch_of_one": (
        lambda x, w: jnp.einsum("btf,bfh->bth", gather(x)[None], w[None])[0],
        (T * N, F),
        ROWS,
        f"{AG} axis=0 ({X_SHARD}, {W_SHARD})",
    ),
    "named": (
        lambda x, w: checkpoint_name(gather(x), "whole") @ w,
        (T * N, F),
        ROWS,
        f"{AG} axis=0 ({X_SHARD}, {W_SHARD})",
    ),
    "cast_to_fewer_bytes": (
        lambda x, w: gather(x).astype("bfloat16") @ w.astype("bfloat16"),
        (T * N, F),
        ROWS,
        f"{AG} axis=0 (bf16[{T},{F}], bf16[{F},{H}])",
    ),
    "product_cast": (
        lambda x, w: jnp.matmul(
            gather(x.astype("bfloat16")),
            w.astype("bfloat16"),
            preferred_element_type="float32",
        ).astype("bfloat16"),
        (T * N, F),
        ROWS,
        f"{AG} axis=0 (bf16[{T},{F}], bf16[{F},{H}])",
    ),
}


@pytest.mark.parametrize("form", GATHERS)
def test_forms_of_gathers(form: str) -> None:
    body, shape, spec, wanted = GATHERS[form]
    x = normal(*shape)
    f = sharded(lambda *args: body(*args)[None], line(), (spec, COLUMNS), ROWS, False)
    _, after, _ = rewritten(f, x, W)
    assert [line for line in golden(after) if "matmul" in line] == [wanted]
    assert not any(e.primitive.name in ("dot_general", "all_gather") for e in after.eqns)
    check_values(f, x, W)


@pytest.mark.parametrize("to", ["invarying", "reduced"])
def test_gathers_to_other_types(to: str) -> None:
    def body(x: Any, w: Any) -> Any:
        return jnp.sin(lax.all_gather(x, "x", tiled=True, to=to) @ w)[None]

    f = sharded(body, line(), XW, ROWS, True)
    _, after, _ = rewritten(f, X, W)
    assert f"{AG} axis=0 ({X_SHARD}, {W_SHARD})" in golden(after)
    check_values(f, X, W)


def test_a_sum_of_another_type() -> None:
    """The gradient of a parameter that is gathered as reduced, is an unreduced array."""

    def body(x: Any, w: Any) -> Any:
        return jnp.sin(x @ lax.all_gather(w, "x", tiled=True, to="reduced"))

    f = sharded(body, line(), (ROWS, ROWS), ROWS, True)
    gradient = jax.grad(lambda w, x: f(x, w).sum())
    x, w = normal(T * N, F * N), normal(F * N, H)
    jaxpr = jax.jit(gradient).trace(w, x).jaxpr
    backward = [e for e in getattr(jaxpr, "jaxpr", jaxpr).eqns if jaxpr_walk.shard_map_of(e)][-1]
    _, after, _ = rewritten_body(backward)
    assert any(line.startswith(RS) for line in golden(after)), after
    check_values(gradient, w, x)


def test_over_two_axes_of_a_mesh() -> None:
    mesh = make_mesh((2, N // 2), ("a", "b"))
    f = sharded(
        lambda x, w: lax.psum_scatter(
            lax.all_gather(x, ("b", "a"), tiled=True) @ w @ w.T, ("a", "b"), tiled=True
        ),
        mesh,
        (P(("a", "b")), P()),
        P(("a", "b")),
        False,
    )
    w = normal(F, H)
    _, after, _ = rewritten(f, X, w)
    assert [line.split(" (")[0] for line in golden(after)] == [
        f"{AG} axis=0",
        f"{RS} axis=0 transposed",
    ]
    check_values(f, X, w)


def test_a_gathered_array_that_is_cast_and_used() -> None:
    """The cast one is gathered, and is what the others get."""

    def body(x: Any, w: Any) -> Any:
        whole = gather(x).astype("bfloat16")
        return whole @ w.astype("bfloat16"), jnp.sin(whole)

    f = sharded(body, line(), XW, (COLUMNS, P()), False)
    _, after, _ = rewritten(f, X, W)
    assert golden(after) == [
        "convert_element_type",
        "convert_element_type",
        f"{AG} axis=0 gathered (bf16[{T},{F}], bf16[{F},{H}])",
        "sin",
    ]
    check_values(f, X, W)


def test_products_of_two_dtypes_or_widths() -> None:
    """Those that are not like the others multiply the gathered array."""

    def body(x: Any, w: Any) -> Any:
        whole = gather(x.astype("bfloat16"))
        w = w.astype("bfloat16")
        router = jnp.matmul(whole, w[:, :2], preferred_element_type="float32")
        return whole @ w, router, whole @ jnp.sin(w)

    def found(*args: Any) -> bool:
        return all(v.shape[1] % 8 == 0 for v in args[2][1:])

    f = sharded(body, line(), XW, (COLUMNS,) * 3, False)
    with mock.patch.object(OpPrimitive, "is_overlapped", lambda *args, **_: found(*args)):
        _, after, _ = rewritten(f, X, W)
        lines = golden(after)
        assert f"{AG} axis=0 gathered (bf16[{T},{F}], bf16[{F},{H}], bf16[{F},{H}])" in lines
        assert lines.count("dot_general") == 1
        check_values(f, X, W)


# Reduce-scatters and all-reduces.

Y = normal(T * N, H * N)
HV = f"(f32[{T * N},{H}], f32[{H},{F}])"

SCATTERS: dict[str, tuple[Callable[..., Any], tuple[int, ...], str]] = {
    "plain": (lambda y, v: scatter(y @ v), (T * N, H * N), f"{RS} axis=0 {HV}"),
    "middle_axis": (
        lambda y, v: scatter(y @ v, 1),
        (3, T * N, H * N),
        f"{RS} axis=1 (f32[3,{T * N},{H}], f32[{H},{F}])",
    ),
    "stacked": (
        lambda y, v: scatter((y @ v).reshape(N, T, F), tiled=False),
        (T * N, H * N),
        f"{RS} axis=0 {HV}",
    ),
    "rows_joined": (
        lambda y, v: scatter((y @ v).reshape(-1, F)),
        (2, T * N, H * N),
        f"{RS} axis=0 (f32[{2 * T * N},{H}], f32[{H},{F}])",
    ),
    "second_operand": (
        lambda y, v: scatter(v.T @ y.T, 1).T,
        (T * N, H * N),
        f"{RS} axis=0 {HV}",
    ),
    "columns": (
        lambda y, v: scatter(y @ jnp.tile(v, (1, N)).reshape(F * N, H).T, 1),
        (T * N, H * N),
        f"{RS} axis=0 transposed (f32[{F * N},{H}], f32[{T * N},{H}])",
    ),
    "sum": (
        lambda y, v: scatter(y @ v + jnp.sin(y) @ v + y @ jnp.sin(v)),
        (T * N, H * N),
        f"{RS} axis=0 terms=3 (" + ", ".join([HV[1:].split(", ")[0]] * 3),
    ),
    "rounded": (
        lambda y, v: scatter(
            lax.dot_general(
                y.astype("bfloat16"),
                v.astype("bfloat16"),
                (((1,), (0,)), ((), ())),
                preferred_element_type="float32",
            ).astype("bfloat16")
        ),
        (T * N, H * N),
        f"{RS} axis=0 (bf16[{T * N},{H}], bf16[{H},{F}])",
    ),
    "psum": (
        lambda y, v: lax.psum(y @ v, "x"),
        (T * N, H * N),
        f"matmul_all_reduce axis=0 {HV}",
    ),
    "psum_of_several_dimensions": (
        lambda y, v: lax.psum(jnp.einsum("bth,hf->tbf", y, v), "x"),
        (3, T * N, H * N),
        f"matmul_all_reduce axis=0 (f32[{3 * T * N},{H}], f32[{H},{F}])",
    ),
    "pmean": (
        lambda y, v: lax.pmean((y @ v)[None], "x"),
        (T * N, H * N),
        f"matmul_all_reduce axis=0 {HV}",
    ),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", SCATTERS)
def test_forms_of_sums(form: str, check_vma: bool) -> None:
    body, shape, wanted = SCATTERS[form]
    y = normal(*shape)

    def varying(y: Any, v: Any) -> Any:
        result = body(y, v)[None]
        return result + 0 * y.sum().astype(result.dtype)

    specs = P(*[None] * (len(shape) - 1), "x"), ROWS
    f = sharded(varying, line(), specs, ROWS, check_vma)
    _, after, _ = rewritten(f, y, V)
    matmuls = [line for line in golden(after) if "matmul" in line]
    assert len(matmuls) == 1 and matmuls[0].startswith(wanted), matmuls
    check_values(f, y, V)


# What is left.


def barrier(x: Any, w: Any) -> Any:
    return lax.optimization_barrier(gather(x)) @ w


def barrier_between(x: Any, w: Any) -> Any:
    whole = gather(x)
    w = lax.optimization_barrier(w)
    return whole @ w


def placed(x: Any, w: Any) -> Any:
    with set_xla_metadata(_scheduling_group_id="1"):
        whole = gather(x)
    return whole @ w


def placed_matmul(x: Any, w: Any) -> Any:
    whole = gather(x)
    with set_xla_metadata(_scheduling_group_id="1"):
        return whole @ w


def contracted(x: Any, w: Any) -> Any:
    return gather(x, 1) @ jnp.tile(w, (N, 1))


def rows_contracted(x: Any, w: Any) -> Any:
    return gather(x).T @ jnp.ones((T * N, 3)) + w[:, :3]


def ranks_contracted(x: Any, w: Any) -> Any:
    """The ranks' halves are summed, so the rows that are left belong to no rank."""
    halves = gather(x).reshape(2, N, -1, F)
    return jnp.einsum("antf,afh->nth", halves, jnp.stack([w, 2 * w])).reshape(-1, H)


def a_batch(x: Any, w: Any) -> Any:
    whole = gather(x, 1)
    return jnp.einsum("bth,bhf->btf", whole[None] * jnp.ones((2, 1, 1)), jnp.stack([w, w]))[0]


def scaled(x: Any, w: Any) -> Any:
    return (gather(x) * 2) @ w


def cast_to_more_bytes(x: Any, w: Any) -> Any:
    return gather(x.astype("bfloat16")).astype("float32") @ w


def cast_and_used(x: Any, w: Any) -> Any:
    whole = gather(x)
    product = whole.astype("bfloat16") @ w.astype("bfloat16")
    return product.astype("float32") + whole.sum()


def its_own_transpose(x: Any, w: Any) -> Any:
    whole = gather(x)
    return whole @ whole.T + w.sum()


@pytest.mark.parametrize(
    "body",
    [
        barrier,
        barrier_between,
        placed,
        placed_matmul,
        rows_contracted,
        ranks_contracted,
        scaled,
        cast_to_more_bytes,
        cast_and_used,
        its_own_transpose,
    ],
)
def test_gathers_that_are_left(body: Callable[..., Any]) -> None:
    check_left(lambda *args: body(*args)[None], (X, W), in_specs=XW)


def test_a_gathered_contraction_is_left() -> None:
    check_left(contracted, (normal(T, F * N), W), in_specs=(COLUMNS, P()), out_specs=P())


SUMS_LEFT: dict[str, Callable[..., Any]] = {
    "used_elsewhere": lambda y, v: (lambda z: scatter(z) + z[:T])(y @ v),
    "psum_used_elsewhere": lambda y, v: (lambda z: lax.psum(z, "x") + z)(y @ v),
    "not_only_matmuls": lambda y, v: scatter(y @ v + y[:, :F]),
    "scaled": lambda y, v: scatter(2 * (y @ v)),
    "cast_to_more_bytes": lambda y, v: scatter(
        (y.astype("bfloat16") @ v.astype("bfloat16")).astype("float32")
    ),
    "barrier": lambda y, v: scatter(lax.optimization_barrier(y @ v)),
    "index_groups": lambda y, v: lax.psum(y @ v, "x", axis_index_groups=[list(range(N))[::-1]]),
    "batches": lambda y, v: scatter(
        jnp.einsum("bth,bhf->tbf", jnp.stack([y, y + 1]), jnp.stack([v, v * 2]))
    ),
    "an_expert_after_the_other": lambda y, v: lax.psum(
        sum(jnp.sin(y @ v @ v.T) @ v for _ in range(3)), "x"
    ),
}


@pytest.mark.parametrize("form", SUMS_LEFT)
def test_sums_that_are_left(form: str) -> None:
    body = SUMS_LEFT[form]
    check_left(lambda *args: body(*args)[None], (Y, V), in_specs=(COLUMNS, ROWS))


def test_products_that_would_live_longer() -> None:
    """Each group ends before something that takes long, and where a product is used up."""

    def one_layer_after_the_other(x: Any, w: Any) -> Any:
        memory, state = gather(x), x
        for k in range(3):
            keys, values = memory @ (w * k), memory @ jnp.sin(w * k)
            state = state + jnp.tanh(state @ w @ keys.T) @ values @ w.T
        return state

    def chunks(x: Any, w: Any) -> Any:
        memory = gather(x)
        return sum(jnp.exp(memory @ (w * k)).sum() for k in range(3))[None]

    for body, matrices, left in ((one_layer_after_the_other, 2, 16), (chunks, 1, 2)):
        f = sharded(body, line(), XW, ROWS, False)
        _, after, _ = rewritten(f, X, W)
        lines = golden(after)
        operands = ", ".join([X_SHARD] + [W_SHARD] * matrices)
        assert f"{AG} axis=0 gathered ({operands})" in lines
        assert lines.count("dot_general") == left
        check_values(f, X, W)


def test_matmuls_that_depend_on_each_other() -> None:
    def body(x: Any, w: Any) -> Any:
        whole = gather(x)
        first = whole @ w
        return first, whole @ (w * first.mean())

    f = sharded(body, line(), XW, COLUMNS, False)
    _, after, _ = rewritten(f, X, W)
    assert golden(after)[0] == f"{AG} axis=0 gathered ({X_SHARD}, {W_SHARD})"
    assert golden(after).count("dot_general") == 1
    check_values(f, X, W)


def test_a_matmul_between_a_gather_and_a_scatter_joins_one_of_them() -> None:
    body = lambda x, w: scatter(gather(x) @ w)  # noqa: E731
    f = sharded(body, line(), XW, ROWS, False)
    _, after, _ = rewritten(f, X, W)
    assert golden(after) == [f"{AG} axis=0 ({X_SHARD}, {W_SHARD})", "psum_scatter axis=0"] or [
        line.split(" ")[0] for line in golden(after)
    ] == [AG, "psum_scatter"]
    check_values(f, X, W)


def test_what_is_not_overlapped_is_left() -> None:
    f = sharded(lambda x, w, v: scatter(jnp.tanh(gather(x) @ w) @ v), line(), (*XW, ROWS), ROWS)
    with mock.patch.object(OpPrimitive, "is_overlapped", lambda *_, **__: False):
        _, after, record = rewritten(f, X, W, V)
    assert names(after) == ["intranode_all_gather", "intranode_psum_scatter"]
    assert [d.reason for d in record.decisions] == [None, None]


def test_what_xla_overlaps_with_other_matmuls() -> None:
    """It is left if ours would add transpositions, or is an all-reduce."""

    def bodies(x: Any, w: Any, y: Any, v: Any) -> Any:
        rows = w[:, :F].T @ gather(x.T, 1)  # ours would be transposed
        return [rows[None], (gather(x) @ w)[None], lax.psum(y @ v, "x"), scatter(y @ v)]

    f = sharded(bodies, line(), (ROWS, COLUMNS, COLUMNS, ROWS), [ROWS, ROWS, P(), ROWS], False)
    args = X, W, Y, V
    for overlaps, wanted in (
        (False, [f"{AG}", f"{AG}", "matmul_all_reduce", RS]),
        (True, ["all_gather", f"{AG}", "psum", RS]),
    ):
        with mock.patch.object(sums.Overlap, "has_matmul", lambda *_, yes=overlaps: yes):
            _, after, record = rewritten(f, *args)
        ours = [
            BY_PRIMITIVE[e.primitive].operation for e in after.eqns if e.primitive in BY_PRIMITIVE
        ]
        assert sorted(ours) == sorted(name for name in wanted if "matmul" in name)
        assert len(record.decisions) == 4
    check_values(f, *args)


# Gradients, control flow, donation.


def layer(x: Any, w: Any, u: Any, v: Any) -> Any:
    whole = gather(x)
    return x + scatter((jnp.tanh(whole @ w) * (whole @ u)) @ v)


def loss(*args: Any) -> Any:
    return jnp.sin(layer(*args)).sum()


LAYER = (X, W, jnp.cos(W), V)
LAYER_SPECS = (ROWS, COLUMNS, COLUMNS, ROWS)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrap", ["plain", "checkpoint", "jit", "scan", "vmap"])
def test_gradients(wrap: str, check_vma: bool) -> None:
    def local(*args: Any) -> Any:
        x, *weights = args
        if wrap == "scan":
            body = jax.checkpoint(lambda c, _: (layer(c, *weights), None))
            return jnp.sin(lax.scan(body, x, None, length=2)[0]).sum()
        if wrap == "vmap":
            return jnp.sin(jax.vmap(lambda x: layer(x, *weights))(jnp.stack([x, -x]))).sum()
        wraps = {"plain": lambda f: f, "checkpoint": jax.checkpoint, "jit": jax.jit}
        return wraps[wrap](loss)(*args)

    f = sharded(
        jax.value_and_grad(lambda *args: local(*args), (0, 1, 2, 3)),
        line(),
        LAYER_SPECS,
        (P(), LAYER_SPECS),
        False,
    )
    if check_vma:
        total = sharded(lambda *args: lax.psum(local(*args), "x"), line(), LAYER_SPECS, P(), True)
        f = jax.value_and_grad(total, (0, 1, 2, 3))
        check_values(f, *LAYER)
        return
    _, after, _ = rewritten(f, *LAYER)
    found = [name for name in names(after) if "matmul" in name]
    assert set(names(after)) == set(found)
    wanted = ["all_gather_matmul", RS, f"gradients_of_{RS}", f"gradients_of_{AG}"]
    again = {"checkpoint": [AG, RS], "scan": [AG]}  # what is computed again
    wanted[2:2] = again.get(wrap, [])
    assert found == [f"intranode_{name}" for name in wanted]
    check_values(f, *LAYER)


def test_the_gradient_of_a_list_in_detail() -> None:
    f = sharded(jax.grad(loss, (0, 1, 2, 3)), line(), LAYER_SPECS, LAYER_SPECS, False)
    _, after, _ = rewritten(f, *LAYER)
    ours = [line for line in golden(after) if "matmul" in line]
    rows, whole = f"f32[{T * N},{H}]", f"f32[{T * N},{F}]"
    assert ours == [
        f"{AG} axis=0 gathered ({X_SHARD}, {W_SHARD}, {W_SHARD})",
        f"{RS} axis=0 {HV}",
        f"gradients_of_{RS} axis=0 transposed ({X_SHARD}, f32[{H},{F}], {rows})",
        f"gradients_of_{AG} axis=0 transposed terms=2 "
        f"({rows}, {rows}, {W_SHARD}, {W_SHARD}, {whole})",
    ]
    assert "dot_general" not in golden(after)


def test_under_set_mesh() -> None:
    """The shard_map names no devices."""
    f = jax.shard_map(layer, in_specs=LAYER_SPECS, out_specs=ROWS)
    for order in (range(N), reversed(range(N))):
        mesh = make_mesh((N,), ("x",), order=list(order))
        with jax.set_mesh(mesh):
            args = [
                jax.device_put(v, jax.NamedSharding(mesh, spec))
                for v, spec in zip(LAYER, LAYER_SPECS, strict=True)
            ]
            assert names(rewritten(f, *args)[1]) == [f"intranode_{AG}", f"intranode_{RS}"]
            check_values(f, *args)


def test_pmap() -> None:
    x = normal(N, T, F)
    w = normal(N, F, H)

    def local(x: Any, w: Any) -> Any:
        return lax.psum((gather(x) @ w)[:T] @ w.T, "x")

    wanted = jax.pmap(local, axis_name="x")(x, w)
    with jax_intranode.accelerate():
        found = jax.pmap(lambda x, w: local(x, w), axis_name="x")(x, w)
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-5)


def test_donation() -> None:
    f = sharded(layer, line(), LAYER_SPECS, ROWS, False)
    wanted = np.asarray(jax.jit(f)(*LAYER))
    x = jax.device_put(X, jax.NamedSharding(line(), ROWS))
    with jax_intranode.accelerate():
        found = jax.jit(f, donate_argnums=0)(x, *LAYER[1:])
    assert x.is_deleted()
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-5)


def test_a_gathered_array_of_many_products_and_sums() -> None:
    """What is looked at grows like the program."""
    looked_at = 0
    whole = gathers._Gather._fused

    def counted(self: Any, group: Any, wgrad: Any) -> Any:
        nonlocal looked_at
        looked_at += len(group)
        return whole(self, group, wgrad)

    def of(count: int) -> int:
        def body(x: Any, w: Any) -> Any:
            g = lax.all_gather(x, "x", tiled=True)
            return sum(lax.psum_scatter(g @ (w * i), "x", tiled=True) for i in range(count))

        before = looked_at
        f = sharded(body, line(), (P("x"), P()), P("x"), False)
        rewritten(f, normal(N * T, F), normal(F, H))
        return looked_at - before

    with mock.patch.object(gathers._Gather, "_fused", counted):
        assert of(800) <= 3 * of(400)


def test_a_large_unrolled_program() -> None:
    """Long chains neither overflow the stack nor take long."""

    def body(x: Any, w: Any) -> Any:
        v = gather(x)
        for _ in range(600):
            v = v.T.reshape(v.shape[0], -1)
        total = v @ w
        for _ in range(600):
            total = total + jnp.sin(total)
        return lax.psum(total, "x")

    rewritten(sharded(body, line(), XW, COLUMNS, False), X, W)


# The same custom calls as programs that are written with our functions.


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_lowered", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_lowered"] = module  # dataclasses look the module up
    spec.loader.exec_module(module)
    return module


def by_lax_gather(
    x: Any, w: Any, axis: Any, *, gather_axis: int = 0, return_gathered: bool = False
) -> Any:
    whole = lax.all_gather(x, axis, axis=gather_axis, tiled=True)
    products = [whole @ v for v in w] if isinstance(w, list) else whole @ w
    return (products, whole) if return_gathered else products


def by_lax_scatter(x: Any, w: Any, axis: Any, *, scatter_dimension: int = 0) -> Any:
    return lax.psum_scatter(x @ w, axis, scatter_dimension=scatter_dimension, tiled=True)


BY_LAX = SimpleNamespace(
    all_gather_matmul=by_lax_gather,
    matmul_reduce_scatter=by_lax_scatter,
    matmul_all_reduce=lambda x, w, axis: lax.psum(x @ w, axis),
    all_gather=lax.all_gather,
    pmean=lax.pmean,
)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("size", ["large", "narrow"])
@pytest.mark.parametrize(
    "program",
    [
        *("products", "list_of_matrices", "gathered", "all_reduce", "batch_of_rows"),
        *("remat", "layers", "block"),
    ],
)
def test_calls_of_programs_for_gpus(
    tool: ModuleType, program: str, size: str, check_vma: bool
) -> None:
    """For "narrow" sizes one kernel computes both gradients, for "large" ones it does not."""
    of = tool.PROGRAMS[program]
    mesh = tool.mesh_of("gpu", {"x": 2})
    lengths = tool.sizes("gpu", size, 2)
    args = [jax.ShapeDtypeStruct(tuple(lengths[n] for n in s), jnp.bfloat16) for s in of.shapes]

    def calls(lib: Any) -> Any:
        f = jax.shard_map(
            functools.partial(of.body, lib),
            mesh=mesh,
            in_specs=of.specs,
            out_specs=of.out,
            check_vma=check_vma,
        )

        def gradient(*args: Any) -> Any:
            return jax.value_and_grad(
                lambda *args: jnp.sin(f(*args).astype(jnp.float32)).sum(), range(len(args))
            )(*args)

        lowered = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        attributes = re.findall(r"mhlo\.backend_config = (\{.*?\}), operand_layouts", lowered)
        return in_lowered(lowered), sorted(a for a in attributes if "transposed" in a)

    with (
        mock.patch.object(OpPrimitive, "is_overlapped", IS_OVERLAPPED),
        jax.default_matmul_precision(None),
        tool.without_rendezvous(),
    ):
        by_hand, matmuls = calls(jax_intranode)
        with jax_intranode.accelerate():
            rewritten, found = calls(BY_LAX)
    assert found == matmuls and found
    # JAX's own sum for a gradient is replaced, too.
    of_sums = ("jax_intranode_psum", "all_reduce")
    assert sum(rewritten[k] for k in of_sums) == sum(by_hand[k] for k in of_sums)
    for name in of_sums:
        rewritten.pop(name, None)
        by_hand.pop(name, None)
    assert rewritten == by_hand


@pytest.mark.parametrize("check_vma", [True, False])
def test_attention_with_heads(tool: ModuleType, check_vma: bool) -> None:
    """Weights have a dimension of heads, and einsum puts operands in the order that it likes."""
    mesh = tool.mesh_of("gpu", {"x": 4})

    def attention(x: Any, weights: Any) -> Any:
        whole = gather(x, 1)
        q, k, v = (jnp.einsum("btf,fhd->bhtd", whole, w) for w in weights[:3])
        k, v = (jnp.repeat(u, q.shape[1] // u.shape[1], 1) for u in (jnp.sin(k), v))
        scores = jax.nn.softmax(jnp.einsum("bhtd,bhsd->bhts", jnp.sin(q), k))
        mixed = jnp.einsum("bhts,bhsd->bhtd", scores, v)
        return x + scatter(jnp.einsum("bhtd,hdf->btf", mixed, weights[3]), 1)

    def types(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    few, many = types(4096, 8, 128), types(4096, 32, 128)
    specs = (P(None, "x"), [P(None, "x")] * 3 + [ROWS])
    f = jax.shard_map(attention, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma)
    gradient = jax.grad(lambda *args: jnp.sin(f(*args).astype(jnp.float32)).sum(), (0, 1))
    args = types(2, 4096, 4096), [many, few, few, types(32, 128, 4096)]
    with (
        mock.patch.object(OpPrimitive, "is_overlapped", IS_OVERLAPPED),
        jax.default_matmul_precision(None),
        tool.without_rendezvous(),
        jax_intranode.accelerate(),
    ):
        lowered = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",))
    assert in_lowered(lowered.as_text()) == {"jax_intranode_collective_matmul": 4}


IS_OVERLAPPED = OpPrimitive.is_overlapped
