"""A program as XLA has it when it propagates shardings: converted to HLO, and simplified by that.

Where several shardings are possible, Shardy's choice depends on the form of the operations.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir

from jax_intranode._src.jax_private import hlo
from jax_intranode._src.rewrite.auto.modules import (
    as_bytecode,
    inline_calls,
    inner_blocks,
    integer,
    operations,
    walk,
)

# The names of calls that stand for operations while the rest is converted.
_STAND_IN = "jax_intranode_stand_in_"
# XLA inlines calls after the conversion. The results of a function are a tuple then, whose elements
# XLA orders before what uses one of them. Shardy's choice depends on the order, too.
_RESULTS = "jax_intranode_results"
# What HLO says of layouts, which XLA assigns later.
_LAYOUTS = frozenset({"result_layout", "xla_shape"})


def simplified(module: Any) -> Any:
    """A copy of a module, with its calls inlined: what is put back must not call what is gone."""
    module = ir.Module.parse(as_bytecode(module))
    inline_calls(module, _RESULTS)
    copy = ir.Module.parse(as_bytecode(module))
    # HLO keeps names of locations, but not the frames.
    locations = []
    for operation in walk(copy.operation):
        locations.append(operation.location)
        operation.location = ir.Location.name(str(len(locations) - 1))
    for index, operation in enumerate(list(_kept(copy))):
        _stand_in(operation, f"{_STAND_IN}{index}")
    for operation in operations(copy.body):
        if operation.name == "sdy.mesh":
            operation.erase()
        else:
            _set_attributes(operation, None)
    new = ir.Module.parse(hlo.through_hlo(as_bytecode(copy)))
    inline_calls(new)
    (main,) = operations(new.body)
    for operation in walk(main):
        operation.location = _original(operation.location, locations)
        for name in _LAYOUTS & {*operation.attributes}:
            del operation.attributes[name]
    for name in [*new.operation.attributes]:
        del new.operation.attributes[name]
    for name in module.operation.attributes:
        new.operation.attributes[name] = module.operation.attributes[name]
    for operation in operations(module.body):
        if operation.name == "sdy.mesh":
            operation.clone(ip=ir.InsertionPoint.at_block_begin(new.body))
        elif ir.StringAttr(operation.attributes["sym_name"]).value == "main":
            _set_attributes(main, operation)
    originals = list(_kept(module))
    for operation in walk(main):
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target.startswith(_STAND_IN):
                _put_back(operation, originals[int(target.removeprefix(_STAND_IN))])
    _hoist_invariants(main)
    return new


def _original(location: Any, locations: list[Any]) -> Any:
    try:
        return locations[int(ir.NameLoc(location).name_str)]
    except ValueError:
        return ir.Location.unknown()


def _kept(module: Any) -> Iterator[Any]:
    """The operations that HLO does not have, or changes."""
    todo = [block for o in operations(module.body) for block in inner_blocks(o)]
    while todo:
        for operation in operations(todo.pop()):
            if operation.name.startswith("sdy.") or operation.name == "stablehlo.custom_call":
                yield operation
            else:
                todo += inner_blocks(operation)


def _stand_in(operation: Any, target: str) -> None:
    """Replaces an operation by a call with the same operands and results."""
    attributes: dict[str, Any] = {"call_target_name": ir.StringAttr.get(target)}
    if "has_side_effect" in operation.attributes:
        attributes["has_side_effect"] = operation.attributes["has_side_effect"]
    new = ir.Operation.create(
        "stablehlo.custom_call",
        results=[result.type for result in operation.results],
        operands=list(operation.operands),
        attributes=attributes,
        loc=operation.location,
        ip=ir.InsertionPoint(operation),
    )
    for before, after in zip(operation.results, new.results, strict=True):
        before.replace_all_uses_with(after)
    operation.erase()


def _put_back(call: Any, operation: Any) -> None:
    target = operation.attributes.get("call_target_name")
    if target is not None and ir.StringAttr(target).value == _RESULTS:
        values = list(call.operands)
    else:
        new = operation.clone(ip=ir.InsertionPoint(call)).operation
        for index, operand in enumerate(call.operands):
            new.operands[index] = operand
        values = list(new.results)
    if len(values) == 1:
        call.results[0].replace_all_uses_with(values[0])
    else:  # HLO has a tuple
        for use in [use for result in call.results for use in result.uses]:
            element = use.owner.operation
            element.results[0].replace_all_uses_with(
                values[integer(element.attributes["index"])]
            )
            element.erase()
    call.erase()


def _set_attributes(function: Any, other: Any) -> None:
    """Gives the arguments and results of a function the attributes of another one, or none."""
    for name in ("arg_attrs", "res_attrs"):
        if name in function.attributes:
            del function.attributes[name]
        if other is not None and name in other.attributes:
            function.attributes[name] = other.attributes[name]


def _hoist_invariants(main: Any) -> None:
    """Lets loops use the values that they do not change from outside, as XLA does."""
    changed = True
    while changed:
        changed = False
        for loop in [o for o in walk(main) if o.name == "stablehlo.while"]:
            condition, body = inner_blocks(loop)
            *_, end = operations(body)
            for index, operand in enumerate(loop.operands):
                if end.operands[index] != body.arguments[index]:
                    continue
                for value in (
                    condition.arguments[index],
                    body.arguments[index],
                    loop.results[index],
                ):
                    for use in list(value.uses):
                        if use.owner.operation != end:
                            use.owner.operation.operands[use.operand_number] = operand
                            changed = True
