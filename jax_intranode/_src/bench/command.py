"""The command `bench`: its options, and the parent process that starts the ranks."""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jax_intranode._src import config, launcher
from jax_intranode._src.bench import record
from jax_intranode._src.bench.collectives import report as collectives
from jax_intranode._src.bench.collectives.operations import OPERATIONS
from jax_intranode._src.bench.matmuls import report as matmuls
from jax_intranode._src.bench.matmuls import shapes as matmul_shapes
from jax_intranode._src.bench.matmuls.operations import MATMULS
from jax_intranode._src.bench.peers import registry as peers
from jax_intranode._src.bench.peers.registry import PEERS
from jax_intranode._src.bench.plots import command as plot
from jax_intranode._src.bench.programs.definitions import PROGRAMS
from jax_intranode._src.bench.progress import ProgressLine, following
from jax_intranode._src.bench.settings import MODES, PROCESS_PER_DEVICE, Settings, Shape

_DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)

_MATMUL_DTYPES = ("bfloat16", "float16", "float32")

_SIZE_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


# Options.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options, named as those of nccl-tests where these have them."""
    names = (*OPERATIONS, *MATMULS, *PROGRAMS)
    add = parser.add_argument
    add("name", choices=names, metavar="NAME", help=f"what to measure: {', '.join(names)}")
    add("-b", "--minbytes", type=parse_size, default="1K", help="smallest size (default 1K)")
    add(
        "-e",
        "--maxbytes",
        type=parse_size,
        help="largest size (default 16M on GPUs, 64K on CPUs)",
    )
    add(
        "-f",
        "--stepfactor",
        type=_integer_from(2),
        default=4,
        help="each size is this many times the one before (default 4)",
    )
    add(
        "--shapes",
        type=matmul_shapes.parse,
        metavar="M,K,N[;M,K,N...]",
        help="shapes of a collective matmul as one device multiplies them",
    )
    add(
        "--preset",
        type=_parse_presets,
        default=[],
        help=f"shapes by name: {', '.join(matmul_shapes.PRESETS)} (default reference on GPUs, "
        "tiny on CPUs)",
    )
    add(
        "--backward",
        action="store_true",
        help="measure the backward pass of a collective matmul",
    )
    add(
        "--plan",
        type=_parse_plan,
        metavar="N,N[,N,N[,N...]]",
        help="cut a collective matmul so, whatever is faster: pieces of the first and of the last "
        "rows, or 1,1 and columns of the tiles, pairs of them and parts of one kernel, 1 if it "
        "sends products directly, rounds, 1 if it computes derivatives by matrices too, and pairs "
        "before them",
    )
    add(
        "-d",
        "--datatype",
        type=_parse_dtypes,
        default="bfloat16",
        help="dtypes by their JAX names, separated by commas (default bfloat16)",
    )
    add("-n", "--iters", type=_integer_from(1), default=20, help="timed repetitions (default 20)")
    add(
        "-w",
        "--warmup_iters",
        type=_integer_from(0),
        default=5,
        help="untimed repetitions before them (default 5)",
    )
    add(
        "-T",
        "--timeout",
        type=_integer_from(1),
        default=1800,
        help="time limit of each mode, and of each peer, in seconds (default 1800)",
    )
    add(
        "--leaves",
        type=_integer_from(1),
        default=1,
        help="take a pytree of so many arrays, whose bytes together are the size (default 1)",
    )
    add(
        "--chain",
        type=_integer_from(1),
        help="calls in a row of one repetition (default 2 to 256, by platform and size)",
    )
    add(
        "--settle",
        type=_integer_from(0),
        metavar="MS",
        help="milliseconds for which a collective matmul is called, untimed, right before each of "
        "its repetitions, and a program for one more repetition if not 0 (default 150 on GPUs: so "
        "long it takes until power bounds their clocks; 0 on CPUs)",
    )
    add(
        "--algorithm",
        choices=config.ALGORITHMS,
        help="sets JAX_INTRANODE_ALGORITHM (default: as in the environment)",
    )
    add(
        "--latency-hiding",
        choices=("on", "off"),
        help="sets XLA's latency-hiding scheduler (default: XLA's)",
    )
    add(
        "--mode",
        choices=(*MODES, "both"),
        default="both",
        help="how processes and devices go together (default both)",
    )
    add("--devices", type=_integer_from(1), help="number of devices (default all GPUs, or 2 CPUs)")
    add("--platform", choices=("auto", "cpu", "gpu"), default="auto")
    add(
        "--peers",
        type=_parse_peers,
        default=[],
        help=f"other libraries to measure: {', '.join(PEERS)} or all (default none)",
    )
    add("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    add("--plot", type=Path, metavar="FILE.png", help="also draw the rows")


def _refusal(arguments: argparse.Namespace) -> str | None:
    """Returns why these options can't go together, or can't be served here; None if they can."""
    name = arguments.name
    if name in PROGRAMS and (arguments.peers or arguments.plot):
        return f"--peers and --plot are for operations, not for the program {name}"
    if name in MATMULS:
        if arguments.leaves > 1:
            return f"--leaves: {name} is measured with one x and one w"
        others = [dtype for dtype in arguments.datatype if dtype not in _MATMUL_DTYPES]
        if others:
            return f"{name} of {others[0]}: choose from {', '.join(_MATMUL_DTYPES)} with -d"
    elif arguments.shapes or arguments.preset or arguments.backward or arguments.plan:
        options = "--shapes, --preset, --backward and --plan"
        return f"{options} are for {', '.join(MATMULS)}, not for {name}"
    elif arguments.settle is not None and name not in PROGRAMS:
        return f"--settle is for collective matmuls and programs, not for {name}"
    elif arguments.leaves > 1 and name in ("psum_scatter", "all_gather"):
        return f"--leaves: {name} is measured with one array"
    if name == "pmean":
        integers = [d for d in arguments.datatype if jnp.issubdtype(jnp.dtype(d), jnp.integer)]
        if integers:
            return f"pmean of {integers[0]} is a float: choose floating dtypes with -d"
    for file in (arguments.json, arguments.plot):
        if file is not None and not file.absolute().parent.is_dir():
            return f"{file}: no such directory"
    return plot.why_not() if arguments.plot else None


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
    return _parse_list(text, _DTYPES)


def _parse_peers(text: str) -> list[str]:
    """Splits a list of peers at its commas."""
    return list(PEERS) if text == "all" else _parse_list(text, (*PEERS, "all"))


def _parse_presets(text: str) -> list[str]:
    """Splits a list of presets at its commas."""
    return _parse_list(text, matmul_shapes.PRESETS)


def _parse_plan(text: str) -> list[int]:
    """Splits the numbers of a plan at their commas."""
    numbers = [int(number) for number in text.split(",")]
    if len(numbers) not in (2, *range(4, 11)) or min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers, or four to ten")
    if max(numbers[5:8:2], default=0) > 1:
        raise argparse.ArgumentTypeError(
            f"the sixth and the eighth number of {text!r} must be 0 or 1"
        )
    if min(numbers[6:7], default=1) < 1:
        raise argparse.ArgumentTypeError(f"the seventh number of {text!r} must not be 0")
    return numbers


def _parse_list(text: str, allowed: Sequence[str]) -> list[str]:
    """Splits a list of names at its commas."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
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


# The parent.


def _end(signal_number: int, frame: object) -> None:
    """Ends as by sys.exit, which takes the ranks along."""
    del frame
    signal.signal(signal_number, signal.SIG_IGN)  # a second one would leave ranks behind
    sys.exit(128 + signal_number)


def run(arguments: argparse.Namespace) -> int:
    """Measures in the chosen modes, prints the tables and writes the files.

    Args:
        arguments: What a parser set up by `add_arguments` returned.

    Returns:
        The exit code: 0 if every element was right in every mode.
    """
    signal.signal(signal.SIGTERM, _end)
    gpus = _count_gpus()
    platform = arguments.platform
    if platform == "auto":
        platform = "gpu" if gpus and os.environ.get("JAX_PLATFORMS") != "cpu" else "cpu"
    devices = arguments.devices or (gpus if platform == "gpu" else 2)
    refusal = _refusal(arguments)
    if platform == "gpu" and not 1 <= devices <= gpus:
        refusal = f"this node has {gpus} visible GPUs, not {max(devices, 1)}"
    modes = MODES if arguments.mode == "both" else (arguments.mode,)
    shapes: list[Shape] = []
    if refusal is None and arguments.name in MATMULS:
        try:
            shapes = _shapes(arguments, platform, devices)
        except ValueError as error:
            refusal = str(error)
    settings = [_settings(arguments, mode, platform, devices, shapes) for mode in modes]
    if arguments.name in OPERATIONS and not settings[0].measurements():
        refusal = refusal or "no size from --minbytes to --maxbytes holds a whole element a device"
    if refusal is not None:
        sys.stderr.write(f"{refusal}\n")
        return 2

    result: dict[str, Any] = {"version": record.VERSION, "header": {}, "rows": []}
    line = ProgressLine(sys.stderr, _count_measurements(settings, arguments.peers))
    for of_mode in settings:
        try:
            measured = _run_mode(of_mode, _environment(arguments), arguments.timeout, line)
        except launcher.RankError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        result["header"] = {**measured["header"], "mode": arguments.mode}
        result["rows"] += measured["rows"]
    result["peers"] = peers.measure(arguments.peers, settings[0], arguments.timeout, line)
    if result["peers"]["rows"]:
        format_table = (matmuls if shapes else collectives).format_peers
        print(format_table(result["peers"], result["rows"]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.plot is not None:
        plot.draw([result], arguments.plot)
    return (_verdict_of_programs if arguments.name in PROGRAMS else _verdict)(result)


def _shapes(arguments: argparse.Namespace, platform: str, devices: int) -> list[Shape]:
    """Returns which shapes of a collective matmul the options ask for.

    Raises:
        ValueError: the devices can't share one of them.
    """
    presets = arguments.preset
    if not presets and not arguments.shapes:
        presets = ["reference" if platform == "gpu" else "tiny"]
    of_presets = matmul_shapes.of_presets(presets, arguments.name, devices)
    shapes = list(dict.fromkeys([*(arguments.shapes or []), *of_presets]))
    matmul_shapes.check(arguments.name, shapes, devices)
    return shapes


def _settings(
    arguments: argparse.Namespace,
    mode: str,
    platform: str,
    devices: int,
    shapes: Sequence[Shape],
) -> Settings:
    """Returns what the options say of a mode."""
    return Settings(
        name=arguments.name,
        sizes=sizes_between(
            arguments.minbytes,
            arguments.maxbytes or parse_size("64K" if platform == "cpu" else "16M"),
            arguments.stepfactor,
        ),
        leaves=arguments.leaves,
        dtypes=arguments.datatype,
        iterations=arguments.iters,
        warmup_iterations=arguments.warmup_iters,
        chain=arguments.chain,
        mode=mode,
        devices=devices,
        platform=platform,
        shapes=[list(shape) for shape in shapes],
        backward=arguments.backward,
        plan=arguments.plan,
        settle_ms=_settle_ms(arguments, platform),
    )


def _settle_ms(arguments: argparse.Namespace, platform: str) -> int:
    if arguments.settle is not None:
        return int(arguments.settle)
    settles = arguments.name in MATMULS or arguments.name in PROGRAMS
    return 150 if settles and platform == "gpu" else 0


def _count_measurements(settings: Sequence[Settings], peer_names: Sequence[str]) -> int:
    """Returns the number of measurements that the progress line counts."""
    if settings[0].name in PROGRAMS:
        return len(settings)
    measurements = settings[0].matmuls() or settings[0].measurements()
    return len(settings) * len(measurements) + peers.count(peer_names, settings[0])


def _print_errors(rows: Sequence[dict[str, Any]]) -> None:
    """Says how far both libraries' results are from those in float64, the worst of each dtype."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        rounded = [row for row in rows if row["dtype"] == dtype and row["error"] is not None]
        if rounded:
            ours, lax = (max(row[key] for row in rounded) for key in ("error", "lax_error"))
            print(f"# {dtype} against float64 (rms, relative): ours {ours:.2e}, lax {lax:.2e}")


def _verdict(result: dict[str, Any]) -> int:
    """Says whether every element was right, and returns the exit code."""
    _print_errors(result["rows"])
    columns = ("wrong", "lax_wrong", "graph_wrong")
    wrong = sum(row.get(column) or 0 for row in result["rows"] for column in columns)
    print(f"# wrong elements: {wrong} {'FAILED' if wrong else 'OK'}", flush=True)
    return 1 if wrong else 0


def _verdict_of_programs(result: dict[str, Any]) -> int:
    """Says whether both libraries gave finite numbers, and returns the exit code."""
    finite = all(row["difference"] is not None for row in result["rows"])
    print(f"# results are finite numbers: {'OK' if finite else 'FAILED'}", flush=True)
    return 0 if finite else 1


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


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the variables that the options set for the ranks."""
    variables = {}
    if arguments.algorithm is not None:
        variables["JAX_INTRANODE_ALGORITHM"] = arguments.algorithm
    if arguments.latency_hiding is not None:
        value = "true" if arguments.latency_hiding == "on" else "false"
        flag = f"--xla_gpu_enable_latency_hiding_scheduler={value}"
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    return variables


def _run_mode(
    settings: Settings, variables: dict[str, str], timeout_s: float, line: ProgressLine
) -> dict[str, Any]:
    """Runs the ranks of one mode and returns what rank 0 wrote: the header and the rows."""
    env = [variables]
    if settings.mode == PROCESS_PER_DEVICE:
        port = launcher.free_port()
        env = [
            {**variables, **launcher.rank_env(rank, settings.devices, port)}
            for rank in range(settings.devices)
        ]
    if settings.platform == "cpu":
        # Takes precedence over the number of host devices in XLA_FLAGS.
        cpus = "1" if settings.mode == PROCESS_PER_DEVICE else str(settings.devices)
        env = [{**of_rank, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": cpus} for of_rank in env]
    with tempfile.TemporaryDirectory(prefix="jax_intranode_bench_") as name:
        directory = Path(name)
        output, begun = directory / "rows.json", directory / "begun"
        command = [
            *(sys.executable, "-X", "faulthandler", "-m", "jax_intranode._src.bench.rank"),
            *(settings.to_json(), str(output), str(begun)),
        ]
        with following(directory / "rank0.log", begun, line):
            launcher.run_ranks(
                [command] * len(env), timeout_s=timeout_s, log_dir=directory, env=env
            )
        return json.loads(output.read_text())
