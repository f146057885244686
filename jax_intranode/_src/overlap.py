"""Whether a collective matmul is overlapped, and how it is cut.

A pure function of what all ranks know.
"""

import contextlib
import dataclasses
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
# Columns of its tiles where it computes derivatives, too.
BESIDE_COLUMNS = 256
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
        tile_columns: of a kernel, the columns of its tiles: 128, 192 or 256, of all-gathers 224,
            too. 0 for a pipeline.
        group_pairs: pairs of row tiles that it multiplies with all columns before the next ones.
        parts: of a kernel, for sums, into how many parts the tiles for each peer are cut: the first
            parts of all peers are multiplied before the second ones.
        direct: of a kernel, for sums, whether warps that have multiplied a tile store it in the
            peer's ring, slowly while others multiply, not in scratch, from where others send it.
        rounds: of a kernel, for sums, in how many launches it goes through the columns, so that
            what a launch sends fits the ring.
        beside: of a kernel, whether it computes derivatives by matrices, too.
        pairs_before: of a kernel, for all-gathers, how many pairs of row tiles of those that arrive
            are multiplied before these derivatives. Of the others columns arrive one after another.
        beside_after: of a kernel, for all-gathers, how many pairs of these derivatives' tiles are
            multiplied after all rows that arrive.
    """

    first_cuts: int = 1
    last_cuts: int = 1
    tile_columns: int = 0
    group_pairs: int = 8
    parts: int = 1
    direct: bool = field(default=False, kw_only=True)
    rounds: int = field(default=1, kw_only=True)
    beside: bool = field(default=False, kw_only=True)
    pairs_before: int = field(default=0, kw_only=True)
    beside_after: int = field(default=0, kw_only=True)

    def __str__(self) -> str:
        if self.tile_columns:
            parts = f", {self.parts} parts" if self.parts > 1 else ""
            direct = ", products sent directly" if self.direct else ""
            rounds = f", {self.rounds} rounds" if self.rounds > 1 else ""
            beside = ""
            if self.beside:
                after = f" after {self.pairs_before} pairs" if self.pairs_before else ""
                last = ""
                if self.beside_after:
                    last = f", {self.beside_after} pairs of their tiles last"
                beside = f", derivatives by matrices beside it{after}{last}"
            tiles = f"tiles of {TILE_ROWS} x {self.tile_columns}"
            groups = f"in groups of {self.group_pairs} pairs"
            return f"one kernel, {tiles} {groups}{parts}{direct}{rounds}{beside}"
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
_CLUSTERS = _MULTIPROCESSORS // 2  # of a kernel
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
_STAGE_S = {256: 0.67e-6, 224: 0.62e-6, 192: 0.52e-6, 128: 0.375e-6}
_TILE_S = {
    "all_gather_matmul": {256: 2.2e-6, 224: 2.2e-6, 192: 0.3e-6, 128: 0.3e-6},
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
# 192 and 224 columns of an all-gather take so much longer; why is not known.
_PAIRS_FOR_MANY = 2
_GATHERED_FROM_MANY = {192: 1.04, 224: 1.06}
# Products of a sum go to peers directly if there are so many waves of tiles, for the last ones come
# later then: by how much of the matmul's time bytes take. Not by tiles of 256 columns: nothing is
# multiplied while their products are stored. How long a stage takes then.
_DIRECT_WAVES = {0.5: 10, 0.8: 64}
_DIRECT_STAGES = 0.975
# If bytes take more than `_ROUNDS_WAITS` of the matmul's time, sums that do not fit the ring are
# faster by a kernel in rounds than by a pipeline, if rounds are so long; others were not tried.
_ROUNDS_WAITS, _LEAST_BYTES_OF_ROUND = 0.8, 200e6
# What the collective and the matmul one after the other take, beside their bytes and flops.
_APART_S = 25e-6
# Tiles of a kernel with derivatives by matrices beside it (xla_ffi/cuda/fused_matmul.h) are less
# evenly spread than the best ones of a matmul alone: by how much it has to be faster. Of an
# all-gather among more than two ranks so much of what arrives is multiplied before them; of two, a
# rank's own rows are enough to begin with.
_BESIDE_MARGIN = 1.09
_BESIDE_BEFORE = 1 / 3


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
    besides: int = 0,
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
        besides: derivatives by matrices, [N, K], that are asked for with it: products of an operand
            of N columns with what is gathered, or with the first operands of a sum.

    Returns:
        The plan, or why the operation is not overlapped, or not with the derivatives by matrices.
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
    if (
        besides
        and _forced is not None
        and not (_forced.beside and _forced.tile_columns == BESIDE_COLUMNS)
    ):
        return f"not forced with derivatives beside tiles of {BESIDE_COLUMNS} columns"
    if _forced is not None and _forced.tile_columns:
        if _forced.tile_columns not in _TILE_S[operation]:
            return f"no kernel of {operation} by tiles of {_forced.tile_columns} columns"
        if not sizes.fit(_forced, ring_bytes):
            return f"more from peers, or more matrices, than a kernel and {ring_bytes} bytes take"
        if besides and sizes.gathers:
            return _forced
        return dataclasses.replace(_forced, beside=besides > 0, pairs_before=0, beside_after=0)
    if sizes.row_bytes * _SLOTS * world_size > ring_bytes:
        return (
            f"rows of {sizes.row_bytes} bytes and a ring of {ring_bytes}; JAX_INTRANODE_RING_MIB "
            "sets its size"
        )
    if _forced is not None:
        return _forced
    if hardware != HARDWARE:
        return f"not measured on {hardware} GPUs"
    chosen = _plan(sizes, ring_bytes)
    return _beside(sizes, chosen, besides, ring_bytes) if besides else chosen


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
    def waits(self) -> float:
        """How much of the matmul's time what these bytes take is."""
        return self.link_s / self.matmul_s

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

    def sent_bytes(self, tile_columns: int, rounds: int = 1) -> int:
        """Bytes that a kernel's whole tiles take in a ring, or those of a round."""
        if self.gathers:
            columns = self.stages * _TILE_DEPTH
        else:
            columns = -(-self.column_tiles(tile_columns) // rounds) * tile_columns
        return 2 * (self.world_size - 1) * self.row_tiles * TILE_ROWS * columns

    def scratch_bytes(self, kernel: Plan) -> int:
        """Bytes of scratch that a kernel takes for products that are sent."""
        if self.gathers or kernel.direct:
            return 0
        return self.sent_bytes(kernel.tile_columns, kernel.rounds)

    def fit(self, kernel: Plan, ring_bytes: int) -> bool:
        """Whether a kernel takes them."""
        sent = self.sent_bytes(kernel.tile_columns, kernel.rounds)
        return max(len(self.ks), len(self.ns)) <= MAX_MATRICES and sent <= ring_room(ring_bytes)


def _plan(sizes: Sizes, ring_bytes: int) -> Plan | str:
    """A plan for an operation by itself, or why what is not overlapped is faster."""
    pipeline = _pipeline(sizes)
    least_known = sizes.many and isinstance(pipeline, str)
    kernel = _fused(sizes, _FUSED_MARGIN_OF_MANY if least_known else _FUSED_MARGIN)
    if isinstance(kernel, str):
        return kernel if isinstance(pipeline, str) else pipeline
    if not sizes.gathers and sizes.waits > _ROUNDS_WAITS:
        tiles = sizes.column_tiles(kernel.tile_columns)
        tile_bytes = sizes.sent_bytes(kernel.tile_columns) // tiles
        of_round = ring_room(ring_bytes) // tile_bytes
        if min(tiles, of_round) * tile_bytes >= _LEAST_BYTES_OF_ROUND:
            rounds = -(-tiles // of_round)
            kernel = dataclasses.replace(kernel, rounds=rounds, parts=-(-kernel.parts // rounds))
    if not sizes.fit(kernel, ring_bytes):
        return pipeline
    # Of a sum of several products a kernel takes longer ones than were measured, if joining them
    # leaves nothing to hide.
    longest_s = max(_FUSED_LONGEST_S, sizes.world_size * _FUSED_LONGEST_OF_RANK_S[sizes.operation])
    if isinstance(pipeline, str) or sizes.matmul_s < longest_s:
        return kernel
    return pipeline


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


@dataclass(frozen=True)
class _Kernel:
    """A kernel of tiles of so many columns."""

    sizes: Sizes
    columns: int

    @property
    def pairs(self) -> int:
        """Pairs of row tiles of a shard."""
        return -(-self.sizes.row_tiles // 2)

    @property
    def tiles(self) -> int:
        """Tiles of a shard, two at a time."""
        return self.pairs * self.sizes.column_tiles(self.columns)

    @property
    def direct(self) -> bool:
        """Whether products are better sent directly."""
        if self.sizes.gathers or self.columns == 256:
            return False
        waves = self.sizes.world_size * self.tiles / _CLUSTERS
        waits = self.sizes.waits
        return any(waits <= most and waves >= least for most, least in _DIRECT_WAVES.items())

    @property
    def tile_s(self) -> float:
        """What a tile takes of which the products are not summed."""
        matmul_s = self.sizes.stages * _STAGE_S[self.columns]
        matmul_s *= _DIRECT_STAGES if self.direct else 1
        return matmul_s + _TILE_S[self.sizes.operation][self.columns]

    @property
    def matmul_s(self) -> float:
        """What it takes if nothing is waited for."""
        sizes, tiles, tile_s = self.sizes, self.tiles, self.tile_s
        waves: float = -(-sizes.world_size * tiles // _CLUSTERS)
        if sizes.gathers:
            return waves * tile_s * (_GATHERED_FROM_MANY.get(self.columns, 1) if sizes.many else 1)
        # The last ones are a rank's own, to which the products of its peers are added.
        own: float = -(-tiles // _CLUSTERS)
        matmul_s = tile_s - _TILE_S[sizes.operation][self.columns]
        sum_s = (sizes.world_size - 1) * _SUM_S[self.columns]
        if self.columns == 256:
            own_s = own * max(tile_s, matmul_s + sum_s)
        else:  # one is summed while the next one is multiplied, a little slower
            even = sizes.world_size * tiles / _CLUSTERS
            if even >= _EVEN_WAVES and sizes.stages <= _EVEN_STAGES and not sizes.many:
                waves, own = even, tiles / _CLUSTERS
            own_s = max(
                own * (tile_s + sum_s / 4) + sum_s, own / 2 * (matmul_s + sum_s) + matmul_s / 2
            )
        # Where all are multiplied at once nothing hides the products' way.
        return (waves - own) * tile_s + own_s + (_WAY_S if waves == own else 0)

    @property
    def link_s(self) -> float:
        """What sending takes."""
        return self.sizes.sent_bytes(self.columns) / _FUSED_LINK_BYTES

    @property
    def seconds(self) -> float:
        """What it takes, but for the call."""
        return max(self.matmul_s, self.link_s)

    @property
    def plan(self) -> Plan:
        """How it goes through its tiles."""
        sizes = self.sizes
        peers = sizes.world_size - 1
        if not sizes.gathers:
            to_all = sizes.many or (sizes.waits > 1 and peers > 1)
            return Plan(
                tile_columns=self.columns,
                group_pairs=_PAIRS_FOR_MANY if sizes.many else Plan.group_pairs,
                parts=-(-self.tiles // (_CLUSTERS // peers)) if to_all else 1,
                direct=self.direct,
            )
        if sizes.waits > _FUSED_WAITS:
            at_once = max(1, _CLUSTERS // sizes.column_tiles(self.columns))
            return Plan(tile_columns=self.columns, group_pairs=at_once)
        # A rank's own rows before any that have to arrive: if a group takes more, those of others
        # come out even.
        group_pairs = Plan.group_pairs
        if self.pairs < group_pairs:
            others = peers * self.pairs
            group_pairs = max(n for n in range(1, group_pairs + 1) if others % n == 0)
        return Plan(tile_columns=self.columns, group_pairs=group_pairs)


def _fastest(sizes: Sizes) -> _Kernel:
    """The kernel of the tiles that are fastest."""
    kernels = [_Kernel(sizes, columns) for columns in sorted(_TILE_S[sizes.operation])]
    # If sums by several tiles take as long as their bytes do, the narrowest are best: they come the
    # most evenly.
    return min(kernels, key=lambda kernel: kernel.matmul_s if sizes.gathers else kernel.seconds)


def _fused(sizes: Sizes, margin: float) -> Plan | str:
    """The kernel for an operation, or why what is not overlapped is faster, or nearly so."""
    least = min(_FUSED_LEAST_BYTES * (sizes.world_size - 1), _LEAST_BYTES)
    if sizes.received < least:
        return _too_few_bytes(sizes, least)
    kernel = _fastest(sizes)
    fused_s = kernel.seconds + _CALL_S
    apart_s = sizes.link_s + sizes.matmul_s + _APART_S
    if fused_s * margin > apart_s:
        return (
            f"one kernel would take {1e6 * fused_s:.0f} us, the collective and the matmul apart "
            f"{1e6 * apart_s:.0f} us"
        )
    return kernel.plan


def _beside(sizes: Sizes, apart: Plan | str, besides: int, ring_bytes: int) -> Plan | str:
    """The kernel with derivatives by matrices, or why these are better computed after it."""
    if isinstance(apart, str):
        return apart
    if not apart.tile_columns or apart.rounds > 1:
        return "derivatives by matrices are multiplied after what is not one launch of a kernel"
    kernel = _Kernel(sizes, BESIDE_COLUMNS)
    pairs = -(-sizes.ns[0] // (2 * TILE_ROWS))
    units = pairs * sum(-(-k // kernel.columns) for k in sizes.ks[:besides])
    half_tiles = 2 * sizes.world_size * sizes.row_tiles
    unit_s = half_tiles * _STAGE_S[kernel.columns] + _TILE_S["all_gather_matmul"][kernel.columns]
    beside_s = max(kernel.matmul_s + -(-units // _CLUSTERS) * unit_s, kernel.link_s)
    before = after = 0
    if sizes.gathers:
        before, after, arrives_s = _among_what_arrives(kernel, units, unit_s)
        beside_s = max(beside_s, arrives_s)
    # Each takes as long as the product with its matrix.
    alone_s = sizes.matmul_s * sum(sizes.ks[:besides]) / sizes.k
    apart_s = _fastest(sizes).seconds + alone_s
    if (beside_s + _CALL_S) * _BESIDE_MARGIN > apart_s + _CALL_S:
        return (
            f"with derivatives by matrices one kernel would take {1e6 * beside_s:.0f} us, without "
            f"them and these after it {1e6 * apart_s:.0f} us"
        )
    plan = dataclasses.replace(kernel.plan, beside=True, pairs_before=before, beside_after=after)
    return plan if sizes.fit(plan, ring_bytes) else "wider tiles do not fit the ring"


def _among_what_arrives(kernel: _Kernel, units: int, unit_s: float) -> tuple[int, int, float]:
    """Where an all-gather's kernel computes derivatives by matrices, of so many units of two tiles.

    Returns how many pairs of row tiles that arrive come before them, how many units come after the
    rest of these, and the seconds until all is done.
    """
    sizes = kernel.sizes
    others = (sizes.world_size - 1) * kernel.pairs
    before = 0
    # If all rows are multiplied at once they may as well all come by columns.
    if sizes.world_size > 2 and sizes.world_size * kernel.tiles > _CLUSTERS:
        before = int(others * _BESIDE_BEFORE)
    rest = (others - before) * sizes.column_tiles(kernel.columns)
    rest_s = -(-rest // _CLUSTERS) * kernel.tile_s
    waves = -(-units // _CLUSTERS)

    def seconds(waves_before: int) -> float:
        arrived = before / others + (1 - before / others) * waves_before / waves
        begins = max(
            kernel.matmul_s - rest_s + waves_before * unit_s, arrived * kernel.link_s + unit_s / 2
        )
        # None of the rest has all its columns before the last ones arrive.
        ends = max(begins + rest_s, kernel.link_s + rest_s - kernel.tile_s)
        return ends + (waves - waves_before) * unit_s

    waves_before = min(range(1, waves + 1), key=seconds)
    return before, max(0, units - waves_before * _CLUSTERS), seconds(waves_before)


def _too_few_bytes(sizes: Sizes, least: float) -> str:
    return f"{sizes.received} bytes from peers; from {least:.0f} on overlapping is faster"


def _filled(outer: int, rows: int, columns: int) -> float:
    """How much of what the GPU can compute the outputs of a batch take, in waves of whole tiles."""
    tiles = outer * -(-rows // _TILE) * -(-columns // _TILE)
    waves = -(-tiles // _MULTIPROCESSORS)
    return outer * rows * columns / (waves * _MULTIPROCESSORS * _TILE**2)
