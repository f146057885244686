"""all_gather_matmul: every rank's x, one after another, times matrices that a rank has."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jax_intranode._src import compat
from jax_intranode._src.ops import (
    all_gather,
    collective,
    collective_matmul,
    derivatives,
    matmul_reduce_scatter,
    overlapped,
)

# The name, for policies of jax.checkpoint, of the gathered x that derivatives by w need.
GATHERED = "jax_intranode.gathered"


def _by_parts(
    gather: collective_matmul.Send,
    x: Any,
    *ws: Any,
    axes: tuple[str, ...],
    axis: int,
    size: int,
    gathered: bool,
    dtype: Any,
    precision: Any,
    transposed: bool,
) -> list[Any]:
    if x.size:
        whole = gather(x)
    else:  # XLA's collectives refuse it
        whole = collective.varying(x, axes).reshape(_whole(x.shape, axis, size))
    products = [collective_matmul.dot(whole, w, dtype, precision, transposed) for w in ws]
    return [*products, whole] if gathered else products


def _whole(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] * size, *shape[axis + 1 :])


def request(
    x: Any,
    *ws: Any,
    axes: tuple[str, ...],
    axis: int,
    size: int,
    gathered: bool,
    dtype: Any,
    precision: Any,
    transposed: bool,
) -> overlapped.Request | str:
    """What may be overlapped, or why nothing can be."""
    del axes, size
    if not ws:
        return "no matmul"
    return overlapped.Request(
        axis=axis,
        outer=math.prod(x.shape[:axis]),
        rows=math.prod(x.shape[axis:-1]),
        ks=(x.shape[-1],),
        ns=tuple(w.shape[0 if transposed else 1] for w in ws),
        dtypes=(x.dtype, *(w.dtype for w in ws), dtype),
        precision=precision,
        transposed=transposed,
        gathered=gathered,
    )


# The primitive: gathers x and multiplies it with each of the ws; of `dtype`, with `precision`. With
# `gathered` the last result is the gathered x. `size` ranks; `transposed` as in collective_matmul.
primitive = collective_matmul.CollectiveMatmul(
    "all_gather_matmul",
    _by_parts,
    lambda x, *ws, **params: x,
    lambda *, axes, axis, size, **_: (
        all_gather.primitive,
        {"axes": axes, "axis": axis, "tiled": True, "size": size},
    ),
    request,
)


def all_gather_matmul(
    x: Any,
    w: Any,
    axis_name: Any,
    *,
    gather_axis: int = 0,
    return_gathered: bool = False,
    preferred_element_type: Any = None,
) -> Any:
    """Gathers an array over one or more mapped axes and multiplies it with matrices.

    ``jax.lax.all_gather(x, axis_name, axis=gather_axis, tiled=True) @ w``: the first matmul of a
    tensor-parallel layer with sequence parallelism. With a list of matrices (query, key and value;
    gate and up) x is gathered once.

    On Hopper GPUs, of bfloat16 and float16 and with K and N of multiples of 8, the gathering is
    overlapped with the matmuls where that is faster: rows are multiplied as they arrive, summed in
    float32 and rounded once. Elsewhere it is an ``all_gather`` of this package or of ``jax.lax``,
    whichever that one would take, before the matmul; ``explain`` says which, and why. These
    products are those of ``jnp.matmul``, with the precision of ``jax.default_matmul_precision``.

    Derivatives are those of the expression above, in forward and reverse mode and of any order. The
    tangent is ``all_gather_matmul(dx, w) + gathered @ dw``. In reverse mode the derivative by x is
    one ``matmul_reduce_scatter`` of the sum over the list; the derivatives by w are local matmuls
    with the gathered x, in the same kernel where that is faster. That is kept from the forward
    pass; under ``jax.checkpoint`` it is gathered again, unless the policy saves what has the name
    "jax_intranode.gathered"::

        jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(
            "jax_intranode.gathered"))

    Policies for dots, such as ``dots_saveable``, do not save the results: give them names. Under
    ``vmap`` over w, and over both, it is an ``all_gather`` and a matmul of batches.

    The algorithm after PyTorch's ``fused_all_gather_matmul`` (own rows first, copy engines, a list
    of matrices, the gathered x as a result) and xformers' ``fused_allgather_and_linear`` (the
    derivatives).

    Args:
        x: an array [..., K] with 2 dimensions or more, of any dtype that can be multiplied.
        w: a matrix [K, N], or a list of matrices [K, N_i], of the dtype of x.
        axis_name: the name of a mapped axis, or several: ranks in row-major order.
        gather_axis: the dimension of x along which to concatenate; any but the last.
        return_gathered: whether to return the gathered x, too.
        preferred_element_type: the result's dtype, as in ``jnp.matmul``; by default that of x.

    Returns:
        An array of the shape of the gathered x, but with N in place of K; for a list of matrices a
        list of them. With `return_gathered` a pair of this and the gathered x.

    Raises:
        TypeError: an operand is no array, the dtypes differ, `preferred_element_type` is of another
            kind than they are, or `gather_axis` is no integer.
        ValueError: the ranks or the contracted dimensions do not fit, there is no such
            `gather_axis`, or it is the contracted one.
        NameError: an axis is not bound, as in ``jax.lax.all_gather``.
    """
    name = "all_gather_matmul"
    several = isinstance(w, (list, tuple))
    x, ws = collective_matmul.checked_operands(name, x, w if several else [w])
    dtype = collective_matmul.checked_dtype(name, x, preferred_element_type)
    axis = collective_matmul.checked_dimension(name, "gather_axis", gather_axis, x.ndim)
    if axis == x.ndim - 1:
        raise ValueError(
            f"{name}: gather_axis is {gather_axis}, the last dimension of x, of shape {x.shape}, "
            "which is contracted with w; gather another one, or call jax_intranode.all_gather and "
            "multiply"
        )
    axes = collective_matmul.axes_of(axis_name)
    reason = collective_matmul.reason_for_lax("all_gather", axes, [x, *ws], [x], x.dtype)
    reason = reason or _reason_of_types(x, ws, return_gathered)

    params: dict[str, Any] = {
        "axes": axes,
        "axis": axis,
        "size": collective_matmul.ranks(name, axes),
        "gathered": bool(return_gathered),
        "dtype": dtype,
        "precision": compat.matmul_precision(),
        "transposed": False,
    }
    if reason is not None:
        send = collective_matmul.by_lax(
            name, reason, lambda v: lax.all_gather(v, axis_name, axis=axis, tiled=True)
        )
        results = _by_parts(send, x, *ws, **params)
    else:
        operands = collective_matmul.varying_alike([x, *ws], axes)
        with jax.named_scope(f"jax_intranode.{name}"):
            results = primitive.bind(*operands, **params)
    products = [
        collective_matmul.as_weak_as([x, w], preferred_element_type, product)
        for w, product in zip(ws, results[: len(ws)], strict=True)
    ]
    result = products if several else products[0]
    if return_gathered:
        return result, collective_matmul.as_weak_as([x], None, results[-1])
    return result


def _reason_of_types(x: Any, ws: Sequence[Any], return_gathered: bool) -> str | None:
    """Under check_vma=True the results of one call vary over the same axes."""
    of_x, *of_ws = [frozenset(jax.typeof(v).manual_axis_type.varying) for v in (x, *ws)]
    if len({of_x | of_w for of_w in of_ws} | ({of_x} if return_gathered else set())) > 1:
        return "results that vary over different axes"
    return None


# Abstract evaluation.


def abstract_eval(
    x: Any,
    *ws: Any,
    axes: tuple[str, ...],
    axis: int,
    size: int,
    gathered: bool,
    dtype: Any,
    precision: Any,
    transposed: bool,
) -> list[Any]:
    """From types to types."""
    del axes, precision
    whole = x.update(shape=_whole(x.shape, axis, size), weak_type=False)
    shapes = [collective_matmul.dot_shape(whole, w, transposed) for w in ws]
    products = [whole.update(shape=s, dtype=np.dtype(dtype)) for s in shapes]
    return [*products, whole] if gathered else products


# Differentiation: with the gathered x the derivatives by the matrices are local.


def _jvp(
    bind: Any, primals: Sequence[Any], tangents: Sequence[Any], *, gathered: bool, **params: Any
) -> tuple[list[Any], list[Any]]:
    x, *ws = primals
    dx, *dws = tangents
    by_w = any(type(dw) is not ad.Zero for dw in dws)
    results = list(bind(x, *ws, gathered=gathered or by_w, **params))
    if by_w:
        results[-1] = checkpoint_name(results[-1], GATHERED)
    whole = results[-1]
    results = results[: len(ws) + gathered]
    # One equation for both, but where the gathered x is a result: its tangent is one, too.
    if by_w and type(dx) is not ad.Zero and not gathered:
        moving = tuple(k for k, dw in enumerate(dws) if type(dw) is not ad.Zero)
        return results, derivatives.tangent_of_all_gather_matmul.bind(
            dx, *ws, whole, *(dws[k] for k in moving), pairs=len(ws), by_w=moving, **params
        )
    moved: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    if type(dx) is not ad.Zero:
        moved = list(bind(dx, *ws, gathered=gathered, **params))
    for k, dw in enumerate(dws):
        if type(dw) is not ad.Zero:
            by_this = collective_matmul.dot(
                whole, dw, params["dtype"], params["precision"], params["transposed"]
            )
            moved[k] = ad.add_jaxvals(moved[k], by_this) if type(dx) is not ad.Zero else by_this
    return results, moved


def _transpose(
    cotangents: Sequence[Any],
    x: Any,
    *ws: Any,
    axes: tuple[str, ...],
    axis: int,
    size: int,
    gathered: bool,
    dtype: Any,
    precision: Any,
    transposed: bool,
) -> list[Any]:
    nonzero = [None if type(ct) is ad.Zero else ct for ct in cotangents]
    of_products = nonzero[: len(ws)]
    nothing: list[Any] = [None] * len(ws)
    if ad.is_undefined_primal(x):
        terms = [(ct, w) for ct, w in zip(of_products, ws, strict=True) if ct is not None]
        addend = [ct for ct in nonzero[len(ws) :] if ct is not None]
        if not terms and not addend:
            return [ad.Zero(x.aval.to_ct_aval()), *nothing]
        (ct_x,) = matmul_reduce_scatter.primitive.bind(
            *[ct for ct, _ in terms],
            *[w for _, w in terms],
            *addend,
            pairs=len(terms),
            axes=axes,
            dimension=axis,
            size=size,
            dtype=x.aval.dtype,
            precision=precision,
            transposed=not transposed,
        )
        return [ct_x, *nothing]
    # Linear in matrices, which only jax.linear_transpose asks for.
    (whole,) = primitive.bind(
        x,
        axes=axes,
        axis=axis,
        size=size,
        gathered=True,
        dtype=dtype,
        precision=precision,
        transposed=transposed,
    )
    return [
        None,
        *(
            collective_matmul.dot_of_matrix(whole, ct, w.aval.dtype, precision, transposed)
            if ad.is_undefined_primal(w) and ct is not None
            else None
            for ct, w in zip(of_products, ws, strict=True)
        ),
    ]


# Batching: a batch of x is one more dimension of it.


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, axis: int, gathered: bool, **params: Any
) -> tuple[Any, list[Any]]:
    x, *ws = operands
    d, *of_ws = dims
    if any(of_w is not None for of_w in of_ws):
        out_dims = [None if d is None and of_w is None else 0 for of_w in of_ws]
        return None, [*out_dims, None if d is None else 0] if gathered else out_dims
    if d == x.ndim - 1:
        x, d = jnp.moveaxis(x, d, 0), 0
    results = primitive.bind(x, *ws, axis=axis + (d <= axis), gathered=gathered, **params)
    return results, [d] * len(results)


# Registration.


def _needed(used: list[bool], params: dict[str, Any]) -> tuple[list[bool], dict[str, Any]]:
    if not params["gathered"]:
        return [True, *used], params
    return [True, *used[:-1]], params | {"gathered": used[-1]}


primitive.define(abstract_eval, _jvp, _transpose, _batch, _needed)
