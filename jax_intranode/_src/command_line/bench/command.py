"""The command `bench`: its options, and the parent process, which starts the ranks."""

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jax_intranode._src import timeouts
from jax_intranode._src.command_line import machine, options
from jax_intranode._src.command_line.bench import report
from jax_intranode._src.command_line.bench import settings as of_bench
from jax_intranode._src.command_line.bench.operations import MATMULS, OPERATIONS, Shape
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher import runs
from jax_intranode._src.command_line.options import WrongInput
from jax_intranode._src.native import definitions
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.selection import config
from jax_intranode._src.selection.overlap.plan import describe_fields as describe_plan_fields
from jax_intranode._src.selection.overlap.plan import parse as parse_plan

DESCRIPTION = (
    "Times an operation of this package and the same one of jax.lax, and checks the results of "
    "both. Starts a process per device and then one process with all devices."
)
EXAMPLES = """\
python -m jax_intranode bench psum                                all sizes up to 16 MB (CPU: 64 KB)
python -m jax_intranode bench psum -b 1K -e 64K -f 2 -d float32,bfloat16
python -m jax_intranode bench all_gather_matmul --shapes 4096,8192,3584 --json rows.json
python -m jax_intranode bench psum --platform cpu --devices 4"""

_DTYPES = (
    *("bfloat16", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
_MATMUL_DTYPES = ("bfloat16", "float16", "float32")
_SIZE_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_name(text: str, others: Iterable[str] = ()) -> str:
    """An argparse type for the name of an operation. `others` are named in the message, too."""
    names = (*OPERATIONS, *MATMULS)
    if text not in names:
        raise WrongInput(f"{text!r} is none of {', '.join((*names, *others))}")
    return text


def add_arguments(
    parser: argparse.ArgumentParser,
    type_of_name: Callable[[str], str] = parse_name,
    other_names: str = "",
) -> None:
    """Adds the benchmark's options. Those that nccl-tests has too have the same names.

    `type_of_name` is the argparse type of NAME, and `other_names` what its help says besides.
    """
    add = parser.add_argument
    positive, natural = options.integer_from(1), options.integer_from(0)
    text = f"what to measure: {', '.join((*OPERATIONS, *MATMULS))}{other_names}"
    add("name", type=type_of_name, metavar="NAME", help=text)
    text = "smallest size in bytes (default 1K)"
    add("-b", "--minbytes", type=parse_size, default="1K", help=text)
    text = "largest size in bytes (default 16M on GPUs, 64K on CPUs)"
    add("-e", "--maxbytes", type=parse_size, help=text)
    text = "factor between two sizes (default 4)"
    add("-f", "--stepfactor", type=options.integer_from(2), default=4, help=text)
    text = "shapes of a collective matmul: the product [M, K] x [K, N] that one device computes"
    add("--shapes", type=of_bench.parse_shapes, metavar="M,K,N[;M,K,N...]", help=text)
    names, presets = "NAME[,NAME...]", of_bench.PRESETS
    text = f"named lists of shapes: {', '.join(presets)} (default reference on GPUs, tiny on CPUs)"
    add("--preset", type=options.names_from(presets), default=[], metavar=names, help=text)
    text = "measure the backward pass of a collective matmul"
    add("--backward", action="store_true", help=text)
    text = (
        "force the plan of an overlapped matmul, whether or not it is the fastest. Its fields "
        f"and their defaults: {describe_plan_fields()}"
    )
    add("--plan", type=_parse_plan, metavar="NAME=VALUE[,NAME=VALUE...]", help=text)
    text = "JAX names of dtypes, separated by commas (default bfloat16)"
    add("-d", "--datatype", type=options.names_from(_DTYPES), default="bfloat16", help=text)
    add("-n", "--iters", type=positive, default=20, help="timed repetitions (default 20)")
    text = "untimed repetitions before the timed ones (default 5)"
    add("-w", "--warmup_iters", type=natural, default=5, help=text)
    text = "time limit in seconds for each mode (default 1800)"
    add("-T", "--timeout", type=positive, default=timeouts.BENCH_S, help=text)
    text = (
        "call the collective with a pytree of COUNT arrays; the size is that of all arrays "
        "together (default 1)"
    )
    add("--leaves", type=positive, default=1, metavar="COUNT", help=text)
    text = "calls in a row in one compiled program (default 2 to 256, by platform and size)"
    add("--chain", type=positive, metavar="COUNT", help=text)
    text = (
        "run a collective matmul for MS milliseconds before each of its repetitions, until "
        "the GPU's clock has settled under sustained power draw (default 150 on GPUs, 0 on CPUs)"
    )
    add("--settle", type=natural, metavar="MS", help=text)
    text = "set JAX_INTRANODE_ALGORITHM (default: as in the environment)"
    add("--algorithm", choices=config.ALGORITHMS, help=text)
    text = "switch XLA's latency-hiding scheduler on or off (default: XLA's default)"
    add("--latency-hiding", choices=("on", "off"), help=text)
    options.add_mode(parser)
    add("--devices", type=positive, help="number of devices (default all GPUs, or 2 CPU devices)")
    options.add_platform(parser)
    add("--json", type=options.new_file, metavar="FILE", help="write the results to FILE")


def parse_size(text: str) -> int:
    """Returns the number of bytes that a text such as "512", "4K", "1M" or "1G" means."""
    suffix = text[-1:].upper()
    factor = _SIZE_SUFFIXES.get(suffix, 1)
    digits = text[:-1] if suffix in _SIZE_SUFFIXES else text
    if not digits.isdecimal() or int(digits) == 0:
        raise WrongInput(f"{text!r} is not a size such as 512, 4K, 1M or 1G")
    return int(digits) * factor


def size_text(size: int) -> str:
    """Returns the shortest text that `parse_size` reads as this number of bytes."""
    for suffix, factor in reversed(_SIZE_SUFFIXES.items()):
        if size % factor == 0:
            return f"{size // factor}{suffix}"
    return str(size)


def _parse_plan(text: str) -> dict[str, Any]:
    """Returns the fields of the plan that "tile_columns=192,direct=1" stands for."""
    try:
        return dataclasses.asdict(parse_plan(text))
    except ValueError as error:
        raise WrongInput(str(error)) from None


# From parsed arguments to settings.


def settings_of(arguments: argparse.Namespace, platform: str, devices: int) -> list[Settings]:
    """Returns the settings of each mode, after a check of the options."""
    _check(arguments, devices)
    name = arguments.name
    shapes = _shapes(arguments, platform, devices) if name in MATMULS else []
    largest = arguments.maxbytes or parse_size("64K" if platform == "cpu" else "16M")
    settle_ms = 150 if platform == "gpu" and name not in OPERATIONS else 0
    sizes, size = [], arguments.minbytes
    while size <= largest:
        sizes.append(size)
        size *= arguments.stepfactor
    found = [
        Settings(
            name=name,
            mode=mode,
            devices=devices,
            platform=platform,
            dtypes=arguments.datatype,
            sizes=sizes,
            leaves=arguments.leaves,
            iterations=arguments.iters,
            warmup_iterations=arguments.warmup_iters,
            chain=arguments.chain,
            shapes=[list(shape) for shape in shapes],
            backward=arguments.backward,
            plan=arguments.plan,
            settle_ms=settle_ms if arguments.settle is None else arguments.settle,
        )
        for mode in (runs.MODES if arguments.mode == "both" else (arguments.mode,))
    ]
    if name in OPERATIONS:
        _check_sizes(arguments, largest, found[0])
    return found


def _check(arguments: argparse.Namespace, devices: int) -> None:
    """Raises WrongInput if these options contradict each other or can't work here."""
    name, most = arguments.name, definitions.MAX_WORLD_SIZE
    if name in (*OPERATIONS, *MATMULS) and devices > most:
        text = f"{name}: a group has at most {most} ranks, not {devices}: choose --devices {most}"
        raise WrongInput(f"{text} or less")
    if name in MATMULS:
        if arguments.leaves > 1:
            raise WrongInput(f"--leaves: {name} is measured with one x and one w")
        others = [dtype for dtype in arguments.datatype if dtype not in _MATMUL_DTYPES]
        if others:
            raise WrongInput(
                f"{name} of {others[0]}: choose from {', '.join(_MATMUL_DTYPES)} with -d"
            )
    elif arguments.shapes or arguments.preset or arguments.backward or arguments.plan:
        names = "--shapes, --preset, --backward and --plan"
        raise WrongInput(f"{names} are for {', '.join(MATMULS)}, not for {name}")
    elif arguments.settle is not None and name in OPERATIONS:
        raise WrongInput(f"--settle is for collective matmuls, not for {name}")
    elif arguments.leaves > 1 and name in RECORDS and not RECORDS[name].takes_many:
        raise WrongInput(f"--leaves: {name} is measured with one array")
    if name == "pmean":
        integers = [d for d in arguments.datatype if jnp.issubdtype(jnp.dtype(d), jnp.integer)]
        if integers:
            raise WrongInput(f"pmean of {integers[0]} is a float: choose floating dtypes with -d")
    try:
        config.parse({**os.environ, **environment(arguments)})
    except ValueError as error:
        raise WrongInput(str(error)) from None


def _check_sizes(arguments: argparse.Namespace, largest: int, settings: Settings) -> None:
    """Raises WrongInput if there is no size of a collective to measure."""
    smallest = arguments.minbytes
    if smallest > largest:
        default = "" if arguments.maxbytes else " (the default)"
        raise WrongInput(
            f"--minbytes {size_text(smallest)} is above --maxbytes {size_text(largest)}{default}: "
            "choose a smaller -b or a larger -e"
        )
    if not settings.measurements():
        raise WrongInput(
            f"none of the sizes {', '.join(map(size_text, settings.sizes))} holds a whole number "
            f"of elements of {' or '.join(settings.dtypes)} for each of {settings.devices} "
            "devices: choose other sizes with -b, -e and -f"
        )


def _shapes(arguments: argparse.Namespace, platform: str, devices: int) -> Sequence[Shape]:
    """Returns the shapes of a collective matmul that the options ask for."""
    presets = arguments.preset
    if not presets and not arguments.shapes:
        presets = ["reference" if platform == "gpu" else "tiny"]
    of_presets = of_bench.of_presets(presets, arguments.name, devices)
    shapes = list(dict.fromkeys([*(arguments.shapes or []), *of_presets]))
    matmul = MATMULS[arguments.name]
    for shape in shapes:
        if (matmul.gathers or matmul.forward.part) and shape.m % devices:
            raise WrongInput(
                f"{arguments.name} of {shape}: M is {shape.m}; it must be a multiple of the "
                f"{devices} devices, which share the rows"
            )
    return shapes


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the environment variables that the options set for the ranks."""
    variables = {}
    if arguments.algorithm is not None:
        variables["JAX_INTRANODE_ALGORITHM"] = arguments.algorithm
    if arguments.latency_hiding is not None:
        value = "true" if arguments.latency_hiding == "on" else "false"
        flag = f"--xla_gpu_enable_latency_hiding_scheduler={value}"
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    return variables


# The run.


def run(arguments: argparse.Namespace) -> int:
    """Measures in the chosen modes, prints the tables and writes the file.

    Returns:
        The exit code: 0 if all elements were right in all modes, 1 if one was wrong.
    """
    signal.signal(signal.SIGTERM, runs.end_by_exit)
    settings = settings_of(arguments, *machine.platform_and_devices(arguments))
    line = runs.ProgressLine(sys.stderr, len(settings) * count(settings[0]))
    result = empty_result()
    for of_mode in settings:
        measured = run_mode(of_mode, environment(arguments), arguments.timeout, line)
        add_mode(result, measured, mode=arguments.mode, command=report.command_line(sys.argv))
    write(result, arguments.json)
    return 0 if are_right(result["rows"]) else 1


def count(settings: Settings) -> int:
    """How many rows a mode has."""
    return len(settings.matmuls() or settings.measurements())


def empty_result() -> dict[str, Any]:
    """The content of the JSON file before the first mode."""
    empty: dict[str, Any] = {"versions": [], "rows": []}
    return {"version": report.VERSION, "header": {}, "rows": [], "peers": empty}


def add_mode(result: dict[str, Any], measured: dict[str, Any], **more: Any) -> None:
    """Adds what `run_mode` has returned, and more facts for the header."""
    result["header"] = {**measured["header"], "driver": machine.driver()["version"], **more}
    result["rows"] += measured["rows"]


def write(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


def run_mode(
    settings: Settings,
    variables: Mapping[str, str],
    timeout_s: float,
    line: runs.ProgressLine,
    shows_table: bool = True,
    function: str = "jax_intranode._src.command_line.bench.measure:measure",
) -> dict[str, Any]:
    """Runs the ranks of one mode and returns the "header" and the "rows" of the JSON file.

    `function` is what they run (see `runs.run_function`).
    """
    return runs.run_function(
        function,
        dataclasses.asdict(settings),
        settings.job,
        variables=variables,
        timeout_s=timeout_s,
        line=line,
        shows_log=shows_table,
    )


def are_right(rows: list[dict[str, Any]]) -> bool:
    """Prints the largest errors against float64, and whether all elements were right."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        rounded = [row for row in rows if row["dtype"] == dtype and row["error"] is not None]
        if rounded:
            ours, lax = (max(row[key] for row in rounded) for key in ("error", "lax_error"))
            print(f"# {dtype}: relative rms error against float64: ours {ours:.2e}, lax {lax:.2e}")
    columns = ("wrong", "lax_wrong", "graph_wrong", "lax_tuned_wrong")
    wrong = sum(row.get(column) or 0 for row in rows for column in columns)
    print(f"# wrong elements: {wrong} {'FAILED' if wrong else 'OK'}", flush=True)
    return wrong == 0
