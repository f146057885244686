"""explain: its report of programs, and that their HLO holds what it reports.

Programs call this package or `jax.lax`, whose collectives are rewritten or left.
"""

import contextlib
import dataclasses
import functools
import logging
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
    Call,
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
from jax_intranode._src.selection import config

pytestmark = pytest.mark.usefixtures("not_installed")
NOT_ENABLED = "left to lax; jax_intranode.install() replaces it where that pays"


def over_x(body: Callable[..., Any], check_vma: bool = False) -> Any:
    """A function of one array, of which each device has a shard."""
    return sharded(body, line(), P("x"), P("x"), check_vma)


def explained(body: Callable[..., Any]) -> tuple[Call, ...]:
    return explain(over_x(body))(X).calls


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


def mixed(v: Any) -> Any:
    """Calls of both packages, and calls of ours that fall back."""
    a = jax_intranode.psum(v, "x") + lax.psum(v * 2, "x") + jax_intranode.psum(v > 0, "x")
    return a + jax_intranode.pmean(v, "x", axis_index_groups=HALVES)


OURS: dict[str, Callable[[Any], Any]] = {
    **shared(jax_intranode),
    "by_platform": by_platform,
    "many": many,
    "fallbacks": fallbacks,
    "large": large,
    "mapped": mapped,
}
OF_LAX: dict[str, Callable[[Any], Any]] = {
    **shared(lax),
    "tree": tree,
    "others": others,
    "left": left,
    "mixed": mixed,
    "vmapped_name": lambda v: jax.vmap(lambda u: lax.psum(u, ("i", "x")), axis_name="i")(v),
}
# They have no transpose.
NOT_DIFFERENTIABLE = ("loops", "others")
# With every algorithm in the quick tier: others only multiply what "auto" shows.
QUICK = ("many", "parts", "fallbacks", "large")
PROGRAMS = [
    pytest.param(name, program, algorithm, False, id=f"{name}-{algorithm}", marks=marks)
    for algorithm in ("auto", "one_shot", "two_shot", "lax")
    for name, program in OURS.items()
    for marks in [[pytest.mark.full] * (algorithm != "auto" and name not in QUICK)]
] + [
    pytest.param(name, program, "auto", enabled, id=f"{name}-of_lax-{enabled}")
    for name, program in OF_LAX.items()
    for enabled in (False, True)
]


@pytest.mark.parametrize(("name", "program", "algorithm", "enabled"), PROGRAMS)
def test_program_holds_what_explain_reports(
    name: str, program: Callable[[Any], Any], algorithm: str, enabled: bool
) -> None:
    """Its lowered text, and that of its gradient."""
    f = over_x(program)
    with forced(algorithm), rewriting(enabled):
        check_report(f)
        if name not in NOT_DIFFERENTIABLE:
            check_report(jax.grad(lambda v: (f(v) ** 2).sum()))


def summary(calls: Any) -> list[tuple[Any, ...]]:
    return [(call.operation, call.algorithm, call.times) for call in calls]


# The fields of a call.


def test_fields() -> None:
    mesh = make_mesh((N, 1), ("x", "y"))

    def body(v: Any) -> Any:
        return psum({"a": v, "b": v[0, :2]}, "x")["a"]

    f = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    with forced("one_shot"):
        found = explain(jax.jit(f))(jnp.zeros((N, 3)))
        chosen = selection(mesh, ("x",), (3,), "float32")
    (call,) = found
    assert found[0] is call and found[:1] == (call,) and list(found) == [call]
    assert call == Call(
        operation="psum",
        source=f"{__file__}:{body.__code__.co_firstlineno + 1} (body)",
        shapes=((1, 3),),
        dtype="float32",
        nbytes=12,
        axes=("x",),
        groups=(tuple(device.id for device in mesh.devices.flat),),
        algorithm="one_shot",
        blocks=chosen.blocks,
        threads=chosen.threads,
        reason="JAX_INTRANODE_ALGORITHM=one_shot",
        times=1,
        conditional=False,
        origin="jax_intranode",
        sources=(f"{__file__}:{body.__code__.co_firstlineno + 1} (body)",),
    )
    assert call.group_size == N
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.times = 2  # type: ignore[misc]


def test_table() -> None:
    def body(v: Any) -> Any:
        a, b, c = psum((v, v * 2, v[:, :2]), "x")
        return a + b + c[:, :1] + all_gather(v.astype(jnp.int8), "x").sum()

    with forced("one_shot"):
        found = explain(over_x(body))(X)
    text = str(found)
    for call, *cells in (
        (found[0], "psum", f"float32[1,{4 * N}] ... (3 arrays)", "one_shot"),
        (found[1], "all_gather", f"int8[1,{4 * N}]", "all_gather"),
    ):
        cells[2:2] = call.nbytes, "x", N
        cells += f"{call.blocks}x{call.threads}", 1, "jax_intranode"
        row = " +".join(re.escape(str(cell)) for cell in cells)
        source = re.escape(call.source.removeprefix(os.getcwd() + os.sep))
        assert re.search(f"^{row}\n    {source}\n    {re.escape(call.reason)}$", text, re.MULTILINE)
    assert text.endswith(f"\ngroups over x: {list(range(N))}")
    assert str(explain(jnp.sin)(1.0)) == "no collectives"


def test_what_is_ours_agrees_with_strict_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where JAX sums the gradients of weights that the data-parallel ranks share."""
    need_devices(4)
    mesh = make_mesh((2, 2), ("data", "model"))

    def loss(p: Any, x: Any) -> Any:
        hidden = column_parallel_matmul(x, p["up"], "model", batch_axes="data", mesh=mesh)
        down = row_parallel_matmul(hidden, p["down"], "model", batch_axes="data", mesh=mesh)
        return (down**2).mean()

    step = jax.jit(jax.value_and_grad(loss))
    p, x = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}, jnp.ones((4, 8))
    report = explain(step)(p, x)
    assert all(call.algorithm != "lax" for call in report.own)  # as docs/explain.md says
    assert {call.operation for call in report.own} == {"matmul_all_reduce"}
    inserted = [call for call in report if call.origin == "inserted by JAX"]
    assert inserted and {call.axes for call in inserted} == {("data",)}
    assert all(f"{__file__}:" in call.source for call in inserted)
    with monkeypatch.context() as strict:
        strict.setenv("JAX_INTRANODE_STRICT", "1")
        config.get.cache_clear()
        jax.jit(lambda p, x: step(p, x)).lower(p, x)
    config.get.cache_clear()
    with jax_intranode.accelerate():
        report = explain(jax.jit(lambda p, x: step(p, x)))(p, x)
    assert all(call.algorithm != "lax" for call in report)


def test_groups() -> None:
    need_devices(4)
    mesh = make_mesh((2, 2), ("d", "t"), order=(2, 0, 3, 1))
    a, b, c, d = (device.id for device in mesh.devices.flat)

    def body(v: Any) -> Any:
        some = psum(v, "t") + psum(v, "d") + psum(v, ("t", "d"))
        return some + psum(v, ("d", "t"), axis_index_groups=[[0, 3], [1, 2]])

    f = jax.shard_map(body, mesh=mesh, in_specs=P("d", "t"), out_specs=P("d", "t"), check_vma=False)
    calls = explain(f)(jnp.zeros((4, 4)))
    assert [call.groups for call in calls] == [
        ((a, b), (c, d)),
        ((a, c), (b, d)),
        ((a, c, b, d),),
        ((a, d), (b, c)),
    ]
    assert [call.group_size for call in calls] == [2, 2, 4, 2]


def test_times() -> None:
    calls = explained(OURS["loops"])
    assert [(call.operation, call.times, call.conditional) for call in calls] == [
        ("pmean", 7, False),
        ("psum", 7, False),
        ("psum", None, False),
        ("psum", None, False),
    ]

    def nested(v: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            c = lax.cond(c.sum() > 0, lambda u: psum(u, "x"), lambda u: u, c)
            return lax.fori_loop(0, 5, lambda _, u: psum(u, "x"), c), None

        return lax.scan(step, v, None, length=3)[0]

    found = explain(over_x(nested))(X)
    assert [(call.times, call.conditional) for call in found] == [(3, True), (15, False)]
    assert " <=3 " in str(found).splitlines()[1]
    assert " ?  " in str(explain(over_x(OURS["loops"]))(X)).splitlines()[7]


# Arguments.


def test_arguments() -> None:
    @functools.partial(jax.jit, static_argnames="scale")
    def f(v: Any, scale: int = 1) -> Any:
        return over_x(lambda v: psum(v, "x") * scale)(v)

    ran = []
    calls = explain(f)(X, scale=3)
    assert summary(calls) == summary(explain(f)(jnp.zeros(X.shape), scale=2))
    assert len(calls) == 1
    g = over_x(lambda v: (jax.debug.callback(ran.append, 1), psum(v, "x"))[1])
    assert len(explain(g)(X)) == 1
    assert not ran
    with pytest.raises(NameError, match="unbound axis name: nowhere"):
        explain(lambda v: psum(v, "nowhere"))(1.0)


def test_functions_of_other_jits() -> None:
    """flax.nnx.jit, for example, whose trace is not JAX's."""

    class Jitted:
        def __call__(self, x: jax.Array) -> jax.Array:
            return x

        def lower(self, x: jax.Array) -> None: ...

        def trace(self, x: jax.Array) -> object:
            return object()

        def eval_shape(self, x: jax.Array) -> None: ...

    with pytest.raises(TypeError, match=r"Jitted, whose trace has no jaxpr"):
        jax_intranode.explain(Jitted())(jnp.ones(3))


def test_tree_of_several_operations() -> None:
    with forced("one_shot"):
        calls = explained(many)
    n = definitions.MAX_BUFFERS
    assert [(len(call.shapes), call.dtype) for call in calls] == [(n, "float32"), (1, "float32")]


# Where a collective comes from.


def origins(f: Any, *args: Any) -> list[tuple[str, str]]:
    return [(call.operation, call.origin) for call in explain(f)(*args)]


def test_origin_of_calls() -> None:
    assert origins(over_x(mixed), X) == [
        ("psum", "jax_intranode"),
        ("psum", "jax.lax"),
        ("psum", "jax_intranode"),
        ("pmean", "jax_intranode"),
    ]
    assert {call.origin for call in explain(over_x(others))(X)} == {"jax.lax"}
    assert [call.origin for call in explain(over_x(mixed))(X).own] == ["jax_intranode"] * 3
    with jax_intranode.accelerate():
        found = explain(over_x(mixed))(X)
    assert Counter(call.origin for call in found) == {"jax_intranode": 3, "jax.lax": 1}
    (replaced,) = [call for call in found if call.origin == "jax.lax"]
    assert replaced.algorithm != "lax"


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_sums_that_jax_inserts(check_vma: bool, enabled: bool) -> None:
    """The gradient of an operand that all ranks share is a sum that nobody called for."""

    def body(v: Any, w: Any) -> Any:
        product = v * w
        return lax.psum(product.sum(), "x")

    f = sharded(body, line(), (P("x"), P()), P(), check_vma)
    with rewriting(enabled):
        calls = explain(jax.value_and_grad(f, argnums=1))(X, jnp.ones(4 * N))
    inserted = [call for call in calls if call.origin == "inserted by JAX"]
    assert [(call.operation, call.algorithm != "lax") for call in inserted] == [("psum", enabled)]
    assert all(call.origin in ("jax.lax", "inserted by JAX") for call in calls)
    first = body.__code__.co_firstlineno
    if check_vma:  # the line where the operand met one that differs between ranks
        assert inserted[0].source == f"{__file__}:{first + 1} (body)"
    forward = next(call for call in calls if call.origin == "jax.lax")
    assert forward.source == f"{__file__}:{first + 2} (body)"


# What became of a collective, and why it was left.


def test_merged_sums_name_all_sources() -> None:
    def body(v: Any) -> Any:
        a = lax.psum(v, "x")
        b = lax.psum(v * 2, "x")
        return a * lax.psum(v * 3, "x") + b

    first = body.__code__.co_firstlineno
    with jax_intranode.accelerate():
        found = explain(over_x(body))(X)
    (call,) = found
    assert call.sources == tuple(f"{__file__}:{first + k} (body)" for k in (1, 2, 3))
    assert call.source == call.sources[0]
    assert call.shapes == ((1, 4 * N),) * 3 and call.origin == "jax.lax"
    assert f"test_explain.py:{first + 1} (body) and 2 more" in str(found)


def test_collective_matmuls_have_the_source_of_the_collective() -> None:
    def forward(x: Any, w: Any) -> Any:
        gathered = lax.all_gather(x, "x", tiled=True)
        return gathered @ w

    def loss(x: Any, w: Any) -> Any:
        def local(x: Any) -> Any:
            return (jnp.sin(x) @ w).sum()

        return jax.grad(local)(x)

    columns = jnp.ones((4, 4 * N))
    gather = sharded(forward, line(), (P("x"), P(None, "x")), P(None, "x"))
    # The gradient of a replicated x is a sum that JAX inserts. Here it follows a matmul.
    inserted = sharded(loss, line(), (P(), P(None, "x")), P(), check_vma=True)
    with (
        mock.patch.object(Body, "is_overlapped", lambda *_, **__: True),
        jax_intranode.accelerate(),
    ):
        (gathered,) = explain(gather)(jnp.ones((2 * N, 4)), columns)
        (summed,) = explain(inserted)(jnp.ones((2, 4)), columns)
    assert (gathered.operation, gathered.origin) == ("all_gather_matmul", "jax.lax")
    assert gathered.source == f"{__file__}:{forward.__code__.co_firstlineno + 1} (forward)"
    assert (summed.operation, summed.origin) == ("matmul_all_reduce", "inserted by JAX")


def test_reasons() -> None:
    with jax_intranode.accelerate():
        calls = explained(left)
        (nested, *_) = explained(OF_LAX["solved"])
        kinds = explained(others)
        (other,) = explained(lambda v: lax.pbroadcast(v, "x", 0))
    assert [call.algorithm for call in calls] == ["lax"] * 3
    dtype, groups, size = (call.reason for call in calls)
    assert dtype.startswith("dtype complex64; supported are")
    assert groups == "axis_index_groups"
    assert "faster than lax" in size
    assert nested.algorithm == "lax"
    assert nested.reason == "inside custom_linear_solve, where nothing is rewritten"
    assert other.reason == "pbroadcast is not one of the kinds that this package accelerates"
    # What runs pmax and pmin depends on what was measured.
    chosen = {call.operation: call.algorithm for call in kinds if call.operation[:2] != "pm"}
    assert chosen == {"ppermute": "permute", "all_to_all": "all_to_all"}
    assert {call.reason for call in explained(left)} == {NOT_ENABLED}


# The compiled program.


def partitioned() -> tuple[Any, tuple[Any, ...]]:
    """A program with a collective of each kind of origin, and its arguments."""
    mesh = line()
    body = sharded(
        lambda v: jax_intranode.psum(v, "x") + lax.psum(v * 2, "x"), mesh, P("x"), P("x")
    )

    def f(v: Any, a: Any, b: Any) -> Any:
        # The contracted dimension is sharded: XLA's partitioner adds an all-reduce.
        product = lax.with_sharding_constraint(a @ b, NamedSharding(mesh, P()))
        return body(v), product

    def argument(spec: Any) -> Any:
        return jax.device_put(np.ones((N, N), np.float32), NamedSharding(mesh, spec))

    return f, (argument(P("x")), argument(P(None, "x")), argument(P("x")))


def test_what_the_partitioner_adds() -> None:
    f, args = partitioned()
    found = explain(f, compiled=True)(*args)
    assert [call.origin for call in found] == ["jax_intranode", "jax.lax"]
    assert found.added == {"all-reduce": 1}
    assert found.compiled == {"all-reduce": 2, "jax_intranode_psum": 1}
    assert str(found).splitlines()[-2:] == [
        "in the compiled program: 2 all-reduce, 1 jax_intranode_psum",
        "added by XLA's partitioner: 1 all-reduce",
    ]
    with jax_intranode.accelerate():
        found = explain(jax.jit(f), compiled=True)(*args)
    assert found.added == {"all-reduce": 1}
    assert found.compiled == {"all-reduce": 1, "jax_intranode_psum": 2}


def test_nothing_is_added_to_a_manual_program() -> None:
    """XLA merges the all-reduces of a tree; that is no addition."""
    found = explain(over_x(tree), compiled=True)(X)
    assert found.added == {}
    assert str(found).endswith("added by XLA's partitioner: none")
    assert "all-reduce" in (found.compiled or {})


HLO_OF_GPUS = """
%wrapped_reduce_scatter (p: f32[8]) -> f32[4] {
  ROOT %rs = f32[4]{0} reduce-scatter(%p), channel_id=3, dimensions={0}
}
ENTRY %main {
  %ar = (f32[4]{0}, f32[2]{0}) all-reduce-start(%a, %b), channel_id=1
  %ard = (f32[4]{0}, f32[2]{0}) all-reduce-done(%ar)
  %s = ((f32[8]), f32[4]) async-start(%d), calls=%wrapped_reduce_scatter
  %ag = (f32[4]{0}, f32[8]{0}) all-gather-start(%c), channel_id=2
  %a2a = (f32[2], f32[2], /*index=2*/f32[2]) all-to-all(%e, %f, /*index=2*/%g), channel_id=4
  %cp = f32[4]{0} collective-permute(%h), source_target_pairs={{0,1}}
  %cc = (f32[4]) custom-call(%i), custom_call_target="jax_intranode_psum", operand_layout
  %other = (f32[4]) custom-call(%i), custom_call_target="cublas", metadata={op_name="all-reduce"}
}
"""


def test_counts_in_hlo() -> None:
    assert hlo.in_compiled(HLO_OF_GPUS) == {
        "all-reduce": 2,
        "reduce-scatter": 1,
        "all-gather": 1,
        "all-to-all": 1,
        "collective-permute": 1,
        "jax_intranode_psum": 1,
    }


# The line that each compilation logs.


def test_line_names_the_program(caplog: pytest.LogCaptureFixture) -> None:
    jax_intranode.install()

    @jax.jit
    def step(v: Any) -> Any:
        return over_x(lambda u: lax.psum(u, "x") + lax.psum(u.astype(jnp.complex64), "x").real)(v)

    with caplog.at_level(logging.INFO, "jax_intranode"):
        step.lower(X)
        step.lower(X)  # JAX finds it in its cache
    lines = [r.getMessage() for r in caplog.records if "Lowered" in r.getMessage()]
    assert lines == ["Lowered jit_step: 1 collectives of jax.lax replaced, 1 left."]
