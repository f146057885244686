"""The operations of the cases, and their right results.

The data are small integers, so that each result has one right value. They depend on the rank and on
the turn, so that an old value is a wrong one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_intranode
from jax_intranode._src.selection.overlap.plan import Plan

_FUSED, _PIPELINE = Plan(tile_columns=128), Plan(tile_columns=0)
# x of each rank has as many rows, times the number of ranks.
_ROWS, _COLUMNS = 16, 16
_W = np.random.default_rng(0).integers(-1, 2, (_COLUMNS, _COLUMNS)).astype(np.float32)


@dataclass(frozen=True)
class Operation:
    """An operation."""

    run: Callable[[Any, str], Any]  # of a rank's array [rows, columns] and the name of the axis
    expected: Callable[[np.ndarray, int], np.ndarray]  # of all ranks' arrays and a rank
    unedited: bool = False  # `run` calls `jax.lax`, and is to be accelerated
    plan: Plan | None = None  # how its matmul, if it has one, is overlapped on GPUs


def data(rank: int, world: int, turn: int) -> np.ndarray:
    """Returns a rank's array of a turn."""
    generator = np.random.default_rng((rank, turn))
    return generator.integers(-1, 2, (_ROWS * world, _COLUMNS)).astype(np.float32)


def _w(x: Any) -> Any:
    return jnp.asarray(_W, x.dtype)


def _part(total: np.ndarray, rank: int) -> np.ndarray:
    return total.reshape(-1, _ROWS, total.shape[-1])[rank]


def _gradient(x: Any, axis: str) -> Any:
    """The gradient of the sum of a product's absolute values."""

    def product(v: Any) -> Any:
        return jax_intranode.all_gather_matmul(v, _w(v), axis)

    y, transpose = jax.vjp(product, x[:_ROWS])
    return transpose(jnp.sign(y))[0]


def _expected_gradient(xs: np.ndarray, rank: int) -> np.ndarray:
    # Each rank has the whole product, so each contributes.
    return len(xs) * (np.sign(xs[rank][:_ROWS] @ _W) @ _W.T)


def _collective(name: str) -> Operation:
    def run(x: Any, axis: str) -> Any:
        return cases.apply(name, x.reshape(-1), axis).reshape(-1, _COLUMNS)

    def expected(xs: np.ndarray, rank: int) -> np.ndarray:
        return cases.reference(name, xs.reshape(len(xs), -1))[rank].reshape(-1, _COLUMNS)

    return Operation(run, expected)


OPERATIONS: dict[str, Operation] = {
    # In a permute a rank waits for its source only.
    **{name: _collective(name) for name in cases.OPERATIONS if name != "ppermute"},
    "all_gather_matmul": Operation(
        lambda x, axis: jax_intranode.all_gather_matmul(x[:_ROWS], _w(x), axis),
        lambda xs, _: np.concatenate([x[:_ROWS] for x in xs]) @ _W,
        plan=_FUSED,
    ),
    "matmul_reduce_scatter": Operation(
        lambda x, axis: jax_intranode.matmul_reduce_scatter(x, _w(x), axis),
        lambda xs, rank: _part(xs.sum(0) @ _W, rank),
        plan=_FUSED,
    ),
    "matmul_all_reduce": Operation(
        lambda x, axis: jax_intranode.matmul_all_reduce(x, _w(x), axis),
        lambda xs, _: xs.sum(0) @ _W,
        plan=_PIPELINE,
    ),
    "gradient": Operation(_gradient, _expected_gradient, plan=_PIPELINE),
    "unedited": Operation(
        lambda x, axis: lax.psum(x, axis), lambda xs, _: xs.sum(0), unedited=True
    ),
}
