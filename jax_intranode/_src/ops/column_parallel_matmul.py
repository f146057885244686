"""column_parallel_matmul: x, times matrices whose columns are divided among the ranks.

With sequence parallelism it is an all_gather_matmul. Otherwise all ranks have the same x, and each
multiplies it with its columns. Then nothing is sent forward, and the gradient of x is the sum of
all ranks' gradients. The primitive here stands for these products, so that one matmul_all_reduce
computes that gradient. JAX would insert a psum after the matmuls.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir
from jax.typing import ArrayLike, DTypeLike

from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.ops import (
    all_gather_matmul,
    collective,
    collective_matmul,
    fallback,
    few_rows,
    local_matmuls,
    matmul_arguments,
)
from jax_intranode._src.ops.annotations import AnyMesh, AxisNames, Matrices
from jax_intranode._src.ops.collective_matmul import (
    AllReduceMatmulParams,
    ColumnParams,
    matmul_all_reduce_p,
)
from jax_intranode._src.ops.global_arrays import GlobalCall
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.matmul_arguments import MatmulCall
from jax_intranode._src.ops.primitive import Decision, OpPrimitive

# x, which is the same on all ranks, and the ws -> a product of each w.
column_parallel_matmul_p = OpPrimitive("column_parallel_matmul")


@overload
def column_parallel_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisNames,
    *,
    gather_axis: int | None = ...,
    preferred_element_type: DTypeLike | None = ...,
    batch_axes: AxisNames = ...,
    mesh: AnyMesh | None = ...,
) -> jax.Array: ...


@overload
def column_parallel_matmul(
    x: ArrayLike,
    w: Sequence[ArrayLike],
    axis_name: AxisNames,
    *,
    gather_axis: int | None = ...,
    preferred_element_type: DTypeLike | None = ...,
    batch_axes: AxisNames = ...,
    mesh: AnyMesh | None = ...,
) -> list[jax.Array]: ...


def column_parallel_matmul(
    x: ArrayLike,
    w: Matrices,
    axis_name: AxisNames,
    *,
    gather_axis: int | None = None,
    preferred_element_type: DTypeLike | None = None,
    batch_axes: AxisNames = (),
    mesh: AnyMesh | None = None,
) -> jax.Array | list[jax.Array]:
    """Multiplies with a matrix whose columns are divided over mesh axes.

    ``x @ w`` on global arrays: the first matmul of a tensor-parallel layer. Call it under
    ``jax.jit`` or eagerly, with the mesh of ``jax.set_mesh`` in context or with `mesh`. The mesh
    axes may be Auto or Explicit. Inside ``jax.shard_map`` it takes and returns the ranks' shards.

    Without `gather_axis` x is the same on all ranks. The matmul sends nothing, and one
    ``matmul_all_reduce`` computes the gradient of x. Between two Hopper GPUs one row, with 8 to
    16 MB of w on each rank, has the kernel of ``matmul_all_reduce``. With `gather_axis` the ranks
    have divided that dimension of x (sequence parallelism). Then this is `all_gather_matmul`, whose
    documentation also says how it differentiates and what is kept for the backward pass.

    XLA reshards global operands that are sharded in another way than below, for instance weights
    that are sharded over `batch_axes`, too. Only one case raises ValueError: with Explicit axes, an
    operand whose type has `axis_name` at another dimension.

    Differentiates as ``x @ w`` does, in forward and reverse mode and to any order. Inside
    ``shard_map(..., check_vma=False)`` JAX, and not this function, sums the gradient of x.

    Args:
        x: an array [..., K] with 2 or more dimensions, of any dtype that can be multiplied.
        w: a matrix [K, N], or a list of matrices [K, N_i], with the dtype of x. Every N is a
            multiple of the number of ranks.
        axis_name: the name of a mesh axis, or several names, over which the columns are divided.
        gather_axis: the dimension of x that is divided over these axes, any but the last; None if
            x is the same on all ranks.
        preferred_element_type: dtype of the products, as in ``jnp.matmul``; that of x by default.
        batch_axes: on global arrays, the other mesh axes that divide dimension 0 of x (data
            parallelism), before `axis_name` does: a name or several. Explicit axes are known from
            the type of x. On a mesh with further Auto axes the call falls back to ``jax.lax``.
        mesh: on global arrays, the mesh, if there is none in context.

    Returns:
        An array [..., N], or a list of arrays [..., N_i]. Its last dimension is divided over
        `axis_name`, and dimension 0 over `batch_axes`.

    Raises:
        TypeError: an operand is not an array, the dtypes differ, `preferred_element_type` is
            of a different kind, `gather_axis` is not an integer, or `mesh` is not a mesh.
        ValueError: the numbers of dimensions or the contracted dimensions do not fit, there is no
            such `gather_axis` or it is the contracted dimension, a dimension is not a multiple of
            the number of its parts, an axis is named twice, the type of an operand says that it is
            sharded over `axis_name` in another way, or `batch_axes` or `mesh` is given inside
            shard_map.
        NameError: there is no such axis.

    Examples:
        >>> x, w = jnp.ones((4, 8)), jnp.ones((8, 6))
        >>> y = jax_intranode.column_parallel_matmul(x, w, "model", mesh=mesh)
        >>> y.shape, y.addressable_shards[0].data.shape
        ((4, 6), (4, 3))
    """
    name = "column_parallel_matmul"
    call = MatmulCall(name, x, w, axis_name, preferred_element_type, batch_axes, mesh, lists=True)
    if gather_axis is not None:
        return all_gather_matmul.of_call(call, gather_axis, False)

    def of_ranks(x: Any, *ws: Any, reason: str | None) -> list[Any]:
        over = jax.typeof(x).manual_axis_type.varying
        sums = trace_state.check_vma() and not over.intersection(call.axes)
        params = call.params(ColumnParams, 0, sums=sums, copies=call.copies())
        if not sums and not any(few_rows.may_be_few((x, w), *params.how) for w in ws):
            return _products(x, *ws, params=params)
        reason = reason or matmul_arguments.reason_for_lax("psum", call.axes, [x, *ws], ws, x.dtype)
        if reason is None:
            return _bind(x, ws, params)
        if not sums:
            return _products(x, *ws, params=params)
        with fallback.to_lax(name, reason):
            return _products(x, *ws, params=params)

    def specs(of_global: GlobalCall, rows: list[Any]) -> tuple[Any, Any, list[Any]]:
        results = [[*rows, of_global.axes]] * len(call.ws)
        return [*rows, ()], [(), of_global.axes], results

    return call.run(of_ranks, specs)[0]


def _bind(x: Any, ws: Sequence[Any], params: ColumnParams) -> list[Any]:
    """Binds the primitive: the ws vary over the axes, and all operands over the same others."""
    _, *ws = matmul_arguments.varying_alike([x, *ws], params.axes)
    over = jax.typeof(ws[0]).manual_axis_type.varying
    x = collective.varying(x, sorted(over.difference(params.axes)))
    with jax.named_scope("jax_intranode.column_parallel_matmul"):
        return column_parallel_matmul_p.bind(x, *ws, params=params)


def _products(x: Any, *ws: Any, params: ColumnParams) -> list[Any]:
    return [local_matmuls.dot(x, w, *params.how) for w in ws]


# Abstract evaluation.


def _abstract_eval(x: Any, *ws: Any, params: ColumnParams) -> list[Any]:
    kind = x.manual_axis_type
    if params.sums:
        kind = kind.update(varying=kind.varying | set(params.axes))
    return [
        x.update(
            shape=local_matmuls.dot_shape(x, w, params.transposed),
            dtype=params.dtype,
            weak_type=False,
            manual_axis_type=kind,
        )
        for w in ws
    ]


def _decide(site: LoweringSite, avals: Sequence[Any], params: ColumnParams) -> Decision:
    found = [
        few_rows.find(site, "column_parallel_matmul", (avals[0], w), params) for w in avals[1:]
    ]

    def products(x: Any, *ws: Any) -> list[Any]:
        return [
            local_matmuls.dot(x, w, *params.how) if kernel is None else kernel(x, w)[0]
            for w, kernel in zip(ws, found, strict=True)
        ]

    return Decision(mlir.lower_fun(products), lambda: [])  # nothing is sent


# Differentiation: linear in x, and linear in the matrices.


def _jvp(
    bind: Any, primals: Sequence[Any], tangents: Sequence[Any], params: ColumnParams
) -> tuple[list[Any], list[Any]]:
    x, *ws = primals
    dx, *dws = tangents
    results = bind(x, *ws, params=params)
    moved: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    if type(dx) is not ad.Zero:
        moved = list(bind(dx, *ws, params=params))
    moving = [k for k, dw in enumerate(dws) if type(dw) is not ad.Zero]
    if moving:
        of_ws = bind(x, *(dws[k] for k in moving), params=params)
        for k, of_w in zip(moving, of_ws, strict=True):
            moved[k] = of_w if type(dx) is ad.Zero else ad.add_jaxvals(moved[k], of_w)
    return list(results), moved


def _transpose(cotangents: Sequence[Any], x: Any, *ws: Any, params: ColumnParams) -> list[Any]:
    terms = [(ct, w) for ct, w in zip(cotangents, ws, strict=True) if type(ct) is not ad.Zero]
    if ad.is_undefined_primal(x):
        if not terms:
            return [None] * (1 + len(ws))
        operands = [*(ct for ct, _ in terms), *(w for _, w in terms)]
        backward = params.of(
            AllReduceMatmulParams,
            dtype=x.aval.dtype,
            transposed=not params.transposed,
            terms=len(terms),
            invariant=True,
        )
        if params.sums:
            (ct_x,) = matmul_all_reduce_p.bind(*operands, params=backward)
        else:
            ct_x = local_matmuls.sum_of_dots(operands, len(terms), *backward.how)
        return [ct_x, *[None] * len(ws)]
    whole = collective.varying(x, params.axes)
    return [None, *collective_matmul.wgrads(whole, cotangents, ws, params)]


# Batching: a batch of xs is one more dimension of x.


def _batch(
    name: Hashable, size: int, operands: Sequence[Any], dims: Sequence[Any], params: ColumnParams
) -> tuple[list[Any], list[Any]]:
    d, *of_ws = dims
    if name in params.axes or any(of_w is not None for of_w in of_ws):
        out_dims = [None if d is None and of_w is None else 0 for of_w in of_ws]
        compute = partial(_products, params=params)
        return jax.vmap(compute, tuple(dims), out_dims, axis_size=size)(*operands), out_dims
    x, *ws = operands
    # A batch that is itself spread over mesh axes (vmap's spmd_axis_name) varies over them.
    results = _bind(jnp.moveaxis(x, d, 0), ws, params)
    return results, [0] * len(results)


# Registration.


column_parallel_matmul_p.register(
    abstract_eval=_abstract_eval,
    decide=_decide,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    needed=lambda used, params: ([True, *used], params),
)
