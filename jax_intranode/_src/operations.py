"""The operations of this package: one record each.

Everything that lists operations, or tells them apart, reads these records: the table and the
selection, `tune`, the log, `doctor`, `explain`, the rewriting of programs, the benchmark and the
stress tests. What JAX needs of an operation, its body, is in a file of `ops` with its name. When
`ops` is imported, it compares the names of the records with the bodies and with the list of the
kernels (xla_ffi/kernels/algorithms.h).

This module is below all others: it imports the standard library and NumPy only.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# The dtypes that kernels sum, copy, exchange and multiply, by name.
SUMMED = (
    *("float32", "bfloat16", "float16", "float64"),
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
)
COPIED = (*SUMMED, "bool", "int16", "uint16", "complex64", "complex128")
# Those of less than a byte are packed, and fall back.
EXCHANGED = (
    *COPIED,
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
MULTIPLIED = ("bfloat16", "float16")
# Norms and experts: those that travel in bare packets.
NORMED = ("float32", "bfloat16", "float16")

COLLECTIVE, MATMUL, NORM, EXPERTS = "collective", "matmul", "norm", "experts"
# The algorithm of a group whose GPUs are linked as a hybrid cube mesh.
HYBRID_CUBE_MESH = "hybrid_cube_mesh"


@dataclass(frozen=True)
class Record:
    """What is known of an operation without JAX.

    Attributes:
        name: the name of the public function.
        kind: COLLECTIVE, MATMUL (a collective and the matmuls next to it), NORM (a sum, a
            residual and a norm) or EXPERTS (tokens to experts, and back).
        dtypes: the dtypes that its kernels take.
        reduction: how elements of different ranks are combined: "sum", "max", "min", or not: None.
        divides: whether the operand is divided: each rank gets a part of it.
        gathers: whether the result has a part from each rank.
        algorithms: the kernels that can run it, in the order in which sizes grow.
        aliases: public functions that are computed from it.
        lax_primitives: the primitives of ``jax.lax`` that it replaces.
        stablehlo: the name of the operation in StableHLO and, with hyphens, in HLO.
        target: the target of its custom call; None for the name behind "jax_intranode_".
        takes_many: whether one call can take several arrays.
        ragged: whether how much is sent is data. It takes an output and tables besides an array.
        collective: for a matmul or a norm: the collective in it.
        like: the operation whose rows of the table hold, as not measured, while it has none.
        norm: for a norm: which one.
        derived: the names of primitives that exist for its derivatives only.
        call: (library, arrays) -> arrays: calls it over the axis "x", for the benchmark. The
            library is this package or ``jax.lax``. A ragged one may get an output as well.
        expected: (operands of the ranks in order, their number) -> the result of each rank, by
            NumPy. Operands and results are flat.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...]
    reduction: str | None = None
    divides: bool = False
    gathers: bool = False
    algorithms: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    lax_primitives: tuple[str, ...] = ()
    stablehlo: str | None = None
    target: str | None = None
    takes_many: bool = False
    ragged: bool = False
    collective: str | None = None
    like: str | None = None
    norm: str | None = None
    derived: tuple[str, ...] = ()
    call: Callable[[Any, list[Any]], Any] | None = None
    expected: Callable[[Iterable[np.ndarray], int], list[np.ndarray]] | None = None

    @property
    def ffi_target(self) -> str:
        """The target of its custom call."""
        return self.target or f"jax_intranode_{self.name}"

    def by_protocol(self, protocol: str) -> str | None:
        """Its algorithm of a protocol, such as "one_shot"; None if it has none."""
        return next((name for name in self.algorithms if protocol_of(name) == protocol), None)

    @property
    def in_order(self) -> tuple[str, ...]:
        """The algorithms for groups all of whose ranks are linked, in the order of sizes."""
        return tuple(name for name in self.algorithms if name != HYBRID_CUBE_MESH)

    def bytes_per_peer(self, nbytes: int, world_size: int) -> int:
        """What a rank sends to each peer, of an operand of so many bytes."""
        return nbytes // world_size if self.divides else nbytes


def protocol_of(algorithm: str) -> str:
    """How an algorithm communicates, whatever it computes: "one_shot" of "one_shot_max"."""
    for computes in ("_max", "_min", "_rms_norm", "_layer_norm"):
        algorithm = algorithm.removesuffix(computes)
    return algorithm


# What NumPy says the results are.


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which sums of this dtype are accumulated."""
    return dtype if dtype.kind in "iu" or dtype == np.float64 else np.dtype(np.float32)


def total(operands: Iterable[np.ndarray]) -> np.ndarray:
    """The bits of a sum: it starts from rank 0's value, goes in rank order, and rounds once."""
    operands = iter(operands)
    first = next(operands)
    found = first.astype(accumulator(first.dtype))
    for operand in operands:
        found = found + operand.astype(found.dtype)
    return found.astype(first.dtype)


def _sums(operands: Iterable[np.ndarray], n: int) -> list[np.ndarray]:
    return [total(operands)] * n


def _parts_of_sum(operands: Iterable[np.ndarray], n: int) -> list[np.ndarray]:
    return np.split(total(operands), n)


def _folded(of: Any, operands: Iterable[np.ndarray], n: int) -> list[np.ndarray]:
    """NumPy's maximum or minimum; of zeros of both signs it keeps any."""
    return [functools.reduce(of, operands)] * n


_maxima = functools.partial(_folded, np.maximum)
_minima = functools.partial(_folded, np.minimum)


def _concatenated(operands: Iterable[np.ndarray], n: int) -> list[np.ndarray]:
    return [np.concatenate(list(operands))] * n


def _exchanged(operands: Iterable[np.ndarray], n: int) -> list[np.ndarray]:
    return list(np.stack([x.reshape(n, -1) for x in operands], axis=1).reshape(n, -1))


def _to_the_next(library: Any, xs: list[Any]) -> Any:
    n = library.psum(1, "x")
    return library.ppermute(xs, "x", [(rank, (rank + 1) % n) for rank in range(n)])


def _from_the_one_before(operands: Iterable[np.ndarray], n: int) -> list[np.ndarray]:
    *others, last = operands
    return [last, *others]


def _in_equal_updates(library: Any, xs: list[Any]) -> list[Any]:
    """An update for each rank: what all_to_all does. The output is the last of the arrays."""
    from jax import lax  # which has the axis

    n = library.psum(1, "x")
    sizes = np.full(n, len(xs[0]) // n, np.int32)
    places = lax.axis_index("x") * sizes
    tables = np.arange(n, dtype=np.int32) * sizes, sizes, places, sizes
    return [library.ragged_all_to_all(xs[0], xs[-1], *tables, axis_name="x")]


# The records.


def _norm(name: str, norm: str, algorithms: Sequence[str], divides: bool) -> Record:
    return Record(
        name=name,
        kind=NORM,
        dtypes=NORMED,
        reduction="sum",
        divides=divides,
        algorithms=tuple(f"{algorithm}_{norm}" for algorithm in algorithms),
        collective="psum_scatter" if divides else "psum",
        norm=norm,
    )


RECORDS: dict[str, Record] = {
    record.name: record
    for record in (
        Record(
            name="psum",
            kind=COLLECTIVE,
            dtypes=SUMMED,
            reduction="sum",
            algorithms=("one_shot", "two_shot", HYBRID_CUBE_MESH),
            aliases=("pmean",),
            lax_primitives=("psum", "psum_invariant", "unreduced_psum"),
            stablehlo="all_reduce",
            takes_many=True,
            call=lambda library, xs: library.psum(xs, "x"),
            expected=_sums,
        ),
        *(
            Record(
                name=name,
                kind=COLLECTIVE,
                dtypes=SUMMED,
                reduction=reduction,
                algorithms=(f"one_shot_{reduction}", f"two_shot_{reduction}"),
                lax_primitives=(name,),
                takes_many=True,
                like="psum",
                call=call,
                expected=expected,
            )
            for name, reduction, call, expected in (
                ("pmax", "max", lambda library, xs: library.pmax(xs, "x"), _maxima),
                ("pmin", "min", lambda library, xs: library.pmin(xs, "x"), _minima),
            )
        ),
        Record(
            name="psum_scatter",
            kind=COLLECTIVE,
            dtypes=SUMMED,
            reduction="sum",
            divides=True,
            algorithms=("reduce_scatter",),
            lax_primitives=("reduce_scatter", "unreduced_reduce_scatter"),
            stablehlo="reduce_scatter",
            call=lambda library, xs: library.psum_scatter(xs, "x", tiled=True),
            expected=_parts_of_sum,
        ),
        Record(
            name="all_gather",
            kind=COLLECTIVE,
            dtypes=COPIED,
            gathers=True,
            algorithms=("all_gather",),
            lax_primitives=("all_gather", "all_gather_invariant", "all_gather_reduced"),
            stablehlo="all_gather",
            call=lambda library, xs: library.all_gather(xs, "x", tiled=True),
            expected=_concatenated,
        ),
        Record(
            name="all_to_all",
            kind=COLLECTIVE,
            dtypes=EXCHANGED,
            divides=True,
            gathers=True,
            algorithms=("all_to_all",),
            lax_primitives=("all_to_all",),
            stablehlo="all_to_all",
            call=lambda library, xs: library.all_to_all(xs, "x", 0, 0, tiled=True),
            expected=_exchanged,
        ),
        Record(
            name="ppermute",
            kind=COLLECTIVE,
            dtypes=EXCHANGED,
            algorithms=("permute",),
            lax_primitives=("ppermute",),
            takes_many=True,
            call=_to_the_next,
            expected=_from_the_one_before,
        ),
        Record(
            name="ragged_all_to_all",
            kind=COLLECTIVE,
            dtypes=EXCHANGED,
            divides=True,
            gathers=True,
            algorithms=("ragged",),
            lax_primitives=("ragged_all_to_all",),
            ragged=True,
            derived=("gradient_of_ragged_all_to_all",),
            call=_in_equal_updates,
            expected=_exchanged,
        ),
        Record(
            name="moe_dispatch",
            kind=EXPERTS,
            dtypes=NORMED,
            algorithms=("dispatch", "routed_dispatch"),
            derived=("moe_layout", "routed_moe_dispatch"),
        ),
        Record(
            name="moe_combine",
            kind=EXPERTS,
            dtypes=NORMED,
            reduction="sum",
            algorithms=("combine",),
            derived=("tangent_of_moe_combine",),
        ),
        Record(
            name="all_gather_matmul",
            kind=MATMUL,
            dtypes=MULTIPLIED,
            gathers=True,
            algorithms=("all_gather_matmul",),
            collective="all_gather",
            derived=("tangent_of_all_gather_matmul", "gradients_of_all_gather_matmul"),
        ),
        Record(
            name="matmul_reduce_scatter",
            kind=MATMUL,
            dtypes=MULTIPLIED,
            reduction="sum",
            divides=True,
            algorithms=("matmul_reduce_scatter",),
            collective="psum_scatter",
            derived=("gradients_of_matmul_reduce_scatter",),
        ),
        # It runs as a matmul_reduce_scatter and an all_gather, or as a matmul and a psum. Products
        # of the same x on all ranks are sums in their transposes only.
        Record(
            name="matmul_all_reduce",
            kind=MATMUL,
            dtypes=SUMMED,
            reduction="sum",
            algorithms=("few_rows",),
            collective="psum",
            derived=("column_parallel_matmul",),
        ),
        *(
            _norm(f"{collective}_residual_{norm}", norm, algorithms, divides)
            for norm in ("rms_norm", "layer_norm")
            for collective, algorithms, divides in (
                ("psum", ("one_shot", "two_shot"), False),
                ("psum_scatter", ("reduce_scatter",), True),
            )
        ),
    )
}


def of_kind(kind: str) -> tuple[Record, ...]:
    """The records of a kind."""
    return tuple(record for record in RECORDS.values() if record.kind == kind)


@functools.cache
def of_function(name: str) -> Record | None:
    """The record of a public function, which may be an alias; None if it has none."""
    found = (r for r in RECORDS.values() if name in (r.name, *r.aliases))
    return next(found, None)


@functools.cache
def of_lax_primitive(name: str) -> Record | None:
    """The record of what replaces a primitive of ``jax.lax``; None if nothing does."""
    return next((r for r in RECORDS.values() if name in r.lax_primitives), None)


def check(bodies: Iterable[str], kernels: dict[str, str], dtypes: Sequence[str]) -> None:
    """Compares the records with the bodies of `ops` and with the list of the kernels.

    Args:
        bodies: the names of the primitives.
        kernels: for each algorithm the operation that it runs.
        dtypes: those that kernels sum.

    Raises:
        ImportError: they differ.
    """
    names = {name for record in RECORDS.values() for name in (record.name, *record.derived)}
    algorithms = {name for record in RECORDS.values() for name in record.algorithms}
    for what, here, there in (
        ("operations with a record and those with a body", names, set(bodies)),
        ("algorithms of the records and those with a kernel", algorithms, set(kernels)),
        ("operations with a record and those that kernels run", names, names | {*kernels.values()}),
        ("dtypes of sums and those with kernels", set(SUMMED), set(dtypes)),
    ):
        if here != there:
            raise ImportError(
                f"jax_intranode: the {what} differ: {', '.join(sorted(here ^ there))}. Change "
                "operations.py, ops and xla_ffi/kernels/algorithms.h together, and rebuild."
            )
    for name, operation in kernels.items():
        if name not in RECORDS[operation].algorithms:
            raise ImportError(f"jax_intranode: {operation}'s record does not have {name}")
