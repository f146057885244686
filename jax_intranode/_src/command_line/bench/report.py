"""What a run reports: the header and the JSON file, and the tables (docs/bench.md)."""

import datetime
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

import jax_intranode
from jax_intranode._src.command_line import machine
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.selection import config, tuning

# The version of the JSON file's layout, which docs/measurements/json_file.md describes.
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
    of = machine.version_of
    return {
        "jax": jax.__version__,
        "jaxlib": of("jaxlib"),
        "jax_intranode": jax_intranode.__version__,
        "nccl": machine.loaded_nccl() or of("nvidia-nccl-cu13") or of("nvidia-nccl-cu12"),
        "cuda": of("nvidia-cuda-runtime") or of("nvidia-cuda-runtime-cu12"),
        "python": platform.python_version(),
    }


def command_line(argv: Sequence[str], program: Sequence[str] = ("-m", "jax_intranode")) -> str:
    """Returns the command that measures the same again, without the options that name files."""
    words = []
    rest = iter(argv[1:])
    for word in rest:
        if word in _FILE_OPTIONS:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in _FILE_OPTIONS)):
            words.append(word)
    return shlex.join(["python", *program, *words])


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
    return ", ".join(
        f"{name} {header[name] or 'unknown'}"
        for name in ("jax", "jaxlib", "jax_intranode", "nccl")
        if name != "nccl" or header["platform"] == "gpu"
    )


# Tables: which fields of a row they show, and how.


class Column(NamedTuple):
    """A column of a table: its field of a row, and how that is shown.

    A number is multiplied by `factor`; `nothing` stands for None.
    """

    field: str
    title: str
    width: int
    form: str = ""
    factor: float = 1
    nothing: str = "-"

    def cell(self, row: Mapping[str, Any]) -> str:
        return number(row[self.field], self.width, self.form, self.factor, self.nothing)


# Columns, by the title above them.
Table = Sequence[tuple[str, Sequence[Column]]]


def number(value: Any, width: int, form: str = ".2f", factor: float = 1, nothing: str = "-") -> str:
    if value is None:
        return f"{nothing:>{width}}"
    return f"{value:>{width}}" if isinstance(value, str) else f"{value * factor:{width}{form}}"


def times(name: str, form: str = ".2f", factor: float = 1, width: int = 8) -> tuple[Column, Column]:
    """Returns the columns of the median and the 99th percentile of a time in microseconds."""
    median = Column(f"{name}_us", "p50", width, form, factor)
    return median, Column(f"{name}_p99_us", "p99", width, form, factor)


def draw(prefix: str = "") -> tuple[Column, Column]:
    """Returns the columns of the power that a GPU draws, and of its clock."""
    watts = Column(f"{prefix}watts", "W", 4, ".0f")
    return watts, Column(f"{prefix}sm_mhz", "MHz", 4, ".0f")


_WHAT = (Column("dtype", "type", 8), Column("algorithm", "algorithm", 14))
_RATIO = ("", (Column("ratio", "ratio", 6, ".2f"),))
_MS = (".3f", 1e-3)

COLLECTIVES: Table = (
    ("", (Column("size", "size(B)", 11), Column("count", "count", 11), *_WHAT)),
    ("in a graph (us)", (*times("graph_time"), Column("graph_wrong", "#wrong", 6))),
    (
        "from JAX (us, GB/s)",
        (
            *times("time"),
            Column("algbw", "algbw", 7, ".2f"),
            Column("busbw", "busbw", 7, ".2f"),
            Column("link_share", "link", 5, ".2f"),
            Column("sms", "SMs", 4, "d"),
            Column("wrong", "#wrong", 6),
        ),
    ),
    ("lax, from JAX (us)", (*times("lax_time"), Column("lax_wrong", "#wrong", 6))),
    _RATIO,
)

MATMULS: Table = (
    ("", (*(Column(name, name.upper(), 6) for name in "mkn"), *_WHAT)),
    (
        "ours (ms)",
        (
            *times("time", *_MS),
            Column("tflops", "TFLOP/s", 8, ".2f"),
            Column("share", "share", 6, ".2f"),
            *draw(),
            Column("wrong", "#wrong", 7),
        ),
    ),
    (
        "at best (ms)",
        (Column("alone_time_us", "matmul", 8, *_MS), Column("bound_us", "bound", 8, *_MS)),
    ),
    (
        "lax (ms)",
        (
            *times("lax_time", *_MS),
            Column("lax_share", "share", 6, ".2f"),
            *draw("lax_"),
            Column("lax_wrong", "#wrong", 6),
        ),
    ),
    _RATIO,
)


def head(table: Table) -> str:
    """Returns the two lines above a table."""
    titles, names = [], []
    for title, columns in table:
        names.append(" ".join(f"{column.title:>{column.width}}" for column in columns))
        titles.append(f"{title:^{len(names[-1])}}")
    return f"# {' | '.join(titles).rstrip()}\n# {' | '.join(names)}"


def line(table: Table, row: Mapping[str, Any]) -> str:
    groups = (" ".join(column.cell(row) for column in columns) for _, columns in table)
    text = f"  {' | '.join(groups)}"
    # At the end: what runs without JAX_INTRANODE_TUNING, lax with tuned flags, and doubts.
    form = _MS if "k" in row else (".2f",)
    shipped = row.get("shipped_algorithm") or row.get("shipped_plan")
    if shipped is not None:
        text += f" | shipped: {shipped:>14} {number(row['shipped_time_us'], 8, *form)}"
    if row.get("lax_tuned_time_us") is not None:
        text += f" | lax tuned: {number(row['lax_tuned_time_us'], 8, *form)}"
    return f"{text} | doubtful: {', '.join(row['doubts'])}" if row.get("doubts") else text
