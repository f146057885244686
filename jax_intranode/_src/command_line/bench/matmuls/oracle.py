"""The data of collective matmuls, and the number of wrong elements.

Our whole result is compared with lax's on the devices, which is fast. Some rows and columns of both
are compared with float64 on the host, which would take too long for all of them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_intranode
from jax_intranode._src.command_line.bench import timing
from jax_intranode._src.command_line.bench.matmuls.operations import Matmul, Result
from jax_intranode._src.command_line.bench.settings import Shape

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
        (matmul.x_rows(shape, n), shape.k),
        (shape.k, shape.n),
        (matmul.result_rows(shape, n), shape.n),
    )

    def body(rank: jax.Array) -> Data:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(shape.k), rank[0]), len(shapes))
        x, w, ct = (
            jax.random.uniform(key, one, dtype, -1, 1)
            for key, one in zip(keys, shapes, strict=True)
        )
        return Data(x, w, ct, matmul.whole_x(x), matmul.whole_cotangent(ct))

    sharding = NamedSharding(mesh, PartitionSpec("x"))
    ranks = jax.make_array_from_callback(
        (n,), sharding, lambda index: np.arange(n, dtype=np.int32)[index]
    )
    return timing.program(mesh, body)(ranks)


def products(data: Data, backward: bool) -> list[Factors]:
    """Returns the two factors of each product that a device computes."""
    if backward:
        return [(data.whole_ct, data.w.T), (data.whole_x.T, data.whole_ct)]
    return [(data.whole_x, data.w)]


def tolerance(xp: Any, expected: Any, mean_square: Any, result: Result, n: int, dtype: Any) -> Any:
    """Returns how far each element may be off by rounding.

    The summands are as large as the result's root mean square, even where the sum is small. float32
    counts as TF32, because GPUs multiply it as such.

    Args:
        xp: numpy or jax.numpy.
        expected: the elements.
        mean_square: the mean of their squares.
        result: the result that the elements belong to.
        n: the number of devices.
        dtype: the dtype to which the elements are rounded.
    """
    eps = max(float(jnp.finfo(dtype).eps), 2.0**-10)
    roundings = n if result.rounded else 1
    return roundings * eps * (xp.abs(expected) + 2 * xp.sqrt(mean_square))


def count_unlike(
    mesh: Mesh, got: Sequence[Any], expected: Sequence[Any], results: Sequence[Result]
) -> int:
    """Counts elements that differ by more than rounding, on this process's devices."""

    def body(got: Sequence[Any], expected: Sequence[Any]) -> jax.Array:
        count = jnp.zeros(1, jnp.int32)
        for ours, lax_s, result in zip(got, expected, results, strict=True):
            a, b = ours.astype(jnp.float32), lax_s.astype(jnp.float32)
            allowed = tolerance(jnp, b, jnp.mean(b * b), result, mesh.size, ours.dtype)
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


def _sum_of_devices(counts: jax.Array) -> int:
    return sum(int(count) for count in _by_rank(counts).values())


class Sample:
    """Some elements of each result in float64."""

    def __init__(self, mesh: Mesh, matmul: Matmul, backward: bool, data: Data):
        """Computes the elements.

        Args:
            mesh: a mesh with one axis "x".
            matmul: the operation.
            backward: whether the results are those of the backward pass.
            data: the operands.
        """
        self._mesh = mesh
        self._results = matmul.results(backward)
        n = mesh.size

        def pick(data: Data) -> list[Factors]:
            picked = []
            for result, (a, b) in zip(self._results, products(data, backward), strict=True):
                rows, columns = _indices(a.shape[0], b.shape[1], result, n)
                factors = a[rows], b[:, columns]
                if result.summed:
                    factors = lax.all_gather(factors, "x")
                picked.append(jax.tree.map(lambda v: v[None], factors))
            return picked

        # For each result, the exact elements by rank.
        self._exact: list[dict[int, np.ndarray]] = []
        picked = timing.program(mesh, pick)(data)
        for result, (a, b) in zip(self._results, picked, strict=True):
            right, exact = _by_rank(b), {}
            for rank, left in _by_rank(a).items():
                product = left.astype(np.float64) @ right[rank].astype(np.float64)
                total = product.sum(0) if result.summed else product
                exact[rank] = np.split(total, n)[rank] if result.part else total
            self._exact.append(exact)

    def compare(self, got: Sequence[Any]) -> tuple[int, float]:
        """Compares results on this process's devices.

        Returns:
            The number of wrong elements in the sample; and the largest error of all results and
            devices: root mean square, relative to that of the exact elements.
        """
        n = self._mesh.size

        def pick(got: Sequence[Any]) -> list[Any]:
            picked = []
            for result, one in zip(self._results, got, strict=True):
                parts = n if result.part else 1
                rows, columns = _indices(parts * one.shape[0], one.shape[1], result, n)
                # All parts have the rows of the first part.
                picked.append(one[rows[: len(rows) // parts]][:, columns][None])
            return picked

        wrong, errors = 0, []
        picked = timing.program(self._mesh, pick)(list(got))
        for result, sampled, exact in zip(self._results, picked, self._exact, strict=True):
            for rank, values in _by_rank(sampled).items():
                off = np.abs(values.astype(np.float64) - exact[rank])
                mean_square = np.mean(exact[rank] ** 2)
                allowed = tolerance(np, exact[rank], mean_square, result, n, values.dtype)
                wrong += int(np.count_nonzero(~(off <= allowed)))
                errors.append(math.sqrt(np.mean(off**2) / mean_square))
        return wrong, float(np.max(errors))  # NaN if one of them is


def _indices(rows: int, columns: int, result: Result, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and columns of the sample, the same on all ranks and in each part."""
    generator = np.random.default_rng((rows, columns))
    parts = n if result.part else 1
    rows_of_part = generator.permutation(rows // parts)[:_SAMPLE_ROWS]
    chosen = np.concatenate([part * (rows // parts) + rows_of_part for part in range(parts)])
    return chosen, generator.permutation(columns)[:_SAMPLE_COLUMNS]


def _by_rank(x: jax.Array) -> dict[int, np.ndarray]:
    """Returns the shards of an array [n, ...] on this process's devices, by rank."""
    return {shard.index[0].start or 0: np.asarray(shard.data)[0] for shard in x.addressable_shards}
