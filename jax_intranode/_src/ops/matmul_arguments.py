"""The arguments of collective matmuls: checks, and why jax.lax runs a call."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.ops import collective, fallback
from jax_intranode._src.selection import select


def axes_of(axis_name: Any) -> tuple[Any, ...]:
    """The names of the mapped axes."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def operands(operation: str, x: Any, w: Any, lists: bool = False) -> tuple[Any, list[Any]]:
    """x and the matrices as arrays.

    Args:
        operation: the public function, for messages.
        x: its argument.
        w: its argument.
        lists: whether w may be a list of matrices.

    Raises:
        TypeError, ValueError: they can't be multiplied.
    """

    def array(name: str, value: Any, wanted: str) -> Any:
        cause = None
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            try:
                return jnp.asarray(value)
            except TypeError as error:
                cause = error
        kind = type(value).__name__
        raise TypeError(f"{operation}: {name} is a {kind}; pass {wanted}") from cause

    x = array("x", x, "an array")
    several = lists and isinstance(w, (list, tuple))
    if several and not w:
        raise ValueError(f"{operation}: w is an empty list; pass at least one matrix")
    names = [f"w[{k}]" for k in range(len(w))] if several else ["w"]
    wanted = "an array or a list of arrays" if lists and not several else "an array"
    ws = [array(n, v, wanted) for n, v in zip(names, w if several else [w], strict=True)]
    if x.ndim < 2:
        raise ValueError(
            f"{operation}: x has the shape {x.shape}; it needs 2 dimensions or more, the last of "
            "them contracted with w"
        )
    for name, matrix in zip(names, ws, strict=True):
        if matrix.ndim != 2:
            raise ValueError(
                f"{operation}: {name} has the shape {matrix.shape}; pass a matrix of 2 dimensions"
            )
        if matrix.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{operation}: the last dimension of x, of shape {x.shape}, is not the first of "
                f"{name}, of shape {matrix.shape}; they must be equal, as they are contracted"
            )
        if matrix.dtype != x.dtype:
            raise TypeError(
                f"{operation}: x is {x.dtype}, {name} is {matrix.dtype}; cast one of them "
                "(preferred_element_type sets the result's dtype)"
            )
    return x, ws


def result_dtype(operation: str, x: Any, preferred_element_type: Any) -> np.dtype[Any]:
    """The dtype of the products.

    Raises:
        TypeError: `preferred_element_type` is no dtype, or of another kind than the operands'.
    """
    if preferred_element_type is None:
        return np.dtype(x.dtype)
    try:
        # As arrays have it: without jax_enable_x64, float64 is float32.
        preferred = jax.eval_shape(lambda: jnp.zeros((), preferred_element_type)).dtype
    except TypeError as error:
        raise TypeError(
            f"{operation}: preferred_element_type is {preferred_element_type!r}; pass a dtype"
        ) from error
    kinds = (jnp.floating, jnp.complexfloating, jnp.integer)
    if not any(jnp.issubdtype(x.dtype, k) and jnp.issubdtype(preferred, k) for k in kinds):
        raise TypeError(
            f"{operation}: preferred_element_type is {preferred}, and the operands are {x.dtype}; "
            "take a dtype of their kind, or cast the result"
        )
    return np.dtype(preferred)


def dimension(operation: str, name: str, value: Any, rank: int) -> int:
    """A dimension of an array, counted from the first.

    Raises:
        TypeError: it is no integer.
        ValueError: there is no such dimension.
    """
    value = collective.integer(operation, name, value)
    if not -rank <= value < rank:
        raise ValueError(
            f"{operation}: {name} is {value}; with {rank} dimensions it must be from {-rank} "
            f"to {rank - 1}"
        )
    return value % rank


def world_size(operation: str, axes: tuple[Hashable, ...]) -> int:
    """The number of ranks over the axes.

    Raises:
        NameError: an axis is not bound.
    """
    with fallback.to_lax(operation, "an axis that is not bound", logged=False):
        return int(lax.psum(1, axes))


def reason_for_lax(
    collective_operation: str,
    axes: tuple[Hashable, ...],
    operands: Sequence[Any],
    communicated: Sequence[Any],
    dtype: np.dtype[Any],
) -> str | None:
    """Why lax runs the collective of a collective matmul, or None if it may be accelerated.

    Args:
        collective_operation: "psum", "psum_scatter" or "all_gather".
        axes: the axes.
        operands: x and the matrices.
        communicated: the operands from which the gathered or summed array is computed.
        dtype: the dtype of that array.
    """
    reason = fallback.reason_of_axes(axes)
    if reason is not None:
        return reason
    if not any(isinstance(v, jax.core.Tracer) for v in communicated):
        return "a constant"
    if not all(isinstance(jax.typeof(v), ShapedArray) for v in operands):
        return "not an array"
    if any(axis is not None for v in operands for axis in jax.typeof(v).sharding.spec):
        return "an operand sharded over explicit axes of the mesh"
    reason = fallback.reason_of_types(operands, communicated, axes)
    return reason or select.unsupported_dtype(collective_operation, dtype.name)


def varying_alike(operands: Sequence[Any], axes: tuple[Hashable, ...]) -> list[Any]:
    """The operands, cast to vary over the axes and over all that any of them varies over.

    The transpose of the cast is a psum: the gradient of a replicated matrix is the sum of all
    ranks' gradients. If all operands have weak types they are cast to strong ones too, because our
    primitives' gradients are strong; the transpose of that cast makes them weak again.
    """
    over = set(axes).union(*(jax.typeof(v).manual_axis_type.varying for v in operands))
    if all(jax.typeof(v).weak_type for v in operands):
        operands = [trace_state.with_weak_type(v, False) for v in operands]
    return [collective.varying(v, sorted(over, key=str)) for v in operands]


def weak_as_laxs(operands: Sequence[Any], preferred_element_type: Any, result: Any) -> Any:
    """The result, weakly typed where lax's would be: where all operands are."""
    if preferred_element_type is None and all(jax.typeof(v).weak_type for v in operands):
        return trace_state.with_weak_type(result, True)
    return result
