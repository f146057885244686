"""Tangents and gradients of collective matmuls, where several share one collective.

Each is one primitive that stands for a collective matmul and local products (see
`combined_matmul`):

- the tangent of an all_gather_matmul, whose transpose is
- the gradients of an all_gather_matmul: a matmul_reduce_scatter gives the input gradient, and local
  products with the gathered x give the weight gradients;
- the gradients of a matmul_reduce_scatter: an all_gather_matmul of the cotangent gives the input
  gradient, and a local product with the gathered cotangent gives the weight gradient.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.interpreters import ad

from jax_intranode._src.ops import (
    all_gather_matmul,
    local_matmuls,
    matmul_reduce_scatter,
    overlapped_call,
)
from jax_intranode._src.ops.collective_matmul import (
    GatherMatmulParams,
    GradientParams,
    SumMatmulParams,
    TangentParams,
    all_gather_matmul_p,
    gradients_of_all_gather_matmul_p,
    gradients_of_matmul_reduce_scatter_p,
    matmul_reduce_scatter_p,
    tangent_of_all_gather_matmul_p,
)
from jax_intranode._src.ops.combined_matmul import Bind, Composition, Matmul

# The tangent of all_gather_matmul.


def _tangent_matmul(operands: Sequence[Any], params: TangentParams) -> Matmul:
    return all_gather_matmul_p, list(operands[: 1 + params.matrices]), params.matmul


def _tangent(bind: Bind, *operands: Any, params: TangentParams) -> list[Any]:
    primitive, its_operands, its_params = _tangent_matmul(operands, params)
    results = bind(primitive, *its_operands, params=its_params)
    if params.moving:
        whole, *dws = operands[1 + params.matrices :]
        for k, dw in zip(params.moving, dws, strict=True):
            results[k] = ad.add_jaxvals(results[k], local_matmuls.dot(whole, dw, *its_params.how))
    return results


def _tangent_abstract_eval(*operands: Any, params: TangentParams) -> list[Any]:
    _, its_operands, its_params = _tangent_matmul(operands, params)
    return all_gather_matmul.abstract_eval(*its_operands, params=its_params)


def _tangent_needed(used: list[bool], params: TangentParams) -> tuple[list[bool], TangentParams]:
    of_dws = [used[k] for k in params.moving]
    whole = [any(of_dws)] if params.moving else []
    kept = tuple(sum(used[:k]) for k in params.moving if used[k])
    return [True, *used, *whole, *of_dws], replace(params, matrices=sum(used), moving=kept)


def _tangent_transpose(
    cotangents: Sequence[Any], dx: Any, *operands: Any, params: TangentParams
) -> list[Any] | None:
    """The gradients, as one primitive if there are an input gradient and weight gradients."""
    count = params.matrices
    ws, dws = operands[:count], operands[count + 1 :]
    if any(ad.is_undefined_primal(v) for v in operands[: count + 1]):
        return None
    whole = operands[count : count + 1]
    nonzero = [k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    moving = [k for k, dw in zip(params.moving, dws, strict=True) if ad.is_undefined_primal(dw)]
    dgrad = ad.is_undefined_primal(dx)
    # For each product that has a weight gradient: its position among the nonzero cotangents.
    positions = {k: i for i, k in enumerate(nonzero) if k in moving}
    matmul = params.matmul.of(
        SumMatmulParams,
        terms=len(nonzero),
        dtype=dx.aval.dtype if dgrad else dx.dtype,
        transposed=not params.matmul.transposed,
    )
    its_operands = [cotangents[k] for k in nonzero]
    its_operands += [ws[k] for k in nonzero] if dgrad else []
    if positions:
        results = gradients_of_all_gather_matmul_p.bind(
            *its_operands,
            *whole,
            params=GradientParams(matmul, dgrad, tuple(positions.values()), ws[0].dtype),
        )
    elif dgrad:
        results = matmul_reduce_scatter_p.bind(*its_operands, params=matmul)
    else:
        results = []
    wgrads = dict(zip(positions, results[dgrad:], strict=True))
    ct_x = results[0] if dgrad else None
    return [ct_x, *[None] * (count + len(whole)), *(wgrads.get(k) for k in params.moving)]


Composition(
    matmul=_tangent_matmul,
    compute=_tangent,
    request=lambda *operands, params: "a tangent",
    result_count=lambda params: params.matrices,
    needed=_tangent_needed,
    transpose=_tangent_transpose,
).register(tangent_of_all_gather_matmul_p, _tangent_abstract_eval)


# The gradients of all_gather_matmul.


def _dgrad_by_reduce_scatter(operands: Sequence[Any], params: GradientParams) -> Matmul | None:
    """The collective matmul that gives the input gradient, if that is a result."""
    if not params.dgrad:
        return None
    return matmul_reduce_scatter_p, list(operands[: 2 * params.matmul.terms]), params.matmul


def _gather_gradients(bind: Bind, *operands: Any, params: GradientParams) -> list[Any]:
    own = _dgrad_by_reduce_scatter(operands, params)
    results = [] if own is None else bind(own[0], *own[1], params=own[2])
    how = params.wgrad_dtype, params.matmul.precision, not params.matmul.transposed
    return results + [
        local_matmuls.wgrad_by_transposition(operands[-1], operands[k], *how) for k in params.wgrads
    ]


def _gather_abstract_eval(*operands: Any, params: GradientParams) -> list[Any]:
    own = _dgrad_by_reduce_scatter(operands, params)
    results = [] if own is None else matmul_reduce_scatter.abstract_eval(*own[1], params=own[2])
    how = params.wgrad_dtype, not params.matmul.transposed
    return results + [
        local_matmuls.wgrad_aval(operands[-1], operands[k], *how) for k in params.wgrads
    ]


def _gather_request(*operands: Any, params: GradientParams) -> overlapped_call.Request | str:
    terms, wgrads = params.matmul.terms, params.wgrads
    own = _dgrad_by_reduce_scatter(operands, params)
    if own is None or not wgrads or not params.matmul.transposed:
        return "not both gradients for matrices [K, N]"
    order = sorted(range(terms), key=lambda k: k not in wgrads)  # terms with weight gradients first

    def ordered(*operands: Any) -> Sequence[Any]:
        cts, ws, whole = local_matmuls.split_terms(operands, terms)
        return [*(cts[k] for k in order), *(ws[k] for k in order), *whole]

    whole = operands[-1]
    request = matmul_reduce_scatter.request(*ordered(*operands)[: 2 * terms], params=own[2])
    if isinstance(request, str):
        return request
    return replace(
        request,
        wgrads=len(wgrads),
        dtypes=(*request.dtypes, whole.dtype, params.wgrad_dtype),
        operands=ordered,
    )


def _gather_needed(used: list[bool], params: GradientParams) -> tuple[list[bool], GradientParams]:
    terms, dgrad, wgrads = params.matmul.terms, params.dgrad, params.wgrads
    dgrad_used = dgrad and used[0]
    kept = [k for k, is_used in zip(wgrads, used[dgrad:], strict=True) if is_used]
    of_cts = [dgrad_used or k in kept for k in range(terms)]
    operands = [*of_cts, *[dgrad_used] * terms * dgrad, *[bool(kept)] * bool(wgrads)]
    return operands, replace(
        params,
        matmul=replace(params.matmul, terms=sum(of_cts)),
        dgrad=dgrad_used,
        wgrads=tuple(sum(of_cts[:k]) for k in kept),
    )


Composition(
    matmul=_dgrad_by_reduce_scatter,
    compute=_gather_gradients,
    request=_gather_request,
    result_count=lambda params: params.dgrad + len(params.wgrads),
    needed=_gather_needed,
).register(gradients_of_all_gather_matmul_p, _gather_abstract_eval)


# The gradients of matmul_reduce_scatter.


def _dgrad_by_all_gather(operands: Sequence[Any], params: GradientParams) -> Matmul:
    """The collective matmul that gives the input gradient and the gathered cotangent."""
    its_params: GatherMatmulParams = replace(params.matmul, gathered=bool(params.wgrads))
    return all_gather_matmul_p, list(operands[: 1 + params.dgrad]), its_params


def _scatter_gradients(bind: Bind, *operands: Any, params: GradientParams) -> list[Any]:
    primitive, its_operands, its_params = _dgrad_by_all_gather(operands, params)
    results = bind(primitive, *its_operands, params=its_params)
    if params.wgrads:  # the last result is the gathered cotangent
        how = params.wgrad_dtype, its_params.precision, not its_params.transposed
        results[-1] = local_matmuls.wgrad_dot(operands[-1], results[-1], *how)
    return results


def _scatter_abstract_eval(*operands: Any, params: GradientParams) -> list[Any]:
    _, its_operands, its_params = _dgrad_by_all_gather(operands, params)
    results = all_gather_matmul.abstract_eval(*its_operands, params=its_params)
    if params.wgrads:
        how = params.wgrad_dtype, not its_params.transposed
        results[-1] = local_matmuls.wgrad_aval(operands[-1], results[-1], *how)
    return results


def _scatter_request(*operands: Any, params: GradientParams) -> overlapped_call.Request | str:
    if not params.dgrad or not params.wgrads or not params.matmul.transposed:
        return "not both gradients for a matrix [K, N]"
    _, its_operands, _ = _dgrad_by_all_gather(operands, params)
    request = all_gather_matmul.request(*its_operands, params=params.matmul)
    if isinstance(request, str):
        return request
    x = operands[-1]
    return replace(request, wgrads=1, dtypes=(*request.dtypes, x.dtype, params.wgrad_dtype))


def _scatter_needed(used: list[bool], params: GradientParams) -> tuple[list[bool], GradientParams]:
    return [True, *used], replace(
        params,
        dgrad=params.dgrad and used[0],
        wgrads=params.wgrads if used[-1] else (),
    )


Composition(
    matmul=_dgrad_by_all_gather,
    compute=_scatter_gradients,
    request=_scatter_request,
    result_count=lambda params: params.dgrad + len(params.wgrads),
    needed=_scatter_needed,
).register(gradients_of_matmul_reduce_scatter_p, _scatter_abstract_eval)
