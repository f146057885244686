"""Random routings of tokens to experts, what NumPy says of them, and the operations over them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from cases import line, sharded
from jax.sharding import PartitionSpec as P

import jax_intranode

KINDS = ("any", "to one", "few experts", "none", "some none", "twice")


def routing(rng: np.random.Generator, n: int, tokens: int, k: int, experts: int, kind: str) -> Any:
    """The experts of the tokens of n ranks, [n, tokens, k], of a kind.

    The kinds: "any": each token has k experts; "to one": all of them on one rank; "few experts":
    most experts have no token; "none": no token has an expert; "some none": many -1; "twice": a
    token may have an expert more than once.
    """
    shape = (n, tokens, k)
    order = np.argsort(rng.random((n, tokens, experts)), axis=-1)
    ids = np.resize(order[..., :k], shape) if k > experts else order[..., :k]
    if kind == "to one":
        ids = rng.integers(n) * (experts // n) + ids % (experts // n)
    if kind == "few experts":
        ids = rng.choice(experts, 2)[rng.integers(0, 2, shape)]
    if kind == "none":
        ids = np.full(shape, -1)
    if kind == "some none":
        ids = np.where(rng.random(shape) < 0.5, -1, ids)
    if kind == "twice":
        ids = rng.integers(0, experts, shape)
    return ids.astype(np.int32)


@dataclass
class Expected:
    """What a dispatch and a combine give on all ranks, by the order that is promised."""

    received: np.ndarray
    sizes: np.ndarray
    dropped: np.ndarray
    rows: list[list[tuple[int, int, int]]]  # of each rank, for each row: (rank, token, choice)

    def combined(self, outputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The combine of these outputs [n, capacity, H]; weights are those of the tokens."""
        n, tokens, _ = weights.shape
        total = np.zeros((n, tokens, outputs.shape[2]), np.float32)
        for rank in range(n):  # that of the experts
            part = np.zeros_like(total)
            of_tokens = sorted((*where, row) for row, where in enumerate(self.rows[rank]))
            for source, token, choice, row in of_tokens:
                weight = weights[source, token, choice].astype(np.float32)
                part[source, token] += weight * outputs[rank, row].astype(np.float32)
            total += part.astype(outputs.dtype).astype(np.float32)
        return total.astype(outputs.dtype)


def expected(x: np.ndarray, ids: np.ndarray, experts: int, capacity: int) -> Expected:
    n, tokens, k = ids.shape
    local = experts // n
    received = np.zeros((n, capacity, x.shape[2]), x.dtype)
    sizes, dropped = np.zeros((n, local), np.int32), np.zeros((n, n), np.int32)
    rows = []
    for rank in range(n):
        kept = []
        for token in range(tokens):
            for source in range(n):
                for choice in range(k):
                    expert = ids[source, token, choice] - rank * local
                    if not 0 <= expert < local:
                        continue
                    if len(kept) < capacity:
                        kept.append((expert, source, token, choice))
                    else:
                        dropped[rank, source] += 1
        kept.sort()
        for row, (expert, source, token, _) in enumerate(kept):
            received[rank, row] = x[source, token]
            sizes[rank, expert] += 1
        rows.append([where for _, *where in kept])
    return Expected(received, sizes, dropped, [[tuple(w) for w in r] for r in rows])


def layer(of_rows: Callable[[Any], Any], experts: int, capacity: int | None) -> Any:
    """(x, ids, weights) of a rank -> received, sizes, dropped, and the combined results.

    `of_rows` computes the outputs of the rows.
    """

    def body(x: Any, ids: Any, weights: Any) -> Any:
        received, sizes, state = jax_intranode.moe_dispatch(
            x, ids, weights, "x", num_experts=experts, capacity=capacity
        )
        y = jax_intranode.moe_combine(of_rows(received), state)
        return received, sizes, state.dropped, y

    return body


def program(n: int, experts: int, capacity: int | None, mesh: Any = None) -> Callable[..., Any]:
    """The layer over "x"; operands have those of the ranks along a first dimension.

    The outputs of the experts are halves of their rows: exact in all dtypes.
    """
    of_rank = layer(lambda rows: rows * 0.5, experts, capacity)

    def body(*xs: Any) -> Any:
        return jax.tree.map(lambda v: v[None], of_rank(*(x[0] for x in xs)))

    return sharded(body, mesh or line(n), P("x"), P("x"))


def operands(
    rng: np.random.Generator, n: int, tokens: int, hidden: int, k: int, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and weights of n ranks."""
    x = rng.uniform(-1, 1, (n, tokens, hidden)).astype(np.dtype(dtype))
    return x, rng.uniform(-1, 1, (n, tokens, k)).astype(np.float32)
