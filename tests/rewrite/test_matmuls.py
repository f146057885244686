"""Which matmuls join a collective, which do not, and that the results stay the same.

On CPU devices nothing is overlapped. So selection is made to say that everything is. Lowering then
asks the real selection, and computes the operations unfused.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax.numpy as jnp
import pytest
from cases import line, sharded
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P
from rewritten_matmuls import (  # noqa: F401
    AG,
    COLUMNS,
    HV,
    ROWS,
    RS,
    W_SHARD,
    X_SHARD,
    XW,
    F,
    H,
    N,
    T,
    V,
    W,
    X,
    Y,
    check_left,
    check_values,
    gather,
    golden,
    normal,
    overlapped,
    scatter,
)
from test_rewriting import rewritten

from jax_intranode._src.ops.primitive import BY_PRIMITIVE
from jax_intranode._src.rewrite import sums
from jax_intranode._src.rewrite.collectives import Body

# All-gathers.


# For each: the body; the global shape of x, its spec and the operation if they are not these.
OF_ROWS = (T * N, F), ROWS, f"{AG} axis=0 ({X_SHARD}, {W_SHARD})"
Gather = tuple[Callable[..., Any], tuple[int, ...], P, str]
GATHERS: dict[str, Gather] = {
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
    "rows_split": (lambda x, w: gather(x).reshape(N, T, F) @ w, *OF_ROWS),
    "stacked": (lambda x, w: gather(x, tiled=False).reshape(-1, F) @ w, *OF_ROWS),
    "stacked_in_the_middle": (
        lambda x, w: gather(x, 1, tiled=False) @ w,
        *OF_ROWS[:2],
        f"{AG} axis=1 (f32[{T},1,{F}], {W_SHARD})",
    ),
    "ranks_inside": (
        lambda x, w: gather(x, tiled=False).transpose(1, 0, 2).reshape(-1, F) @ w,
        *OF_ROWS[:2],
        f"{AG} axis=1 (f32[{T},1,{F}], {W_SHARD})",
    ),
    "transposed": (lambda x, w: gather(x, 1).T @ w, (F, T * N), COLUMNS, OF_ROWS[2]),
    "several_contracted": (
        lambda x, w: jnp.einsum("tab,abh->th", gather(x), w.reshape(2, F // 2, H)),
        (T * N, 2, F // 2),
        *OF_ROWS[1:],
    ),
    "heads": (
        lambda x, w: jnp.einsum("tf,fhd->htd", gather(x), w.reshape(F, 4, H // 4)).sum(0),
        *OF_ROWS,
    ),
    "second_operand": (lambda x, w: (w.T @ gather(x).T).T, *OF_ROWS),
    "matrix_transposed": (
        lambda x, w: gather(x) @ jnp.sin(w.T).T,
        *OF_ROWS[:2],
        f"{AG} axis=0 transposed ({X_SHARD}, f32[{H},{F}])",
    ),
    "batch_of_one": (
        lambda x, w: jnp.einsum("btf,bfh->bth", gather(x)[None], w[None])[0],
        *OF_ROWS,
    ),
    "named": (lambda x, w: checkpoint_name(gather(x), "whole") @ w, *OF_ROWS),
    "cast_to_fewer_bytes": (
        lambda x, w: gather(x).astype("bfloat16") @ w.astype("bfloat16"),
        *OF_ROWS[:2],
        f"{AG} axis=0 (bf16[{T},{F}], bf16[{F},{H}])",
    ),
    "product_cast": (
        lambda x, w: jnp.matmul(
            gather(x.astype("bfloat16")), w.astype("bfloat16"), preferred_element_type="float32"
        ).astype("bfloat16"),
        *OF_ROWS[:2],
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
    with mock.patch.object(Body, "is_overlapped", lambda *args, **_: found(*args)):
        _, after, _ = rewritten(f, X, W)
        lines = golden(after)
        assert f"{AG} axis=0 gathered (bf16[{T},{F}], bf16[{F},{H}], bf16[{F},{H}])" in lines
        assert lines.count("dot_general") == 1
        check_values(f, X, W)


# Reduce-scatters and all-reduces.


# For each: the body, the global shape of y, and the operation.
OF_SHARD = (T * N, H * N), f"{RS} axis=0 {HV}"
REDUCED = f"matmul_all_reduce axis=0 {HV}"
SCATTERS: dict[str, tuple[Callable[..., Any], tuple[int, ...], str]] = {
    "plain": (lambda y, v: scatter(y @ v), *OF_SHARD),
    "middle_axis": (
        lambda y, v: scatter(y @ v, 1),
        (3, T * N, H * N),
        f"{RS} axis=1 (f32[3,{T * N},{H}], f32[{H},{F}])",
    ),
    "stacked": (lambda y, v: scatter((y @ v).reshape(N, T, F), tiled=False), *OF_SHARD),
    "rows_joined": (
        lambda y, v: scatter((y @ v).reshape(-1, F)),
        (2, T * N, H * N),
        f"{RS} axis=0 (f32[{2 * T * N},{H}], f32[{H},{F}])",
    ),
    "second_operand": (lambda y, v: scatter(v.T @ y.T, 1).T, *OF_SHARD),
    "columns": (
        lambda y, v: scatter(y @ jnp.tile(v, (1, N)).reshape(F * N, H).T, 1),
        OF_SHARD[0],
        f"{RS} axis=0 transposed (f32[{F * N},{H}], f32[{T * N},{H}])",
    ),
    "sum": (
        lambda y, v: scatter(y @ v + jnp.sin(y) @ v + y @ jnp.sin(v)),
        OF_SHARD[0],
        f"{RS} axis=0 terms=3 (" + ", ".join([HV[1:].split(", ")[0]] * 3),
    ),
    "rounded": (
        lambda y, v: scatter(
            jnp.matmul(
                y.astype("bfloat16"), v.astype("bfloat16"), preferred_element_type="float32"
            ).astype("bfloat16")
        ),
        OF_SHARD[0],
        f"{RS} axis=0 (bf16[{T * N},{H}], bf16[{H},{F}])",
    ),
    "psum": (lambda y, v: lax.psum(y @ v, "x"), OF_SHARD[0], REDUCED),
    "psum_of_several_dimensions": (
        lambda y, v: lax.psum(jnp.einsum("bth,hf->tbf", y, v), "x"),
        (3, T * N, H * N),
        f"matmul_all_reduce axis=0 (f32[{3 * T * N},{H}], f32[{H},{F}])",
    ),
    "pmean": (lambda y, v: lax.pmean((y @ v)[None], "x"), OF_SHARD[0], REDUCED),
}


@pytest.mark.parametrize(
    ("form", "check_vma"),
    [
        pytest.param(form, check, marks=[pytest.mark.full] * (not check and form != "plain"))
        for form in SCATTERS
        for check in (True, False)
    ],
)
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


def ranks_contracted(x: Any, w: Any) -> Any:
    """The ranks' halves are summed, so the rows that are left belong to no rank."""
    halves = gather(x).reshape(2, N, -1, F)
    return jnp.einsum("antf,afh->nth", halves, jnp.stack([w, 2 * w])).reshape(-1, H)


def cast_and_used(x: Any, w: Any) -> Any:
    whole = gather(x)
    product = whole.astype("bfloat16") @ w.astype("bfloat16")
    return product.astype("float32") + whole.sum()


GATHERS_LEFT: dict[str, Callable[..., Any]] = {
    "barrier": lambda x, w: lax.optimization_barrier(gather(x)) @ w,
    "barrier_between": barrier_between,
    "placed": placed,
    "placed_matmul": placed_matmul,
    "rows_contracted": lambda x, w: gather(x).T @ jnp.ones((T * N, 3)) + w[:, :3],
    "ranks_contracted": ranks_contracted,
    "scaled": lambda x, w: (gather(x) * 2) @ w,
    "cast_to_more_bytes": lambda x, w: gather(x.astype("bfloat16")).astype("float32") @ w,
    "cast_and_used": cast_and_used,
    "its_own_transpose": lambda x, w: (lambda g: g @ g.T + w.sum())(gather(x)),
}


@pytest.mark.parametrize("form", GATHERS_LEFT)
def test_gathers_that_are_left(form: str) -> None:
    check_left(lambda *args: GATHERS_LEFT[form](*args)[None], (X, W), in_specs=XW)


def test_a_gathered_contraction_is_left() -> None:
    def contracted(x: Any, w: Any) -> Any:
        return gather(x, 1) @ jnp.tile(w, (N, 1))

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
