"""The operands and the result of a matmul as matrices, which is how our operations take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_intranode._src.rewrite import dataflow, views
from jax_intranode._src.rewrite.dataflow import Dataflow, Matmul, Tail
from jax_intranode._src.rewrite.fusion import Layout
from jax_intranode._src.rewrite.views import Factors

# Our operations may need transpositions that lax's matmuls do not. They may move this many times
# the bytes that come from peers. An H200's memory is nine times as fast as its links, and each byte
# is read and written, so this takes less than half the time that overlapping can hide. Not
# measured.
MOVED = 2


@dataclass(frozen=True)
class Factored:
    """An operand of a matmul, as a matrix of its free and its contracted dimensions.

    Attributes:
        source: the variable that it is made from.
        free: its free dimensions, in the order of the matmul's result, as one.
        contracted: its contracted dimensions, as one.
        path: the positions of the equations between source and operand.
        dtypes: those to which the source is cast.
    """

    source: Any
    free: Factors
    contracted: Factors
    path: tuple[int, ...]
    dtypes: tuple[Any, ...]


def _factored(matmul: Matmul, view: dataflow.View, side: int, order: Sequence[int]) -> Factored:
    """An operand, with its contracted dimensions in an order."""
    contracted = matmul.contracted(side)
    return Factored(
        view.source,
        views.joined(*(view.dims[i] for i in matmul.free(side))),
        views.joined(*(view.dims[contracted[k]] for k in order)),
        view.path,
        view.dtypes,
    )


def _pairs_in_order(matmul: Matmul, view: dataflow.View, side: int) -> list[int]:
    """The pairs of contracted dimensions, in the order in which they are in the view's source."""
    contracted = matmul.contracted(side)
    if len(contracted) == 1:
        return [0]

    def key(k: int) -> tuple[int, int]:
        return min(((f.dim, -f.stride) for f in view.dims[contracted[k]]), default=(0, 0))

    return sorted(range(len(contracted)), key=key)


def factored(
    matmul: Matmul, view: dataflow.View, side: int, flow: Dataflow
) -> tuple[Factored, Factored]:
    """Operand `side`, as this view, and the other one."""
    other = matmul.equation.invars[1 - side]
    order = _pairs_in_order(matmul, view, side)
    w = _factored(matmul, flow.view(other), 1 - side, order)
    if not (views.in_order(w.contracted, w.free) or views.in_order(w.free, w.contracted)):
        # The program has transposed it, and so need not we.
        w = _factored(matmul, dataflow.itself(other), 1 - side, order)
    return _factored(matmul, view, side, order), w


def is_transposed(w: Factored) -> bool:
    """Whether a matrix is [N, K] in memory."""
    if views.in_order(w.contracted, w.free):
        return False
    return views.in_order(w.free, w.contracted)


def matrix(w: Factored, transposed: bool) -> Layout:
    """The matrix as an operand: [K, N], or [N, K] if it is transposed."""
    first, second = (w.free, w.contracted) if transposed else (w.contracted, w.free)
    return Layout(first + second, (views.size_of(first), views.size_of(second)))


def rows_of(x: Factored, leading: tuple[int, ...]) -> Layout:
    """The other operand: its free dimensions with these lengths, then K."""
    return Layout(x.free + x.contracted, (*leading, views.size_of(x.contracted)))


def after(matmul: Matmul, tail: Tail, rows: int) -> Layout:
    """The layout of the tail's result, as a matrix with the free dimensions of `rows` as rows."""
    dims = matmul.result_dims(rows)
    flat = views.joined(*(dims[i] for i in tail.permutation))
    return Layout(flat, tail.result.aval.shape)


def leading_dims(size: int, rows: int) -> tuple[int, ...]:
    """The dimensions before K: `rows`, after those that are slower than the rank's."""
    return (rows,) if size == rows else (size // rows, rows)


@dataclass(frozen=True)
class Product:
    """A matmul of an array that an operation gathers or multiplies.

    Attributes:
        matmul: the matmul.
        side: which operand the array is.
        x: the array as this operand.
        w: the other operand.
        tail: what becomes of the result.
    """

    matmul: Matmul
    side: int
    x: Factored
    w: Factored
    tail: Tail

    @property
    def result(self) -> Any:
        """The variable of the result."""
        return self.tail.result

    @property
    def size(self) -> int:
        """The number of multiplications."""
        return views.size_of(self.x.free + self.x.contracted + self.w.free)

    @property
    def transposes(self) -> bool:
        """Whether the result of our operation has to be transposed, and the program's has not."""
        return after(self.matmul, self.tail, self.side).moves and not self.tail.transposed

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of its equations."""
        return (self.matmul.position, *self.tail.path)


@dataclass(frozen=True)
class WeightGradient:
    """The other operand of a weight gradient, and the layouts of operand and result."""

    source: Any
    operand: Layout
    result: Layout


def weight_gradient(
    product: Product, rows: Factored, leading: tuple[int, ...]
) -> WeightGradient | None:
    """A matmul of an array whose rows it contracts, as part of an operation on that array.

    `rows` is the array as the operation multiplies it, with these leading dimensions.
    """
    x, other, tail = product.x, product.w, product.tail
    if (x.contracted, x.free, x.dtypes) != (rows.free, rows.contracted, rows.dtypes):
        return None
    if not views.in_order(other.contracted, other.free):
        return None
    result = after(product.matmul, tail, 1 - product.side)
    if result.moves and not tail.transposed:
        return None
    columns = views.size_of(other.free)
    operand = Layout(other.contracted + other.free, (*leading, columns))
    return WeightGradient(other.source, operand, result)
