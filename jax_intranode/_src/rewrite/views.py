"""Which elements of another array the dimensions of an array run over.

Between a collective and a matmul a program may reshape and transpose. An array that is made from
another one, its source, in this way is described by factors: each of its dimensions is a list of
factors of the source's dimensions. For example, a source [6, 4] that is reshaped to [2, 3, 4] and
transposed to [4, 2, 3] has the dimensions [(1, 1, 4)], [(0, 3, 2)], [(0, 1, 3)].
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax


class Factor(NamedTuple):
    """Some digits of an index of a dimension: ``index // stride % size``.

    Attributes:
        dim: the dimension of the source.
        stride: the distance, along it, of successive values.
        size: the number of values, more than 1.
    """

    dim: int
    stride: int
    size: int


# A dimension of an array: the factors of the source that it runs over, the slowest first. Adjacent
# factors that are one factor are joined, so equal dimensions compare equal.
Factors = tuple[Factor, ...]

# Layers of a program are alike. So many results of a function are kept.
KNOWN = 4096


def size_of(factors: Sequence[Factor]) -> int:
    """The length of a dimension."""
    return math.prod(f.size for f in factors)


@functools.lru_cache(KNOWN)
def whole(shape: tuple[int, ...]) -> tuple[Factors, ...]:
    """The dimensions of the source itself."""
    return tuple((Factor(i, 1, n),) if n > 1 else () for i, n in enumerate(shape))


@functools.lru_cache(KNOWN)
def joined(*parts: Factors) -> Factors:
    """One dimension that runs over several, the first of them slowest."""
    found: list[Factor] = []
    for part in parts:
        for f in part:
            if found and found[-1].dim == f.dim and found[-1].stride == f.stride * f.size:
                found[-1] = Factor(f.dim, f.stride, found[-1].size * f.size)
            else:
                found.append(f)
    return tuple(found)


def digits(factors: Sequence[Factor], stride: int, size: int) -> Factors | None:
    """The dimension ``index // stride % size``, of an index of a dimension.

    None if it needs a part of a factor that is none itself.
    """
    found: list[Factor] = []
    low = 1  # the distance of successive values of f
    for f in reversed(factors):
        high = low * f.size
        start, end = max(low, stride), min(high, stride * size)
        if start < end:
            if start % low or end % start or high % end:
                return None
            found.append(Factor(f.dim, f.stride * (start // low), end // start))
        low = high
    result = joined(tuple(found[::-1]))
    return result if size_of(result) == size else None


@functools.lru_cache(KNOWN)
def reshaped(dims: tuple[Factors, ...], shape: tuple[int, ...]) -> tuple[Factors, ...] | None:
    """The dimensions after a reshape; None if factors do not describe them."""
    flat = joined(*dims)
    found = [digits(flat, math.prod(shape[i + 1 :]), n) for i, n in enumerate(shape)]
    return None if None in found else tuple(dim for dim in found if dim is not None)


@functools.lru_cache(KNOWN)
def in_order(*parts: Factors) -> bool:
    """Whether the source, reshaped, has these dimensions: no element moves in memory."""
    factors = joined(*parts)
    return list(factors) == sorted(factors, key=_position)


def arrange(x: Any, factors: Sequence[Factor], shape: Sequence[int]) -> Any:
    """An array of a shape that runs over these factors, which are all that x has."""
    own = sorted(factors, key=_position)
    if list(factors) != own:
        x = lax.reshape(x, [f.size for f in own])
        x = lax.transpose(x, [own.index(f) for f in factors])
    return x if x.shape == tuple(shape) else lax.reshape(x, tuple(shape))


def _position(factor: Factor) -> tuple[int, int]:
    return factor.dim, -factor.stride
