"""Which algorithm runs an operation: a pure function of what all ranks know, and its table."""

import dataclasses
import hashlib
from dataclasses import dataclass

from jax_intranode._src import table

# In the order of enum Algorithm in xla_ffi/kernels/algorithms.h, whose numbers travel in the HLO.
ALGORITHMS = (
    "one_shot",
    "two_shot",
    "reduce_scatter",
    "all_gather",
    "all_gather_matmul",
    "matmul_reduce_scatter",
)
# Those that psum has to choose from.
PSUM_ALGORITHMS = ("one_shot", "two_shot")

# Types whose packets carry no flag beside the data (xla_ffi/kernels/types.h), and the others.
_BARE = ("float32", "bfloat16", "float16")
_FLAGGED = ("float64", "int8", "uint8", "int32", "uint32", "int64", "uint64")
DTYPES = _BARE + _FLAGGED
# What can be gathered: it is copied, not summed.
COPIED_DTYPES = (*DTYPES, "bool", "int16", "uint16", "complex64", "complex128")

MAX_WORLD_SIZE = 8
# Buffers of one operation (xla_ffi/kernels/buffers.h), and what each begins with a multiple of.
MAX_BUFFERS = 128
PACK_BYTES = 16


def digest() -> str:
    """Identifies the tables: ranks with different tables would choose differently."""
    text = repr((table.TABLE, table.GENERATIONS))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Selection:
    """What runs, and why.

    Attributes:
        algorithm: one of ALGORITHMS, or "lax".
        reason: why, for people.
        blocks: blocks that the kernel is launched with.
        threads: threads a block.
    """

    algorithm: str
    reason: str
    blocks: int = 0
    threads: int = 0


def packet_bytes_of(dtype: str) -> int:
    """Bytes of a packet, which carries a pack of data."""
    return PACK_BYTES if dtype in _BARE else 2 * PACK_BYTES


def half_bytes_needed(algorithm: str, packet_bytes: int, world_size: int, packet: int) -> int:
    """Bytes of a half that an operation takes (HalfBytesNeeded in xla_ffi/kernels/algorithms.h)."""
    packs = -(-packet_bytes // packet)
    if algorithm == "two_shot":
        return 2 * world_size * max(1, -(-packs // world_size)) * packet
    return world_size * packs * packet


def unsupported_dtype(operation: str, dtype: str) -> str | None:
    """Why an operation on arrays of a dtype is not ours, or None if it may be."""
    dtypes = COPIED_DTYPES if operation == "all_gather" else DTYPES
    return None if dtype in dtypes else f"dtype {dtype}; supported are {', '.join(dtypes)}"


def select(
    operation: str,
    *,
    nbytes: int,
    dtype: str,
    world_size: int,
    hardware: str,
    mode: str,
    half_bytes: int,
    algorithm: str = "auto",
) -> Selection:
    """Chooses the algorithm of an operation.

    Args:
        operation: "psum", "psum_scatter" or "all_gather".
        nbytes: bytes of each rank's operand; for psum_scatter of each rank's result.
        dtype: name of its dtype.
        world_size: ranks of the group.
        hardware: "cpu", or the generation of the GPUs (`table.hardware_of`).
        mode: "single" if one process has all devices of the mesh, else "multi".
        half_bytes: bytes of each of a region's two buffers.
        algorithm: "auto", or the one to use wherever it fits.
    """

    def lax(reason: str) -> Selection:
        return Selection("lax", reason)

    if algorithm == "lax":
        return lax("JAX_INTRANODE_ALGORITHM=lax")
    if nbytes == 0:
        return lax(f"{operation} of no elements")
    if world_size == 1:
        return lax("a group of one rank")
    if world_size > MAX_WORLD_SIZE:
        return lax(f"a group of {world_size} ranks; at most {MAX_WORLD_SIZE} are supported")
    if unsupported := unsupported_dtype(operation, dtype):
        return lax(unsupported)
    packet = packet_bytes_of(dtype)
    packs = -(-nbytes // PACK_BYTES)
    packet_bytes = packs * packet
    packets = "bare" if dtype in _BARE else "flagged"
    rows = table.rows(hardware, mode, operation, packets, world_size)
    if operation != "psum":
        algorithm = "auto"  # there is but one
    if algorithm == "auto":
        fitting = [row for row in rows if nbytes <= row.nbytes]
        if not fitting:
            return lax(f"{nbytes} bytes of {dtype}; up to {rows[-1].nbytes} are faster than lax")
        row = fitting[0]
        reason = f"{nbytes} bytes of {dtype} among {world_size} ranks"
    else:
        fitting = [row for row in rows if row.algorithm == algorithm]
        row = fitting[-1] if fitting else dataclasses.replace(rows[-1], algorithm=algorithm)
        reason = f"JAX_INTRANODE_ALGORITHM={algorithm}"
    needed = half_bytes_needed(row.algorithm, packet_bytes, world_size, packet)
    if needed > half_bytes:
        return lax(
            f"{nbytes} bytes of {dtype} take {needed} bytes of a buffer of {half_bytes}; "
            "JAX_INTRANODE_SLAB_MIB sets its size"
        )
    work = -(-packs // world_size) if row.algorithm == "two_shot" else packs
    blocks = max(1, min(row.blocks, -(-work // row.threads)))
    return Selection(row.algorithm, reason, blocks, row.threads)
