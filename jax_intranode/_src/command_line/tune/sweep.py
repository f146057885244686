"""Measures one operation of one dtype: which algorithm, which launch, and up to which size.

On GPUs the launches of a size are timed in CUDA graphs, and then the fastest one beside ``jax.lax``
from JAX. On the CPU one thread runs all blocks, and a norm's launch follows from its rows. There
each algorithm is timed beside ``jax.lax`` from JAX. Sizes grow until ours is slower at two in a
row.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_intranode
from jax_intranode._src.command_line.bench import collectives, oracle, timing
from jax_intranode._src.command_line.bench.operations import OPERATIONS, Operation
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.command_line.launcher.all_ranks import Rank
from jax_intranode._src.command_line.launcher.runs import SINGLE_PROCESS
from jax_intranode._src.group import communicator
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.native import definitions
from jax_intranode._src.operations import NORM, RECORDS, of_kind, protocol_of
from jax_intranode._src.ops.norm_rules import NormParams
from jax_intranode._src.selection import generations, select, table, tuning

_THREADS = (64, 128, 256, 512)
_BLOCKS = (64, 128, 256)
# Launches whose times differ by less are alike.
_TOLERANCE = 0.03
# The dtype that stands for those with packets of its kind (xla_ffi/kernels/packets.h).
DTYPES = {
    "gpu": {"bare": "bfloat16", "flagged": "int32"},
    "cpu": {"bare": "float32", "flagged": "int32"},
}
# Segments of large messages, by their bytes; 0: the whole message in one epoch. They are tried on
# GPUs, for bare packets, up to the largest size. Flagged packets move twice the bytes.
_SEGMENTS = (0, 1 << 20, 2 << 20, 4 << 20, 8 << 20)
_LARGEST = 256 << 20
# On GPUs all shipped rows of such sizes have the largest grid, so only algorithms and segments are
# tried.
_LARGE = 16 << 20
_SMALLEST = {"gpu": 1 << 10, "cpu": 256}
_FACTOR = 4
# The norms, which a sum and a residual come before, and the bytes of a row. The rows hold for rows
# of any length: what decides is how many bytes are sent.
NORMS = tuple(record.name for record in of_kind(NORM))
_ROW_BYTES = {"gpu": 8 << 10, "cpu": 1 << 10}


@dataclass(frozen=True)
class Measured:
    """What a size has shown.

    Attributes:
        nbytes: the bytes of `table.Row`.
        best: the fastest launch. Its `nbytes` are those of the size.
        us: microseconds of a call that uses it.
        lax_us: microseconds of the same call of ``jax.lax``.
    """

    nbytes: int
    best: table.Row
    us: float
    lax_us: float

    @property
    def wins(self) -> bool:
        return self.us <= self.lax_us

    def __str__(self) -> str:
        row: Any = self.best
        launch = "" if row.threads == 1 else f" ({row.blocks} x {row.threads})"
        if row.segment_bytes:
            launch += f" by {row.segment_bytes >> 20} MiB"
        ratio = self.lax_us / self.us if self.us else float("inf")
        return (
            f"{self.nbytes:>10} bytes  {row.algorithm + launch:<26} {self.us:9.2f} us  "
            f"lax {self.lax_us:9.2f} us  {ratio:6.2f}"
        )


def rows_of(
    measured: Sequence[Measured], beyond: tuple[table.Row, ...] = ()
) -> tuple[table.Row, ...]:
    """Returns the rows: the launch of each size, up to the last size below the first loss.

    Args:
        measured: the sizes in any order. Of several measurements of a size the last one counts.
        beyond: rows for sizes above all of these, if lax is faster at none of them.
    """
    rows: list[table.Row] = []
    by_size = {of_size.nbytes: of_size for of_size in measured}
    for _, of_size in sorted(by_size.items()):
        if not of_size.wins:
            return tuple(rows)
        row = of_size.best
        if rows and _launch(rows[-1]) == _launch(row):
            rows[-1] = row
        else:
            rows.append(row)
    return (*rows, *(row for row in beyond if row.nbytes > max(by_size, default=0)))


def _launch(row: table.Row) -> tuple[str, int, int, int]:
    return row.algorithm, row.threads, row.blocks, row.segment_bytes


def fastest(
    times: Sequence[tuple[float, table.Row]], before: table.Row | None, tolerance: float
) -> tuple[float, table.Row]:
    """Returns the fastest launch, or that of the size before if it is as fast but for noise.

    Args:
        times: microseconds and launches of a size.
        before: the launch of the next smaller size.
        tolerance: relative difference of times that is noise.
    """
    best = min(times, key=lambda one: one[0])
    for us, row in times:
        same = before is not None and _launch(row) == _launch(before)
        if same and us <= best[0] * (1 + tolerance):
            return us, row
    return best


class OutOfTime(Exception):
    """The time for the measurements has run out, on all ranks alike."""


def norm(name: str, row_bytes: int, dtype: np.dtype[Any], world_size: int) -> Operation:
    """Returns a norm as an operation on x and the residual, flat, and to the same.

    ``jax.lax`` stands for its sum and what XLA makes of the rest.
    """
    record = RECORDS[name]
    kind, scatters = record.norm or "", record.divides
    hidden = row_bytes // dtype.itemsize
    params = NormParams(
        ("x",), kind, 1e-6, 0.0, 0 if scatters else None, world_size, invariant=False
    )

    def call(library: Any, xs: list[Any]) -> list[Any]:
        x, residual = (flat.reshape(-1, hidden) for flat in xs)
        operands = [x, residual, jax.numpy.ones(hidden, dtype)]
        if library is jax.lax:
            results = params.by_lax(operands)
        else:
            results = getattr(library, name)(*operands, "x", eps=params.eps)
        return [result.reshape(-1) for result in results]

    return Operation(call, (record,))


class Sweep:
    """The measurements of one operation of one dtype in one group."""

    def __init__(
        self,
        settings: Settings,
        mesh: Mesh,
        epoch_buffer_bytes: int,
        operation: str,
        packets: str,
        end: float,
    ) -> None:
        """Keeps what to measure, and until when, on the clock `time.monotonic`."""
        self.operation, self.packets = operation, packets
        self._record = RECORDS[operation]
        self._settings, self._mesh = settings, mesh
        self._epoch_buffer_bytes, self._end = epoch_buffer_bytes, end
        self._dtype = np.dtype(jax.numpy.dtype(DTYPES[settings.platform][packets]))
        device = mesh.devices.flat[0]
        self._hardware = generations.hardware_of(device.platform, device.device_kind)
        self._attempts = 0
        self._is_norm = operation in NORMS
        row_bytes, n = _ROW_BYTES[settings.platform], settings.devices
        self._operation = (
            norm(operation, row_bytes, self._dtype, n) if self._is_norm else OPERATIONS[operation]
        )
        self._smallest = row_bytes if self._is_norm else _SMALLEST[settings.platform]
        self._made: tuple[int, oracle.Collective, dict[int, np.ndarray]] | None = None

    def run(self, begin: Callable[[int], None]) -> Iterator[Measured]:
        """Yields the measurements of growing sizes, until ours is slower at two in a row.

        Then it measures again where a slower size comes before a faster one, and at last a size
        between the last one that is faster and the next. A size that is yielded twice counts as it
        was measured last.

        Args:
            begin: is called with the bytes of a size before it is measured.

        Raises:
            OutOfTime: the time has run out.
        """
        found: dict[int, Measured] = {}

        def measure(nbytes: int, before: table.Row | None) -> Measured:
            begin(nbytes)
            found[nbytes] = self._measure(nbytes, before)
            if not found[nbytes].wins:  # it may have been disturbed
                found[nbytes] = self._measure(nbytes, before)
            return found[nbytes]

        nbytes, best, lost = self._smallest, None, 0
        while lost < 2 and self._candidates(nbytes):
            of_size = measure(nbytes, best)
            yield of_size
            lost = 0 if of_size.wins else lost + 1
            best = of_size.best if of_size.wins else best
            nbytes *= _FACTOR
        for size, larger in itertools.pairwise(sorted(found)):
            if found[larger].wins and not found[size].wins:
                yield measure(size, found[size].best)
        rows = rows_of(list(found.values()))
        if rows and self._candidates(2 * rows[-1].nbytes):
            yield measure(2 * rows[-1].nbytes, best)

    def _candidates(self, nbytes: int) -> list[table.Row]:
        """The launches that a size can be given."""
        found: dict[tuple[str, int, int, int], table.Row] = {}
        if nbytes < self._dtype.itemsize:
            return []
        if self._is_norm:
            names = self._record.in_order if nbytes <= _LARGEST else ()
            return [table.Row(nbytes, name, 1, 1) for name in names]
        on_gpus = self._settings.platform == "gpu"
        for algorithm, segment_bytes in itertools.product(self._record.in_order, _SEGMENTS):
            if segment_bytes and not (
                on_gpus
                and self.packets == "bare"
                and algorithm in definitions.IN_SEGMENTS
                and segment_bytes < nbytes <= _LARGEST
            ):
                continue
            # It sends the whole message to each rank.
            if (
                protocol_of(algorithm) == "one_shot"
                and nbytes > 2 << 20
                and self._settings.devices > 2
            ):
                continue
            for threads in _THREADS if on_gpus else (1,):
                # Small blocks of a large message are never fastest.
                if on_gpus and nbytes >= 1 << 20 and threads < (256 if segment_bytes else 128):
                    continue
                for most in reversed(_BLOCKS) if on_gpus else (1,):
                    largest = (threads, most) == (_THREADS[-1], _BLOCKS[-1])
                    if on_gpus and nbytes >= _LARGE and not largest:
                        continue
                    row = table.Row(nbytes, algorithm, threads, most, segment_bytes)
                    launched = self._launch(row)
                    if launched is None:
                        continue
                    segments, blocks = launched
                    found.setdefault((algorithm, threads, blocks, segments), row)
        return list(found.values())

    def _launch(self, row: table.Row) -> tuple[int, int] | None:
        """The number of segments and of blocks; None if the epoch buffers are too small."""
        n, buffer_bytes = self._settings.devices, self._epoch_buffer_bytes
        return select.launch(row, self._dtype.name, row.nbytes, n, buffer_bytes, self._hardware)

    def _is_over(self, name: str) -> bool:
        """Whether the time of any rank is over; all ranks get the same answer."""
        return all_ranks.largest(f"tune/over/{name}", time.monotonic() > self._end) > 0

    def _measure(self, nbytes: int, before: table.Row | None) -> Measured:
        self._attempts += 1
        label = f"{self.operation}/{self.packets}/{nbytes}/{self._attempts}"
        if self._is_over(label):
            raise OutOfTime
        candidates = self._candidates(nbytes)
        if self._settings.platform == "gpu" and not self._is_norm:
            times = [(self._time_in_graph(row, label), row) for row in candidates]
            candidates = [fastest(times, before, _TOLERANCE)[1]]
        found = []
        for number, row in enumerate(candidates):
            us, lax_us = self._time_from_jax(row, f"{label}/{number}")
            if min(us, lax_us) <= 0:  # the chain without the operation took longer
                us, lax_us = self._time_from_jax(row, f"{label}/{number}/again")
            found.append((us, lax_us, row))
        us, best = fastest([(us, row) for us, _, row in found], before, _TOLERANCE)
        # Each algorithm has taken turns with lax, so they saw the same disturbances.
        (lax_us,) = (lax_us for _, lax_us, row in found if row is best)
        return Measured(nbytes, best, us, lax_us)

    def _operand_count(self, nbytes: int) -> int:
        n = self._settings.devices
        return self._operation.operand_count(self._size(nbytes) // self._dtype.itemsize, n)

    def _size(self, nbytes: int) -> int:
        """The bytes in `operations.Operation`'s sense."""
        divided = self._record.divides or self._record.gathers
        return nbytes * self._settings.devices if divided else nbytes

    def _time_in_graph(self, row: table.Row, label: str) -> float:
        """Microseconds of a launch in a CUDA graph, whose result must be right."""
        right, shards = self._data(row.nbytes)
        launched = self._launch(row)
        assert launched is not None  # or it would be no candidate
        segments, blocks = launched
        selected = [select.Selection(row.algorithm, "", blocks, row.threads, segments=segments)]
        label = f"{label}/{row.algorithm}/{row.threads}/{row.blocks}/{segments}"
        times, wrong = collectives.measure_in_graph(
            self._settings, right, self._mesh, selected, shards, label
        )
        if wrong:
            raise RuntimeError(
                f"{self.operation} of {row.nbytes} bytes of {self._dtype.name} by {row.algorithm} "
                f"with {blocks} blocks of {row.threads} threads in {segments} segments: {wrong} "
                "wrong elements"
            )
        return times.p50

    def _data(self, nbytes: int) -> tuple[oracle.Collective, dict[int, np.ndarray]]:
        """The right result, and the operands of this process's ranks; made once for a size."""
        if self._made is None or self._made[0] != nbytes:
            operand_bytes = self._operand_count(nbytes) * self._dtype.itemsize
            right = oracle.Collective(
                self._operation, self._settings.devices, operand_bytes, self._dtype
            )
            self._made = nbytes, right, right.own_shards(self._mesh)
        return self._made[1:]

    def _time_from_jax(self, row: table.Row, label: str) -> tuple[float, float]:
        """Microseconds per call of a launch and of lax, which take turns."""
        counts = [self._operand_count(row.nbytes)]
        if self._is_norm:  # the residual has as many elements as the result
            counts.append(row.nbytes // self._dtype.itemsize)

        def ones(count: int) -> jax.Array:
            return timing.array(self._mesh, count, lambda rank: np.ones(count, self._dtype))

        data, size = [*map(ones, counts)], self._size(row.nbytes)
        with tuning.using(self._trial(row)):
            times, _ = collectives.times_from_jax(
                self._settings, self._operation, self._mesh, data, size, label
            )
        return times["ours"].p50, times["lax"].p50

    def _trial(self, row: table.Row) -> tuning.Tuning:
        """A tuning under which all sizes use this launch."""
        mode = "single" if self._settings.mode == SINGLE_PROCESS else "multi"
        always = (dataclasses.replace(row, nbytes=1 << 40),)
        return tuning.Tuning(
            path="a trial",
            digest="",
            platform=self._settings.platform,
            device=self._mesh.devices.flat[0].device_kind,
            devices=self._settings.devices,
            versions={},
            date="",
            rows={(mode, self.operation, self.packets, definitions.MAX_WORLD_SIZE): always},
            profile=None,
        )


# What each rank runs: the operations of one mode and one world size.


def measure(rank: Rank, seconds: float, operations: list[str], **fields: Any) -> dict[str, Any]:
    """Measures. Rank 0 prints the measurements.

    Args:
        seconds: how long all measurements may take.
    """
    settings, end = Settings(**fields), time.monotonic() + seconds
    mesh = rank.mesh()
    jax_intranode.initialize(mesh)
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    groups = partition_lib.partition(mesh, ("x",))
    for algorithm in dict.fromkeys(name for op in operations for name in RECORDS[op].in_order):
        reason = communicator.communicator(rendezvous, groups, algorithm)
        if reason is not None:
            raise RuntimeError(f"these devices can't be measured: {reason}")

    mode = "single" if settings.mode == SINGLE_PROCESS else "multi"
    device = mesh.devices.flat[0].device_kind
    tables: list[Any] = []
    measurements: list[Any] = []
    left_out: list[str] = []
    for packets in ("bare", "flagged"):
        for operation in operations:
            dtype = DTYPES[settings.platform][packets]
            if operation in NORMS and packets == "flagged":
                continue  # norms take floating-point types only
            what = f"{operation} of {dtype}, {settings.devices} x {device}, {settings.mode}"
            if left_out:  # the time is over
                left_out.append(what)
                continue
            rank.print(f"# {what} ({packets} packets)")

            def begin(nbytes: int, what: str = what) -> None:
                rank.begin(f"{what}, {nbytes} bytes")

            measured = []
            of_one = Sweep(settings, mesh, rendezvous.epoch_buffer_bytes, operation, packets, end)
            try:
                for of_size in of_one.run(begin):
                    measured.append(of_size)
                    rank.print(of_size)
                rows = rows_of(measured)
                rank.print(f"# faster than lax up to {rows[-1].nbytes if rows else 0} bytes")
            except OutOfTime:
                rank.print("# the time is over: for what follows the shipped rows stay")
                if not rows_of(measured):
                    left_out.append(what)
                    continue
                upto = max(of_size.nbytes for of_size in measured)
                left_out.append(f"{what}, more than {upto} bytes")
                hardware = generations.hardware_of(settings.platform, device)
                shipped = table.rows(hardware, mode, operation, packets, settings.devices)
                rows = rows_of(measured, shipped)
            tables.append(tuning.table_fields(mode, operation, packets, settings.devices, rows))
            sizes = [dataclasses.asdict(of_size) for of_size in measured]
            facts = {"mode": mode, "operation": operation, "dtype": dtype}
            measurements.append({**facts, "ranks": settings.devices, "sizes": sizes})
    found = {"tables": tables, "measurements": measurements, "left_out": left_out}
    return {"device": device, **found}
