"""What the collective matmuls share: their primitives, and parts of their rules.

Their primitives, and those of their gradients, are declared here, because differentiation turns one
into another: each primitive's rules are in its own file, and may bind the others' primitives.

A collective matmul is overlapped, as one custom call, where `overlapped.find` says so. Elsewhere it
is computed unfused: products (`products`), and a collective that is selected by its own rules. Each
file has a function `unfused(communicate, *operands, params)` for this, where `communicate` is the
collective as a function of one array.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jax_intranode._src.ops import collective, fallback, matmul_arguments, overlapped, products
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Operation, OpPrimitive, nbytes
from jax_intranode._src.selection import select

# The primitives, and their parameters.


@dataclass(frozen=True)
class MatmulParams:
    """Parameters of a collective matmul.

    Attributes:
        axes: the mesh axes of the collective.
        axis: the dimension of x that is gathered, or of the product that is scattered; 0 for an
            all-reduce.
        world_size: number of ranks.
        dtype: dtype of the products.
        precision: as in ``jax.lax.dot_general``.
        transposed: whether the matrices are [N, K] instead of [K, N].
        gathered: all_gather_matmul: whether the gathered x is the last result.
        terms: matmul_reduce_scatter and matmul_all_reduce: number of products that are summed.
        invariant: matmul_all_reduce: as in `collective.PsumParams`.
    """

    axes: tuple[str, ...]
    axis: int
    world_size: int
    dtype: np.dtype[Any]
    precision: Any
    transposed: bool = False
    gathered: bool = False
    terms: int = 1
    invariant: bool = False


@dataclass(frozen=True)
class TangentParams:
    """Parameters of `tangent_of_all_gather_matmul_p`.

    Attributes:
        matmul: those of the all_gather_matmul that gives the tangents for the tangent of x.
        matrices: number of matrices.
        moving: the matrices, by position, that have a tangent.
    """

    matmul: MatmulParams
    matrices: int
    moving: tuple[int, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.matmul.axes


@dataclass(frozen=True)
class GradientParams:
    """Parameters of the primitives that compute an input gradient and weight gradients.

    Attributes:
        matmul: those of the collective matmul that gives the input gradient.
        dgrad: whether the input gradient is a result, the first one.
        wgrads: the matrices, by position, whose weight gradients are results.
        wgrad_dtype: dtype of the weight gradients.
    """

    matmul: MatmulParams
    dgrad: bool
    wgrads: tuple[int, ...]
    wgrad_dtype: Any

    @property
    def axes(self) -> tuple[str, ...]:
        return self.matmul.axes


# x and the ws -> a product of each w, and the gathered x if `gathered`.
all_gather_matmul_p = OpPrimitive("all_gather_matmul")
# A sum of products (see `products`) -> this rank's part of its sum over the ranks.
matmul_reduce_scatter_p = OpPrimitive("matmul_reduce_scatter")
# A sum of products without addend -> its sum over the ranks.
matmul_all_reduce_p = OpPrimitive("matmul_all_reduce")
# The tangent of x, the ws, and, where a matrix moves, the gathered x and the tangents of the moving
# matrices -> the tangent of each product.
tangent_of_all_gather_matmul_p = OpPrimitive("tangent_of_all_gather_matmul")
# The cotangents of the products, the ws if `dgrad`, and the gathered x if there are `wgrads`
# -> the gradients.
gradients_of_all_gather_matmul_p = OpPrimitive("gradients_of_all_gather_matmul")
# The cotangent of the result, w if `dgrad`, and x if there are `wgrads` -> the gradients.
gradients_of_matmul_reduce_scatter_p = OpPrimitive("gradients_of_matmul_reduce_scatter")

# The collective of an unfused collective matmul: its primitive and parameters, or as a function.
Collective = tuple[OpPrimitive, collective.Params]
Communicate = Callable[[Any], Any]


def bound_here(of: Collective) -> Communicate:
    """The collective as a function that binds it where it is called."""
    primitive, params = of
    return lambda v: primitive.bind(v, params=params)[0]


def bound_as_traced(of: Collective, traced_over: tuple[int, ...] | None) -> Communicate:
    """The collective as a function for the lowering of a call traced over these devices."""
    primitive, params = of
    return lambda v: primitive.bind_as_traced(v, params=params, traced_over=traced_over)[0]


def by_lax(operation: str, reason: str, params: collective.Params) -> Communicate:
    """lax's collective as a function, which records why lax runs it."""

    def communicate(v: Any) -> Any:
        with fallback.to_lax(operation, reason):
            return params.by_lax([v])[0]

    return communicate


# Selection.


def find_overlapped(
    operation: str,
    site: LoweringSite,
    axes: tuple[str, ...],
    traced_over: tuple[int, ...] | None,
    request: overlapped.Request | str,
) -> overlapped.Overlapped | str:
    """The custom call that serves a request, or why there is none."""
    if isinstance(request, str):
        return request
    return overlapped.find(operation, site, traced_over, axes, request)


def explain_overlapped(
    primitive: OpPrimitive, avals: Sequence[Any], communicated: Any, found: overlapped.Overlapped
) -> Operation:
    """What `explain` says of a collective matmul that is overlapped.

    Args:
        primitive: of the collective matmul.
        avals: types of its operands.
        communicated: type of the array that is gathered or summed.
        found: the custom call.
    """
    selected = select.Selection(found.operation, found.reason)
    return Operation(primitive.operation, list(avals), nbytes(communicated), selected)


def explain_unfused(
    primitive: OpPrimitive,
    avals: Sequence[Any],
    communicated: Any,
    of: Collective,
    site: LoweringSite,
    traced_over: tuple[int, ...] | None,
    why: str,
) -> Operation:
    """What `explain` says of a collective matmul that is computed unfused, and `why` it is."""
    own, params = of
    (found,) = own.explain(site, [communicated], params=params, traced_over=traced_over)
    if len(avals) == 1:  # dead code elimination has left nothing to multiply
        return Operation(own.operation, list(avals), nbytes(communicated), found.selected)
    order = "before" if own is collective.all_gather_p else "after"
    reason = f"{own.operation} {order} the matmul, not overlapped ({why}); {found.selected.reason}"
    selected = dataclasses.replace(found.selected, reason=reason)
    return Operation(primitive.operation, list(avals), nbytes(communicated), selected)


# Batching.


def batch_unfused(
    unfused: Callable[..., list[Any]],
    of: Collective,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    out_dims: list[int | None],
    params: MatmulParams,
) -> tuple[list[Any], list[Any]]:
    """Batches the unfused computation, where the products are products of batches."""
    compute = partial(unfused, bound_here(of), params=params)
    return jax.vmap(compute, tuple(dims), out_dims, axis_size=size)(*operands), out_dims


def batch_over_hidden_axis(
    primitive: OpPrimitive,
    unfused: Callable[..., list[Any]],
    of: Collective,
    name: Hashable,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: MatmulParams,
) -> tuple[list[Any], list[Any]]:
    """Batches over an axis of vmap that hides the mesh axis of its name: lax communicates."""
    communicate = by_lax(primitive.operation, fallback.reason_of_hidden_axis(name), of[1])
    compute = partial(unfused, communicate, params=params)
    mapped = jax.vmap(compute, tuple(dims), 0, axis_name=name, axis_size=size)
    results = mapped(*operands)
    return results, [0] * len(results)


# Rules of matmul_reduce_scatter and matmul_all_reduce, which sum products.


def jvp_of_sum(
    bind: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    params: MatmulParams,
) -> tuple[list[Any], list[Any]]:
    """The tangent is one collective of the sum of dx_i @ w_i + x_i @ dw_i."""
    (result,) = bind(*primals, params=params)
    xs, ws, _ = products.split_terms(primals, params.terms)
    dxs, dws, addend = (
        [t if type(t) is not ad.Zero else None for t in part]
        for part in products.split_terms(tangents, params.terms)
    )
    terms = [(dx, w) for dx, w in zip(dxs, ws, strict=True) if dx is not None]
    terms += [(x, dw) for x, dw in zip(xs, dws, strict=True) if dw is not None]
    operands = [x for x, _ in terms] + [w for _, w in terms] + [v for v in addend if v is not None]
    if not operands:
        return [result], [ad.Zero(jax.typeof(result).to_tangent_aval())]
    moved = bind(*operands, params=dataclasses.replace(params, terms=len(terms)))
    return [result], list(moved)


def transpose_of_sum(ct: Any, operands: Sequence[Any], params: MatmulParams) -> list[Any]:
    """Cotangents of the operands of a sum of products; None for operands that are known."""
    precision, transposed = params.precision, params.transposed
    xs, ws, addend = products.split_terms(operands, params.terms)
    of_xs = [
        products.dot(ct, w, x.aval.dtype, precision, not transposed)
        if ad.is_undefined_primal(x)
        else None
        for x, w in zip(xs, ws, strict=True)
    ]
    of_ws = [
        products.wgrad_dot(x, ct, w.aval.dtype, precision, transposed)
        if ad.is_undefined_primal(w)
        else None
        for x, w in zip(xs, ws, strict=True)
    ]
    of_addend = [ct.astype(v.aval.dtype) if ad.is_undefined_primal(v) else None for v in addend]
    return of_xs + of_ws + of_addend


def batch_of_sum(
    primitive: OpPrimitive,
    unfused: Callable[..., list[Any]],
    of: Collective,
    name: Hashable,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: MatmulParams,
    batched: MatmulParams,
) -> tuple[list[Any], list[Any]]:
    """Batches a sum of products.

    If all xs and the addend are batched and no matrix is, the batch becomes their first dimension,
    and the primitive is bound with the parameters `batched`.
    """
    # A batch that is itself spread over mesh axes (vmap's spmd_axis_name) varies over them.
    operands = matmul_arguments.varying_alike(operands, ())
    if name in params.axes:
        return batch_over_hidden_axis(primitive, unfused, of, name, size, operands, dims, params)
    xs, ws, addend = products.split_terms(dims, params.terms)
    if any(d is not None for d in ws) or None in (*xs, *addend):
        return batch_unfused(unfused, of, size, operands, dims, [0], params)
    moved = [v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(operands, dims, strict=True)]
    return primitive.bind(*moved, params=batched), [0]
