"""Tables of ragged all-to-alls, what NumPy says they do, and the operation over them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from cases import line, sharded
from jax.sharding import PartitionSpec as P

import jax_intranode

Tables = list[np.ndarray]
KINDS = ("apart", "over", "to one", "same", "empty")


def tables(
    rng: np.random.Generator, n: int, k: int, rows: int, of_output: int, kind: str
) -> Tables:
    """Tables of n ranks with k updates for each rank, of a kind.

    The kinds: "apart": writes do not overlap; "over": they do; "to one": all goes to one rank;
    "same": all ranks send one slice to all; "empty".
    """
    sizes = rng.integers(0, max(2, 2 * min(rows, of_output) // (n * k) + 2), (n, n * k))
    sizes = np.minimum(sizes, min(rows, of_output))
    sizes[rng.random(sizes.shape) < 0.3] = 0
    if kind == "to one":
        sizes[:, np.arange(n * k) // k != rng.integers(n)] = 0
    if kind == "empty":
        sizes[:] = 0
    starts = rng.integers(0, rows + 1 - sizes)
    if kind == "same":
        sizes[:], starts[:] = sizes[:, :1], starts[:, :1]
    places = rng.integers(0, of_output + 1 - sizes)
    if kind != "over":
        for d in range(n):
            at = 0
            for s in range(n):
                for u in range(d * k, d * k + k):
                    sizes[s, u] = min(sizes[s, u], of_output - at)
                    places[s, u] = at
                    at += sizes[s, u]
    empty = sizes == 0  # their offsets may be anything
    starts[empty] = rng.integers(-9, 2 * rows, empty.sum())
    places[empty & (kind == "over")] = 1 << 30
    return [v.astype(np.int32) for v in (starts, sizes, places, received(sizes))]


def received(of_senders: np.ndarray) -> np.ndarray:
    """What the updates that each rank gets have, from what those have that each sends."""
    n = len(of_senders)
    return of_senders.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1)


def expected(
    operand: Sequence[np.ndarray] | np.ndarray, output: np.ndarray, of_ranks: Tables
) -> np.ndarray:
    """The results of all ranks. Where updates overlap, the last one of the last rank counts."""
    starts, sizes, places, _ = of_ranks
    n, result = len(operand), output.copy()
    k = sizes.shape[1] // n
    for source in range(n):
        for i, rows in enumerate(sizes[source]):
            if rows > 0:
                place, start = places[source, i], starts[source, i]
                result[i // k, place : place + rows] = operand[source][start : start + rows]
    return result


def program(
    n: int, library: Any = jax_intranode, check_vma: bool = False, mesh: Any = None, **options: Any
) -> Callable[..., Any]:
    """The operation over "x"; its operands have those of the ranks along a first dimension."""

    def body(*xs: Any) -> Any:
        options.setdefault("axis_name", "x")
        return library.ragged_all_to_all(*(x[0] for x in xs), **options)[None]

    return sharded(body, mesh or line(n), P("x"), P("x"), check_vma)


def operands(
    rng: np.random.Generator, n: int, rows: Sequence[int], row: Sequence[int], dtype: str
) -> list[np.ndarray]:
    """An operand and an output of all ranks, of so many rows of this shape."""
    found = [rng.integers(-100, 100, (n, count, *row)) for count in rows]
    return [x.astype(jax.numpy.dtype(dtype)) for x in found]
