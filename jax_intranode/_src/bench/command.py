"""The command `bench`: its options, and the parent process, which starts the ranks."""

import argparse
import dataclasses
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
from jax_intranode._src.overlap.plan import describe_fields as describe_plan_fields
from jax_intranode._src.overlap.plan import parse as parse_plan

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
    """Adds the benchmark's options. Those that nccl-tests has too have the same names."""
    names = (*OPERATIONS, *MATMULS, *PROGRAMS)
    add = parser.add_argument
    add("name", choices=names, metavar="NAME", help=f"what to measure: {', '.join(names)}")
    add(
        "-b",
        "--minbytes",
        type=parse_size,
        default="1K",
        help="smallest size in bytes (default 1K)",
    )
    add(
        "-e",
        "--maxbytes",
        type=parse_size,
        help="largest size in bytes (default 16M on GPUs, 64K on CPUs)",
    )
    add(
        "-f",
        "--stepfactor",
        type=_integer_from(2),
        default=4,
        help="factor between two sizes (default 4)",
    )
    add(
        "--shapes",
        type=matmul_shapes.parse,
        metavar="M,K,N[;M,K,N...]",
        help="shapes of a collective matmul: the product [M, K] x [K, N] that one device computes",
    )
    add(
        "--preset",
        type=_parse_presets,
        default=[],
        metavar="NAME[,NAME...]",
        help=f"named lists of shapes: {', '.join(matmul_shapes.PRESETS)} (default reference on "
        "GPUs, tiny on CPUs)",
    )
    add(
        "--backward",
        action="store_true",
        help="measure the backward pass of a collective matmul",
    )
    add(
        "--plan",
        type=_parse_plan,
        metavar="NAME=VALUE[,NAME=VALUE...]",
        help="force the plan of an overlapped matmul, whether or not it is the fastest. Its fields "
        f"and their defaults: {describe_plan_fields()}",
    )
    add(
        "-d",
        "--datatype",
        type=_parse_dtypes,
        default="bfloat16",
        help="JAX names of dtypes, separated by commas (default bfloat16)",
    )
    add("-n", "--iters", type=_integer_from(1), default=20, help="timed repetitions (default 20)")
    add(
        "-w",
        "--warmup_iters",
        type=_integer_from(0),
        default=5,
        help="untimed repetitions before the timed ones (default 5)",
    )
    add(
        "-T",
        "--timeout",
        type=_integer_from(1),
        default=1800,
        help="time limit in seconds for each mode and each peer (default 1800)",
    )
    add(
        "--leaves",
        type=_integer_from(1),
        default=1,
        metavar="COUNT",
        help="call the collective with a pytree of COUNT arrays; the size is that of all arrays "
        "together (default 1)",
    )
    add(
        "--chain",
        type=_integer_from(1),
        metavar="COUNT",
        help="calls in a row in one compiled program (default 2 to 256, by platform and size)",
    )
    add(
        "--settle",
        type=_integer_from(0),
        metavar="MS",
        help="run a collective matmul for MS milliseconds before each of its repetitions, until "
        "the GPU's clock has settled under sustained power draw; a program runs for one untimed "
        "repetition unless MS is 0 (default 150 on GPUs, 0 on CPUs)",
    )
    add(
        "--algorithm",
        choices=config.ALGORITHMS,
        help="set JAX_INTRANODE_ALGORITHM (default: as in the environment)",
    )
    add(
        "--latency-hiding",
        choices=("on", "off"),
        help="switch XLA's latency-hiding scheduler on or off (default: XLA's default)",
    )
    add(
        "--mode",
        choices=(*MODES, "both"),
        default="both",
        help="one process per device, a single process for all devices, or both (default both)",
    )
    add(
        "--devices",
        type=_integer_from(1),
        help="number of devices (default all GPUs, or 2 CPU devices)",
    )
    add(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto chooses GPUs if there are any (default auto)",
    )
    add(
        "--peers",
        type=_parse_peers,
        default=[],
        metavar="NAME[,NAME...]",
        help=f"other libraries to measure too: {', '.join(PEERS)}, or all (default none)",
    )
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add("--plot", type=Path, metavar="FILE.png", help="plot the results (needs matplotlib)")


def _refusal(arguments: argparse.Namespace) -> str | None:
    """Returns why these options contradict each other or can't work here; None if they are fine."""
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
    try:
        config.parse({**os.environ, **_environment(arguments)})
    except ValueError as error:
        return str(error)
    return plot.why_not() if arguments.plot else None


def _refusal_of_devices(platform: str, devices: int, gpus: int) -> str | None:
    """Returns why there are too few devices; None if there are enough."""
    if platform != "gpu" or 1 <= devices <= gpus:
        return None
    if gpus == 0:
        return (
            "JAX would find no NVIDIA GPU here (by NVML and CUDA_VISIBLE_DEVICES): choose "
            "--platform cpu"
        )
    return f"this node has {gpus} visible GPUs, not {devices}: choose --devices {gpus} or less"


def _refusal_of_sizes(arguments: argparse.Namespace, settings: Settings) -> str | None:
    """Returns why there is no size of a collective to measure; None if there is one."""
    smallest, largest = arguments.minbytes, _largest_size(arguments, settings.platform)
    if smallest > largest:
        default = "" if arguments.maxbytes else " (the default)"
        return (
            f"--minbytes {size_text(smallest)} is above --maxbytes {size_text(largest)}{default}: "
            "choose a smaller -b or a larger -e"
        )
    if settings.measurements():
        return None
    return (
        f"none of the sizes {', '.join(map(size_text, settings.sizes))} holds a whole number of "
        f"elements of {' or '.join(settings.dtypes)} for each of {settings.devices} devices: "
        "choose other sizes with -b, -e and -f"
    )


def parse_size(text: str) -> int:
    """Returns the number of bytes that a text such as "512", "4K", "1M" or "1G" means."""
    suffix = text[-1:].upper()
    factor = _SIZE_SUFFIXES.get(suffix, 1)
    digits = text[:-1] if suffix in _SIZE_SUFFIXES else text
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512, 4K, 1M or 1G")
    return int(digits) * factor


def size_text(size: int) -> str:
    """Returns the shortest text that `parse_size` reads as this number of bytes."""
    for suffix, factor in reversed(_SIZE_SUFFIXES.items()):
        if size % factor == 0:
            return f"{size // factor}{suffix}"
    return str(size)


def _parse_dtypes(text: str) -> list[str]:
    """Returns the dtype names of a comma-separated list."""
    return _parse_list(text, _DTYPES)


def _parse_peers(text: str) -> list[str]:
    """Returns the peers of a comma-separated list."""
    return list(PEERS) if text == "all" else _parse_list(text, (*PEERS, "all"))


def _parse_presets(text: str) -> list[str]:
    """Returns the presets of a comma-separated list."""
    return _parse_list(text, matmul_shapes.PRESETS)


def _parse_plan(text: str) -> dict[str, int]:
    """Returns the fields of the plan that "tile_columns=192,direct=1" stands for."""
    try:
        return dataclasses.asdict(parse_plan(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_list(text: str, allowed: Sequence[str]) -> list[str]:
    """Returns the names of a comma-separated list, each once."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
    return names


def _integer_from(minimum: int) -> Callable[[str], int]:
    """Returns an argparse type for integers of at least this minimum."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    return integer


def sizes_between(first: int, last: int, factor: int) -> list[int]:
    """Returns the sizes from the first up to the last, each `factor` times the previous one."""
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= factor
    return sizes


# The parent process.


def _end(signal_number: int, frame: object) -> None:
    """Ends the process by sys.exit, so that the ranks are ended too."""
    del frame
    signal.signal(signal_number, signal.SIG_IGN)  # a second signal would leave ranks behind
    sys.exit(128 + signal_number)


def run(arguments: argparse.Namespace) -> int:
    """Measures in the chosen modes, prints the tables and writes the files.

    Args:
        arguments: the arguments as parsed by a parser that `add_arguments` has set up.

    Returns:
        The exit code: 0 if all elements were right in all modes, 1 if one was wrong or a rank
        failed, 2 if the options can't be served.
    """
    signal.signal(signal.SIGTERM, _end)
    gpus, driver = _gpus_and_driver()
    platform = arguments.platform
    if platform == "auto":
        platform = "gpu" if gpus and os.environ.get("JAX_PLATFORMS") != "cpu" else "cpu"
    devices = arguments.devices or (gpus if platform == "gpu" else 2)
    try:
        refusal = _refusal(arguments) or _refusal_of_devices(platform, devices, gpus)
        shapes: list[Shape] = []
        if refusal is None and arguments.name in MATMULS:
            shapes = _shapes(arguments, platform, devices)
    except ValueError as error:
        refusal = str(error)
    modes = MODES if arguments.mode == "both" else (arguments.mode,)
    if refusal is None:
        settings = [_settings(arguments, mode, platform, devices, shapes) for mode in modes]
        if arguments.name in OPERATIONS:
            refusal = _refusal_of_sizes(arguments, settings[0])
    if refusal is not None:
        sys.stderr.write(f"{refusal}\n")
        return 2

    result: dict[str, Any] = {"version": record.VERSION, "header": {}, "rows": []}
    line = ProgressLine(sys.stderr, _count_measurements(settings, arguments.peers))
    for settings_of_mode in settings:
        try:
            measured = _run_mode(settings_of_mode, _environment(arguments), arguments.timeout, line)
        except launcher.RankError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        result["header"] = {
            **measured["header"],
            "mode": arguments.mode,
            "driver": driver,
            "command": record.command_line(sys.argv),
        }
        result["rows"] += measured["rows"]
    result["peers"] = peers.measure(arguments.peers, settings[0], arguments.timeout, line)
    if result["peers"]["rows"]:
        report = matmuls if shapes else collectives
        print(report.format_peers(result["peers"], result["rows"]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.plot is not None:
        plot.draw([result], arguments.plot)
    return (_verdict_of_programs if arguments.name in PROGRAMS else _verdict)(result)


def _shapes(arguments: argparse.Namespace, platform: str, devices: int) -> list[Shape]:
    """Returns the shapes of a collective matmul that the options ask for.

    Raises:
        ValueError: a shape can't be divided among the devices.
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
    """Returns the settings for one mode."""
    return Settings(
        name=arguments.name,
        sizes=sizes_between(
            arguments.minbytes,
            _largest_size(arguments, platform),
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


def _largest_size(arguments: argparse.Namespace, platform: str) -> int:
    return arguments.maxbytes or parse_size("64K" if platform == "cpu" else "16M")


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
    """Prints, for each dtype, the largest error of both libraries against float64."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        rounded = [row for row in rows if row["dtype"] == dtype and row["error"] is not None]
        if rounded:
            ours, lax = (max(row[key] for row in rounded) for key in ("error", "lax_error"))
            print(f"# {dtype}: relative rms error against float64: ours {ours:.2e}, lax {lax:.2e}")


def _verdict(result: dict[str, Any]) -> int:
    """Prints whether all elements were right, and returns the exit code."""
    _print_errors(result["rows"])
    columns = ("wrong", "lax_wrong", "graph_wrong")
    wrong = sum(row.get(column) or 0 for row in result["rows"] for column in columns)
    print(f"# wrong elements: {wrong} {'FAILED' if wrong else 'OK'}", flush=True)
    return 1 if wrong else 0


def _verdict_of_programs(result: dict[str, Any]) -> int:
    """Prints whether both libraries returned finite numbers, and returns the exit code."""
    finite = all(row["difference"] is not None for row in result["rows"])
    print(f"# results are finite numbers: {'OK' if finite else 'FAILED'}", flush=True)
    return 0 if finite else 1


def _gpus_and_driver() -> tuple[int, str | None]:
    """Returns the number of NVIDIA GPUs that JAX would see, and the driver's version.

    Asks NVML, because this process must start neither JAX nor CUDA.
    """
    try:
        import pynvml
    except ImportError:
        return 0, None
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0, None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # NVML ignores this variable.
        count = min(count, len([name for name in visible.split(",") if name.strip()]))
    return count, driver


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the environment variables that the options set for the ranks."""
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
    """Runs the ranks of one mode and returns the "header" and the "rows" that rank 0 wrote."""
    env = [variables]
    if settings.mode == PROCESS_PER_DEVICE:
        port = launcher.free_port()
        env = [
            {**variables, **launcher.rank_env(rank, settings.devices, port)}
            for rank in range(settings.devices)
        ]
    if settings.platform == "cpu":
        # JAX_NUM_CPU_DEVICES overrides the number of host devices in XLA_FLAGS.
        cpus = "1" if settings.mode == PROCESS_PER_DEVICE else str(settings.devices)
        env = [{**rank, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": cpus} for rank in env]
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
