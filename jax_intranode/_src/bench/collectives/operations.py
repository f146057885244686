"""The operations that can be measured: what they call, and how sizes are counted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Operation:
    """An operation, and what it does to the number of elements.

    Sizes count as in nccl-tests: the elements of the operand or of the result, whichever are more.

    Attributes:
        call: from a library (ours or jax.lax) and a list of arrays to a list of arrays.
        steps: the collectives that it is made of, by the names that select.py knows them by.
        operand_is_part: the operand has only 1/n of the elements that the size counts.
        result_is_part: the result has only 1/n of them: the part with the number of the rank.
        is_mean: the sum is divided by n.
    """

    call: Callable[[Any, list[Any]], list[Any]]
    steps: tuple[str, ...]
    operand_is_part: bool = False
    result_is_part: bool = False
    is_mean: bool = False

    @property
    def sums(self) -> bool:
        """Whether elements of different ranks are added."""
        return self.steps != ("all_gather",)

    def operand_count(self, count: int, n: int) -> int:
        """Elements of a device's operand, for the elements that the size counts."""
        return count // n if self.operand_is_part else count

    def result_count(self, count: int, n: int) -> int:
        """Elements of a device's result, for the elements that the size counts."""
        return count // n if self.result_is_part else count

    def bus_factor(self, n: int) -> float:
        """What algbw is multiplied by for a speed that compares with a link's for any n."""
        passes = 1 if self.operand_is_part or self.result_is_part else 2
        return passes * (n - 1) / n


def _psum_scatter(library: Any, xs: list[Any]) -> Any:
    return library.psum_scatter(xs, "x", tiled=True)


def _all_gather(library: Any, xs: list[Any]) -> Any:
    return library.all_gather(xs, "x", tiled=True)


# The barriers keep XLA from making one operation of two: an all-reduce of the pair, or something
# else of a gather of which a slice is taken.
OPERATIONS = {
    "psum": Operation(lambda library, xs: library.psum(xs, "x"), ("psum",)),
    "pmean": Operation(lambda library, xs: library.pmean(xs, "x"), ("psum",), is_mean=True),
    "psum_scatter": Operation(_psum_scatter, ("psum_scatter",), result_is_part=True),
    "all_gather": Operation(
        lambda library, xs: jax.lax.optimization_barrier(_all_gather(library, xs)),
        ("all_gather",),
        operand_is_part=True,
    ),
    "psum_scatter+all_gather": Operation(
        lambda library, xs: _all_gather(
            library, jax.lax.optimization_barrier(_psum_scatter(library, xs))
        ),
        ("psum_scatter", "all_gather"),
    ),
}
