"""What follows a sum, up to a norm, joins its shard_map, where norms.py makes one operation of it.

That is the addition of a residual, and a norm of the result, which `rows` recognizes.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir

from jax_intranode._src.rewrite import rows
from jax_intranode._src.rewrite.auto.kinds import aval, kind_of
from jax_intranode._src.rewrite.auto.modules import FENCES, RESHARDS, number, operands, owner, splat
from jax_intranode._src.rewrite.auto.program import Program

# A norm has about ten operations; others may stand between.
_FARTHEST = 200

# What jax.lax calls the operations of a norm that have other names there.
_NAMES = {
    "convert": "convert_element_type",
    "divide": "div",
    "maximum": "max",
    "multiply": "mul",
    "negate": "neg",
    "power": "pow",
    "reduce": "reduce_sum",
    "subtract": "sub",
}


@dataclass(frozen=True)
class Tail:
    """What is computed from a sum: a residual is added, and the result is normed.

    Attributes:
        operations: the MLIR operations, in order.
        inputs: what else they use: the residual, and the norm's weight and bias.
        norm: the norm.
        outputs: the norm, and what is normed.
    """

    operations: tuple[Any, ...]
    inputs: tuple[Any, ...]
    norm: rows.Norm
    outputs: tuple[Any, Any]

    def key(self) -> Any:
        """Identifies what it computes, but for the inputs."""
        return self.norm.kind, self.norm.eps, self.norm.weight_offset

    def __call__(self, total: Any, others: Sequence[Any]) -> list[Any]:
        """The outputs, from the sum and the other inputs."""
        residual, weight, *bias = others
        h = lax.add(total, residual)
        dtype = jnp.promote_types(h.dtype, jnp.float32)
        x = h.astype(dtype)
        if self.norm.kind == "layer_norm":
            x = x - x.mean(-1, keepdims=True)
        y = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + self.norm.eps)
        y = y * (weight.astype(dtype) + self.norm.weight_offset)
        return [sum((each.astype(dtype) for each in bias), y).astype(h.dtype), h]


class _Reader(rows.Reader):
    """Reads MLIR operations as functions of the rows of h."""

    def __init__(self, h: Any):
        super().__init__(tuple(ir.RankedTensorType(h.type).shape))
        self.own = rows.own(self.shape)
        self.known: dict[Any, rows.Rows | None] = {h: self.own}

    def value(self, v: Any, steps: int = rows.MOST_STEPS) -> rows.Rows | None:
        """A value. Without h it is a number, a parameter, or a function of some."""
        if v not in self.known:
            constant, maker, of = splat(v), owner(v), aval(v)
            found = None if constant is None else rows.Rows((), constant)
            # A parameter that the program rounds is read as that.
            if found is None and maker is not None and steps and not _rounds(maker):
                found = self.operation(maker, steps - 1)
            if found is None and of is not None and of.ndim == 1 and of.dtype.name in rows.FLOATS:
                found = rows.parameter(v, self.shape)
            self.known[v] = found
        return self.known[v]

    def operation(self, operation: Any, steps: int = rows.MOST_STEPS) -> rows.Rows | None:
        """The result of an operation; None if it is not known."""
        name, how = operation.name.removeprefix("stablehlo."), None
        name, count = _NAMES.get(name, name), len(operation.operands)
        if len(operation.results) != 1 or not count:
            return None
        if name == "broadcast_in_dim":
            how = tuple(ir.DenseI64ArrayAttr(operation.attributes["broadcast_dimensions"]))
        elif name == "reduce_sum":
            kind = kind_of(operation)
            if kind is None or kind.compute is None or kind.collective != "psum":
                return None
            how, count = tuple(ir.DenseI64ArrayAttr(operation.attributes["dimensions"])), 1
        before, after = aval(operation.operands[0]), aval(operation.results[0])
        if before is None or after is None:
            return None
        values = [self.value(v, steps) for v in list(operation.operands)[:count]]
        return self.result(name, values, before, after, how)


def _rounds(operation: Any) -> bool:
    if operation.name != "stablehlo.convert":
        return False
    before, after = aval(operation.operands[0]), aval(operation.results[0])
    return before is None or after is None or before.dtype.itemsize > after.dtype.itemsize


def tails(
    total: Any, block: Sequence[Any], start: int, members: Collection[int], program: Program
) -> Iterator[Tail]:
    """The tails of a sum, the longest first.

    Args:
        total: the sum.
        block: the operations of its block.
        start: the place of the operation that makes it.
        members: the numbers of operations that become part of shard_maps.
        program: the program.
    """
    own: dict[int, Any] = {}  # the operations that need the sum, by number
    dependent = {total}
    reader: _Reader | None = None
    inputs: list[Any] = []
    found = []
    for operation in block[start + 1 : start + _FARTHEST]:
        if operation.name in FENCES:
            break
        if dependent.isdisjoint(operands(operation)):
            continue
        if number(operation) in members:
            break
        own[number(operation)] = operation
        if reader is not None:
            described = reader.operation(operation)
            reader.known.update(dict.fromkeys(operation.results, described))
            if described is not None and operation.results[0].type == total.type:
                norm = rows.norm_of(described, reader.own)
                found += [(operation.results[0], norm)] if norm is not None else []
        elif operation.name == "stablehlo.add":
            inputs = [value for value in operation.operands if value not in dependent]
            reader = _Reader(operation.results[0])
        elif operation.name not in RESHARDS:
            return
        dependent.update(operation.results)
    if reader is None or len(inputs) != 1:
        return
    h = next(iter(reader.known))
    for y, norm in reversed(found):
        parameters = [norm.weight, *([] if norm.bias is None else [norm.bias])]
        specs = {program.spec(value) for value in (total, h, y, *inputs)}
        used = _used(total, h, y, own)
        if used and specs == {program.spec(total)} and not any(map(program.is_divided, parameters)):
            yield Tail(used, (*inputs, *parameters), norm, (y, h))


def _used(total: Any, h: Any, y: Any, own: dict[int, Any]) -> tuple[Any, ...]:
    """The operations between a sum and a norm; none if one of them is needed elsewhere."""
    used: dict[int, Any] = {}
    waiting = [y]
    while waiting:
        maker = owner(waiting.pop())
        if maker is not None and number(maker) in own and number(maker) not in used:
            used[number(maker)] = maker
            waiting += maker.operands
    inner = [r for each in used.values() for r in each.results if r not in (y, h)]
    if any(number(use.owner.operation) not in used for r in (total, *inner) for use in r.uses):
        return ()
    return tuple(each for n, each in own.items() if n in used)
