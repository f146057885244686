"""The header of a run, and the JSON file that a run writes."""

import contextlib
import datetime
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import jax

from jax_intranode._src import config
from jax_intranode._src.bench.settings import Settings

# Of the JSON file's layout, which docs/bench.md has.
VERSION = 2


def optional(value: float | None, width: int) -> str:
    """Formats a number that may be missing."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}.2f}"


def header(settings: Settings) -> dict[str, Any]:
    """Returns what a reader has to know to compare the numbers with others."""
    return {
        "jax": jax.__version__,
        "jaxlib": _version_of("jaxlib"),
        "jax_intranode": _version_of("jax-intranode"),
        "nccl": _version_of("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "platform": settings.platform,
        "device": jax.devices()[0].device_kind,
        "operation": settings.name,
        "devices": settings.devices,
        "leaves": settings.leaves,
        "backward": settings.backward,
        "mode": settings.mode,
        "algorithm": config.get().algorithm,
        "iterations": settings.iterations,
        "warmup_iterations": settings.warmup_iterations,
        "chain": settings.chain,
        "settle_ms": settings.settle_ms,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version_of(*distributions: str) -> str | None:
    """Returns the version of the first of these distributions that is installed."""
    for distribution in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def format_header(header: dict[str, Any], settled: bool) -> str:
    """Returns the lines above a table."""
    leaves = f", {header['leaves']} arrays a call" if header["leaves"] > 1 else ""
    backward = " backward" if header["backward"] else ""
    after = f", each after {header['settle_ms']} ms of the same" if settled else ""
    lines = [
        f"# {header['operation']}{backward}, {header['devices']} x {header['device']}, "
        f"{header['mode']}{leaves}",
        f"# {versions(header)}, {header['date']}",
        f"# p50 and p99 of {header['iterations']} repetitions{after}; ratio = lax p50 / our p50",
    ]
    if header["algorithm"] != "auto":
        lines.append(f"# JAX_INTRANODE_ALGORITHM={header['algorithm']}")
    if header["xla_flags"]:
        lines.append(f"# XLA_FLAGS={header['xla_flags']}")
    return "\n".join(lines)


def versions(header: dict[str, Any]) -> str:
    """Returns the versions that a header names, as text."""
    return ", ".join(
        f"{name} {header[name] or 'unknown'}"
        for name in ("jax", "jaxlib", "jax_intranode", "nccl")
        if name != "nccl" or header["platform"] == "gpu"
    )


def read(path: Path) -> dict[str, Any]:
    """Reads a JSON file that the benchmark wrote.

    Raises:
        ValueError: the file is no such file, or one of another version.
    """
    try:
        result = json.loads(path.read_text())
        version = result["version"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no JSON file of `jax_intranode bench --json`") from None
    if version != VERSION:
        raise ValueError(f"{path} has layout {version}, not {VERSION}; measure anew")
    return result
