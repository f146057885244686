"""Names, limits and sizes that Python shares with the C++ code.

The C++ headers define them. The native host module, which is always built, exports them
(xla_ffi/module_limits.cc).
"""

from collections.abc import Callable

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
# The blocks of a launch, and the threads of a block, at most.
MAX_BLOCKS: int = _host.MAX_BLOCKS
MAX_THREADS: int = _host.MAX_THREADS
# Buffers of one operation. Each begins with a pack of its own: PACK_BYTES of data.
MAX_BUFFERS: int = _host.MAX_BUFFERS
MAX_PACKS: int = _host.MAX_PACKS  # of several buffers together
# The arrays of one permute.
MAX_MEMBERS: int = _host.MAX_MEMBERS
# The updates of a rank in a ragged all-to-all, to all ranks together.
MAX_UPDATES: int = _host.MAX_UPDATES
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
# The most rows that the kernel of few rows takes.
MOST_FEW_ROWS: int = _host.MOST_FEW_ROWS
# A row of x takes at most 1 / MIN_SLOTS of a rank's share of the ring buffer.
MIN_SLOTS: int = _host.MIN_SLOTS
# In larger groups than this, the shards of all peers arrive together.
MAX_RANKS_IN_STEP: int = _host.MAX_RANKS_IN_STEP
# The names of the fields of the plan of an overlapped matmul (xla_ffi/cuda/matmul_plan.h).
PLAN_FIELDS: tuple[str, ...] = _host.PLAN_FIELDS


# Functions. Their arguments have the same names in C++.

# (algorithm) -> whether it has a region of its own, beside that of all others.
has_own_region: Callable[..., bool] = _host.has_own_region
# (dtype) -> bytes of an element of a dtype that can be summed.
item_bytes: Callable[..., int] = _host.item_bytes
# (algorithm, dtype) -> bytes of the packet in which it sends PACK_BYTES of data.
packet_bytes: Callable[..., int] = _host.packet_bytes
# (algorithm, dtype, nbytes, world_size, segments) -> bytes of an epoch buffer that an operation
# takes. `nbytes` are those that a rank sends to each peer, as in `select.select`.
epoch_buffer_bytes_needed: Callable[..., int] = _host.epoch_buffer_bytes_needed
# (algorithm, packs, world_size, segments) -> packs of each segment of an operation of so many.
segment_packs: Callable[..., int] = _host.segment_packs
# (algorithm, dtype, hidden, world_size, epoch_buffer_bytes) -> the most rows of a rank's result,
# of `hidden` elements each, that one operation of a norm computes; 0 if no row fits.
norm_rows_per_operation: Callable[..., int] = _host.norm_rows_per_operation
# (world_size, ids, experts, blocks, nbytes, epoch_buffer_bytes) -> whether a dispatch can find who
# goes where: of a rank's ids, experts, and bytes of tokens, whose rows fill whole packs.
routed_fits: Callable[..., bool] = _host.routed_fits
# (operation, tile_columns, wgrad) -> whether a fused kernel is compiled for this width of tiles;
# with `wgrad`, one that also computes weight gradients.
has_fused_kernel: Callable[..., bool] = _host.has_fused_kernel
# (m, k, n) -> whether the kernel of few rows can multiply m rows with a matrix [k, n].
few_rows_fit: Callable[..., bool] = _host.few_rows_fit
# (ring_bytes) -> bytes of a ring buffer before its data: the header and the flags.
ring_data_offset: Callable[..., int] = _host.ring_data_offset
