"""Layers that several tests run, with the functions of this package or with what `jax.lax` has."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Functions of this package, made of jax.lax.


def _products(x: Any, w: Any, preferred_element_type: Any) -> Any:
    multiply = functools.partial(jnp.matmul, x, preferred_element_type=preferred_element_type)
    return [multiply(v) for v in w] if isinstance(w, list) else multiply(w)


def _all_gather_matmul(
    x: Any,
    w: Any,
    axis: Any,
    *,
    gather_axis: int = 0,
    return_gathered: bool = False,
    preferred_element_type: Any = None,
) -> Any:
    whole = lax.all_gather(x, axis, axis=gather_axis % x.ndim, tiled=True)
    products = _products(whole, w, preferred_element_type)
    return (products, whole) if return_gathered else products


def _matmul_reduce_scatter(
    x: Any, w: Any, axis: Any, *, scatter_dimension: int = 0, preferred_element_type: Any = None
) -> Any:
    product = _products(x, w, preferred_element_type)
    return lax.psum_scatter(product, axis, scatter_dimension=scatter_dimension % x.ndim, tiled=True)


def _matmul_all_reduce(x: Any, w: Any, axis: Any, *, preferred_element_type: Any = None) -> Any:
    return lax.psum(_products(x, w, preferred_element_type), axis)


def normalized(norm: str, h: Any, weight: Any, bias: Any = None, *, eps: float) -> Any:
    """An RMSNorm ("rms_norm") or a LayerNorm ("layer_norm") of the rows of `h`."""
    d = h - h.mean(-1, keepdims=True) if norm == "layer_norm" else h
    y = d * lax.rsqrt((d * d).mean(-1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


def _residual_norm(collective: Any, norm: str) -> Any:
    def call(
        x: Any,
        residual: Any,
        weight: Any,
        axis: Any,
        *,
        eps: float,
        bias: Any = None,
        weight_offset: float = 0.0,
        **options: Any,
    ) -> tuple[Any, Any]:
        h = collective(x, axis, **options) + residual
        return normalized(norm, h, weight + weight_offset, bias, eps=eps), h

    return call


def _ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: Any,
) -> Any:
    """Looks at all updates of all ranks, one after the other."""
    del recv_sizes
    ranks, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    updates = len(send_sizes) // ranks
    sent = (operand, input_offsets, send_sizes, output_offsets)
    operands, starts, sizes, places = (lax.all_gather(v, axis_name) for v in sent)
    rows = jnp.arange(len(output))
    for source in range(ranks):
        for update in range(updates):
            start, size, place = (
                lax.dynamic_index_in_dim(t[source], me * updates + update, keepdims=False)
                for t in (starts, sizes, places)
            )
            written = (rows >= place) & (rows < place + size)
            read = jnp.where(written, rows - place + start, 0)
            of_rows = written.reshape(-1, *[1] * (output.ndim - 1))
            output = jnp.where(of_rows, operands[source][read], output)
    return output


_scatter = functools.partial(lax.psum_scatter, tiled=True)
OF_LAX = types.SimpleNamespace(
    all_gather=lax.all_gather,
    all_gather_matmul=_all_gather_matmul,
    matmul_all_reduce=_matmul_all_reduce,
    matmul_reduce_scatter=_matmul_reduce_scatter,
    pmean=lax.pmean,
    psum=lax.psum,
    psum_residual_layer_norm=_residual_norm(lax.psum, "layer_norm"),
    psum_residual_rms_norm=_residual_norm(lax.psum, "rms_norm"),
    psum_scatter_residual_layer_norm=_residual_norm(_scatter, "layer_norm"),
    psum_scatter_residual_rms_norm=_residual_norm(_scatter, "rms_norm"),
    ragged_all_to_all=_ragged_all_to_all,
)


def functions(lib: Any) -> Any:
    """The functions of a library: those above for `jax.lax`."""
    return OF_LAX if lib is lax else lib


# Layers.


def gated_mlp(lib: Any, x: Any, gate: Any, up: Any, down: Any, act: Any = jax.nn.silu) -> Any:
    """A tensor-parallel MLP over "x" with sequence parallelism; x: [..., sequence, features]."""
    lib, axis = functions(lib), x.ndim - 2
    a, b = lib.all_gather_matmul(x, [gate, up], "x", gather_axis=axis)
    return lib.matmul_reduce_scatter(act(a) * b, down, "x", scatter_dimension=axis)


def experts(
    lib: Any,
    x: Any,
    ids: Any,
    weights: Any,
    factors: Any,
    *,
    axes: Any = "x",
    capacity: int | None = None,
) -> Any:
    """A layer over `axes` whose experts multiply by their factors and take a sine.

    `factors` has those of this rank's experts. For `jax.lax` the experts of all ranks compute all
    tokens.
    """
    count = len(factors) * lax.axis_size(axes)
    if lib is lax:
        return dense_experts(x, ids, weights, lax.all_gather(factors, axes, tiled=True))
    rows, sizes, state = lib.moe_dispatch(
        x, ids, weights, axes, num_experts=count, capacity=capacity
    )
    expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
    return lib.moe_combine(jnp.sin(rows * factors[expert]), state)


def dense_experts(x: Any, ids: Any, weights: Any, factors: Any) -> Any:
    """The same of all tokens and all experts; a token has no expert where an id is negative."""
    of_all = jnp.sin(x[:, None] * factors)
    chosen = jnp.take_along_axis(of_all, jnp.maximum(ids, 0)[..., None], 1)
    return (chosen * jnp.where(ids < 0, 0, weights)[..., None]).sum(1)
