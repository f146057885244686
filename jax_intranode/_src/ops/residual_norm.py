"""psum_residual_rms_norm and its relatives: a sum over ranks, a residual added, rows normalized.

There are four functions: the sum is a psum or a reduce-scatter, the norm RMSNorm or LayerNorm. Each
has a primitive (norm_rules.py).
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.ops import collective, fallback, matmul_arguments
from jax_intranode._src.ops.annotations import AxisNames
from jax_intranode._src.ops.norm_rules import PRIMITIVES, NormParams
from jax_intranode._src.selection import select


def psum_residual_rms_norm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike,
    axis_name: AxisNames,
    *,
    eps: float,
    bias: ArrayLike | None = None,
    weight_offset: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Sums over mapped axes, adds a residual, and normalizes the rows of the result.

    This is what follows the second matmul of each block of a tensor-parallel transformer. Inside
    ``jax.shard_map`` one kernel computes it::

        new_residual = psum(x, axis_name) + residual
        normed = new_residual / sqrt(mean(new_residual**2) + eps) * (weight + weight_offset) + bias

    A row is what lies along the last dimension. The bits of a row's results do not depend on other
    rows or their number, on other groups, on the algorithm or on the kind of device. They follow
    from these steps. Each of them rounds to float32 or, where stated, to the dtype of x:

    1. ``s``: the ranks' values, added in float32 in rank order, rounded to the dtype, as by `psum`.
    2. ``h = s + residual`` in float32, rounded to the dtype: `new_residual`.
    3. ``v = total(h * h) / hidden`` in float32. `total` adds neighbours, values 0 and 1, 2 and 3,
       and so on, then the sums in the same way, until one is left. Zeros fill up a row to a power
       of 2.
    4. ``y = h * (1 / sqrt(v + eps)) * (weight + weight_offset) + bias`` in float32, from left to
       right, rounded once to the dtype: `normed`. The offset is added only if it is not 0.

    So results may differ in the last bits from a composition that XLA compiles, which adds in an
    order of its own and may keep intermediate values in float32.

    The one-shot algorithm sends the rows to all ranks. Larger arrays take the two-shot algorithm: a
    reduce-scatter of whole rows, then an all-gather of the sums. An array that does not fit an
    epoch buffer is divided into several operations by one call.

    Calls that the kernels cannot take fall back: ``jax.lax`` sums, and XLA compiles the same
    formula. Then the result is equal but for rounding. `explain` says which calls fall back.

    Differentiable in forward and reverse mode with respect to all arrays, to any order. Gradients
    are computed in float32 by XLA, from `new_residual`; x and the residual have the same gradient.
    Under check_vma=False the backward pass has one `psum`, as that of ``jax.lax.psum``.

    The kernel follows the fusions of FlashInfer and TensorRT-LLM; the order of additions is its
    own.

    Args:
        x: an array [..., hidden] of float32, bfloat16 or float16, on each rank a term of the sum.
            Other floating dtypes, and rows of more than 16384 elements, fall back.
        residual: an array of the shape and dtype of x, the same on all ranks.
        weight: an array [hidden] of the dtype of x, or float32, the same on all ranks. Other
            floating dtypes are cast to float32 (for a float64 x, to float64).
        axis_name: the name of a mapped axis, or several names.
        eps: a number that is added to the mean of the squares.
        bias: an array like weight that is added to the normalized rows; None for none.
        weight_offset: a number that is added to the weight; 1.0 for models whose weight is
            stored as its difference from 1.

    Returns:
        `normed` and `new_residual`, of the shape and dtype of x, the same on all ranks.

    Raises:
        TypeError: an operand is not an array of a floating dtype, the dtypes of the residual and x
            differ, or `eps` or `weight_offset` is not a number that is known while tracing.
        ValueError: shapes do not fit, `eps` or `weight_offset` is not finite, or the residual, the
            weight or the bias varies over the axes (known under check_vma=True).
        NameError: an axis is not bound.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=(P("model"), P(), P()), out_specs=P())
        ... def normed(x, residual, weight):
        ...     return jax_intranode.psum_residual_rms_norm(
        ...         x[0], residual, weight, "model", eps=0.0
        ...     )
        >>> y, h = normed(jnp.ones((2, 3, 4)), jnp.ones((3, 4)), jnp.full(4, 2.0))
        >>> print(h[0], y[0])
        [3. 3. 3. 3.] [2. 2. 2. 2.]
    """
    return _call("rms_norm", None, x, residual, weight, bias, axis_name, eps, weight_offset)


def psum_residual_layer_norm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike,
    axis_name: AxisNames,
    *,
    eps: float,
    bias: ArrayLike | None = None,
    weight_offset: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """`psum_residual_rms_norm` with LayerNorm instead of RMSNorm.

    Arguments, results, errors and differentiation are described there. Steps 3 and 4 are

    3. ``m = total(h) / hidden``; ``d = h - m``; ``v = total(d * d) / hidden``;
    4. ``y = d * (1 / sqrt(v + eps)) * (weight + weight_offset) + bias``.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=(P("model"), P(), P()), out_specs=P())
        ... def normed(x, residual, weight):
        ...     return jax_intranode.psum_residual_layer_norm(
        ...         x[0], residual, weight, "model", eps=0.0
        ...     )
        >>> y, h = normed(jnp.ones((2, 1, 2)), jnp.array([[1.0, 3.0]]), jnp.ones(2))
        >>> print(h[0], y[0])
        [3. 5.] [-1.  1.]
    """
    return _call("layer_norm", None, x, residual, weight, bias, axis_name, eps, weight_offset)


def psum_scatter_residual_rms_norm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike,
    axis_name: AxisNames,
    *,
    eps: float,
    bias: ArrayLike | None = None,
    weight_offset: float = 0.0,
    scatter_dimension: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """`psum_residual_rms_norm` for sequence parallelism: each rank gets a part of the rows.

    As ``psum_scatter(x, axis_name, scatter_dimension=scatter_dimension, tiled=True)``, followed by
    the residual add and the norm of each rank's own rows. A row has the same bits as from
    `psum_residual_rms_norm`, which describes the arithmetic, the other arguments and errors.

    Differentiable as that function is. The backward pass has one `all_gather`.

    Args:
        x: an array [..., hidden] with 2 or more dimensions, on each rank a term of the sum.
        residual: the rank's part of the residual, of the shape of the result.
        weight: an array [hidden], the same on all ranks.
        axis_name: the name of a mapped axis, or several names.
        eps: a number that is added to the mean of the squares.
        bias: an array like weight that is added to the normalized rows; None for none.
        weight_offset: a number that is added to the weight.
        scatter_dimension: the dimension of x that is divided among the ranks, any but the last. Its
            length is a multiple of the number of ranks.

    Returns:
        `normed` and `new_residual`: the shape of x with `scatter_dimension` divided by the number
        of ranks.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(
        ...     mesh=mesh, in_specs=(P(None, "model"), P("model"), P()), out_specs=P("model")
        ... )
        ... def normed(x, residual, weight):
        ...     return jax_intranode.psum_scatter_residual_rms_norm(
        ...         x[:, 0], residual, weight, "model", eps=0.0
        ...     )
        >>> y, h = normed(jnp.ones((4, 2, 8)), jnp.ones((4, 8)), jnp.ones(8))
        >>> print(h[:, 0], y[:, 0])
        [3. 3. 3. 3.] [1. 1. 1. 1.]
    """
    return _call(
        "rms_norm", scatter_dimension, x, residual, weight, bias, axis_name, eps, weight_offset
    )


def psum_scatter_residual_layer_norm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike,
    axis_name: AxisNames,
    *,
    eps: float,
    bias: ArrayLike | None = None,
    weight_offset: float = 0.0,
    scatter_dimension: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """`psum_scatter_residual_rms_norm` with LayerNorm instead of RMSNorm.

    The arithmetic of the norm is that of `psum_residual_layer_norm`.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(
        ...     mesh=mesh, in_specs=(P(None, "model"), P("model"), P()), out_specs=P("model")
        ... )
        ... def normed(x, residual, weight):
        ...     return jax_intranode.psum_scatter_residual_layer_norm(
        ...         x[:, 0], residual, weight, "model", eps=0.0
        ...     )
        >>> y, h = normed(jnp.ones((2, 2, 2)), jnp.array([[1.0, 3.0]] * 2), jnp.ones(2))
        >>> print(h[0], y[0])
        [3. 5.] [-1.  1.]
    """
    return _call(
        "layer_norm", scatter_dimension, x, residual, weight, bias, axis_name, eps, weight_offset
    )


# Checks.


def _call(
    norm: str,
    dimension: int | None,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    axis_name: Any,
    eps: Any,
    weight_offset: Any,
) -> tuple[Any, Any]:
    primitive = PRIMITIVES[norm, dimension is not None]
    name = primitive.operation
    axes = matmul_arguments.axes_of(axis_name)
    operands = _operands(name, x, residual, weight, bias)
    eps = _number(name, "eps", eps)
    weight_offset = _number(name, "weight_offset", weight_offset)
    if eps < 0:
        raise ValueError(f"{name}: eps is {eps}; it must not be negative")
    size = matmul_arguments.world_size(name, axes)
    dimension = _check_shapes(name, operands, dimension, size)
    _check_types(name, operands, axes, dimension is not None)
    params = NormParams(
        axes, norm, eps, weight_offset, dimension, size, invariant=trace_state.check_vma()
    )
    x = operands[0]
    reason = matmul_arguments.reason_of_operands(axes, operands, [x])
    reason = reason or select.unsupported_norm(name, x.dtype.name, x.shape[-1])
    if reason is not None:
        with fallback.to_lax(name, reason):
            normed, new_residual = params.by_lax(operands)
    else:
        operands = _varying(operands, params)
        with jax.named_scope(primitive.scope):
            normed, new_residual = primitive.bind(*operands, params=params)
    return normed, new_residual


def _operands(name: str, x: Any, residual: Any, weight: Any, bias: Any) -> list[Any]:
    """The operands as arrays, of dtypes that fit together."""
    given = {"x": x, "residual": residual, "weight": weight}
    if bias is not None:
        given["bias"] = bias
    given = {key: matmul_arguments.array(name, key, value) for key, value in given.items()}
    for key, value in given.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"{name}: {key} has the dtype {value.dtype}; pass floating-point data")
    x, residual, *parameters = given.values()
    if residual.dtype != x.dtype:
        raise TypeError(f"{name}: x is {x.dtype}, residual is {residual.dtype}; cast one of them")
    dtypes = {v.dtype for v in parameters}
    if dtypes != {x.dtype}:
        wider = np.promote_types(x.dtype, np.float32) if x.dtype == "float64" else np.float32
        parameters = [v.astype(wider) for v in parameters]
    return [x, residual, *parameters]


def _number(name: str, argument: str, value: Any) -> float:
    try:
        number = float(value)
    except jax.errors.ConcretizationTypeError:
        raise TypeError(
            f"{name}: {argument} is not known while tracing; pass a number, or mark the argument "
            "as static"
        ) from None
    except (TypeError, ValueError):
        raise TypeError(f"{name}: {argument} is {value!r}; pass a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: {argument} is {number}; pass a finite number")
    return number


def _check_shapes(
    name: str, operands: Sequence[Any], dimension: int | None, size: int
) -> int | None:
    """Refuses operands that do not fit together; returns the dimension, counted from the first."""
    x, residual, *parameters = operands
    least = 1 if dimension is None else 2
    if x.ndim < least or x.shape[-1] == 0:
        raise ValueError(
            f"{name}: x has the shape {x.shape}; it needs {least} dimension{'s' * (least > 1)} or "
            "more, the last of them not empty"
        )
    expected = x.shape
    if dimension is not None:
        dimension = matmul_arguments.dimension(name, "scatter_dimension", dimension, x.ndim)
        length = x.shape[dimension]
        if dimension == x.ndim - 1:
            raise ValueError(
                f"{name}: scatter_dimension is {dimension}, the dimension that is normalized; pass "
                "another one"
            )
        if length % size != 0:
            raise ValueError(
                f"{name}: dimension {dimension} of x has the length {length}; it must be a "
                f"multiple of the number of ranks, {size}"
            )
        expected = (*x.shape[:dimension], length // size, *x.shape[dimension + 1 :])
    if residual.shape != expected:
        raise ValueError(
            f"{name}: residual has the shape {residual.shape}; with x of the shape {x.shape} it "
            f"must be {expected}"
        )
    for argument, parameter in zip(("weight", "bias"), parameters, strict=False):
        if parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name}: {argument} has the shape {parameter.shape}; with x of the shape "
                f"{x.shape} it must be {x.shape[-1:]}"
            )
    return dimension


def _check_types(
    name: str, operands: Sequence[Any], axes: tuple[Hashable, ...], scatters: bool
) -> None:
    """Refuses operands that must be the same on all ranks, and are known not to be."""
    if not trace_state.check_vma():
        return
    named = list(zip(("x", "residual", "weight", "bias"), operands, strict=False))
    for argument, operand in named[2 if scatters else 1 :]:
        over = set(jax.typeof(operand).manual_axis_type.varying).intersection(axes)
        if over:
            advice = "all ranks must have the same"
            if argument == "residual":
                advice += "; for a residual that is divided among the ranks, see "
                advice += f"jax_intranode.{name.replace('psum', 'psum_scatter')}"
            raise ValueError(
                f"{name}: {argument} varies over the axes {sorted(map(str, over))}; {advice}"
            )


def _varying(operands: Sequence[Any], params: NormParams) -> list[Any]:
    """The operands, cast to vary over the mesh axes that the primitive's rules ask for."""
    operands = [trace_state.with_weak_type(v, False) for v in operands]
    varying = (jax.typeof(v).manual_axis_type.varying for v in operands)
    others = set[Any]().union(*varying).difference(params.axes)
    x, residual, *parameters = operands
    everywhere = sorted(others.union(params.axes), key=str)
    shared = sorted(others, key=str)
    of_residual = shared if params.dimension is None else everywhere
    return [
        collective.varying(x, everywhere),
        collective.varying(residual, of_residual),
        *(collective.varying(v, shared) for v in parameters),
    ]
