"""The header of a run, and the JSON file that a run writes."""

import datetime
import json
import os
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jax_intranode
from jax_intranode._src.command_line import versions
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.selection import config, tuning

# The version of the JSON file's layout, which docs/bench.md describes.
VERSION = 2

_OF_SETTINGS = (
    *("devices", "leaves", "backward", "plan", "mode"),
    *("iterations", "warmup_iterations", "chain", "settle_ms"),
)

# Options that name files. They change nothing of what is measured.
_FILE_OPTIONS = ("--json", "--plot", "-o", "--output")


def header(settings: Settings) -> dict[str, Any]:
    """Returns the facts on which the times depend.

    The parent process adds the GPUs' "driver" and the "command".
    """
    return {
        **library_versions(),
        "platform": settings.platform,
        "device": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
        "operation": settings.name,
        **{name: getattr(settings, name) for name in _OF_SETTINGS},
        "algorithm": config.get().algorithm,
        "tuning": None if tuning.current() is None else str(tuning.current()),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def library_versions() -> dict[str, str | None]:
    """Returns the versions of the libraries on which times depend."""
    return {
        "jax": jax.__version__,
        "jaxlib": versions.of("jaxlib"),
        "jax_intranode": jax_intranode.__version__,
        "nccl": versions.of("nvidia-nccl-cu13") or versions.of("nvidia-nccl-cu12"),
        "cuda": versions.of("nvidia-cuda-runtime") or versions.of("nvidia-cuda-runtime-cu12"),
        "python": platform.python_version(),
    }


def command_line(argv: Sequence[str]) -> str:
    """Returns the command that measures the same again, without the options that name files."""
    words = []
    rest = iter(argv[1:])
    for word in rest:
        if word in _FILE_OPTIONS:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in _FILE_OPTIONS)):
            words.append(word)
    return shlex.join(["python", "-m", "jax_intranode", *words])


def format_header(header: dict[str, Any], settled: bool) -> str:
    """Returns the lines above a table.

    Args:
        settled: whether the same program runs untimed before each repetition.
    """
    leaves = f", {header['leaves']} arrays a call" if header["leaves"] > 1 else ""
    backward = " backward" if header["backward"] else ""
    after = f", each after {header['settle_ms']} ms of untimed calls" if settled else ""
    lines = [
        f"# {header['operation']}{backward}, {header['devices']} x {header['device']}, "
        f"{header['mode']}{leaves}",
        f"# {versions_text(header)}, {header['date']}",
        f"# p50 and p99 of {header['iterations']} repetitions{after}; ratio = lax p50 / our p50",
    ]
    if header["algorithm"] != "auto":
        lines.append(f"# JAX_INTRANODE_ALGORITHM={header['algorithm']}")
    if header.get("tuning"):
        lines.append(f"# {tuning.VARIABLE}={header['tuning']}")
        lines.append("# shipped: the same call without it")
    if header["xla_flags"]:
        lines.append(f"# XLA_FLAGS={header['xla_flags']}")
    return "\n".join(lines)


def versions_text(header: dict[str, Any]) -> str:
    """Returns the versions in a header as text."""
    return ", ".join(
        f"{name} {header[name] or 'unknown'}"
        for name in ("jax", "jaxlib", "jax_intranode", "nccl")
        if name != "nccl" or header["platform"] == "gpu"
    )


def read(path: Path) -> dict[str, Any]:
    """Reads a JSON file that the benchmark wrote.

    Raises:
        ValueError: the benchmark did not write this file, or wrote it in another layout.
    """
    try:
        result = json.loads(path.read_text())
        version = result["version"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not what `bench --json` writes: measure again") from None
    if version != VERSION:
        raise ValueError(f"{path} has layout {version}, not {VERSION}: measure again")
    return result
