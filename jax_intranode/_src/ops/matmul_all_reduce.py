"""matmul_all_reduce: the sum of every rank's product, on every rank."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad

from jax_intranode._src import compat
from jax_intranode._src.ops import (
    all_gather,
    collective_matmul,
    matmul_reduce_scatter,
    overlapped,
    psum,
)


def _by_parts(
    add: collective_matmul.Send,
    *operands: Any,
    pairs: int,
    dtype: Any,
    precision: Any,
    transposed: bool,
    **params: Any,
) -> list[Any]:
    del params
    return [add(collective_matmul.sum_of_dots(operands, pairs, dtype, precision, transposed))]


def _request(*operands: Any, invariant: bool, size: int, **params: Any) -> overlapped.Request | str:
    del invariant
    rows = math.prod(operands[0].shape[:-1])
    if rows % size != 0:
        return f"{rows} rows, no multiple of {size} ranks"
    # The rows of all dimensions are cut as those of one: no single one has to be a multiple, and
    # what is gathered then lies where it belongs.
    of_operands = matmul_reduce_scatter.request(*operands, dimension=0, size=size, **params)
    if isinstance(of_operands, str):
        return of_operands

    def of_rows(*operands: Any) -> Sequence[Any]:
        xs, ws, _ = collective_matmul.split(operands, params["pairs"])
        return [*(x.reshape(rows, x.shape[-1]) for x in xs), *ws]

    return dataclasses.replace(of_operands, operands=of_rows)


# The primitive: sums products of `pairs` xs and as many ws over the ranks. `invariant` as in psum;
# `size` ranks; the rest as in all_gather_matmul.
primitive = collective_matmul.CollectiveMatmul(
    "matmul_all_reduce",
    _by_parts,
    collective_matmul.sum_of_dots_aval,
    lambda *, axes, invariant, **_: (psum.primitive, {"axes": axes, "invariant": invariant}),
    _request,
    lambda *, axes, size, **_: (
        all_gather.primitive,
        {"axes": axes, "axis": 0, "tiled": True, "size": size},
    ),
)


def matmul_all_reduce(x: Any, w: Any, axis_name: Any, *, preferred_element_type: Any = None) -> Any:
    """Multiplies with a matrix and sums over one or more mapped axes.

    ``jax.lax.psum(x @ w, axis_name)``: the second matmul of a tensor-parallel layer.

    Where ``matmul_reduce_scatter`` of its rows would be overlapped it is that and an ``all_gather``
    of the result: on Hopper GPUs, of bfloat16 and float16, with K and N of multiples of 8, and if
    the number of rows, the product of all dimensions of x but the last, is a multiple of that of
    the ranks. Elsewhere it is a ``psum`` after the matmul. The ``all_gather`` and the ``psum`` are
    of this package or of ``jax.lax``, whichever they would take by themselves; ``explain`` says
    which, and why. Each rank's product, its own too, is rounded to the result's dtype; then they
    are summed as by ``psum``, in rank order. Products are summed in float32, or are those of
    ``jnp.matmul``, with the precision of ``jax.default_matmul_precision``.

    Derivatives are those of the expression above, in forward and reverse mode and of any order. The
    tangent is one sum of ``dx @ w + x @ dw``. In reverse mode the cotangent is the same on every
    rank under check_vma=True, and the derivatives are local matmuls; under check_vma=False one
    ``psum`` of the cotangent serves both, as for ``jax.lax.psum``. Under ``vmap`` over w, and over
    both, it is a matmul of batches and a ``psum``.

    Args:
        x: an array [..., K] with 2 dimensions or more, of any dtype that can be multiplied.
        w: a matrix [K, N] of the dtype of x.
        axis_name: the name of a mapped axis, or several.
        preferred_element_type: the result's dtype, as in ``jnp.matmul``; by default that of x.

    Returns:
        An array [..., N].

    Raises:
        TypeError: an operand is no array, the dtypes differ, or `preferred_element_type` is of
            another kind than they are.
        ValueError: the ranks or the contracted dimensions do not fit.
        NameError: an axis is not bound, as in ``jax.lax.psum``.
    """
    name = "matmul_all_reduce"
    x, (w,) = collective_matmul.checked_operands(name, x, [w])
    dtype = collective_matmul.checked_dtype(name, x, preferred_element_type)
    axes = collective_matmul.axes_of(axis_name)
    reason = collective_matmul.reason_for_lax("psum", axes, [x, w], [x, w], dtype)

    params: dict[str, Any] = {
        "pairs": 1,
        "axes": axes,
        "invariant": compat.check_vma(),
        "dtype": dtype,
        "precision": compat.matmul_precision(),
        "transposed": False,
    }
    if reason is not None:
        send = collective_matmul.by_lax(name, reason, lambda v: lax.psum(v, axis_name))
        (result,) = _by_parts(send, x, w, **params)
    else:
        operands = collective_matmul.varying_alike([x, w], axes)
        with jax.named_scope(f"jax_intranode.{name}"):
            (result,) = primitive.bind(
                *operands, size=collective_matmul.ranks(name, axes), **params
            )
    return collective_matmul.as_weak_as([x, w], preferred_element_type, result)


# Abstract evaluation.


def _abstract_eval(
    *operands: Any, axes: tuple[str, ...], invariant: bool, **params: Any
) -> list[Any]:
    total = collective_matmul.sum_of_dots_aval(*operands, **params)
    if not invariant:
        return [total]
    kind = total.manual_axis_type
    return [total.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))]


# Differentiation.


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    pairs: int,
    axes: tuple[str, ...],
    invariant: bool,
    size: int,
    dtype: Any,
    precision: Any,
    transposed: bool,
) -> list[Any]:
    del size, dtype
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [None] * len(operands)
    if invariant:
        ct = lax.pcast(ct, axes, to="varying")
    else:
        (ct,) = psum.primitive.bind(ct, axes=axes, invariant=False)
    return collective_matmul.transpose_of_sum(ct, operands, pairs, precision, transposed)


# Batching: a batch of all xs is one more dimension of the sum.


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, pairs: int, **params: Any
) -> tuple[Any, list[Any]]:
    moved = collective_matmul.batches_first(operands, dims, pairs)
    if moved is None:
        return None, [0]
    return primitive.bind(*moved, pairs=pairs, **params), [0]


# Registration.

primitive.define(_abstract_eval, collective_matmul.jvp_of_sum, _transpose, _batch)
