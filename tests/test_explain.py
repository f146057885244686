"""explain: its report of programs, and that their HLO holds what it reports."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import forced, line, make_mesh, selection
from devices import need_devices
from explained_programs import HALVES, N, X, check_report, programs
from jax import lax
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
from jax_intranode._src.native import definitions
from jax_intranode._src.selection import config


@pytest.fixture(autouse=True)
def two_devices() -> None:
    need_devices(2)


def over_x(body: Callable[..., Any], *, check_vma: bool = False, **kwargs: Any) -> Any:
    """A function of one array, of which each device has a shard."""
    return jax.shard_map(
        body, mesh=line(), in_specs=P("x"), out_specs=P("x"), check_vma=check_vma, **kwargs
    )


def explained(body: Callable[..., Any], **kwargs: Any) -> tuple[Call, ...]:
    return explain(over_x(body, **kwargs))(X).calls


def summary(calls: Any) -> list[tuple[Any, ...]]:
    return [(call.operation, call.algorithm, call.times) for call in calls]


# Reports and lowered programs.


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


SHARED = programs(jax_intranode)
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    **SHARED,
    "by_platform": by_platform,
    "many": many,
    "fallbacks": fallbacks,
    "large": large,
    "mapped": mapped,
}
# With every algorithm in the quick tier: others only multiply what "auto" shows.
QUICK = ("many", "parts", "fallbacks", "large")


@pytest.mark.parametrize(
    ("name", "grad", "algorithm"),
    [
        pytest.param(
            *(name, grad, algorithm),
            marks=[pytest.mark.full] * (algorithm != "auto" and name not in QUICK),
        )
        for algorithm in ("auto", "one_shot", "two_shot", "lax")
        for name in PROGRAMS
        for grad in ((False,) if name == "loops" else (False, True))  # it has no transpose
    ],
)
def test_program_holds_what_explain_reports(name: str, grad: bool, algorithm: str) -> None:
    with forced(algorithm):
        check_report(over_x(PROGRAMS[name]), grad)


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
    lines = str(found).splitlines()
    assert len(lines) == 8
    for title, cells in {
        "operation": ["psum", "all_gather"],
        "operands": [f"float32[1,{4 * N}] ... (3 arrays)", f"int8[1,{4 * N}]"],
        "axes": ["x", "x"],
        "ranks": [str(N), str(N)],
        "algorithm": ["one_shot", "all_gather"],
        "launch": [f"{call.blocks}x{call.threads}" for call in found],
        "times": ["1", "1"],
        "origin": ["jax_intranode", "jax_intranode"],
    }.items():
        column = lines[0].index(title)
        assert [re.split(r"  |$", line[column:])[0] for line in lines[1:7:3]] == cells
    for call, source, reason in zip(found, lines[2:7:3], lines[3:7:3], strict=True):
        assert source == f"    {call.source.removeprefix(os.getcwd() + os.sep)}"
        assert reason == f"    {call.reason}"
    assert lines[7] == f"groups over x: {list(range(N))}"
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
    calls = explained(SHARED["loops"])
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
    assert " ?  " in str(explain(over_x(SHARED["loops"]))(X)).splitlines()[7]


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
