"""Matmuls and the reduce-scatters and all-reduces after them, as one operation."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_intranode._src.jax_private import equation_kinds, lax_collectives
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.ops.collective_matmul import (
    AllReduceMatmulParams,
    GradientParams,
    SumMatmulParams,
    gradients_of_all_gather_matmul_p,
    matmul_all_reduce_p,
    matmul_reduce_scatter_p,
)
from jax_intranode._src.ops.primitive import nbytes
from jax_intranode._src.rewrite import dataflow, views
from jax_intranode._src.rewrite.collectives import is_sum
from jax_intranode._src.rewrite.dataflow import Dataflow, Matmul
from jax_intranode._src.rewrite.fusion import Fusion, Layout, Operation
from jax_intranode._src.rewrite.matrices import (
    MOVED,
    Factored,
    Product,
    WeightGradient,
    factored,
    is_transposed,
    leading_dims,
    matrix,
    rows_of,
    weight_gradient,
)
from jax_intranode._src.rewrite.views import Factor, Factors

# Longer sums are not replaced.
MOST_EQUATIONS = 64


@dataclass(frozen=True)
class _Summand:
    """A matmul whose result is summed, and the dimensions of that result in the sum."""

    matmul: Matmul
    dims: tuple[Factors, ...]


def fusions(
    flow: Dataflow, collectives: dict[int, lax_collectives.LaxCollective]
) -> Iterator[Iterator[Fusion]]:
    """For each reduce-scatter and all-reduce, what it may become."""
    for position, collective in collectives.items():
        if not is_sum(collective):
            continue
        path: list[int] = []
        summands = _summands(flow, flow.equations[position].invars[0], path)
        if summands:
            yield _Sum(flow, position, collective, path).candidates(summands)


def _summands(flow: Dataflow, v: Any, path: list[int]) -> list[_Summand] | None:
    """The matmuls whose sum a variable is; None if it is another sum, or used elsewhere.

    `path` gets the positions of all equations in between, and of the matmuls.
    """
    equation = flow.maker(v)
    if equation is None or flow.only_user(v) is None or equation_kinds.is_placed(equation):
        return None
    if len(path) > MOST_EQUATIONS:
        return None
    position = flow.made_at[v]
    path.append(position)
    if position in flow.matmuls:
        return [_Summand(flow.matmuls[position], views.whole(v.aval.shape))]
    if equation_kinds.is_addition(equation):
        found = []
        for operand in equation.invars:
            part = _summands(flow, operand, path)
            if part is None or operand.aval.shape != v.aval.shape:
                return None
            found += part
        return found
    if (
        dataflow.is_layout(equation, cast=False)
        or equation_kinds.only_changes_type(equation)
        or dataflow.rounds_once(equation)
    ):
        before = _summands(flow, equation.invars[0], path)
        found = []
        for summand in before or []:
            dims = dataflow.dims_after(equation, summand.dims)
            if dims is None:
                return None
            found.append(_Summand(summand.matmul, dims))
        return found or None
    return None


class _Sum:
    """A reduce-scatter or an all-reduce of a sum of matmuls."""

    def __init__(
        self,
        flow: Dataflow,
        position: int,
        collective: lax_collectives.LaxCollective,
        path: Sequence[int],
    ):
        self.flow = flow
        self.position = position
        self.collective = collective
        self.path = path
        equation = flow.equations[position]
        (self.total,), (self.result,) = equation.invars, equation.outvars
        self.scatters = RECORDS[collective.operation].divides
        self.size = collective.size
        self.transposed = any(
            equation_kinds.permutation(flow.equations[p]) is not None for p in path
        )

    def candidates(self, summands: Sequence[_Summand]) -> Iterator[Fusion]:
        """What it and these matmuls may become, the best first."""

        def cost(side: int) -> bool:
            x, _ = self._operands(summands[0].matmul, side)
            return not views.in_order(x.free, x.contracted)

        for side in sorted((0, 1), key=cost):
            yield from self._with_rows(summands, side)

    def _operands(self, matmul: Matmul, side: int) -> tuple[Factored, Factored]:
        """Operand `side` and the other one, as matrices."""
        operand = matmul.equation.invars[side]
        found = factored(matmul, self.flow.view(operand), side, self.flow)
        if not views.in_order(found[0].free, found[0].contracted):  # see `factored`
            return factored(matmul, dataflow.itself(operand), side, self.flow)
        return found

    def _with_rows(self, summands: Sequence[_Summand], side: int) -> Iterator[Fusion]:
        """Those where the rows are the free dimensions of operand `side` of the first matmul.

        The sum is a matrix of rows and columns. All matmuls must have the same one. There are none
        if they have not, or if too much would be transposed.
        """
        dims = _of_matrix(summands[0], side)
        terms = []
        for summand in summands:
            fitting = [s for s in (0, 1) if _of_matrix(summand, s) == dims]
            if not fitting:
                return
            own = side if side in fitting else fitting[0]
            terms.append((summand.matmul, own, *self._operands(summand.matmul, own)))
        x, w = terms[0][2:]
        rows = views.size_of(x.free)
        transposed = is_transposed(w)
        precision = terms[0][0].precision(terms[0][1])
        if any(
            is_transposed(other) != transposed or matmul.precision(own) != precision
            for matmul, own, _, other in terms
        ):
            return
        leading: tuple[int, ...] = (rows,)
        if self.scatters:
            found = self._scattered(dims, rows)
            if found is None:
                return
            leading, dims = found
        result = Layout(views.joined(*dims), self.result.aval.shape)
        layouts = [rows_of(x, leading) for _, _, x, _ in terms]
        moved = sum(
            nbytes(x.source.aval)
            for layout, (_, _, x, _) in zip(layouts, terms, strict=True)
            if layout.moves
        )
        transposes = result.moves and not self.transposed
        moved += nbytes(self.result.aval) * transposes
        if moved > MOVED * self._peer_bytes():
            return
        xs, ws = [x for _, _, x, _ in terms], [w for *_, w in terms]
        matrices = [matrix(w, transposed) for w in ws]
        params = AllReduceMatmulParams(
            axes=self.collective.axes,
            axis=0,
            world_size=self.size,
            dtype=self.total.aval.dtype,
            precision=precision,
            transposed=transposed,
            terms=len(terms),
            invariant=self.collective.invariant,
            copies=not self.scatters
            and any(
                layout.moves or self.flow.is_computed(w.source)
                for layout, w in zip(matrices, ws, strict=True)
            ),
        )
        its_params: SumMatmulParams = params
        if self.scatters:
            axis = len(leading) - 1
            its_params = params.of(SumMatmulParams, axis=axis, terms=len(terms))
        operation = Operation(
            matmul_reduce_scatter_p if self.scatters else matmul_all_reduce_p,
            its_params,
            (*layouts, *matrices),
            (result,),
        )
        plain = Fusion(
            flow=self.flow,
            collective=self.position,
            operation=operation,
            operands=tuple(operand.source for operand in (*xs, *ws)),
            results=(self.result,),
            removed=frozenset({self.position, *self.path}),
            looked_through=frozenset(p for operand in (*xs, *ws) for p in operand.path),
            transposes=transposes,
            summed=tuple(x.source for x in xs),
        )
        if self.scatters and transposed:
            yield from self._with_weight_gradients(plain, xs, leading)
        yield plain

    def _peer_bytes(self) -> int:
        """Bytes that a rank receives: parts of its peers' products, for an all-reduce sums, too."""
        part = nbytes(self.total.aval) // self.size
        return part * (self.size - 1) * (1 if self.scatters else 2)

    def _scattered(
        self, dims: list[Factors], rows: int
    ) -> tuple[tuple[int, ...], list[Factors]] | None:
        """The dimensions of the rows in the operation, and the dimensions of a rank's part.

        None if the scattered dimension does not start with rows.
        """
        dimension, size = self.collective.dimension, self.size
        first = next(iter(dims[dimension]), None)
        if first is None or first.dim != 0 or first.size % size:
            return None
        stride = first.stride * (first.size // size)  # of the rank

        def of_part(f: Factor) -> Factor:
            above = f.dim == 0 and f.stride >= stride * size
            return f._replace(stride=f.stride // size) if above else f

        scattered = (first._replace(size=first.size // size), *dims[dimension][1:])
        scattered = tuple(f for f in scattered if f.size > 1)
        if not self.collective.tiled:
            if scattered:
                return None
            parts = [*dims[:dimension], *dims[dimension + 1 :]]
        else:
            parts = [*dims[:dimension], scattered, *dims[dimension + 1 :]]
        part = [views.joined(tuple(map(of_part, factors))) for factors in parts]
        return leading_dims(rows, stride * size), part

    def _with_weight_gradients(
        self, plain: Fusion, xs: Sequence[Factored], leading: tuple[int, ...]
    ) -> Iterator[Fusion]:
        """The operation, and the weight gradients that multiply the same arrays."""
        flow, terms = self.flow, len(xs)
        columns = plain.operation.operands[terms].shape[0]
        found: dict[Any, list[tuple[int, Product, WeightGradient]]] = defaultdict(list)
        for k, x in enumerate(xs):
            for matmul, side, view in flow.matmuls_of[x.source]:
                if matmul.position in plain.removed:
                    continue
                product = Product(
                    matmul, side, *factored(matmul, view, side, flow), flow.tail(matmul)
                )
                gradient = weight_gradient(product, x, leading)
                if gradient is not None and gradient.operand.shape[-1] == columns:
                    dtype = product.result.aval.dtype
                    found[gradient.source, gradient.operand, dtype].append((k, product, gradient))
        for (source, operand, dtype), gradients in found.items():
            of_terms = {k: (product, gradient) for k, product, gradient in gradients}
            if len(of_terms) < len(gradients):
                continue  # two weight gradients for one term
            products = [product for product, _ in of_terms.values()]
            operation = plain.operation
            yield dataclasses.replace(
                plain,
                operation=Operation(
                    gradients_of_all_gather_matmul_p,
                    GradientParams(operation.params, True, tuple(of_terms), dtype),
                    (*operation.operands, operand),
                    (*operation.results, *(gradient.result for _, gradient in of_terms.values())),
                ),
                operands=(*plain.operands, source),
                results=(*plain.results, *(product.result for product in products)),
                removed=plain.removed.union(*(product.positions for product in products)),
                looked_through=plain.looked_through.union(
                    *((*product.x.path, *product.w.path) for product in products)
                ),
            )


def _of_matrix(summand: _Summand, rows: int) -> list[Factors]:
    """The dimensions of a summand as factors of a matrix: see `Matmul.result_dims`."""
    of_result = summand.matmul.result_dims(rows)

    def factor(f: Factor) -> Factor:
        (own,) = of_result[f.dim]
        return Factor(own.dim, own.stride * f.stride, f.size)

    return [views.joined(tuple(map(factor, factors))) for factors in summand.dims]
