"""What a node gains: for each operation and size, what runs it, and how much faster that was.

Selection says what runs an operation, as in a program. The ratio to ``jax.lax`` is a measured one
or nothing: where the GPUs, their number or the process mode were not measured, none is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax_intranode._src.group import rendezvous
from jax_intranode._src.native import extension
from jax_intranode._src.selection import config, overlap, select, table, tuning
from jax_intranode._src.selection.gpu_facts import GpuFacts
from jax_intranode._src.selection.overlap.profiles import Profile

_KB, _MB = 1 << 10, 1 << 20

# Measured ratios, lax's time / ours, from docs/performance.md (jax 0.12.0.1): by device, process
# mode and number of devices, the operation, and bytes or (m, k, n). 4 GPUs:
# docs/measurements/earlier.md.
MEASURED: dict[tuple[str, str, int], dict[str, dict[int | tuple[int, int, int], float]]] = {
    ("cpu", "multi", 2): {
        "psum": {1 * _KB: 23.68, 4 * _KB: 8.82, 16 * _KB: 3.21, 64 * _KB: 1.59},
    },
    ("cpu", "single", 2): {"psum": {1 * _KB: 5.32}},
    ("NVIDIA H200", "multi", 2): {
        "psum": {
            **{1 * _KB: 1.68, 4 * _KB: 1.58, 16 * _KB: 1.49, 64 * _KB: 1.49},
            **{256 * _KB: 1.82, 1 * _MB: 1.65, 4 * _MB: 1.68},
        },
        "all_gather_matmul": {
            (8192, 8192, 8192): 1.11,
            (8192, 8192, 1024): 1.95,
            (4096, 8192, 3584): 1.31,
        },
        "matmul_reduce_scatter": {
            (8192, 3584, 8192): 1.25,
            (8192, 1024, 8192): 1.86,
            (4096, 1024, 28672): 1.86,
        },
    },
    ("NVIDIA H200", "single", 2): {
        "psum": {
            **{1 * _KB: 1.61, 4 * _KB: 1.55, 16 * _KB: 1.44, 64 * _KB: 1.46},
            **{256 * _KB: 1.85, 1 * _MB: 1.63, 4 * _MB: 1.68},
        },
    },
    ("NVIDIA H200", "multi", 4): {
        "psum": {
            **{1 * _KB: 1.41, 4 * _KB: 1.41, 16 * _KB: 1.45, 64 * _KB: 1.40},
            **{256 * _KB: 1.51, 1 * _MB: 1.77, 4 * _MB: 1.62},
        },
    },
    ("NVIDIA H200", "single", 4): {
        "psum": {
            **{1 * _KB: 1.64, 4 * _KB: 1.56, 16 * _KB: 1.46, 64 * _KB: 1.35},
            **{256 * _KB: 1.62, 1 * _MB: 1.91},
        },
    },
}

_SIZES = {
    "cpu": (1 * _KB, 4 * _KB, 16 * _KB, 64 * _KB),
    "gpu": (1 * _KB, 16 * _KB, 64 * _KB, 256 * _KB, 1 * _MB, 4 * _MB, 16 * _MB),
}
_SHAPES = {
    "all_gather_matmul": ((8192, 8192, 8192), (8192, 8192, 1024), (4096, 8192, 3584)),
    "matmul_reduce_scatter": ((8192, 3584, 8192), (8192, 1024, 8192), (4096, 1024, 28672)),
}
_DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
# Modes by the name that the tables of the benchmark use.
MODES = {"multi": "one process per device", "single": "one process"}


@dataclass(frozen=True)
class Benefit:
    """What is expected of an operation.

    Attributes:
        operation: the function's name.
        mode: "multi" for one process per device, "single" for one process with all devices.
        nbytes: bytes of the operand; for psum_scatter of a rank's result. None for matmuls.
        shape: m, k and n of the product that a device computes; None for other operations.
        path: the algorithm or the kernel, or "jax.lax".
        reason: why.
        ratio: the measured time of ``jax.lax`` divided by ours; None if it was not measured, or if
            ``jax.lax`` runs the operation.
    """

    operation: str
    mode: str
    nbytes: int | None
    shape: tuple[int, int, int] | None
    path: str
    reason: str
    ratio: float | None


def of_node(
    platform: str, device_kind: str, count: int, facts: Sequence[GpuFacts]
) -> list[Benefit]:
    """What is expected of a mesh of these devices, which can reach each other.

    Args:
        platform: "cpu" or "gpu".
        device_kind: the kind of the devices; "cpu" for CPU devices.
        count: how many there are.
        facts: those of the GPUs.
    """
    found = []
    for mode in MODES:
        for operation in ("psum", "psum_scatter", "all_gather"):
            for nbytes in _SIZES[platform]:
                found.append(_collective(platform, device_kind, count, mode, operation, nbytes))
    if platform == "gpu":
        profile = tuning.profile_for([device_kind]) or overlap.from_facts(facts)
        for operation, shapes in _SHAPES.items():
            for shape in shapes:
                found.append(_matmul(device_kind, count, operation, shape, profile))
    return found


def _collective(
    platform: str, device_kind: str, count: int, mode: str, operation: str, nbytes: int
) -> Benefit:
    chosen = select.select(
        operation,
        nbytes=nbytes,
        dtype=_DTYPES[platform],
        world_size=count,
        hardware=table.hardware_of(platform, device_kind),
        mode=mode,
        epoch_buffer_bytes=rendezvous.epoch_buffer_bytes(
            config.get().slab_bytes(platform), extension.module("cpu").HEADER_BYTES
        ),
        algorithm=config.get().algorithm,
        tuned=tuning.rows_for([device_kind]),
    )
    ratio = None
    if chosen.algorithm != "lax":
        measured = MEASURED.get((device_kind, mode, count), {}).get(operation, {})
        ratio = measured.get(nbytes)
    path = {"lax": "jax.lax"}.get(chosen.algorithm, chosen.algorithm.replace("_", "-"))
    return Benefit(operation, mode, nbytes, None, path, chosen.reason, ratio)


def _matmul(
    device_kind: str,
    count: int,
    operation: str,
    shape: tuple[int, int, int],
    profile: Profile | str,
) -> Benefit:
    m, k, n = shape
    sizes = overlap.Sizes(operation, 1, m // count, (k,), (n,), count)
    ring_bytes = config.get().ring_bytes("gpu")
    plan = overlap.choose(sizes, dtype="bfloat16", profile=profile, ring_bytes=ring_bytes)
    if isinstance(plan, str):
        return Benefit(operation, "multi", None, shape, "jax.lax", plan, None)
    path = "fused kernel" if plan.fused else "cuBLASLt pipeline"
    note = profile.note if isinstance(profile, Profile) else ""
    ratio = MEASURED.get((device_kind, "multi", count), {}).get(operation, {}).get(shape)
    return Benefit(operation, "multi", None, shape, path, note, ratio)


def table_of(found: Sequence[Benefit]) -> str:
    """Returns the benefits as a table; rows that are alike but for the size are one row."""
    rows: list[tuple[str, ...]] = [("operation", "processes", "size", "runs as", "times as fast")]
    for benefit in found:
        size = (
            " x ".join(map(str, benefit.shape)) if benefit.shape else size_text(benefit.nbytes or 0)
        )
        mode = "any" if benefit.shape else MODES[benefit.mode]
        if benefit.path == "jax.lax":
            ratio = "1"
        else:
            ratio = "not measured" if benefit.ratio is None else f"{benefit.ratio:.2f}"
        rows.append((benefit.operation, mode, size, benefit.path, ratio))
    rows = _joined(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _joined(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Joins rows that follow each other and differ in the size only."""
    joined: list[tuple[str, ...]] = []
    for row in rows:
        operation, mode, size, *rest = row
        if joined and " x " not in size:
            before = joined[-1]
            if (before[:2], list(before[3:])) == ((operation, mode), rest):
                first = before[2].partition(" to ")[0]
                joined[-1] = (operation, mode, f"{first} to {size}", *rest)
                continue
        joined.append(row)
    return joined


def size_text(nbytes: int) -> str:
    """Returns bytes as "64 KB" or "4 MB"."""
    return f"{nbytes // _MB} MB" if nbytes >= _MB else f"{nbytes // _KB} KB"


def summary(found: Sequence[Benefit]) -> str:
    """Returns the benefits in a sentence, after "your node benefits: "."""
    parts = []
    for operation in dict.fromkeys(benefit.operation for benefit in found):
        of_one = [b for b in found if b.operation == operation and b.path != "jax.lax"]
        ratios = [b.ratio for b in of_one if b.ratio is not None]
        if not of_one:
            continue
        sizes = [b.nbytes for b in of_one if b.nbytes]
        upto = f" up to {size_text(max(sizes))}" if sizes else ""
        text = "not measured"
        if ratios:
            low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
            text = f"{low} times" if low == high else f"{low} to {high} times"
        parts.append(f"{operation}{upto} ({text})")
    return ", ".join(parts) or "nothing is faster than jax.lax here"
