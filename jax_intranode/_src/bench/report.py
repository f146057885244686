"""What the benchmark says: the header, the tables' columns and rows, the JSON file."""

import contextlib
import datetime
import importlib.metadata
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jax_intranode._src import config
from jax_intranode._src.bench.matmuls import MATMULS
from jax_intranode._src.bench.settings import Settings

# Of the JSON file's layout, which docs/bench.md has.
VERSION = 2


@dataclass(frozen=True)
class Row:
    """One line of an operation's table. Times are in microseconds a call, the slowest rank's.

    Attributes:
        size: bytes, as `operations.Operation` counts them.
        count: elements in these bytes.
        dtype: the dtype's name.
        mode: "process-per-device" or "single-process".
        algorithm: what ours ran as: an algorithm, "push" for psum_scatter and all_gather, "mixed"
            if several differ, "lax" if it fell back.
        operations: how many operations ours ran as.
        graph_time_us: our kernels by themselves in a CUDA graph, median; None if not measured.
        graph_time_p99_us: their 99th percentile.
        graph_wrong: elements of the graph's result that are wrong, over all devices.
        time_us: ours as called, the multiply of the chain taken off: median.
        time_p99_us: its 99th percentile.
        algbw: size / time_us, in GB/s; None if the time is below what the clock shows.
        busbw: algbw * 2(n-1)/n (psum_scatter and all_gather: (n-1)/n), which compares with a
            link's speed for any n; or None.
        wrong: elements of our result that are wrong, over all devices.
        lax_time_us: lax's as called: median.
        lax_time_p99_us: its 99th percentile.
        lax_wrong: elements of lax's result that are wrong, over all devices.
        ratio: lax_time_us / time_us, above 1 where ours is faster; or None.
        error: how far our result is from the float64 one: root mean square over the elements,
            relative to that of the latter; None where nothing is rounded, or not finite.
        lax_error: how far lax's is.
        handler_calls: how often XLA called a handler of ours while both were timed as called, over
            all ranks; 0 where it replayed graphs.
    """

    size: int
    count: int
    dtype: str
    mode: str
    algorithm: str
    operations: int
    graph_time_us: float | None
    graph_time_p99_us: float | None
    graph_wrong: int | None
    time_us: float
    time_p99_us: float
    algbw: float | None
    busbw: float | None
    wrong: int
    lax_time_us: float
    lax_time_p99_us: float
    lax_wrong: int
    ratio: float | None
    error: float | None
    lax_error: float | None
    handler_calls: int

    COLUMNS = (
        f"# {'':>11} {'':>11} {'':>8} {'':>14} | {'in a graph (us)':^24} | "
        f"{'as called (us, GB/s)':^40} | {'lax, as called (us)':^24} |\n"
        f"# {'size(B)':>11} {'count':>11} {'type':>8} {'algorithm':>14} | {'p50':>8} {'p99':>8} "
        f"{'#wrong':>6} | {'p50':>8} {'p99':>8} {'algbw':>7} {'busbw':>7} {'#wrong':>6} | "
        f"{'p50':>8} {'p99':>8} {'#wrong':>6} | {'ratio':>6}"
    )

    def __str__(self) -> str:
        """The row as the table shows it."""
        graph_wrong = "-" if self.graph_wrong is None else self.graph_wrong
        return (
            f"  {self.size:11} {self.count:11} {self.dtype:>8} {self.algorithm:>14} | "
            f"{optional(self.graph_time_us, 8)} {optional(self.graph_time_p99_us, 8)} "
            f"{graph_wrong:>6} | {self.time_us:8.2f} {self.time_p99_us:8.2f} "
            f"{optional(self.algbw, 7)} {optional(self.busbw, 7)} {self.wrong:6} | "
            f"{self.lax_time_us:8.2f} {self.lax_time_p99_us:8.2f} {self.lax_wrong:6} | "
            f"{optional(self.ratio, 6)}"
        )


@dataclass(frozen=True)
class ProgramRow:
    """One line of a whole program's table. Times are in microseconds a call, the slowest rank's.

    Attributes:
        program: its name.
        mode: "process-per-device" or "single-process".
        time_us: with our collectives: median.
        time_p99_us: its 99th percentile.
        lax_time_us: with lax's: median.
        lax_time_p99_us: its 99th percentile.
        ratio: lax_time_us / time_us, above 1 where ours is faster.
        difference: the largest difference of the two results relative to the largest absolute
            value of lax's, over all arrays of the result; None if one is not a finite number.
        handler_calls: as for an operation.
    """

    program: str
    mode: str
    time_us: float
    time_p99_us: float
    lax_time_us: float
    lax_time_p99_us: float
    ratio: float
    difference: float | None
    handler_calls: int

    COLUMNS = (
        f"# {'':>24} | {'ours (us)':^21} | {'lax (us)':^21} |\n"
        f"# {'program':>24} | {'p50':>10} {'p99':>10} | {'p50':>10} {'p99':>10} | {'ratio':>6} | "
        f"{'difference':>10}"
    )

    def __str__(self) -> str:
        """The row as the table shows it."""
        difference = "not finite" if self.difference is None else f"{self.difference:10.1e}"
        return (
            f"  {self.program:>24} | {self.time_us:10.1f} {self.time_p99_us:10.1f} | "
            f"{self.lax_time_us:10.1f} {self.lax_time_p99_us:10.1f} | {self.ratio:6.2f} | "
            f"{difference}"
        )


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


def format_header(header: dict[str, Any]) -> str:
    """Returns the lines above a table."""
    leaves = f", {header['leaves']} arrays a call" if header["leaves"] > 1 else ""
    backward = " backward" if header["backward"] else ""
    settled = header["settle_ms"] > 0 and header["operation"] in MATMULS
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
