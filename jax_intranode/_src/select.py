"""Which algorithm runs an operation: a pure function of what all ranks know, and its table."""

import dataclasses
import hashlib
from dataclasses import dataclass

# In the order of enum Algorithm in xla_ffi/kernels/algorithms.h, whose numbers travel in the HLO.
ALGORITHMS = ("one_shot", "two_shot", "reduce_scatter", "all_gather")
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


@dataclass(frozen=True)
class Row:
    """Up to `packet_bytes`, use `algorithm` with blocks of `threads`, at most `blocks` of them.

    Sizes are those of the packets: twice the message for types whose packets carry flags.
    """

    packet_bytes: int
    algorithm: str
    threads: int
    blocks: int


_KB, _MB = 1 << 10, 1 << 20

_GPU_2 = (
    Row(512 * _KB, "one_shot", 128, 256),
    Row(1 * _MB, "one_shot", 256, 256),
    Row(4 * _MB, "one_shot", 512, 256),
    Row(12 * _MB, "two_shot", 512, 256),
)
_GPU_4 = (
    Row(192 * _KB, "one_shot", 128, 128),
    Row(2 * _MB, "two_shot", 128, 256),
    Row(4 * _MB, "two_shot", 256, 256),
    Row(12 * _MB, "two_shot", 512, 256),
)
_GPU_8 = (
    Row(64 * _KB, "one_shot", 128, 128),
    Row(1 * _MB, "two_shot", 128, 128),
    Row(4 * _MB, "two_shot", 512, 128),
    Row(12 * _MB, "two_shot", 512, 256),
)

# What psum_scatter and all_gather run as. Sizes are those of one rank's part.
_GPU_PART = (
    Row(512 * _KB, "", 128, 256),
    Row(1 * _MB, "", 256, 256),
    Row(4 * _MB, "", 512, 256),
)

# For psum, by platform, process mode ("single": one process has all devices of the mesh; "multi")
# and world size; other sizes use the next larger one's rows. Larger messages lower to lax.
TABLE: dict[tuple[str, str, int], tuple[Row, ...]] = {
    ("gpu", "single", 2): _GPU_2,
    ("gpu", "single", 4): _GPU_4,
    ("gpu", "single", 8): _GPU_8,
    ("gpu", "multi", 2): _GPU_2,
    ("gpu", "multi", 4): _GPU_4,
    ("gpu", "multi", 8): _GPU_8,
    # On the CPU one thread does the work of all ranks of its process: the total counts, not the
    # number of hops.
    ("cpu", "single", 2): (Row(4 * _KB, "one_shot", 1, 1),),
    ("cpu", "single", 8): (Row(1 * _KB, "one_shot", 1, 1), Row(4 * _KB, "two_shot", 1, 1)),
    ("cpu", "multi", 2): (Row(64 * _KB, "one_shot", 1, 1),),
    ("cpu", "multi", 8): (Row(8 * _KB, "one_shot", 1, 1), Row(64 * _KB, "two_shot", 1, 1)),
}

# For psum_scatter and all_gather, by platform and process mode.
PARTS = {
    ("gpu", "single"): _GPU_PART,
    ("gpu", "multi"): _GPU_PART,
    ("cpu", "single"): (Row(2 * _KB, "", 1, 1),),
    ("cpu", "multi"): (Row(32 * _KB, "", 1, 1),),
}


def digest() -> str:
    """Identifies the tables: ranks with different tables would choose differently."""
    text = repr((TABLE, PARTS))
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


def _half_bytes_needed(algorithm: str, packet_bytes: int, world_size: int, packet: int) -> int:
    packs = -(-packet_bytes // packet)
    if algorithm == "two_shot":
        return 2 * world_size * max(1, -(-packs // world_size)) * packet
    return world_size * packs * packet


def select(
    operation: str,
    *,
    nbytes: int,
    dtype: str,
    world_size: int,
    platform: str,
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
        platform: "cpu" or "gpu".
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
    dtypes = COPIED_DTYPES if operation == "all_gather" else DTYPES
    if dtype not in dtypes:
        return lax(f"dtype {dtype}; supported are {', '.join(dtypes)}")
    # A packet carries a pack of data, in 16 or 32 bytes.
    packet = 16 if dtype in _BARE else 32
    packs = -(-nbytes // PACK_BYTES)
    packet_bytes = packs * packet
    if operation == "psum":
        larger = [n for p, m, n in TABLE if (p, m) == (platform, mode) and n >= world_size]
        rows = TABLE[platform, mode, min(larger)]
    else:
        only = {"psum_scatter": "reduce_scatter", "all_gather": "all_gather"}[operation]
        rows = tuple(dataclasses.replace(row, algorithm=only) for row in PARTS[platform, mode])
        algorithm = "auto"
    if algorithm == "auto":
        row = next((row for row in rows if packet_bytes <= row.packet_bytes), None)
        if row is None:
            limit = rows[-1].packet_bytes * PACK_BYTES // packet
            return lax(f"{nbytes} bytes of {dtype}; up to {limit} are faster than lax")
        reason = f"{nbytes} bytes of {dtype} among {world_size} ranks"
    else:
        fitting = [row for row in rows if row.algorithm == algorithm]
        row = fitting[-1] if fitting else dataclasses.replace(rows[-1], algorithm=algorithm)
        reason = f"JAX_INTRANODE_ALGORITHM={algorithm}"
    needed = _half_bytes_needed(row.algorithm, packet_bytes, world_size, packet)
    if needed > half_bytes:
        return lax(
            f"{nbytes} bytes of {dtype} take {needed} bytes of a buffer of {half_bytes}; "
            "JAX_INTRANODE_SLAB_MIB sets its size"
        )
    work = -(-packs // world_size) if row.algorithm == "two_shot" else packs
    blocks = max(1, min(row.blocks, -(-work // row.threads)))
    return Selection(row.algorithm, reason, blocks, row.threads)
