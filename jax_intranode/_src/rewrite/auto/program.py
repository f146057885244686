"""A lowered program after Shardy's propagation, in which each value has its sharding.

jaxlib has all passes of Shardy. So what XLA does when it compiles can be done before, on a copy.
Everything is read by the types of MLIR's Python bindings.
"""

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.sharding import AxisType

from jax_intranode._src import reasons
from jax_intranode._src.rewrite.auto import simplified
from jax_intranode._src.rewrite.auto.modules import (
    NUMBER,
    RESHARDS,
    Unsuitable,
    as_bytecode,
    functions_of,
    inner_blocks,
    is_array,
    manual_axes,
    number,
    operations,
    owner,
    use_mesh,
    walk,
)
from jax_intranode._src.rewrite.auto.plans import Spec

ELEMENTWISE = frozenset(
    f"stablehlo.{n}" for n in ("add", "subtract", "multiply", "divide", "select")
)
# What each device can make any part of.
MADE_ANYWHERE = frozenset(
    {"sdy.constant", *(f"stablehlo.{n}" for n in ("constant", "iota", "broadcast_in_dim"))}
)

# Copies and conversions of a program take 20 ms for each MiB of them.
_MOST_CONSTANTS = 32 << 20

PIPELINE = "builtin.module(sdy-propagation-pipeline)"
_RESHARDS = "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"


_OF_MANY_RESULTS = frozenset(
    f"stablehlo.{name}" for name in ("while", "case", "if", "optimization_barrier")
)


class Program:
    """A copy of a lowered program after propagation.

    Attributes:
        module: the copy.
        mesh: the mesh of its shardings.
        mesh_name: the mesh's symbol.
        in_order: whether devices know their places in the mesh: those in the list of devices.
        decisions: how operations are computed, by what they are, for operations.py.
    """

    def __init__(self, module: Any, devices: Any):
        """Copies and propagates.

        Args:
            module: the program as JAX has lowered it.
            devices: the devices that it will run on, in order.

        Raises:
            Unsuitable: nothing of it can be rewritten.
        """
        _refuse_contents(module)
        meshes = [
            (o, sdy.MeshAttr(o.attributes["mesh"]))
            for o in operations(module.body)
            if o.name == "sdy.mesh"
        ]
        # JAX gives keys of random numbers a mesh without axes, which says that they are replicated.
        over_axes = [(o, of) for o, of in meshes if len(of.axes) or len(of.device_ids)]
        if not over_axes:
            raise Unsuitable(reasons.NOTHING_SHARDED)
        chosen, attribute = over_axes[0]
        if any(of != attribute for _, of in over_axes):
            raise Unsuitable(reasons.SEVERAL_MESHES)
        # JAX's caches take it for a module; a clone is of another class.
        own = ir.Module.parse(as_bytecode(module))
        self.mesh_name = ir.StringAttr(chosen.attributes["sym_name"]).value
        for each in [o for o in operations(own.body) if o.name == "sdy.mesh"]:
            # JAX names the mesh of a shard_map's collectives again.
            use_mesh(self.mesh_name, each, own)
        self._for_gpus = devices[0].platform == "gpu"
        self.module = self._propagated(own)
        (self._main,) = functions_of(self.module).values()
        axes = [sdy.MeshAxisAttr(axis) for axis in attribute.axes]
        names, sizes = [axis.name for axis in axes], [axis.size for axis in axes]
        # Positions in the list of devices.
        positions = list(attribute.device_ids) or list(range(math.prod(sizes)))
        if sorted(positions) != list(range(len(devices))):
            raise Unsuitable(reasons.MESH_OF_OTHER_DEVICES)
        self.in_order = positions == sorted(positions)
        self.mesh = jax.sharding.Mesh(
            np.array([devices[i] for i in positions], dtype=object).reshape(sizes),
            names,
            axis_types=(AxisType.Auto,) * len(names),
        )
        self._int = ir.IntegerType.get_signless(64)
        self._last = 0
        self._specs: dict[Any, Spec | None] = {}
        self.decisions: dict[Any, Any] = {}
        for operation in walk(self._main):
            self.set_number(operation)
            # XLA's import may refuse parts of axes in a propagated program, and reshards otherwise.
            if "sdy.sharding" in operation.attributes and operation.name != "func.func":
                found = sdy.TensorShardingPerValueAttr(operation.attributes["sdy.sharding"])
                if None in map(self._spec_of, found.shardings):
                    raise Unsuitable(reasons.PARTS_OF_AXES)
        self._arguments = {
            index: attributes["sdy.sharding"]
            for index, attributes in enumerate(self._main.opview.arg_attrs)
            if "sdy.sharding" in attributes
        }
        # The numbers of reshards of operands, which XLA adds, but propagation does not.
        self.added: set[int] = set()
        of_results = [
            self._spec_of(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else None
            for attributes in self._main.opview.res_attrs
        ]
        for operation in walk(self._main):
            if operation.name in ELEMENTWISE:
                self.add_reshards(operation, [self.spec(operation.results[0])] * 3)
            elif operation.name == "func.return":
                self.add_reshards(operation, of_results)

    def copy(self) -> "Program":
        """The same program, of which either is changed without the other."""
        new = copy.copy(self)
        new.module = ir.Module.parse(as_bytecode(self.module))
        (new._main,) = functions_of(new.module).values()
        new.added = {*self.added}
        return new

    def add_reshards(self, operation: Any, specs: Sequence[Spec | None]) -> None:
        """Adds reshards of operands that are sharded otherwise than the operation takes them."""
        for index, (value, spec) in enumerate(zip(operation.operands, specs, strict=False)):
            maker = owner(value)
            if maker is None or maker.name in MADE_ANYWHERE or spec is None:
                continue
            if self.spec(value) in (None, spec) or len(self.spec(value) or ()) != len(spec):
                continue
            operation.operands[index] = self.resharded(value, spec, before=operation).results[0]

    def resharded(self, value: Any, spec: Spec, before: Any = None, behind: Any = None) -> Any:
        """An added reshard of a value: before an operation, or behind it for all users."""
        at = before or behind
        uses = list(value.uses) if behind else []
        new = sdy.ReshardOp(
            value, self._sharding(spec), loc=at.location, ip=ir.InsertionPoint(at)
        ).operation
        if behind:
            new.move_after(behind)
        for use in uses:
            use.owner.operation.operands[use.operand_number] = new.results[0]
        self.set_number(new)
        self.added.add(number(new))
        return new

    def all(self) -> list[Any]:
        """All operations, in order."""
        return [each for each in walk(self._main) if each.name != "func.func"]

    def set_spec(self, value: Any, spec: Spec) -> None:
        """Shards a result of an operation like this."""
        operation = value.owner.operation
        if operation.name in RESHARDS:
            operation.attributes["sharding"] = self._sharding(spec)
            return
        specs = [spec if each == value else self.spec(each) or () for each in operation.results]
        new = sdy.TensorShardingPerValueAttr.get([self._sharding(each) for each in specs])
        operation.attributes["sdy.sharding"] = new

    def set_number(self, operation: Any) -> None:
        """Gives an operation a new number."""
        self._last += 1
        operation.attributes[NUMBER] = ir.IntegerAttr.get(self._int, self._last)

    def blocks(self) -> Iterator[tuple[Any, frozenset[str]]]:
        """The blocks whose values have shardings, with the axes that are manual there."""
        none = frozenset[str]()
        todo = [(block, none) for block in inner_blocks(self._main)]
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

    def is_divided(self, value: Any) -> bool:
        """Whether a device may not have all of a value."""
        spec = self.spec(value)
        return spec is None or any(spec)

    def changes_nothing(self, operation: Any) -> bool:
        """Whether an operation is a reshard of an array that is sharded so already."""
        if operation.name not in RESHARDS:
            return False
        spec = self.spec(operation.operands[0])
        return spec is not None and spec == self.spec(operation.results[0])

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
                return self._arguments.get(index)
            if around.name == "sdy.manual_computation":
                return _per_value(around, "in_shardings", index)
            if around.name != "stablehlo.while":
                raise Unsuitable(reasons.ARGUMENT.of(name=around.name))
            return _per_value(around, "sdy.sharding", index)
        operation = owner.operation
        if operation.name in RESHARDS:
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

    def keeps_shardings(self) -> bool:
        """Prepares the program for XLA; whether XLA, which propagates it again, shards it alike."""
        for operation in walk(self._main):
            if NUMBER in operation.attributes:
                if number(operation) in self.added:
                    operation.results[0].replace_all_uses_with(operation.operands[0])
                    operation.erase()
                else:
                    del operation.attributes[NUMBER]
        wanted = None if self._agrees() else Counter(what for what, _ in self._sharded(self.module))
        self._repair()
        if not self.module.operation.verify():
            raise RuntimeError("MLIR does not verify the rewritten program")
        if wanted is not None and not self._keeps(wanted):
            return False
        # XLA may give one of several results that of a user that has nothing to do, and then refuse
        # the program, or end the process with a segmentation fault.
        simplified.forget_shardings(self.module)
        return True

    def _agrees(self) -> bool:
        """Whether all operations can be computed as their operands and results are sharded.

        Then propagation finds the same shardings from any order of the operations: a dimension gets
        no axes but those that it has here. Shardy adds a reshard where two do not agree.
        """
        reshards = 0
        for operation in walk(self._main):
            if operation.name in RESHARDS:
                reshards += operation.name == "sdy.reshard"
                if self.spec(operation.operands[0]) != self.spec(operation.results[0]):
                    return False
            elif operation.name == "sdy.manual_computation":
                shardings = sdy.TensorShardingPerValueAttr(operation.attributes["in_shardings"])
                for value, sharding in zip(operation.operands, shardings.shardings, strict=True):
                    if self.spec(value) != self._spec_of(sharding):
                        return False
            elif operation.name == "stablehlo.reshape":
                maker = owner(operation.operands[0])
                if maker is not None and maker.name == operation.name:  # XLA makes one of both
                    return False
        clone = self.module.operation.clone()
        _run(_RESHARDS, clone)
        return reshards == sum(each.name == "sdy.reshard" for each in walk(clone))

    def _repair(self) -> None:
        """Changes what XLA's import does not take of a propagated program."""
        for operation in walk(self._main):
            if operation.name == "sdy.reshard":  # "op unknown mesh"
                new = sdy.ShardingConstraintOp(
                    operation.operands[0],
                    operation.attributes["sharding"],
                    loc=operation.location,
                    ip=ir.InsertionPoint(operation),
                )
                operation.results[0].replace_all_uses_with(new.result)
                operation.erase()

    def _keeps(self, wanted: Counter[Any]) -> bool:
        """Propagates again. Operations that would be sharded otherwise get constraints.

        XLA ignores the shardings of ordinary operations. Constraints for all would not do, because
        XLA may use a sum in two shardings. In programs with loops, branches or barriers, none is
        added: there XLA communicated more because of them. Only these change in HLO once more.
        """
        constrains = not any(o.name in _OF_MANY_RESULTS for o in walk(self._main))
        for _ in range(3):
            new = self._propagated(self.module, as_it_is=constrains)
            again = Counter(what for what, _ in self._sharded(new))
            if not again - wanted or not constrains:
                return not again - wanted
            others = {what[:2] for what in again - wanted}
            lost = {what for what in wanted - again if what[:2] in others}
            for what, result in list(self._sharded(self.module)):
                if what in lost:
                    maker = result.owner.operation
                    uses = list(result.uses)
                    value = self.constrained(result, what[-1], maker)
                    value.owner.operation.move_after(maker)
                    for use in uses:
                        use.owner.operation.operands[use.operand_number] = value
        return False

    def _propagated(self, module: Any, as_it_is: bool = False) -> Any:
        """A copy of a module after propagation, from the form that XLA propagates."""
        if as_it_is:  # it has this form
            new = ir.Module.parse(as_bytecode(module))
            simplified.forget_shardings(new)
        else:
            new = simplified.simplified(module, self._for_gpus)
        _run(PIPELINE, new.operation)
        return new

    def _sharded(self, module: Any) -> Iterator[tuple[Any, Any]]:
        """What the operations of a program are and how their results are sharded; and these."""
        todo = [block for o in operations(module.body) for block in inner_blocks(o)]
        while todo:
            for operation in operations(todo.pop()):
                if operation.name.startswith("sdy.") or self._is_made_anywhere(operation):
                    continue
                todo += inner_blocks(operation)
                for index, result in enumerate(operation.results):
                    if is_array(result):
                        attribute = _per_value(operation, "sdy.sharding", index)
                        rank = len(ir.RankedTensorType(result.type).shape)
                        spec = self._spec_of(attribute) if attribute else ((),) * rank
                        yield (operation.name, result.type, spec), result

    def _is_made_anywhere(self, operation: Any) -> bool:
        """Whether each device can make any part of the results, of operands that it has whole."""
        return operation.name in MADE_ANYWHERE and not any(
            any(self.spec(value) or ())
            for value in operation.operands
            if len(ir.RankedTensorType(value.type).shape)
        )


def _run(pipeline: str, module: Any) -> None:
    simplified.add_rules(module)
    passes = passmanager.PassManager.parse(pipeline)
    passes.enable_verifier(False)  # after each pass, which takes longer than the passes
    passes.run(module)


def _refuse_contents(module: Any) -> None:
    """Raises if the program has what a propagated copy can't keep, or what takes long to copy."""
    constants = 0
    for operation in walk(module.operation):
        if operation.name == "stablehlo.constant":
            constants += _constant_bytes(operation)
            if constants > _MOST_CONSTANTS:
                raise Unsuitable(reasons.MANY_CONSTANTS)
        target = operation.attributes.get("call_target_name")
        if target is not None and "callback" in ir.StringAttr(target).value:
            raise Unsuitable(reasons.CALLBACK)  # which has a mesh of its own
        called = operation.attributes.get("called_computations")
        if operation.name == "stablehlo.composite" or (called and len(ir.ArrayAttr(called))):
            raise Unsuitable(reasons.OWN_FUNCTION)
        if operation.name == "stablehlo.get_dimension_size":  # of jax.export
            raise Unsuitable(reasons.SYMBOLIC_SHAPES)


def _constant_bytes(operation: Any) -> int:
    """The bytes of a constant whose elements differ; 0 of another one."""
    with contextlib.suppress(TypeError, ValueError):  # attributes that are not held in MLIR
        if ir.DenseElementsAttr(operation.attributes["value"]).is_splat:
            return 0
    type_ = ir.RankedTensorType(operation.results[0].type)
    width = getattr(type_.element_type, "width", 128)  # complex numbers have none
    return math.prod(type_.shape) * width // 8


def _per_value(operation: Any, name: str, index: int) -> Any:
    if name not in operation.attributes:
        return None
    return list(sdy.TensorShardingPerValueAttr(operation.attributes[name]).shardings)[index]
