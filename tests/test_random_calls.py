"""Random calls of the collectives, compared bit by bit with NumPy.

Shapes, dtypes, groups, orders of devices and values are random. Sums run in rank order, in float32
for the small types, and are rounded once.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from cases import OPERATIONS, forced, make_mesh, x64
from devices import need_devices
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.command_line.soak.calls import Call, groups, random_call
from jax_intranode._src.ops import counts

# The shapes of meshes. A call communicates over one axis, or over all in either order.
MESHES = [(2,), (3,), (8,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]
MOST = dict.fromkeys(OPERATIONS, 6300)


class Drawn:
    """Chooses by hypothesis."""

    def __init__(self, draw: st.DrawFn):
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def one_of(self, values: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(values))


@st.composite
def calls(draw: st.DrawFn) -> tuple[Mesh, Call, str, int]:
    """A mesh, a call, an algorithm of psum, and a seed of values."""
    choose = Drawn(draw)
    shape = choose.one_of(MESHES)
    order = range(math.prod(shape))
    # Devices in an order of their own, which decides what the ranks are.
    order = choose.one_of([[*order], [*order][::-1], [*order][1::2] + [*order][::2]])
    mesh = make_mesh(shape, ("x", "y", "z")[: len(shape)], order)
    call = random_call(choose, mesh, MOST, empty=True)
    algorithm = choose.one_of(("one_shot", "two_shot")) if call.operation == "psum" else "auto"
    return mesh, call, algorithm, choose.integer(0, 2**32 - 1)


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


def run(mesh: Mesh, call: Call, algorithm: str, seed: int) -> bool:
    """Checks a call. Returns whether our kernels ran it."""
    spec = P(mesh.axis_names)
    f = jax.shard_map(
        lambda x: call.apply(jax_intranode, x[0])[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    with x64("float64" if call.dtype == "complex128" else call.dtype), forced(algorithm):
        x = values((mesh.size, *call.shape), np.dtype(call.dtype), seed)
        before = counts.take(reset=False)[0].total()
        got = np.asarray(jax.jit(f)(x))
        ours = counts.take(reset=False)[0].total() > before
    assert got.dtype == x.dtype
    if not ours and call.operation.startswith("psum"):
        return False  # lax adds in an order of its own
    for group in groups(mesh, call.axes):
        for rank, place in enumerate(group):
            want = call.expected(x[group], rank)
            assert got[place].shape == want.shape
            assert got[place].tobytes() == want.tobytes(), f"{call} differs at {place} of {group}"
    return ours


@pytest.mark.parametrize("examples", [30, pytest.param(200, marks=pytest.mark.full)])
def test_random_calls(examples: int) -> None:
    need_devices(8)
    ran: Counter[str] = Counter()

    def check(drawn: tuple[Mesh, Call, str, int]) -> None:
        ran[drawn[1].operation] += run(*drawn)

    settings = hypothesis.settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    settings(hypothesis.given(calls())(check))()
    # Small arrays of some groups fall back.
    assert all(ran[name] for name in OPERATIONS), ran
