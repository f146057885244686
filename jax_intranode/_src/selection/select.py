"""The selection: which algorithm runs an operation.

A pure function of what all ranks know, and of a measured table (table.py).
"""

import dataclasses
import functools
import hashlib
from dataclasses import dataclass
from typing import Any

from jax_intranode._src import reasons
from jax_intranode._src.native import definitions
from jax_intranode._src.operations import HYBRID_CUBE_MESH, RECORDS, protocol_of
from jax_intranode._src.reasons import Reason
from jax_intranode._src.selection import generations, table

# The threads for whose registers an SM has room, if each has as many as the compiler may give it: a
# 512th of an SM's, 128. Threads of kernels for 2 and 4 ranks have half as many.
_RESIDENT_THREADS = 512
# Threads of a block of a dispatch or a combine: two such blocks have the registers of an SM.
_THREADS_OF_EXPERTS = 256


def digest() -> str:
    """Identifies the tables. Ranks with different tables would select different algorithms."""
    text = repr((table.TABLE, table.NORMED, table.FEW_ROWS, generations.GENERATIONS))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Selection:
    """What runs an operation, and why.

    Attributes:
        algorithm: one of definitions.ALGORITHMS, or "lax".
        reason: why, for people.
        blocks: blocks of the kernel's launch.
        threads: threads per block.
        logged: whether the reason has been logged already, for all operations on the devices.
        segments: into how many the operation is cut.
        measured: whether it is known to be faster than lax.
    """

    algorithm: str
    reason: str
    blocks: int = 0
    threads: int = 0
    logged: bool = False
    segments: int = 1
    measured: bool = True

    @property
    def cause(self) -> str:
        """The cause of the reason, if lax runs it."""
        return reasons.cause_of(self.reason)


def unsupported_dtype(operation: str, dtype: str) -> str | None:
    """Why an operation falls back to jax.lax for a dtype; None if it need not."""
    dtypes = RECORDS[operation].dtypes
    if dtype in dtypes:
        return None
    return reasons.DTYPE.of(dtype=dtype, dtypes=", ".join(dtypes))


def _lax(reason: Reason, **values: Any) -> Selection:
    return Selection("lax", reason.of(**values))


@functools.lru_cache(maxsize=256)
def static_reason(
    operation: str, dtype: str, world_size: int, *, is_empty: bool, hidden: int = 0
) -> Selection | None:
    """What jax.lax runs on any hardware, with any memory and any settings; None for other calls.

    `hidden` is for norms: the elements of a row.
    """
    if is_empty:
        return _lax(reasons.EMPTY, operation=operation)
    if world_size == 1:
        return _lax(reasons.ONE_RANK)
    if world_size > definitions.MAX_WORLD_SIZE:
        return _lax(reasons.TOO_MANY_RANKS, ranks=world_size, most=definitions.MAX_WORLD_SIZE)
    unsupported = (
        unsupported_norm(operation, dtype, hidden)
        if hidden
        else unsupported_dtype(operation, dtype)
    )
    return None if unsupported is None else Selection("lax", unsupported)


def select(
    operation: str,
    *,
    nbytes: int,
    dtype: str,
    world_size: int,
    hardware: str,
    mode: str,
    epoch_buffer_bytes: int,
    algorithm: str = "auto",
    tuned: table.Tuned | None = None,
    segment_bytes: int = 0,
    topology: str = "fully_connected",
) -> Selection:
    """Selects the algorithm of an operation.

    Args:
        operation: the name of a collective's record.
        nbytes: bytes that a rank sends to each peer (`Record.bytes_per_peer`).
        dtype: name of its dtype.
        world_size: number of ranks in the group.
        hardware: "cpu", or the generation of the GPUs (`generations.hardware_of`).
        mode: "single" if one process has all devices of the mesh, else "multi".
        epoch_buffer_bytes: bytes of each of a region's two epoch buffers.
        algorithm: "auto", or the one to use wherever it fits.
        tuned: what was measured on this node; None for the shipped table.
        segment_bytes: if not 0, operations that are too large for the table or for an epoch buffer,
            and those of an algorithm that is given, run in segments of at most these bytes.
        topology: how the group's devices are linked: "hybrid_cube_mesh", or anything else for those
            that are all linked to each other.
    """
    if static := static_reason(operation, dtype, world_size, is_empty=nbytes == 0):
        return static
    if algorithm == "lax":
        return _lax(reasons.ALGORITHM_LAX)
    packets = (
        "bare"
        if definitions.packet_bytes("all_gather", dtype) == definitions.PACK_BYTES
        else "flagged"
    )
    rows, source = table.rows_and_source(hardware, mode, operation, packets, world_size, tuned)
    if rows is None:
        return _lax(reasons.NOT_MEASURED, ranks=world_size)
    if topology == HYBRID_CUBE_MESH:
        if HYBRID_CUBE_MESH not in RECORDS[operation].algorithms:
            return _lax(reasons.HYBRID_CUBE_MESH)
        if algorithm != "auto":
            return _lax(reasons.NEEDS_LINKS, algorithm=algorithm)
        # Not measured on such a mesh. The sizes are those at which a psum among as many ranks that
        # are all linked gains.
        rows = tuple(dataclasses.replace(row, algorithm=HYBRID_CUBE_MESH) for row in rows)
        source = f"{source[:-1]}, all of them linked)"
        segment_bytes = 0  # as the algorithms above
    # "auto", and also where the setting is for other operations.
    algorithm = RECORDS[operation].by_protocol(algorithm) or "auto"
    if algorithm == "auto":
        fitting = [row for row in rows if nbytes <= row.nbytes]

        def fits(row: table.Row) -> bool:
            return launch(row, dtype, nbytes, world_size, epoch_buffer_bytes, hardware) is not None

        if segment_bytes and not (fitting and fits(fitting[0])):
            rows = rows or table.rows(hardware, mode, operation, packets, world_size)
            row = _in_segments((fitting or rows[-1:])[0], world_size, segment_bytes)
            reason = f"{nbytes} bytes of {dtype}: JAX_INTRANODE_SEGMENT_KIB"
        elif fitting:
            row = fitting[0]
            reason = f"{nbytes} bytes of {dtype} among {world_size} ranks {source}"
        else:
            upto = rows[-1].nbytes if rows else 0
            why = reasons.TOO_LARGE if not rows or rows[-1].measured else reasons.ABOVE_ROWS
            return _lax(why, nbytes=nbytes, dtype=dtype, upto=upto, source=source)
    else:
        rows = rows or table.rows(hardware, mode, operation, packets, world_size)
        fitting = [row for row in rows if row.algorithm == algorithm]
        row = fitting[-1] if fitting else dataclasses.replace(rows[-1], algorithm=algorithm)
        reason = f"JAX_INTRANODE_ALGORITHM={algorithm}"
    forced = algorithm != "auto"
    if forced and not row.segment_bytes:  # for any size
        row = dataclasses.replace(row, segment_bytes=segment_bytes or nbytes)
    launched = launch(row, dtype, nbytes, world_size, epoch_buffer_bytes, hardware)
    if launched is None:
        needed = definitions.epoch_buffer_bytes_needed(row.algorithm, dtype, nbytes, world_size, 1)
        reason = reasons.FORCED_EPOCH_BUFFER if forced else reasons.EPOCH_BUFFER
        return _lax(reason, nbytes=nbytes, dtype=dtype, needed=needed, has=epoch_buffer_bytes)
    segments, blocks = launched
    if segments > 1:
        reason += f", in {segments} segments"
    return Selection(
        row.algorithm, reason, blocks, row.threads, segments=segments, measured=row.measured
    )


def launch(
    row: table.Row,
    dtype: str,
    nbytes: int,
    world_size: int,
    epoch_buffer_bytes: int,
    hardware: str,
) -> tuple[int, int] | None:
    """How a row of the table runs an operation.

    Returns:
        The number of segments and of blocks; None if the epoch buffers are too small.
    """
    segments = _segments(row, dtype, nbytes, world_size, epoch_buffer_bytes)
    if segments is None:
        return None
    packs = -(-nbytes // definitions.PACK_BYTES)
    work = definitions.segment_packs(row.algorithm, packs, world_size, segments)
    if protocol_of(row.algorithm) == "two_shot":
        work = -(-work // world_size)
    most = resident_blocks(row.threads, world_size, generations.of_hardware(hardware).sms)
    return segments, max(1, min(row.blocks, most, -(-work // row.threads)))


def resident_blocks(threads: int, world_size: int, sms: int) -> int:
    """How many blocks of a collective run at the same time, beside the one that checks it.

    Those beyond would send only when the first ones have ended. It is the same for all kernels of a
    group, because ranks whose buffers are aligned and others must launch alike.
    tests/test_kernel_registers.py compares it with the registers of the kernels.
    """
    return sms * (_RESIDENT_THREADS * (2 if world_size in (2, 4) else 1) // threads) - 1


def _in_segments(row: table.Row, world_size: int, segment_bytes: int) -> table.Row:
    """The row in segments, for an operation that is too large for it or for its epoch buffer.

    Between two ranks one-shot sends as many bytes as two-shot, and in one hop.
    """
    protocol = "one_shot" if world_size == 2 else "two_shot"
    algorithm = RECORDS[definitions.OPERATIONS[row.algorithm]].by_protocol(protocol)
    return dataclasses.replace(
        row, algorithm=algorithm or row.algorithm, segment_bytes=segment_bytes
    )


def _segments(
    row: table.Row, dtype: str, nbytes: int, world_size: int, epoch_buffer_bytes: int
) -> int | None:
    """Into how many segments an operation is cut; None if epoch buffers are too small for it.

    The number is a power of two: most sizes have it as a divisor, and whole packs are faster.
    """

    def fit(segments: int) -> bool:
        needed = definitions.epoch_buffer_bytes_needed(
            row.algorithm, dtype, nbytes, world_size, segments
        )
        return needed <= epoch_buffer_bytes

    if not row.segment_bytes or row.algorithm not in definitions.IN_SEGMENTS:
        return 1 if fit(1) else None
    segments = 1
    while nbytes > segments * row.segment_bytes or not fit(segments):
        segments *= 2
        if segments > definitions.MAX_SEGMENTS or segments * definitions.PACK_BYTES > 2 * nbytes:
            return None
    return segments


def unsupported_norm(operation: str, dtype: str, hidden: int) -> str | None:
    """Why a norm falls back to jax.lax; None if it need not."""
    if reason := unsupported_dtype(operation, dtype):
        return reason
    if hidden > definitions.MAX_HIDDEN:
        return reasons.ROW_TOO_LONG.of(hidden=hidden, most=definitions.MAX_HIDDEN)
    return None


def select_norm(
    operation: str,
    *,
    rows: int,
    hidden: int,
    dtype: str,
    world_size: int,
    hardware: str,
    mode: str,
    epoch_buffer_bytes: int,
    algorithm: str = "auto",
    tuned: table.Tuned | None = None,
) -> Selection:
    """Selects the algorithm of a norm that follows a sum. It falls back only where it must.

    Between one-shot and two-shot the operation's rows of the table decide, and for larger sizes
    those of a psum. The arguments are those of `select`, but for the rows of a rank's result and
    the elements of a row.
    """
    if static := static_reason(operation, dtype, world_size, is_empty=rows == 0, hidden=hidden):
        return static
    if algorithm == "lax":
        return _lax(reasons.ALGORITHM_LAX)
    record = RECORDS[operation]
    packs = -(-hidden * definitions.item_bytes(dtype) // definitions.PACK_BYTES)
    nbytes = rows * packs * definitions.PACK_BYTES
    reason = f"{rows} rows of {hidden} {dtype} among {world_size} ranks"
    candidates = record.algorithms
    if len(candidates) > 1:
        where = hardware, mode, operation, "bare", world_size
        own, _ = table.rows_and_source(*where, tuned)
        of_psum = table.rows(hardware, mode, record.collective or "", "bare", world_size)
        measured = (*(own or ()), *of_psum)
        fitting = [row for row in measured if nbytes <= row.nbytes and not row.segment_bytes]
        first = protocol_of(fitting[0].algorithm) if fitting else "two_shot"
        if algorithm != "auto":
            first = algorithm
            reason = f"JAX_INTRANODE_ALGORITHM={algorithm}"
        candidates = tuple(sorted(candidates, key=lambda name: protocol_of(name) != first))
    for name in candidates:
        most = definitions.norm_rows_per_operation(
            name, dtype, hidden, world_size, epoch_buffer_bytes
        )
        if most == 0:
            continue
        at_once = min(rows, most)
        if at_once < rows:
            reason += f", in {-(-rows // at_once)} operations"
        if protocol_of(name) == "two_shot":
            at_once = -(-at_once // world_size)
        threads = max(32, min(definitions.MAX_THREADS, 1 << (packs - 1).bit_length()))
        return Selection(name, reason, min(at_once, definitions.MAX_BLOCKS), threads)
    nbytes = packs * definitions.PACK_BYTES
    return _lax(
        reasons.ROWS_IN_EPOCH_BUFFER, nbytes=nbytes, ranks=world_size, has=epoch_buffer_bytes
    )


def select_experts(
    operation: str,
    *,
    nbytes: int,
    dtype: str,
    world_size: int,
    hardware: str,
    epoch_buffer_bytes: int,
    algorithm: str = "auto",
    topology: str = "fully_connected",
    mode: str = "",
    tuned: table.Tuned | None = None,
    ids: int = 0,
    experts: int = 0,
) -> Selection:
    """Selects the algorithm of a dispatch or a combine. It falls back only where it must.

    Args:
        nbytes: bytes of the tokens of a rank; with `ids`, of rows that fill whole packs.
        ids: of a dispatch that may find who goes where: the choices of a rank's tokens; else 0.
        experts: of such a dispatch: the experts of a rank.

    The other arguments are those of `select`; neither the mode nor a tuning changes anything yet.
    """
    del mode, tuned
    if algorithm == "lax":
        return _lax(reasons.ALGORITHM_LAX)
    if topology == HYBRID_CUBE_MESH:
        return _lax(reasons.HYBRID_CUBE_MESH)
    # A notice of 32 bytes for each block and rank takes at most half of an epoch buffer.
    room = epoch_buffer_bytes // (4 * definitions.PACK_BYTES * world_size)
    if room == 0:
        needed = 4 * definitions.PACK_BYTES * world_size
        return _lax(
            reasons.EPOCH_BUFFER, nbytes=nbytes, dtype=dtype, needed=needed, has=epoch_buffer_bytes
        )
    # As many as run at once: the kernels have as many registers as the compiler may give them. If
    # ranks share a GPU, they take turns, and each of them has all of it.
    sms = generations.of_hardware(hardware).sms

    def grid(threads: int) -> int:
        resident = resident_blocks(threads, definitions.MAX_WORLD_SIZE, sms)
        needed = -(-nbytes // (definitions.PACK_BYTES * threads))
        return max(1, min(resident, definitions.MAX_BLOCKS, room, needed))

    name, threads = RECORDS[operation].algorithms[0], _THREADS_OF_EXPERTS
    # Each block of a dispatch of few tokens finds all rows. So a few large blocks are faster where
    # they fill all SMs, as for 128 tokens of 14 KB on H100; for 16 of them small ones are.
    routed = 512 if nbytes >= sms * 512 * definitions.PACK_BYTES else threads
    if definitions.routed_fits(world_size, ids, experts, grid(routed), nbytes, epoch_buffer_bytes):
        name, threads = "routed_dispatch", routed
    source = "" if world_size <= 4 else " (not measured)"
    reason = f"{nbytes} bytes of {dtype} among {world_size} ranks{source}"
    return Selection(name, reason, grid(threads), threads)


def few_rows_limit(hardware: str, operation: str, world_size: int, k: int, n: int) -> int:
    """The most rows for which a matmul with a matrix [k, n] takes the kernel of few rows; or 0."""
    found = _few_rows(hardware, operation, world_size, k, n)
    return 0 if found is None else found.rows


def _few_rows(
    hardware: str, operation: str, world_size: int, k: int, n: int
) -> table.FewRows | None:
    rows = table.FEW_ROWS.get((hardware, operation, world_size), ())
    nbytes = k * n * definitions.item_bytes("bfloat16")
    return next((row for row in rows if nbytes <= row.nbytes), None)


def select_few_rows(
    operation: str,
    *,
    rows: int,
    k: int,
    n: int,
    dtype: str,
    world_size: int,
    hardware: str,
    epoch_buffer_bytes: int,
    algorithm: str = "auto",
    topology: str = "fully_connected",
    mode: str = "",
    tuned: table.Tuned | None = None,
) -> Selection:
    """Selects whether the kernel of few rows runs a matmul with a matrix [k, n].

    If not, the operation is a matmul and perhaps a collective. The other arguments are those of
    `select`; neither the mode nor a tuning changes anything yet.
    """
    del mode, tuned
    if algorithm == "lax":
        return _lax(reasons.ALGORITHM_LAX)
    row = _few_rows(hardware, operation, world_size, k, n)
    if row is None or rows > row.rows or not definitions.few_rows_fit(rows, k, n):
        return _lax(reasons.NOT_FEW_ROWS, rows=rows, k=k, n=n)
    if topology == HYBRID_CUBE_MESH:
        return _lax(reasons.HYBRID_CUBE_MESH)
    # All numbers of rows up to the limit have to fit: a row has the same bits in all of them.
    nbytes = row.rows * n * definitions.item_bytes(dtype)
    needed = definitions.epoch_buffer_bytes_needed("few_rows", dtype, nbytes, world_size, 1)
    if operation == "matmul_all_reduce" and needed > epoch_buffer_bytes:
        return _lax(
            reasons.EPOCH_BUFFER, nbytes=nbytes, dtype=dtype, needed=needed, has=epoch_buffer_bytes
        )
    source = "" if row.measured else " (not measured)"
    reason = f"{rows} rows, of at most {row.rows} for {k} x {n} {dtype}{source}"
    return Selection("few_rows", reason, measured=row.measured)
