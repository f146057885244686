"""Calls of the matmul functions: their arguments, and why jax.lax runs a call."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.ops import collective, fallback, global_arrays
from jax_intranode._src.selection import select

Params = TypeVar("Params")


def axes_of(axis_name: Any) -> tuple[Any, ...]:
    """The names of the mapped axes."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


@dataclass
class MatmulCall:
    """A call of one of the public functions, with its arguments.

    It raises TypeError or ValueError if the operands can't be multiplied.

    Attributes:
        name: the public function, for messages.
        lists: whether w may be a list of matrices.
        ws: the matrices.
        dtype: dtype of the products.
        axes: the names of the mapped axes.
    """

    name: str
    x: Any
    w: Any
    axis_name: Any
    preferred_element_type: Any
    batch_axes: Any
    mesh: Any
    lists: bool = False
    ws: list[Any] = field(init=False)
    dtype: np.dtype[Any] = field(init=False)
    axes: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.x, self.ws = operands(self.name, self.x, self.w, self.lists)
        self.dtype = result_dtype(self.name, self.x, self.preferred_element_type)
        self.axes = axes_of(self.axis_name)

    def params(self, kind: Callable[..., Params], axis: int, **own: Any) -> Params:
        """The parameters of a collective matmul that this call is, and its own ones.

        Raises NameError if an axis is not bound.
        """
        size, precision = world_size(self.name, self.axes), trace_state.matmul_precision()
        return kind(self.axes, axis, size, self.dtype, precision, **own)

    def copies(self) -> bool:
        """Whether XLA may have to write a matrix for a custom call of few rows."""
        return trace_state.in_loop() or any(map(trace_state.is_computed, self.ws))

    def run(
        self,
        of_ranks: Callable[..., list[Any]],
        specs: Callable[[global_arrays.GlobalCall, list[Any]], tuple[Any, Any, list[Any]]],
        check_vma: bool = True,
    ) -> Any:
        """Runs it where its axes are bound, or on global arrays as a shard_map.

        Args:
            of_ranks: (x, *ws, reason) -> the products, and perhaps the gathered x, of the ranks'
                shards. The reason is why lax runs the call; None if it may be accelerated.
            specs: (the call on global arrays, the spec of the rows of x) -> the specs of x, of each
                matrix, and of the results.
            check_vma: as in ``jax.shard_map``.

        Returns:
            The products, as a list if w is one, and the gathered x or None.
        """

        def weak_as_laxs(x: Any, *ws: Any, reason: str | None = None) -> list[Any]:
            results = of_ranks(x, *ws, reason=reason)
            weak = [self.preferred_element_type is None and _all_weak([x, w]) for w in ws]
            weak += [_all_weak([x])] * (len(results) - len(ws))
            return [
                trace_state.with_weak_type(v, True) if is_weak else v
                for v, is_weak in zip(results, weak, strict=True)
            ]

        several = self.lists and isinstance(self.w, (list, tuple))
        found = global_arrays.find(self.name, self.axis_name, self.batch_axes, self.mesh)
        if found is None:
            results = weak_as_laxs(self.x, *self.ws)
        else:
            of_x, of_w, out_specs = specs(found, found.rows(self.x))
            operands = [("x", self.x, of_x)]
            for k, matrix in enumerate(self.ws):
                operands.append((f"w[{k}]" if several else "w", matrix, of_w))
            body = partial(weak_as_laxs, reason=found.reason)
            results = found.run(body, operands, out_specs, check_vma)
        count = len(self.ws)
        return results[:count] if several else results[0], (*results[count:], None)[0]


def _all_weak(operands: Sequence[Any]) -> bool:
    return all(jax.typeof(v).weak_type for v in operands)


def array(operation: str, name: str, value: Any, wanted: str = "an array") -> Any:
    """An operand as an array. TypeError: it is something else."""
    cause = None
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        try:
            return jnp.asarray(value)
        except TypeError as error:
            cause = error
    kind = type(value).__name__
    raise TypeError(f"{operation}: {name} is a {kind}; pass {wanted}") from cause


def operands(operation: str, x: Any, w: Any, lists: bool = False) -> tuple[Any, list[Any]]:
    """x and the matrices as arrays; w may be a list of matrices if `lists`.

    Raises TypeError or ValueError if they can't be multiplied.
    """

    x = array(operation, "x", x)
    several = lists and isinstance(w, (list, tuple))
    if several and not w:
        raise ValueError(f"{operation}: w is an empty list; pass at least one matrix")
    names = [f"w[{k}]" for k in range(len(w))] if several else ["w"]
    wanted = "an array or a list of arrays" if lists and not several else "an array"
    ws = [array(operation, n, v, wanted) for n, v in zip(names, w if several else [w], strict=True)]
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

    Raises TypeError if `preferred_element_type` is no dtype, or of another kind than the operands'.
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
    """A dimension of an array, counted from the first. TypeError, ValueError: there is none."""
    value = collective.integer(operation, name, value)
    wrong = collective.reason_of_dimension(name, value, rank, -rank, rank - 1)
    if wrong is not None:
        raise ValueError(f"{operation}: {wrong}")
    return value % rank


def world_size(operation: str, axes: tuple[Hashable, ...]) -> int:
    """The number of ranks over the axes. NameError: an axis is not bound."""
    with fallback.to_lax(operation, reasons.AXIS_MISSING, logged=False):
        return int(lax.psum(1, axes))


def reason_of_operands(
    axes: tuple[Hashable, ...], operands: Sequence[Any], communicated: Sequence[Any]
) -> str | None:
    """Why lax runs the collective of a call with these axes and operands.

    `communicated` are those from which the gathered or summed array is computed.
    """
    reason = fallback.reason_of_axes(axes)
    reason = reason or fallback.reason_of_operands(operands, communicated, axes)
    if reason is None and any(
        axis is not None for v in operands for axis in jax.typeof(v).sharding.spec
    ):
        reason = reasons.EXPLICIT_OPERAND
    return reason


def reason_for_lax(
    operation: str,
    axes: tuple[Hashable, ...],
    operands: Sequence[Any],
    communicated: Sequence[Any],
    dtype: np.dtype[Any],
) -> str | None:
    """The same for a collective of jax.lax of an array of this dtype."""
    reason = reason_of_operands(axes, operands, communicated)
    return reason or select.unsupported_dtype(operation, dtype.name)


def varying_alike(operands: Sequence[Any], axes: tuple[Hashable, ...]) -> list[Any]:
    """The operands, cast to vary over the axes and over all that any of them varies over.

    The transpose of the cast is a psum: the gradient of a replicated matrix is the sum of all
    ranks' gradients. If all operands have weak types they are cast to strong ones too, because our
    primitives' gradients are strong; the transpose of that cast makes them weak again.
    """
    over = set(axes).union(*(jax.typeof(v).manual_axis_type.varying for v in operands))
    if _all_weak(operands):
        operands = [trace_state.with_weak_type(v, False) for v in operands]
    return [collective.varying(v, sorted(over, key=str)) for v in operands]
