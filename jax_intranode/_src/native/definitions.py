"""Names, limits and sizes that Python shares with the C++ code.

The C++ headers define them. The native host module, which is always built, exports them
(xla_ffi/module_limits.cc).
"""

from jax_intranode._src.native import extension

_host = extension.module("cpu")

# The names of the algorithms. A name's position is its number, which travels in the HLO.
ALGORITHMS: tuple[str, ...] = _host.ALGORITHMS
# The Python function that runs each algorithm.
OPERATIONS: dict[str, str] = _host.OPERATIONS
# The dtypes that can be summed.
DTYPES: tuple[str, ...] = _host.DTYPES
# The numbers of the reasons for which a kernel gives up: timeout, aborted, busy, closed.
FAILURE_REASONS: dict[str, int] = _host.FAILURE_REASONS

# The algorithms that can send a large message in segments, and how many at most.
IN_SEGMENTS: tuple[str, ...] = _host.IN_SEGMENTS
MAX_SEGMENTS: int = _host.MAX_SEGMENTS

MAX_WORLD_SIZE: int = _host.MAX_WORLD_SIZE
# Buffers of one operation. Each begins with a pack of its own: PACK_BYTES of data.
MAX_BUFFERS: int = _host.MAX_BUFFERS
PACK_BYTES: int = _host.PACK_BYTES

# The longest row that a norm takes, in elements.
MAX_HIDDEN: int = _host.MAX_HIDDEN

# Collective matmuls (cuda/matmul_limits.h). A tile of the fused kernel has TILE_ROWS rows and is
# multiplied in steps of TILE_DEPTH elements of K. TILE_COLUMNS lists the widths of tiles for
# which some kernel is compiled.
TILE_ROWS: int = _host.TILE_ROWS
TILE_DEPTH: int = _host.TILE_DEPTH
TILE_COLUMNS: tuple[int, ...] = _host.TILE_COLUMNS
WGRAD_COLUMNS: int = _host.WGRAD_COLUMNS
# The widest tile at which one math warpgroup stores its tile while the other multiplies.
MAX_ALTERNATING_COLUMNS: int = _host.MAX_ALTERNATING_COLUMNS
MAX_MATRICES: int = _host.MAX_MATRICES
# The largest number of first and last pieces of a cuBLASLt pipeline.
MAX_PIECES: int = _host.MAX_PIECES
# A row of x takes at most 1 / MIN_SLOTS of a rank's share of the ring buffer.
MIN_SLOTS: int = _host.MIN_SLOTS
# In larger groups than this, the shards of all peers arrive together.
MAX_RANKS_IN_STEP: int = _host.MAX_RANKS_IN_STEP
# Bytes of the ring buffer's data that travel with one flag.
CHUNK_BYTES: int = _host.CHUNK_BYTES
# The names of the fields of the plan of an overlapped matmul (xla_ffi/cuda/matmul_plan.h).
PLAN_FIELDS: tuple[str, ...] = _host.PLAN_FIELDS


def packet_bytes(algorithm: str, dtype: str) -> int:
    """Bytes of the packet in which an algorithm sends PACK_BYTES of a dtype."""
    return _host.packet_bytes(algorithm, dtype)


def epoch_buffer_bytes_needed(
    algorithm: str, dtype: str, nbytes: int, world_size: int, segments: int = 1
) -> int:
    """Bytes of an epoch buffer that an operation takes.

    Args:
        algorithm: one of ALGORITHMS.
        dtype: the operand's dtype.
        nbytes: bytes that a rank sends to each peer, as in `select.select`.
        world_size: ranks of the group.
        segments: into how many the operation is cut.
    """
    return _host.epoch_buffer_bytes_needed(algorithm, dtype, nbytes, world_size, segments)


def segment_packs(algorithm: str, packs: int, world_size: int, segments: int) -> int:
    """Packs of each segment of an operation, all of which have as many.

    Args:
        algorithm: one of ALGORITHMS.
        packs: packs of the operation.
        world_size: ranks of the group.
        segments: into how many the operation is cut.
    """
    return _host.segment_packs(algorithm, packs, world_size, segments)


def norm_rows_per_operation(
    algorithm: str, dtype: str, hidden: int, world_size: int, epoch_buffer_bytes: int
) -> int:
    """The most rows that one operation of a norm takes; 0 if no row fits.

    Args:
        algorithm: one of ALGORITHMS that is a norm.
        dtype: the operand's dtype.
        hidden: elements of a row.
        world_size: ranks of the group.
        epoch_buffer_bytes: bytes of each of a region's two epoch buffers.

    Returns:
        Rows of a rank's result.
    """
    return _host.norm_rows_per_operation(algorithm, dtype, hidden, world_size, epoch_buffer_bytes)


def has_fused_kernel(operation: str, tile_columns: int, wgrad: bool) -> bool:
    """Whether a fused kernel is compiled for this width of tiles.

    Args:
        operation: "all_gather_matmul" or "matmul_reduce_scatter".
        tile_columns: columns of a tile.
        wgrad: whether the kernel also computes weight gradients.
    """
    return _host.has_fused_kernel(operation, tile_columns, wgrad)


def ring_data_offset(ring_bytes: int) -> int:
    """Bytes of a ring buffer before its data: the header and the flags."""
    return _host.ring_data_offset(ring_bytes)
