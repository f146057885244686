"""Programs made by hypothesis have the same results rewritten and untouched.

They compose collectives, matmuls, control flow, gradients, checkpoint and vmap.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_mesh, sharded
from devices import need_devices
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_intranode

N = len(jax.devices())
ROWS, COLUMNS = 2, 2 * N  # of a device

Step = Callable[[Any], Any]


def _scale(v: Any) -> Any:
    """Keeps values near 1, so that rounding errors stay small."""
    return v / (1 + jnp.max(jnp.abs(v)))


# Steps: functions of a device's array [ROWS, COLUMNS] to an array of the same shape.


def _collectives(axes: Any) -> list[Step]:
    def tree(v: Any) -> Any:
        return sum(jax.tree.map(lambda leaf: lax.pmean(leaf, axes), [v, v * 2, jnp.sin(v)]))

    def gather(v: Any) -> Any:
        return lax.all_gather(v, axes).sum(0)

    def gather_tiled(v: Any) -> Any:
        return lax.all_gather(v, axes, axis=1, tiled=True)[:, :COLUMNS]

    def scatter(v: Any) -> Any:
        size = lax.axis_size(axes)
        part = lax.psum_scatter(v, axes, scatter_dimension=1, tiled=True)
        return jnp.tile(part, (1, size))

    def casted(v: Any) -> Any:
        return lax.psum(v.astype(jnp.bfloat16).astype(jnp.float32), axes)

    def barrier(v: Any) -> Any:
        a = lax.psum(v, axes)
        return a + lax.psum(lax.optimization_barrier(v) * 2, axes)

    return [
        lambda v: lax.psum(v, axes),
        lambda v: lax.pmean(v, axes),
        lambda v: lax.pmax(lax.stop_gradient(v), axes) + v,
        tree,
        gather,
        gather_tiled,
        scatter,
        casted,
        barrier,
    ]


LOCAL: list[Step] = [
    jnp.sin,
    lambda v: v * lax.axis_index("x"),
    lambda v: v @ jnp.ones((COLUMNS, COLUMNS)),
]

AXES = ["x", "y", ("x", "y"), ("y", "x")]
LEAVES: list[Step] = [step for axes in AXES for step in _collectives(axes)] + LOCAL


def _sequence(steps: list[Step]) -> Step:
    def run(v: Any) -> Any:
        for step in steps:
            v = _scale(step(v))
        return v

    return run


def _both(steps: list[Step]) -> Step:
    """Independent branches, whose sums may be merged."""
    return lambda v: sum(step(v) for step in steps)


WRAPPERS: list[Callable[[Step], Step]] = [
    jax.jit,
    jax.checkpoint,
    lambda f: lambda v: lax.scan(lambda c, _: (f(c), c.sum()), v, None, length=2)[0],
    lambda f: lambda v: lax.cond(lax.psum(v.sum(), ("x", "y")) > 0, f, lambda u: u * 2, v),
    lambda f: lambda v: lax.fori_loop(0, 2, lambda _, c: f(c), v),
    lambda f: lambda v: jax.vmap(f)(jnp.stack([v, v * 2])).sum(0),
    lambda f: lambda v: jax.grad(lambda u: f(u).sum())(v),
]


def programs() -> st.SearchStrategy[Step]:
    leaves = st.sampled_from(LEAVES)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=4).map(_sequence),
            st.lists(inner, min_size=2, max_size=3).map(_both),
            st.tuples(st.sampled_from(WRAPPERS), inner).map(lambda pair: pair[0](pair[1])),
        ),
        max_leaves=6,
    )


def check(program: Step) -> None:
    need_devices(2)
    mesh = make_mesh((2, N // 2), ("x", "y")) if N > 2 else make_mesh((2, 1), ("x", "y"))
    f = sharded(lambda v: _scale(program(v)), mesh, P(("x", "y")), P(("x", "y")))
    x = jax.random.normal(jax.random.key(0), (mesh.size * ROWS, COLUMNS))
    wanted = np.asarray(jax.jit(f)(x))
    with jax_intranode.accelerate():
        found = np.asarray(jax.jit(f)(x))
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)


def _settings(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


@_settings(12)
@given(programs())
def test_made_programs(program: Step) -> None:
    check(program)


@pytest.mark.full
@_settings(300)
@given(programs())
def test_many_made_programs(program: Step) -> None:
    check(program)
