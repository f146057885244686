"""The data of what is measured, right results, and the number of wrong elements.

Collectives have one right result, which NumPy computes. Collective matmuls have none: our whole
result is compared with lax's on the devices, which is fast, and some rows and columns of both are
compared with float64 on the host, which would take too long for all of them.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jax_intranode
from jax_intranode._src.command_line.bench import timing
from jax_intranode._src.command_line.bench.operations import Matmul, Operation, Result, Shape
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.operations import accumulator

# Collectives.


def random_shard(rank: int, size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns one rank's data. Every rank can compute the data of all ranks."""
    generator = np.random.default_rng((rank, size))
    count = size // dtype.itemsize
    if jnp.issubdtype(dtype, jnp.integer):
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    return (generator.random(count, dtype=accumulator(dtype)) * 2 - 1).astype(dtype)


def count_wrong(got: np.ndarray, expected: np.ndarray, tolerance: np.ndarray | None) -> int:
    """Counts the wrong elements of one device's result.

    Args:
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


def fields(
    label: str, ours: tuple[int, float | None], lax: tuple[int, float | None]
) -> dict[str, Any]:
    """Returns the fields of a row on wrong elements and errors, over all ranks.

    Args:
        ours: the wrong elements and the largest error of our results on this process's devices.
        lax: those of the results of `jax.lax`.
    """
    row: dict[str, Any] = {}
    for name, (wrong, _) in (("wrong", ours), ("lax_wrong", lax)):
        row[name] = all_ranks.total(f"{label}/{name}", wrong)
    for name, (_, error) in (("error", ours), ("lax_error", lax)):
        largest = all_ranks.largest(f"{label}/{name}", math.nan if error is None else error)
        row[name] = largest if math.isfinite(largest) else None
    return row


class Collective:
    """The right result of a collective on `random_shard`.

    Attributes:
        operation: the operation.
        expected: the result of each rank.
        tolerance: how far each element of lax's result on each rank may be off, or None if lax's
            bits must be the same.
    """

    def __init__(self, operation: Operation, n: int, size: int, dtype: np.dtype[Any]) -> None:
        """Computes the result.

        Args:
            size: bytes of a rank's operand.
        """
        self.operation, self._n, self._size, self._dtype = operation, n, size, dtype
        self._rounds = operation.sums and not jnp.issubdtype(dtype, jnp.integer)
        self.expected = self._results(lambda x: x)
        self.tolerance: list[np.ndarray] | None = None
        if self._rounds:
            # lax may add in any order and round after each addition. XLA divides, and may multiply
            # by 1/n instead.
            roundings = (n + 1) / n if operation.is_mean else n
            eps = roundings * float(jnp.finfo(dtype).eps)
            self.tolerance = each(
                lambda x: eps * x, self._results(lambda x: np.abs(x.astype(np.float64)))
            )
            if operation.is_mean:
                divide = jax.jit(lambda x: x / n)
                self.expected = each(lambda x: np.asarray(divide(x)), self.expected)

    def shard(self, rank: int) -> np.ndarray:
        return random_shard(rank, self._size, self._dtype)

    def own_shards(self, mesh: Mesh) -> dict[int, np.ndarray]:
        """Returns the operands of this process's ranks."""
        own = jax.process_index()
        devices = enumerate(mesh.devices.flat)
        return {rank: self.shard(rank) for rank, device in devices if device.process_index == own}

    def _results(self, of_shard: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
        """The result of each rank from a function of the shards."""
        arrays: Iterable[np.ndarray] = (of_shard(self.shard(rank)) for rank in range(self._n))
        for step in self.operation.steps:
            assert step.expected is not None  # all collectives have one
            arrays = step.expected(arrays, self._n)
        return list(arrays)

    @functools.cached_property
    def exact(self) -> list[np.ndarray] | None:
        """The results in float64, without rounding; None where nothing is rounded."""
        if not self._rounds:
            return None
        total = self._results(lambda x: x.astype(np.float64))
        return each(lambda x: x / self._n, total) if self.operation.is_mean else total

    def compare(
        self, result: jax.Array, tolerance: list[np.ndarray] | None
    ) -> tuple[int, float | None]:
        """Compares the results of this process's devices.

        Returns:
            The number of wrong elements; and the largest error, the root mean square of the
            difference relative to that of the exact result, or None where nothing is rounded.
        """
        wrong, errors = 0, []
        for shard in result.addressable_shards:
            got = np.asarray(shard.data)
            rank = (shard.index[0].start or 0) // len(got)
            allowed = None if tolerance is None else tolerance[rank]
            wrong += count_wrong(got, self.expected[rank], allowed)
            if self.exact is not None:
                exact = self.exact[rank]
                off = got.astype(np.float64) - exact
                errors.append(math.sqrt(np.sum(off**2) / np.sum(exact**2)))
        return wrong, float(np.max(errors)) if errors else None  # NaN if one of them is


def each(of: Callable[[np.ndarray], np.ndarray], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """A function of each array; ranks that share an array share its result."""
    found: dict[int, np.ndarray] = {}
    return [found.setdefault(id(x), of(x)) if id(x) not in found else found[id(x)] for x in arrays]


# Collective matmuls.

# The sample has this many rows and columns of each device's result.
_SAMPLE_ROWS = 8
_SAMPLE_COLUMNS = 32

# Two matrices [rows, inner] and [inner, columns].
Factors = tuple[Any, Any]


class Data(NamedTuple):
    """Operands. Each array has those of all devices, concatenated along the first dimension.

    Attributes:
        x: each device's x.
        w: each device's w.
        ct: the cotangent of each device's result.
        whole_x: the operand that each device multiplies by w.
        whole_ct: the cotangent of each device's product.
    """

    x: Any
    w: Any
    ct: Any
    whole_x: Any
    whole_ct: Any


def make(matmul: Matmul, shape: Shape, dtype: np.dtype[Any], mesh: Mesh) -> Data:
    """Returns random data on the devices, uniform between -1 and 1."""
    n = mesh.size
    shapes = (
        (shape.m // n if matmul.gathers else shape.m, shape.k),
        (shape.k, shape.n),
        (shape.m // n if matmul.forward.part else shape.m, shape.n),
    )

    def body(rank: jax.Array) -> Data:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(shape.k), rank[0]), len(shapes))
        x, w, ct = (
            jax.random.uniform(key, one, dtype, -1, 1)
            for key, one in zip(keys, shapes, strict=True)
        )
        return Data(x, w, ct, matmul.whole_x(x), matmul.whole_cotangent(ct))

    return timing.program(mesh, body)(
        timing.array(mesh, 1, lambda rank: np.full(1, rank, np.int32))
    )


def products(data: Data, backward: bool) -> list[Factors]:
    """Returns the two factors of each product that a device computes."""
    if backward:
        return [(data.whole_ct, data.w.T), (data.whole_x.T, data.whole_ct)]
    return [(data.whole_x, data.w)]


def tolerance(expected: Any, mean_square: Any, result: Result, n: int, dtype: Any) -> Any:
    """Returns how far each element may be off by rounding.

    The summands are as large as the result's root mean square, even where the sum is small. float32
    counts as TF32, because GPUs multiply it as such.

    Args:
        mean_square: the mean of their squares.
        result: the result that the elements belong to.
        dtype: the dtype to which the elements are rounded.
    """
    eps = max(float(jnp.finfo(dtype).eps), 2.0**-10)
    roundings = n if result.rounded else 1
    return roundings * eps * (jnp.abs(expected) + 2 * jnp.sqrt(mean_square))


def count_unlike(
    mesh: Mesh, got: Sequence[Any], expected: Sequence[Any], results: Sequence[Result]
) -> int:
    """Counts elements that differ by more than rounding, on this process's devices."""

    def body(got: Sequence[Any], expected: Sequence[Any]) -> jax.Array:
        count = jnp.zeros(1, jnp.int32)
        for ours, lax_s, result in zip(got, expected, results, strict=True):
            a, b = ours.astype(jnp.float32), lax_s.astype(jnp.float32)
            allowed = tolerance(b, jnp.mean(b * b), result, mesh.size, ours.dtype)
            count += jnp.sum(~(jnp.abs(a - b) <= allowed), dtype=jnp.int32)  # NaN counts
        return count

    return _sum_of_devices(timing.program(mesh, body)(list(got), list(expected)))


def count_wrong_gathered(mesh: Mesh, data: Data, matmul: Matmul) -> int:
    """Counts the wrong elements of a call that also returns the gathered x, which must be exact."""

    def body(x: Any, w: Any, whole: Any) -> tuple[Any, Any, jax.Array]:
        product, gathered = jax_intranode.all_gather_matmul(x, w, "x", return_gathered=True)
        bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        unlike = lax.bitcast_convert_type(gathered, bits) != lax.bitcast_convert_type(whole, bits)
        return product, whole @ w, jnp.sum(unlike, dtype=jnp.int32)[None]

    product, expected, unlike = timing.program(mesh, body)(data.x, data.w, data.whole_x)
    return _sum_of_devices(unlike) + count_unlike(mesh, [product], [expected], [matmul.forward])


def compare_sample(
    mesh: Mesh, matmul: Matmul, backward: bool, data: Data, got: Sequence[Any]
) -> tuple[int, float]:
    """Compares some elements of each result with float64, on this process's devices.

    Args:
        backward: whether the results are those of the backward pass.

    Returns:
        The number of wrong elements in the sample; and the largest error of all results and
        devices: root mean square, relative to that of the exact elements.
    """
    n, results = mesh.size, matmul.results(backward)

    def body(data: Data, got: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
        wrong, errors = [], []
        for result, (a, b), one in zip(results, products(data, backward), got, strict=True):
            rows, columns = _indices(*one.shape)
            parts = n if result.part else 1
            of_parts = np.concatenate([rows + part * one.shape[0] for part in range(parts)])
            exact = a[of_parts].astype(jnp.float64) @ b[:, columns].astype(jnp.float64)
            if result.summed:
                exact = lax.psum(exact, "x")
            if result.part:
                exact = jnp.stack(jnp.split(exact, n))[lax.axis_index("x")]
            off = jnp.abs(one[rows][:, columns].astype(jnp.float64) - exact)
            mean_square = jnp.mean(exact**2)
            allowed = tolerance(exact, mean_square, result, n, one.dtype)
            wrong.append(jnp.sum(~(off <= allowed), dtype=jnp.int32))
            errors.append(jnp.sqrt(jnp.mean(off**2) / mean_square))
        return jnp.stack(wrong), jnp.stack(errors)

    with jax.enable_x64(True):
        wrong, errors = timing.program(mesh, body)(data, list(got))
    return _sum_of_devices(wrong), float(np.max(_of_devices(errors)))  # NaN if one of them is


def _indices(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and columns of the sample of a device's result, the same on all ranks."""
    generator = np.random.default_rng((rows, columns))
    of_sample = generator.permutation(rows)[:_SAMPLE_ROWS]
    return of_sample, generator.permutation(columns)[:_SAMPLE_COLUMNS]


def _sum_of_devices(counts: jax.Array) -> int:
    return int(np.sum(_of_devices(counts)))


def _of_devices(x: jax.Array) -> list[np.ndarray]:
    """Returns the shards of an array on this process's devices."""
    return [np.asarray(shard.data) for shard in x.addressable_shards]
