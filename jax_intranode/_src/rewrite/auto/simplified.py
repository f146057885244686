"""A program as XLA has it when it propagates shardings: converted to HLO, and simplified by that.

Where several shardings are possible, Shardy's choice depends on the form of the operations, and on
their order.
"""

from typing import Any

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import hlo, mlir_text
from jax_intranode._src.rewrite.auto.modules import (
    Unsuitable,
    as_bytecode,
    dot_dimensions,
    functions_of,
    inline_calls,
    inner_blocks,
    integer,
    operands,
    operations,
    owner,
    walk,
)

# The names of calls that stand for operations while the rest is converted.
_STAND_IN = "jax_intranode_stand_in_"
# A call that all results of an inlined function pass through.
_RESULTS = "jax_intranode_results"
# What HLO says of layouts, which XLA assigns later.
_LAYOUTS = frozenset({"result_layout", "xla_shape"})
# XLA makes selects of branches that have no others and that are elementwise.
_CHEAP = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("broadcast_in_dim", "concatenate", "constant", "dynamic_slice", "pad", "reduce"),
        *("reshape", "return", "slice"),
    )
)
# Not elementwise, though all operands and results may have one shape.
_OF_ONE_SHAPE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("cholesky", "custom_call", "dot", "dot_general", "fft", "optimization_barrier"),
        *("reverse", "transpose", "triangular_solve"),
    )
)
# Operations with a region that combines two numbers.
_COMBINE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("all_reduce", "map", "reduce", "reduce_scatter", "reduce_window", "scatter"),
        *("select_and_scatter", "sort"),
    )
)


def simplified(module: Any, for_gpus: bool) -> Any:
    """A copy of a module that consists of one function.

    Args:
        module: the module.
        for_gpus: whether it is for GPUs, for which XLA simplifies more before it propagates.

    Raises:
        Unsuitable: a call has attributes, by which XLA runs the function elsewhere.
    """
    module = ir.Module.parse(as_bytecode(module))
    functions = functions_of(module)
    all_of_module = walk(module.operation)
    for operation in all_of_module:
        if operation.name == "func.call" and [n for n in operation.attributes if n != "callee"]:
            raise Unsuitable(reasons.CALL_WITH_ATTRIBUTES)
    constraints = [o for o in all_of_module if o.name == "sdy.sharding_constraint"]
    scalars = [o for o in constraints if o.parent.operation.name in _COMBINE]
    # They are put back when the functions are gone. An operation that was erased must not be read.
    manual = [o for o in all_of_module if o.name == "sdy.manual_computation"]
    # Under Explicit axes JAX says of the numbers that a reduction combines how they are sharded.
    for operation in scalars:
        operation.results[0].replace_all_uses_with(operation.operands[0])
        operation.erase()
    for operation in manual:
        inline_calls(operation, functions)
    copy = ir.Module.parse(as_bytecode(module))
    for index, operation in enumerate(walk(copy.operation, _is_kept)):
        _stand_in(operation, f"{_STAND_IN}{index}")
    forget_shardings(copy)
    for operation in operations(copy.body):
        if operation.name == "sdy.mesh":
            operation.erase()
        else:
            _set_attributes(operation, None)
    new = ir.Module.parse(hlo.through_hlo(as_bytecode(copy)))
    # XLA inlines calls after the conversion, which shares constants within a function only.
    of_new = functions_of(new)
    main = of_new.pop("main")
    # For GPUs XLA has simplified the tuples of results before it propagates.
    inline_calls(main, of_new, None if for_gpus else _RESULTS)
    for function in of_new.values():
        function.erase()
    for operation in [o for o in walk(main) if o.name == "stablehlo.tuple"]:
        if not list(operation.results[0].uses):  # the operands of a branch, which uses them singly
            operation.erase()
    if for_gpus:
        _make_ifs(main)
        _transpose_products(main)
    _order_as_xla(main, whole=for_gpus)
    for operation in walk(main):
        for name in _LAYOUTS & {*operation.attributes}:
            del operation.attributes[name]
    for name in [*new.operation.attributes]:
        del new.operation.attributes[name]
    for name in module.operation.attributes:
        new.operation.attributes[name] = module.operation.attributes[name]
    for operation in operations(module.body):
        if operation.name == "sdy.mesh":
            operation.clone(ip=ir.InsertionPoint.at_block_begin(new.body))
    _set_attributes(main, functions["main"])
    originals = walk(module.operation, _is_kept)
    for operation in [o for o in walk(main) if o.name == "stablehlo.custom_call"]:
        target = ir.StringAttr(operation.attributes["call_target_name"]).value
        if target == _RESULTS:
            for result, value in zip(operation.results, operation.operands, strict=True):
                result.replace_all_uses_with(value)
            operation.erase()
        else:
            _put_back(operation, originals[int(target.removeprefix(_STAND_IN))])
    _hoist_invariants(main)
    return new


def forget_shardings(module: Any) -> None:
    """Removes the shardings of ordinary operations, which XLA ignores."""
    for operation in walk(module.operation):
        if "sdy.sharding" in operation.attributes:
            del operation.attributes["sdy.sharding"]


def add_rules(module: Any) -> None:
    """Says how shardings propagate through operations of MHLO.

    XLA's Shardy has rules for these. That of jaxlib has none, and passes drop those given here.
    """
    for operation in walk(module):
        if operation.name not in ("mhlo.topk", "mhlo.erf"):
            continue
        shape = list(ir.RankedTensorType(operation.operands[0].type).shape)
        own = sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get([i]) for i in range(len(shape))])
        last = [len(shape) - 1] if operation.name == "mhlo.topk" else []
        if last or jax.__version_info__ >= (0, 12):
            operation.attributes["sdy.sharding_rule"] = sdy.OpShardingRuleAttr.get(
                shape,
                [own],
                [own] * len(operation.results),
                need_replication_factors=last,
                blocked_propagation_factors=last,
            )


def _make_ifs(main: Any) -> None:
    """Makes an "if" of two branches that a boolean chooses.

    Shardy propagates nothing between the branches and the results of an "if" before jaxlib 0.12.
    It does through the selects that XLA makes of cheap branches, which stay as they are here.
    """
    for case in [o for o in walk(main) if o.name == "stablehlo.case"]:
        index = owner(case.operands[0])
        if len(case.regions) != 2 or index is None or index.name != "stablehlo.convert":
            continue
        chosen = index.operands[0]
        if mlir_text.dtype_of(ir.RankedTensorType(chosen.type)) != "bool":
            continue
        inside = [operation for block in inner_blocks(case) for operation in operations(block)]
        if all(map(_is_cheap, inside)):
            continue
        new = ir.Operation.create(
            "stablehlo.if",
            results=[result.type for result in case.results],
            operands=[chosen],
            regions=2,
            loc=case.location,
            ip=ir.InsertionPoint(case),
        )
        for region, block in zip(new.regions, reversed(list(inner_blocks(case))), strict=True):
            block.append_to(region)
        for before, after in zip(case.results, new.results, strict=True):
            before.replace_all_uses_with(after)
        case.erase()


def _is_cheap(operation: Any) -> bool:
    if operation.name in _CHEAP:
        return True
    if operation.name in _OF_ONE_SHAPE or len(operation.regions):
        return False
    values = (*operation.operands, *operation.results)
    return len({tuple(ir.RankedTensorType(value.type).shape) for value in values}) == 1


def _transpose_products(main: Any) -> None:
    """Makes the transpose of a product of matrices the product of both in the other order.

    Where both are sharded over the same axis, Shardy prefers the first one.
    """
    for transpose in [o for o in walk(main) if o.name == "stablehlo.transpose"]:
        dot = owner(transpose.operands[0])
        if dot is None or dot.name not in ("stablehlo.dot", "stablehlo.dot_general"):
            continue
        if len(list(dot.results[0].uses)) > 1 or "algorithm" in dot.attributes:
            continue
        (first, second), (batch, _) = dot_dimensions(dot)
        ranks = [len(ir.RankedTensorType(value.type).shape) for value in dot.operands]
        order = list(ir.DenseI64ArrayAttr(transpose.attributes["permutation"]))
        if batch or ranks != [1 + len(first)] * 2 or order != [1, 0]:
            continue
        attributes: dict[str, ir.Attribute] = {
            "dot_dimension_numbers": stablehlo.DotDimensionNumbers.get(
                lhs_batching_dimensions=[],
                rhs_batching_dimensions=[],
                lhs_contracting_dimensions=second,
                rhs_contracting_dimensions=first,
            )
        }
        if "precision_config" in dot.attributes:
            precisions = [*dot.attributes["precision_config"]]
            attributes["precision_config"] = ir.ArrayAttr.get(precisions[::-1])
        new = ir.Operation.create(
            "stablehlo.dot_general",
            results=[transpose.results[0].type],
            operands=list(dot.operands)[::-1],
            attributes=attributes,
            loc=dot.location,
            ip=ir.InsertionPoint(transpose),
        )
        transpose.results[0].replace_all_uses_with(new.results[0])
        transpose.erase()
        dot.erase()


def _order_as_xla(main: Any, whole: bool) -> None:
    """Orders the operations that come from functions as XLA does: operands first, in their order.

    XLA has the results of a function in a tuple, and orders all of them before what uses one.

    Args:
        main: the function that the others were inlined in.
        whole: whether all operations are ordered.
    """
    blocks = [block for each in walk(main) for block in inner_blocks(each)]
    for block in blocks:
        all_of_block = operations(block)
        if not whole and not any(map(_is_results, all_of_block)):
            continue
        makers = {r: i for i, each in enumerate(all_of_block) for r in each.results}
        done: set[int] = set()
        previous = None
        for last, root in enumerate(all_of_block):
            if any(True for result in root.results for _ in result.uses):
                continue
            todo = [(last, False)]
            while todo:
                index, ready = todo.pop()
                each = all_of_block[index]
                if index in done:
                    continue
                if not ready:
                    needed = [makers[value] for value in operands(each) if value in makers]
                    todo.append((index, True))
                    todo += ((i, False) for i in reversed(needed))
                    continue
                done.add(index)
                if previous is not None:
                    each.move_after(previous)
                previous = each


def _is_results(operation: Any) -> bool:
    return (
        operation.name == "stablehlo.custom_call"
        and ir.StringAttr(operation.attributes["call_target_name"]).value == _RESULTS
    )


def _is_kept(operation: Any) -> bool:
    """Whether HLO does not have an operation, or changes it."""
    name = operation.name
    return (
        (name.startswith("sdy.") and name != "sdy.mesh")
        or name == "stablehlo.custom_call"
        or "replica_groups" in operation.attributes  # may name a mesh
    )


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
    new = operation.clone(ip=ir.InsertionPoint(call)).operation
    for index, operand in enumerate(call.operands):
        new.operands[index] = operand
    if len(new.results) == 1:
        call.results[0].replace_all_uses_with(new.results[0])
    else:  # HLO has a tuple
        for use in [use for result in call.results for use in result.uses]:
            element = use.owner.operation
            result = new.results[integer(element.attributes["index"])]
            element.results[0].replace_all_uses_with(result)
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
    """Lets loops use the values that they do not change from outside, as XLA does.

    Where such a value has a sharding, XLA lets the loop have it in another one.
    """
    changed = True
    while changed:
        changed = False
        for loop in [o for o in walk(main) if o.name == "stablehlo.while"]:
            condition, body = inner_blocks(loop)
            *_, end = operations(body)
            for index, operand in enumerate(loop.operands):
                if end.operands[index] != body.arguments[index]:
                    continue
                inside = [
                    use
                    for value in (condition.arguments[index], body.arguments[index])
                    for use in value.uses
                    if use.owner.operation != end
                ]
                opened = _opened(operand, loop) if inside else operand
                behind = list(loop.results[index].uses)
                for uses, new in ((inside, opened), (behind, operand)):
                    for use in uses:
                        use.owner.operation.operands[use.operand_number] = new
                        changed = True


def _opened(value: Any, loop: Any) -> Any:
    """A value, which may be sharded otherwise from here on."""
    maker = owner(value)
    if maker is None:
        around, place = value.owner.owner.opview, ir.BlockArgument(value).arg_number
        of = around.arg_attrs[place] if around.operation.name == "func.func" else {}
        sharding = of["sdy.sharding"] if "sdy.sharding" in of else None  # noqa: SIM401, has no get
    elif maker.name == "sdy.sharding_constraint":
        sharding = maker.attributes["sharding"]
    else:
        sharding = None
    if sharding is None:
        return value
    mesh = sdy.TensorShardingAttr(sharding).mesh_or_ref
    dimension = sdy.DimensionShardingAttr.get([], False)
    rank = len(ir.RankedTensorType(value.type).shape)
    return sdy.ShardingConstraintOp(
        value,
        sdy.TensorShardingAttr.get(mesh, [dimension] * rank),
        loc=loop.location,
        ip=ir.InsertionPoint(loop),
    ).result
