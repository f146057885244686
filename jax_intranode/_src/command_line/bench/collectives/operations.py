"""The collectives that can be measured: what they call, and what their size means."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Operation:
    """A collective, or two of them in a row.

    As in nccl-tests, a size is the number of bytes of the operand or of the result, whichever is
    larger.

    Attributes:
        call: from a library (ours or jax.lax) and a list of arrays to a list of arrays.
        steps: the names of the collectives in select.py.
        operand_is_part: the operand has 1/n of the elements in the size.
        result_is_part: the result has 1/n of them: the part with the rank's number.
        is_mean: the sum is divided by n.
        exchanges: the result has the parts with the rank's number of all operands.
    """

    call: Callable[[Any, list[Any]], list[Any]]
    steps: tuple[str, ...]
    operand_is_part: bool = False
    result_is_part: bool = False
    is_mean: bool = False
    exchanges: bool = False

    @property
    def sums(self) -> bool:
        """Whether elements of different ranks are added."""
        return self.steps not in (("all_gather",), ("all_to_all",))

    @property
    def divides(self) -> bool:
        """Whether the operand is divided among the ranks."""
        return self.exchanges or "psum_scatter" in self.steps

    def operand_count(self, count: int, n: int) -> int:
        """Returns the number of elements of a device's operand, given that of the size."""
        return count // n if self.operand_is_part else count

    def result_count(self, count: int, n: int) -> int:
        """Returns the number of elements of a device's result, given that of the size."""
        return count // n if self.result_is_part else count

    def bus_factor(self, n: int) -> float:
        """Returns busbw / algbw. The bus bandwidth compares with a link's speed for any n."""
        passes = 1 if self.operand_is_part or self.result_is_part or self.exchanges else 2
        return passes * (n - 1) / n


def _psum_scatter(library: Any, xs: list[Any]) -> Any:
    return library.psum_scatter(xs, "x", tiled=True)


def _all_gather(library: Any, xs: list[Any]) -> Any:
    return library.all_gather(xs, "x", tiled=True)


def _all_to_all(library: Any, xs: list[Any]) -> Any:
    return library.all_to_all(xs, "x", 0, 0, tiled=True)


# The barriers keep XLA from merging operations: psum_scatter and all_gather into an all-reduce, or
# an all_gather with a slice of its result.
OPERATIONS = {
    "psum": Operation(lambda library, xs: library.psum(xs, "x"), ("psum",)),
    "pmean": Operation(lambda library, xs: library.pmean(xs, "x"), ("psum",), is_mean=True),
    "psum_scatter": Operation(_psum_scatter, ("psum_scatter",), result_is_part=True),
    "all_gather": Operation(
        lambda library, xs: jax.lax.optimization_barrier(_all_gather(library, xs)),
        ("all_gather",),
        operand_is_part=True,
    ),
    "all_to_all": Operation(_all_to_all, ("all_to_all",), exchanges=True),
    "psum_scatter+all_gather": Operation(
        lambda library, xs: _all_gather(
            library, jax.lax.optimization_barrier(_psum_scatter(library, xs))
        ),
        ("psum_scatter", "all_gather"),
    ),
}
