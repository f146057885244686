"""Matrix products as the collective matmuls compute them, where no fused kernel does.

A product contracts the last dimension of x with a matrix w of shape [K, N]. With `transposed`, the
shape of w is [N, K]. Gradients use that, so no matrix is transposed in memory.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def dot_shape(x: Any, w: Any, transposed: bool) -> tuple[int, ...]:
    """The shape of a product."""
    return (*x.shape[:-1], w.shape[0 if transposed else 1])


def dot(x: Any, w: Any, dtype: Any, precision: Any, transposed: bool) -> Any:
    """The product of x and a matrix, rounded once to `dtype`. The operands' dtypes may differ."""
    dimensions = (((x.ndim - 1,), (1 if transposed else 0,)), ((), ()))
    return _dot_general(x, w, dimensions, dtype, precision)


def is_plain(precision: Any) -> bool:
    """Whether a precision changes nothing for 16-bit operands: all values of `lax.Precision`."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return all(p is None or isinstance(p, lax.Precision) for p in precisions)


def wgrad_dot(x: Any, ct: Any, dtype: Any, precision: Any, transposed: bool) -> Any:
    """The weight gradient of the product of x and a matrix, from the product's cotangent."""
    rows = tuple(range(x.ndim - 1))
    first, second = (ct, x) if transposed else (x, ct)
    return _dot_general(first, second, ((rows, rows), ((), ())), dtype, precision)


def wgrad_aval(x: Any, ct: Any, dtype: Any, transposed: bool) -> Any:
    """The type of a weight gradient, from the types of x and of the product's cotangent."""
    shape = (x.shape[-1], ct.shape[-1])
    kind = x.manual_axis_type
    kind = kind.update(varying=kind.varying | ct.manual_axis_type.varying)
    return x.update(
        shape=shape[::-1] if transposed else shape,
        dtype=dtype,
        weak_type=False,
        manual_axis_type=kind,
    )


def wgrad_by_transposition(x: Any, ct: Any, dtype: Any, precision: Any, transposed: bool) -> Any:
    """The weight gradient by JAX's own transposition of `dot`.

    Its dot_general may order operands differently than `wgrad_dot` does.
    """
    w = wgrad_aval(jax.typeof(x), jax.typeof(ct), dtype, transposed)
    (gradient,) = jax.linear_transpose(lambda w: dot(x, w, ct.dtype, precision, transposed), w)(ct)
    return gradient


def _dot_general(x: Any, y: Any, dimensions: Any, dtype: Any, precision: Any) -> Any:
    # XLA would round operands of different dtypes to the result's dtype first.
    wide = dtype if x.dtype == y.dtype else _widest(x.dtype, y.dtype, dtype)
    product = lax.dot_general(
        x, y, dimensions, precision=precision, preferred_element_type=np.dtype(wide)
    )
    return product.astype(dtype)


def _widest(*dtypes: Any) -> Any:
    """The narrowest dtype that has all values of these, whatever promotion JAX is set to do."""
    # JAX promotes no float8 dtype to another; bfloat16 has all of their values.
    known = [
        jnp.bfloat16
        if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize == 1
        else dtype
        for dtype in dtypes
    ]
    with jax.numpy_dtype_promotion("standard"):
        return reduce(jnp.promote_types, known)


# Sums of products: x_0 @ w_0 + x_1 @ w_1 + ... + addend. Each x_i @ w_i is a term; the addend is
# optional. The operands are the xs, then the ws, then the addend.


def split_terms(operands: Sequence[Any], terms: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The xs, the ws, and a list of the addend if there is one."""
    return list(operands[:terms]), list(operands[terms : 2 * terms]), list(operands[2 * terms :])


def sum_of_dots(
    operands: Sequence[Any], terms: int, dtype: Any, precision: Any, transposed: bool
) -> Any:
    """The sum of products, accumulated in float32 or wider and rounded once to `dtype`."""
    xs, ws, addend = split_terms(operands, terms)
    if terms == 1 and not addend:
        return dot(xs[0], ws[0], dtype, precision, transposed)
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    wide = np.dtype(np.float32) if narrow else dtype
    summands = [dot(x, w, wide, precision, transposed) for x, w in zip(xs, ws, strict=True)]
    summands += [v.astype(wide) for v in addend]
    total = summands[0]
    for summand in summands[1:]:
        total = total + summand
    return total.astype(dtype)
