"""Times the kernels in CUDA graphs over launch shapes: the tables of select.py are made from it.

    python tools/tune.py --devices 4 [--mode single-process] [--dtype bfloat16] [OPERATION ...]

For each size and algorithm it prints the launch shapes (blocks x threads) in order of time: the
median over launches of a graph of calls, in microseconds a call, the slowest rank's. Results are
checked. Sizes are those of nccl-tests: the whole of what is summed, scattered or gathered.
"""

import argparse
import concurrent.futures
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import jax_intranode
from jax_intranode._src import communicator, compat, launcher, native, select

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
    parser.add_argument("--mode", default="process-per-device")
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
    count = arguments.devices if arguments.mode == "process-per-device" else 1
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
    if arguments.mode == "process-per-device":
        launcher.connect("gpu")
    n = arguments.devices
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]), ("x",))
    started = time.monotonic()
    jax_intranode.initialize(mesh)
    groups = communicator.partition(mesh, ("x",))
    meeting = communicator.meet(mesh.devices.flat)
    reason = meeting.reason or communicator.communicator(meeting, groups)
    if reason is not None:
        raise SystemExit(reason)
    dtype = np.dtype(jax.numpy.dtype(arguments.dtype))
    packet = 16 if arguments.dtype in ("float32", "bfloat16", "float16") else 32
    devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    size = arguments.minbytes
    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        while size <= arguments.maxbytes:
            for operation in arguments.operations:
                for algorithm in _ALGORITHMS[operation]:
                    part = size if operation == "psum" else size // n
                    packs = -(-part // select.PACK_BYTES)
                    work = -(-packs // n) if algorithm == "two_shot" else packs
                    needed = select._half_bytes_needed(algorithm, packs * packet, n, packet)
                    if part < dtype.itemsize or needed > meeting.half_bytes:
                        continue
                    if algorithm == "one_shot" and n > 2 and size > 2 << 20:
                        continue
                    _sweep(pool, groups, devices, algorithm, size, part, work, dtype, n)
            size *= arguments.factor
    if jax.process_index() == 0:
        print(f"# {time.monotonic() - started:.0f} s")


def _sweep(pool, groups, devices, algorithm, size, part, work, dtype, n):
    rng = [np.random.default_rng((rank, size)) for rank in range(n)]
    parts = n if algorithm == "reduce_scatter" else 1
    count = part // dtype.itemsize * parts
    data = [(r.random(count, np.float32) * 2 - 1).astype(dtype) for r in rng]
    total = data[0].astype(np.float32)
    for d in data[1:]:
        total = total + d.astype(np.float32)
    total = total.astype(dtype)
    wanted = {
        "reduce_scatter": [total.reshape(n, -1)[r] for r in range(n)],
        "all_gather": [np.concatenate(data)] * n,
    }.get(algorithm, [total] * n)
    calls = 40 if size <= 8 << 20 else 10
    results = []
    wrong = 0
    for threads in _THREADS:
        for blocks in _BLOCKS:
            full = blocks * threads
            if (blocks - 1) * threads >= work or (full * 8 < work and blocks < 64):
                continue
            if full > _RESIDENT_THREADS or (size >= 1 << 20 and threads < 128):
                continue

            def one(device, blocks=blocks, threads=threads):
                rank = groups.device_ids.index(device.id)
                times, output = native.module("gpu").time_in_graph(
                    list(groups.device_ids),
                    groups.group_size,
                    communicator.native_ordinal(device),
                    select.ALGORITHMS.index(algorithm),
                    blocks,
                    threads,
                    data[rank].tobytes(),
                    dtype.name,
                    calls,
                    _REPETITIONS,
                )
                bad = not results and output != wanted[rank].tobytes()
                return statistics.median(times), bad

            answers = list(pool.map(one, devices))
            wrong += sum(bad for _, bad in answers)
            results.append((max(t for t, _ in answers), f"{blocks}x{threads}"))
    client = compat.key_value_client()
    mine = [(*r, wrong) for r in results]
    if client is not None:
        key = f"tune/{algorithm}/{size}"
        client.key_value_set(f"{key}/{jax.process_index()}", repr(mine))
        ranks = range(jax.process_count())
        everyone = [eval(client.blocking_key_value_get(f"{key}/{r}", 60_000)) for r in ranks]
        mine = [
            (max(c[0] for c in column), *column[0][1:]) for column in zip(*everyone, strict=True)
        ]
        wrong = sum(rows[-1][2] for rows in everyone)
    if jax.process_index() == 0:
        shown = None if _ALL else _SHOWN
        best = "  ".join(f"{t:.2f} {shape}" for t, shape, _ in sorted(mine)[:shown])
        print(
            f"{n} {dtype.name} {size:9} {algorithm:14} {best}{f'  {wrong} WRONG' if wrong else ''}"
        )


if __name__ == "__main__":
    _main()
