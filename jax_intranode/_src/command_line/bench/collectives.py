"""Checks and times one row of a collective's table.

A chain of (operation, multiply) is timed, less the same chain without the operation.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_intranode
from jax_intranode._src.command_line.bench import matmuls, oracle, timing
from jax_intranode._src.command_line.bench.operations import OPERATIONS, Operation
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.group import agreed
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.native import definitions, extension
from jax_intranode._src.ops import collective
from jax_intranode._src.ops.all_reduce import operations
from jax_intranode._src.selection import generations, select, tuning

# The number of operations in one graph.
_CALLS_IN_GRAPH = 50


def measure(
    settings: Settings, mesh: Mesh, dtype_name: str, count: int
) -> tuple[dict[str, Any], str | None]:
    """Checks and times one size of one dtype.

    Args:
        count: the number of elements in the size, as defined in `operations.Operation`.

    Returns:
        The row (docs/measurements/json_file.md), and the reason if our call fell back to jax.lax.
    """
    operation = OPERATIONS[settings.name]
    dtype = np.dtype(jnp.dtype(dtype_name))
    n, size = settings.devices, count * dtype.itemsize
    label = f"{dtype.name}/{size}"
    operand_count = operation.operand_count(count, n)
    oracle_of = oracle.Collective(operation, n, operand_count * dtype.itemsize, dtype)

    whole = timing.array(mesh, operand_count, oracle_of.shard)
    # Each rank gets an equal part of a scattered array.
    at = split_points(operand_count, settings.leaves, n if operation.divides else 1)
    data = timing.program(mesh, lambda x: jnp.split(x, at))(whole)

    # The ranks of a mesh rendezvous at the first lowering. Until then the selection is not final.
    ours, lax = (
        timing.program(mesh, lambda xs, lib=lib: jnp.concatenate(operation.call(lib, xs)))(data)
        for lib in (jax_intranode, jax.lax)
    )
    counts = [leaf.size // n for leaf in data]
    selected = _selected(operation, mesh, counts, dtype)
    reasons = [chosen.reason for chosen in selected if chosen.algorithm == "lax"]
    our_check = oracle_of.compare(ours, oracle_of.tolerance if reasons else None)
    lax_check = oracle_of.compare(lax, oracle_of.tolerance)

    shipped = None
    if tuning.rows_for([mesh.devices.flat[0].device_kind]) is not None:
        with tuning.using(None):
            shipped = _algorithm(_selected(operation, mesh, counts, dtype))
    times, handler_calls = times_from_jax(
        settings, operation, mesh, data, size, label, with_shipped=shipped is not None
    )
    graph_times, graph_wrong = None, None
    # A sequence of our kernels on one array can be measured there.
    can_be_in_graph = settings.platform == "gpu" and settings.leaves == 1 and not operation.is_mean
    if can_be_in_graph and not reasons:
        shards = oracle_of.own_shards(mesh)
        graph_times, graph_wrong = measure_in_graph(
            settings, oracle_of, mesh, selected, shards, label
        )

    our_us = times["ours"].p50
    algbw = size / our_us / 1e3 if our_us else None
    busbw = algbw * operation.bus_factor(n) if algbw is not None else None
    on_gpus = settings.platform == "gpu"
    rate = matmuls.profile_of(mesh).link_bound_bytes_per_s if on_gpus else None
    sms = generations.of_hardware(collective.facts_of(mesh)["hardware"]).sms
    row = {
        "size": size,
        "count": count,
        "dtype": dtype.name,
        "mode": settings.mode,
        "algorithm": _algorithm(selected),
        "operations": len(selected),
        "graph_time_us": graph_times.p50 if graph_times else None,
        "graph_time_p99_us": graph_times.p99 if graph_times else None,
        "graph_wrong": graph_wrong,
        **timing.fields(times | ({"in a graph": graph_times} if graph_times else {})),
        "algbw": algbw,
        "busbw": busbw,
        "link_share": 1e9 * busbw / rate if busbw is not None and rate else None,
        # A block of a kernel gets an SM of its own as long as there are SMs.
        "sms": (on_gpus and max(min(c.blocks, sms) for c in selected)) or None,
        **oracle.fields(label, our_check, lax_check),
        "handler_calls": handler_calls,
        "shipped_algorithm": shipped,
        "shipped_time_us": times["shipped"].p50 if shipped is not None else None,
    }
    return row, reasons[0] if reasons else None


def split_points(count: int, leaves: int, multiple: int = 1) -> list[int]:
    """Returns where to split an array into leaves, whose sizes are in the ratio 1 : 2 : 3 : 4.

    Args:
        multiple: the number of elements of each leaf, and of the array, is a multiple of this.
    """
    ends = np.cumsum([1 + k % 4 for k in range(leaves)])
    return [int(count // multiple * end // ends[-1]) * multiple for end in ends[:-1]]


def _selected(
    operation: Operation, mesh: Mesh, counts: list[int], dtype: np.dtype[Any]
) -> list[select.Selection]:
    """Returns the selection for each collective of our call on leaves of these sizes."""
    if operation.steps[0].takes_many:
        shapes = [(count,) for count in counts]
        name = operation.steps[0].name
        return [chosen for _, chosen in operations(name, mesh, ("x",), shapes, dtype)]
    selected = []
    for count in counts:
        nbytes = count * dtype.itemsize
        for step in operation.steps:
            part = step.bytes_per_peer(nbytes, mesh.size)
            selected.append(collective.chooser(step.name, mesh, ("x",), dtype)(part))
            nbytes = part * (mesh.size if step.gathers else 1)
    return selected


def _algorithm(selected: list[select.Selection]) -> str:
    """Returns one word for the algorithms of our call."""
    algorithms = {chosen.algorithm for chosen in selected}
    if algorithms == {"reduce_scatter", "all_gather"}:
        return "push"
    return algorithms.pop() if len(algorithms) == 1 else "mixed"


# Times from JAX.


def link(call: Callable[[Any], Any], ragged: bool = False) -> Callable[[Any, Any], Any]:
    """Returns a link of a chain, a function of the operands and a factor.

    The result is brought to the operand's size and multiplied, so that sums don't grow. A barrier
    keeps XLA from merging the calls. An empty chain measures this overhead. A ragged operation gets
    the product, and writes its result into the operand.
    """

    def fit(x: jax.Array, count: int) -> jax.Array:
        return x[:count] if len(x) >= count else jnp.tile(x, count // len(x))

    def linked(xs: list[jax.Array], scale: jax.Array) -> list[jax.Array]:
        if ragged:
            return call([*jax.lax.optimization_barrier([x * scale for x in xs]), *xs])
        ys = zip(call(xs), xs, strict=True)
        return jax.lax.optimization_barrier([fit(y, len(x)) * scale for y, x in ys])

    return linked


def chain_length(settings: Settings, size: int, leaves: int) -> int:
    if settings.chain is not None:
        return settings.chain
    # Chains are long on GPUs, because a single process launches on all of them: a short program
    # would end before the next one is launched.
    if settings.platform == "cpu":
        length = 32 if size < 1 << 20 else 4
    else:
        length = 256 if size <= 1 << 20 else 128 if size <= 4 << 20 else 16
    # With many leaves a call takes longer, and the compiled program is larger.
    return length if leaves == 1 else max(4, min(length, 1024 // leaves))


def times_from_jax(
    settings: Settings,
    operation: Operation,
    mesh: Mesh,
    data: list[jax.Array],
    size: int,
    label: str,
    with_shipped: bool = False,
) -> tuple[dict[str, timing.Times], int]:
    """Measures one call of ours and of lax's.

    Args:
        size: bytes, as defined in `operations.Operation`.
        with_shipped: whether to measure our call by the shipped table, too.

    Returns:
        Times of "ours", "lax" and "shipped", and how often XLA called our FFI handlers.
    """
    n, dtype = settings.devices, data[0].dtype
    length = chain_length(settings, size, len(data))
    executions = 4 if settings.platform == "cpu" else 5

    def scale(value: float) -> jax.Array:
        return timing.array(mesh, 1, lambda rank: np.full(1, value, dtype))

    def chain(call: Callable[[Any], Any], factor: jax.Array) -> Callable[[], Any]:
        of_chain = link(call, ragged=operation.steps[0].ragged and call is not nothing)
        return timing.Chain(mesh, of_chain, data, (factor,), length, executions).run

    def nothing(xs: list[jax.Array]) -> list[jax.Array]:
        # An array of the size of the operation's result.
        return [x[: len(x) // n] if operation.result_is_part else x for x in xs]

    one = scale(1)
    # Without a sum, multiplying by 1/n would end in subnormal numbers, which are slow on some
    # devices.
    grows = operation.sums and not operation.is_mean and not jnp.issubdtype(dtype, jnp.integer)
    mean = scale(1 / n) if grows else one
    runs = {
        "ours": chain(partial(operation.call, jax_intranode), mean),
        "lax": chain(partial(operation.call, jax.lax), mean),
        "empty": chain(nothing, one),
    }
    if with_shipped:
        runs["shipped"] = chain(partial(operation.call, jax_intranode), mean)
        with tuning.using(None):
            runs["shipped"]()  # lowers it
    return timing.compare(runs, mesh, settings, label, calls=executions * length)


# Times of our kernels alone, back to back in a CUDA graph.


def measure_in_graph(
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
    p50, p99, spread, data = 0.0, 0.0, 0.0, shards
    for step, chosen in enumerate(selected):
        # A kernel's wait for its peers has a time limit, which must not include their compilation.
        all_ranks.values(f"{label}/graph/{step}/start", 0)
        us, data = _run_in_graph(settings, mesh, chosen, data)
        times = timing.of_slowest(f"{label}/graph/{step}", *us)
        p50, p99, spread = p50 + times.p50, p99 + times.p99, max(spread, times.spread)
    wrong = sum(oracle.count_wrong(got, right.expected[rank], None) for rank, got in data.items())
    return timing.Times(p50, p99, spread), all_ranks.total(f"{label}/graph/wrong", wrong)


def _run_in_graph(
    settings: Settings, mesh: Mesh, chosen: select.Selection, data: dict[int, np.ndarray]
) -> tuple[list[Any], dict[int, np.ndarray]]:
    """Runs one kernel on all devices of this process at once, with a thread for each device.

    Returns:
        Each device's times in microseconds, and its result.
    """
    groups = partition_lib.partition(mesh, ("x",))
    module: Any = extension.module("gpu")

    def on_device(rank: int) -> tuple[Any, np.ndarray]:
        operand = data[rank]
        us, output = module.time_in_graph(
            list(groups.device_ids),
            groups.group_size,
            agreed.native_ordinal(mesh.devices.flat[rank]),
            definitions.ALGORITHMS.index(chosen.algorithm),
            chosen.segments,
            chosen.blocks,
            chosen.threads,
            operand.tobytes(),
            operand.dtype.name,
            _CALLS_IN_GRAPH,
            settings.warmup_iterations + settings.iterations,
        )
        return us[settings.warmup_iterations :], np.frombuffer(output, operand.dtype)

    with ThreadPoolExecutor(len(data)) as threads:
        us, outputs = zip(*threads.map(on_device, data), strict=True)
    return list(us), dict(zip(data, outputs, strict=True))
