"""Names, limits and sizes that Python shares with the C++ code.

The C++ headers define them. The native host module, which is always built, exports them
(xla_ffi/module_limits.cc).
"""

from jax_intranode._src import native

_host = native.module("cpu")

# The names of the algorithms. A name's position is its number, which travels in the HLO.
ALGORITHMS: tuple[str, ...] = _host.ALGORITHMS
# The dtypes that can be summed.
DTYPES: tuple[str, ...] = _host.DTYPES
# The numbers of the reasons for which a kernel gives up: timeout, aborted, busy, closed.
FAILURE_REASONS: dict[str, int] = _host.FAILURE_REASONS

MAX_WORLD_SIZE: int = _host.MAX_WORLD_SIZE
# Buffers of one operation. Each begins with a pack of its own: PACK_BYTES of data.
MAX_BUFFERS: int = _host.MAX_BUFFERS
PACK_BYTES: int = _host.PACK_BYTES

# The fused kernels of collective matmuls: rows of a tile and the columns of K that a stage
# multiplies.
TILE_ROWS: int = _host.TILE_ROWS
TILE_DEPTH: int = _host.TILE_DEPTH
# The largest group whose ranks stay in step without taking turns (xla_ffi/cuda/fused_order.h).
MAX_RANKS_IN_STEP: int = _host.MAX_RANKS_IN_STEP


def packet_bytes(algorithm: str, dtype: str) -> int:
    """Bytes of the packet in which an algorithm sends PACK_BYTES of a dtype."""
    return _host.packet_bytes(algorithm, dtype)


def epoch_buffer_bytes_needed(algorithm: str, dtype: str, nbytes: int, world_size: int) -> int:
    """Bytes of an epoch buffer that an operation takes.

    Args:
        algorithm: one of ALGORITHMS.
        dtype: the operand's dtype.
        nbytes: bytes of each rank's operand; for psum_scatter of each rank's result.
        world_size: ranks of the group.
    """
    return _host.epoch_buffer_bytes_needed(algorithm, dtype, nbytes, world_size)


def failure_message(
    reason: int,
    algorithm: int,
    timeout_s: float,
    device_ids: tuple[int, ...],
    rank: int,
    missing: int,
    ordinal: int,
) -> str:
    """The message of a kernel that gave up.

    Args:
        reason: one of the numbers in FAILURE_REASONS.
        algorithm: index into ALGORITHMS.
        timeout_s: JAX_INTRANODE_TIMEOUT_S.
        device_ids: the devices of its group, in rank order; empty if they are not known.
        rank: the rank that gave up.
        missing: the rank that it waited for; -1 for none.
        ordinal: CUDA's number of the GPU.
    """
    return _host.failure_message(
        reason, algorithm, timeout_s, list(device_ids), rank, missing, ordinal
    )
