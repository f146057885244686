"""Which sums are issued together, and in which order the equations around them come."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import line, sharded
from devices import need_devices
from jax import lax
from jax.sharding import PartitionSpec as P
from test_rewriting import N, check_values, normal, rewritten

from jax_intranode._src.jax_private import lax_collectives
from jax_intranode._src.ops.collective import psum_p
from jax_intranode._src.rewrite import sums


def buckets(body: Callable[..., Any], *args: Any, values: bool = True) -> list[int]:
    """How many arrays each psum of a rewritten body sums; checks the values, too."""
    need_devices(2)
    f = sharded(body, line(), P("x"), P("x"), check_vma=False)
    _, after, _ = rewritten(f, *args)
    defined = set(after.invars)
    for equation in after.eqns:  # nothing is used before it is computed
        assert all(v in defined for v in equation.invars if not hasattr(v, "val")), equation
        defined.update(equation.outvars)
    if values:
        check_values(f, *args)
    return [len(e.invars) for e in after.eqns if e.primitive is psum_p.plain]


X = normal(N, 8)


def tree_of_means(v: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.pmean(leaf, "x"), [v * k for k in range(20)])


def cast_between(v: Any) -> Any:
    found = [lax.psum((v * k).astype(jnp.bfloat16), "x").astype(jnp.float32) for k in range(3)]
    return found[0] * 2, found[1:]


def two_chains(v: Any) -> Any:
    """They are merged step by step."""
    a, b = v, v * 2
    for _ in range(3):
        a, b = lax.pmean(a, "x") + v, lax.pmean(b, "x") * v
    return a, b


def barrier_between(v: Any) -> Any:
    return lax.psum(v, "x"), lax.psum(lax.optimization_barrier(v) * 2, "x")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (tree_of_means, [20]),
        (cast_between, [3]),
        (two_chains, [2, 2, 2]),
        (barrier_between, [1, 1]),
    ],
)
def test_how_many_are_summed_together(body: Any, wanted: list[int]) -> None:
    assert buckets(body, X, values=body is not cast_between) == wanted


def test_buckets_are_issued_in_the_order_of_opening() -> None:
    """All processes must issue them in one order, also where one equation needs several."""
    dtypes = ["int32", "float32", "bfloat16", "int8", "float16", "uint32", "uint8"]

    def body(v: Any) -> Any:
        found = [lax.psum(v.astype(dtype), "x").astype("float32") for dtype in dtypes]
        return lax.psum(sum(found), "x")

    need_devices(2)
    _, after, _ = rewritten(sharded(body, line(), P("x"), P("x"), check_vma=False), X)
    issued = [e.invars[0].aval.dtype.name for e in after.eqns if e.primitive is psum_p.plain]
    assert issued == [*dtypes, "float32"]


def test_buckets_that_need_each_other() -> None:
    """float32 -> int32 and int32 -> float32: merging both pairs would be a circle."""

    def body(v: Any) -> Any:
        a = lax.psum(v, "x")
        c = lax.psum(v.astype(jnp.int32), "x")
        b = lax.psum(a.astype(jnp.int32), "x")
        d = lax.psum(c.astype(jnp.float32), "x")
        return a, b, c, d

    assert sum(buckets(body, X)) == 4


def test_an_effect_stays_in_its_place() -> None:
    seen = []

    def body(v: Any) -> Any:
        a = lax.psum(v, "x")
        jax.debug.callback(lambda w: seen.append(float(w[0, 0])), a)
        return a, lax.psum(v * 2, "x")

    assert buckets(body, X) == [1, 1]
    assert len(seen) == 2 * N


def test_a_bucket_that_would_be_too_large() -> None:
    def body(v: Any) -> Any:
        big = jnp.tile(v, (1, 64))  # 2 KB; sums of at most 2 to 4 KB are accelerated on CPUs
        return [lax.psum(big * k, "x") for k in range(8)]

    found = buckets(body, X)
    assert sum(found) == 8 and (jax.devices()[0].platform == "gpu" or len(found) > 1)


def test_sums_that_xla_can_overlap_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(v: Any) -> Any:
        a = lax.psum(v, "x")
        return a, v @ v.T

    assert buckets(body, X) == [1]  # small
    monkeypatch.setattr(sums, "OVERLAPPED_BYTES", 0)
    monkeypatch.setattr(sums, "_on_gpus", lambda body: True)
    assert buckets(body, X) == []

    def dependent(v: Any) -> Any:
        a = lax.psum(v, "x")
        return a @ v.T

    assert buckets(dependent, X) == [1]


def test_what_xla_can_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sets of all collectives at once say what a search from each of them finds."""
    monkeypatch.setattr(sums, "OVERLAPPED_BYTES", 0)
    monkeypatch.setattr(sums, "_on_gpus", lambda body: True)

    def loss(w: Any, v: Any) -> Any:
        a = lax.psum(v, "x")
        b = lax.all_gather(v @ w, "x", tiled=True)
        c = lax.scan(lambda c, _: (lax.pmean(c @ w, "x"), None), v, None, length=2)[0]
        return ((a @ w) * lax.psum(c, "x")).sum() + lax.pmean(b @ w, "x").sum()

    def body(v: Any) -> Any:
        return jax.grad(loss)(v.T @ v, v) @ v.T

    f = sharded(body, line(), P("x"), P("x"), check_vma=False)
    before, _, record = rewritten(f, X)
    overlap = sums.Overlap(before.eqns, record)
    found = {}
    for position, equation in enumerate(before.eqns):
        if lax_collectives.lax_collective(equation) is None:
            continue
        for start in range(position + 2):
            dependent, wanted = set(equation.outvars), False
            for other in before.eqns[start:]:
                used = {v for v in other.invars if not hasattr(v, "val")}
                if not dependent.isdisjoint(used):
                    dependent.update(other.outvars)
                elif sums.is_heavy(other):
                    wanted = True
            assert overlap.has_matmul(position, start) == wanted
            found[position, start] = wanted
    assert set(found.values()) == {True, False}
