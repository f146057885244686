"""The data, the one right result, and the count of wrong elements."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_intranode._src.bench.collectives.operations import Operation


def random_shard(rank: int, size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns the data of one rank, which every rank can compute without being sent them.

    Args:
        rank: the rank whose data to make.
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
    """Returns the dtype in which a sum of this dtype is accumulated."""
    if jnp.issubdtype(dtype, jnp.integer) or dtype == np.float64:
        return dtype
    return np.dtype(np.float32)


def expected_sum(shards: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Computes the one right result of a psum, bit for bit.

    The sum starts from rank 0's value, adds the others in rank order, and is rounded once.

    Args:
        shards: the data of each rank, in rank order.

    Returns:
        The result, and the sum of the absolute values, to which a bound on the error of other
        orders of adding is proportional.
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
    """Computes the right result of an operation on `random_shard`, and how far lax's may be off.

    Args:
        operation: the operation.
        n: the number of ranks.
        size: bytes of a rank's operand.
        dtype: its dtype.

    Returns:
        The result that a rank has, or (result_is_part) has its part of; and lax's tolerance for
        each element, or None if lax has no choice.
    """
    shards = (random_shard(rank, size, dtype) for rank in range(n))
    if not operation.sums:
        return np.concatenate(list(shards)), None
    total, magnitude = expected_sum(shards)
    if jnp.issubdtype(dtype, jnp.integer):
        return total, None
    # In any order, and rounded at each step.
    tolerance = n * float(jnp.finfo(dtype).eps) * magnitude
    if operation.is_mean:
        # The sum is ours, the division XLA's, which may multiply by 1/n.
        total = np.asarray(jax.jit(lambda x: x / n)(total))
        tolerance *= (n + 1) / n**2
    return total, tolerance


def exact_result(
    operation: Operation, n: int, size: int, dtype: np.dtype[Any]
) -> np.ndarray | None:
    """Computes the same result in float64, not rounded; None where nothing is rounded."""
    if not operation.sums or jnp.issubdtype(dtype, jnp.integer):
        return None
    shards = [random_shard(rank, size, dtype).astype(np.float64) for rank in range(n)]
    total = np.sum(shards, axis=0)
    return total / n if operation.is_mean else total


def error_on_devices(
    result: jax.Array, operation: Operation, exact: np.ndarray | None
) -> float | None:
    """Returns how far off the results of this process's devices are.

    Root mean square over the elements, relative to that of the exact ones; the worst device's.
    """
    if exact is None:
        return None
    errors = []
    for shard in result.addressable_shards:
        got = np.asarray(shard.data).astype(np.float64)
        part = exact[part_of(operation, (shard.index[0].start or 0) // len(got), len(got))]
        errors.append(math.sqrt(np.sum((got - part) ** 2) / np.sum(part**2)))
    return float(np.max(errors))  # NaN if one is


def count_wrong(got: np.ndarray, expected: np.ndarray, tolerance: np.ndarray | None) -> int:
    """Counts the wrong elements of one device's result.

    Args:
        got: the result.
        expected: what it should be.
        tolerance: how far each element may be off; None to compare bits, where NaN equals NaN.
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
    """Counts the wrong elements over this process's devices, each of which has its own result."""
    wrong = 0
    for shard in result.addressable_shards:
        got = np.asarray(shard.data)
        part = part_of(operation, (shard.index[0].start or 0) // len(got), len(got))
        of_part = None if tolerance is None else tolerance[part]
        wrong += count_wrong(got, expected[part], of_part)
    return wrong


def part_of(operation: Operation, rank: int, count: int) -> slice:
    """Returns where a rank's result of `count` elements lies in the expected one."""
    return slice(rank * count, (rank + 1) * count) if operation.result_is_part else slice(None)
