"""Programs that are rewritten with a process per device, and ranks that do not agree."""

import time
from typing import Any

import jax
import numpy as np
import pytest
from devices import need_ranks
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import in_lowered

import jax_intranode
from jax_intranode._src.native import extension
from jax_intranode._src.rewrite import agreement


def _mesh() -> Mesh:
    return jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))


def _program(mesh: Mesh, factor: float = 1.0) -> Any:
    def body(v: Any) -> Any:
        return lax.psum(v * factor, "x")

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P()))


def _argument(mesh: Mesh, columns: int = 4) -> jax.Array:
    whole = np.arange(mesh.size * columns, dtype=np.float32).reshape(mesh.size, columns)
    sharding = NamedSharding(mesh, P("x"))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _ours(f: Any, x: jax.Array) -> bool:
    return "jax_intranode_psum" in in_lowered(f.lower(x).as_text())


def _check(f: Any, x: jax.Array) -> None:
    count = jax.device_count()
    whole = np.arange(x.size, dtype=np.float32).reshape(x.shape)
    for shard in f(x).addressable_shards:
        np.testing.assert_array_equal(shard.data, whole.sum(0, keepdims=True))
    assert count == len(whole)


# Functions of the ranks.


def all_ranks_rewrite() -> None:
    jax_intranode.install()
    mesh = _mesh()
    for columns in (4, 8):
        x = _argument(mesh, columns)
        before = jax_intranode.usage_counter()
        (call,) = jax_intranode.explain(_program(mesh))(x)
        assert (call.origin, call.algorithm != "lax") == ("jax.lax", True), call
        _check(_program(mesh), x)
        assert jax_intranode.usage_counter() == before + 1


def a_training_step_is_rewritten() -> None:
    """A sequence-parallel MLP in jax.lax, forward and backward, with and without an edit."""
    mesh = _mesh()
    gpu = jax.devices()[0].platform == "gpu"
    tokens, hidden, inner = (4096, 4096, 8192) if gpu else (64, 32, 64)
    dtype = jax.numpy.bfloat16 if gpu else np.float32
    specs = (P("x"), P(None, "x"), P("x", None))
    keys = jax.random.split(jax.random.key(0), 3)

    def made(key: Any, shape: tuple[int, int], spec: P) -> jax.Array:
        values = np.asarray(jax.random.normal(key, shape) / shape[0] ** 0.5).astype(dtype)
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh, spec), lambda index: values[index]
        )

    shapes = ((tokens, hidden), (hidden, inner), (inner, hidden))
    operands = [made(*of_one) for of_one in zip(keys, shapes, specs, strict=True)]

    def body(x: Any, w1: Any, w2: Any) -> Any:
        h = jax.nn.relu(lax.all_gather(x, "x", tiled=True) @ w1)
        y = lax.psum_scatter(h @ w2, "x", tiled=True)
        return lax.psum((y.astype(np.float32) ** 2).sum(), "x")

    loss = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
    step = jax.jit(jax.value_and_grad(lambda *operands: loss(*operands), argnums=(0, 1, 2)))
    expected = jax.tree.map(_local, step(*operands))
    with jax_intranode.accelerate():
        calls = jax_intranode.explain(step)(*operands)
        counts = []
        for _ in range(12):
            found = jax.tree.map(_local, step(*operands))
            counts.append(extension.handler_calls())
    taken = {call.operation for call in calls if call.algorithm != "lax"}
    print("calls:", *calls, sep="\n")
    if gpu:
        assert {"all_gather_matmul", "matmul_reduce_scatter"} <= taken, calls
        assert counts[-1] == counts[-4], f"handlers are still called: {counts}"
    else:
        assert taken, calls
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(mine / scale, theirs / scale, atol=2e-2 if gpu else 1e-5)


def _local(x: jax.Array) -> np.ndarray:
    return np.asarray(x.addressable_shards[0].data, np.float32)


def one_rank_lowers_alone(wait_s: float) -> None:
    """It costs rank 0 some seconds, and this program its acceleration; the next one has it."""
    jax_intranode.install()
    agreement.FIRST_WAIT_S = wait_s
    mesh = _mesh()
    x, other = _argument(mesh), _argument(mesh, 8)
    alone = _program(mesh)
    if jax.process_index() == 0:
        start = time.monotonic()
        assert not _ours(alone, x)
        assert wait_s <= time.monotonic() - start < wait_s + 5
    _barrier("lowered")
    _check(alone, x)  # by lax, on all ranks
    assert jax_intranode.usage_counter() == 0
    _check(_program(mesh), other)
    assert jax_intranode.usage_counter() == 1
    if jax.process_index() == 0:  # now that all ranks have met, nobody waits
        start = time.monotonic()
        assert _ours(_program(mesh), _argument(mesh, 16))
        assert time.monotonic() - start < agreement.LATER_WAIT_S
    _barrier("done")


def one_rank_has_nothing_installed(wait_s: float) -> None:
    if jax.process_index() == 0:
        jax_intranode.install()
    agreement.FIRST_WAIT_S = wait_s
    mesh = _mesh()
    start = time.monotonic()
    for columns in (4, 8):
        _check(_program(mesh), _argument(mesh, columns))
    assert time.monotonic() - start < wait_s + agreement.LATER_WAIT_S + 15
    assert jax_intranode.usage_counter() == 0
    _barrier("done")


def _barrier(name: str) -> None:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


# Tests.


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_all_ranks_rewrite(world: int, ranks: Any) -> None:
    need_ranks(world)
    ranks(all_ranks_rewrite, world)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_training_step_is_rewritten(world: int, ranks: Any) -> None:
    need_ranks(world)
    ranks(a_training_step_is_rewritten, world)


WAIT_S = 2


def test_a_lone_lowering_costs_ten_seconds_at_most() -> None:
    assert agreement.FIRST_WAIT_S <= 10


def test_one_rank_lowers_alone(ranks: Any) -> None:
    need_ranks(2)
    for log in ranks(one_rank_lowers_alone, 2, arguments=[WAIT_S]):
        assert f"within {WAIT_S} s" in log


def test_one_rank_has_nothing_installed(ranks: Any) -> None:
    need_ranks(2)
    log, _ = ranks(one_rank_has_nothing_installed, 2, arguments=[WAIT_S])
    assert f"process 1 has not lowered this program within {WAIT_S} s" in log
    assert "has not called jax_intranode.install()" in log
