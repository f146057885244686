"""A lowered program after Shardy's propagation, in which each value has its sharding.

jaxlib has all passes of Shardy. So what XLA does when it compiles can be done before, on a copy.
Everything is read by the types of MLIR's Python bindings.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.sharding import AxisType

from jax_intranode._src.rewrite.auto.plans import Spec

PIPELINE = "builtin.module(sdy-propagation-pipeline)"


# The attribute that tells operations apart. In Python their hashes change with their operands.
_NUMBER = "jax_intranode.number"


_OF_MANY_RESULTS = frozenset(
    f"stablehlo.{name}" for name in ("while", "case", "if", "optimization_barrier")
)


class Unsuitable(Exception):
    """A program that can't be rewritten; the text says why."""


def operations(block: Any) -> list[Any]:
    """The operations of a block."""
    return [operation.operation for operation in block.operations]


def inner_blocks(operation: Any) -> Iterator[Any]:
    """The blocks of an operation's regions."""
    for region in operation.regions:
        yield from region.blocks


def walk(operation: Any) -> list[Any]:
    """An operation and all inside."""
    found: list[Any] = []

    def add(each: Any) -> Any:
        found.append(each.operation)
        return ir.WalkResult.ADVANCE

    operation.walk(add)
    return found


def number(operation: Any) -> int:
    """Identifies an operation of a program."""
    return integer(operation.attributes[_NUMBER])


def integer(attribute: Any) -> int:
    """The value of an integer attribute."""
    return int(ir.IntegerAttr(attribute).value)


def owner(value: Any) -> Any | None:
    """The operation that makes a value; None if it is an argument of a block."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


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


def inline_calls(module: Any) -> None:
    """Puts the bodies of functions where they are called. MLIR's own pass leaves these calls.

    Raises:
        Unsuitable: a call has attributes, by which XLA runs the function elsewhere.
    """
    functions = {
        ir.StringAttr(o.attributes["sym_name"]).value: o
        for o in operations(module.body)
        if o.name == "func.func"
    }
    main = functions.pop("main")
    while calls := [o for o in walk(main) if o.name == "func.call"]:
        for call in calls:
            if [name for name in call.attributes if name != "callee"]:
                raise Unsuitable("a call of a function with attributes")
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
            for result, value in zip(call.results, end.operands, strict=True):
                result.replace_all_uses_with(now.get(value, value))
            call.erase()
    for function in functions.values():
        function.erase()


def is_array(value: Any) -> bool:
    """Whether a value is an array, and not a token."""
    try:
        ir.RankedTensorType(value.type)
    except (ValueError, TypeError):
        return False
    return True


class Program:
    """A copy of a lowered program after propagation.

    Attributes:
        module: the copy.
        mesh: the mesh of its shardings.
        mesh_name: the mesh's symbol.
    """

    def __init__(self, module: Any, devices: Any):
        """Copies and propagates.

        Args:
            module: the program as JAX has lowered it.
            devices: the devices that it will run on, in order.

        Raises:
            Unsuitable: nothing of it can be rewritten.
        """
        meshes = [o for o in operations(module.body) if o.name == "sdy.mesh"]
        if not meshes:
            raise Unsuitable("nothing is sharded")
        attribute = sdy.MeshAttr(meshes[0].attributes["mesh"])
        if any(sdy.MeshAttr(other.attributes["mesh"]) != attribute for other in meshes[1:]):
            raise Unsuitable("several meshes")
        # JAX's caches take it for a module; a clone is of another class.
        self.module = ir.Module.parse(as_bytecode(module))
        self.mesh_name = ir.StringAttr(meshes[0].attributes["sym_name"]).value
        for each in [o for o in operations(self.module.body) if o.name == "sdy.mesh"][1:]:
            # JAX names the mesh of a shard_map's collectives again.
            use_mesh(self.mesh_name, each, self.module)
        # Shardy gives the arguments of functions shardings, which XLA would keep to.
        inline_calls(self.module)
        passmanager.PassManager.parse(PIPELINE).run(self.module.operation)
        top = operations(self.module.body)
        self._functions = [o for o in top if o.name == "func.func"]
        axes = [sdy.MeshAxisAttr(axis) for axis in attribute.axes]
        names, sizes = [axis.name for axis in axes], [axis.size for axis in axes]
        # Positions in the list of devices.
        positions = list(attribute.device_ids) or list(range(math.prod(sizes)))
        if sorted(positions) != list(range(len(devices))):
            raise Unsuitable("a mesh of other devices than the program's")
        self.mesh = jax.sharding.Mesh(
            np.array([devices[i] for i in positions], dtype=object).reshape(sizes),
            names,
            axis_types=(AxisType.Auto,) * len(names),
        )
        self._int = ir.IntegerType.get_signless(64)
        self._last = 0
        for operation in self._all_operations():
            self.set_number(operation)
        # By the function and the number of the argument.
        self._arguments = {
            (number(function), index): attributes["sdy.sharding"]
            for function in self._functions
            for index, attributes in enumerate(function.opview.arg_attrs)
            if "sdy.sharding" in attributes
        }
        self._specs: dict[Any, Spec | None] = {}
        self._refuse_unsuitable()

    def _refuse_unsuitable(self) -> None:
        """Raises if the program has something that a propagated copy may not keep."""
        for operation in self._all_operations():
            if operation.name == "stablehlo.custom_call":
                target = ir.StringAttr(operation.attributes["call_target_name"]).value
                if "callback" in target:
                    raise Unsuitable("a callback to Python")
            for sharding in _all_per_value(operation):
                # XLA's import may refuse them in a propagated program, and reshards otherwise.
                if self._spec_of(sharding) is None:
                    raise Unsuitable("shardings over parts of axes, or unreduced values")

    def set_number(self, operation: Any) -> None:
        """Gives an operation a new number."""
        self._last += 1
        operation.attributes[_NUMBER] = ir.IntegerAttr.get(self._int, self._last)

    def blocks(self) -> Iterator[tuple[Any, frozenset[str]]]:
        """The blocks whose values have shardings, with the axes that are manual there."""
        none = frozenset[str]()
        todo = [(block, none) for function in self._functions for block in inner_blocks(function)]
        while todo:
            block, manual = todo.pop()
            yield block, manual
            for operation in operations(block):
                if operation.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
                    todo += ((inner, manual) for inner in inner_blocks(operation))
                elif operation.name == "sdy.manual_computation":
                    bound = manual | manual_axes(operation)
                    if any(
                        size > 1 and axis not in bound for axis, size in self.mesh.shape.items()
                    ):
                        todo += ((inner, bound) for inner in inner_blocks(operation))

    def spec(self, value: Any) -> Spec | None:
        """How a value is sharded; None if a PartitionSpec over this mesh cannot say it."""
        attribute = self._attribute(value)
        if attribute is None:
            return ((),) * len(ir.RankedTensorType(value.type).shape)
        found = self._spec_of(attribute)
        if found is not None and isinstance(value.owner, ir.Block):
            around = value.owner.owner.operation
            if around.name == "sdy.manual_computation":
                bound = manual_axes(around)
                return tuple(tuple(a for a in axes if a not in bound) for axes in found)
        return found

    def _spec_of(self, attribute: Any) -> Spec | None:
        if attribute not in self._specs:
            self._specs[attribute] = self._read(attribute)
        return self._specs[attribute]

    def _attribute(self, value: Any) -> Any:
        owner = value.owner
        if isinstance(owner, ir.Block):
            index = ir.BlockArgument(value).arg_number
            around = owner.owner.operation
            if around.name == "func.func":
                return self._arguments.get((number(around), index))
            if around.name == "sdy.manual_computation":
                return _per_value(around, "in_shardings", index)
            if around.name != "stablehlo.while":
                raise Unsuitable(f"an argument of {around.name}")
            return _per_value(around, "sdy.sharding", index)
        operation = owner.operation
        if operation.name in ("sdy.reshard", "sdy.sharding_constraint"):
            return operation.attributes["sharding"]
        name = "out_shardings" if operation.name == "sdy.manual_computation" else "sdy.sharding"
        return _per_value(operation, name, ir.OpResult(value).result_number)

    def constrained(self, value: Any, spec: Spec, before: Any) -> Any:
        """A value, with a constraint that it is sharded like this, before an operation."""
        return sdy.ShardingConstraintOp(
            value, self._sharding(spec), loc=before.location, ip=ir.InsertionPoint(before)
        ).result

    def _sharding(self, spec: Spec) -> Any:
        dimensions = [
            sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in axes], True)
            for axes in spec
        ]
        return sdy.TensorShardingAttr.get(self.mesh_name, dimensions)

    def _read(self, attribute: Any) -> Spec | None:
        sharding = sdy.TensorShardingAttr(attribute)
        dimensions = []
        for dimension in sharding.dimension_shardings:
            axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
            if any(axis.sub_axis_info for axis in axes):
                return None
            dimensions.append(tuple(axis.name for axis in axes))
        if len(sharding.unreduced_axes):
            return None
        return tuple(dimensions)

    def _all_operations(self) -> list[Any]:
        return [each for function in self._functions for each in walk(function)]

    def repair(self) -> None:
        """Changes what XLA's import does not take of a propagated program."""
        for operation in self._all_operations():
            if _NUMBER in operation.attributes:
                del operation.attributes[_NUMBER]
            if operation.name == "sdy.reshard":  # "op unknown mesh"
                new = sdy.ShardingConstraintOp(
                    operation.operands[0],
                    operation.attributes["sharding"],
                    loc=operation.location,
                    ip=ir.InsertionPoint(operation),
                )
                operation.results[0].replace_all_uses_with(new.result)
                operation.erase()
            elif operation.name in _OF_MANY_RESULTS:
                self._keep_shardings(operation)

    def _keep_shardings(self, operation: Any) -> None:
        """Puts constraints behind the results of an operation that has many.

        Where a user has nothing to do (it slices all of a result, or adds 0), XLA removes it, and
        gives its sharding to the operation, which ends the process with a segmentation fault.
        """
        shardings = [self._attribute(result) for result in operation.results]
        if operation.name == "stablehlo.while" and "sdy.sharding" in operation.attributes:
            # XLA adds results to a loop, and the process would end in the same way. The body has
            # the shardings as well.
            del operation.attributes["sdy.sharding"]
        for result, sharding in zip(operation.results, shardings, strict=True):
            uses = list(result.uses)
            if not uses or not is_array(result):
                continue
            new = sdy.ShardingConstraintOp(
                result,
                sharding or self._sharding(((),) * len(ir.RankedTensorType(result.type).shape)),
                loc=operation.location,
                ip=ir.InsertionPoint(operation),
            )
            new.operation.move_after(operation)
            for use in uses:
                use.owner.operation.operands[use.operand_number] = new.result


def _all_per_value(operation: Any) -> list[Any]:
    if operation.name == "func.func" or "sdy.sharding" not in operation.attributes:
        return []
    return list(sdy.TensorShardingPerValueAttr(operation.attributes["sdy.sharding"]).shardings)


def _per_value(operation: Any, name: str, index: int) -> Any:
    if name not in operation.attributes:
        return None
    return list(sdy.TensorShardingPerValueAttr(operation.attributes[name]).shardings)[index]


# The innermost frame of a location, which JAX has made of the user's frames only.
_FRAME = re.compile(r'(?:"([^"]*)"\()?"([^"]+)":(\d+):')


def source_of(operation: Any) -> str:
    """The user's line that an operation comes from, as file:line (function), or "unknown"."""
    found = _FRAME.search(str(operation.location))
    if found is None:
        return "unknown"
    function = (found[1] or "").rpartition("<locals>.")[2]
    return f"{found[2]}:{found[3]}" + (f" ({function})" if function else "")
