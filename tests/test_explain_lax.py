"""explain of collectives of jax.lax: the program's own, JAX's insertions, rewritten and left."""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, sharded
from explained_programs import HALVES, N, X, check_report, programs
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode import Call, explain
from jax_intranode._src.jax_private import hlo
from jax_intranode._src.rewrite.collectives import Body

pytestmark = pytest.mark.usefixtures("not_installed")
NOT_ENABLED = "left to lax; jax_intranode.install() replaces it where that pays"


def over_x(body: Callable[..., Any], *, check_vma: bool = False) -> Any:
    """A function of one array, of which each device has a shard."""
    return sharded(body, line(), P("x"), P("x"), check_vma)


def rewriting(enabled: bool) -> Any:
    return jax_intranode.accelerate() if enabled else contextlib.nullcontext()


# The report is what the lowered program holds.


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


SHARED = programs(lax)
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    **SHARED,
    "tree": tree,
    "others": others,
    "left": left,
    "mixed": mixed,
    "vmapped_name": lambda v: jax.vmap(lambda u: lax.psum(u, ("i", "x")), axis_name="i")(v),
}
# They have no transpose.
NOT_DIFFERENTIABLE = ("loops", "others")


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize(
    ("name", "grad"),
    [
        *((name, False) for name in PROGRAMS),
        *((name, True) for name in PROGRAMS if name not in NOT_DIFFERENTIABLE),
    ],
)
def test_program_holds_what_explain_reports(name: str, grad: bool, enabled: bool) -> None:
    with rewriting(enabled):
        check_report(over_x(PROGRAMS[name]), grad)


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


def explained(body: Callable[..., Any]) -> tuple[Call, ...]:
    return explain(over_x(body))(X).calls


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
    assert f"test_explain_lax.py:{first + 1} (body) and 2 more" in str(found)


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
        (nested, *_) = explained(SHARED["solved"])
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
