"""Random calls of the collectives, compared bit by bit with NumPy.

Shapes, dtypes, groups, orders of devices and values are random. Sums run in rank order, in float32
for the small types, and are rounded once.
"""

import math
from collections import Counter
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from cases import COPIED_DTYPES, DTYPES, forced, x64
from devices import need_devices
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.ops import counts

# The axes of a mesh, and those over which a call communicates.
MESHES = [
    ({"x": 2}, ("x",)),
    ({"x": 3}, ("x",)),
    ({"x": 8}, ("x",)),
    ({"x": 2, "y": 2}, ("x", "y")),
    ({"x": 2, "y": 2}, ("y", "x")),
    ({"x": 2, "y": 3}, ("x",)),
    ({"x": 3, "y": 2}, ("x",)),
    ({"x": 2, "y": 2, "z": 2}, ("x", "z")),
]
# Devices in an order of their own, which decides what the ranks are.
ORDERS = ["as they are", "reversed", "odd ones first"]


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    operation = draw(st.sampled_from(["psum", "psum_scatter", "all_gather", "all_to_all"]))
    axes, over = draw(st.sampled_from(MESHES))
    ranks = math.prod(axes[name] for name in over)
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    if draw(st.booleans()):  # more than a pack, or than a thread of a kernel handles
        shape = [draw(st.integers(1, 700)), *shape[:1]]
    dimension = 0
    tiled = draw(st.booleans())
    if operation == "psum_scatter":
        shape = shape or [1]
        dimension = draw(st.integers(0, len(shape) - 1))
        shape[dimension] = ranks * (draw(st.integers(1, 4)) if tiled else 1)
    if operation == "all_gather":
        tiled = tiled and bool(shape)
        dimension = draw(st.integers(0, len(shape) - (1 if tiled else 0)))
        if tiled:  # MLIR refuses to gather a dimension without elements
            shape[dimension] = max(1, shape[dimension])
    concat = 0
    if operation == "all_to_all":
        shape = shape or [1]
        dimension = draw(st.integers(0, len(shape) - 1))
        concat = draw(st.integers(0, len(shape) - 1))
        shape[dimension] = ranks * (draw(st.integers(1, 4)) if tiled else 1)
    return {
        "concat": concat,
        "operation": operation,
        "axes": axes,
        "over": over,
        "order": draw(st.sampled_from(ORDERS)),
        "shape": tuple(shape),
        "dtype": draw(st.sampled_from(COPIED_DTYPES if operation.startswith("all_") else DTYPES)),
        "dimension": dimension,
        "tiled": tiled,
        "algorithm": draw(st.sampled_from(["one_shot", "two_shot"])),  # of psum
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def values(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Any bits but those of infinities and NaNs, whose sums need not have the same bits."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    if dtype.kind == "b":
        raw &= 1
    array = raw.view(dtype).reshape(shape)
    if dtype.kind in "iub":
        return array
    with np.errstate(all="ignore"):
        keep = np.isfinite(array) & (random.random(shape) < 0.9)
    return np.where(keep, array, dtype.type(-0.0)).astype(dtype)


def sum_of(shards: list[np.ndarray]) -> np.ndarray:
    dtype = shards[0].dtype
    wide = np.float32 if dtype.name in ("bfloat16", "float16") else dtype
    with np.errstate(all="ignore"):
        total = shards[0].astype(wide)
        for shard in shards[1:]:
            total = total + shard.astype(wide)
        return total.astype(dtype)


def expected(call: dict[str, Any], shards: list[np.ndarray], rank: int) -> np.ndarray:
    dimension, tiled = call["dimension"], call["tiled"]
    if call["operation"] == "all_gather":
        return np.concatenate(shards, dimension) if tiled else np.stack(shards, dimension)
    if call["operation"] == "all_to_all":
        parts = [np.split(shard, len(shards), dimension)[rank] for shard in shards]
        if tiled:
            return np.concatenate(parts, call["concat"])
        return np.stack([part.squeeze(dimension) for part in parts], call["concat"])
    total = sum_of(shards)
    if call["operation"] == "psum":
        return total
    part = np.split(total, len(shards), dimension)[rank]
    return part if tiled else part.squeeze(dimension)


def run(call: dict[str, Any]) -> bool:
    """Checks a call. Returns whether our kernels ran it."""
    axes, over = call["axes"], call["over"]
    sizes = tuple(axes.values())
    count = math.prod(sizes)
    devices = jax.devices()[:count]
    if call["order"] == "reversed":
        devices = devices[::-1]
    elif call["order"] == "odd ones first":
        devices = devices[1::2] + devices[::2]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(sizes), tuple(axes))

    def collective(x: Any) -> Any:
        x = x.reshape(x.shape[len(sizes) :])
        if call["operation"] == "psum":
            y = jax_intranode.psum(x, over)
        elif call["operation"] == "psum_scatter":
            y = jax_intranode.psum_scatter(
                x, over, scatter_dimension=call["dimension"], tiled=call["tiled"]
            )
        elif call["operation"] == "all_to_all":
            dimensions = call["dimension"], call["concat"]
            y = jax_intranode.all_to_all(x, over, *dimensions, tiled=call["tiled"])
        else:
            y = jax_intranode.all_gather(x, over, axis=call["dimension"], tiled=call["tiled"])
        return y.reshape((1,) * len(sizes) + y.shape)

    with x64(call["dtype"] if call["dtype"] != "complex128" else "float64"):
        x = values((*sizes, *call["shape"]), np.dtype(jax.numpy.dtype(call["dtype"])), call["seed"])
        spec = P(*axes)
        f = jax.shard_map(collective, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        before = counts.take(reset=False)[0].total()
        with forced(call["algorithm"] if call["operation"] == "psum" else "auto"):
            got = np.asarray(jax.jit(f)(x))
        ours = counts.take(reset=False)[0].total() > before
    assert got.dtype == x.dtype
    # Ranks count in the order in which the axes are named.
    for place in np.ndindex(sizes):
        at = dict(zip(axes, place, strict=True))
        rank = int(np.ravel_multi_index([at[a] for a in over], [axes[a] for a in over]))
        shards = []
        for peer in np.ndindex(*[axes[a] for a in over]):
            of_peer = at | dict(zip(over, peer, strict=True))
            shards.append(x[tuple(of_peer[a] for a in axes)])
        want = np.ascontiguousarray(expected(call, shards, rank))
        mine = np.ascontiguousarray(got[place])
        assert mine.shape == want.shape
        assert mine.tobytes() == want.tobytes(), f"{call} differs on the rank at {at}"
    return ours


@pytest.mark.parametrize("examples", [12, pytest.param(200, marks=pytest.mark.full)])
def test_random_calls(examples: int) -> None:
    need_devices(8)
    ran: Counter[str] = Counter()

    def check(call: dict[str, Any]) -> None:
        ran[call["operation"]] += run(call)

    settings = hypothesis.settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    settings(hypothesis.given(calls())(check))()
    # Small arrays of some groups fall back.
    assert all(ran[name] for name in ("psum", "psum_scatter", "all_gather", "all_to_all")), ran
