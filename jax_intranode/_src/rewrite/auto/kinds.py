"""What operations compute: of whole arrays, and of the parts that devices have."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import mlir_text
from jax_intranode._src.rewrite.auto import plans
from jax_intranode._src.rewrite.auto.modules import (
    RESHARDS,
    dot_dimensions,
    operations,
    owner,
    splat,
)
from jax_intranode._src.rewrite.auto.plans import Axes, Labels, Plan


@dataclass(frozen=True)
class Kind:
    """What an operation computes.

    Attributes:
        name: "dot_general", "reduce", "reshard", "argmax", "argmin", "gather" or "scatter".
        key: identifies the kind.
        labels: the labels of its dimensions.
        compute: the operation, of JAX arrays; None if it is left whatever it sends.
        operands: how many of the MLIR operation's operands are arrays.
        reason: why it is left, then.
        axes: the axes of the collective that it is itself, in a partly manual shard_map.
        collective: what combines the results of the devices, where a plan has sums.
        on_shards: its results on a device by a plan, from its parts of the operands, if not those
            of `compute` are to be combined.
    """

    name: str
    key: Any
    labels: Labels
    compute: Callable[..., Any] | None
    operands: int
    reason: str = ""
    axes: Axes = ()
    collective: str = "psum"
    on_shards: Callable[..., tuple[Any, ...]] | None = None


def aval(value: Any) -> Any | None:
    """The type of a value for JAX; None if this package doesn't know it."""
    try:
        ranked = ir.RankedTensorType(value.type)
    except ValueError:
        return None
    name = mlir_text.dtype_of(ranked)
    if name is None or any(ranked.is_dynamic_dim(i) for i in range(ranked.rank)):
        return None
    if jax.dtypes.canonicalize_dtype(name) != name:  # 64 bits, traced when they were enabled
        return None
    return jax.ShapeDtypeStruct(tuple(ranked.shape), jnp.dtype(name))


def kind_of(operation: Any) -> Kind | None:
    """What an operation computes; None if nothing of it can be ours."""
    if operation.name in ("stablehlo.dot_general", "stablehlo.dot"):
        return _dot_general(operation)
    if operation.name == "stablehlo.reduce":
        return _reduce(operation)
    if operation.name in ("stablehlo.gather", "stablehlo.scatter"):
        return _lookup(operation)
    if operation.name in RESHARDS:
        rank = len(ir.RankedTensorType(operation.results[0].type).shape)
        labels = tuple(range(rank))
        return Kind("reshard", ("reshard",), Labels((labels,), labels), lambda x: x, 1)
    return None


def _dot_general(operation: Any) -> Kind:
    attributes = operation.attributes
    contracting, batch = dot_dimensions(operation)
    precision = (lax.Precision.DEFAULT,) * 2
    if "precision_config" in attributes:
        precision = tuple(
            getattr(lax.Precision, str(stablehlo.PrecisionAttr(x).value))
            for x in attributes["precision_config"]
        )
    ranks = [len(ir.RankedTensorType(value.type).shape) for value in operation.operands]
    labels = plans.dot_labels(contracting, batch, ranks)
    result = aval(operation.results[0])
    if "algorithm" in attributes or result is None:
        reason = reasons.DOT_ALGORITHM if result else reasons.UNKNOWN_DTYPE
        return Kind("dot_general", None, labels, None, 2, reason)
    dtype = result.dtype

    def compute(x: Any, w: Any) -> Any:
        return lax.dot_general(
            x, w, (contracting, batch), precision=precision, preferred_element_type=dtype
        )

    key = "dot_general", contracting, batch, precision, dtype.name
    return Kind("dot_general", key, labels, compute, 2)


# How a reduction is computed on a device, and among devices.
_REDUCTIONS = {
    "stablehlo.add": (lax.reduce_sum, "psum"),
    "stablehlo.maximum": (lax.reduce_max, "pmax"),
    "stablehlo.minimum": (lax.reduce_min, "pmin"),
}


def reduction_of(block: Any) -> tuple[Callable[..., Any], str] | None:
    """The reduction that a block is of two numbers; None if it is another one."""
    names = [o.operation.name for o in block.operations]
    return _REDUCTIONS.get(names[0]) if names[1:] == ["stablehlo.return"] else None


def _start(collective: str, dtype: Any) -> Any:
    """Where a sum, maximum or minimum begins."""
    if collective == "psum":
        return 0.0
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return limits.min if collective == "pmax" else limits.max
    return -math.inf if collective == "pmax" else math.inf


def _reduce(operation: Any) -> Kind:
    count = len(operation.results)
    dimensions = tuple(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))
    rank = len(ir.RankedTensorType(operation.operands[0].type).shape)
    own = tuple(range(rank))
    labels = Labels((own,) * count, tuple(i for i in own if i not in dimensions))
    reduction = reduction_of(operation.regions[0].blocks[0])
    of = aval(operation.operands[0])
    if count == 2 and (found := _arg_reduction(operation, labels)) is not None:
        return found
    if reduction is None or count > 1:
        return Kind("reduce", None, labels, None, count, reasons.NO_SUM)
    reduce, collective = reduction
    reason = ""
    if of is None:
        reason = reasons.UNKNOWN_DTYPE
    elif splat(operation.operands[1]) != float(_start(collective, of.dtype)):
        reason = reasons.SUM_FROM_OTHER

    def compute(x: Any) -> Any:
        return reduce(x, dimensions)

    return Kind(
        *("reduce", ("reduce", collective, dimensions), labels, None if reason else compute),
        *(1, reason, (), collective),
    )


# The index of a maximum or minimum.

# What its region may have: comparisons, and what depends on them.
_CHOICES: dict[str, Any] = {
    **{"GT": np.greater, "LT": np.less, "EQ": np.equal, "NE": np.not_equal},
    **{"stablehlo.or": np.logical_or, "stablehlo.and": np.logical_and},
    "stablehlo.select": np.where,
}


def _arg_reduction(operation: Any, labels: Labels) -> Kind | None:
    """The kind of a reduction to the largest or smallest element and its index; None of others.

    Of equal elements it is the lowest index, of several NaN that of the first one.
    """
    of, of_index = map(aval, list(operation.operands)[:2])
    start, index = map(splat, list(operation.operands)[2:])
    if of is None or of_index is None or index is None:
        return None
    is_float = jnp.issubdtype(of.dtype, jnp.floating)
    name = _chosen(operation.regions[0].blocks[0], is_float)
    if name is None or not jnp.issubdtype(of_index.dtype, jnp.integer):
        return None
    collective, better = ("pmax", lax.gt) if name == "argmax" else ("pmin", lax.lt)
    if start != float(_start(collective, of.dtype)):
        return None
    dimensions = tuple(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))

    def choose(one: Any, other: Any) -> tuple[Any, Any]:
        (x, i), (y, j) = one, other
        first = better(x, y) | (x != x)
        return jnp.where(first, x, y), jnp.where(first | ((x == y) & (i < j)), i, j)

    def on_shards(plan: Plan, x: Any, indices: Any) -> tuple[Any, Any]:
        inits = np.array(_start(collective, x.dtype), x.dtype), np.array(index, indices.dtype)
        own, found = lax.reduce((x, indices), inits, choose, dimensions)
        best = plan.summed(own, collective)
        last = np.array(jnp.iinfo(indices.dtype).max, indices.dtype)
        found = jnp.where((own == best) | (own != own), found, last)
        return best, plan.summed(found, "pmin")

    key = name, dimensions, int(index)
    alone = Plan((), (), (), ())
    return Kind(name, key, labels, partial(on_shards, alone), 2, "", (), collective, on_shards)


def _chosen(block: Any, has_nan: bool) -> str | None:
    """Whether a block of two elements and their indices chooses as "argmax" or "argmin".

    It only compares. So it is known from elements and indices in each order.
    """
    values = [-1.0, 0.0, 1.0, *([math.nan] if has_nan else [])]
    grid = np.meshgrid(values, [0, 1, 2], values, [0, 1, 2])
    known: dict[Any, Any] = dict(zip(block.arguments, (each.ravel() for each in grid), strict=True))
    a, i, b, j = known.values()
    *body, end = operations(block)
    for operation in body:
        xs = [known.get(value) for value in operation.operands]
        how = operation.attributes.get("comparison_direction")
        name = operation.name if how is None else stablehlo.ComparisonDirectionAttr(how).value
        if name not in _CHOICES or any(x is None for x in xs):
            return None
        known[operation.results[0]] = _CHOICES[name](*xs)
    results = [known.get(value) for value in end.operands]
    for name, better in (("argmax", a > b), ("argmin", a < b)):
        first = better | np.isnan(a)
        wanted = np.where(first, a, b), np.where(first | ((a == b) & (i < j)), i, j)
        one = ~(np.isnan(a) & np.isnan(b))  # of two NaN, the order in which they come decides
        if all(
            found is not None and np.array_equal(found[one], right[one], equal_nan=True)
            for found, right in zip(results, wanted, strict=True)
        ):
            return name
    return None


# Rows of a table.

# The elements of the result are those of the operand.
_OF_ONE_VALUE = RESHARDS | {"stablehlo.broadcast_in_dim", "stablehlo.reshape"}


def _lookup(operation: Any) -> Kind | None:
    """The kind of a gather of rows of a table by their numbers, or of a sum into them by scatter.

    None if it is another gather or scatter. Rows may be along any dimension of the table. A device
    that has some of the rows takes 0 for those of others, and adds nothing to them.
    """
    scatters = operation.name == "stablehlo.scatter"
    d: Any
    found: Any
    if scatters:
        d = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
        found = d.update_window_dims, d.inserted_window_dims, d.scattered_dims_to_operand_dims
        found = *found, d.input_batching_dims, d.scatter_indices_batching_dims
    else:
        d = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
        found = d.offset_dims, d.collapsed_slice_dims, d.start_index_map
        found = *found, d.operand_batching_dims, d.start_indices_batching_dims
    numbers = window, of_rows, mapped, batching, of_indices = tuple(map(tuple, found))
    start, at, other = (*operation.operands, *operation.results)[:3]
    table, of_other = (tuple(ir.RankedTensorType(v.type).shape) for v in (start, other))
    indices = aval(at)
    if of_rows != mapped or len(mapped) != 1 or len(operation.results) > 1 or indices is None:
        return None
    if indices.shape[d.index_vector_dim :] != (1,) or indices.dtype != np.int32:
        return None
    (dimension,) = mapped
    along = [i for i in range(len(table)) if i != dimension and i not in batching]
    if [of_other[i] for i in window] != [table[i] for i in along]:
        return None
    # Labels: those of the table are its dimensions.
    own = tuple(range(len(table)))
    shared = dict(zip(of_indices, batching, strict=True))
    others = tuple(shared.get(i, len(own) + i) for i in range(indices.ndim))
    of_window, of_batch = iter(along), iter(others)
    result = tuple(next(of_window if i in window else of_batch) for i in range(len(of_other)))
    outer = [i for i in range(len(of_other)) if i not in window]
    mode, table_rows = lax.GatherScatterMode, table[dimension]

    def compute(table: Any, at: Any, *updates: Any) -> Any:
        if scatters:
            of = lax.ScatterDimensionNumbers(*numbers)
            return lax.scatter_add(table, at, updates[0], of, mode=mode.FILL_OR_DROP)
        sizes = [n if i in along else 1 for i, n in enumerate(table.shape)]
        return lax.gather(table, at, lax.GatherDimensionNumbers(*numbers), sizes, mode=mode.CLIP)

    def on_shards(plan: Plan, table: Any, at: Any, *updates: Any) -> tuple[Any]:
        axes, own_rows = plan.computed(0, dimension), table.shape[dimension]
        if not axes:
            return (plan.summed(compute(table, at, *updates), "psum"),)
        first = lax.axis_index(axes).astype(at.dtype) * own_rows
        at = (at if scatters else jnp.clip(at, 0, table_rows - 1)) - first
        found = compute(table, at, *updates)
        if not scatters:
            is_own = jnp.squeeze((at >= 0) & (at < own_rows), -1)
            is_own = lax.broadcast_in_dim(is_own, found.shape, outer)
            found = jnp.where(is_own, found, jnp.zeros_like(found))
        return (plan.summed(found, "psum"),)

    name = operation.name.removeprefix("stablehlo.")
    if not scatters:
        labels = Labels((own, others), result)
        return Kind(name, (name, numbers), labels, compute, 2, on_shards=on_shards)
    reduction = reduction_of(operation.regions[0].blocks[0])
    while (maker := owner(start)) is not None and maker.name in _OF_ONE_VALUE:
        start = maker.operands[0]
    if reduction is None or reduction[1] != "psum":
        return None
    labels = Labels((own, others, result), own)
    if splat(start) != 0.0:
        return Kind(name, None, labels, None, 3, reasons.SUM_FROM_OTHER)
    return Kind(name, (name, numbers), labels, compute, 3, on_shards=on_shards)
