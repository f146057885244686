"""Sums, permutes, maxima and minima: what is one operation, in which order, and what is lax's."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, make_mesh, sharded, shift
from devices import need_devices
from jax import lax
from jax.sharding import PartitionSpec as P
from test_rewriting import N, names, normal, reasons, rewritten

import jax_intranode
from jax_intranode._src.jax_private import lax_collectives
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.rewrite import collectives, sums
from jax_intranode._src.selection import table

FORTH = shift(N)
BACK = [(d, s) for s, d in FORTH]
X = jnp.round(4 * normal(N, 8))  # sums of integers are exact in any order


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maxima and minima have rows of their own; those of psum would not replace them."""
    for key, rows in list(table.TABLE.items()):
        if key[2] == "psum":
            for name in ("pmax", "pmin"):
                own = [(RECORDS[name].by_protocol(row.algorithm), row) for row in rows]
                found = tuple(dataclasses.replace(row, algorithm=a) for a, row in own if a)
                monkeypatch.setitem(table.TABLE, (*key[:2], name, *key[3:]), found)


def mapped(body: Callable[..., Any]) -> Callable[..., Any]:
    need_devices(2)
    return sharded(body, line(), P("x"), P("x"), check_vma=False)


def counts(body: Callable[..., Any], *args: Any, mesh: Any = None) -> dict[str, list[int]]:
    """How many arrays our operations take in a rewritten body; the bits are those of lax."""
    specs = P((mesh or line()).axis_names)
    f = sharded(body, mesh or line(), specs, specs, check_vma=False)
    _, after, _ = rewritten(f, *args)
    taken: dict[str, list[int]] = {}
    for equation in after.eqns:
        if (name := equation.primitive.name).startswith("intranode_"):
            taken.setdefault(name.removeprefix("intranode_"), []).append(len(equation.invars))
    wanted = jax.jit(f)(*args)
    with jax_intranode.accelerate():
        found = jax.jit(f)(*args)
    for w, v in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(w, v, strict=True)
    return {name: sorted(of_name) for name, of_name in taken.items()}


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


def sums_that_need_each_other(v: Any) -> Any:
    """float32 -> int32 and int32 -> float32: merging both pairs would be a circle."""
    a = lax.psum(v, "x")
    c = lax.psum(v.astype(jnp.int32), "x")
    b = lax.psum(a.astype(jnp.int32), "x")
    d = lax.psum(c.astype(jnp.float32), "x")
    return a, b, c, d


def halos(v: Any) -> Any:
    before = lax.ppermute(v[:, -1:], "x", FORTH)
    after = lax.ppermute(v[:, :2], "x", BACK[:-1])  # of other sizes, and partial
    return jnp.concatenate([before, v, after], 1) * 2


def chains(v: Any) -> Any:
    w = lax.ppermute(v.astype(jnp.int16), "x", FORTH)
    a, b = v, v * 2
    for _ in range(2):
        a, b = lax.ppermute(a, "x", FORTH) + v, lax.ppermute(b, "x", BACK) * v
    return a, b, w


def of_each_kind(v: Any) -> Any:
    tree = [v * k for k in range(3)]
    top = lax.pmax(tree, "x"), lax.pmax(v - 1, "x")
    return top, lax.pmin(tree, "x"), lax.psum(jnp.round(v), "x")


def of_vocabulary(v: Any) -> Any:
    """The place of the largest logit, as a softmax over a sharded vocabulary finds it."""
    top = lax.pmax(lax.stop_gradient(v.max(-1)), "x")
    return top, lax.pmin(jnp.where(v[:, 0] == top, lax.axis_index("x"), N), "x")


def of_keys(send: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A body that sends PRNG keys."""

    def body(v: Any) -> Any:
        data = jnp.tile(v.astype(jnp.uint32)[0, :2], (N, 1))
        return jax.random.key_data(send(jax.random.wrap_key_data(data)))

    return body


# A body, and how many arrays each of our operations takes.
MERGED: dict[str, tuple[Callable[[Any], Any], dict[str, list[int]]]] = {
    "a tree of means": (tree_of_means, {"psum": [20]}),
    "casts between": (cast_between, {"psum": [3]}),
    "two chains of sums": (two_chains, {"psum": [2, 2, 2]}),
    "a barrier between": (
        lambda v: (lax.psum(v, "x"), lax.psum(lax.optimization_barrier(v) * 2, "x")),
        {"psum": [1, 1]},
    ),
    "a circle of sums": (sums_that_need_each_other, {"psum": [1, 1, 2]}),
    "no elements": (lambda v: lax.psum(v[:, :0], "x").sum() + v, {}),
    "two neighbours": (halos, {"ppermute": [2]}),
    "another dtype, and chains": (chains, {"ppermute": [1, 2, 2]}),
    "more than an operation takes": (
        lambda v: [lax.ppermute(v * k, "x", FORTH if k % 2 else BACK) for k in range(20)],
        {"ppermute": [4, 16]},
    ),
    "by kind": (of_each_kind, {"pmax": [4], "pmin": [3], "psum": [1]}),
    "a vocabulary": (of_vocabulary, {"pmax": [1], "pmin": [1]}),
    "ranks counted from the end": (lambda v: lax.ppermute(v, "x", [(0, -1), (1, 0)]), {}),
    "bools as ranks": (lambda v: lax.ppermute(v, "x", [(True, False)]), {"ppermute": [1]}),
    "keys, sent on": (of_keys(lambda keys: lax.ppermute(keys, "x", FORTH)), {}),
    "keys, gathered": (of_keys(lambda keys: lax.all_gather(keys, "x", tiled=True)), {}),
    "keys, exchanged": (of_keys(lambda keys: lax.all_to_all(keys, "x", 0, 0, tiled=True)), {}),
}


@pytest.mark.parametrize("name", MERGED)
def test_what_becomes_one_operation(name: str) -> None:
    body, wanted = MERGED[name]
    assert counts(body, X) == wanted


def test_halos_of_six_neighbours_become_an_operation_for_each_axis() -> None:
    need_devices(8)

    def body(v: Any) -> Any:
        halos = []
        for axis in ("x", "y", "z"):
            halos += [lax.ppermute(v, axis, [(0, 1)]), lax.ppermute(v * 2, axis, [(1, 0)])]
        return sum(halos)

    mesh = make_mesh((2, 2, 2), ("x", "y", "z"))
    assert counts(body, normal(8, 4), mesh=mesh) == {"ppermute": [2, 2, 2]}


def test_buckets_are_issued_in_the_order_of_opening() -> None:
    """All processes must issue them in one order, also where one equation needs several."""
    dtypes = ["int32", "float32", "bfloat16", "int8", "float16", "uint32", "uint8"]

    def body(v: Any) -> Any:
        found = [lax.psum(v.astype(dtype), "x").astype("float32") for dtype in dtypes]
        return lax.psum(sum(found), "x")

    _, after, _ = rewritten(mapped(body), X)
    issued = [e.invars[0].aval.dtype.name for e in after.eqns if "psum" in e.primitive.name]
    assert issued == [*dtypes, "float32"]


def test_an_effect_stays_in_its_place() -> None:
    seen = []

    def body(v: Any) -> Any:
        a = lax.psum(v, "x")
        jax.debug.callback(lambda w: seen.append(float(w[0, 0])), a)
        return a, lax.psum(v * 2, "x")

    assert counts(body, X) == {"psum": [1, 1]}
    assert len(seen) == 2 * N


def test_a_bucket_that_would_be_too_large() -> None:
    def body(v: Any) -> Any:
        big = jnp.tile(v, (1, 64))  # 2 KB; sums of at most 2 to 4 KB are accelerated on CPUs
        return [lax.psum(big * k, "x") for k in range(8)]

    found = counts(body, X)["psum"]
    assert sum(found) == 8 and (jax.devices()[0].platform == "gpu" or len(found) > 1)


LARGE = jax.ShapeDtypeStruct((N * 513, 512), jnp.float32)  # more than 1 MiB on each device
SMALL = jax.ShapeDtypeStruct((N * 8, 8), jnp.float32)


@pytest.mark.parametrize(
    "send", [lambda v: lax.ppermute(v, "x", FORTH), lambda v: lax.psum(v, "x")]
)
@pytest.mark.parametrize(
    ("is_needed", "operand", "left"),
    [(False, LARGE, True), (False, SMALL, False), (True, LARGE, False)],
)
def test_what_xla_can_overlap_stays(
    send: Any, is_needed: bool, operand: Any, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matmul that does not need what is sent."""

    def body(v: Any) -> Any:
        return send(v) @ v.T if is_needed else (send(v), v @ v.T)

    monkeypatch.setattr(sums, "_on_gpus", lambda body: True)
    with mock.patch.object(collectives, "_reason_of_selection", return_value=None):
        _, after, found = rewritten(mapped(body), operand)
    assert names(after)[0].startswith("intranode_") != left
    assert reasons(found) == (["XLA can overlap it with the matmuls after it"] if left else [None])


def test_what_xla_can_overlap_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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

    before, _, record = rewritten(mapped(body), X)
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
