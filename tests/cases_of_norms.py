"""Cases of psum_residual_rms_norm and its relatives, in either process mode.

Results must have the bits of norm_oracle.py on every rank. The contract has their gradients.
"""

from typing import Any

import cases
import jax
import norm_oracle
import numpy as np
from cases import case, check, compiled_of_ours, everywhere, forced, line, put, sharded
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_intranode

NORMS = ("rms_norm", "layer_norm")
EPS = 1e-5


def function(norm: str, scatters: bool = False) -> Any:
    return getattr(jax_intranode, f"{'psum_scatter' if scatters else 'psum'}_residual_{norm}")


def normal(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(
    dtype: str, world: int, shape: tuple[int, ...], bias: bool, parameters: str = ""
) -> list[np.ndarray]:
    """The ranks' x, the residual, the weight and perhaps the bias."""
    shapes = [(world, *shape), shape, shape[-1:], *[shape[-1:]] * bias]
    dtypes = [dtype, dtype, *[parameters or dtype] * 2]
    return [normal(d, s, k) for k, (d, s) in enumerate(zip(dtypes, shapes, strict=False))]


def run(mesh: Mesh, norm: str, arrays: list[np.ndarray], **options: Any) -> list[jax.Array]:
    """The results of all ranks of a psum: rank r brings row r of the first array."""

    def body(x: Any, residual: Any, weight: Any, *bias: Any) -> Any:
        results = function(norm)(
            x[0], residual, weight, "x", eps=EPS, bias=bias[0] if bias else None, **options
        )
        return [v[None] for v in results]

    f = sharded(body, mesh, (P("x"), *[P()] * (len(arrays) - 1)), P("x"))
    placed = [put(mesh, P() if k else P("x"), v) for k, v in enumerate(arrays)]
    return list(compiled_of_ours(f, *placed)(*placed))


def expected(norm: str, arrays: list[np.ndarray], **options: Any) -> list[np.ndarray]:
    x, residual, weight, *bias = arrays
    results = norm_oracle.residual_norm(
        list(x), residual, weight, norm=norm, eps=EPS, bias=bias[0] if bias else None, **options
    )
    return [everywhere(v, len(x)) for v in results]


def check_bits(mesh: Mesh, norm: str, arrays: list[np.ndarray], **options: Any) -> None:
    results = run(mesh, norm, arrays, **options)
    for result, want in zip(results, expected(norm, arrays, **options), strict=True):
        check(result, want)


# Bits.


@case(dtype=cases.FLOATS, algorithm=("one_shot", "two_shot"), norm=NORMS)
def norms_of_every_dtype_and_length(dtype: str, algorithm: str, norm: str) -> None:
    mesh = line()
    with forced(algorithm):
        for rows, hidden, bias, parameters in (
            (1, 1, False, ""),
            (3, 13, True, ""),
            (5, 64, False, "float32"),
            (2, 1000, True, "float32"),
        ):
            arrays = operands(dtype, mesh.size, (rows, hidden), bias, parameters)
            check_bits(mesh, norm, arrays, weight_offset=float(rows == 5))


@case(dtype=cases.FLOATS, hidden=(4096, 8200, 16384), algorithm=("one_shot", "two_shot"))
def norms_of_long_rows(dtype: str, hidden: int, algorithm: str) -> None:
    """Rows of which a thread has several packs; a group of 8 CPU devices has no room for them."""
    mesh = line(min(len(jax.devices()), 2))
    if not cases.takes_part(mesh):
        return
    with forced(algorithm):
        check_bits(mesh, "rms_norm", operands(dtype, mesh.size, (3, hidden), False))


@case(world=(2, 3, 4, 5, 6, 7, 8), algorithm=("one_shot", "two_shot"))
def norms_of_every_world_size(world: int, algorithm: str) -> None:
    mesh = line(world)
    if not cases.takes_part(mesh):
        return
    with forced(algorithm):
        for rows in (1, world + 1, 20):
            check_bits(mesh, "rms_norm", operands("bfloat16", world, (rows, 40), False))


@case(dtype=cases.FLOATS)
def norms_of_unusual_values(dtype: str) -> None:
    """NaNs of any pattern, infinities, zeros of both signs, subnormals, huge and tiny rows."""
    mesh = line()
    kind = np.dtype(dtype)
    unsigned = np.dtype(f"u{kind.itemsize}")
    hidden = 4096 // kind.itemsize
    # Random patterns, then those of which words of packets are made.
    generator = np.random.default_rng(5)
    x = generator.integers(0, 1 << (8 * kind.itemsize), (mesh.size, 7, hidden), unsigned)
    x[:, 1] = np.iinfo(unsigned).max
    x = x.view(kind)
    finfo = np.dtype(dtype).type
    tiny = np.nextafter(finfo(0), finfo(1))
    for row, value in ((2, 0.0), (3, -0.0), (4, tiny), (5, 1e4), (6, -tiny)):
        x[:, row] = value
    residual = np.zeros((7, hidden), kind)
    residual[3] = -0.0
    weight = normal(dtype, (hidden,), 2)
    for norm in NORMS:
        for algorithm in ("one_shot", "two_shot"):
            with forced(algorithm):
                check_bits(mesh, norm, [x, residual, weight])


@case(dtype=("bfloat16", "float32"))
def norms_of_batches(dtype: str) -> None:
    """A row has the same bits alone, among others, and in several operations of one call."""
    mesh = line()
    # More rows than fit an epoch buffer of CPU devices.
    rows, hidden = 500, 1024
    arrays = operands(dtype, mesh.size, (rows, hidden), True)
    x, residual, *parameters = arrays
    results = run(mesh, "rms_norm", arrays)
    check_bits(mesh, "rms_norm", arrays)
    for row in (0, 333, rows - 1):
        alone = run(mesh, "rms_norm", [x[:, row : row + 1], residual[row : row + 1], *parameters])
        for whole, one in zip(results, alone, strict=True):
            for p, q in zip(whole.addressable_shards, one.addressable_shards, strict=True):
                a, b = np.asarray(p.data)[0, row], np.asarray(q.data)[0, 0]
                assert (cases.bits(a) == cases.bits(b)).all()


@case(dtype=cases.FLOATS, norm=NORMS)
def norms_of_parts(dtype: str, norm: str) -> None:
    """reduce_scatter gives each rank its rows of what psum gives, on either dimension."""
    mesh = line()
    n = mesh.size
    for shape, dimension in (((2 * n, 24), 0), ((3, n, 13), 1)):
        arrays = operands(dtype, n, shape, True)
        specs = [P("x"), P(*[None] * dimension, "x"), P(), P()]

        def body(x: Any, *others: Any, dimension: int = dimension) -> Any:
            residual, weight, bias = others
            return function(norm, scatters=True)(
                x[0], residual, weight, "x", eps=EPS, bias=bias, scatter_dimension=dimension
            )

        f = sharded(body, mesh, tuple(specs), specs[1])
        placed = [put(mesh, spec, v) for spec, v in zip(specs, arrays, strict=True)]
        results = compiled_of_ours(f, *placed)(*placed)
        for result, want in zip(results, expected(norm, arrays), strict=True):
            check(result, want[0])
