"""Whether a collective matmul is overlapped, and how it is cut.

A pure function of what all ranks know.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_intranode._src import select

DTYPES = ("bfloat16", "float16")
# Of the kernel's tiles (xla_ffi/cuda/fused_matmul.h), which multiply so much at a time and so many
# matrices at most.
TILE_ROWS = 128
_TILE_DEPTH = 64
_MAX_MATRICES = 4
# Bytes of a ring for each flag of four bytes, and before the flags.
_BYTES_OF_FLAG, _RING_HEADER = 8192, 4096


@dataclass(frozen=True)
class Plan:
    """How an operation runs: as a pipeline of matmuls (xla_ffi/cuda/collective_matmul.h), or as one
    kernel (xla_ffi/cuda/fused_matmul.h).

    Attributes:
        first_cuts: of a pipeline, into how many pieces the first rows are cut that are sent, for
            sums. Each has half of what is left, the smallest comes first.
        last_cuts: so for the last rows that are sent; the smallest comes last.
        tile_columns: of a kernel, the columns of its tiles: 128, 192 or 256. 0 for a pipeline.
        group_pairs: pairs of row tiles that it multiplies with all columns before the next ones.
    """

    first_cuts: int = 1
    last_cuts: int = 1
    tile_columns: int = 0
    group_pairs: int = 8

    def __str__(self) -> str:
        if self.tile_columns:
            return f"one kernel, tiles of {TILE_ROWS} x {self.tile_columns}"
        return f"first rows in {self.first_cuts}, last in {self.last_cuts} pieces"


_forced: Plan | None = None


@contextlib.contextmanager
def forced(plan: Plan | None) -> Iterator[None]:
    """Uses a plan for all that is lowered within, whatever is faster. For tuning and for tests."""
    global _forced
    before, _forced = _forced, plan
    try:
        yield
    finally:
        _forced = before


# Measured on 4 H200s: what the model below goes by.
_MATMUL_FLOPS = 680e12  # a second, of a large matmul
_LINK_BYTES = 375e9  # a second, by copy engines
_MULTIPROCESSORS = 132
_TILE = 128  # rows and columns of an output that a multiprocessor works on at a time
# Below this many bytes the other way round is as fast or faster: about 65 us of copying.
_LEAST_BYTES = 24e6
HARDWARE = "hopper"
# Pieces of a ring that a row has to fit into, for each rank.
_SLOTS = 4


def digest() -> str:
    """Identifies the model: ranks with different ones would choose differently."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def plan(
    operation: str,
    *,
    outer: int,
    rows: int,
    k: int,
    ns: Sequence[int],
    dtype: str,
    world_size: int,
    hardware: str,
    ring_bytes: int,
) -> Plan | str:
    """Chooses a plan, by a model of what overlapping hides and what it costs.

    It hides the time of what travels. It costs the waits for the first and the last piece, which
    are the same for all sizes, and it costs time where matmuls of a rank's rows fill the GPU less
    well than one of all rows.

    Args:
        operation: "all_gather_matmul" or "matmul_reduce_scatter".
        outer: arrays of rows that are multiplied as a batch: dimensions before the one that is
            gathered or cut.
        rows: rows of each, of the operand or of the result, that a rank has to itself.
        k: the contracted dimension.
        ns: columns of each matrix.
        dtype: name of the dtype of the operands and results.
        world_size: ranks of the group.
        hardware: the generation of the GPUs (`table.hardware_of`).
        ring_bytes: bytes of a device's ring.

    Returns:
        The plan, or why the operation is not overlapped.
    """
    if dtype not in DTYPES:
        return f"dtype {dtype}; overlapped are {', '.join(DTYPES)}"
    if not 2 <= world_size <= select.MAX_WORLD_SIZE:
        return f"a group of {world_size} ranks; overlapped are 2 to {select.MAX_WORLD_SIZE}"
    if outer == 0 or rows == 0 or k == 0 or 0 in ns:
        return "no elements"
    if k % 8 or any(n % 8 for n in ns):
        return f"K {k}, N {', '.join(map(str, ns))}; overlapped are multiples of 8"
    gathers = operation == "all_gather_matmul"
    row_bytes = 2 * (k if gathers else ns[0])

    def fits(fused: Plan) -> bool:
        sent = sent_bytes(operation, fused, outer, rows, k, ns, world_size)
        room = ring_bytes - ring_bytes // _BYTES_OF_FLAG * 4 - 2 * _RING_HEADER
        return len(ns) <= _MAX_MATRICES and sent <= room

    if _forced is not None and _forced.tile_columns:
        return _forced if fits(_forced) else "more bytes from peers than the ring takes at once"
    if row_bytes * _SLOTS * world_size > ring_bytes:
        return (
            f"rows of {row_bytes} bytes and a ring of {ring_bytes}; JAX_INTRANODE_RING_MIB sets "
            "its size"
        )
    if _forced is not None:
        return _forced
    if hardware != HARDWARE:
        return f"not measured on {hardware} GPUs"
    received = (world_size - 1) * outer * rows * row_bytes
    least = _LEAST_BYTES * max(1, world_size / 4)
    if received < least:
        return f"{received} bytes from peers; from {least:.0f} on overlapping is faster"
    link_s = received / _LINK_BYTES
    seconds = [2 * world_size * outer * rows * k * n / _MATMUL_FLOPS for n in ns]
    matmul_s = sum(seconds)
    lost_s = sum(s * (1 / _filled(outer, rows, n) - 1) for s, n in zip(seconds, ns, strict=True))
    if lost_s > link_s:
        return (
            f"matmuls of {rows} rows fill the GPU badly: {1e6 * lost_s:.0f} us lost for "
            f"{1e6 * link_s:.0f} us hidden"
        )
    if gathers:
        return Plan(last_cuts=2 if link_s > matmul_s else 1)
    return Plan(3, 2) if link_s > 0.8 * matmul_s else Plan()


def sent_bytes(
    operation: str, plan: Plan, outer: int, rows: int, k: int, ns: Sequence[int], world_size: int
) -> int:
    """Bytes that a kernel's whole tiles take in a ring, and those of a sum in scratch, too."""
    row_tiles = outer * -(-rows // TILE_ROWS)
    if operation == "all_gather_matmul":
        columns = -(-k // _TILE_DEPTH) * _TILE_DEPTH
    else:
        columns = sum(-(-n // plan.tile_columns) for n in ns) * plan.tile_columns
    return 2 * (world_size - 1) * row_tiles * TILE_ROWS * columns


def _filled(outer: int, rows: int, columns: int) -> float:
    """How much of what the GPU can compute the outputs of a batch take, in waves of whole tiles."""
    tiles = outer * -(-rows // _TILE) * -(-columns // _TILE)
    waves = -(-tiles // _MULTIPROCESSORS)
    return outer * rows * columns / (waves * _MULTIPROCESSORS * _TILE**2)
