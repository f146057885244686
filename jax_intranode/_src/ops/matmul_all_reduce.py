"""matmul_all_reduce: the sum of every rank's product, on every rank."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad, mlir
from jax.typing import ArrayLike, DTypeLike

from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.ops import (
    collective,
    collective_matmul,
    few_rows,
    local_matmuls,
    matmul_arguments,
    matmul_reduce_scatter,
    overlapped_call,
)
from jax_intranode._src.ops.annotations import AnyMesh, AxisNames
from jax_intranode._src.ops.collective import AllGatherParams, PsumParams, all_gather_p, psum_p
from jax_intranode._src.ops.collective_matmul import (
    AllReduceMatmulParams,
    Collective,
    Communicate,
    matmul_all_reduce_p,
)
from jax_intranode._src.ops.global_arrays import GlobalCall
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.matmul_arguments import MatmulCall
from jax_intranode._src.ops.primitive import Decision, Operation, nbytes


def matmul_all_reduce(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisNames,
    *,
    preferred_element_type: DTypeLike | None = None,
    batch_axes: AxisNames = (),
    mesh: AnyMesh | None = None,
) -> jax.Array:
    """Multiplies with a matrix and sums over one or more mapped axes.

    ``jax.lax.psum(x @ w, axis_name)``: the second matmul of a tensor-parallel layer.

    Between two Hopper GPUs a kernel multiplies and sums up to 64 rows (the product of all
    dimensions of x but the last) of bfloat16 or float16, with 8 to 64 MB of w on each rank, and K
    and N that are multiples of 8. It reads w about as fast as the memory allows, and a row of the
    result has the same bits alone and among others. It is not taken in the body of a loop, or where
    the caller computes w, for instance as a slice of the weights of all layers.

    Wherever ``matmul_reduce_scatter`` of the same rows would be overlapped, it runs as that, with
    an all-gather of the result: on Hopper GPUs, for bfloat16 and float16, for K and N that are
    multiples of 8, and for a number of rows that is a multiple of the number of ranks. Elsewhere an
    all-reduce follows the matmul. The all-gather and the all-reduce are those of this package or
    those of ``jax.lax``, as for calls of ``all_gather`` and ``psum``. `explain` says how a call
    runs, and why.

    Each rank's product, its own too, is rounded to the result's dtype. The rounded products are
    summed as by ``psum``, in rank order. Overlapped products accumulate in float32; others are
    those of ``jnp.matmul``, with the precision of ``jax.default_matmul_precision``.

    Differentiates as the expression above does, in forward and reverse mode and to any order. The
    tangent is one sum of ``dx @ w + x @ dw``. In reverse mode under check_vma=True the cotangent is
    the same on every rank, and the gradients are local matmuls. Under check_vma=False one ``psum``
    of the cotangent serves both gradients, as for ``jax.lax.psum``. Under ``vmap`` over w, it is a
    batched matmul and a ``psum``.

    Outside of ``shard_map`` it computes ``x @ w`` on global arrays, under ``jax.jit`` or eagerly,
    on the mesh of ``jax.set_mesh`` or `mesh`. Then the axes, Auto or Explicit ones, divide
    the last dimension of x and the first of w, and all ranks have the whole result.
    Operands that are sharded in another way are treated as by `column_parallel_matmul`.

    Args:
        x: an array [..., K] with 2 or more dimensions, of any dtype that can be multiplied.
        w: a matrix [K, N] with the dtype of x.
        axis_name: the name of a mapped axis, or several names.
        preferred_element_type: the result's dtype, as in ``jnp.matmul``; that of x by default.
        batch_axes: on global arrays, the other mesh axes that divide dimension 0 of x (data
            parallelism), before `axis_name` does: a name or several. Explicit axes are known from
            the type of x. On a mesh with further Auto axes the call falls back to ``jax.lax``.
        mesh: on global arrays, the mesh, if there is none in context.

    Returns:
        An array [..., N].

    Raises:
        TypeError: an operand is not an array, the dtypes differ, or `preferred_element_type` is
            of a different kind.
        ValueError: the numbers of dimensions or the contracted dimensions do not fit.
        ValueError, TypeError, NameError: on global arrays, as `column_parallel_matmul`.
        NameError: an axis is not bound, as in ``jax.lax.psum``.

    Examples:
        On global arrays, without ``shard_map``:

        >>> x, w = jnp.ones((4, 8)), jnp.ones((8, 6))
        >>> y = jax_intranode.matmul_all_reduce(x, w, "model", mesh=mesh)
        >>> bool(jnp.allclose(y, x @ w))
        True
    """
    name = "matmul_all_reduce"
    return of_call(MatmulCall(name, x, w, axis_name, preferred_element_type, batch_axes, mesh))


def of_call(call: MatmulCall) -> Any:
    """A matmul_all_reduce, for a public function."""

    def of_ranks(x: Any, w: Any, *, reason: str | None) -> list[Any]:
        reason = reason or matmul_arguments.reason_for_lax(
            "psum", call.axes, [x, w], [x, w], call.dtype
        )
        invariant, copies = trace_state.check_vma(), call.copies()
        params = call.params(AllReduceMatmulParams, 0, invariant=invariant, copies=copies)
        return _KIND.bind_or_fall_back([x, w], params, reason)

    def specs(of_global: GlobalCall, rows: list[Any]) -> tuple[Any, Any, list[Any]]:
        return [*rows, of_global.axes], [of_global.axes, ()], [[*rows, ()]]

    return call.run(of_ranks, specs)[0]


# The unfused computation.


def _unfused(add: Communicate, *operands: Any, params: AllReduceMatmulParams) -> list[Any]:
    """The sum of products, and the all-reduce after it."""
    return [add(local_matmuls.sum_of_dots(operands, params.terms, *params.how))]


def _psum(params: AllReduceMatmulParams) -> Collective:
    return psum_p, PsumParams(params.axes, params.invariant)


# Abstract evaluation.


def _abstract_eval(*operands: Any, params: AllReduceMatmulParams) -> list[Any]:
    total = collective_matmul.total(operands, params)
    return [collective.invariant_over(total, params.axes) if params.invariant else total]


# Overlapping.


def _request(*operands: Any, params: AllReduceMatmulParams) -> overlapped_call.Request | str:
    """The request for a matmul_reduce_scatter of all rows, or why there is none."""
    rows = math.prod(operands[0].shape[:-1])
    if rows % params.world_size != 0:
        return f"{rows} rows, no multiple of {params.world_size} ranks"
    # All dimensions of rows are scattered as one. So no single one has to be a multiple of the
    # number of ranks, and the all-gather leaves every row where it belongs.
    request = matmul_reduce_scatter.request(*operands, params=params)
    if isinstance(request, str):
        return request

    def in_rows(*operands: Any) -> Sequence[Any]:
        xs, ws, _ = local_matmuls.split_terms(operands, params.terms)
        return [*(x.reshape(rows, x.shape[-1]) for x in xs), *ws]

    return dataclasses.replace(request, operands=in_rows)


def _gather(params: AllReduceMatmulParams) -> Collective:
    """The all-gather after an overlapped matmul_reduce_scatter."""
    return all_gather_p, AllGatherParams(params.axes, 0, True, params.world_size)


_KIND = collective_matmul.Kind(
    matmul_all_reduce_p,
    _psum,
    _unfused,
    collective_matmul.total,
    _request,
    then=_gather,
)


def _decide(site: LoweringSite, avals: Sequence[Any], params: AllReduceMatmulParams) -> Decision:
    """A matmul of few rows and its sum are one custom call."""
    found = few_rows.find(site, "matmul_all_reduce", avals, params)
    if found is None:
        return _KIND.decide(site, avals, params)
    summed = nbytes(collective_matmul.total(avals, params))
    own = Operation("matmul_all_reduce", list(avals), summed, found.selection)
    is_overlapped = found.selection.measured
    return Decision(mlir.lower_fun(found), lambda: [own], is_overlapped=is_overlapped)


# Differentiation. The jvp rule is `collective_matmul.jvp_of_sum`.


def _transpose(
    cotangents: Sequence[Any], *operands: Any, params: AllReduceMatmulParams
) -> list[Any]:
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [None] * len(operands)
    if params.invariant:
        ct = lax.pcast(ct, params.axes, to="varying")
    else:
        (ct,) = psum_p.bind(ct, params=_psum(params)[1])
    return collective_matmul.transpose_of_sum(ct, operands, params)


# Registration.

matmul_all_reduce_p.register(
    abstract_eval=_abstract_eval,
    decide=_decide,
    jvp=collective_matmul.jvp_of_sum,
    transpose=_transpose,
    batch=partial(collective_matmul.batch_of_sum, _KIND),
)
