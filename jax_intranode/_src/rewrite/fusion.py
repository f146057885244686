"""Equations that one of our operations replaces, and what forbids it.

The operation runs at the position of the last equation that it replaces; equations that need one of
its results wait until then.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, Literal, Var

from jax_intranode._src.jax_private import jaxpr_edit
from jax_intranode._src.ops import matmul_arguments
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import BY_PRIMITIVE, OpPrimitive, nbytes
from jax_intranode._src.rewrite import dataflow, views
from jax_intranode._src.rewrite.dataflow import Dataflow
from jax_intranode._src.rewrite.views import Factors
from jax_intranode._src.rewrite.waiting import Waiting

# Equations that are farther apart are not put together: comparing them with all equations between
# would take long.
FARTHEST = 1000

# What is replaced, and the equations that take the place.
_Accepted = tuple["Replacement", Sequence[Any]]


@dataclass(frozen=True)
class Layout:
    """How an array is made from another one: see `views.arrange`.

    Attributes:
        factors: of the other array.
        shape: of the result.
    """

    factors: Factors
    shape: tuple[int, ...]

    def __call__(self, x: Any) -> Any:
        return views.arrange(x, self.factors, self.shape)

    @property
    def moves(self) -> bool:
        """Whether elements move in memory."""
        return not views.in_order(self.factors)


@dataclass(frozen=True)
class Operation:
    """One of our operations, with what is done to its operands and results.

    Attributes:
        primitive: the operation.
        params: its parameters.
        operands: the layout of each operand.
        results: the layout of each result.
        dtypes: the dtypes to which the first operand is cast, in order.
    """

    primitive: OpPrimitive
    params: Any
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    dtypes: tuple[Any, ...] = ()

    def avals(self, avals: Sequence[Any]) -> list[Any]:
        """The types of the primitive's operands."""
        found = [a.update(shape=x.shape) for a, x in zip(avals, self.operands, strict=True)]
        if self.dtypes:
            found[0] = found[0].update(dtype=self.dtypes[-1])
        return found

    def function(self, site: LoweringSite) -> Callable[..., list[Any]]:
        """The whole as a function that can be traced."""

        def fused(*operands: Any) -> list[Any]:
            first, *others = operands
            for dtype in self.dtypes:
                first = lax.convert_element_type(first, dtype)
            arranged = [
                layout(v) for layout, v in zip(self.operands, (first, *others), strict=True)
            ]
            arranged = matmul_arguments.varying_alike(arranged, self.params.axes)
            results = self.primitive.bind_at(site, *arranged, params=self.params)
            return [layout(v) for layout, v in zip(self.results, results, strict=True)]

        return fused


@dataclass(frozen=True)
class Replacement:
    """Equations whose place an operation may take.

    Attributes:
        flow: the equations.
        collective: the position of the collective.
        operands: the operands of the operation.
        results: the variables that it makes.
        removed: the positions of the equations that it replaces.
        looked_through: the positions of those between its operands and the removed equations.
    """

    flow: Dataflow
    collective: int
    operands: tuple[Var, ...]
    results: tuple[Var, ...]
    removed: frozenset[int]
    looked_through: frozenset[int]

    @cached_property
    def first(self) -> int:
        """The position of the first equation that computes or uses a result."""
        return min(self.removed)

    @cached_property
    def last(self) -> int:
        """The position at which the operation runs."""
        return max(self.removed)

    def feeds(self, other: "Replacement") -> bool:
        """Whether an operation depends on the results of this one."""
        made = set(self.results)
        flow = self.flow
        for position in range(self.first, other.last):
            if not made.isdisjoint(flow.uses[position]):
                made.update(flow.equations[position].outvars)
        return not made.isdisjoint(other.operands)


@dataclass(frozen=True)
class Fusion(Replacement):
    """Equations whose place one of our matmuls may take.

    Attributes:
        operation: what takes the place.
        gathered: the result of an all-gather, and the variable that the operation makes of it, if
            any. The other results are products and sums.
        summed: the operands that are multiplied before a sum.
        transposes: whether results have to be transposed that the program does not transpose.
    """

    operation: Operation
    gathered: tuple[Var, ...] = ()
    summed: tuple[Var, ...] = ()
    transposes: bool = False

    @cached_property
    def obstacle(self) -> int | None:
        """The position of an equation that does not allow it; None if nothing forbids it.

        Its results come to be at one time, and must not need each other. What forbids it is a fence
        (see `equation_kinds.is_fence`), or that it would add memory: results live longer if
        something that takes long needs one of them before the last one is computed, and more
        results live at once if one was no longer needed by then.
        """
        flow, start, last = self.flow, min(self.removed), self.last
        if last - self.first > FARTHEST:
            return self.first + FARTHEST + 1
        stretches = flow.stretches
        if stretches[start] != stretches[last]:
            return next(p for p in range(start, last + 1) if stretches[p] > stretches[start])
        products = [v for v in self.results if v not in self.gathered]
        # What depends on a product, or on something else that takes long; and on gathered arrays.
        late, early = set(products), set(self.gathered)
        made_of = {v: {v} for v in products}
        for position in range(self.first, last + 1):
            if position in self.removed:
                continue
            equation = flow.equations[position]
            used = flow.uses[position]
            if not late.isdisjoint(used):
                if flow.is_heavy[position]:
                    return position
                late.update(equation.outvars)
                for made in made_of.values():
                    if not made.isdisjoint(used):
                        made.update(equation.outvars)
            elif not early.isdisjoint(used):
                (late if flow.is_heavy[position] else early).update(equation.outvars)
        for v in self.operands:
            if v in late or v in early or flow.made_at.get(v) in self.removed:
                return flow.made_at[v]
        for product, made in made_of.items():
            needed = sum(
                nbytes(v.aval) for v in made if v in flow.used_at and flow.used_at[v][-1] > last
            )
            if needed < nbytes(product.aval):
                return last
        return self._obstacle_of_sum()

    def _obstacle_of_sum(self) -> int | None:
        """The position of something that takes long, that a summand needs, after the first summand.

        The operands of the first summand would have to live until it is done.
        """
        flow, needed = self.flow, set(self.summed)
        for position in range(self.last, min(self.removed), -1):
            equation = flow.equations[position]
            if position not in self.removed and not needed.isdisjoint(equation.outvars):
                if flow.is_heavy[position]:
                    return position
                needed.update(flow.uses[position])
        return None

    @cached_property
    def first(self) -> int:
        """The position of the first equation that computes or uses a result."""
        used = [p for v in self.gathered for p in self.flow.used_at[v]]
        return min(used or self.removed)

    def inlined(self, jaxpr: Jaxpr) -> Iterator[Any]:
        """The equations of the operation, as this jaxpr, with the program's variables."""
        like = self.flow.equations[self.collective]
        names: dict[Any, Any] = dict(zip(jaxpr.invars, self.operands, strict=True))
        names.update(zip(jaxpr.outvars, self.results, strict=True))
        for equation in jaxpr.eqns:
            for v in equation.outvars:
                if v not in names:
                    names[v] = jaxpr_edit.new_variable(v.aval)
            own = BY_PRIMITIVE.get(equation.primitive)
            yield equation.replace(
                invars=[v if isinstance(v, Literal) else names[v] for v in equation.invars],
                outvars=[names[v] for v in equation.outvars],
                source_info=like.source_info
                if own is None
                else jaxpr_edit.source_in_scope(like, own.scope),
                ctx=like.ctx,
            )


class Accepted:
    """Operations that can all be in one program.

    No two of them replace an equation, or look through one that the other replaces. If one depends
    on another, it begins after the other has run.
    """

    def __init__(self, flow: Dataflow):
        self._flow = flow
        self._operations: list[_Accepted] = []
        self._removed: set[int] = set()
        self._looked_through: set[int] = set()

    def fits(self, fusion: Replacement) -> bool:
        """Whether an operation can be in the program, too."""
        return (
            self._removed.isdisjoint(fusion.removed)
            and self._removed.isdisjoint(fusion.looked_through)
            and self._looked_through.isdisjoint(fusion.removed)
            and not any(
                fusion.feeds(other) or other.feeds(fusion)
                for other, _ in self._operations
                if other.first <= fusion.last and fusion.first <= other.last
            )
        )

    def add(self, fusion: Replacement, equations: Iterable[Any]) -> None:
        """Accepts an operation that fits, as these equations."""
        self._operations.append((fusion, tuple(equations)))
        self._removed |= fusion.removed
        self._looked_through |= fusion.looked_through

    def equations(self) -> Sequence[Any]:
        """The equations, with the operations in the place of others."""
        flow, accepted = self._flow, self._operations
        if not accepted:
            return flow.equations
        owner = {p: k for k, (fusion, _) in enumerate(accepted) for p in fusion.removed}
        order = Waiting()
        for k, (fusion, _) in enumerate(accepted):
            order.expect(fusion.results, k)
        for position, equation in enumerate(flow.equations):
            owned_by = owner.get(position)
            if owned_by is not None:
                fusion, equations = accepted[owned_by]
                if position == fusion.last:
                    order.run([owned_by], equations)
            else:
                order.emit(equation)
        end = len(flow.equations)
        return _without_dead_layouts(
            order.emitted, (v for v, p in flow.used_at.items() if end in p)
        )


def _without_dead_layouts(equations: Sequence[Any], results: Iterable[Var]) -> list[Any]:
    """The equations without reshapes, transpositions and casts that nothing needs any more."""
    needed, found = set(results), []
    for equation in reversed(equations):
        if dataflow.is_layout(equation, cast=True) and needed.isdisjoint(equation.outvars):
            continue
        needed.update(dataflow.variables(equation.invars))
        found.append(equation)
    return found[::-1]
