"""Whether a collective matmul is overlapped, and how it is cut.

A pure function of what all ranks know.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jax_intranode._src import select

DTYPES = ("bfloat16", "float16")
# Of the kernel's tiles (xla_ffi/cuda/fused_matmul.h), which multiply so much at a time and so many
# matrices at most. The module that has these numbers is not there on every machine.
TILE_ROWS = 128
_TILE_DEPTH = 64
MAX_MATRICES = 4
# Of its order: more ranks than these do not keep in step (xla_ffi/cuda/fused_order.h).
MOST_IN_STEP = 4
# Bytes of a ring for each flag of four bytes, and before the flags.
_BYTES_OF_FLAG, _RING_HEADER = 16384, 4096


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
        parts: of a kernel, for sums, into how many parts the tiles for each peer are cut: the first
            parts of all peers are multiplied before the second ones.
        direct: of a kernel, for sums, whether warps that have multiplied a tile store it in the
            peer's ring, slowly while others multiply, not in scratch, from where others send it.
    """

    first_cuts: int = 1
    last_cuts: int = 1
    tile_columns: int = 0
    group_pairs: int = 8
    parts: int = 1
    direct: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        if self.tile_columns:
            parts = f", {self.parts} parts" if self.parts > 1 else ""
            direct = ", products sent directly" if self.direct else ""
            tiles = f"tiles of {TILE_ROWS} x {self.tile_columns}"
            return f"one kernel, {tiles} in groups of {self.group_pairs} pairs{parts}{direct}"
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


# Measured on 2 and 4 H200s, and on 4 that stood for 8 (tools/fused_probe.cu): what the model below
# goes by. On 8 only before ranks sent to all at a time.
HARDWARE = "hopper"
_MATMUL_FLOPS = 680e12  # a second, of a large matmul
_LINK_BYTES = 375e9  # a second, by copy engines
_MEMORY_BYTES = 3.5e12  # a second, read or written
_MULTIPROCESSORS = 132
# A pipeline: rows and columns of an output that a multiprocessor works on at a time; the fewest
# bytes for which it is faster, about 65 us of copying; pieces of a ring that a row has to fit into,
# for each rank.
_TILE = 128
_LEAST_BYTES = 24e6
_SLOTS = 4
# A kernel: matmuls up to so long that it is faster than a pipeline, for it multiplies a little
# slower, but hides the sum, and longer ones if those of one rank's rows, which a pipeline
# multiplies at a time, are so short (of all-gathers among 8 by torch's pipeline); the fewest bytes
# of a peer with which it was faster, if they are not `_LEAST_BYTES` of all; what it sends, a
# second.
_FUSED_LONGEST_S = 1e-3
_FUSED_LONGEST_OF_RANK_S = {"all_gather_matmul": 0.19e-3, "matmul_reduce_scatter": 2e-3}
_FUSED_LEAST_BYTES = 4e6
_FUSED_LINK_BYTES = 330e9
# By a tile's columns how long it takes for 64 of K, and what else it takes, more where products are
# summed. Where warpgroups take turns at tiles of so few stages, from how many waves on a last one
# that is not full costs no whole one. By a tile's columns, too, how long the products of a peer
# take that are added to those of a rank's own rows.
_STAGE_S = {256: 0.67e-6, 192: 0.52e-6, 128: 0.375e-6}
_TILE_S = {
    "all_gather_matmul": {256: 2.2e-6, 192: 0.3e-6, 128: 0.3e-6},
    "matmul_reduce_scatter": {256: 5.5e-6, 192: 2e-6, 128: 1.3e-6},
}
_EVEN_WAVES, _EVEN_STAGES = 8, 64
_SUM_S = {256: 3.4e-6, 192: 4.8e-6, 128: 3.3e-6}
# The way of products that nothing hides, and what else a call takes. By how much a kernel has to be
# faster, for all this is not known to more; among more ranks than keep in step it is known to less,
# which counts where there is no pipeline either.
_WAY_S = 10e-6
_CALL_S = 15e-6
_FUSED_MARGIN, _FUSED_MARGIN_OF_MANY = 1.05, 1.15
# If bytes take more than `_FUSED_WAITS` of the matmul's time, an all-gather's rows arrive for as
# many tiles as are multiplied at a time.
_FUSED_WAITS = 0.25
# Among more ranks than keep in step, or where bytes take longer than the matmul, what is multiplied
# at a time for sums is for all peers; of the former in groups of so many pairs. Among them tiles of
# 192 columns of an all-gather take so much longer; why is not known.
_PAIRS_FOR_MANY = 2
_GATHERED_FROM_MANY = {192: 1.04}
# Products of a sum go to peers directly if there are so many waves of tiles, for the last ones come
# later then: by how much of the matmul's time bytes take. Not by tiles of 256 columns: nothing is
# multiplied while their products are stored. How long a stage takes then.
_DIRECT_WAVES = {0.5: 10, 0.7: 64}
_DIRECT_STAGES = 0.975
# What the collective and the matmul one after the other take, beside their bytes and flops.
_APART_S = 25e-6


def ring_room(ring_bytes: int) -> int:
    """Bytes of data that a ring has room for at least."""
    return ring_bytes - ring_bytes // _BYTES_OF_FLAG * 4 - 2 * _RING_HEADER


def digest() -> str:
    """Identifies the model: ranks with different ones would choose differently."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def plan(
    operation: str,
    *,
    outer: int,
    rows: int,
    ks: Sequence[int],
    ns: Sequence[int],
    dtype: str,
    world_size: int,
    hardware: str,
    ring_bytes: int,
) -> Plan | str:
    """Chooses a plan, by a model of what overlapping hides and what it costs.

    It hides the time of what travels. A pipeline costs the waits for the first and the last piece,
    which are the same for all sizes, and it costs time where matmuls of a rank's rows fill the GPU
    less well than one of all rows, and where the operands of a sum of products are copied into one.
    One kernel costs none of it, but it multiplies and sends slower.

    Args:
        operation: "all_gather_matmul" or "matmul_reduce_scatter".
        outer: arrays of rows that are multiplied as a batch: dimensions before the one that is
            gathered or cut.
        rows: rows of each, of the operand or of the result, that a rank has to itself.
        ks: the contracted dimension; for a sum of products those of all.
        ns: columns of each matrix; of a sum they have the same.
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
    if outer == 0 or rows == 0 or 0 in ks or 0 in ns:
        return "no elements"
    if any(length % 8 for length in (*ks, *ns)):
        all_ks, all_ns = (", ".join(map(str, lengths)) for lengths in (ks, ns))
        return f"K {all_ks}, N {all_ns}; overlapped are multiples of 8"
    sizes = Sizes(operation, outer, rows, tuple(ks), tuple(ns), world_size)
    if _forced is not None and _forced.tile_columns:
        if not sizes.fit(_forced, ring_bytes):
            return f"more from peers, or more matrices, than a kernel and {ring_bytes} bytes take"
        return _forced
    if sizes.row_bytes * _SLOTS * world_size > ring_bytes:
        return (
            f"rows of {sizes.row_bytes} bytes and a ring of {ring_bytes}; JAX_INTRANODE_RING_MIB "
            "sets its size"
        )
    if _forced is not None:
        return _forced
    if hardware != HARDWARE:
        return f"not measured on {hardware} GPUs"
    pipeline = _pipeline(sizes)
    least_known = sizes.many and isinstance(pipeline, str)
    kernel = _fused(sizes, _FUSED_MARGIN_OF_MANY if least_known else _FUSED_MARGIN)
    if isinstance(kernel, str):
        return kernel if isinstance(pipeline, str) else pipeline
    if not sizes.fit(kernel, ring_bytes):
        return pipeline
    # Of a sum of several products a kernel takes longer ones than were measured, if joining them
    # leaves nothing to hide.
    longest_s = max(_FUSED_LONGEST_S, world_size * _FUSED_LONGEST_OF_RANK_S[operation])
    if isinstance(pipeline, str) or sizes.matmul_s < longest_s:
        return kernel
    return pipeline


@dataclass(frozen=True)
class Sizes:
    """An operation by arguments of `plan`, and what follows from them."""

    operation: str
    outer: int
    rows: int
    ks: tuple[int, ...]
    ns: tuple[int, ...]
    world_size: int

    @property
    def gathers(self) -> bool:
        """Whether rows travel before they are multiplied."""
        return self.operation == "all_gather_matmul"

    @property
    def many(self) -> bool:
        """Whether there are more ranks than keep in step."""
        return self.world_size > MOST_IN_STEP

    @property
    def k(self) -> int:
        """Products of an element of the result."""
        return sum(self.ks)

    @property
    def stages(self) -> int:
        """Of a kernel's tile; each of several products has whole ones."""
        return sum(-(-k // _TILE_DEPTH) for k in self.ks)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that travels."""
        return 2 * (self.k if self.gathers else self.ns[0])

    @property
    def all_rows(self) -> int:
        """Of all ranks and arrays, which each rank multiplies."""
        return self.world_size * self.outer * self.rows

    @property
    def received(self) -> int:
        """Bytes from peers."""
        return (self.world_size - 1) * self.outer * self.rows * self.row_bytes

    @property
    def link_s(self) -> float:
        """What these take by copy engines."""
        return self.received / _LINK_BYTES

    @property
    def seconds(self) -> list[float]:
        """What the matmul with each matrix takes alone."""
        return [2 * self.all_rows * self.k * n / _MATMUL_FLOPS for n in self.ns]

    @property
    def matmul_s(self) -> float:
        """What all matmuls take alone."""
        return sum(self.seconds)

    @property
    def joining_s(self) -> float:
        """What it takes to copy the operands of a sum into one, as a pipeline needs it."""
        copied = 2 * self.k * (self.all_rows + self.ns[0]) if len(self.ks) > 1 else 0
        return 2 * copied / _MEMORY_BYTES  # read and written

    @property
    def row_tiles(self) -> int:
        """Of a kernel, whole ones, of the rows that a rank has to itself."""
        return self.outer * -(-self.rows // TILE_ROWS)

    def column_tiles(self, tile_columns: int) -> int:
        """Of a kernel, whole ones, of all matrices."""
        return sum(-(-n // tile_columns) for n in self.ns)

    def sent_bytes(self, tile_columns: int) -> int:
        """Bytes that a kernel's whole tiles take in a ring."""
        if self.gathers:
            columns = self.stages * _TILE_DEPTH
        else:
            columns = self.column_tiles(tile_columns) * tile_columns
        return 2 * (self.world_size - 1) * self.row_tiles * TILE_ROWS * columns

    def scratch_bytes(self, kernel: Plan) -> int:
        """Bytes of scratch that a kernel takes for products that are sent."""
        return 0 if self.gathers or kernel.direct else self.sent_bytes(kernel.tile_columns)

    def fit(self, kernel: Plan, ring_bytes: int) -> bool:
        """Whether a kernel takes them."""
        sent = self.sent_bytes(kernel.tile_columns)
        return max(len(self.ks), len(self.ns)) <= MAX_MATRICES and sent <= ring_room(ring_bytes)


def _pipeline(sizes: Sizes) -> Plan | str:
    """The pipeline for an operation, or why what is not overlapped is faster."""
    least = _LEAST_BYTES * max(1, sizes.world_size / 4)
    if sizes.received < least:
        return _too_few_bytes(sizes, least)
    hidden_s = sizes.link_s - sizes.joining_s
    if hidden_s < 0:
        return (
            f"several operands are joined: {1e6 * sizes.joining_s:.0f} us of copying for "
            f"{1e6 * sizes.link_s:.0f} us hidden"
        )
    lost_s = sum(
        s * (1 / _filled(sizes.outer, sizes.rows, n) - 1)
        for s, n in zip(sizes.seconds, sizes.ns, strict=True)
    )
    if lost_s > hidden_s:
        return (
            f"matmuls of {sizes.rows} rows fill the GPU badly: {1e6 * lost_s:.0f} us lost for "
            f"{1e6 * hidden_s:.0f} us hidden"
        )
    if sizes.gathers:
        return Plan(last_cuts=2 if sizes.link_s > sizes.matmul_s else 1)
    return Plan(3, 2) if sizes.link_s > 0.8 * sizes.matmul_s else Plan()


def _fused(sizes: Sizes, margin: float) -> Plan | str:
    """The kernel for an operation, or why what is not overlapped is faster, or nearly so."""
    least = min(_FUSED_LEAST_BYTES * (sizes.world_size - 1), _LEAST_BYTES)
    if sizes.received < least:
        return _too_few_bytes(sizes, least)
    pairs = -(-sizes.row_tiles // 2)  # of a shard
    peers = sizes.world_size - 1
    clusters = _MULTIPROCESSORS // 2
    waits = sizes.link_s / sizes.matmul_s

    def tiles_of(columns: int) -> int:  # of a shard, two at a time
        return pairs * sizes.column_tiles(columns)

    def direct(columns: int) -> bool:
        if sizes.gathers or columns == 256:
            return False
        waves = sizes.world_size * tiles_of(columns) / clusters
        return any(waits <= most and waves >= least for most, least in _DIRECT_WAVES.items())

    def kernel_s(columns: int) -> float:
        tiles = tiles_of(columns)
        waves: float = -(-sizes.world_size * tiles // clusters)
        matmul_s = sizes.stages * _STAGE_S[columns] * (_DIRECT_STAGES if direct(columns) else 1)
        tile_s = matmul_s + _TILE_S[sizes.operation][columns]
        if sizes.gathers:
            return waves * tile_s * (_GATHERED_FROM_MANY.get(columns, 1) if sizes.many else 1)
        # The last ones are a rank's own, to which the products of its peers are added.
        own: float = -(-tiles // clusters)
        sum_s = peers * _SUM_S[columns]
        if columns == 256:
            own_s = own * max(tile_s, matmul_s + sum_s)
        else:  # one is summed while the next one is multiplied, a little slower
            even = sizes.world_size * tiles / clusters
            if even >= _EVEN_WAVES and sizes.stages <= _EVEN_STAGES and not sizes.many:
                waves, own = even, tiles / clusters
            own_s = max(
                own * (tile_s + sum_s / 4) + sum_s, own / 2 * (matmul_s + sum_s) + matmul_s / 2
            )
        # Where all are multiplied at once nothing hides the products' way.
        return (waves - own) * tile_s + own_s + (_WAY_S if waves == own else 0)

    def fused_s_by(columns: int) -> float:
        return max(kernel_s(columns), sizes.sent_bytes(columns) / _FUSED_LINK_BYTES)

    # If sums by several tiles take as long as their bytes do, the narrowest are best: they come the
    # most evenly.
    columns = min(sorted(_STAGE_S), key=kernel_s if sizes.gathers else fused_s_by)
    fused_s = fused_s_by(columns) + _CALL_S
    apart_s = sizes.link_s + sizes.matmul_s + _APART_S
    if fused_s * margin > apart_s:
        return (
            f"one kernel would take {1e6 * fused_s:.0f} us, the collective and the matmul apart "
            f"{1e6 * apart_s:.0f} us"
        )
    if not sizes.gathers:
        to_all = sizes.many or (waits > 1 and peers > 1)
        return Plan(
            tile_columns=columns,
            group_pairs=_PAIRS_FOR_MANY if sizes.many else Plan.group_pairs,
            parts=-(-tiles_of(columns) // (clusters // peers)) if to_all else 1,
            direct=direct(columns),
        )
    if waits > _FUSED_WAITS:
        at_once = max(1, clusters // sizes.column_tiles(columns))
        return Plan(tile_columns=columns, group_pairs=at_once)
    # A rank's own rows before any that have to arrive: if a group takes more, those of others come
    # out even.
    group_pairs = Plan.group_pairs
    if pairs < group_pairs:
        others = peers * pairs
        group_pairs = max(n for n in range(1, group_pairs + 1) if others % n == 0)
    return Plan(tile_columns=columns, group_pairs=group_pairs)


def _too_few_bytes(sizes: Sizes, least: float) -> str:
    return f"{sizes.received} bytes from peers; from {least:.0f} on overlapping is faster"


def _filled(outer: int, rows: int, columns: int) -> float:
    """How much of what the GPU can compute the outputs of a batch take, in waves of whole tiles."""
    tiles = outer * -(-rows // _TILE) * -(-columns // _TILE)
    waves = -(-tiles // _MULTIPROCESSORS)
    return outer * rows * columns / (waves * _MULTIPROCESSORS * _TILE**2)
