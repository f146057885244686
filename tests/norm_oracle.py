"""What psum_residual_rms_norm and its relatives compute, in NumPy, bit by bit.

The docstring of psum_residual_rms_norm has the definition. NumPy rounds each float32 operation;
XLA may keep intermediate values longer, so its composition is no oracle.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from cases import oracle

Array = np.ndarray[Any, Any]


def total(values: Array) -> Array:
    """Adds neighbours until one value of each row is left."""
    width = values.shape[-1]
    padded = np.zeros((*values.shape[:-1], 1 << (width - 1).bit_length()), np.float32)
    padded[..., :width] = values
    while padded.shape[-1] > 1:
        padded = padded[..., ::2] + padded[..., 1::2]
    return padded[..., 0] + np.float32(0)  # a total of 0 is +0


def residual_norm(
    xs: Sequence[Array],
    residual: Array,
    weight: Array,
    *,
    norm: str,
    eps: float,
    bias: Array | None = None,
    weight_offset: float = 0.0,
) -> tuple[Array, Array]:
    """The results of a psum of the ranks' `xs`, a residual add and a norm."""
    dtype = xs[0].dtype
    f32 = np.float32
    with np.errstate(all="ignore"):
        h = (oracle(np.stack(xs)).astype(f32) + residual.astype(f32)).astype(dtype)
        d = h.astype(f32)
        hidden = f32(d.shape[-1])
        if norm == "layer_norm":
            d = d - (total(d) / hidden)[..., None]
        variance = total(d * d) / hidden
        factor = f32(1) / np.sqrt(variance + f32(eps))
        w = weight.astype(f32)
        if weight_offset != 0:
            w = w + f32(weight_offset)
        y = d * factor[..., None] * w
        if bias is not None:
            y = y + bias.astype(f32)
        return y.astype(dtype), h
