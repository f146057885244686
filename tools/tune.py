"""Times the kernels in CUDA graphs over launch shapes: the tables of select.py are made from it.

    python tools/tune.py --devices 4 [--mode single-process] [--dtype bfloat16] [OPERATION ...]

For each size and algorithm it prints the launch shapes (blocks x threads) in order of time: the
median over launches of a graph of calls, in microseconds a call, the slowest rank's. Results are
checked. Sizes are those of nccl-tests: the whole of what is summed, scattered or gathered.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import jax_intranode
from jax_intranode._src import communicator, launcher, limits, select
from jax_intranode._src.bench.collectives import graph, oracle
from jax_intranode._src.bench.collectives.operations import OPERATIONS
from jax_intranode._src.bench.settings import PROCESS_PER_DEVICE, Settings

_ALGORITHMS = {
    "psum": ("one_shot", "two_shot"),
    "psum_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",),
}
_THREADS = (64, 128, 256, 512)
_BLOCKS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_RESIDENT_THREADS = 132 * 1024
_REPETITIONS = 9
_SHOWN = 6
_ALL = "--all" in sys.argv


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operations", nargs="*", default=list(_ALGORITHMS))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--mode", default=PROCESS_PER_DEVICE)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--minbytes", type=int, default=1 << 10)
    parser.add_argument("--maxbytes", type=int, default=16 << 20)
    parser.add_argument("--factor", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=600, help="seconds")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        _rank(arguments)
        return
    command = [sys.executable, __file__, "--rank", *sys.argv[1:]]
    count = arguments.devices if arguments.mode == PROCESS_PER_DEVICE else 1
    port = launcher.free_port()
    env = [launcher.rank_env(rank, count, port) for rank in range(count)] if count > 1 else [{}]
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
        launcher.connect("gpu")
    n = arguments.devices
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]), ("x",))
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
        iterations=_REPETITIONS,
        warmup_iterations=0,
        chain=None,
        mode=arguments.mode,
        devices=n,
        platform="gpu",
    )
    for size in sizes:
        for name in arguments.operations:
            for algorithm in _ALGORITHMS[name]:
                line = _sweep(settings, mesh, rendezvous.epoch_buffer_bytes, name, algorithm, size)
                if line is not None and jax.process_index() == 0:
                    print(line, flush=True)


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
    results, wrong = [], 0
    for threads in _THREADS:
        for blocks in _BLOCKS:
            full = blocks * threads
            if (blocks - 1) * threads >= work or (full * 8 < work and blocks < 64):
                continue
            if full > _RESIDENT_THREADS or (size >= 1 << 20 and threads < 128):
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
