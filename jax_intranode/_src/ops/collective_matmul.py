"""What the collective matmuls share: their primitives, and parts of their rules.

Their primitives, and those of their gradients, are declared here, because differentiation turns one
into another: each primitive's rules are in its own file, and may bind the others' primitives.

A collective matmul is overlapped, as one custom call, where `overlapped_call.find` says so.
Elsewhere it is computed unfused: products (`local_matmuls`), and a collective that is selected by
its own rules. Each file has a function `_unfused(communicate, *operands, params)` for this, where
`communicate` is the collective as a function of one array, and describes itself by a `Kind`.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, mlir

from jax_intranode._src import reasons
from jax_intranode._src.ops import (
    collective,
    fallback,
    local_matmuls,
    matmul_arguments,
    overlapped_call,
)
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Decision, Operation, OpPrimitive, nbytes

# The primitives, and their parameters.

Params = TypeVar("Params", bound="MatmulParams")


@dataclass(frozen=True)
class MatmulParams:
    """What the parameters of all collective matmuls have in common.

    Attributes:
        axes: the mesh axes of the collective.
        axis: the dimension of x that is gathered, or of the product that is scattered; 0 for an
            all-reduce.
        world_size: number of ranks.
        dtype: dtype of the products.
        precision: as in ``jax.lax.dot_general``.
        transposed: whether the matrices are [N, K] instead of [K, N].
    """

    axes: tuple[str, ...]
    axis: int
    world_size: int
    dtype: np.dtype[Any]
    precision: Any
    transposed: bool = False

    @property
    def how(self) -> tuple[Any, Any, bool]:
        """How products are computed: the last arguments of `local_matmuls.dot`."""
        return self.dtype, self.precision, self.transposed

    def of(self, kind: type[Params], **changes: Any) -> Params:
        """The parameters of another collective matmul that has these in common, with changes."""
        common = {f.name: getattr(self, f.name) for f in dataclasses.fields(MatmulParams)}
        return kind(**common | changes)


@dataclass(frozen=True)
class GatherMatmulParams(MatmulParams):
    """Parameters of `all_gather_matmul_p`.

    Attributes:
        gathered: whether the gathered x is the last result.
    """

    gathered: bool = False


@dataclass(frozen=True)
class SumMatmulParams(MatmulParams):
    """Parameters of `matmul_reduce_scatter_p`.

    Attributes:
        terms: number of products that are summed.
    """

    terms: int = 1


@dataclass(frozen=True)
class AllReduceMatmulParams(SumMatmulParams):
    """Parameters of `matmul_all_reduce_p`.

    Attributes:
        invariant: as in `collective.PsumParams`.
        copies: whether XLA may have to write w for a custom call of few rows, but not for its own
            matmul: it is in the body of a loop, where w may be a slice of the weights of all
            layers, or the program computes w.
    """

    invariant: bool = False
    copies: bool = False


@dataclass(frozen=True)
class ColumnParams(MatmulParams):
    """Parameters of `column_parallel_matmul_p`.

    Attributes:
        sums: whether the transpose sums the gradient of x over the ranks. Under check_vma=False JAX
            sums it, and nobody does where x differs between the ranks.
        copies: as in `AllReduceMatmulParams`.
    """

    sums: bool = True
    copies: bool = False


@dataclass(frozen=True)
class TangentParams:
    """Parameters of `tangent_of_all_gather_matmul_p`.

    Attributes:
        matmul: those of the all_gather_matmul that gives the tangents for the tangent of x.
        matrices: number of matrices.
        moving: the matrices, by position, that have a tangent.
    """

    matmul: GatherMatmulParams
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

    matmul: Any
    dgrad: bool
    wgrads: tuple[int, ...]
    wgrad_dtype: Any

    @property
    def axes(self) -> tuple[str, ...]:
        return self.matmul.axes


# x and the ws -> a product of each w, and the gathered x if `gathered`.
all_gather_matmul_p = OpPrimitive("all_gather_matmul")
# A sum of products (see `local_matmuls`) -> this rank's part of its sum over the ranks.
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


def bound_at(site: LoweringSite, of: Collective) -> Communicate:
    """The collective as a function, for the lowering of a call at this site."""
    primitive, params = of
    return lambda v: primitive.bind_at(site, v, params=params)[0]


def by_lax(operation: str, reason: str, params: collective.Params) -> Communicate:
    """lax's collective as a function, which records why lax runs it."""

    def communicate(v: Any) -> Any:
        with fallback.to_lax(operation, reason):
            return params.by_lax([v])[0]

    return communicate


@dataclass(frozen=True)
class Kind:
    """A collective matmul, as far as the functions below tell them apart.

    Attributes:
        primitive: its primitive.
        of: params -> its collective.
        unfused: (communicate, *operands, params) -> results of the collective and the products.
        communicated: (types of the operands, params) -> type of the array that is gathered or
            summed.
        request: (types of the operands, params) -> the request for a custom call, or why there is
            none.
        then: params -> the collective that follows the custom call; None if none does.
    """

    primitive: OpPrimitive
    of: Callable[[Any], Collective]
    unfused: Callable[..., list[Any]]
    communicated: Callable[[Sequence[Any], Any], Any]
    request: Callable[..., overlapped_call.Request | str]
    then: Callable[[Any], Collective] | None = None

    def decide(self, site: LoweringSite, avals: Sequence[Any], params: MatmulParams) -> Decision:
        """What a call runs as: one overlapped custom call, or products and a collective."""
        request = self.request(*avals, params=params)
        found = overlapped_call.find(site, params.axes, request)
        if isinstance(found, str):
            return self._decide_unfused(site, avals, params, why=found)
        communicated = self.communicated(avals, params)
        selected = found.selection
        own = Operation(self.primitive.operation, list(avals), nbytes(communicated), selected)
        if self.then is None:
            return Decision(mlir.lower_fun(found), lambda: [own], is_overlapped=True)
        then, its_params = self.then(params)
        part = communicated.update(shape=(found.request.sizes.rows, *found.request.sizes.ns))

        def compute(*operands: Any) -> list[Any]:
            (result,) = found(*operands)
            (last,) = then.bind_at(site, result, params=its_params)
            return [last.reshape(communicated.shape)]

        def operations() -> list[Operation]:
            after = then.decide(site, [part], its_params)
            return [own, *after.operations()]

        return Decision(mlir.lower_fun(compute), operations, is_overlapped=True)

    def _decide_unfused(
        self, site: LoweringSite, avals: Sequence[Any], params: MatmulParams, why: str
    ) -> Decision:
        own, its_params = self.of(params)
        communicate = bound_at(site, (own, its_params))

        def operations() -> list[Operation]:
            sent = self.communicated(avals, params)
            decision = own.decide(site, [sent], its_params)
            (found,) = decision.operations()
            if len(avals) == 1:  # dead code elimination has left nothing to multiply
                return [Operation(own.operation, list(avals), nbytes(sent), found.selected)]
            order = "before" if own is collective.all_gather_p else "after"
            reason = reasons.NOT_OVERLAPPED.of(
                operation=own.operation, order=order, why=why, reason=found.selected.reason
            )
            selected = dataclasses.replace(found.selected, reason=reason)
            return [Operation(self.primitive.operation, list(avals), nbytes(sent), selected)]

        return Decision(
            mlir.lower_fun(partial(self.unfused, communicate, params=params)), operations
        )

    def bind_or_fall_back(
        self, operands: Sequence[Any], params: MatmulParams, reason: str | None
    ) -> list[Any]:
        """Binds the primitive, or calls lax for the collective if there is a reason for it."""
        name = self.primitive.operation
        if reason is not None:
            communicate = by_lax(name, reason, self.of(params)[1])
            return self.unfused(communicate, *operands, params=params)
        operands = matmul_arguments.varying_alike(operands, params.axes)
        with jax.named_scope(self.primitive.scope):
            return self.primitive.bind(*operands, params=params)

    def batch_unfused(
        self,
        size: int,
        operands: Sequence[Any],
        dims: Sequence[Any],
        out_dims: list[int | None],
        params: MatmulParams,
    ) -> tuple[list[Any], list[Any]]:
        """Batches the unfused computation, where the products are products of batches."""
        own, its_params = self.of(params)

        def communicate(v: Any) -> Any:
            return own.bind(v, params=its_params)[0]

        compute = partial(self.unfused, communicate, params=params)
        return jax.vmap(compute, tuple(dims), out_dims, axis_size=size)(*operands), out_dims

    def batch_over_hidden_axis(
        self,
        name: Hashable,
        size: int,
        operands: Sequence[Any],
        dims: Sequence[Any],
        params: MatmulParams,
    ) -> tuple[list[Any], list[Any]]:
        """Batches over an axis of vmap that hides the mesh axis of its name: lax communicates."""
        reason = fallback.reason_of_hidden_axis(name)
        communicate = by_lax(self.primitive.operation, reason, self.of(params)[1])
        compute = partial(self.unfused, communicate, params=params)
        mapped = jax.vmap(compute, tuple(dims), 0, axis_name=name, axis_size=size)
        results = mapped(*operands)
        return results, [0] * len(results)


def wgrads(whole: Any, cts: Sequence[Any], ws: Sequence[Any], params: MatmulParams) -> list[Any]:
    """Weight gradients of products of one x, for the ws that are not known."""
    return [
        local_matmuls.wgrad_dot(whole, ct, w.aval.dtype, params.precision, params.transposed)
        if ad.is_undefined_primal(w) and type(ct) is not ad.Zero
        else None
        for ct, w in zip(cts, ws, strict=True)
    ]


# Rules of matmul_reduce_scatter and matmul_all_reduce, which sum products.


def total(operands: Sequence[Any], params: SumMatmulParams) -> Any:
    """The type of the sum of products on a rank."""
    dtype = np.dtype(params.dtype)
    if params.terms == 0:
        return operands[0].update(dtype=dtype, weak_type=False)
    x, w = operands[0], operands[params.terms]
    shape = local_matmuls.dot_shape(x, w, params.transposed)
    return x.update(shape=shape, dtype=dtype, weak_type=False)


def jvp_of_sum(
    bind: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    params: SumMatmulParams,
) -> tuple[list[Any], list[Any]]:
    """The tangent is one collective of the sum of dx_i @ w_i + x_i @ dw_i."""
    (result,) = bind(*primals, params=params)
    xs, ws, _ = local_matmuls.split_terms(primals, params.terms)
    dxs, dws, addend = (
        [t if type(t) is not ad.Zero else None for t in part]
        for part in local_matmuls.split_terms(tangents, params.terms)
    )
    terms = [(dx, w) for dx, w in zip(dxs, ws, strict=True) if dx is not None]
    terms += [(x, dw) for x, dw in zip(xs, dws, strict=True) if dw is not None]
    operands = [x for x, _ in terms] + [w for _, w in terms] + [v for v in addend if v is not None]
    if not operands:
        return [result], [ad.Zero(jax.typeof(result).to_tangent_aval())]
    moved = bind(*operands, params=dataclasses.replace(params, terms=len(terms)))
    return [result], list(moved)


def transpose_of_sum(ct: Any, operands: Sequence[Any], params: SumMatmulParams) -> list[Any]:
    """Cotangents of the operands of a sum of products; None for operands that are known."""
    precision, transposed = params.precision, params.transposed
    xs, ws, addend = local_matmuls.split_terms(operands, params.terms)
    of_xs = [
        local_matmuls.dot(ct, w, x.aval.dtype, precision, not transposed)
        if ad.is_undefined_primal(x)
        else None
        for x, w in zip(xs, ws, strict=True)
    ]
    of_ws = [
        local_matmuls.wgrad_dot(x, ct, w.aval.dtype, precision, transposed)
        if ad.is_undefined_primal(w)
        else None
        for x, w in zip(xs, ws, strict=True)
    ]
    of_addend = [ct.astype(v.aval.dtype) if ad.is_undefined_primal(v) else None for v in addend]
    return of_xs + of_ws + of_addend


def batch_of_sum(
    kind: Kind,
    name: Hashable,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: SumMatmulParams,
) -> tuple[list[Any], list[Any]]:
    """Batches a sum of products: a batch of all xs becomes the first dimension of the sum."""
    # A batch that is itself spread over mesh axes (vmap's spmd_axis_name) varies over them.
    operands = matmul_arguments.varying_alike(operands, ())
    if name in params.axes:
        return kind.batch_over_hidden_axis(name, size, operands, dims, params)
    xs, ws, addend = local_matmuls.split_terms(dims, params.terms)
    if any(d is not None for d in ws) or None in (*xs, *addend):
        return kind.batch_unfused(size, operands, dims, [0], params)
    moved = [v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(operands, dims, strict=True)]
    if kind.primitive is matmul_reduce_scatter_p:
        params = dataclasses.replace(params, axis=params.axis + 1)
    return kind.primitive.bind(*moved, params=params), [0]
