"""matmul_reduce_scatter: the sum of every rank's product, of which each rank keeps its own part."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad

from jax_intranode._src import compat
from jax_intranode._src.ops import (
    all_gather_matmul,
    collective,
    collective_matmul,
    derivatives,
    overlapped,
    psum_scatter,
)


def _by_parts(
    scatter: collective_matmul.Send,
    *operands: Any,
    pairs: int,
    axes: tuple[str, ...],
    dimension: int,
    size: int,
    dtype: Any,
    precision: Any,
    transposed: bool,
) -> list[Any]:
    product = collective_matmul.sum_of_dots(operands, pairs, dtype, precision, transposed)
    if product.size == 0:  # XLA's collectives refuse it
        product = collective.varying(product, axes)
        return [product.reshape(_part(product.shape, dimension, size))]
    return [scatter(product)]


def _part(shape: tuple[int, ...], dimension: int, size: int) -> tuple[int, ...]:
    return (*shape[:dimension], shape[dimension] // size, *shape[dimension + 1 :])


def request(
    *operands: Any,
    pairs: int,
    axes: tuple[str, ...],
    dimension: int,
    size: int,
    dtype: Any,
    precision: Any,
    transposed: bool,
) -> overlapped.Request | str:
    """What may be overlapped, or why nothing can be."""
    del axes
    xs, ws, addend = collective_matmul.split(operands, pairs)
    if not xs:
        return "no matmul"
    if addend:
        return "a sum with the derivative of the gathered x"
    if dimension == xs[0].ndim - 1:
        return "cut along the last dimension"

    return overlapped.Request(
        axis=dimension,
        outer=math.prod(xs[0].shape[:dimension]),
        rows=math.prod(xs[0].shape[dimension:-1]) // size,
        ks=tuple(x.shape[-1] for x in xs),
        ns=(ws[0].shape[0 if transposed else 1],),
        dtypes=(*(v.dtype for v in operands), dtype),
        precision=precision,
        transposed=transposed,
    )


# The primitive: sums products of `pairs` xs and as many ws, and perhaps an addend, over the ranks:
# a derivative of all_gather_matmul of several matrices, and of the gathered x. `size` ranks, which
# divide `dimension`; the rest as in all_gather_matmul.
primitive = collective_matmul.CollectiveMatmul(
    "matmul_reduce_scatter",
    _by_parts,
    collective_matmul.sum_of_dots_aval,
    lambda *, axes, dimension, size, **_: (
        psum_scatter.primitive,
        {"axes": axes, "dimension": dimension, "tiled": True, "size": size},
    ),
    request,
)


def matmul_reduce_scatter(
    x: Any, w: Any, axis_name: Any, *, scatter_axis: int = 0, preferred_element_type: Any = None
) -> Any:
    """Multiplies with a matrix, sums over mapped axes, and keeps a part.

    ``jax.lax.psum_scatter(x @ w, axis_name, scatter_dimension=scatter_axis, tiled=True)``: the
    second matmul of a tensor-parallel layer with sequence parallelism.

    On Hopper GPUs, of bfloat16 and float16, with K and N of multiples of 8 and cut along any
    dimension but the last, the sum is overlapped with the matmul where that is faster: products
    travel while others are computed. Elsewhere it is a ``psum_scatter`` of this package or of
    ``jax.lax``, whichever that one would take, after the matmul; ``explain`` says which, and why.
    Each rank's product, its own too, is rounded to the result's dtype; then they are summed as by
    ``psum_scatter``, in rank order. Products are summed in float32, or are those of ``jnp.matmul``,
    with the precision of ``jax.default_matmul_precision``.

    Derivatives are those of the expression above, in forward and reverse mode and of any order. The
    tangent is one sum of ``dx @ w + x @ dw``. In reverse mode one gathering of the cotangent (an
    ``all_gather_matmul``) serves the derivatives by x and by w, in one kernel where that is faster;
    x and w are kept from the forward pass. Under ``vmap`` over w, and over both, it is a matmul of
    batches and a ``psum_scatter``.

    The algorithm after PyTorch's ``fused_matmul_reduce_scatter`` and xformers'
    ``fused_linear_and_reducescatter`` (the derivatives).

    Args:
        x: an array [..., K] with 2 dimensions or more, of any dtype that can be multiplied.
        w: a matrix [K, N] of the dtype of x.
        axis_name: the name of a mapped axis, or several: ranks in row-major order.
        scatter_axis: the dimension of the product that is cut into parts, any: of a multiple of the
            number of ranks.
        preferred_element_type: the result's dtype, as in ``jnp.matmul``; by default that of x.

    Returns:
        This rank's part of an array [..., N].

    Raises:
        TypeError: an operand is no array, the dtypes differ, `preferred_element_type` is of another
            kind than they are, or `scatter_axis` is no integer.
        ValueError: the ranks or the contracted dimensions do not fit, there is no such
            `scatter_axis`, or its length is no multiple of the number of ranks.
        NameError: an axis is not bound, as in ``jax.lax.psum_scatter``.
    """
    name = "matmul_reduce_scatter"
    x, (w,) = collective_matmul.checked_operands(name, x, [w])
    dtype = collective_matmul.checked_dtype(name, x, preferred_element_type)
    dimension = collective_matmul.checked_dimension(name, "scatter_axis", scatter_axis, x.ndim)
    axes = collective_matmul.axes_of(axis_name)
    reason = collective_matmul.reason_for_lax("psum_scatter", axes, [x, w], [x, w], dtype)

    size = collective_matmul.ranks(name, axes)
    length = collective_matmul.dot_shape(x, w, False)[dimension]
    if length % size != 0:
        raise ValueError(
            f"{name}: scatter_axis {scatter_axis} of the product has {length} elements; it "
            f"must be a multiple of the {size} ranks over {axis_name!r}"
        )
    params: dict[str, Any] = {
        "pairs": 1,
        "axes": axes,
        "dimension": dimension,
        "size": size,
        "dtype": dtype,
        "precision": compat.matmul_precision(),
        "transposed": False,
    }
    if reason is not None:
        send = collective_matmul.by_lax(
            name,
            reason,
            lambda v: lax.psum_scatter(v, axis_name, scatter_dimension=dimension, tiled=True),
        )
        (result,) = _by_parts(send, x, w, **params)
    else:
        operands = collective_matmul.varying_alike([x, w], axes)
        with jax.named_scope(f"jax_intranode.{name}"):
            (result,) = primitive.bind(*operands, **params)
    return collective_matmul.as_weak_as([x, w], preferred_element_type, result)


# Abstract evaluation.


def abstract_eval(*operands: Any, dimension: int, size: int, **params: Any) -> list[Any]:
    """From types to types."""
    whole = collective_matmul.sum_of_dots_aval(*operands, **params)
    return [whole.update(shape=_part(whole.shape, dimension, size))]


# Differentiation.


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    pairs: int,
    axes: tuple[str, ...],
    dimension: int,
    size: int,
    dtype: Any,
    precision: Any,
    transposed: bool,
) -> list[Any]:
    del dtype
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [None] * len(operands)
    xs, ws, others = collective_matmul.split(operands, pairs)
    linear = [k for k, x in enumerate(xs) if ad.is_undefined_primal(x)]
    if dimension == ct.ndim - 1:
        linear = []  # what is gathered is contracted with ws
    rest = [None if k in linear else x for k, x in enumerate(xs)] + ws + others
    by_rest = [i for i, v in enumerate(rest) if ad.is_undefined_primal(v)]
    by_w = by_rest[0] - pairs if len(by_rest) == 1 else -1
    if len(linear) == 1 and 0 <= by_w < pairs and by_w != linear[0]:
        (by_x,) = linear
        cotangents_of: list[Any] = [None] * len(operands)
        found = derivatives.of_matmul_reduce_scatter.bind(
            ct,
            ws[by_x],
            xs[by_w],
            by_x=True,
            by_w=True,
            axes=axes,
            axis=dimension,
            size=size,
            dtype=xs[by_x].aval.dtype,
            dtype_by_w=ws[by_w].aval.dtype,
            precision=precision,
            transposed=not transposed,
        )
        cotangents_of[by_x], cotangents_of[pairs + by_w] = found
        return cotangents_of
    gathered = any(ad.is_undefined_primal(v) for v in rest)
    results = all_gather_matmul.primitive.bind(
        ct,
        *[ws[k] for k in linear],
        axes=axes,
        axis=dimension,
        size=size,
        gathered=gathered,
        dtype=xs[linear[0]].aval.dtype if linear else ct.dtype,
        precision=precision,
        transposed=not transposed,
    )
    cotangents_of = [None] * len(operands)
    if gathered:
        cotangents_of = collective_matmul.transpose_of_sum(
            results[-1], rest, pairs, precision, transposed
        )
    for k, result in zip(linear, results[: len(linear)], strict=True):
        cotangents_of[k] = result
    return cotangents_of


# Batching: a batch of all xs is one more dimension of the sum.


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, pairs: int, dimension: int, **params: Any
) -> tuple[Any, list[Any]]:
    moved = collective_matmul.batches_first(operands, dims, pairs)
    if moved is None:
        return None, [0]
    return primitive.bind(*moved, pairs=pairs, dimension=dimension + 1, **params), [0]


# Registration.

primitive.define(abstract_eval, collective_matmul.jvp_of_sum, _transpose, _batch)
