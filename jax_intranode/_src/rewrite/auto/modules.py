"""MLIR modules in Python: their operations, by type."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

# The attribute that tells operations apart. In Python their hashes change with their operands.
NUMBER = "jax_intranode.number"


# Operations that nothing is moved across.
FENCES = frozenset(
    {"stablehlo.optimization_barrier", "stablehlo.custom_call"}
    | {"func.return", "return", "stablehlo.return", "sdy.return"}
)

# Operations that only say how an array is sharded.
RESHARDS = frozenset({"sdy.reshard", "sdy.sharding_constraint"})


class Unsuitable(Exception):
    """A program that can't be rewritten; the text says why."""


def operations(block: Any) -> list[Any]:
    """The operations of a block."""
    return [operation.operation for operation in block.operations]


def inner_blocks(operation: Any) -> Iterator[Any]:
    """The blocks of an operation's regions."""
    for region in operation.regions:
        yield from region.blocks


def walk(operation: Any, outermost: Callable[[Any], bool] | None = None) -> list[Any]:
    """An operation and all inside; or the outermost ones of which something is true."""
    found: list[Any] = []

    def add(each: Any) -> Any:
        if outermost is not None and not outermost(each.operation):
            return ir.WalkResult.ADVANCE
        found.append(each.operation)
        return ir.WalkResult.ADVANCE if outermost is None else ir.WalkResult.SKIP

    order = ir.WalkOrder.POST_ORDER if outermost is None else ir.WalkOrder.PRE_ORDER
    operation.walk(add, order)
    return found


def operands(operation: Any) -> list[Any]:
    """What an operation and all inside it use."""
    if len(operation.regions) == 0:
        return list(operation.operands)
    return [value for inner in walk(operation) for value in inner.operands]


def splat(value: Any) -> float | None:
    """The number that all elements of a constant are; None if it is no such constant."""
    maker = owner(value)
    if maker is None or maker.name not in ("stablehlo.constant", "sdy.constant"):
        return None
    try:
        elements = ir.DenseElementsAttr(maker.attributes["value"])
        if not elements.is_splat:
            return None
        element = elements.get_splat_value()
    except (TypeError, ValueError):  # complex numbers
        return None
    for kind in (ir.FloatAttr, ir.IntegerAttr):
        try:
            return float(kind(element).value)
        except ValueError:
            continue
    return None


# Dimensions of a dot's operands.
_OfBoth = tuple[tuple[int, ...], tuple[int, ...]]


def dot_dimensions(dot: Any) -> tuple[_OfBoth, _OfBoth]:
    """The dimensions of both operands of a dot that are contracted, and those of its batch."""
    if dot.name == "stablehlo.dot":
        last = len(ir.RankedTensorType(dot.operands[0].type).shape) - 1
        return ((last,), (0,)), ((), ())
    d = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    contracting = tuple(d.lhs_contracting_dimensions), tuple(d.rhs_contracting_dimensions)
    return contracting, (tuple(d.lhs_batching_dimensions), tuple(d.rhs_batching_dimensions))


def number(operation: Any) -> int:
    """Identifies an operation of a program."""
    return integer(operation.attributes[NUMBER])


def integer(attribute: Any) -> int:
    """The value of an integer attribute."""
    return int(ir.IntegerAttr(attribute).value)


def owner(value: Any) -> Any | None:
    """The operation that makes a value; None if it is an argument of a block."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def names_around(operation: Any) -> set[str]:
    """The names of the operations that have an operation in a region, up to its function."""
    names, parent = set(), operation.parent
    while parent is not None and parent.operation.name != "func.func":
        names.add(parent.operation.name)
        parent = parent.operation.parent
    return names


def as_bytecode(module: Any) -> bytes:
    """A module as bytecode."""
    text = io.BytesIO()
    module.operation.write_bytecode(file=text)
    return text.getvalue()


def manual_axes(operation: Any) -> frozenset[str]:
    """The axes that a manual computation binds."""
    return frozenset(map(str, sdy.ManualAxesAttr(operation.attributes["manual_axes"])))


def manual_axes_attribute(axes: Sequence[str]) -> Any:
    """The attribute of a manual computation that binds these axes."""
    return sdy.ManualAxesAttr.get([ir.StringAttr.get(axis) for axis in axes])


def use_mesh(name: str, other: Any, module: Any) -> None:
    """Replaces a mesh of a module, and erases it."""
    before = ir.StringAttr(other.attributes["sym_name"]).value
    if before != name:
        ir.SymbolTable.replace_all_symbol_uses(before, name, module.operation)
        other.erase()


def functions_of(module: Any) -> dict[str, Any]:
    """The functions of a module, by name."""
    return {
        ir.StringAttr(o.attributes["sym_name"]).value: o
        for o in operations(module.body)
        if o.name == "func.func"
    }


def inline_calls(inside: Any, functions: Mapping[str, Any], marker: str | None = None) -> None:
    """Puts the bodies of functions where they are called. MLIR's own pass leaves these calls.

    Args:
        inside: the operation whose calls are inlined.
        functions: all functions, by name.
        marker: the target of a custom call that all results of a call pass through; None if there
            is none.
    """
    while calls := [o for o in walk(inside) if o.name == "func.call"]:
        for call in calls:
            callee = functions[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
            block = callee.regions[0].blocks[0]
            now = dict(zip(block.arguments, call.operands, strict=True))
            *body, end = operations(block)
            for operation in body:
                new = operation.clone(ip=ir.InsertionPoint(call)).operation
                for inner in walk(new):
                    for index, operand in enumerate(inner.operands):
                        if operand in now:
                            inner.operands[index] = now[operand]
                now.update(zip(operation.results, new.results, strict=True))
            values = [now.get(value, value) for value in end.operands]
            if marker is not None and values:
                marking = ir.Operation.create(
                    "stablehlo.custom_call",
                    results=[value.type for value in values],
                    operands=values,
                    attributes={"call_target_name": ir.StringAttr.get(marker)},
                    loc=call.location,
                    ip=ir.InsertionPoint(call),
                )
                values = list(marking.results)
            for result, value in zip(call.results, values, strict=True):
                result.replace_all_uses_with(value)
            call.erase()


def is_array(value: Any) -> bool:
    """Whether a value is an array, and not a token."""
    try:
        ir.RankedTensorType(value.type)
    except (ValueError, TypeError):
        return False
    return True
