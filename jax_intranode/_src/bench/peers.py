"""Other libraries on the same devices, sizes and dtypes: PyTorch and nccl-tests, where installed.

They run after the ranks of JAX have ended, which hold most of the GPUs' memory. Their environment
is this process's.
"""

import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jax_intranode._src import launcher
from jax_intranode._src.bench import measure_matmul
from jax_intranode._src.bench.progress import ProgressLine, following
from jax_intranode._src.bench.report import optional
from jax_intranode._src.bench.settings import Settings

_TORCH_DTYPES = ("bfloat16", "float16", "float32")

# Program of each operation, and how nccl-tests calls the dtypes.
_NCCL_PROGRAMS = {
    "psum": ("all_reduce_perf",),
    "pmean": ("all_reduce_perf", "-o", "avg"),
    "psum_scatter": ("reduce_scatter_perf",),
    "all_gather": ("all_gather_perf",),
}
_NCCL_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "half",
    "float32": "float",
    "float64": "double",
    **{name: name for name in ("int8", "int32", "int64", "uint8", "uint32", "uint64")},
}


class Absent(Exception):
    """Why a peer can't be measured here."""


def measure(
    names: Sequence[str], settings: Settings, timeout_s: float, line: ProgressLine
) -> dict[str, Any]:
    """Measures peers; says in one line on stderr of each that it can't measure.

    Args:
        names: some of PEERS.
        settings: what to measure.
        timeout_s: time limit of each peer.
        line: where to say what runs.

    Returns:
        "versions": a text for each peer that ran; "rows": one for each library, dtype and size,
        with "library", "size" (of a matmul "m", "k" and "n"), "dtype", "time_us", "time_p99_us" (or
        None) and "wrong" (or None).
    """
    versions: list[str] = []
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            if settings.platform != "gpu":
                raise Absent("measured on GPUs only")
            with tempfile.TemporaryDirectory(prefix="jax_intranode_peers_") as directory:
                result = PEERS[name](settings, Path(directory), timeout_s, line)
        except Absent as absent:
            sys.stderr.write(f"# {name} not measured: {absent}\n")
        except launcher.RankError as error:
            sys.stderr.write(f"# {name} not measured: it failed.\n{error}\n")
        else:
            versions.append(result["version"])
            rows += result["rows"]
    return {"versions": versions, "rows": rows}


# PyTorch.


def _measure_torch(
    settings: Settings, directory: Path, timeout_s: float, line: ProgressLine
) -> dict[str, Any]:
    """Runs one process of PyTorch for each GPU."""
    if importlib.util.find_spec("torch") is None:
        raise Absent("torch is not installed")
    # With how many calls in a row a repetition makes at least, and how many times as many it makes
    # untimed before. Of matmuls as of ours: after a rest clocks are higher than when power bounds
    # them.
    asked: list[tuple[str, Any, int, int]] = [
        (
            name,
            shape,
            measure_matmul.calls_in_a_row(settings, name, shape),
            measure_matmul.repetitions_to_settle(settings, name, shape),
        )
        for name, shape in settings.matmuls()
    ] or [(name, count, 1, 0) for name, count in settings.measurements()]
    measurements = [m for m in asked if m[0] in _TORCH_DTYPES]
    if not measurements:
        raise Absent(f"of the dtypes it takes {', '.join(_TORCH_DTYPES)}")
    told = {
        "operation": settings.name,
        "matmul": bool(settings.shapes),
        "backward": settings.backward,
        "measurements": measurements,
        "iterations": settings.iterations,
        "warmup_iterations": settings.warmup_iterations,
        "devices": settings.devices,
        "port": launcher.free_port(),
        "output": str(directory / "rows.json"),
        "begun": str(directory / "begun"),
    }
    script = Path(__file__).with_name("torch_rank.py")
    # -P: beside the script lie modules of other names than those that it imports.
    commands = [
        [sys.executable, "-P", str(script), json.dumps({**told, "rank": rank})]
        for rank in range(settings.devices)
    ]
    with following(None, directory / "begun", line):
        launcher.run_ranks(commands, timeout_s=timeout_s, log_dir=directory)
    result: dict[str, Any] = json.loads((directory / "rows.json").read_text())
    for failed in result["failed"]:
        sys.stderr.write(f"# not measured: {failed}\n")
    return result


# nccl-tests.


def _measure_nccl_tests(
    settings: Settings, directory: Path, timeout_s: float, line: ProgressLine
) -> dict[str, Any]:
    """Runs nccl-tests' program, in one process that has all GPUs, once for each dtype."""
    program = _NCCL_PROGRAMS.get(settings.name)
    if program is None:
        raise Absent(f"it has no {settings.name}")
    if shutil.which(program[0]) is None:
        raise Absent(f"{program[0]} is not on PATH")
    version = "nccl-tests"
    rows: list[dict[str, Any]] = []
    for dtype in dict.fromkeys(name for name, _ in settings.measurements()):
        if dtype not in _NCCL_DTYPES:
            sys.stderr.write(f"# nccl-tests does not know {dtype}\n")
            continue
        sizes = [
            count * jnp.dtype(name).itemsize
            for name, count in settings.measurements()
            if name == dtype
        ]
        line.begin(f"nccl-tests, {dtype}")
        line.show()
        command = nccl_tests_command(program, settings, sizes, dtype)
        launcher.run_ranks([command], timeout_s=timeout_s, log_dir=directory)
        line.clear()
        text = (directory / "rank0.log").read_text(errors="replace")
        version = nccl_tests_version(text)
        rows += [{**row, "dtype": dtype} for row in parse_nccl_tests(text) if row["size"] in sizes]
    return {"version": version, "rows": rows}


def nccl_tests_command(
    program: Sequence[str], settings: Settings, sizes: Sequence[int], dtype: str
) -> list[str]:
    """Returns the command line that measures sizes that are a constant factor apart.

    Each of the iterations is a call in one CUDA graph, which is launched 20 times.
    """
    factor = sizes[1] // sizes[0] if len(sizes) > 1 else 2
    options = {
        "-g": settings.devices,
        "-b": sizes[0],
        "-e": sizes[-1],
        "-f": factor,
        "-d": _NCCL_DTYPES[dtype],
        "-n": settings.iterations,
        "-w": settings.warmup_iterations,
        "-G": 20,
        "-c": 1,
    }
    return [*program, *(str(word) for option in options.items() for word in option)]


# size, count, type, redop, root, then out of place: time, algbw, busbw, #wrong.
_NCCL_ROW = re.compile(
    r"^\s*(?P<size>\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+"
    r"(?P<time>[\d.e+]+)\s+[\d.e+]+\s+[\d.e+]+\s+(?P<wrong>\d+|N/A)\s",
    re.MULTILINE,
)


def parse_nccl_tests(text: str) -> list[dict[str, Any]]:
    """Returns the rows of a table of nccl-tests, of its out-of-place half."""
    return [
        {
            "library": "nccl-tests",
            "size": int(row["size"]),
            "time_us": float(row["time"]),
            "time_p99_us": None,
            "wrong": None if row["wrong"] == "N/A" else int(row["wrong"]),
        }
        for row in _NCCL_ROW.finditer(text)
    ]


def nccl_tests_version(text: str) -> str:
    """Returns the version that a table of nccl-tests begins with, where it does."""
    found = re.search(r"nccl-tests version (\S+)(?:.*nccl-library=(\d+))?", text)
    if found is None:
        return "nccl-tests"
    library = f" (NCCL {found[2]})" if found[2] else ""
    return f"nccl-tests {found[1]}{library}"


Peer = Callable[[Settings, Path, float, ProgressLine], dict[str, Any]]
PEERS: dict[str, Peer] = {"torch": _measure_torch, "nccl-tests": _measure_nccl_tests}


# The table.


def format_table(peers: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of the peers beside ours in a graph.

    Args:
        peers: what `measure` returned.
        rows: the rows of ours.
    """
    times: dict[tuple[str, int], dict[str, float | None]] = {}
    for row in rows:
        column = f"ours, {row['mode']}"
        times.setdefault((row["dtype"], row["size"]), {})[column] = row["graph_time_us"]
    for row in peers["rows"]:
        times.setdefault((row["dtype"], row["size"]), {})[row["library"]] = row["time_us"]
    columns = list(dict.fromkeys(name for of_size in times.values() for name in of_size))
    wrong = sum(row["wrong"] or 0 for row in peers["rows"])
    lines = [
        f"# in a graph (us), p50 (nccl-tests: mean): {', '.join(peers['versions'])}",
        f"# {'size(B)':>12} {'type':>8} | " + " ".join(f"{name:>24}" for name in columns),
        *(
            f"  {size:12} {dtype:>8} | "
            + " ".join(optional(of_size.get(name), 24) for name in columns)
            for (dtype, size), of_size in times.items()
        ),
        f"# wrong elements of the peers: {wrong}",
    ]
    return "\n".join(lines)
