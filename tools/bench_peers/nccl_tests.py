"""nccl-tests: its programs from PATH, in one process that has all GPUs."""

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bench_peers.peer import Peer, Unavailable
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.runs import ProgressLine, run_ranks
from jax_intranode._src.operations import COLLECTIVE, of_kind

# The program for each operation, and the names that nccl-tests has for the dtypes.
_PROGRAMS = {
    "pmean": ("all_reduce_perf", "-o", "avg"),
    **{
        record.name: (f"{record.stablehlo.replace('all_to_all', 'alltoall')}_perf",)
        for record in of_kind(COLLECTIVE)
        if record.stablehlo is not None
    },
}
_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "half",
    "float32": "float",
    "float64": "double",
    **{name: name for name in ("int8", "int32", "int64", "uint8", "uint32", "uint64")},
}


def _measure(
    settings: Settings, directory: Path, timeout_s: float, line: ProgressLine
) -> dict[str, Any]:
    """Runs the program in one process that has all GPUs, once for each dtype."""
    program = _PROGRAMS.get(settings.name)
    if program is None:
        raise Unavailable(f"it has no {settings.name}")
    if shutil.which(program[0]) is None:
        raise Unavailable(f"{program[0]} is not on PATH")
    version = "nccl-tests"
    rows: list[dict[str, Any]] = []
    for dtype in dict.fromkeys(name for name, _ in settings.measurements()):
        if dtype not in _DTYPES:
            sys.stderr.write(f"# nccl-tests does not know {dtype}\n")
            continue
        sizes = [
            count * jnp.dtype(name).itemsize
            for name, count in settings.measurements()
            if name == dtype
        ]
        line.begin(f"nccl-tests, {dtype}")
        line.show()
        command = command_line(program, settings, sizes, dtype)
        run_ranks([command], timeout_s=timeout_s, log_dir=directory)
        line.clear()
        text = (directory / "rank0.log").read_text(errors="replace")
        version = version_of(text)
        rows += [{**row, "dtype": dtype} for row in parse(text) if row["size"] in sizes]
    return {"version": version, "rows": rows}


def command_line(
    program: Sequence[str], settings: Settings, sizes: Sequence[int], dtype: str
) -> list[str]:
    """Returns the command that measures sizes with a constant factor between them.

    The iterations are calls in one CUDA graph, which is launched 20 times.
    """
    factor = sizes[1] // sizes[0] if len(sizes) > 1 else 2
    options = {
        "-g": settings.devices,
        "-b": sizes[0],
        "-e": sizes[-1],
        "-f": factor,
        "-d": _DTYPES[dtype],
        "-n": settings.iterations,
        "-w": settings.warmup_iterations,
        "-G": 20,
        "-c": 1,
    }
    return [*program, *(str(word) for option in options.items() for word in option)]


# The columns: size, count, type, redop, root, then out of place: time, algbw, busbw, #wrong.
_ROW = re.compile(
    r"^\s*(?P<size>\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+"
    r"(?P<time>[\d.e+]+)\s+[\d.e+]+\s+[\d.e+]+\s+(?P<wrong>\d+|N/A)\s",
    re.MULTILINE,
)


def parse(text: str) -> list[dict[str, Any]]:
    """Returns the rows of an nccl-tests table, with the times out of place."""
    return [
        {
            "library": "nccl-tests",
            "size": int(row["size"]),
            "time_us": float(row["time"]),
            "time_p99_us": None,
            "wrong": None if row["wrong"] == "N/A" else int(row["wrong"]),
        }
        for row in _ROW.finditer(text)
    ]


def version_of(text: str) -> str:
    """Returns the version in the head of an nccl-tests table, or just the name."""
    found = re.search(r"nccl-tests version (\S+)(?:.*nccl-library=(\d+))?", text)
    if found is None:
        return "nccl-tests"
    library = f" (NCCL {found[2]})" if found[2] else ""
    return f"nccl-tests {found[1]}{library}"


def _count(settings: Settings) -> int:
    return len({dtype for dtype, _ in settings.measurements()})


NCCL_TESTS = Peer("nccl-tests", _measure, _count, {"nccl-tests": "#000000"})
