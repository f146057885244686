"""Times of our kernels alone, back to back in a CUDA graph."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jax_intranode._src.command_line.bench import oracle, timing
from jax_intranode._src.command_line.bench.operations import Operation
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.group import agreed
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.native import definitions, extension
from jax_intranode._src.selection import select

# The number of operations in one graph.
_CALLS = 50


def can_measure(
    settings: Settings, operation: Operation, selected: Sequence[select.Selection]
) -> bool:
    """Returns whether the operation is a sequence of our kernels on one array."""
    return (
        settings.platform == "gpu"
        and settings.leaves == 1
        and not operation.is_mean
        and all(chosen.algorithm != "lax" for chosen in selected)
    )


def measure(
    settings: Settings,
    right: oracle.Collective,
    mesh: Mesh,
    selected: Sequence[select.Selection],
    shards: dict[int, np.ndarray],
    label: str,
) -> tuple[timing.Times, int]:
    """Measures and checks an operation on all ranks together.

    Args:
        selected: the selection for each step of the operation.
        shards: the operand of each device of this process, by the device's position in the mesh.

    Returns:
        The slowest rank's times, summed over the steps, and the number of wrong elements on all
        ranks.
    """
    times = timing.Times(0, 0)
    data = shards
    for step, chosen in enumerate(selected):
        # A kernel's wait for its peers has a time limit, which must not include their compilation.
        all_ranks.values(f"{label}/graph/{step}/start", 0)
        step_times, data = _measure_step(settings, mesh, chosen, data)
        times += timing.slowest_rank(f"{label}/graph/{step}", step_times)
    wrong = sum(
        oracle.count_wrong(got, right.expected[right.part(rank, len(got))], None)
        for rank, got in data.items()
    )
    return times, all_ranks.total(f"{label}/graph/wrong", wrong)


def _measure_step(
    settings: Settings, mesh: Mesh, chosen: select.Selection, data: dict[int, np.ndarray]
) -> tuple[timing.Times, dict[int, np.ndarray]]:
    """Runs one kernel on all devices of this process at once, with a thread for each device.

    Returns:
        The slowest device's times, and each device's result.
    """
    groups = partition_lib.partition(mesh, ("x",))
    devices = mesh.devices.flat
    module: Any = extension.module("gpu")

    def on_device(rank: int) -> tuple[timing.Times, np.ndarray]:
        operand = data[rank]
        us, output = module.time_in_graph(
            list(groups.device_ids),
            groups.group_size,
            agreed.native_ordinal(devices[rank]),
            definitions.ALGORITHMS.index(chosen.algorithm),
            chosen.segments,
            chosen.blocks,
            chosen.threads,
            operand.tobytes(),
            operand.dtype.name,
            _CALLS,
            settings.warmup_iterations + settings.iterations,
        )
        times = timing.statistics(us[settings.warmup_iterations :])
        return times, np.frombuffer(output, operand.dtype)

    with ThreadPoolExecutor(len(data)) as threads:
        results = dict(zip(data, threads.map(on_device, data), strict=True))
    p50 = max(times.p50 for times, _ in results.values())
    p99 = max(times.p99 for times, _ in results.values())
    return timing.Times(p50, p99), {rank: output for rank, (_, output) in results.items()}
