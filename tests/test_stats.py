"""stats: what it counts, and that it can begin anew. The line that each mesh logs."""

import logging

import jax
import jax.numpy as jnp
import pytest
from devices import need_devices
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_intranode


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    """Two devices, with all counts at zero."""
    need_devices(2)
    jax_intranode.stats(reset=True)
    devices = jax.devices()[:2]
    return jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=devices)


def test_operations_and_bytes(mesh: jax.sharding.Mesh) -> None:
    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=(P(), P(), P("model")))
    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        scattered = jax_intranode.psum_scatter(x[:128], "model", tiled=True)
        return jax_intranode.psum(x, "model"), jax_intranode.psum(x[:64], "model"), scattered

    x = jnp.arange(512, dtype=jnp.float32)
    jax.block_until_ready(f(x))
    first = jax_intranode.stats()
    assert first.operations == 2 * 3
    assert first.lowered == (
        jax_intranode.Lowered("psum", "one_shot", 2, 1280),
        jax_intranode.Lowered("psum_scatter", "reduce_scatter", 1, 512),
    )
    assert (first.fallbacks, first.waits) == ((), ())

    jax.block_until_ready(f(x))  # runs, and is not lowered again
    again = jax_intranode.stats(reset=True)
    assert (again.operations, again.lowered) == (12, first.lowered)
    assert jax_intranode.stats() == jax_intranode.Stats(0)
    jax.block_until_ready(f(x))
    third = jax_intranode.stats()
    assert (third.operations, third.lowered) == (6, ())
    if jax.devices()[0].platform == "cpu":  # XLA replays nothing there
        assert third.handler_calls == 6


def test_fallbacks(mesh: jax.sharding.Mesh) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax_intranode.psum(x.astype(jnp.complex64), "model")

    def g(x: jax.Array) -> jax.Array:
        return jax_intranode.psum(x, "model", axis_index_groups=[[0, 1]])

    x = jnp.ones(2**23 if jax.devices()[0].platform == "gpu" else 2**15)
    for function in (f, f, g, lambda x: jax_intranode.psum(x, "model")):
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=P("model"), out_specs=P(), check_vma=False
        )
        jax.jit(mapped).lower(x)
    found = {(row.reason.split(";")[0], row.count) for row in jax_intranode.stats().fallbacks}
    size = x.nbytes // 2
    assert found >= {("dtype complex64", 2), ("axis_index_groups", 1)}
    assert (f"{size} bytes of float32", 1) in found
    assert "dtype complex64" in str(jax_intranode.stats())


def test_a_mesh_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    need_devices(2)
    jax.clear_caches()
    jax_intranode.shutdown()
    devices = jax.devices()[:2]
    with caplog.at_level(logging.INFO, logger="jax_intranode"):
        for _ in range(2):
            jax_intranode.initialize(jax.sharding.Mesh(devices, ("model",)))
    (line,) = [record for record in caplog.records if record.levelno == logging.INFO]
    assert line.message.startswith(f"Devices [0, 1] (2 x {devices[0].device_kind}, one process")
    assert "Among 2 ranks: psum one_shot up to " in line.message
    assert "matmuls are " in line.message
