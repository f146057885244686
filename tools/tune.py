"""Measures what the tables in jax_intranode/_src/table.py are made of.

    python tools/tune.py --devices 4 [--mode single-process] [--dtype bfloat16] [OPERATION ...]
    python tools/tune.py --platform cpu --devices 2 [--mode ...] [--dtype ...] [OPERATION ...]

On GPUs it times the kernels in CUDA graphs over launch shapes. For each size and algorithm it
prints the launch shapes (blocks x threads) in order of time: the median over launches of a graph of
calls, in microseconds per call, of the slowest rank. Results are checked. Sizes are those of
nccl-tests: the whole of what is summed, scattered or gathered.

On the CPU one thread runs all blocks, so there are no launch shapes. It times each algorithm
and jax.lax in turns, and prints both times and their ratio. Sizes are those of the table: bytes of
a rank's operand, and for psum_scatter of its result. At the end it prints up to which size each
algorithm was faster than lax.
"""

import argparse
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_intranode
from jax_intranode._src import communicator, launcher, limits, select, table
from jax_intranode._src.bench.collectives import chains, graph, oracle
from jax_intranode._src.bench.collectives.operations import OPERATIONS
from jax_intranode._src.bench.settings import PROCESS_PER_DEVICE, Settings
from jax_intranode._src.bench.timing import slowest_rank

# The algorithms of each operation that bench measures.
_ALGORITHMS = {
    name: [a for a, operation in limits.OPERATIONS.items() if operation == name]
    for name in dict.fromkeys(limits.OPERATIONS.values())
    if name in OPERATIONS
}
_THREADS = (64, 128, 256, 512)
_BLOCKS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
# The most threads of a kernel that reside on an SM at the same time.
_RESIDENT_THREADS_PER_SM = 1024
_REPETITIONS = {"gpu": 9, "cpu": 41}
_SHOWN = 6
_ALL = "--all" in sys.argv


def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("operations", nargs="*", default=list(_ALGORITHMS))
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--mode", default=PROCESS_PER_DEVICE)
    parser.add_argument("--dtype", default=None, help="default bfloat16; on the CPU float32")
    parser.add_argument("--minbytes", type=int, default=None)
    parser.add_argument("--maxbytes", type=int, default=None)
    parser.add_argument("--factor", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=600, help="seconds")
    parser.add_argument("--all", action="store_true", help="print all launch shapes")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    on_cpu = arguments.platform == "cpu"
    arguments.dtype = arguments.dtype or ("float32" if on_cpu else "bfloat16")
    arguments.minbytes = arguments.minbytes or (256 if on_cpu else 1 << 10)
    arguments.maxbytes = arguments.maxbytes or (256 << 10 if on_cpu else 16 << 20)
    if arguments.rank:
        _rank(arguments)
        return
    command = [sys.executable, __file__, "--rank", *sys.argv[1:]]
    count = arguments.devices if arguments.mode == PROCESS_PER_DEVICE else 1
    port = launcher.free_port()
    env = [launcher.rank_env(rank, count, port) for rank in range(count)] if count > 1 else [{}]
    if on_cpu:
        cpus = str(arguments.devices // count)
        env = [{**rank, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": cpus} for rank in env]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "rank0.log")
        try:
            launcher.run_ranks(
                [command] * count, timeout_s=arguments.timeout, log_dir=log.parent, env=env
            )
        finally:
            print(log.read_text())


def _rank(arguments: argparse.Namespace) -> None:
    if arguments.mode == PROCESS_PER_DEVICE:
        launcher.connect(arguments.platform)
    n = arguments.devices
    if np.dtype(jax.numpy.dtype(arguments.dtype)).itemsize == 8:
        jax.config.update("jax_enable_x64", True)
    mesh = Mesh(np.array(jax.devices()[:n]), ("x",))
    jax_intranode.initialize(mesh)
    rendezvous = communicator.rendezvous_of(mesh.devices.flat)
    reason = rendezvous.reason or communicator.communicator(
        rendezvous, communicator.partition(mesh, ("x",))
    )
    if reason is not None:
        raise SystemExit(reason)
    sizes = []
    size = arguments.minbytes
    while size <= arguments.maxbytes:
        sizes.append(size)
        size *= arguments.factor
    settings = Settings(
        name="",
        sizes=sizes,
        leaves=1,
        dtypes=[arguments.dtype],
        iterations=_REPETITIONS[arguments.platform],
        warmup_iterations=0 if arguments.platform == "gpu" else 3,
        chain=None,
        mode=arguments.mode,
        devices=n,
        platform=arguments.platform,
    )
    if arguments.platform == "cpu":
        _tune_cpu(settings, mesh, rendezvous.epoch_buffer_bytes, arguments.operations)
        return
    for size in sizes:
        for name in arguments.operations:
            for algorithm in _ALGORITHMS[name]:
                line = _sweep(settings, mesh, rendezvous.epoch_buffer_bytes, name, algorithm, size)
                if line is not None:
                    _print(line)


def _print(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _tune_cpu(
    settings: Settings, mesh: Mesh, epoch_buffer_bytes: int, operations: list[str]
) -> None:
    """Prints the times of each size and algorithm and of lax, and where lax becomes faster."""
    dtype = np.dtype(jax.numpy.dtype(settings.dtypes[0]))
    n = settings.devices
    packets = "bare" if limits.packet_bytes("one_shot", dtype.name) == 16 else "flagged"
    _print(
        f"# jaxlib {version('jaxlib')}, {settings.mode}, {n} devices, {dtype.name} ({packets} "
        f"packets), {os.cpu_count()} cores: bytes, microseconds of ours and of lax, lax / ours"
    )
    limit: dict[str, int] = {}
    for name in operations:
        for algorithm in _ALGORITHMS[name]:
            for nbytes in settings.sizes:
                needed = limits.epoch_buffer_bytes_needed(algorithm, dtype.name, nbytes, n)
                if nbytes < dtype.itemsize or needed > epoch_buffer_bytes:
                    continue
                ours, lax = _time_on_cpu(settings, mesh, name, algorithm, nbytes, dtype)
                ratio = lax / ours if ours else float("inf")
                _print(
                    f"{settings.mode:18} {n} {name:12} {algorithm:14} {dtype.name:8} {nbytes:8} "
                    f"{ours:9.1f} {lax:9.1f} {ratio:6.2f}"
                )
                if ratio >= 1 and limit.get(algorithm, 0) in (0, nbytes // _factor(settings)):
                    limit[algorithm] = nbytes
    for algorithm in (a for name in operations for a in _ALGORITHMS[name]):
        _print(f"# {algorithm}: not slower than lax up to {limit.get(algorithm, 0)} bytes")


def _factor(settings: Settings) -> int:
    return settings.sizes[1] // settings.sizes[0] if len(settings.sizes) > 1 else 1


def _time_on_cpu(
    settings: Settings, mesh: Mesh, name: str, algorithm: str, nbytes: int, dtype: np.dtype
) -> tuple[float, float]:
    """Microseconds per call of an algorithm and of lax, which take turns."""
    n, operation = settings.devices, OPERATIONS[name]
    size = nbytes if name == "psum" else nbytes * n
    count = operation.operand_count(size // dtype.itemsize, n)
    # A table of one row, so that this algorithm is selected for any size.
    row = (table.Row(1 << 40, algorithm, 1, 1),)
    table.TABLE = {
        ("cpu", mode, name, packets, limits.MAX_WORLD_SIZE): row
        for mode in ("single", "multi")
        for packets in ("bare", "flagged")
    }
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    data = jax.make_array_from_callback((n * count,), sharding, lambda index: np.ones(count, dtype))
    times = chains.times_from_jax(settings, operation, mesh, [data], size)[:2]
    label = f"{algorithm}/{nbytes}"
    ours, lax = (
        slowest_rank(f"{label}/{which}", of_one).p50
        for which, of_one in zip(("ours", "lax"), times, strict=True)
    )
    return ours, lax


def _sweep(
    settings: Settings,
    mesh: jax.sharding.Mesh,
    epoch_buffer_bytes: int,
    name: str,
    algorithm: str,
    size: int,
) -> str | None:
    """Measures all launch shapes of a size; None if the kernel can't take it."""
    n, operation = settings.devices, OPERATIONS[name]
    dtype = np.dtype(jax.numpy.dtype(settings.dtypes[0]))
    part = size if name == "psum" else size // n
    packs = -(-part // limits.PACK_BYTES)
    work = -(-packs // n) if algorithm == "two_shot" else packs
    needed = limits.epoch_buffer_bytes_needed(algorithm, dtype.name, part, n)
    if part < dtype.itemsize or needed > epoch_buffer_bytes:
        return None
    if algorithm == "one_shot" and n > 2 and size > 2 << 20:
        return None
    operand_bytes = operation.operand_count(size // dtype.itemsize, n) * dtype.itemsize
    expected, _ = oracle.expected_result(operation, n, operand_bytes, dtype)
    shards = {
        rank: oracle.random_shard(rank, operand_bytes, dtype)
        for rank, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    }
    sms = getattr(mesh.devices.flat[0], "core_count", 132)
    resident = _RESIDENT_THREADS_PER_SM * sms
    results, wrong = [], 0
    for threads in _THREADS:
        for blocks in _BLOCKS:
            full = blocks * threads
            if (blocks - 1) * threads >= work or (full * 8 < work and blocks < 64):
                continue
            if full > resident or (size >= 1 << 20 and threads < 128):
                continue
            shape = f"{blocks}x{threads}"
            selected = [select.Selection(algorithm, "", blocks, threads)]
            times, wrong_of_shape = graph.measure(
                settings, operation, mesh, selected, shards, expected, f"{algorithm}/{size}/{shape}"
            )
            results.append((times.p50, shape))
            wrong += wrong_of_shape
    shown = "  ".join(
        f"{us:.2f} {shape}" for us, shape in sorted(results)[: None if _ALL else _SHOWN]
    )
    verdict = f"  {wrong} WRONG" if wrong else ""
    return f"{n} {dtype.name} {size:9} {algorithm:14} {shown}{verdict}"


if __name__ == "__main__":
    _main()
