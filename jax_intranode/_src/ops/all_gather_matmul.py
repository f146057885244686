"""all_gather_matmul: the gathered x, times matrices that each rank has."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad
from jax.typing import ArrayLike, DTypeLike

from jax_intranode._src import reasons
from jax_intranode._src.ops import (
    collective,
    collective_matmul,
    local_matmuls,
    matmul_arguments,
    overlapped_call,
)
from jax_intranode._src.ops.annotations import AnyMesh, AxisNames, Matrices
from jax_intranode._src.ops.collective import AllGatherParams, all_gather_p
from jax_intranode._src.ops.collective_matmul import (
    Collective,
    Communicate,
    GatherMatmulParams,
    SumMatmulParams,
    TangentParams,
    all_gather_matmul_p,
    matmul_reduce_scatter_p,
    tangent_of_all_gather_matmul_p,
)
from jax_intranode._src.ops.global_arrays import GlobalCall
from jax_intranode._src.ops.matmul_arguments import MatmulCall
from jax_intranode._src.selection.overlap.sizes import Sizes

# The name, for policies of jax.checkpoint, of the gathered x that weight gradients need.
GATHERED = "jax_intranode.gathered"


@overload
def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisNames,
    *,
    gather_axis: int = ...,
    return_gathered: Literal[False] = ...,
    preferred_element_type: DTypeLike | None = ...,
    batch_axes: AxisNames = ...,
    mesh: AnyMesh | None = ...,
) -> jax.Array: ...


@overload
def all_gather_matmul(
    x: ArrayLike,
    w: Sequence[ArrayLike],
    axis_name: AxisNames,
    *,
    gather_axis: int = ...,
    return_gathered: Literal[False] = ...,
    preferred_element_type: DTypeLike | None = ...,
    batch_axes: AxisNames = ...,
    mesh: AnyMesh | None = ...,
) -> list[jax.Array]: ...


@overload
def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisNames,
    *,
    gather_axis: int = ...,
    return_gathered: Literal[True],
    preferred_element_type: DTypeLike | None = ...,
    batch_axes: AxisNames = ...,
    mesh: AnyMesh | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def all_gather_matmul(
    x: ArrayLike,
    w: Sequence[ArrayLike],
    axis_name: AxisNames,
    *,
    gather_axis: int = ...,
    return_gathered: Literal[True],
    preferred_element_type: DTypeLike | None = ...,
    batch_axes: AxisNames = ...,
    mesh: AnyMesh | None = ...,
) -> tuple[list[jax.Array], jax.Array]: ...


def all_gather_matmul(
    x: ArrayLike,
    w: Matrices,
    axis_name: AxisNames,
    *,
    gather_axis: int = 0,
    return_gathered: bool = False,
    preferred_element_type: DTypeLike | None = None,
    batch_axes: AxisNames = (),
    mesh: AnyMesh | None = None,
) -> jax.Array | list[jax.Array] | tuple[jax.Array | list[jax.Array], jax.Array]:
    """Gathers an array over one or more mapped axes and multiplies it with matrices.

    ``jax.lax.all_gather(x, axis_name, axis=gather_axis, tiled=True) @ w``: the first matmul of a
    tensor-parallel layer with sequence parallelism. With a list of matrices (query, key and value;
    gate and up), x is gathered once.

    On Hopper GPUs, for bfloat16 and float16 and for K and N that are multiples of 8, the all-gather
    is overlapped with the matmuls where a model predicts a gain. Rows are multiplied as they
    arrive, summed in float32 and rounded once. Elsewhere the matmuls follow an all-gather: that of
    this package or that of ``jax.lax``, as for a call of ``jax_intranode.all_gather``. The products
    are then those of ``jnp.matmul``, with the precision of ``jax.default_matmul_precision``.
    `explain` says how a call runs, and why.

    Differentiates as the expression above does, in forward and reverse mode and to any order. The
    tangent is ``all_gather_matmul(dx, w) + gathered @ dw``. In reverse mode one
    ``matmul_reduce_scatter`` of the sum over the list gives the input gradient. The weight
    gradients are local matmuls with the gathered x, computed in the same kernel where that is
    faster. The gathered x is kept from the forward pass. Under ``jax.checkpoint`` it is gathered
    again, unless the policy saves the name "jax_intranode.gathered"::

        jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(
            "jax_intranode.gathered"))

    Policies for dots, such as ``dots_saveable``, do not save the products; give them names. Under
    ``vmap`` over w, it is an ``all_gather`` and a batched matmul.

    The fused kernel follows Flux, and the pipeline PyTorch's ``fused_all_gather_matmul`` (own rows
    first, copy engines, a list of matrices, the gathered x as a result). The gradients follow
    xformers' ``fused_allgather_and_linear``.

    Outside of ``shard_map`` it computes ``x @ w`` on global arrays, under ``jax.jit`` or eagerly,
    on the mesh of ``jax.set_mesh`` or `mesh`. Then the axes, Auto or Explicit ones, divide
    `gather_axis` of x, the last dimension of w and the last dimension of the result.
    Operands that are sharded in another way are treated as by `column_parallel_matmul`.

    Args:
        x: an array [..., K] with 2 or more dimensions, of any dtype that can be multiplied.
        w: a matrix [K, N], or a list of matrices [K, N_i], with the dtype of x.
        axis_name: the name of a mapped axis, or several names, with ranks in row-major order.
        gather_axis: the dimension of x along which to concatenate, any but the last.
        return_gathered: whether to return the gathered x as well.
        preferred_element_type: dtype of the products, as in ``jnp.matmul``; that of x by default.
        batch_axes: on global arrays, the other mesh axes that divide dimension 0 of x (data
            parallelism), before `axis_name` does: a name or several. Explicit axes are known from
            the type of x. On a mesh with further Auto axes the call falls back to ``jax.lax``.
        mesh: on global arrays, the mesh, if there is none in context.

    Returns:
        An array [..., N], or a list of arrays [..., N_i] if w is a list; with `return_gathered` a
        pair of this and the gathered x.

    Raises:
        TypeError: an operand is not an array, the dtypes differ, `preferred_element_type` is
            of a different kind, or `gather_axis` is not an integer.
        ValueError: the numbers of dimensions or the contracted dimensions do not fit, there is no
            such `gather_axis`, or it is the contracted dimension.
        ValueError, TypeError, NameError: on global arrays, as `column_parallel_matmul`.
        NameError: an axis is not bound, as in ``jax.lax.all_gather``.

    Examples:
        Each rank has half of the rows of x and half of the columns of the matrices:

        >>> @jax.jit
        ... @jax.shard_map(
        ...     mesh=mesh, in_specs=(P("model"), P(None, "model")), out_specs=P(None, "model")
        ... )
        ... def gate_and_up(x, w):
        ...     gate, up = jax_intranode.all_gather_matmul(x, [w, 2 * w], "model")
        ...     return gate + up
        >>> x, w = jnp.ones((4, 8)), jnp.ones((8, 6))
        >>> bool(jnp.allclose(gate_and_up(x, w), x @ w * 3))
        True
    """
    name = "all_gather_matmul"
    call = MatmulCall(name, x, w, axis_name, preferred_element_type, batch_axes, mesh, lists=True)
    return of_call(call, gather_axis, return_gathered)


def of_call(call: MatmulCall, gather_axis: Any, return_gathered: Any) -> Any:
    """An all_gather_matmul, for a public function."""
    axis = matmul_arguments.dimension(call.name, "gather_axis", gather_axis, call.x.ndim)
    gathered = bool(return_gathered)
    if axis == call.x.ndim - 1:
        raise ValueError(
            f"{call.name}: gather_axis is {gather_axis}, the last dimension of x, of shape "
            f"{call.x.shape}, which is contracted with w; gather another one, or call "
            "jax_intranode.all_gather and multiply"
        )

    def of_ranks(x: Any, *ws: Any, reason: str | None) -> list[Any]:
        reason = reason or matmul_arguments.reason_for_lax(
            "all_gather", call.axes, [x, *ws], [x], x.dtype
        )
        params = call.params(GatherMatmulParams, axis, gathered=gathered)
        reason = reason or _reason_of_types(x, ws, gathered)
        return _KIND.bind_or_fall_back([x, *ws], params, reason)

    def specs(of_global: GlobalCall, rows: list[Any]) -> tuple[Any, Any, list[Any]]:
        parts = [entry + of_global.axes * (k == axis) for k, entry in enumerate(rows)]
        results = [[*rows, of_global.axes]] * len(call.ws) + [[*rows, ()]] * gathered
        return [*parts, ()], [(), of_global.axes], results

    # The type of the gathered x does not say that all ranks have the same one.
    result, whole = call.run(of_ranks, specs, check_vma=not gathered)
    return (result, whole) if gathered else result


def _reason_of_types(x: Any, ws: Sequence[Any], return_gathered: bool) -> str | None:
    """Why lax runs the call: under check_vma=True one call's results vary over the same axes."""
    of_x, *of_ws = [frozenset(jax.typeof(v).manual_axis_type.varying) for v in (x, *ws)]
    if len({of_x | of_w for of_w in of_ws} | ({of_x} if return_gathered else set())) > 1:
        return reasons.VARY_DIFFERENTLY
    return None


# The unfused computation.


def _unfused(gather: Communicate, x: Any, *ws: Any, params: GatherMatmulParams) -> list[Any]:
    """The all-gather, and the products after it."""
    if x.size:
        whole = gather(x)
    else:  # XLA's collectives refuse empty arrays
        whole = collective.varying(x, params.axes).reshape(_gathered_shape(x.shape, params))
    found = [local_matmuls.dot(whole, w, *params.how) for w in ws]
    return [*found, whole] if params.gathered else found


def _gathered_shape(shape: tuple[int, ...], params: GatherMatmulParams) -> tuple[int, ...]:
    axis = params.axis
    return (*shape[:axis], shape[axis] * params.world_size, *shape[axis + 1 :])


def _gather(params: GatherMatmulParams) -> Collective:
    return all_gather_p, AllGatherParams(params.axes, params.axis, True, params.world_size)


# Abstract evaluation.


def abstract_eval(x: Any, *ws: Any, params: GatherMatmulParams) -> list[Any]:
    """The types of the results."""
    whole = x.update(shape=_gathered_shape(x.shape, params), weak_type=False)
    shapes = [local_matmuls.dot_shape(whole, w, params.transposed) for w in ws]
    found = [whole.update(shape=s, dtype=np.dtype(params.dtype)) for s in shapes]
    return [*found, whole] if params.gathered else found


# Overlapping.


def request(x: Any, *ws: Any, params: GatherMatmulParams) -> overlapped_call.Request | str:
    """The request for a custom call, from the operands' types, or why there is none."""
    if not ws:
        return "no matmul"
    sizes = Sizes(
        "all_gather_matmul",
        outer=math.prod(x.shape[: params.axis]),
        rows=math.prod(x.shape[params.axis : -1]),
        ks=(x.shape[-1],),
        ns=tuple(w.shape[0 if params.transposed else 1] for w in ws),
        world_size=params.world_size,
    )
    return overlapped_call.Request(
        sizes,
        params.axis,
        dtypes=(x.dtype, *(w.dtype for w in ws), params.dtype),
        precision=params.precision,
        transposed=params.transposed,
        gathered=params.gathered,
    )


_KIND = collective_matmul.Kind(
    all_gather_matmul_p, _gather, _unfused, lambda avals, params: avals[0], request
)


# Differentiation.


def _jvp(
    bind: Any, primals: Sequence[Any], tangents: Sequence[Any], params: GatherMatmulParams
) -> tuple[list[Any], list[Any]]:
    x, *ws = primals
    dx, *dws = tangents
    moving = tuple(k for k, dw in enumerate(dws) if type(dw) is not ad.Zero)
    # The tangents of matrices are multiplied with the gathered x, and need no collective then.
    primal_params = replace(params, gathered=params.gathered or bool(moving))
    results = list(bind(x, *ws, params=primal_params))
    if moving:
        results[-1] = checkpoint_name(results[-1], GATHERED)
    whole = results[-1]
    results = results[: len(ws) + params.gathered]
    # Where the gathered x is a result its tangent is one too, which this primitive does not give.
    if moving and type(dx) is not ad.Zero and not params.gathered:
        return results, tangent_of_all_gather_matmul_p.bind(
            dx,
            *ws,
            whole,
            *(dws[k] for k in moving),
            params=TangentParams(params, len(ws), moving),
        )
    moved: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    if type(dx) is not ad.Zero:
        moved = list(bind(dx, *ws, params=params))
    for k in moving:
        of_w = local_matmuls.dot(whole, dws[k], *params.how)
        moved[k] = ad.add_jaxvals(moved[k], of_w) if type(dx) is not ad.Zero else of_w
    return results, moved


def _transpose(
    cotangents: Sequence[Any], x: Any, *ws: Any, params: GatherMatmulParams
) -> list[Any]:
    of_products, of_gathered = cotangents[: len(ws)], cotangents[len(ws) :]
    none_of_ws: list[Any] = [None] * len(ws)
    if ad.is_undefined_primal(x):
        terms = [(ct, w) for ct, w in zip(of_products, ws, strict=True) if type(ct) is not ad.Zero]
        addend = [ct for ct in of_gathered if type(ct) is not ad.Zero]
        if not terms and not addend:
            return [ad.Zero(x.aval.to_ct_aval()), *none_of_ws]
        (ct_x,) = matmul_reduce_scatter_p.bind(
            *[ct for ct, _ in terms],
            *[w for _, w in terms],
            *addend,
            params=params.of(
                SumMatmulParams,
                dtype=x.aval.dtype,
                transposed=not params.transposed,
                terms=len(terms),
            ),
        )
        return [ct_x, *none_of_ws]
    # Linear in the matrices. Only jax.linear_transpose asks for that: see `_jvp`.
    (whole,) = all_gather_matmul_p.bind(x, params=replace(params, gathered=True))
    return [None, *collective_matmul.wgrads(whole, of_products, ws, params)]


# Batching: a batch of xs is one more dimension of x.


def _batch(
    name: Hashable,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: GatherMatmulParams,
) -> tuple[list[Any], list[Any]]:
    # A batch that is itself spread over mesh axes (vmap's spmd_axis_name) varies over them.
    x, *ws = operands = matmul_arguments.varying_alike(operands, ())
    if name in params.axes:
        return _KIND.batch_over_hidden_axis(name, size, operands, dims, params)
    d, *of_ws = dims
    if any(of_w is not None for of_w in of_ws):
        out_dims = [None if d is None and of_w is None else 0 for of_w in of_ws]
        if params.gathered:
            out_dims.append(None if d is None else 0)
        return _KIND.batch_unfused(size, operands, dims, out_dims, params)
    if d == x.ndim - 1:
        x, d = jnp.moveaxis(x, d, 0), 0
    batched = replace(params, axis=params.axis + (d <= params.axis))
    results = all_gather_matmul_p.bind(x, *ws, params=batched)
    return results, [d] * len(results)


# Registration.


def _needed(used: list[bool], params: GatherMatmulParams) -> tuple[list[bool], GatherMatmulParams]:
    if not params.gathered:
        return [True, *used], params
    return [True, *used[:-1]], replace(params, gathered=used[-1])


all_gather_matmul_p.register(
    abstract_eval=abstract_eval,
    decide=_KIND.decide,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    needed=_needed,
)
