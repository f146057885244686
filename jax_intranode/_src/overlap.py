"""Whether a collective matmul is overlapped, and how it is cut: a pure function of what all ranks
know."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_intranode._src import select

DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Plan:
    """How an operation runs (xla_ffi/cuda/collective_matmul.h).

    Attributes:
        first_cuts: into how many pieces the first rows are cut that are sent, for sums. Each has half
            of what is left, the smallest comes first.
        last_cuts: so for the last rows that are sent; the smallest comes last.
    """

    first_cuts: int = 1
    last_cuts: int = 1


_forced: Plan | None = None


@contextlib.contextmanager
def forced(plan: Plan | None) -> Iterator[None]:
    """Uses a plan for all that is lowered within, whatever is faster. For tuning and for tests."""
    global _forced
    before, _forced = _forced, plan
    try:
        yield
    finally:
        _forced = before


def plan(
    operation: str,
    *,
    rows: int,
    k: int,
    ns: Sequence[int],
    dtype: str,
    world_size: int,
    ring_bytes: int,
) -> Plan | str:
    """Chooses a plan.

    Args:
        operation: "all_gather_matmul" or "matmul_reduce_scatter".
        rows: rows of the operand or of the result that a rank has to itself.
        k: the contracted dimension.
        ns: columns of each matrix.
        dtype: name of the dtype of the operands and results.
        world_size: ranks of the group.
        ring_bytes: bytes of a device's ring.

    Returns:
        The plan, or why the operation is not overlapped.
    """
    if dtype not in DTYPES:
        return f"dtype {dtype}; overlapped are {', '.join(DTYPES)}"
    if not 2 <= world_size <= select.MAX_WORLD_SIZE:
        return f"a group of {world_size} ranks; overlapped are 2 to {select.MAX_WORLD_SIZE}"
    if rows == 0 or k == 0 or 0 in ns:
        return "no elements"
    if k % 8 or any(n % 8 for n in ns):
        return f"K {k}, N {', '.join(map(str, ns))}; overlapped are multiples of 8"
    if _forced is not None:
        return _forced
    return Plan()
