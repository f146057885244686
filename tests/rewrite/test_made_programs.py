"""Programs made by hypothesis have the same results rewritten and untouched.

They compose collectives, matmuls, control flow, gradients, checkpoint and vmap.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

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
from jax_intranode._src.rewrite.collectives import Body

# A few programs find nothing that the contract does not find.
pytestmark = [pytest.mark.full, pytest.mark.one_version]

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


def _matrix(k: int, rows: int = COLUMNS, columns: int = COLUMNS) -> Any:
    return jnp.sin(jnp.arange(k, k + rows * columns, dtype=jnp.float32)).reshape(rows, columns)


def _matmuls(axes: Any) -> list[Step]:
    """Collectives and matmuls that may become one operation."""

    def layer(v: Any, w: Any = None) -> Any:
        whole = lax.all_gather(v, axes, tiled=True)
        w = _matrix(1) if w is None else w
        hidden = jnp.tanh(whole @ w) * (whole @ (w * 2))
        return lax.psum_scatter(hidden @ jnp.cos(w), axes, tiled=True)

    def heads(v: Any) -> Any:
        whole = lax.all_gather(v, axes)
        q, k = (jnp.einsum("rtf,fhd->rhtd", whole, _matrix(i).reshape(-1, 2, N)) for i in (1, 2))
        mixed = jnp.einsum("rhtd,hdf->rtf", jnp.tanh(q) * k, _matrix(3).reshape(2, N, -1))
        return lax.psum_scatter(mixed, axes)

    def columns(v: Any) -> Any:
        whole = lax.all_gather(v.T, axes, axis=1, tiled=True)
        product = _matrix(4) @ whole
        return lax.psum_scatter(jnp.sin(product), axes, scatter_dimension=1, tiled=True).T

    def rows(v: Any) -> Any:
        return lax.psum(v @ _matrix(5) + jnp.sin(v) @ _matrix(6), axes)

    def casted(v: Any) -> Any:
        whole = lax.all_gather(v, axes, tiled=True).astype(jnp.bfloat16)
        product = whole @ _matrix(7).astype(jnp.bfloat16)
        return lax.psum_scatter(product.astype(jnp.float32) + whole, axes, tiled=True)

    def inner(v: Any) -> Any:
        """The gradients have collectives, too."""
        gradients = jax.grad(lambda u, w: jnp.sin(layer(u, w)).sum(), (0, 1))(v, _matrix(8))
        return gradients[0] + v @ gradients[1]

    return [layer, heads, columns, rows, casted, inner]


LOCAL: list[Step] = [
    jnp.sin,
    lambda v: v * lax.axis_index("x"),
    lambda v: v @ jnp.ones((COLUMNS, COLUMNS)),
]

AXES = ["x", "y", ("x", "y"), ("y", "x")]
MATMULS: list[Step] = [step for axes in AXES for step in _matmuls(axes)]
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


def programs(leaves: list[Step]) -> st.SearchStrategy[Step]:
    return st.recursive(
        st.sampled_from(leaves),
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=4).map(_sequence),
            st.lists(inner, min_size=2, max_size=3).map(_both),
            st.tuples(st.sampled_from(WRAPPERS), inner).map(lambda pair: pair[0](pair[1])),
        ),
        max_leaves=6,
    )


def check(program: Step, tolerance: float = 2e-3) -> None:
    need_devices(2)
    mesh = make_mesh((2, N // 2), ("x", "y")) if N > 2 else make_mesh((2, 1), ("x", "y"))
    f = sharded(lambda v: _scale(program(v)), mesh, P(("x", "y")), P(("x", "y")))
    x = jax.random.normal(jax.random.key(0), (mesh.size * ROWS, COLUMNS))
    wanted = np.asarray(jax.jit(f)(x))
    with jax_intranode.accelerate():
        found = np.asarray(jax.jit(f)(x))
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def _settings(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


@_settings(300)
@given(programs(LEAVES))
def test_made_programs(program: Step) -> None:
    check(program)


@_settings(100)
@given(programs(MATMULS + LEAVES))
def test_made_programs_with_matmuls(program: Step) -> None:
    """On CPU devices no matmul is overlapped, unless the selection is made to say so."""
    with mock.patch.object(Body, "is_overlapped", lambda *_, **__: True):
        check(program, tolerance=2e-2)
