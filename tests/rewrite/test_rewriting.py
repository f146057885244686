"""What is rewritten: each form of each collective, in each jaxpr of a body; and what is left."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, sharded
from devices import need_devices
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.jax_private import jaxpr_walk, lax_collectives, lowering_context
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import BY_PRIMITIVE
from jax_intranode._src.reasons import is_missed
from jax_intranode._src.rewrite.jaxprs import rewrite_shard_map
from jax_intranode._src.selection import table

N = len(jax.devices())


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    need_devices(2)
    yield


def rewritten(f: Callable[..., Any], *args: Any) -> tuple[Any, Any, Any]:
    """The jaxpr of the body of a function's first shard_map before and after, and the `Body`."""
    jaxpr = jax.jit(f).trace(*args).jaxpr
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return rewritten_body(next(e for e in jaxpr.eqns if jaxpr_walk.shard_map_of(e) is not None))


def rewritten_body(equation: Any) -> tuple[Any, Any, Any]:
    """The same, of a shard_map equation."""
    mesh, manual = jaxpr_walk.mesh_of_shard_map(equation.params)
    assert mesh is not None
    platform = lowering_context.device_platform(mesh.devices.flat[0])
    site = LoweringSite(mesh, manual, (platform,))
    return jaxpr_walk.body_of_shard_map(equation.params), *rewrite_shard_map(site, equation.params)


def names(jaxpr: Any) -> list[str]:
    """The names of a jaxpr's collectives in order; our own begin with "intranode_"."""
    return [
        equation.primitive.name
        for equation in jaxpr_walk.equations(jaxpr)
        if equation.primitive in BY_PRIMITIVE
        or lax_collectives.lax_collective(equation) is not None
    ]


def reasons(body: Any) -> list[str | None]:
    return [why for _, why in body.decisions.values()]


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


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


X = normal(N, 4 * N)


def test_what_was_not_measured_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    unmeasured = {
        key: tuple(dataclasses.replace(row, measured=False) for row in rows)
        if key[2] == "all_to_all"
        else rows
        for key, rows in table.TABLE.items()
    }
    monkeypatch.setattr(table, "TABLE", unmeasured)

    def f(lib: Any) -> Any:
        return sharded(lambda v: lib.all_to_all(v, "x", 1, 0, tiled=True), line(), P("x"), P("x"))

    _, after, record = rewritten(f(lax), X)
    assert names(after) == ["all_to_all"]
    (reason,) = reasons(record)
    assert reason is not None and "(not measured)" in reason and not is_missed(reason)
    (call,) = jax_intranode.explain(f(jax_intranode))(X)
    assert call.algorithm == "all_to_all" and "(not measured)" in call.reason


def test_shared_functions_stay_shared_and_the_rest_are_the_same_objects() -> None:
    shared = jax.jit(lambda u: lax.psum(u, "x") * 2)

    def body(v: Any) -> Any:
        return shared(v) + shared(v * 3) + jnp.sin(v)

    f = sharded(body, line(), P("x"), P("x"), check_vma=False)
    before, after, record = rewritten(f, X)
    calls = [e for e in after.eqns if "jaxpr" in e.params]
    assert len(calls) == 2
    assert calls[0].params["jaxpr"] is calls[1].params["jaxpr"]
    kept = [e for e in before.eqns if any(e is other for other in after.eqns)]
    assert len(kept) == len(before.eqns) - 2
    assert reasons(record) == [None]
    with jax_intranode.accelerate():
        text = jax.jit(f).lower(X).as_text()
    assert text.count("custom_call @jax_intranode_psum") == 1


def test_a_body_without_collectives_is_the_same_object() -> None:
    before, after, _ = rewritten(sharded(jnp.sin, line(), P("x"), P("x")), X)
    assert before is after
