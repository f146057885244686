"""The collectives with the bits that ours must have, made of `jax.lax.all_gather`.

Sums start from rank 0's value and add the others' in rank order, in float32 (float64 for float64,
integers in their own type), and round once. Their gradients are those of `check_vma=False`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _sum(parts: Any) -> Any:
    """The sum over the first axis."""
    dtype = parts.dtype
    wide = jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    return total.astype(dtype)


def _linear(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A linear function of an array and axes, and its transpose."""

    def function(x: Any, axes: Any) -> Any:
        f = jax.custom_vjp(lambda v: forward(v, axes))
        f.defvjp(lambda v: (forward(v, axes), None), lambda _, ct: (backward(ct, axes),))
        return f(x)

    return function


def _psum(x: Any, axes: Any) -> Any:
    return _sum(lax.all_gather(x, axes))


def _psum_scatter(x: Any, axes: Any) -> Any:
    """Untiled, over dimension 0."""
    return _psum(x, axes)[lax.axis_index(axes)]


_sum_of_all = _linear(_psum, _psum)
_scatter = _linear(_psum_scatter, lambda ct, axes: lax.all_gather(ct, axes))
_gather = _linear(lambda x, axes: lax.all_gather(x, axes), _psum_scatter)


def _parts_for_this_rank(x: Any, axes: Any) -> Any:
    """Untiled, over dimension 0. It is its own transpose."""
    return lax.all_gather(x, axes)[:, lax.axis_index(axes)]


_exchange = _linear(_parts_for_this_rank, _parts_for_this_rank)


def psum(x: Any, axes: Any) -> Any:
    """As `jax.lax.psum`."""
    return jax.tree.map(lambda leaf: _sum_of_all(leaf, axes), x)


def pmean(x: Any, axes: Any) -> Any:
    """As `jax.lax.pmean`."""
    return jax.tree.map(lambda leaf: leaf / lax.axis_size(axes), psum(x, axes))


def psum_scatter(x: Any, axes: Any, *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """As `jax.lax.psum_scatter`."""
    n, d = lax.axis_size(axes), scatter_dimension
    if tiled:
        x = x.reshape(*x.shape[:d], n, x.shape[d] // n, *x.shape[d + 1 :])
    return _scatter(jnp.moveaxis(x, d, 0), axes)


def all_gather(x: Any, axes: Any, *, axis: int = 0, tiled: bool = False) -> Any:
    """As `jax.lax.all_gather`."""
    y = jnp.moveaxis(_gather(x, axes), 0, axis)
    if tiled:
        y = y.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
    return y


def all_to_all(x: Any, axes: Any, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Any:
    """As `jax.lax.all_to_all`."""
    n, d = lax.axis_size(axes), split_axis
    if tiled:
        x = x.reshape(*x.shape[:d], n, x.shape[d] // n, *x.shape[d + 1 :])
    y = jnp.moveaxis(_exchange(jnp.moveaxis(x, d, 0), axes), 0, concat_axis)
    if tiled:
        y = y.reshape(*y.shape[:concat_axis], -1, *y.shape[concat_axis + 2 :])
    return y
