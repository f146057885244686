"""All-gathers and the matmuls after them, as all_gather_matmul."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Var

from jax_intranode._src.jax_private import equation_kinds, lax_collectives
from jax_intranode._src.ops.collective_matmul import (
    GatherMatmulParams,
    GradientParams,
    all_gather_matmul_p,
    gradients_of_matmul_reduce_scatter_p,
)
from jax_intranode._src.ops.primitive import nbytes
from jax_intranode._src.rewrite import dataflow, views
from jax_intranode._src.rewrite.collectives import is_gather
from jax_intranode._src.rewrite.dataflow import Dataflow
from jax_intranode._src.rewrite.fusion import Fusion, Layout, Operation
from jax_intranode._src.rewrite.matrices import (
    MOVED,
    Factored,
    Product,
    after,
    factored,
    is_transposed,
    leading_dims,
    matrix,
    rows_of,
    weight_gradient,
)
from jax_intranode._src.rewrite.views import Factor, Factors


def fusions(
    flow: Dataflow, collectives: dict[int, lax_collectives.LaxCollective]
) -> Iterator[Iterator[Fusion]]:
    """For each all-gather, what it may become."""
    uses: dict[int, list[Product]] = defaultdict(list)
    gathers = {p: c for p, c in collectives.items() if is_gather(c)}
    if not gathers:
        return
    for matmul in flow.matmuls.values():
        for side in (0, 1):
            view = flow.cast_view(matmul.equation.invars[side])
            position = flow.made_at.get(view.source, -1)
            if position in gathers:
                x, w = factored(matmul, view, side, flow)
                uses[position].append(Product(matmul, side, x, w, flow.tail(matmul)))
    for position, products in uses.items():
        yield _Gather(flow, position, gathers[position]).candidates(products)


class _Gather:
    """An all-gather."""

    def __init__(self, flow: Dataflow, position: int, collective: lax_collectives.LaxCollective):
        self.flow = flow
        self.position = position
        self.collective = collective
        equation = flow.equations[position]
        (self.x,), (self.whole,) = equation.invars, equation.outvars
        self.size = collective.size
        self.peer_bytes = nbytes(self.x.aval) * (self.size - 1)

    def ranks(self, factors: Factors) -> int | None:
        """The index of the factor whose slowest digits are the rank; None if there is none."""
        dimension = self.collective.dimension
        length = self.whole.aval.shape[dimension]
        for index, f in enumerate(factors):
            if f.dim == dimension and f.stride * f.size == length and f.size % self.size == 0:
                return index
        return None

    def local(self, factors: Factors) -> Factors:
        """The same factors of a rank's shard."""
        at = self.ranks(factors)
        found = []
        for index, f in enumerate(factors):
            size = f.size // self.size if index == at else f.size
            dim = f.dim
            if not self.collective.tiled and dim > self.collective.dimension:
                dim -= 1
            if size > 1:
                found.append(Factor(dim, f.stride, size))
        return tuple(found)

    def candidates(self, products: Sequence[Product]) -> Iterator[Fusion]:
        """What it and these products may become, the best first."""
        groups: dict[Any, list[Product]] = defaultdict(list)
        wgrads = []
        for product in products:
            if not self._narrows(product.x.dtypes):
                continue
            if self.ranks(product.x.free) is None:
                wgrads += [product] if self.ranks(product.x.contracted) is not None else []
            elif not product.transposes or nbytes(product.result.aval) <= MOVED * self.peer_bytes:
                groups[_shared(product)].append(product)
        if not groups:
            return
        group = max(groups.values(), key=lambda g: sum(p.size for p in g))
        if len(group) == 1:
            for wgrad in wgrads:
                yield from self._fused(group, wgrad)
        while group:
            found = list(self._fused(group, None))
            obstacle = found[0].obstacle if found else None
            if obstacle is None:
                break
            before = [p for p in group if p.matmul.position < obstacle]
            group = before if len(before) < len(group) else group[:-1]
        yield from found if group else ()
        # A product that is not overlapped must not keep the others from it.
        if len(group) > 1:
            large = [p for p in group if views.size_of(p.w.free) % 8 == 0]
            if 0 < len(large) < len(group):
                yield from self._fused(large, None)

    def _narrows(self, dtypes: Sequence[Any]) -> bool:
        """Whether no more bytes are gathered if the shard is cast."""
        widths = [self.x.aval.dtype.itemsize, *(dtype.itemsize for dtype in dtypes)]
        return widths[-1] == min(widths)

    def _fused(self, group: Sequence[Product], wgrad: Product | None) -> Iterator[Fusion]:
        """The gather with these products, and with a weight gradient; nothing if there is none."""
        members = [*group, *([] if wgrad is None else [wgrad])]
        replaced = {p for member in members for p in member.positions}
        needed = self._needed(replaced, group[0].x)
        if needed is None or (wgrad is not None and needed[0] is not None):
            return
        result, again = needed
        operation = self._operation(group, wgrad, result)
        if operation is None:
            return
        gathered = () if result is None else (result,)
        yield Fusion(
            flow=self.flow,
            collective=self.position,
            operation=operation,
            operands=(self.x, *(p.w.source for p in members)),
            results=(*(p.result for p in members), *gathered),
            removed=frozenset({self.position, *replaced, *again}),
            looked_through=frozenset(q for p in members for q in p.w.path),
            transposes=any(p.transposes for p in group),
            gathered=(self.whole, *gathered),
        )

    def _operation(
        self, group: Sequence[Product], wgrad: Product | None, gathered: Any
    ) -> Operation | None:
        """The operation for these products, and a weight gradient, if any; None if there is none.

        `gathered` is the gathered array, if that is a result.
        """
        x, matmul, side = group[0].x, group[0].matmul, group[0].side
        at = self.ranks(x.free)
        assert at is not None  # or it would be no product of a group
        rows = views.size_of(x.free[at:]) // self.size
        size = views.size_of(x.free) // self.size
        leading = leading_dims(size, rows)
        whole = (*leading[:-1], rows * self.size)
        shard = Factored(self.x, self.local(x.free), self.local(x.contracted), (), x.dtypes)
        params = GatherMatmulParams(
            axes=self.collective.axes,
            axis=len(leading) - 1,
            world_size=self.size,
            dtype=group[0].result.aval.dtype,
            precision=matmul.precision(side),
            transposed=is_transposed(group[0].w),
            gathered=gathered is not None,
        )
        primitive = all_gather_matmul_p
        its_params: Any = params
        layouts = [rows_of(shard, leading), *(matrix(p.w, params.transposed) for p in group)]
        results = [after(p.matmul, p.tail, p.side) for p in group]
        if wgrad is not None:
            other = weight_gradient(wgrad, x, whole)
            columns = views.size_of(group[0].w.free)
            if other is None or other.operand.shape[-1] != columns or not params.transposed:
                return None
            primitive = gradients_of_matmul_reduce_scatter_p
            its_params = GradientParams(params, True, (0,), wgrad.result.aval.dtype)
            layouts.append(other.operand)
            results.append(other.result)
        if gathered is not None:
            results.append(Layout(x.free + x.contracted, gathered.aval.shape))
        return Operation(primitive, its_params, tuple(layouts), tuple(results), x.dtypes)

    def _needed(self, replaced: set[int], x: Factored) -> tuple[Any, Sequence[int]] | None:
        """What the operation has to make for others that need the gathered array.

        That is a variable, or None, and the positions of the equations that made it from the
        gathered array. None if the operation can't give it.
        """
        v, removed = self.whole, []
        users = self._users(v, replaced)
        if not users:
            return None, ()
        if not views.in_order(x.free, x.contracted):
            return None
        for dtype in x.dtypes:
            while True:
                if len(users) != 1 or users[0] == len(self.flow.equations):
                    return None
                equation = self.flow.equations[users[0]]
                if not dataflow.is_layout(equation, cast=True):
                    return None
                removed.append(users[0])
                (v,) = equation.outvars
                users = self._users(v, replaced)
                if equation_kinds.changes_dtype(equation):
                    if v.aval.dtype != dtype:
                        return None
                    break
        # After a transposition the elements of v are not in the order of the gathered array.
        if not views.in_order(*self.flow.cast_view(v).dims):
            return None
        return v, removed

    def _users(self, v: Var, replaced: set[int], depth: int = 0) -> list[int]:
        """The positions of the equations that need v besides the replaced ones."""
        found = []
        for position in self.flow.used_at[v]:
            if position in replaced:
                continue
            if position < len(self.flow.equations):
                equation = self.flow.equations[position]
                dead = (
                    dataflow.is_layout(equation, cast=True)
                    and depth < dataflow.MOST_LAYOUTS
                    and not self._users(equation.outvars[0], replaced, depth + 1)
                )
                if dead:
                    continue
            found.append(position)
        return found


def _shared(product: Product) -> Any:
    """What products have in common that one operation can compute."""
    x, precision = product.x, product.matmul.precision(product.side)
    dtype = product.result.aval.dtype
    return x.free, x.contracted, x.dtypes, dtype, precision, is_transposed(product.w)
