"""What a node gains: for each operation and size, what runs it. `demo` measures how much."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jax_intranode._src.group import slabs
from jax_intranode._src.native import extension
from jax_intranode._src.operations import COLLECTIVE, of_kind
from jax_intranode._src.report import explain
from jax_intranode._src.selection import config, generations, select, tuning
from jax_intranode._src.selection.overlap import choice, profiles
from jax_intranode._src.selection.overlap.profiles import GpuFacts, Profile
from jax_intranode._src.selection.overlap.sizes import Sizes

_KB, _MB = 1 << 10, 1 << 20
_SIZES = {
    "cpu": (1 * _KB, 4 * _KB, 16 * _KB, 64 * _KB),
    "gpu": (1 * _KB, 16 * _KB, 64 * _KB, 256 * _KB, 1 * _MB, 4 * _MB, 16 * _MB),
}
_SHAPES = {
    "all_gather_matmul": ((8192, 8192, 8192), (8192, 8192, 1024), (4096, 8192, 3584)),
    "matmul_reduce_scatter": ((8192, 3584, 8192), (8192, 1024, 8192), (4096, 1024, 28672)),
}
_DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
# Modes by the name that the tables of the selection use.
_MODES = {"multi": "one process per device", "single": "one process"}


@dataclass(frozen=True)
class Benefit:
    """What is expected of an operation.

    Attributes:
        operation: the function's name.
        mode: "multi" for one process per device, "single" for one process with all devices.
        nbytes: bytes that a rank sends to each peer. None for matmuls.
        shape: m, k and n of the product that a device computes; None for other operations.
        path: the algorithm or the kernel, or "jax.lax".
        reason: why.
        measured: whether our kernels are known to be faster there.
    """

    operation: str
    mode: str
    nbytes: int | None
    shape: tuple[int, int, int] | None
    path: str
    reason: str
    measured: bool = True


def of_node(
    platform: str, device_kind: str, count: int, facts: Sequence[GpuFacts]
) -> list[Benefit]:
    """What is expected of a mesh of so many devices of a kind, which can reach each other."""
    found = []
    buffer_bytes = slabs.epoch_buffer_bytes(
        config.get().slab_bytes(platform), extension.module("cpu").HEADER_BYTES
    )
    operations = [record.name for record in of_kind(COLLECTIVE)]
    for mode, operation, nbytes in itertools.product(_MODES, operations, _SIZES[platform]):
        chosen = select.select(
            operation,
            nbytes=nbytes,
            dtype=_DTYPES[platform],
            world_size=count,
            hardware=generations.hardware_of(platform, device_kind),
            mode=mode,
            epoch_buffer_bytes=buffer_bytes,
            algorithm=config.get().algorithm,
            tuned=tuning.rows_for([device_kind]),
        )
        path = "jax.lax" if chosen.algorithm == "lax" else chosen.algorithm.replace("_", "-")
        found.append(Benefit(operation, mode, nbytes, None, path, chosen.reason, chosen.measured))
    if platform == "cpu":
        return found
    profile = tuning.profile_for([device_kind]) or profiles.from_facts(facts)
    ring_bytes = config.get().ring_bytes("gpu")
    for operation, shape in [(name, shape) for name in _SHAPES for shape in _SHAPES[name]]:
        m, k, n = shape
        sizes = Sizes(operation, 1, m // count, (k,), (n,), count)
        plan = choice.choose(sizes, dtype="bfloat16", profile=profile, ring_bytes=ring_bytes)
        if isinstance(plan, str):
            path, reason = "jax.lax", plan
        else:
            path = "fused kernel" if plan.fused else "cuBLASLt pipeline"
            reason = profile.note if isinstance(profile, Profile) else ""
        found.append(Benefit(operation, "multi", None, shape, path, reason))
    return found


def table_of(found: Sequence[Benefit]) -> str:
    """Returns the benefits as a table; sizes that run alike are one row."""
    rows: list[tuple[str, ...]] = [("operation", "processes", "size", "runs as")]
    for one in found:
        mode = "any" if one.shape else _MODES[one.mode]
        size = " x ".join(map(str, one.shape)) if one.shape else size_text(one.nbytes or 0)
        before = rows[-1]
        path = one.path if one.measured else f"{one.path} (not measured)"
        if one.nbytes and (*before[:2], before[3]) == (one.operation, mode, path):
            size = f"{before[2].partition(' to ')[0]} to {size}"
            rows.pop()
        rows.append((one.operation, mode, size, path))
    return "\n".join(f"  {line}" for line in explain.aligned(rows))


def size_text(nbytes: int) -> str:
    """Returns bytes as "64 KB"."""
    for unit, factor in (("GB", 1 << 30), ("MB", _MB), ("KB", _KB)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def summary(found: Sequence[Benefit]) -> str:
    """Returns the benefits in a sentence, after "your node benefits: "."""
    parts = []
    for operation in dict.fromkeys(benefit.operation for benefit in found):
        ours = [b for b in found if b.path != "jax.lax" and b.measured]
        of_one = [b for b in ours if b.operation == operation]
        if of_one:
            sizes = [b.nbytes for b in of_one if b.nbytes]
            parts.append(operation + (f" up to {size_text(max(sizes))}" if sizes else ""))
    return ", ".join(parts) or "nothing is faster than jax.lax here"
