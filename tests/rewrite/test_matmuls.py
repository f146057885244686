"""Which matmuls join a collective, which do not, and that the results stay the same.

On CPU devices nothing is overlapped. So selection is made to say that everything is. Lowering then
asks the real selection, and computes the operations unfused.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import compare_lowered as tool
import jax
import jax.numpy as jnp
import pytest
from cases import line, sharded
from devices import need_devices
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P
from models import OF_LAX, gated_mlp
from test_rewriting import N, check_values, names, normal, rewritten
from tiers import full

import jax_intranode
from jax_intranode._src.jax_private import hlo
from jax_intranode._src.ops.primitive import BY_PRIMITIVE
from jax_intranode._src.rewrite import gathers, sums
from jax_intranode._src.rewrite.collectives import Body

T, F, H = 2, 8, 16  # rows and columns of a rank's x, columns of a rank's w


@pytest.fixture(autouse=True)
def overlapped() -> Iterator[None]:
    need_devices(2)
    with (
        mock.patch.object(Body, "is_overlapped", lambda *_, **__: True),
        jax.default_matmul_precision("highest"),
    ):
        yield


def golden(jaxpr: Any) -> list[str]:
    """A line for each equation; ours with what matters of their parameters."""
    found = []
    for equation in jaxpr.eqns:
        own = BY_PRIMITIVE.get(equation.primitive)
        name = str(equation.primitive.name)
        if own is not None:
            params = equation.params["params"]
            matmul = getattr(params, "matmul", params)
            details = [f"axis={matmul.axis}"] if hasattr(matmul, "axis") else []
            details += [k for k in ("transposed", "gathered") if getattr(matmul, k, False)]
            details += [f"terms={matmul.terms}"] if getattr(matmul, "terms", 1) > 1 else []
            name = " ".join([own.operation, *details])
            types = [v.aval.str_short(short_dtypes=True) for v in equation.invars]
            name += f" ({', '.join(t.split('{')[0] for t in types)})"
        found.append(name)
    return found


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
Y = normal(T * N, H * N)
HV = f"(f32[{T * N},{H}], f32[{H},{F}])"
IS_OVERLAPPED = Body.is_overlapped


# All-gathers.


# For each: the body; the global shape of x, its spec and the operation if they are not these.
OF_ROWS = (T * N, F), ROWS, f"{AG} axis=0 ({X_SHARD}, {W_SHARD})"
OF_MIDDLE = (3, T * N, F), P(None, "x"), f"{AG} axis=1 (f32[3,{T},{F}], {W_SHARD})"
OF_INSIDE = *OF_ROWS[:2], f"{AG} axis=1 (f32[{T},1,{F}], {W_SHARD})"
OF_BFLOAT16 = *OF_ROWS[:2], f"{AG} axis=0 (bf16[{T},{F}], bf16[{F},{H}])"
Gather = tuple[Callable[..., Any], tuple[int, ...], P, str]
GATHERS: dict[str, Gather] = {
    "another_axis": (lambda x, w: gather(x, 1) @ w, *OF_MIDDLE),
    "rows_joined": (lambda x, w: gather(x, 1).reshape(3 * T * N, F) @ w, *OF_MIDDLE),
    "rows_split": (lambda x, w: gather(x).reshape(N, T, F) @ w, *OF_ROWS),
    "stacked": (lambda x, w: gather(x, tiled=False).reshape(-1, F) @ w, *OF_ROWS),
    "stacked_in_the_middle": (lambda x, w: gather(x, 1, tiled=False) @ w, *OF_INSIDE),
    "ranks_inside": (
        lambda x, w: gather(x, tiled=False).transpose(1, 0, 2).reshape(-1, F) @ w,
        *OF_INSIDE,
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
        *OF_BFLOAT16,
    ),
    "product_cast": (
        lambda x, w: jnp.matmul(
            gather(x.astype("bfloat16")), w.astype("bfloat16"), preferred_element_type="float32"
        ).astype("bfloat16"),
        *OF_BFLOAT16,
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


@pytest.mark.parametrize("form", SCATTERS)
@pytest.mark.parametrize("check_vma", [True, full(False)])
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
    "contraction": lambda x, w: gather(jnp.tile(x, (1, N)), 1) @ jnp.tile(w, (N * N, 1)),
    "barrier": lambda x, w: lax.optimization_barrier(gather(x)) @ w,
    "barrier_between": lambda x, w: gather(x) @ lax.optimization_barrier(w),
    "placed": placed,
    "placed_matmul": placed_matmul,
    "rows_contracted": lambda x, w: gather(x).T @ jnp.ones((T * N, 3)) + w[:, :3],
    "ranks_contracted": ranks_contracted,
    "scaled": lambda x, w: (gather(x) * 2) @ w,
    "cast_to_more_bytes": lambda x, w: gather(x.astype("bfloat16")).astype("float32") @ w,
    "cast_and_used": cast_and_used,
    "its_own_transpose": lambda x, w: (lambda g: g @ g.T + w.sum())(gather(x)),
}


SUMS_LEFT: dict[str, Callable[..., Any]] = {
    "used_elsewhere": lambda y, v: (lambda z: scatter(z) + z[:T])(y @ v),
    "psum_used_elsewhere": lambda y, v: (lambda z: lax.psum(z, "x") + z)(y @ v),
    "not_only_matmuls": lambda y, v: scatter(y @ v + y[:, :F]),
    "sum_scaled": lambda y, v: scatter(2 * (y @ v)),
    "sum_cast_to_more_bytes": lambda y, v: scatter(
        (y.astype("bfloat16") @ v.astype("bfloat16")).astype("float32")
    ),
    "sum_barrier": lambda y, v: scatter(lax.optimization_barrier(y @ v)),
    "index_groups": lambda y, v: lax.psum(y @ v, "x", axis_index_groups=[list(range(N))[::-1]]),
    "largest": lambda y, v: lax.pmax(y @ v, "x"),
    "smallest": lambda y, v: lax.pmin(y @ v, "x"),
    "batches": lambda y, v: scatter(
        jnp.einsum("bth,bhf->tbf", jnp.stack([y, y + 1]), jnp.stack([v, v * 2]))
    ),
    "an_expert_after_the_other": lambda y, v: lax.psum(
        sum(jnp.sin(y @ v @ v.T) @ v for _ in range(3)), "x"
    ),
}


@pytest.mark.parametrize("form", [*GATHERS_LEFT, *SUMS_LEFT])
def test_what_is_left(form: str) -> None:
    """No matmul joins a collective."""
    of_gather = GATHERS_LEFT.get(form)
    body, args, specs = (
        (of_gather, (X, W), XW) if of_gather else (SUMS_LEFT[form], (Y, V), (COLUMNS, ROWS))
    )
    f = sharded(lambda *args: body(*args)[None], line(), specs, ROWS, False)
    before, after, _ = rewritten(f, *args)
    assert not any("matmul" in name or "gradients" in name for name in golden(after)), after
    dots = [[e.primitive.name for e in of.eqns].count("dot_general") for of in (before, after)]
    assert dots[0] == dots[1]
    check_values(f, *args)


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


# Gradients, control flow, donation.


def layer(x: Any, w: Any, u: Any, v: Any) -> Any:
    return x + gated_mlp(lax, x, w, u, v, act=jnp.tanh)


def loss(*args: Any) -> Any:
    return jnp.sin(layer(*args)).sum()


LAYER = (X, W, jnp.cos(W), V)
LAYER_SPECS = (ROWS, COLUMNS, COLUMNS, ROWS)


@pytest.mark.parametrize("wrap", ["plain", "checkpoint", "jit", "scan", "vmap"])
@pytest.mark.parametrize("check_vma", [True, False])
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


def test_a_gathered_array_of_many_products_and_sums() -> None:
    """What is looked at grows like the program."""
    whole = gathers._Gather._fused

    def of(count: int) -> int:
        def body(x: Any, w: Any) -> Any:
            g = lax.all_gather(x, "x", tiled=True)
            return sum(lax.psum_scatter(g @ (w * i), "x", tiled=True) for i in range(count))

        f = sharded(body, line(), (ROWS, P()), ROWS, False)
        with mock.patch.object(
            gathers._Gather, "_fused", autospec=True, side_effect=whole
        ) as fused:
            rewritten(f, X, normal(F, H))
        return sum(len(call.args[1]) for call in fused.call_args_list)

    assert 400 <= of(800) <= 3 * of(400)


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


@pytest.mark.parametrize(
    ("size", "check_vma"),
    [("narrow", True), ("large", False), full("narrow", False), full("large", True)],
)
@pytest.mark.parametrize(
    "program",
    [
        *("products", "list_of_matrices", "gathered", "all_reduce", "batch_of_rows"),
        *("remat", "layers", "block"),
    ],
)
def test_calls_of_programs_for_gpus(program: str, size: str, check_vma: bool) -> None:
    """For "narrow" sizes one kernel computes both gradients, for "large" ones it does not."""
    of = tool.PROGRAMS[program]
    mesh = tool.mesh_of("gpu", {"x": 2})
    lengths = tool.sizes("gpu", size, 2)
    args = [jax.ShapeDtypeStruct(tuple(lengths[n] for n in s), jnp.bfloat16) for s in of.shapes]

    def calls(lib: Any) -> Any:
        _, gradient = tool.forward_and_gradient(lib, of, mesh, check_vma)
        lowered = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        attributes = re.findall(r"mhlo\.backend_config = (\{.*?\}), operand_layouts", lowered)
        return hlo.in_lowered(lowered), sorted(a for a in attributes if "transposed" in a)

    with (
        mock.patch.object(Body, "is_overlapped", IS_OVERLAPPED),
        jax.default_matmul_precision(None),
        tool.without_rendezvous(),
    ):
        by_hand, matmuls = calls(jax_intranode)
        with jax_intranode.accelerate():
            rewritten, found = calls(OF_LAX)
    assert found == matmuls and found
    # JAX's own sum for a gradient is replaced, too.
    of_sums = ("jax_intranode_psum", "all-reduce")
    assert sum(rewritten[k] for k in of_sums) == sum(by_hand[k] for k in of_sums)
    for name in of_sums:
        rewritten.pop(name, None)
        by_hand.pop(name, None)
    assert rewritten == by_hand
