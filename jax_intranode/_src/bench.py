"""The benchmark: our collectives beside those of `jax.lax`, checked and measured as by nccl-tests.

Both are measured in the same process on the same data, taking turns, so that whatever slows the
node down slows both. The parent process only starts the ranks, shows rank 0's table while it
grows, and collects its rows; all use of devices happens in the ranks:

    one process per device   n ranks with one device each, joined by `jax.distributed`
    a single process         one rank that has all n devices
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_intranode
from jax_intranode._src import compat, launcher, select
from jax_intranode._src.ops import collective
from jax_intranode._src.ops.psum import operations

# What can be measured, as functions of a library (ours or jax.lax) and a list of arrays. Each gives
# what psum gives: so they can be chained and have one oracle.
OPERATIONS: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "psum": lambda lib, xs: lib.psum(xs, "x"),
    "psum_scatter+all_gather": lambda lib, xs: lib.all_gather(
        # The barrier keeps XLA from making an all-reduce of the two.
        jax.lax.optimization_barrier(lib.psum_scatter(xs, "x", tiled=True)),
        "x",
        tiled=True,
    ),
}

_PROCESS_PER_DEVICE = "process-per-device"
_SINGLE_PROCESS = "single-process"

_DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)

_SIZE_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# A rank that is slow to compile keeps the others waiting for its numbers.
_GATHER_TIMEOUT_MS = 600_000

_COLUMNS = (
    f"# {'size(B)':>12} {'count':>12} {'type':>9} | {'algorithm':>9} {'time(us)':>10} "
    f"{'algbw(GB/s)':>11} {'busbw(GB/s)':>11} {'#wrong':>7} | {'lax time(us)':>12} "
    f"{'#wrong':>7} | {'ratio':>6}"
)

# A jitted program: the arrays of all devices and one scale per device -> the arrays of all devices.
_Program = Callable[[list[jax.Array], jax.Array], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a rank needs to know; travels to it as JSON.

    Attributes:
        operation: One of OPERATIONS.
        sizes: Bytes per device of each measurement.
        leaves: Arrays that these bytes are cut into and that one psum takes as a pytree.
        dtypes: Names of the dtypes, all of which are measured at each size.
        iterations: Timed repetitions, of which the median counts.
        warmup_iterations: Untimed repetitions before them.
        mode: "process-per-device" or "single-process".
        devices: The number of devices that take part.
        platform: "cpu" or "gpu".
        output: The JSON file that rank 0 writes.
    """

    operation: str
    sizes: list[int]
    leaves: int
    dtypes: list[str]
    iterations: int
    warmup_iterations: int
    mode: str
    devices: int
    platform: str
    output: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        size: Bytes per device.
        count: Elements per device.
        dtype: The dtype's name.
        mode: "process-per-device" or "single-process".
        algorithm: What ours ran as: an algorithm, "mixed" if several differ, "lax" if it fell back.
        operations: How many operations ours ran as.
        time_us: Time of one of ours in microseconds, the multiply of the chain taken off.
        algbw: size / time, in GB/s; None if the time is below what the clock shows.
        busbw: algbw * 2(n-1)/n, which compares with a link's speed for any n; or None.
        wrong: Elements of our result that are wrong, over all devices.
        lax_time_us: Time of one of lax's in microseconds.
        lax_wrong: Elements of lax's result that are wrong, over all devices.
        ratio: lax_time_us / time_us, above 1 where ours is faster; or None.
    """

    size: int
    count: int
    dtype: str
    mode: str
    algorithm: str
    operations: int
    time_us: float
    algbw: float | None
    busbw: float | None
    wrong: int
    lax_time_us: float
    lax_wrong: int
    ratio: float | None

    def __str__(self) -> str:
        """Returns the row as the table shows it."""
        return (
            f"  {self.size:12} {self.count:12} {self.dtype:>9} | {self.algorithm:>9} "
            f"{self.time_us:10.2f} {_optional(self.algbw, 11)} {_optional(self.busbw, 11)} "
            f"{self.wrong:7} | {self.lax_time_us:12.2f} {self.lax_wrong:7} | "
            f"{_optional(self.ratio, 6)}"
        )


def _optional(value: float | None, width: int) -> str:
    """Formats a number that may be missing."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}.2f}"


# ---- Command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options, named as those of nccl-tests."""
    parser.add_argument(
        "-b", "--minbytes", type=parse_size, default="1K", help="smallest size (default 1K)"
    )
    parser.add_argument(
        "-e", "--maxbytes", type=parse_size, default="16M", help="largest size (default 16M)"
    )
    parser.add_argument(
        "-f",
        "--stepfactor",
        type=_integer_from(2),
        default=4,
        help="each size is this many times the one before (default 4)",
    )
    parser.add_argument(
        "-d",
        "--datatype",
        type=_parse_dtypes,
        default="bfloat16",
        help="dtypes by their JAX names, separated by commas (default bfloat16)",
    )
    parser.add_argument(
        "-n", "--iters", type=_integer_from(1), default=20, help="timed repetitions (default 20)"
    )
    parser.add_argument(
        "-w",
        "--warmup_iters",
        type=_integer_from(0),
        default=5,
        help="untimed repetitions before them (default 5)",
    )
    parser.add_argument(
        "-T",
        "--timeout",
        type=_integer_from(1),
        default=1800,
        help="time limit of each mode in seconds (default 1800)",
    )
    parser.add_argument(
        "--leaves",
        type=_integer_from(1),
        default=1,
        help="sum a pytree of so many arrays, whose bytes together are the size (default 1)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument(
        "--mode",
        choices=(_PROCESS_PER_DEVICE, _SINGLE_PROCESS, "both"),
        default="both",
        help="how processes and devices go together (default both)",
    )
    parser.add_argument(
        "--devices", type=_integer_from(1), help="number of devices (default all GPUs, or 2 CPUs)"
    )
    parser.add_argument("--platform", choices=("auto", "cpu", "gpu"), default="auto")


def parse_size(text: str) -> int:
    """Returns the bytes that "512", "4K", "1M" or "1G" stand for."""
    suffix = text[-1:].upper()
    factor = _SIZE_SUFFIXES.get(suffix, 1)
    digits = text[:-1] if suffix in _SIZE_SUFFIXES else text
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512, 4K, 1M or 1G")
    return int(digits) * factor


def _parse_dtypes(text: str) -> list[str]:
    """Splits a list of dtype names at its commas."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in _DTYPES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(_DTYPES)}")
    return names


def _integer_from(minimum: int) -> Callable[[str], int]:
    """Returns an argparse type for the integers that are not below the minimum."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    return integer


def sizes_between(first: int, last: int, factor: int) -> list[int]:
    """Returns the sizes from the first up to the last, each `factor` times the one before."""
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= factor
    return sizes


# ---- The parent


def run(arguments: argparse.Namespace) -> int:
    """Measures an operation in the chosen modes, prints the table and writes the JSON file.

    Args:
        arguments: What a parser set up by `add_arguments` returned.

    Returns:
        The exit code: 0 if every element was right in every mode.
    """
    gpus = _count_gpus()
    platform = arguments.platform
    if platform == "auto":
        platform = "gpu" if gpus and os.environ.get("JAX_PLATFORMS") != "cpu" else "cpu"
    devices = arguments.devices or (gpus if platform == "gpu" else 2)
    if platform == "gpu" and not 1 <= devices <= gpus:
        sys.stderr.write(f"this node has {gpus} visible GPUs, not {max(devices, 1)}\n")
        return 2
    both = (_PROCESS_PER_DEVICE, _SINGLE_PROCESS)
    modes = both if arguments.mode == "both" else (arguments.mode,)

    header: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for mode in modes:
        with tempfile.TemporaryDirectory(prefix="jax_intranode_bench_") as directory:
            settings = Settings(
                operation=arguments.operation,
                sizes=sizes_between(arguments.minbytes, arguments.maxbytes, arguments.stepfactor),
                leaves=arguments.leaves,
                dtypes=arguments.datatype,
                iterations=arguments.iters,
                warmup_iterations=arguments.warmup_iters,
                mode=mode,
                devices=devices,
                platform=platform,
                output=str(Path(directory) / "rows.json"),
            )
            try:
                result = _run_mode(settings, Path(directory), arguments.timeout)
            except launcher.RankError as error:
                sys.stderr.write(f"{error}\n")
                return 1
            header = result["header"]
            rows += result["rows"]

    if not rows:
        sys.stderr.write("no size from --minbytes to --maxbytes holds a whole element\n")
        return 2
    wrong = sum(row["wrong"] + row["lax_wrong"] for row in rows)
    print(f"# wrong elements: {wrong} {'FAILED' if wrong else 'OK'}", flush=True)
    if arguments.json is not None:
        result = {"version": 1, "header": {**header, "mode": arguments.mode}, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if wrong else 0


def _count_gpus() -> int:
    """Counts the NVIDIA GPUs that JAX would see, without starting JAX or CUDA in this process."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # NVML shows every GPU of the node, whatever this variable says.
        count = min(count, len([name for name in visible.split(",") if name.strip()]))
    return count


def _run_mode(settings: Settings, directory: Path, timeout_s: float) -> dict[str, Any]:
    """Runs the ranks of one mode and returns what rank 0 wrote: the header and the rows."""
    command = [
        *(sys.executable, "-X", "faulthandler", "-m", "jax_intranode._src.bench"),
        json.dumps(dataclasses.asdict(settings)),
    ]
    if settings.mode == _PROCESS_PER_DEVICE:
        port = launcher.free_port()
        env = [launcher.rank_env(rank, settings.devices, port) for rank in range(settings.devices)]
    else:
        env = [{}]
    if settings.platform == "cpu":
        # Takes precedence over the number of host devices in XLA_FLAGS.
        cpus = "1" if settings.mode == _PROCESS_PER_DEVICE else str(settings.devices)
        env = [{**of_rank, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": cpus} for of_rank in env]
    with _following(directory / "rank0.log"):
        launcher.run_ranks([command] * len(env), timeout_s=timeout_s, log_dir=directory, env=env)
    return json.loads(Path(settings.output).read_text())


@contextlib.contextmanager
def _following(path: Path) -> Iterator[None]:
    """Copies a file to stdout as it grows, so that the user sees each row when it is measured."""
    finished = threading.Event()

    def follow() -> None:
        position = 0
        last = False
        while not last:
            # Read once more after the end: the last lines may have come during the wait.
            last = finished.wait(0.1)
            if path.exists():
                with path.open(errors="replace") as log:
                    log.seek(position)
                    sys.stdout.write(log.read())
                    position = log.tell()
                sys.stdout.flush()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        finished.set()
        follower.join()


# ---- A rank


def _main() -> None:
    """What each rank runs: all measurements in the order in which every rank makes them."""
    settings = Settings(**json.loads(sys.argv[1]))
    rank = launcher.connect(settings.platform) if settings.mode == _PROCESS_PER_DEVICE else 0
    if jax.default_backend() != settings.platform:
        raise RuntimeError(f"wanted JAX on {settings.platform}, got {jax.default_backend()}")
    if any(jnp.dtype(name).itemsize == 8 for name in settings.dtypes):
        jax.config.update("jax_enable_x64", True)
    # Without explicit types the axis would be explicit, and shard_map would want typed operands.
    mesh = jax.make_mesh(
        (settings.devices,),
        ("x",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[: settings.devices],
    )
    header = _header(settings)
    if rank == 0:
        print(_format_header(header), flush=True)

    rows: list[Row] = []
    reasons: set[str] = set()
    for dtype_name in settings.dtypes:
        dtype = jnp.dtype(dtype_name)
        for size in settings.sizes:
            count = size // dtype.itemsize
            if count < settings.leaves or count % settings.devices != 0:
                continue
            row, reason = _measure(settings, mesh, dtype, count)
            rows.append(row)
            if rank == 0:
                if len(rows) == 1:
                    # Not before the first measurement, during which libraries log their start.
                    print(_COLUMNS, flush=True)
                if row.algorithm == "lax" and reason not in reasons:
                    print(f"# fell back to lax: {reason}", flush=True)
                    reasons.add(reason)
                print(row, flush=True)
    if rank == 0:
        result = {"header": header, "rows": [dataclasses.asdict(row) for row in rows]}
        Path(settings.output).write_text(json.dumps(result))


def _header(settings: Settings) -> dict[str, Any]:
    """Returns what a reader has to know to compare the numbers with others."""
    return {
        "jax": jax.__version__,
        "jaxlib": _version_of("jaxlib"),
        "jax_intranode": _version_of("jax-intranode"),
        "nccl": _version_of("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "platform": settings.platform,
        "device": jax.devices()[0].device_kind,
        "operation": settings.operation,
        "devices": settings.devices,
        "leaves": settings.leaves,
        "mode": settings.mode,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version_of(*distributions: str) -> str | None:
    """Returns the version of the first of these distributions that is installed."""
    for distribution in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def _format_header(header: dict[str, Any]) -> str:
    """Returns the lines above the table."""
    versions = ", ".join(
        f"{name} {header[name] or 'unknown'}"
        for name in ("jax", "jaxlib", "jax_intranode", "nccl")
        if name != "nccl" or header["platform"] == "gpu"
    )
    return "\n".join(
        (
            f"# {header['operation']}, {header['devices']} x {header['device']}, {header['mode']}, "
            f"{header['leaves']} array{'s' if header['leaves'] > 1 else ''} a call",
            f"# {versions}, {header['date']}",
            "# ratio = lax time / our time",
        )
    )


def _measure(settings: Settings, mesh: Mesh, dtype: np.dtype[Any], count: int) -> tuple[Row, str]:
    """Checks and times one size of one dtype.

    Returns:
        The row, and the reason why its algorithm was selected.
    """
    n = settings.devices
    size = count * dtype.itemsize
    sharding = NamedSharding(mesh, PartitionSpec("x"))

    def shard(index: Any) -> np.ndarray:
        return random_shard((index[0].start or 0) // count, size, dtype)

    whole = jax.make_array_from_callback((n * count,), sharding, shard)
    data = _program(mesh, lambda x: jnp.split(x, _cuts(count, settings.leaves)))(whole)

    # Lowering is where the ranks of a mesh meet, so only then is the selection final.
    operation = OPERATIONS[settings.operation]
    ours, lax = (
        _program(mesh, lambda xs, lib=lib: jnp.concatenate(operation(lib, xs)))(data)
        for lib in (jax_intranode, jax.lax)
    )
    selected = _selected(settings, mesh, [leaf.size // n for leaf in data], dtype)
    algorithms = {chosen.algorithm for chosen in selected}
    if algorithms == {"reduce_scatter", "all_gather"}:
        algorithm = "push"
    else:
        algorithm = algorithms.pop() if len(algorithms) == 1 else "mixed"
    expected, magnitude = oracle(random_shard(rank, size, dtype) for rank in range(n))
    lax_tolerance = _lax_tolerance(n, dtype, magnitude)
    our_tolerance = lax_tolerance if algorithm == "lax" else None
    wrong = _count_wrong_on_devices(ours, expected, our_tolerance)
    lax_wrong = _count_wrong_on_devices(lax, expected, lax_tolerance)

    time_us, lax_time_us = _time_us(settings, mesh, data, size)

    label = f"{dtype.name}/{size}"
    time_us = _max_over_ranks(f"{label}/time", time_us)
    lax_time_us = _max_over_ranks(f"{label}/lax_time", lax_time_us)
    algbw = size / time_us / 1e3 if time_us else None
    row = Row(
        size=size,
        count=count,
        dtype=dtype.name,
        mode=settings.mode,
        algorithm=algorithm,
        operations=len(selected),
        time_us=time_us,
        algbw=algbw,
        busbw=algbw * 2 * (n - 1) / n if algbw is not None else None,
        wrong=int(sum(_from_all_ranks(f"{label}/wrong", wrong))),
        lax_time_us=lax_time_us,
        lax_wrong=int(sum(_from_all_ranks(f"{label}/lax_wrong", lax_wrong))),
        ratio=lax_time_us / time_us if time_us else None,
    )
    return row, selected[0].reason


def _selected(
    settings: Settings, mesh: Mesh, counts: list[int], dtype: np.dtype[Any]
) -> list[select.Selection]:
    """Returns what each operation of ours runs as."""
    if settings.operation == "psum":
        shapes = [(count,) for count in counts]
        return [chosen for _, chosen in operations(mesh, ("x",), shapes, dtype)]
    return [
        collective.chooser(name, mesh, ("x",), dtype)(count // settings.devices * dtype.itemsize)
        for count in counts
        for name in ("psum_scatter", "all_gather")
    ]


# ---- Correctness


def random_shard(rank: int, size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns the data of one rank, which every rank can compute without being sent them.

    Args:
        rank: The rank whose data to make.
        size: Bytes of the data.
        dtype: A floating or integer dtype.
    """
    generator = np.random.default_rng((rank, size))
    count = size // dtype.itemsize
    if jnp.issubdtype(dtype, jnp.integer):
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    accumulator = _accumulator(dtype)
    return (generator.random(count, dtype=accumulator) * 2 - 1).astype(dtype)


def _accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which a sum of this dtype is accumulated."""
    if jnp.issubdtype(dtype, jnp.integer) or dtype == np.float64:
        return dtype
    return np.dtype(np.float32)


def oracle(shards: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Computes the one right result of a psum, bit for bit.

    The sum starts from rank 0's value, adds the others in rank order, and is rounded once.

    Args:
        shards: The data of each rank, in rank order.

    Returns:
        The result, and the sum of the absolute values, to which a bound on the error of other
        orders of adding is proportional.
    """
    iterator = iter(shards)
    first = next(iterator)
    total = first.astype(_accumulator(first.dtype))
    magnitude = np.abs(first.astype(np.float64))
    for shard in iterator:
        total = total + shard.astype(total.dtype)
        magnitude += np.abs(shard.astype(np.float64))
    return total.astype(first.dtype), magnitude


def _lax_tolerance(n: int, dtype: np.dtype[Any], magnitude: np.ndarray) -> np.ndarray:
    """Returns how far a result that adds in any order and rounds at each step may be off."""
    if jnp.issubdtype(dtype, jnp.integer):
        return np.zeros_like(magnitude)
    return n * float(jnp.finfo(dtype).eps) * magnitude


def count_wrong(got: np.ndarray, expected: np.ndarray, tolerance: np.ndarray | None) -> int:
    """Counts the wrong elements of one device's result.

    Args:
        got: The result.
        expected: What it should be.
        tolerance: How far each element may be off; None to compare bits, where NaN equals NaN.
    """
    if tolerance is None:
        bits = f"u{got.dtype.itemsize}"
        both_nan = np.isnan(got) & np.isnan(expected)
        right = (got.view(bits) == expected.view(bits)) | both_nan
    elif jnp.issubdtype(got.dtype, jnp.integer):
        right = got == expected
    else:
        off = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        right = off <= tolerance  # False for NaN.
    return int(np.count_nonzero(~right))


def _count_wrong_on_devices(
    result: jax.Array, expected: np.ndarray, tolerance: np.ndarray | None
) -> int:
    """Counts the wrong elements over this process's devices, each of which has its own result."""
    shards = [np.asarray(shard.data) for shard in result.addressable_shards]
    return sum(count_wrong(got, expected, tolerance) for got in shards)


# ---- Timing


def _cuts(count: int, leaves: int) -> list[int]:
    """Returns where to cut an array into that many leaves, whose sizes are as 1 : 2 : 3 : 4."""
    ends = np.cumsum([1 + k % 4 for k in range(leaves)])
    return [int(count * end // ends[-1]) for end in ends[:-1]]


def _program(mesh: Mesh, body: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of per-device arrays for all devices of the mesh."""
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec("x"),
            check_vma=False,
        )
    )


def _chain(mesh: Mesh, operation: Callable[[Any], Any], length: int) -> _Program:
    """Returns a program that applies the operation many times, each to the last one's result.

    The multiply keeps sums from growing, and the barrier keeps the links of the chain apart. Both
    cost time, which `_time_us` takes off again.
    """

    def body(xs: list[jax.Array], scale: jax.Array) -> list[jax.Array]:
        for _ in range(length):
            xs = jax.lax.optimization_barrier([x * scale for x in operation(xs)])
        return xs

    return _program(mesh, body)


def _time_us(
    settings: Settings, mesh: Mesh, data: list[jax.Array], size: int
) -> tuple[float, float]:
    """Measures, on this rank, the time of one call of ours and of lax's in microseconds."""
    n = settings.devices
    operation = OPERATIONS[settings.operation]
    dtype = data[0].dtype
    # Long chains on GPUs: one process launches on all of them, and a short program ends before the
    # next one has been launched.
    if settings.platform == "cpu":
        length, calls = (32 if size < 1 << 20 else 4), 4
    else:
        length, calls = (256 if size < 1 << 20 else 64 if size < 16 << 20 else 16), 5
    if len(data) > 1:
        # The program grows with the leaves, and so does the time that one link takes.
        length = max(4, min(length, 1024 // len(data)))

    def scale(value: float) -> jax.Array:
        shard = np.full((1,), value, dtype)
        return jax.make_array_from_callback((n,), data[0].sharding, lambda index: shard)

    one = scale(1)
    mean = one if jnp.issubdtype(dtype, jnp.integer) else scale(1 / n)
    # Where nothing is summed, multiplying by 1/n would end in subnormal numbers, a slow path on
    # some devices.
    runs: tuple[tuple[_Program, jax.Array], ...] = (
        (_chain(mesh, partial(operation, jax_intranode), length), mean),
        (_chain(mesh, partial(operation, jax.lax), length), mean),
        (_chain(mesh, lambda x: x, length), one),
    )
    align = _program(mesh, lambda x: jax.lax.psum(x, "x"))
    for program, factor in runs:
        jax.block_until_ready(program(data, factor))  # Compiles, also without warm-up.
    seconds: tuple[list[float], ...] = ([], [], [])
    for repetition in range(-settings.warmup_iterations, settings.iterations):
        # Another one goes first each time, so that a drift or an after-effect hits all alike.
        for turn in range(len(runs)):
            which = (repetition + turn) % len(runs)
            program, factor = runs[which]
            # Ranks drift apart while they do not communicate; who starts early would wait, and the
            # wait would be charged to the collective.
            align(one).block_until_ready()
            start = time.perf_counter()
            for _ in range(calls):
                result = program(data, factor)
            jax.block_until_ready(result)
            if repetition >= 0:
                seconds[which].append(time.perf_counter() - start)
    ours, lax, empty = (statistics.median(times) / (calls * length) * 1e6 for times in seconds)
    return max(ours - empty, 0.0), max(lax - empty, 0.0)


# ---- Numbers of all ranks


def _from_all_ranks(name: str, value: float) -> list[float]:
    """Returns every rank's value; without `jax.distributed`, this process's only.

    Args:
        name: Says which value this is; each name may be used once.
        value: This rank's value.
    """
    client = compat.key_value_client()
    if client is None:
        return [value]
    prefix = f"jax_intranode/bench/{name}"
    client.key_value_set(f"{prefix}/{jax.process_index()}", repr(value))
    return [
        float(client.blocking_key_value_get(f"{prefix}/{rank}", _GATHER_TIMEOUT_MS))
        for rank in range(jax.process_count())
    ]


def _max_over_ranks(name: str, value: float) -> float:
    """Returns the largest value of all ranks, since an operation is done when the last one is."""
    return max(_from_all_ranks(name, value))


if __name__ == "__main__":
    _main()
