"""The data of collectives, their one right result, and the number of wrong elements."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_intranode._src.command_line.bench.collectives.operations import Operation


def random_shard(rank: int, size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns one rank's data. Every rank can compute the data of all ranks.

    Args:
        rank: the rank.
        size: bytes of the data.
        dtype: a floating or integer dtype.
    """
    generator = np.random.default_rng((rank, size))
    count = size // dtype.itemsize
    if jnp.issubdtype(dtype, jnp.integer):
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    accumulator = _accumulator(dtype)
    return (generator.random(count, dtype=accumulator) * 2 - 1).astype(dtype)


def _accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which sums of this dtype are accumulated."""
    if jnp.issubdtype(dtype, jnp.integer) or dtype == np.float64:
        return dtype
    return np.dtype(np.float32)


def expected_sum(shards: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Computes the bits that a psum must return.

    The sum starts from rank 0's value, adds the others in rank order, and is rounded once.

    Args:
        shards: the data of each rank, in rank order.

    Returns:
        The result, and the sum of the absolute values. The error bound of a sum in another order is
        proportional to the latter.
    """
    iterator = iter(shards)
    first = next(iterator)
    total = first.astype(_accumulator(first.dtype))
    magnitude = np.abs(first.astype(np.float64))
    for shard in iterator:
        total = total + shard.astype(total.dtype)
        magnitude += np.abs(shard.astype(np.float64))
    return total.astype(first.dtype), magnitude


def expected_result(
    operation: Operation, n: int, size: int, dtype: np.dtype[Any]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Computes the right result of an operation on `random_shard`, and lax's tolerance.

    Args:
        operation: the operation.
        n: the number of ranks.
        size: bytes of a rank's operand.
        dtype: its dtype.

    Returns:
        The result of each rank; with `result_is_part` and `exchanges` a rank has its part of it.
        And how far each element of lax's result may be off, or None if lax's bits must be the same.
    """
    shards = (random_shard(rank, size, dtype) for rank in range(n))
    if operation.exchanges:
        return np.stack([shard.reshape(n, -1) for shard in shards], axis=1).reshape(-1), None
    if not operation.sums:
        return np.concatenate(list(shards)), None
    total, magnitude = expected_sum(shards)
    if jnp.issubdtype(dtype, jnp.integer):
        return total, None
    # lax may add in any order and round after each addition.
    tolerance = n * float(jnp.finfo(dtype).eps) * magnitude
    if operation.is_mean:
        # XLA does the division, and may multiply by 1/n instead.
        total = np.asarray(jax.jit(lambda x: x / n)(total))
        tolerance *= (n + 1) / n**2
    return total, tolerance


def exact_result(
    operation: Operation, n: int, size: int, dtype: np.dtype[Any]
) -> np.ndarray | None:
    """Computes the result in float64, without rounding; None where nothing is rounded."""
    if not operation.sums or jnp.issubdtype(dtype, jnp.integer):
        return None
    shards = [random_shard(rank, size, dtype).astype(np.float64) for rank in range(n)]
    total = np.sum(shards, axis=0)
    return total / n if operation.is_mean else total


def error_on_devices(
    result: jax.Array, operation: Operation, exact: np.ndarray | None
) -> float | None:
    """Returns the largest error of this process's devices; None if `exact` is None.

    The error is the root mean square of the difference, relative to that of the exact result.
    """
    if exact is None:
        return None
    errors = []
    for shard in result.addressable_shards:
        got = np.asarray(shard.data).astype(np.float64)
        part = exact[part_of(operation, (shard.index[0].start or 0) // len(got), len(got))]
        errors.append(math.sqrt(np.sum((got - part) ** 2) / np.sum(part**2)))
    return float(np.max(errors))  # NaN if one of them is


def count_wrong(got: np.ndarray, expected: np.ndarray, tolerance: np.ndarray | None) -> int:
    """Counts the wrong elements of one device's result.

    Args:
        got: the result.
        expected: the right result.
        tolerance: how far each element may be off; None to compare bits, with NaN equal to NaN.
    """
    if tolerance is None:
        bits = f"u{got.dtype.itemsize}"
        both_nan = np.isnan(got) & np.isnan(expected)
        right = (got.view(bits) == expected.view(bits)) | both_nan
    else:
        off = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        right = off <= tolerance  # False for NaN.
    return int(np.count_nonzero(~right))


def count_wrong_on_devices(
    result: jax.Array, operation: Operation, expected: np.ndarray, tolerance: np.ndarray | None
) -> int:
    """Counts the wrong elements in the results of all devices of this process."""
    wrong = 0
    for shard in result.addressable_shards:
        got = np.asarray(shard.data)
        part = part_of(operation, (shard.index[0].start or 0) // len(got), len(got))
        allowed = None if tolerance is None else tolerance[part]
        wrong += count_wrong(got, expected[part], allowed)
    return wrong


def part_of(operation: Operation, rank: int, count: int) -> slice:
    """Returns the part of the expected result that a rank's result of `count` elements has."""
    has_part = operation.result_is_part or operation.exchanges
    return slice(rank * count, (rank + 1) * count) if has_part else slice(None)
