"""Checks and times one row of a collective's table."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_intranode
from jax_intranode._src.command_line.bench import all_ranks, timing
from jax_intranode._src.command_line.bench.collectives import chains, graph, oracle
from jax_intranode._src.command_line.bench.collectives.operations import OPERATIONS, Operation
from jax_intranode._src.command_line.bench.collectives.report import Row
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.ops import collective
from jax_intranode._src.ops.psum import operations
from jax_intranode._src.selection import select, tuning


def measure(settings: Settings, mesh: Mesh, dtype_name: str, count: int) -> tuple[Row, str | None]:
    """Checks and times one size of one dtype.

    Args:
        settings: what to measure.
        mesh: a mesh with one axis "x" of all devices.
        dtype_name: the dtype.
        count: the number of elements in the size, as defined in `operations.Operation`.

    Returns:
        The row, and the reason if our call fell back to jax.lax.
    """
    operation = OPERATIONS[settings.name]
    dtype = np.dtype(jnp.dtype(dtype_name))
    n = settings.devices
    size = count * dtype.itemsize
    operand_count = operation.operand_count(count, n)
    operand_bytes = operand_count * dtype.itemsize
    label = f"{dtype.name}/{size}"

    def shard(index: Any) -> np.ndarray:
        rank = (index[0].start or 0) // operand_count
        return oracle.random_shard(rank, operand_bytes, dtype)

    sharding = NamedSharding(mesh, PartitionSpec("x"))
    whole = jax.make_array_from_callback((n * operand_count,), sharding, shard)
    # Each rank gets an equal part of a scattered array.
    at = split_points(operand_count, settings.leaves, n if operation.divides else 1)
    data = timing.program(mesh, lambda x: jnp.split(x, at))(whole)

    # The ranks of a mesh rendezvous at the first lowering. Until then the selection is not final.
    ours, lax = (
        timing.program(mesh, lambda xs, lib=lib: jnp.concatenate(operation.call(lib, xs)))(data)
        for lib in (jax_intranode, jax.lax)
    )
    selected = _selected(operation, mesh, [leaf.size // n for leaf in data], dtype)
    algorithm = _algorithm(selected)
    expected, lax_tolerance = oracle.expected_result(operation, n, operand_bytes, dtype)
    reasons = [chosen.reason for chosen in selected if chosen.algorithm == "lax"]
    our_tolerance = lax_tolerance if reasons else None
    wrong = oracle.count_wrong_on_devices(ours, operation, expected, our_tolerance)
    lax_wrong = oracle.count_wrong_on_devices(lax, operation, expected, lax_tolerance)

    exact = oracle.exact_result(operation, n, operand_bytes, dtype)
    errors = [oracle.error_on_devices(result, operation, exact) for result in (ours, lax)]
    error, lax_error = (
        None if of_one is None else all_ranks.largest(f"{label}/error/{library}", of_one)
        for library, of_one in zip(("ours", "lax"), errors, strict=True)
    )

    shipped, shipped_us = None, None
    if tuning.rows_for([mesh.devices.flat[0].device_kind]) is not None:
        with tuning.using(None):
            counts = [leaf.size // n for leaf in data]
            shipped = _algorithm(_selected(operation, mesh, counts, dtype))
    our_times, lax_times, times_as_shipped, handler_calls = chains.times_from_jax(
        settings, operation, mesh, data, size, with_shipped=shipped is not None
    )
    if times_as_shipped is not None:
        shipped_us = timing.slowest_rank(f"{label}/shipped", times_as_shipped).p50
    our_times = timing.slowest_rank(f"{label}/ours", our_times)
    lax_times = timing.slowest_rank(f"{label}/lax", lax_times)
    graph_times, graph_wrong = None, None
    if graph.can_measure(settings, operation, selected):
        shards = {
            rank: oracle.random_shard(rank, operand_bytes, dtype)
            for rank, device in enumerate(mesh.devices.flat)
            if device.process_index == jax.process_index()
        }
        graph_times, graph_wrong = graph.measure(
            settings, operation, mesh, selected, shards, expected, label
        )

    algbw = size / our_times.p50 / 1e3 if our_times.p50 else None
    row = Row(
        size=size,
        count=count,
        dtype=dtype.name,
        mode=settings.mode,
        algorithm=algorithm,
        operations=len(selected),
        graph_time_us=graph_times.p50 if graph_times else None,
        graph_time_p99_us=graph_times.p99 if graph_times else None,
        graph_wrong=graph_wrong,
        time_us=our_times.p50,
        time_p99_us=our_times.p99,
        algbw=algbw,
        busbw=algbw * operation.bus_factor(n) if algbw is not None else None,
        wrong=all_ranks.total(f"{label}/wrong", wrong),
        lax_time_us=lax_times.p50,
        lax_time_p99_us=lax_times.p99,
        lax_wrong=all_ranks.total(f"{label}/lax_wrong", lax_wrong),
        ratio=lax_times.p50 / our_times.p50 if our_times.p50 else None,
        error=error if error is None or math.isfinite(error) else None,
        lax_error=lax_error if lax_error is None or math.isfinite(lax_error) else None,
        shipped_algorithm=shipped,
        shipped_time_us=shipped_us,
        handler_calls=all_ranks.total(f"{label}/handler_calls", handler_calls),
    )
    return row, reasons[0] if reasons else None


def split_points(count: int, leaves: int, multiple: int = 1) -> list[int]:
    """Returns where to split an array into leaves, whose sizes are in the ratio 1 : 2 : 3 : 4.

    Args:
        count: the number of elements of the array.
        leaves: the number of leaves.
        multiple: the number of elements of each leaf, and of the array, is a multiple of this.
    """
    ends = np.cumsum([1 + k % 4 for k in range(leaves)])
    return [int(count // multiple * end // ends[-1]) * multiple for end in ends[:-1]]


def _selected(
    operation: Operation, mesh: Mesh, counts: list[int], dtype: np.dtype[Any]
) -> list[select.Selection]:
    """Returns the selection for each collective of our call.

    Args:
        operation: the operation.
        mesh: the mesh.
        counts: the number of elements of each leaf.
        dtype: the dtype.
    """
    if operation.steps == ("psum",):
        shapes = [(count,) for count in counts]
        return [chosen for _, chosen in operations(mesh, ("x",), shapes, dtype)]
    selected = []
    for count in counts:
        part = (count if operation.operand_is_part else count // mesh.size) * dtype.itemsize
        for step in operation.steps:
            selected.append(collective.chooser(step, mesh, ("x",), dtype)(part))
    return selected


def _algorithm(selected: list[select.Selection]) -> str:
    """Returns one word for the algorithms of our call."""
    algorithms = {chosen.algorithm for chosen in selected}
    if algorithms == {"reduce_scatter", "all_gather"}:
        return "push"
    return algorithms.pop() if len(algorithms) == 1 else "mixed"
