"""Permutes, maxima and minima in unedited programs: what is merged, and what stays lax's."""

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
from test_rewriting import N, names, normal, rewritten

import jax_intranode
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.rewrite import collectives, sums
from jax_intranode._src.rewrite.collectives import Body
from jax_intranode._src.selection import table

FORTH = shift(N)
BACK = [(d, s) for s, d in FORTH]
X = normal(N, 8)


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
    return sharded(body, line(), P("x"), P("x"))


def counts(body: Callable[..., Any], *args: Any) -> dict[str, list[int]]:
    """How many arrays our operations take in a rewritten body; the bits are those of lax."""
    f = mapped(body)
    _, after, _ = rewritten(f, *args)
    wanted = jax.jit(f)(*args)
    with jax_intranode.accelerate():
        found = jax.jit(f)(*args)
    for w, v in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(w, v, strict=True)
    taken: dict[str, list[int]] = {}
    for equation in after.eqns:
        if (name := equation.primitive.name).startswith("intranode_"):
            taken.setdefault(name.removeprefix("intranode_"), []).append(len(equation.invars))
    return {name: sorted(of_name) for name, of_name in taken.items()}


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
    mesh = make_mesh((2, 2, 2), ("x", "y", "z"))

    def body(v: Any) -> Any:
        halos = []
        for axis in ("x", "y", "z"):
            halos += [lax.ppermute(v, axis, [(0, 1)]), lax.ppermute(v * 2, axis, [(1, 0)])]
        return sum(halos)

    f = sharded(body, mesh, P(("x", "y", "z")), P(("x", "y", "z")))
    x = normal(8, 4)
    _, after, _ = rewritten(f, x)
    assert names(after) == ["intranode_ppermute"] * 3
    wanted = jax.jit(f)(x)
    with jax_intranode.accelerate():
        np.testing.assert_array_equal(jax.jit(f)(x), wanted)


@pytest.mark.parametrize("reduce", [lax.pmax, lax.pmin])
def test_an_extreme_of_a_product_is_no_sum(reduce: Any) -> None:
    def body(a: Any) -> Any:
        b = jnp.ones((8, 8), a.dtype)
        return reduce(a @ b, "x"), lax.psum(a @ (b + 1), "x")

    with mock.patch.object(Body, "is_overlapped", lambda *_, **__: True):
        _, after, _ = rewritten(mapped(body), X)
    assert sorted(names(after)) == sorted(
        ["intranode_matmul_all_reduce", f"intranode_{reduce.__name__}"]
    )


def test_a_permute_that_xla_can_overlap_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def ring(v: Any) -> Any:
        return lax.ppermute(v, "x", FORTH), v @ v.T

    def dependent(v: Any) -> Any:
        return lax.ppermute(v, "x", FORTH) @ v.T

    large = jax.ShapeDtypeStruct((N * 513, 512), jnp.float32)  # more than 1 MiB on each device
    small = jax.ShapeDtypeStruct((N * 8, 8), jnp.float32)
    monkeypatch.setattr(sums, "_on_gpus", lambda body: True)
    with mock.patch.object(collectives, "_reason_of_selection", return_value=None):
        for body, operand, left in (
            (ring, large, True),
            (ring, small, False),
            (dependent, large, False),
        ):
            _, after, found = rewritten(mapped(body), operand)
            assert names(after) == (["ppermute"] if left else ["intranode_ppermute"])
            reasons = [why for _, why in found.decisions.values()]
            assert reasons == (["XLA can overlap it with the matmuls after it"] if left else [None])
