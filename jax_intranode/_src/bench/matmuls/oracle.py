"""The data of collective matmuls, and the count of wrong elements.

The whole result is compared with lax's on the devices, which takes no time; both are compared with
float64 on the host, where there is time for a few rows and columns only.
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
from jax_intranode._src.bench import timing
from jax_intranode._src.bench.matmuls.operations import Matmul, Result
from jax_intranode._src.bench.settings import Shape

# Of what a device has of the result, in the sample.
_SAMPLE_ROWS = 8
_SAMPLE_COLUMNS = 32

# Two matrices [rows, inner] and [inner, columns].
Pair = tuple[Any, Any]


class Data(NamedTuple):
    """Arrays of all devices, one after another along the first dimension.

    Attributes:
        x: what each device has of x.
        w: its matrix.
        ct: the cotangent of its result.
        whole_x: what it multiplies with w.
        whole_ct: the cotangent of its product.
    """

    x: Any
    w: Any
    ct: Any
    whole_x: Any
    whole_ct: Any


def make(matmul: Matmul, shape: Shape, dtype: np.dtype[Any], mesh: Mesh) -> Data:
    """Makes random data on the devices, uniform from -1 to 1."""
    n = mesh.size
    shapes = (
        (matmul.x_rows(shape, n), shape.k),
        (shape.k, shape.n),
        (matmul.result_rows(shape, n), shape.n),
    )

    def body(rank: jax.Array) -> Data:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(shape.k), rank[0]), len(shapes))
        x, w, ct = (
            jax.random.uniform(key, of_one, dtype, -1, 1)
            for key, of_one in zip(keys, shapes, strict=True)
        )
        return Data(x, w, ct, matmul.whole_x(x), matmul.whole_cotangent(ct))

    sharding = NamedSharding(mesh, PartitionSpec("x"))
    ranks = jax.make_array_from_callback(
        (n,), sharding, lambda index: np.arange(n, dtype=np.int32)[index]
    )
    return timing.program(mesh, body)(ranks)


def products(data: Data, backward: bool) -> list[Pair]:
    """The two matrices of each product that a device computes."""
    if backward:
        return [(data.whole_ct, data.w.T), (data.whole_x.T, data.whole_ct)]
    return [(data.whole_x, data.w)]


def tolerance(xp: Any, expected: Any, mean_square: Any, result: Result, n: int, dtype: Any) -> Any:
    """How far each element may be off, so that no rounding is called wrong.

    What is added up is of the size of the result's root mean square, even where the sum is small.
    float32 counts as TF32, in which GPUs multiply it.

    Args:
        xp: numpy or jax.numpy.
        expected: the elements.
        mean_square: the mean of their squares.
        result: whose elements.
        n: the number of devices.
        dtype: the dtype to which they are rounded.
    """
    eps = max(float(jnp.finfo(dtype).eps), 2.0**-10)
    roundings = n if result.rounded else 1
    return roundings * eps * (xp.abs(expected) + 2 * xp.sqrt(mean_square))


def count_unlike(
    mesh: Mesh, got: Sequence[Any], expected: Sequence[Any], results: Sequence[Result]
) -> int:
    """Counts the elements that differ by more than roundings, over this process's devices."""

    def body(got: Sequence[Any], expected: Sequence[Any]) -> jax.Array:
        count = jnp.zeros(1, jnp.int32)
        for ours, lax_s, result in zip(got, expected, results, strict=True):
            a, b = ours.astype(jnp.float32), lax_s.astype(jnp.float32)
            allowed = tolerance(jnp, b, jnp.mean(b * b), result, mesh.size, ours.dtype)
            count += jnp.sum(~(jnp.abs(a - b) <= allowed), dtype=jnp.int32)  # NaN is unlike
        return count

    return _sum_of_devices(timing.program(mesh, body)(list(got), list(expected)))


def count_wrong_gathered(mesh: Mesh, data: Data, matmul: Matmul) -> int:
    """Counts what is wrong if the gathered x is asked for too: its bits, and the product."""

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
    """Some elements of each result, computed in float64."""

    def __init__(self, mesh: Mesh, matmul: Matmul, backward: bool, data: Data):
        """Computes the elements.

        Args:
            mesh: a mesh with one axis "x".
            matmul: the operation.
            backward: whether its derivatives are meant.
            data: the operands.
        """
        self._mesh = mesh
        self._results = matmul.results(backward)
        n = mesh.size

        def pick(data: Data) -> list[Pair]:
            picked = []
            for result, (a, b) in zip(self._results, products(data, backward), strict=True):
                rows, columns = _indices(a.shape[0], b.shape[1], result, n)
                factors = a[rows], b[:, columns]
                if result.summed:
                    factors = lax.all_gather(factors, "x")
                picked.append(jax.tree.map(lambda v: v[None], factors))
            return picked

        # Of each result, by the rank.
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
        """Compares results, on this process's devices.

        Returns:
            How many elements of the sample are wrong; and their error: root mean square, relative
            to that of the exact ones; of the worst result and device.
        """
        n = self._mesh.size

        def pick(got: Sequence[Any]) -> list[Any]:
            picked = []
            for result, of_one in zip(self._results, got, strict=True):
                parts = n if result.part else 1
                rows, columns = _indices(parts * of_one.shape[0], of_one.shape[1], result, n)
                # As in the first part.
                picked.append(of_one[rows[: len(rows) // parts]][:, columns][None])
            return picked

        wrong, errors = 0, []
        picked = timing.program(self._mesh, pick)(list(got))
        for result, of_result, exact in zip(self._results, picked, self._exact, strict=True):
            for rank, values in _by_rank(of_result).items():
                off = np.abs(values.astype(np.float64) - exact[rank])
                mean_square = np.mean(exact[rank] ** 2)
                allowed = tolerance(np, exact[rank], mean_square, result, n, values.dtype)
                wrong += int(np.count_nonzero(~(off <= allowed)))
                errors.append(math.sqrt(np.mean(off**2) / mean_square))
        return wrong, float(np.max(errors))  # NaN if one is


def _indices(rows: int, columns: int, result: Result, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns of the sample, alike on all ranks; of parts the same rows in each."""
    generator = np.random.default_rng((rows, columns))
    parts = n if result.part else 1
    of_part = generator.permutation(rows // parts)[:_SAMPLE_ROWS]
    chosen = np.concatenate([part * (rows // parts) + of_part for part in range(parts)])
    return chosen, generator.permutation(columns)[:_SAMPLE_COLUMNS]


def _by_rank(x: jax.Array) -> dict[int, np.ndarray]:
    """What this process's devices have of an array [n, ...], by their ranks."""
    return {shard.index[0].start or 0: np.asarray(shard.data)[0] for shard in x.addressable_shards}
