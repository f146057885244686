"""The process that times JAX's Pallas kernel, in chains of calls as ours are timed."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_intranode._src.command_line.bench import matmuls, oracle, timing
from jax_intranode._src.command_line.bench.operations import MATMULS, Shape
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.all_ranks import Rank

LIBRARY = "pallas"


def measure(rank: Rank, **fields: Any) -> dict[str, Any]:
    """Makes the measurements, with the fastest of several tile sizes for each shape.

    Returns:
        "version", "rows" and "failed", as the other peers; or "refused", why nothing runs here.
    """
    settings = Settings(**fields)
    device = jax.devices()[0]
    if getattr(device, "compute_capability", "") != "9.0":
        return {"refused": f"its kernel is for Hopper GPUs, and this is {device.device_kind}"}
    try:
        kernel, configs = kernel_and_configs()
    except ImportError as error:
        return {"refused": f"JAX cannot import it: {error}"}
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for dtype_name, shape in settings.matmuls():
        rank.begin(f"{LIBRARY}, {dtype_name}, {shape}")
        row = measure_shape(rank.mesh(), settings, dtype_name, shape, kernel, configs)
        if row is None:
            failed.append(f"{LIBRARY}, {dtype_name}, {shape}: none of its tile sizes fits")
        else:
            rows.append(row)
    version = f"{LIBRARY} of jax {jax.__version__} (chains as ours)"
    return {"version": version, "rows": rows, "failed": failed}


def kernel_and_configs() -> tuple[Any, list[dict[str, Any]]]:
    """The kernel, and arguments with the tile sizes that JAX's own benchmark tries, one width."""
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as mgpu

    dimensions = list(mgpu.MatmulDimension)
    configs = [
        mgpu.TuningConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=64,
            max_concurrent_steps=4,
            grid_minor_dim=minor,
            grid_tile_width=8,
            wg_dimension=of_warpgroups,
        )
        for tile_m, tile_n, minor, of_warpgroups in itertools.product(
            (128, 256), (64, 128), dimensions, dimensions
        )
    ]
    return mgpu.all_gather_lhs_matmul, [{"config": config} for config in configs]


def measure_shape(
    mesh: Mesh,
    settings: Settings,
    dtype_name: str,
    shape: Shape,
    kernel: Any,
    configs: list[dict[str, Any]],
) -> dict[str, Any] | None:
    """Checks and times one shape; returns its row, or None if no configuration can run it."""
    matmul, dtype = MATMULS[settings.name], np.dtype(dtype_name)
    data = oracle.make(matmul, shape, dtype, mesh)

    def call_of(config: dict[str, Any]) -> matmuls.Call:
        function = partial(kernel, axis_name="x", dtype=dtype, **config)
        return matmuls.Call(lambda x, w: [function(x, w)], data.x, (data.w,))

    quick = dataclasses.replace(settings, iterations=3, warmup_iterations=1)
    seconds: list[tuple[float, int]] = []
    for i, config in enumerate(configs):
        try:
            run = matmuls.chain(mesh, call_of(config), 4, executions=1).run
            (times,), _ = timing.take_turns([run], mesh, quick)
        except (ValueError, NotImplementedError):
            continue  # tiles that do not divide the shape, or do not fit into shared memory
        seconds.append((float(np.median(times)), i))
    if not seconds:
        return None
    call = call_of(configs[min(seconds)[1]])
    wrong, _ = oracle.compare_sample(mesh, matmul, False, data, call.results(mesh))
    length = matmuls.chain_length(settings, dtype_name, shape)
    times_of, _ = timing.compare(
        {LIBRARY: matmuls.chain(mesh, call, length).run},
        mesh,
        settings,
        f"{LIBRARY}/{dtype_name}/{shape}",
        calls=matmuls.CHAINS * length,
        untimed=matmuls.repetitions_to_settle(settings, dtype_name, shape),
        overhead_s=matmuls.overhead_s(mesh, settings, call, length),
    )
    return {
        "library": LIBRARY,
        **shape._asdict(),
        "dtype": dtype_name,
        "time_us": times_of[LIBRARY].p50,
        "time_p99_us": times_of[LIBRARY].p99,
        "wrong": wrong,
    }
