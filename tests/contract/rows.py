"""Rows of the contract: what they are, how they are run and compared, and helpers for them.

A row is a function of a library, `jax_intranode` or `jax.lax`. It builds and runs programs, and
returns what a user can see of them: arrays, types, errors.

All data are small integers, whatever their type: sums are exact in any order, and both libraries
have to give the same bits. Rows with a tolerance have other data.
"""

import dataclasses
import enum
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.native import extension

REPLICATED, BY_X = P(), P("x")


class How(enum.StrEnum):
    """What our functions do; docs/contract.md explains the words."""

    ACCELERATED = "accelerated"
    PARTLY = "accelerated in part"
    # The transpose of shard_map itself, or of a cast to a varying type, may be a psum of JAX.
    DERIVED = "accelerated, except sums that JAX inserts"
    LAX = "falls back to lax"
    TYPES = "same types"
    ERROR = "same error"
    AS_LAX = "as lax"
    DIFFERS = "differs: an error that says to call `jax_intranode.initialize(mesh)` first"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: Name of the row and of its test.
        what: The use of the functions that it tests, for the table.
        how: What our functions do; a member of `How`.
        run: Builds and runs programs with a given library; returns the results to compare.
        devices: Number of devices that it needs.
        of_xla: The collectives of XLA that must not take the place of ours, as a pattern.
        tolerance: How far results may be apart, relative to the largest; by default not at all.
    """

    name: str
    what: str
    how: How
    run: Callable[[Any], Any]
    devices: int
    of_xla: str
    tolerance: float

    @property
    def ours(self) -> bool:
        """Whether our kernels run."""
        return self.how in (How.ACCELERATED, How.PARTLY, How.DERIVED)

    def collectives(self, text: str) -> int:
        """The number of XLA's collectives in a program."""
        return len(re.findall(rf"\b(?:{self.of_xla})(?:-start)?\(", text))


EVERY_COLLECTIVE = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
ROWS: dict[str, Row] = {}


def row(
    what: str, how: How, devices: int = 2, of_xla: str = EVERY_COLLECTIVE, tolerance: float = 0.0
) -> Callable[[Any], Any]:
    """Adds a row to the table, under the name of the function.

    A function of a library and of `check_vma` runs with it on and off.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.replace("_", "-")
        assert name not in ROWS
        run = function
        if len(inspect.signature(function).parameters) == 2:
            run = functools.wraps(function)(
                lambda lib: under_both(lambda check: function(lib, check))
            )
        ROWS[name] = Row(name, what, how, run, devices, of_xla, tolerance)
        return function

    return add


# Running a row and comparing its results.

# The HLO of each program that `run` compiled for the current row.
PROGRAMS: list[str] = []
# The operations that the current row applies all together, by `each`.
TOGETHER: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception that is the result of a row."""

    type: type[BaseException]
    message: str
    notes: str


def raised(function: Callable[[], Any]) -> Any:
    """The exception that a function raises, or else its result."""
    try:
        return jax.block_until_ready(function())
    except Exception as error:
        # JAX appends a remark about the filtered traceback.
        message = str(error).split("\n--------------------\n")[0]
        return Raised(type(error), message, "\n".join(getattr(error, "__notes__", [])))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a row with ours or with lax's psum."""

    result: Any
    programs: list[str]
    calls: int  # how often our handlers ran


def outcome(tested: Row, lib: Any) -> Outcome:
    PROGRAMS.clear()
    TOGETHER.clear()
    before = extension.handler_calls()
    result = jax.block_until_ready(tested.run(lib))
    return Outcome(result, list(PROGRAMS), extension.handler_calls() - before)


def compare(ours: Any, theirs: Any, tolerance: float = 0.0, path: str = "result") -> None:
    """Compares everything that a user can see of two results."""
    assert type(ours) is type(theirs), f"{path}: {ours!r} is not {theirs!r}"
    if isinstance(ours, (tuple, list)):
        assert len(ours) == len(theirs), path
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            compare(a, b, tolerance, f"{path}[{k}]")
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), path
        for key in ours:
            compare(ours[key], theirs[key], tolerance, f"{path}[{key!r}]")
    elif isinstance(ours, Raised):
        assert ours.type is theirs.type, f"{path}: {ours} is not {theirs}"
    elif isinstance(ours, jax.Array):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, path
        assert ours.weak_type == theirs.weak_type, f"{path}: weak_type {ours.weak_type}"
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim), path
        assert type(ours.sharding) is type(theirs.sharding), path
        assert ours.committed == theirs.committed, path
        if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        for a, b in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            compare(np.asarray(a.data), np.asarray(b.data), tolerance, f"{path} on {a.device}")
    elif isinstance(ours, (np.ndarray, np.generic)):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, path
        if tolerance and ours.dtype.kind == "f":
            size = np.abs(theirs).max(initial=1.0)
            np.testing.assert_allclose(ours, theirs, tolerance, tolerance * size, err_msg=path)
        else:
            assert ours.tobytes() == theirs.tobytes(), f"{path}: {ours} is not {theirs}"
    else:
        assert ours == theirs, f"{path}: {ours!r} is not {theirs!r}"


def check(row: Row) -> None:
    """Runs a row with our functions and with lax's, and compares them."""
    ours, theirs = outcome(row, jax_intranode), outcome(row, lax)
    assert theirs.calls == 0
    if row.how == How.DIFFERS:
        # The second process reports values or the text of an error.
        (ours_saved, ours_loaded), (saved, loaded) = ours.result, theirs.result
        assert ours_saved == saved == "yes"
        assert isinstance(loaded, list)
        assert "needs jax_intranode.initialize(mesh)" in str(ours_loaded)
        return
    compare(ours.result, theirs.result, row.tolerance)
    if row.how == How.ERROR:
        results = jax.tree.leaves(theirs.result)
        assert all(isinstance(result, Raised) for result in results), "lax raises no error"
    called = [set(re.findall(r"jax_intranode_(\w+)", text)) for text in ours.programs]
    of_xla = [*map(row.collectives, ours.programs)]
    of_lax = [*map(row.collectives, theirs.programs)]
    if row.ours:
        assert ours.calls > 0, "our kernels did not run"
        if called:
            assert set().union(*called) >= TOGETHER, "an operation that is never ours"
    if row.how == How.ACCELERATED:
        assert all(called), "a program without our call"
        assert not any(of_xla), "a collective of XLA beside our call"
    elif row.how == How.PARTLY:
        assert any(called) and any(of_xla)
    elif row.how == How.DERIVED:
        assert any(called) or not called
        for mine, lax_s in zip(of_xla, of_lax, strict=True):
            assert mine <= lax_s, "more of them than with lax"
    elif row.how != How.AS_LAX:
        assert ours.calls == 0, "our kernels ran"
        assert not any(called)
        assert of_xla == of_lax


# Helpers of the rows.


def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Compiles a function, records its HLO, and runs it."""
    program = jax.jit(function, **options).lower(*args).compile()
    PROGRAMS.append(program.as_text())
    return program(*args)


def kind(value: Any) -> str:
    """The type of a value as text: all properties of a tracer, the class of anything else."""
    if not isinstance(value, jax.core.Tracer):
        return f"{type(value).__name__} {value}"
    aval = jax.typeof(value)
    return f"{aval} {aval.weak_type=} {aval.manual_axis_type} {aval.sharding}"


def shmap(
    body: Callable[..., Any],
    mesh: Mesh | None = None,
    in_specs: Any = BY_X,
    out_specs: Any = REPLICATED,
    check_vma: bool = True,
    **options: Any,
) -> Any:
    return jax.shard_map(
        body,
        mesh=mesh or line(),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
        **options,
    )


def line(*, order: tuple[int, ...] = (0, 1)) -> Mesh:
    """A mesh of two devices in the given order."""
    return cases.make_mesh((2,), ("x",), order)


def square(order: tuple[int, ...] = (0, 1, 2, 3), kind: AxisType = AxisType.Auto) -> Mesh:
    """A 2 x 2 mesh."""
    devices = np.array(jax.devices()[:4])[list(order)].reshape(2, 2)
    return Mesh(devices, ("x", "y"), axis_types=(kind, kind))


def small(*shape: int, dtype: Any = np.float32, seed: int = 0, top: int = 4) -> np.ndarray:
    """Random integers in [0, top), as values of `dtype`."""
    return np.random.default_rng(seed).integers(0, top, shape).astype(dtype)


# The values of check_vma that `under_both` tries.
CHECK_VMA = [True, False]


def under_both(function: Callable[[bool], Any]) -> dict[str, Any]:
    """The results of a function with check_vma on and off."""
    return {f"check_vma={check}": function(check) for check in CHECK_VMA}


def types_inside(function: Callable[[Any], Any], value: Any = None) -> dict[str, Any]:
    """The types that a function returns inside shard_map, with check_vma on and off.

    The function gets an operand that varies over "x", with 3 columns.
    """
    value = small(4, 3) if value is None else value

    def under(check_vma: bool) -> list[Any]:
        seen = []

        def body(v: Any) -> Any:
            seen.append(jax.tree.map(kind, function(v)))
            return v

        jax.eval_shape(shmap(body, out_specs=P("x"), check_vma=check_vma), value)
        return seen

    return under_both(under)


# The operations together. Those that can be tiled are.

NAMES = ("psum", "psum_scatter", "all_gather", "all_to_all", "pmean", "pmax", "pmin")
EXTREMES = cases.EXTREMES


def operations(lib: Any) -> dict[str, Any]:
    """The operations as functions of an operand and axes."""

    def to_the_next(v: Any, axes: Any, **options: Any) -> Any:
        return lib.ppermute(v, axes, cases.shift(lib.psum(1, axes)), **options)

    return {
        "psum": lib.psum,
        "psum_scatter": functools.partial(lib.psum_scatter, tiled=True),
        "all_gather": functools.partial(lib.all_gather, tiled=True),
        "all_to_all": functools.partial(lib.all_to_all, split_axis=0, concat_axis=0, tiled=True),
        "pmean": lib.pmean,
        "pmax": lib.pmax,
        "pmin": lib.pmin,
        "ppermute": to_the_next,
    }


def each(
    lib: Any, v: Any, axes: Any = "x", without: Sequence[str] = (), **options: Any
) -> dict[str, Any]:
    """The results of the operations."""
    TOGETHER.update(name for name in cases.OPERATIONS if name not in without)
    chosen = ((name, f) for name, f in operations(lib).items() if name not in without)
    return {name: f(v, axes, **options) for name, f in chosen}


def each_raised(lib: Any, function: Callable[[Any], Any]) -> dict[str, Any]:
    """The result of a function for each operation, or the error that it raises."""
    return {name: raised(lambda f=f: function(f)) for name, f in operations(lib).items()}


def inside(
    body: Callable[..., Any],
    *values: Any,
    mesh: Mesh | None = None,
    in_specs: Any = BY_X,
    out_specs: Any = BY_X,
    catch: Callable[[Callable[[], Any]], Any] = lambda f: f(),
) -> dict[str, Any]:
    """Runs a body inside shard_map, with check_vma on and off."""
    values = values or (small(8, 3),)
    return under_both(
        lambda check: catch(lambda: run(shmap(body, mesh, in_specs, out_specs, check), *values))
    )


def inside_raised(body: Callable[..., Any], *values: Any, **options: Any) -> dict[str, Any]:
    """Like the function above, for a body that may raise an error."""
    return inside(body, *values, catch=raised, **options)


def on_line(v: np.ndarray, spec: P = BY_X) -> jax.Array:
    """An array on the two devices of `line()`."""
    return jax.device_put(v, NamedSharding(line(), spec))
