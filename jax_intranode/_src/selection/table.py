"""The measured table of the selection: which algorithm, and how its kernel is launched.

`python -m jax_intranode tune` measures what the rows say.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from jax_intranode._src.operations import RECORDS
from jax_intranode._src.selection.generations import HOPPER, Generation, of_hardware


@dataclass(frozen=True)
class Row:
    """Up to `nbytes`, use `algorithm` with at most `blocks` blocks of `threads` threads.

    Attributes:
        nbytes: bytes that a rank sends to each peer (`operations.Record.bytes_per_peer`).
        algorithm: one of definitions.ALGORITHMS.
        threads: threads per block.
        blocks: the largest number of blocks.
        segment_bytes: of these bytes, how many travel at a time, each part in an epoch of its own
            (xla_ffi/kernels/segments.h). 0: all of them. Only for definitions.IN_SEGMENTS.
        measured: whether it is faster than lax. A call of this package uses the row also if nobody
            knows; unedited programs do not.
    """

    nbytes: int
    algorithm: str
    threads: int
    blocks: int
    segment_bytes: int = 0
    measured: bool = True


@dataclass(frozen=True)
class FewRows:
    """Up to `nbytes` of w, matmuls of at most `rows` rows run by the kernel of few rows.

    Attributes:
        nbytes: bytes of w on a rank.
        rows: rows of x. For this many and fewer, a row has the same bits whatever others there are.
        measured: as in `Row`.
    """

    nbytes: int
    rows: int
    measured: bool = True


# Rows by process mode, operation, packets and world size.
RowsByKey = Mapping[tuple[str, str, str, int], tuple[Row, ...]]


@dataclass(frozen=True)
class Tuned:
    """Rows that were measured on this node (tuning.py). They take the place of those below.

    Attributes:
        rows: the rows. None for a key: lax was faster at all sizes.
        by: where they come from, for reasons.
    """

    rows: RowsByKey
    by: str


_KB, _MB = 1 << 10, 1 << 20


def _parts(algorithm: str) -> dict[tuple[str, int], tuple[Row, ...]]:
    def bare(largest: int) -> tuple[Row, ...]:
        return (
            Row(512 * _KB, algorithm, 128, 256),
            Row(1 * _MB, algorithm, 256, 256),
            Row(largest, algorithm, 512, 256),
        )

    def flagged(largest: int) -> tuple[Row, ...]:
        return (Row(64 * _KB, algorithm, 64, 256), Row(largest, algorithm, 128, 256))

    return {
        ("bare", 2): bare(8 * _MB),
        ("bare", 4): bare(4 * _MB),
        ("bare", 8): bare(2 * _MB),
        ("flagged", 2): flagged(1 * _MB),
        ("flagged", 4): flagged(256 * _KB),
        ("flagged", 8): flagged(128 * _KB),
    }


def _exchange(
    rows: dict[tuple[str, int], tuple[Row, ...]], largest: int, measured: tuple[int, ...]
) -> dict[tuple[str, int], tuple[Row, ...]]:
    """Rows of all_to_all, from those of another operation, which sends alike.

    They were `measured` among so many ranks, for bare packets (docs/measurements, all_to_all and
    all_to_all_one_process). `largest` is the largest operand in bytes, of which each of n ranks
    gets 1/n.
    """
    return {
        (packets, world): tuple(
            dataclasses.replace(
                row,
                nbytes=min(row.nbytes, largest // world),
                measured=packets == "bare" and world in measured,
            )
            for k, row in enumerate(of_group)
            if k == 0 or of_group[k - 1].nbytes < largest // world
        )
        for (packets, world), of_group in rows.items()
    }


def _permute(largest: dict[int, int]) -> dict[tuple[str, int], tuple[Row, ...]]:
    """Rows of ppermute.

    Among n ranks bare packets were measured up to `largest[n]` bytes, and between 2 flagged ones,
    too (docs/measurements, ppermute). At 8 MiB ours took 29 us, and lax 53.
    """
    return {
        (packets, world): tuple(
            dataclasses.replace(
                row,
                nbytes=min(row.nbytes, largest.get(world, 4 * _MB)),
                measured=world in largest and (packets == "bare" or world == 2),
            )
            for row in rows
        )
        for (packets, world), rows in _parts("permute").items()
    }


def _ragged(packets: str, world: int, measured: int) -> dict[tuple[str, int], tuple[Row, ...]]:
    """Rows of ragged_all_to_all, of any size; measured up to `measured` bytes for each peer."""
    sizes = ((64 * _KB, 128), (4 * _MB, 256), (1 << 30, 512))
    return {
        (packets, world): tuple(
            Row(nbytes, "ragged", threads, 256, measured=nbytes <= measured)
            for nbytes, threads in sizes
        )
    }


# Measured on 2 and 4 H200s; both process modes gave the same rows, but for those of _HOPPER_MULTI.
# The rows for 8 ranks were measured with older kernels.
_HOPPER: dict[str, dict[tuple[str, int], tuple[Row, ...]]] = {
    "psum": {
        ("bare", 2): (
            Row(512 * _KB, "one_shot", 128, 256),
            Row(1 * _MB, "one_shot", 256, 256),
            Row(4 * _MB, "one_shot", 512, 256),
            # The next two were measured on 2 H100s (docs/measurements/2_h100.jsonl, tune_psum).
            Row(16 * _MB, "two_shot", 512, 256),
            Row(64 * _MB, "one_shot", 512, 256, segment_bytes=8 * _MB),
        ),
        ("bare", 4): (
            Row(192 * _KB, "one_shot", 128, 256),
            Row(2 * _MB, "two_shot", 128, 256),
            Row(4 * _MB, "two_shot", 256, 256),
            # Measured up to 16 MB among 4 H100s (docs/measurements/4_h100.jsonl, tune_psum).
            Row(16 * _MB, "two_shot", 512, 256),
        ),
        ("bare", 8): (
            Row(64 * _KB, "one_shot", 128, 128),
            Row(1 * _MB, "two_shot", 128, 128),
            Row(4 * _MB, "two_shot", 512, 128),
            Row(12 * _MB, "two_shot", 512, 256),
        ),
        ("flagged", 2): (Row(2 * _MB, "one_shot", 128, 256),),
        ("flagged", 4): (
            Row(96 * _KB, "one_shot", 64, 256),
            Row(512 * _KB, "two_shot", 64, 256),
            Row(1 * _MB, "two_shot", 128, 256),
        ),
        ("flagged", 8): (
            Row(32 * _KB, "one_shot", 64, 256),
            Row(1 * _MB, "two_shot", 128, 256),
        ),
    },
    "psum_scatter": _parts("reduce_scatter"),
    "all_gather": _parts("all_gather"),
    "all_to_all": _exchange(_parts("all_to_all"), 4 * _MB, (2,)),
    "ppermute": _permute({2: 4 * _MB}),
    "ragged_all_to_all": _ragged("bare", 2, 1 << 30)
    | _ragged("bare", 8, 0)
    | _ragged("flagged", 8, 0),
}


def _extremes(
    of_psum: dict[tuple[str, int], tuple[Row, ...]],
) -> dict[str, dict[tuple[str, int], tuple[Row, ...]]]:
    """The rows of pmax and pmin, from those of psum, whose kernels are theirs but for the sum."""
    return {
        f"p{of}": {
            key: tuple(dataclasses.replace(row, algorithm=f"{row.algorithm}_{of}") for row in rows)
            for key, rows in of_psum.items()
        }
        for of in ("max", "min")
    }


# Measured between 2 H100s up to 4 MB, where a maximum takes as long as a sum.
_HOPPER |= _extremes({("bare", 2): _HOPPER["psum"]["bare", 2][:3]})

# Measured with a process for each H100. Permutes between 2 and among 4, and exchanges among 4:
# beside lax, with jax 0.12. The norm: 1 to 64 rows between 2, beside lax, and beside our psum and
# XLA's norm. Chains of norms take 1.03 to 1.40 times as long with these two, and whole decoding
# steps as long or 2% longer (docs/measurements/2_h100.jsonl, norms_1, norms_16, norms_64).
_HOPPER_MULTI = _HOPPER | {
    "all_to_all": _exchange(_parts("all_to_all"), 4 * _MB, (2, 4)),
    "ppermute": _permute({2: 8 * _MB, 4: 4 * _MB}),
    "ragged_all_to_all": _HOPPER["ragged_all_to_all"] | _ragged("bare", 4, 4 * _MB),
    "psum_residual_rms_norm": {("bare", 2): (Row(1 * _MB, "one_shot_rms_norm", 512, 256),)},
}
# The elements of the rows that were measured, by dtype. Rows of a tuning hold for all.
NORMED = {"bfloat16": range(4096, 8192 + 1)}


def _cpu(
    limits: dict[str, dict[int, tuple[tuple[str, int, int], ...]]],
) -> dict[str, dict[tuple[str, int], tuple[Row, ...]]]:
    """The rows of CPUs, from (algorithm, largest size of bare packets, of flagged ones)."""
    return {
        operation: {
            (packets, world): tuple(Row(sizes[k], algorithm, 1, 1) for algorithm, *sizes in rows)
            for world, rows in by_world.items()
            for k, packets in enumerate(("bare", "flagged"))
        }
        for operation, by_world in limits.items()
    }


# Measured on 2 cores: groups of 2 with jaxlib 0.10.2 and 0.12.0.1, which gave the same rows; groups
# of 4 and 8 with 0.12.0.1 only. One thread does the work of all ranks of its process, so that total
# work counts, and not the number of hops.
_CPU_SINGLE = _cpu(
    {
        "psum": {
            2: (("one_shot", 2 * _KB, 2 * _KB),),
            8: (("one_shot", 1 * _KB, _KB // 2), ("two_shot", 4 * _KB, 2 * _KB)),
        },
        "psum_scatter": {
            4: (("reduce_scatter", 2 * _KB, 1 * _KB),),
            8: (("reduce_scatter", 1 * _KB, 1 * _KB),),
        },
        "all_gather": {
            4: (("all_gather", 2 * _KB, 1 * _KB),),
            8: (("all_gather", 1 * _KB, 1 * _KB),),
        },
        "ppermute": {
            2: (("permute", 4 * _KB, 4 * _KB),),
            4: (("permute", 4 * _KB, 8 * _KB),),
            8: (("permute", 8 * _KB, 8 * _KB),),
        },
        "ragged_all_to_all": {8: (("ragged", 1 << 30, 1 << 30),)},  # lax has none
        "all_to_all": {
            2: (("all_to_all", 4 * _KB, 4 * _KB),),
            4: (("all_to_all", 1 * _KB, 1 * _KB),),
            8: (("all_to_all", _KB // 2, _KB // 2),),
        },
    }
)
_CPU_MULTI = _cpu(
    {
        "psum": {
            2: (("one_shot", 64 * _KB, 32 * _KB),),
            8: (("one_shot", 8 * _KB, 4 * _KB), ("two_shot", 64 * _KB, 32 * _KB)),
        },
        "psum_scatter": {8: (("reduce_scatter", 32 * _KB, 16 * _KB),)},
        "all_gather": {8: (("all_gather", 32 * _KB, 16 * _KB),)},
        # Between 2 ranks of a busy machine it was faster up to 64 KB; larger groups: not measured.
        "ppermute": {8: (("permute", 32 * _KB, 32 * _KB),)},
        "ragged_all_to_all": {8: (("ragged", 1 << 30, 1 << 30),)},
        "all_to_all": {
            2: (("all_to_all", 32 * _KB, 32 * _KB),),
            8: (("all_to_all", 8 * _KB, 8 * _KB),),
        },
    }
)

# Measured on 2 cores, where they are faster than lax up to the same sizes as sums.
_CPU_SINGLE |= _extremes(_CPU_SINGLE["psum"])
_CPU_MULTI |= _extremes(_CPU_MULTI["psum"])

# The rows, by hardware ("cpu", or the generation of a GPU), process mode ("single": one process has
# all devices of the mesh; "multi"), operation, encoding of the packets ("bare" or "flagged",
# xla_ffi/kernels/packets.h), and world size. A world size without rows uses those of the next
# larger one. Messages larger than the last row fall back to lax.
TABLE: dict[tuple[str, str, str, str, int], tuple[Row, ...]] = {
    (hardware, mode, operation, packets, world): rows
    for hardware, mode, operations in (
        ("hopper", "single", _HOPPER),
        ("hopper", "multi", _HOPPER_MULTI),
        ("cpu", "single", _CPU_SINGLE),
        ("cpu", "multi", _CPU_MULTI),
    )
    for operation, by_world in operations.items()
    for (packets, world), rows in by_world.items()
}

# Matmuls of few rows, by hardware, operation and world size, which must be one of these. Measured
# between 2 H100s (docs/serving.md). Sums were faster at 1, 16, 32 and 64 rows with matrices of 8 to
# 64 MB, and slower for one row with most smaller ones. Without a sum the kernel was faster for one
# row of a matrix [4096, 2048] only.
FEW_ROWS: dict[tuple[str, str, int], tuple[FewRows, ...]] = {
    ("hopper", "matmul_all_reduce", 2): (FewRows(8 * _MB - 1, 0), FewRows(64 * _MB, 64)),
    ("hopper", "column_parallel_matmul", 2): (FewRows(8 * _MB - 1, 0), FewRows(16 * _MB, 1)),
}

# The operations that have rows.
OPERATIONS = tuple(dict.fromkeys(operation for _, _, operation, _, _ in TABLE))


def rows(
    hardware: str, mode: str, operation: str, packets: str, world_size: int
) -> tuple[Row, ...]:
    """The shipped rows for a group: none if no group of this size or larger was measured."""
    name = hardware if hardware == "cpu" else _with_rows(hardware).name
    where = (name, mode, operation, packets)
    sizes = [key[4] for key in TABLE if key[:4] == where and key[4] >= world_size]
    if sizes:
        return TABLE[*where, min(sizes)]
    like = RECORDS[operation].like
    if like is None:
        return ()
    # Its algorithms are those of the other one, in the same order.
    named = dict(zip(RECORDS[like].in_order, RECORDS[operation].in_order, strict=True))
    return tuple(
        dataclasses.replace(row, algorithm=named[row.algorithm], measured=False)
        for row in rows(hardware, mode, like, packets, world_size)
    )


def rows_and_source(
    hardware: str,
    mode: str,
    operation: str,
    packets: str,
    world_size: int,
    tuned: Tuned | None = None,
) -> tuple[tuple[Row, ...] | None, str]:
    """The rows for a group (None: no group of this size or larger was measured), and their source.

    Where `tuned` has nothing for a group of this size or larger, the shipped rows hold. The source
    is for reasons.
    """
    if tuned is not None:
        where = (mode, operation, packets)
        sizes = [key[3] for key in tuned.rows if key[:3] == where and key[3] >= world_size]
        if sizes:
            return tuned.rows[*where, min(sizes)], f"(measured by {tuned.by})"
    shipped = rows(hardware, mode, operation, packets, world_size)
    if shipped and not shipped[-1].measured:
        return shipped, "(not measured)"
    measured_on = "2 CPU cores" if hardware == "cpu" else _with_rows(hardware).measured_on
    older = ", older kernels" if hardware != "cpu" and world_size > 4 else ""
    return shipped or None, f"(measured on {measured_on}{older})"


def fuses_norm(
    operation: str,
    *,
    nbytes: int,
    dtype: str,
    hidden: int,
    hardware: str,
    mode: str,
    world_size: int,
    tuned: Tuned | None = None,
) -> bool:
    """Whether an unedited program takes the operation for a sum, a residual add and a norm.

    Args:
        nbytes: bytes of a rank's result.
        hidden: the elements of a row.
    """
    where = hardware, mode, operation, "bare", world_size
    found, _ = rows_and_source(*where, tuned)
    if not found or not found[-1].measured or nbytes > found[-1].nbytes:
        return False
    return found is not rows(*where) or hidden in NORMED.get(dtype, ())


def _with_rows(hardware: str) -> Generation:
    """The generation whose rows GPUs use."""
    found = of_hardware(hardware)
    return HOPPER if found.measured_on is None else found
