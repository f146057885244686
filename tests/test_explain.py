"""explain: its report of programs, and that their HLO holds what it reports.

Programs call this package or `jax.lax`, whose collectives are rewritten or left.
"""

import contextlib
import dataclasses
import functools
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import forced, line, make_mesh, selection, sharded
from devices import need_devices
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode import (
    all_gather,
    column_parallel_matmul,
    explain,
    pmean,
    psum,
    psum_scatter,
    row_parallel_matmul,
)
from jax_intranode._src.jax_private import hlo
from jax_intranode._src.native import definitions
from jax_intranode._src.rewrite.collectives import Body

pytestmark = pytest.mark.usefixtures("not_installed")


def over_x(body: Callable[..., Any]) -> Any:
    """A function of one array, of which each device has a shard."""
    return sharded(body, line(), P("x"), P("x"))


def rewriting(enabled: bool) -> Any:
    return jax_intranode.accelerate() if enabled else contextlib.nullcontext()


# Programs.


N = len(jax.devices())
X = jax.ShapeDtypeStruct((N, 4 * N), jnp.float32)  # float32[1, 4 N] on each device
HALVES = [list(range(N // 2)), list(range(N // 2, N))]
KINDS = {
    **dict.fromkeys(("psum", "pmean", "pmax", "pmin"), "all-reduce"),
    "psum_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def in_report(calls: Any) -> Counter[str]:
    """Counts the collectives of a report, as `hlo.in_lowered` does; lax sums arrays one by one."""
    found: Counter[str] = Counter()
    for call in calls:
        if call.algorithm != "lax":
            found[f"jax_intranode_{call.operation.replace('pmean', 'psum')}"] += 1
        elif call.axes:
            found[KINDS[call.operation]] += len(call.shapes)
    return found


def check_report(function: Callable[[Any], Any]) -> None:
    """The lowered program of a function holds what `explain` reports."""
    calls = explain(function)(X)
    text = jax.jit(function).lower(X).as_text()
    assert in_report(calls) == hlo.in_lowered(text), f"{calls}\n{text}"
    assert len(calls) > 0
    assert all(call.reason for call in calls)


def shared(lib: Any) -> dict[str, Callable[[Any], Any]]:
    """Functions of a device's array, with `jax_intranode` or `jax.lax` as library."""

    @jax.jit
    def twice_called(v: Any) -> Any:
        return lib.psum(v * 2, "x")

    @jax.custom_vjp
    def custom(v: Any) -> Any:
        return lib.psum(v, "x")

    def backward(v: Any, ct: Any) -> Any:
        return (lib.all_gather(ct, "x")[0] * v,)

    custom.defvjp(lambda v: (lib.psum(v, "x"), v), backward)

    def scanned(v: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            return lib.pmean(c, "x"), lib.psum(c, "x")

        return lax.scan(step, v, None, length=7)[1].sum(0)

    def of_int(v: Any) -> Any:
        return lib.psum(v.astype(jnp.int32), "x").astype(v.dtype)

    def loops(v: Any) -> Any:
        v = scanned(v)
        return lax.while_loop(lambda c: lib.psum(c, "x").sum() < 0, lambda c: of_int(c) + c, v)

    def parts(v: Any) -> Any:
        scattered = lib.psum_scatter(v, "x", scatter_dimension=1, tiled=True)
        whole = lib.all_gather(scattered, "x", axis=1, tiled=True)
        return whole + lib.all_gather(v[:, 0], "x").sum()

    def solved(v: Any) -> Any:
        def half(_: Any, b: Any) -> Any:
            return lib.psum(b, "x") / (2 * N)

        return lax.custom_linear_solve(lambda u: 2 * lib.psum(u, "x"), v, half, half)

    return {
        "plain": lambda v: lib.psum(v, "x") + lib.pmean(v * 2, "x"),
        "unused": lambda v: (lib.psum(v, "x"), lib.psum((v * 2, v * 3), "x")[1])[1],
        "twice": lambda v: twice_called(twice_called(v)) + twice_called(v[:, :4])[:, :1],
        "loops": loops,
        "cond": lambda v: lax.cond(
            v[0, 0] > 0, lambda u: lib.psum(u, "x"), lambda u: scanned(lib.psum(u * 2, "x")), v
        ),
        "remat": jax.checkpoint(lambda v: jnp.sin(lib.psum(v, "x")) * lib.psum(v * v, "x")),
        "custom_vjp": custom,
        "parts": parts,
        "solved": solved,
        "vmap": lambda v: jax.vmap(lambda u: lib.psum(u, "x") + parts(u[None])[0])(v),
    }


def many(v: Any) -> Any:
    """A psum of a tree that takes several operations, with empty and unused arrays."""
    tree = [v * k for k in range(definitions.MAX_BUFFERS + 1)]
    return sum(psum({"a": tree, "b": v[:, :0], "c": (v * 2).astype(jnp.int32)}, "x")["a"])


def fallbacks(v: Any) -> Any:
    a = psum(v.astype(jnp.complex64), "x").real + psum(v > 0, "x")
    b = psum((v, v * 2), "x", axis_index_groups=HALVES)
    c = psum_scatter(v.astype(jnp.complex64), "x", scatter_dimension=1, tiled=True).real.sum()
    d = all_gather(np.ones((1, 4), np.float32), "x").sum() + psum(np.float32(3), "x")
    return a + b[0] + b[1] + c + d + pmean(v, "x", axis_index_groups=HALVES)


def large(v: Any) -> Any:
    big = jnp.tile(v, (1, 1 << 20))
    return v + psum((big, big * 2), "x")[0][:, :1] + pmean(v, "x")


def mapped(v: Any) -> Any:
    a = jax.vmap(lambda u: psum(u, "x") + psum(u, "i"), axis_name="i")(v)
    b = jax.vmap(lambda u: psum(u, ("i", "x")), axis_name="i")(v)
    c = jax.vmap(lambda u: psum(u, "x") + all_gather(u, "x").sum(), axis_name="x")(v)
    return a + b + c + jax.vmap(lambda u: all_gather(u, "i", axis=1), axis_name="i")(v).sum()


def by_platform(v: Any) -> Any:
    return lax.platform_dependent(
        v,
        cpu=lambda u: psum(u, "x"),
        cuda=lambda u: psum(psum(u, "x"), "x"),
        default=lambda u: all_gather(u, "x").sum() + u,
    )


def tree(v: Any) -> Any:
    means = jax.tree.map(lambda u: lax.pmean(u, "x"), [v * k for k in range(5)])
    return sum(means) + lax.psum((v, v.astype(jnp.int32)), "x")[0]


def others(v: Any) -> Any:
    a = lax.pmax(v, "x") + lax.pmin(v, "x") + lax.ppermute(v, "x", [(0, 1)])
    return a + lax.all_to_all(v, "x", 1, 0, tiled=True).sum()


def left(v: Any) -> Any:
    a = lax.psum(v.astype(jnp.complex64), "x").real + lax.psum(v, "x", axis_index_groups=HALVES)
    return a + lax.psum(jnp.tile(v, (1, 1 << 20)), "x")[:, :1]


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    **{f"{name}_of_lax": program for name, program in shared(lax).items()},
    **shared(jax_intranode),
    **{f.__name__: f for f in (by_platform, many, fallbacks, large, mapped)},
    **{f.__name__: f for f in (tree, others, left)},
    "vmapped_name": lambda v: jax.vmap(lambda u: lax.psum(u, ("i", "x")), axis_name="i")(v),
}
# They have no transpose.
NOT_DIFFERENTIABLE = ("loops", "loops_of_lax", "others")


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_holds_what_explain_reports(name: str, enabled: bool) -> None:
    """Its lowered text, and that of its gradient."""
    f = over_x(PROGRAMS[name])
    with rewriting(enabled):
        check_report(f)
        if name not in NOT_DIFFERENTIABLE:
            check_report(jax.grad(lambda v: (f(v) ** 2).sum()))


# The report.

# Of `test_report`: a line for each call, without the measured sizes and launches; +1 is a line.
REPORT = """\
operation operands bytes axes ranks algorithm launch times origin
psum float32[2,2] 16 t 2 one_shot BxT <=3 jax_intranode | +2 (<lambda>) | forced
pmean float32[2,2] 16 d 2 one_shot BxT 15 jax_intranode | +3 (<lambda>) | forced
pmean float32[2,2] 16 t,d 4 one_shot BxT ? jax.lax | +6 (<lambda>) | forced
psum float32[2,2] ... (3 arrays) 40 d,t 4 one_shot BxT 1 jax_intranode | +7 (body) | forced
all_gather int8[2,1] 2 t 2 all_gather BxT 1 jax_intranode | +8 (body) | measured
pmean float32[2,2] 16 d,t 2 lax - 1 jax_intranode | +9 (body) | axis_index_groups
psum int32[2,2] 16 t 2 one_shot BxT 1 jax_intranode | +10 (body) | forced
pbroadcast float32[2,2] 16 t 2 lax - 1 jax.lax | +13 (body) | \
pbroadcast is not one of the kinds that this package accelerates
psum float32[2,2] ... (3 arrays) 40 d 2 one_shot BxT 1 jax.lax | +11 (body) and 2 more | forced
groups over t: [2, 0] [3, 1]
groups over d: [2, 3] [0, 1]
groups over t,d: [2, 3, 0, 1]
groups over d,t: [2, 0, 3, 1]
groups over d,t: [2, 1] [0, 3]"""


def test_report() -> None:
    """While programs are rewritten: what is ours, what was replaced or merged, what is left."""
    need_devices(4)
    mesh = make_mesh((2, 2), ("d", "t"), order=(2, 0, 3, 1))

    def body(v: Any) -> Any:
        def step(u: Any, _: Any) -> Any:
            u = lax.cond(u.sum() > 0, lambda u: psum(u, "t"), lambda u: u, u)
            return lax.fori_loop(0, 5, lambda _, u: pmean(u, "d"), u), None

        v = lax.scan(step, v, None, length=3)[0]
        v = lax.while_loop(lambda u: u.sum() < 9, lambda u: u + lax.pmean(u, ("t", "d")), v)
        a, b, c = psum((v, v * 2, v[:, :1]), ("d", "t"))
        a += b * all_gather(c.astype(jnp.int8), "t").sum()
        a += pmean(b, ("d", "t"), axis_index_groups=[[0, 3], [1, 2]])
        a += psum(v > 0, "t")  # jax.lax sums integers, which is replaced
        d = lax.psum(a, "d")
        e = lax.psum(c, "d")
        return d * lax.psum(a + b, "d") + e + lax.pbroadcast(b, "t", 0)

    with forced("one_shot"), jax_intranode.accelerate():
        found = explain(sharded(body, mesh, P("d", "t"), P("d", "t")))(jnp.ones((4, 4)))
        chosen = selection(mesh, ("t",), (2, 2), "float32")
    text = str(found)
    title, row, *_ = text.splitlines()
    assert title.index("launch") == row.index(f"{chosen.blocks}x{chosen.threads} ")
    first, here = body.__code__.co_firstlineno, __file__.removeprefix(os.getcwd() + os.sep)
    for pattern, short in (
        (r"\n? +", lambda blanks: " | " if "\n" in blanks[0] else " "),
        (r"\b\d+x\d+\b", "BxT"),
        ("JAX_INTRANODE_ALGORITHM=one_shot", "forced"),
        (r"\d+ bytes of int8 among 2 ranks \(measured on .*\)", "measured"),
        (rf"{re.escape(here)}:(\d+)", lambda at: f"+{int(at[1]) - first}"),
    ):
        text = re.sub(pattern, short, text)
    assert text == REPORT
    assert found[3].shapes == ((2, 2), (2, 2), (2, 1)) and found[3].dtype == "float32"
    lines = [f"{__file__}:{first + k} (body)" for k in (11, 12, 13)]
    assert list(found[8].sources) == lines and found[8].source == lines[0]
    assert [*found] == [*found.calls] and found[:1] == (found[0],)
    assert found.own == found.calls[:2] + found.calls[3:7]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].times = 2  # type: ignore[misc]
    assert str(explain(jnp.sin)(1.0)) == "no collectives"


def test_tree_of_several_operations() -> None:
    n = definitions.MAX_BUFFERS
    with forced("one_shot"):
        calls = explain(over_x(many))(X)
    assert [(len(call.shapes), call.dtype) for call in calls] == [(n, "float32"), (1, "float32")]


def test_arguments_as_those_of_the_function_which_is_only_traced() -> None:
    @functools.partial(jax.jit, static_argnames="scale")
    def f(v: Any, scale: int = 1) -> Any:
        return over_x(lambda v: (jax.debug.callback(ran.append, 1), psum(v, "x") * scale)[1])(v)

    ran: list[int] = []
    assert explain(f)(X, scale=3).calls == explain(f)(jnp.zeros(X.shape), scale=2).calls
    assert not ran
    with pytest.raises(NameError, match="unbound axis name: nowhere"):
        explain(lambda v: psum(v, "nowhere"))(1.0)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_sums_that_jax_inserts(check_vma: bool, enabled: bool) -> None:
    """The gradient of an operand that all ranks share is a sum that nobody called for."""

    def body(v: Any, w: Any) -> Any:
        product = v * w
        return lax.psum(product.sum(), "x")

    f = sharded(body, line(), (P("x"), P()), P(), check_vma)
    with rewriting(enabled):
        forward, *_, inserted = explain(jax.value_and_grad(f, argnums=1))(X, jnp.ones(4 * N))
    assert (forward.origin, inserted.origin) == ("jax.lax", "inserted by JAX")
    assert (inserted.operation, inserted.algorithm != "lax") == ("psum", enabled)
    first = body.__code__.co_firstlineno
    assert forward.source == f"{__file__}:{first + 2} (body)"
    if check_vma:  # the line where the operand met one that differs between ranks
        assert inserted.source == f"{__file__}:{first + 1} (body)"


def test_what_is_ours() -> None:
    """JAX also sums the gradients of weights that the data-parallel ranks share."""
    need_devices(4)
    mesh = make_mesh((2, 2), ("data", "model"))

    def loss(p: Any, x: Any) -> Any:
        hidden = column_parallel_matmul(x, p["up"], "model", batch_axes="data", mesh=mesh)
        down = row_parallel_matmul(hidden, p["down"], "model", batch_axes="data", mesh=mesh)
        return (down**2).mean()

    args = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}, jnp.ones((4, 8))
    report = explain(jax.value_and_grad(loss))(*args)
    assert all(call.algorithm != "lax" for call in report.own)  # as docs/explain.md says
    assert {call.operation for call in report.own} == {"matmul_all_reduce"}
    inserted = [call for call in report if call not in report.own]
    assert {(call.origin, call.axes) for call in inserted} == {("inserted by JAX", ("data",))}
    assert all(f"{__file__}:" in call.source for call in inserted)
    with jax_intranode.accelerate():
        report = explain(jax.value_and_grad(loss))(*args)
    assert all(call.algorithm != "lax" for call in report)


def test_collective_matmuls_have_the_source_of_the_collective() -> None:
    def forward(x: Any, w: Any) -> Any:
        gathered = lax.all_gather(x, "x", tiled=True)
        return gathered @ w

    def gradient(x: Any, w: Any) -> Any:
        return jax.grad(lambda x: (jnp.sin(x) @ w).sum())(x)

    columns = jnp.ones((4, 4 * N))
    gather = sharded(forward, line(), (P("x"), P(None, "x")), P(None, "x"))
    # The gradient of a replicated x is a sum that JAX inserts. Here it follows a matmul.
    inserted = sharded(gradient, line(), (P(), P(None, "x")), P(), check_vma=True)
    with (
        mock.patch.object(Body, "is_overlapped", lambda *_, **__: True),
        jax_intranode.accelerate(),
    ):
        (gathered,) = explain(gather)(jnp.ones((2 * N, 4)), columns)
        (summed,) = explain(inserted)(jnp.ones((2, 4)), columns)
    assert (gathered.operation, gathered.origin) == ("all_gather_matmul", "jax.lax")
    assert gathered.source == f"{__file__}:{forward.__code__.co_firstlineno + 1} (forward)"
    assert (summed.operation, summed.origin) == ("matmul_all_reduce", "inserted by JAX")


# The compiled program.


@pytest.mark.parametrize("enabled", [False, True])
def test_what_the_partitioner_adds(enabled: bool) -> None:
    mesh = line()
    body = over_x(lambda v: psum(v, "x") + lax.psum(v * 2, "x"))

    def f(v: Any, a: Any, b: Any) -> Any:
        # The contracted dimension is sharded: XLA's partitioner adds an all-reduce.
        return body(v), lax.with_sharding_constraint(a @ b, NamedSharding(mesh, P()))

    args = [
        jax.device_put(np.ones((N, N), np.float32), NamedSharding(mesh, spec))
        for spec in (P("x"), P(None, "x"), P("x"))
    ]
    with rewriting(enabled):
        found = explain(f, compiled=True)(*args)
    assert [call.origin for call in found] == ["jax_intranode", "jax.lax"]
    of_xla, ours = (1, 2) if enabled else (2, 1)
    assert found.added == {"all-reduce": 1}
    assert found.compiled == {"all-reduce": of_xla, "jax_intranode_psum": ours}
    assert str(found).splitlines()[-2:] == [
        f"in the compiled program: {of_xla} all-reduce, {ours} jax_intranode_psum",
        "added by XLA's partitioner: 1 all-reduce",
    ]


def test_nothing_is_added_to_a_manual_program() -> None:
    """XLA merges the all-reduces of a tree; that is no addition."""
    found = explain(over_x(tree), compiled=True)(X)
    assert found.added == {} and "all-reduce" in (found.compiled or {})
    assert str(found).endswith("added by XLA's partitioner: none")


HLO_OF_GPUS = """
%wrapped_reduce_scatter (p: f32[8]) -> f32[4] {
  ROOT %rs = f32[4]{0} reduce-scatter(%p), channel_id=3, dimensions={0}
}
ENTRY %main {
  %ar = (f32[4]{0}, f32[2]{0}) all-reduce-start(%a, %b), channel_id=1
  %ard = (f32[4]{0}, f32[2]{0}) all-reduce-done(%ar)
  %s = ((f32[8]), f32[4]) async-start(%d), calls=%wrapped_reduce_scatter
  %a2a = (f32[2], f32[2], /*index=2*/f32[2]) all-to-all(%e, %f, /*index=2*/%g), channel_id=4
  %cc = (f32[4]) custom-call(%i), custom_call_target="jax_intranode_psum", operand_layout
  %other = (f32[4]) custom-call(%i), custom_call_target="cublas", metadata={op_name="all-reduce"}
}
"""


def test_counts_in_hlo() -> None:
    ours = {"jax_intranode_psum": 1}
    of_xla = {"all-reduce": 2, "reduce-scatter": 1, "all-to-all": 1}
    assert hlo.in_compiled(HLO_OF_GPUS) == {**of_xla, **ours}
