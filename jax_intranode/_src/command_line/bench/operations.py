"""What can be measured: collectives and collective matmuls, their calls and transfers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax

import jax_intranode
from jax_intranode._src.operations import COLLECTIVE, RECORDS, Record, of_kind

# Collectives.


@dataclass(frozen=True)
class Operation:
    """A collective or a norm, or several in a row.

    As in nccl-tests, a size is the number of bytes of the operand or of the result, whichever is
    larger.

    Attributes:
        call: from a library (ours or jax.lax) and a list of arrays to a list of arrays.
        steps: their records.
        is_mean: the sum is divided by n.
    """

    call: Callable[[Any, list[Any]], list[Any]]
    steps: tuple[Record, ...]
    is_mean: bool = False

    @property
    def _growth(self) -> int:
        """The power of n by which the result is larger than the operand."""
        return sum(step.gathers - step.divides for step in self.steps)

    @property
    def operand_is_part(self) -> bool:
        """Whether the operand has 1/n of the elements in the size."""
        return self._growth > 0

    @property
    def result_is_part(self) -> bool:
        """Whether the result has 1/n of the elements in the size: the part of the rank's number."""
        return self._growth < 0

    @property
    def sums(self) -> bool:
        """Whether elements of different ranks are added."""
        return any(step.reduction for step in self.steps)

    @property
    def divides(self) -> bool:
        """Whether the operand is divided among the ranks."""
        return self.steps[0].divides

    def operand_count(self, count: int, n: int) -> int:
        """Returns the number of elements of a device's operand, given that of the size."""
        return count // n if self.operand_is_part else count

    def bus_factor(self, n: int) -> float:
        """Returns busbw / algbw. The bus bandwidth compares with a link's speed for any n."""
        if not self.sums and self._growth == 0 and not self.divides:
            return 1  # each rank sends its operand once
        passes = sum(1 if step.divides or step.gathers else 2 for step in self.steps)
        return passes * (n - 1) / n


def _call(steps: Sequence[Record]) -> Callable[[Any, list[Any]], list[Any]]:
    """Calls one after the other.

    The barriers keep XLA from merging operations: psum_scatter and all_gather into an all-reduce,
    or an all_gather with a slice of its result.
    """

    def call(library: Any, xs: list[Any]) -> list[Any]:
        for step in steps:
            assert step.call is not None  # all collectives have one
            xs = step.call(library, xs)
            if step.gathers or len(steps) > 1:
                xs = jax.lax.optimization_barrier(xs)
        return xs

    return call


def _operations() -> Iterator[tuple[str, Operation]]:
    for record in of_kind(COLLECTIVE):
        yield record.name, Operation(_call([record]), (record,))
    psum = RECORDS["psum"]
    yield "pmean", Operation(lambda library, xs: library.pmean(xs, "x"), (psum,), is_mean=True)
    in_two = RECORDS["psum_scatter"], RECORDS["all_gather"]
    yield "+".join(step.name for step in in_two), Operation(_call(in_two), in_two)


OPERATIONS = dict(_operations())


# Collective matmuls.


class Shape(NamedTuple):
    """The shape of the product [m, k] x [k, n] that one device computes."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n}"


class Result(NamedTuple):
    """An array that a collective matmul or its backward pass returns.

    Attributes:
        summed: it is the sum of the products of all devices.
        part: a device has 1/n of its rows.
        rounded: it contains a sum over devices, or is a product of such a sum. These sums round.
    """

    summed: bool = False
    part: bool = False
    rounded: bool = False


def _gathered(x: Any) -> Any:
    return lax.all_gather(x, "x", tiled=True)


@dataclass(frozen=True)
class Matmul:
    """A collective matmul of x and w over the axis "x".

    Each device has its own w. A gradient is a product on each device, too: of the x that it
    multiplied in the forward pass (the whole x) and the cotangent of its product (the whole
    cotangent).

    Attributes:
        ours: this package's function of x and w.
        lax: the same function written with `jax.lax`.
        whole_x: from x to the operand that is multiplied by w.
        whole_cotangent: from the result's cotangent to that of a device's product.
        forward: the result of the forward pass.
        backward: the input gradient and the weight gradient.
        passes: how often a device receives (n-1)/n of the gathered or summed array: twice if the
            sum goes back to all devices.
    """

    ours: Callable[[Any, Any], Any]
    lax: Callable[[Any, Any], Any]
    whole_x: Callable[[Any], Any]
    whole_cotangent: Callable[[Any], Any]
    forward: Result
    backward: tuple[Result, Result]
    passes: int = 1

    @property
    def gathers(self) -> bool:
        """Whether x is gathered, so that a device has a part of its rows."""
        return self.backward[0].part

    def results(self, backward: bool) -> tuple[Result, ...]:
        return self.backward if backward else (self.forward,)

    def received_bytes(self, shape: Shape, devices: int, itemsize: int) -> float:
        """Returns the bytes that a device receives, which are as many forward as backward."""
        columns = shape.k if self.gathers else shape.n
        return self.passes * (devices - 1) / devices * shape.m * columns * itemsize


def flops(shape: Shape, backward: bool) -> int:
    """Returns the multiplications and additions of a device: one product, backward two."""
    return (4 if backward else 2) * shape.m * shape.k * shape.n


_LOCAL = Result()
_PART_OF_SUM = Result(summed=True, part=True, rounded=True)

MATMULS = {
    "all_gather_matmul": Matmul(
        ours=lambda x, w: jax_intranode.all_gather_matmul(x, w, "x"),
        lax=lambda x, w: _gathered(x) @ w,
        whole_x=_gathered,
        whole_cotangent=lambda ct: ct,
        forward=_LOCAL,
        backward=(_PART_OF_SUM, _LOCAL),
    ),
    "matmul_reduce_scatter": Matmul(
        ours=lambda x, w: jax_intranode.matmul_reduce_scatter(x, w, "x"),
        lax=lambda x, w: lax.psum_scatter(x @ w, "x", tiled=True),
        whole_x=lambda x: x,
        whole_cotangent=_gathered,
        forward=_PART_OF_SUM,
        backward=(_LOCAL, _LOCAL),
    ),
    "matmul_all_reduce": Matmul(
        ours=lambda x, w: jax_intranode.matmul_all_reduce(x, w, "x"),
        lax=lambda x, w: lax.psum(x @ w, "x"),
        whole_x=lambda x: x,
        # As under check_vma=False, where the devices' cotangents are summed.
        whole_cotangent=lambda ct: lax.psum(ct, "x"),
        forward=Result(summed=True, rounded=True),
        backward=(Result(rounded=True), Result(rounded=True)),
        passes=2,
    ),
}
