"""matmul_reduce_scatter: the sum of every rank's product, of which each rank keeps its own part."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.interpreters import ad
from jax.typing import ArrayLike, DTypeLike

from jax_intranode._src.ops import (
    collective,
    collective_matmul,
    local_matmuls,
    matmul_arguments,
    overlapped_call,
)
from jax_intranode._src.ops.annotations import AnyMesh, AxisNames
from jax_intranode._src.ops.collective import PsumScatterParams, psum_scatter_p
from jax_intranode._src.ops.collective_matmul import (
    Collective,
    Communicate,
    GatherMatmulParams,
    GradientParams,
    SumMatmulParams,
    all_gather_matmul_p,
    gradients_of_matmul_reduce_scatter_p,
    matmul_reduce_scatter_p,
)
from jax_intranode._src.ops.global_arrays import GlobalCall
from jax_intranode._src.ops.matmul_arguments import MatmulCall
from jax_intranode._src.selection.overlap.sizes import Sizes


def matmul_reduce_scatter(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisNames,
    *,
    scatter_dimension: int = 0,
    preferred_element_type: DTypeLike | None = None,
    batch_axes: AxisNames = (),
    mesh: AnyMesh | None = None,
) -> jax.Array:
    """Multiplies with a matrix, sums over mapped axes, and keeps a part.

    ``jax.lax.psum_scatter(x @ w, axis_name, scatter_dimension=scatter_dimension, tiled=True)``: the
    second matmul of a tensor-parallel layer with sequence parallelism.

    On Hopper GPUs, for bfloat16 and float16, for K and N that are multiples of 8 and for any
    `scatter_dimension` but the last, the reduce-scatter is overlapped with the matmul where a model
    predicts a gain: products travel while others are computed. Elsewhere a reduce-scatter follows
    the matmul: that of this package or that of ``jax.lax``, as for a call of
    ``jax_intranode.psum_scatter``. `explain` says how a call runs, and why.

    Each rank's product, its own too, is rounded to the result's dtype. The rounded products are
    summed as by ``psum_scatter``, in rank order. Overlapped products accumulate in float32; others
    are those of ``jnp.matmul``, with the precision of ``jax.default_matmul_precision``.

    Differentiates as the expression above does, in forward and reverse mode and to any order. The
    tangent is one sum of ``dx @ w + x @ dw``. In reverse mode one ``all_gather_matmul`` of the
    cotangent serves the input gradient and the weight gradient, in one kernel where that is faster.
    x and w are kept from the forward pass. Under ``vmap`` over w, it is a batched matmul and a
    ``psum_scatter``.

    The algorithm follows PyTorch's ``fused_matmul_reduce_scatter``, and the gradients follow
    xformers' ``fused_linear_and_reducescatter``.

    Outside of ``shard_map`` it computes ``x @ w`` on global arrays, under ``jax.jit`` or eagerly,
    on the mesh of ``jax.set_mesh`` or `mesh`. Then the axes, Auto or Explicit ones, divide
    the last dimension of x, the first of w and `scatter_dimension` of the result.
    Operands that are sharded in another way are treated as by `column_parallel_matmul`.

    Args:
        x: an array [..., K] with 2 or more dimensions, of any dtype that can be multiplied.
        w: a matrix [K, N] with the dtype of x.
        axis_name: the name of a mapped axis, or several names, with ranks in row-major order.
        scatter_dimension: the dimension of the product that is divided among the ranks, any of
            them. Its length is a multiple of the number of ranks.
        preferred_element_type: the result's dtype, as in ``jnp.matmul``; that of x by default.
        batch_axes: on global arrays, the other mesh axes that divide dimension 0 of x (data
            parallelism), before `axis_name` does: a name or several. Explicit axes are known from
            the type of x. On a mesh with further Auto axes the call falls back to ``jax.lax``.
        mesh: on global arrays, the mesh, if there is none in context.

    Returns:
        This rank's part of an array [..., N].

    Raises:
        TypeError: an operand is not an array, the dtypes differ, `preferred_element_type` is
            of a different kind, or `scatter_dimension` is not an integer.
        ValueError: the numbers of dimensions or the contracted dimensions do not fit, there is no
            such `scatter_dimension`, or its length is not a multiple of the number of ranks.
        ValueError, TypeError, NameError: on global arrays, as `column_parallel_matmul`.
        NameError: an axis is not bound, as in ``jax.lax.psum_scatter``.

    Examples:
        Each rank has half of the columns of x and half of the rows of w, and gets half of the rows:

        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=(P(None, "model"), P("model")), out_specs=P("model"))
        ... def project(x, w):
        ...     return jax_intranode.matmul_reduce_scatter(x, w, "model")
        >>> x, w = jnp.ones((4, 8)), jnp.ones((8, 6))
        >>> bool(jnp.allclose(project(x, w), x @ w))
        True
    """
    name = "matmul_reduce_scatter"
    call = MatmulCall(name, x, w, axis_name, preferred_element_type, batch_axes, mesh)
    return of_call(call, scatter_dimension)


def of_call(call: MatmulCall, scatter_dimension: Any) -> Any:
    """A matmul_reduce_scatter, for a public function."""
    dimension = matmul_arguments.dimension(
        call.name, "scatter_dimension", scatter_dimension, call.x.ndim
    )

    def of_ranks(x: Any, w: Any, *, reason: str | None) -> list[Any]:
        params = call.params(SumMatmulParams, dimension)
        size = params.world_size
        length = local_matmuls.dot_shape(x, w, False)[dimension]
        if length % size != 0:
            raise ValueError(
                f"{call.name}: scatter_dimension {scatter_dimension} of the product has {length} "
                f"elements; it must be a multiple of the {size} ranks over {call.axis_name!r}"
            )
        reason = reason or matmul_arguments.reason_for_lax(
            "psum_scatter", call.axes, [x, w], [x, w], call.dtype
        )
        return _KIND.bind_or_fall_back([x, w], params, reason)

    def specs(of_global: GlobalCall, rows: list[Any]) -> tuple[Any, Any, list[Any]]:
        axes = of_global.axes
        spec = [entry + axes * (k == dimension) for k, entry in enumerate([*rows, ()])]
        product = local_matmuls.dot_shape(call.x, call.ws[0], False)
        of_global.check_divisible("the product", product, spec)
        return [*rows, axes], [axes, ()], [spec]

    return call.run(of_ranks, specs)[0]


# The unfused computation.


def _unfused(scatter: Communicate, *operands: Any, params: SumMatmulParams) -> list[Any]:
    """The sum of products, and the reduce-scatter after it."""
    total = local_matmuls.sum_of_dots(operands, params.terms, *params.how)
    if total.size == 0:  # XLA's collectives refuse empty arrays
        total = collective.varying(total, params.axes)
        return [total.reshape(_part_shape(total.shape, params))]
    return [scatter(total)]


def _part_shape(shape: tuple[int, ...], params: SumMatmulParams) -> tuple[int, ...]:
    axis = params.axis
    return (*shape[:axis], shape[axis] // params.world_size, *shape[axis + 1 :])


def _scatter(params: SumMatmulParams) -> Collective:
    return psum_scatter_p, PsumScatterParams(params.axes, params.axis, True, params.world_size)


# Abstract evaluation.


def abstract_eval(*operands: Any, params: SumMatmulParams) -> list[Any]:
    """The types of the results."""
    total = collective_matmul.total(operands, params)
    return [total.update(shape=_part_shape(total.shape, params))]


# Overlapping.


def request(*operands: Any, params: SumMatmulParams) -> overlapped_call.Request | str:
    """The request for a custom call, from the operands' types, or why there is none."""
    xs, ws, addend = local_matmuls.split_terms(operands, params.terms)
    if not xs:
        return "no matmul"
    if addend:
        return "a sum with the cotangent of the gathered x"
    if params.axis == xs[0].ndim - 1:
        return "scattered along the last dimension"
    sizes = Sizes(
        "matmul_reduce_scatter",
        outer=math.prod(xs[0].shape[: params.axis]),
        rows=math.prod(xs[0].shape[params.axis : -1]) // params.world_size,
        ks=tuple(x.shape[-1] for x in xs),
        ns=(ws[0].shape[0 if params.transposed else 1],),
        world_size=params.world_size,
    )
    return overlapped_call.Request(
        sizes,
        params.axis,
        dtypes=(*(v.dtype for v in operands), params.dtype),
        precision=params.precision,
        transposed=params.transposed,
    )


_KIND = collective_matmul.Kind(
    matmul_reduce_scatter_p, _scatter, _unfused, collective_matmul.total, request
)


# Differentiation. The jvp rule is `collective_matmul.jvp_of_sum`.


def _transpose(cotangents: Sequence[Any], *operands: Any, params: SumMatmulParams) -> list[Any]:
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [None] * len(operands)
    terms = params.terms
    xs, ws, addend = local_matmuls.split_terms(operands, terms)
    # Input gradients are all_gather_matmuls of the cotangent, unless the gathered dimension is the
    # one that they contract with ws.
    fusable = [k for k, x in enumerate(xs) if ad.is_undefined_primal(x)]
    if params.axis == ct.ndim - 1:
        fusable = []
    # The other cotangents are local products with the gathered cotangent.
    others = [None if k in fusable else x for k, x in enumerate(xs)] + ws + addend
    undefined = [i for i, v in enumerate(others) if ad.is_undefined_primal(v)]
    found: list[Any] = [None] * len(operands)

    # One input gradient and one weight gradient: one primitive has both.
    of_w = undefined[0] - terms if len(undefined) == 1 else -1
    if len(fusable) == 1 and 0 <= of_w < terms and of_w != fusable[0]:
        (of_x,) = fusable
        matmul = params.of(
            GatherMatmulParams, dtype=xs[of_x].aval.dtype, transposed=not params.transposed
        )
        found[of_x], found[terms + of_w] = gradients_of_matmul_reduce_scatter_p.bind(
            ct,
            ws[of_x],
            xs[of_w],
            params=GradientParams(matmul, True, (0,), ws[of_w].aval.dtype),
        )
        return found

    results = all_gather_matmul_p.bind(
        ct,
        *[ws[k] for k in fusable],
        params=params.of(
            GatherMatmulParams,
            dtype=xs[fusable[0]].aval.dtype if fusable else ct.dtype,
            transposed=not params.transposed,
            gathered=bool(undefined),
        ),
    )
    if undefined:
        found = collective_matmul.transpose_of_sum(results[-1], others, params)
    for k, result in zip(fusable, results[: len(fusable)], strict=True):
        found[k] = result
    return found


# Registration.

matmul_reduce_scatter_p.register(
    abstract_eval=abstract_eval,
    decide=_KIND.decide,
    jvp=collective_matmul.jvp_of_sum,
    transpose=_transpose,
    batch=partial(collective_matmul.batch_of_sum, _KIND),
)
