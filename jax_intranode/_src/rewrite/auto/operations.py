"""The operations of a program that communicate, each with the plan that XLA follows."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jax_intranode._src import reasons
from jax_intranode._src.operations import COLLECTIVE, of_kind
from jax_intranode._src.rewrite.auto import partitioner, plans
from jax_intranode._src.rewrite.auto.kinds import Kind, aval, kind_of, reduction_of
from jax_intranode._src.rewrite.auto.modules import integer, number
from jax_intranode._src.rewrite.auto.plans import Axes, Gather, Labels, Plan, Sum
from jax_intranode._src.rewrite.auto.program import Program


@dataclass(frozen=True)
class Candidate:
    """An operation that may communicate.

    Attributes:
        operation: the MLIR operation.
        kind: what it computes.
        values: its operands.
        avals: their types.
        plan: how XLA computes it; None if it is left.
        reason: why it is left; None if there is a plan.
        terms: the candidates whose sum it is, if it is one.
    """

    operation: Any
    kind: Kind
    values: tuple[Any, ...]
    avals: tuple[Any, ...]
    plan: Plan | None
    reason: str | None
    terms: "tuple[Candidate, ...]" = ()

    @property
    def number(self) -> int:
        """Identifies it in the program."""
        return number(self.operation)

    @property
    def sends(self) -> bool:
        """Whether it may send anything."""
        plan = self.plan
        return plan is None or bool(plan.gathers or plan.sums or self.kind.axes)

    @property
    def is_gather(self) -> bool:
        """Whether all it does is to gather its operand."""
        is_reshard = self.kind.name in ("reshard", "all_gather")
        return is_reshard and self.plan is not None and bool(self.plan.gathers)

    def contracts(self, gather: Gather) -> bool:
        """Whether the result has not the dimension of an operand that is gathered."""
        labels = self.kind.labels
        return labels.operands[gather.operand][gather.dimension] not in labels.result


def find(operation: Any, program: Program) -> Candidate | None:
    """An operation with its plan, or why it is left; None if it sends nothing and has no plan."""
    if operation.name in COLLECTIVES:
        return _collective(operation, program)
    kind = kind_of(operation)
    if kind is None:
        return None
    if kind.name in ("gather", "scatter") and not program.in_order:
        return None
    values = tuple(operation.operands)[: kind.operands]
    specs = tuple(program.spec(value) for value in (*values, operation.results[0]))
    avals = tuple(map(aval, values))
    result = aval(operation.results[0])
    key = kind.key, kind.labels, kind.reason, avals, result, specs
    if key not in program.decisions:
        program.decisions[key] = _decide(kind, avals, result, specs, program.mesh)
    decided = program.decisions[key]
    return None if decided is None else Candidate(operation, kind, values, avals, *decided)


def sum_of(addition: Any, first: Candidate, second: Candidate) -> Candidate | None:
    """An addition of two scattered sums of matmuls over the same axes, as one sum."""
    of_both = [(c.plan, c.kind.compute) for c in (first, second) if c.kind.name == "dot_general"]
    known = [(plan, compute) for plan, compute in of_both if plan and compute and not plan.gathers]
    if len(known) < 2:
        return None
    ((one, add), (other, added)), count = known, len(first.values)
    if not one.scatters or (one.sums, one.result) != (other.sums, other.result):
        return None

    def compute(*operands: Any) -> Any:
        return lax.add(add(*operands[:count]), added(*operands[count:]))

    key = "add", first.kind.key, second.kind.key
    kind = dataclasses.replace(first.kind, key=key, compute=compute)
    plan = dataclasses.replace(one, operands=(*one.operands, *other.operands))
    values, avals = (*first.values, *second.values), (*first.avals, *second.avals)
    return Candidate(addition, kind, values, avals, plan, None, (first, second))


def _decide(
    kind: Kind,
    avals: Sequence[Any],
    result: Any,
    specs: Sequence[Any],
    mesh: jax.sharding.Mesh,
) -> tuple[Plan | None, str | None] | None:
    """The plan of an operation, or why it is left; None if it sends nothing and has no plan."""
    if None in specs:
        return None, reasons.PARTS_OF_AXES
    *ins, out = specs
    candidates = [
        plan
        for plan in plans.plans(kind.labels, ins, out)
        if kind.collective == "psum" or not plan.scatters
    ]
    silent = [plan for plan in candidates if not plan.gathers and not plan.sums]
    known = result is not None and None not in avals
    if silent:
        same = [plan for plan in silent if plan.operands == tuple(ins)]
        return (same[0], None) if same and known and kind.compute else None
    if kind.compute is None:
        return None, kind.reason
    if not known:
        return None, reasons.UNKNOWN_DTYPE
    if result.dtype == np.bool_ and kind.name != "reshard":
        return None, reasons.BOOLEANS
    sizes = dict(mesh.shape)
    shapes = [a.shape for a in avals]
    if any(
        plans.local_size(shape, spec, sizes) is None
        for shape, spec in zip((*shapes, result.shape), (*ins, out), strict=True)
    ):
        return None, reasons.UNEVEN
    if kind.name in ("argmax", "argmin"):  # XLA gathers elements and indices, which is more
        candidates = [plan for plan in candidates if not plan.gathers]
        return (candidates[0], None) if len(candidates) == 1 else (None, reasons.NO_PLAN)
    if not candidates:
        return None, reasons.NO_PLAN
    of_xla = partitioner.collectives(kind.key, kind.compute, avals, ins, out, mesh)
    if isinstance(of_xla, str):
        return None, of_xla
    if not of_xla:
        return None
    fitting = {
        fits
        for plan in candidates
        if (fits := plans.as_found(plan, of_xla, shapes, result.shape, sizes)) is not None
    }
    if len(fitting) != 1:
        text = ", ".join(f"{name} over {'+'.join(sorted(axes))}" for name, axes, _ in of_xla)
        return None, reasons.UNKNOWN_PLAN.of(collectives=text)
    return fitting.pop(), None


# The collectives of a partly manual shard_map.

COLLECTIVES = frozenset(
    f"stablehlo.{record.stablehlo}" for record in of_kind(COLLECTIVE) if record.stablehlo
)


def _collective(operation: Any, program: Program) -> Candidate:
    """A collective over manual axes, whose operand may be sharded over other axes."""
    name, attributes = operation.name.removeprefix("stablehlo."), operation.attributes
    values = tuple(operation.operands)
    avals = tuple(map(aval, values))
    axes = _axes_of(attributes["replica_groups"], program.mesh)
    own = tuple(range(len(ir.RankedTensorType(values[0].type).shape)))
    labels = Labels((own,), own)

    collective = "psum"

    def planned(
        plan: Plan | None, reason: str | None = None, compute: Any = lambda x: x
    ) -> Candidate:
        key = name, collective, tuple(dimensions), axes
        kind = Kind(name, key, labels, compute, 1, reason or "", axes or (), collective)
        return Candidate(operation, kind, values, avals, plan, reason)

    names = "all_gather_dim", "scatter_dimension", "split_dimension", "concat_dimension"
    dimensions = [integer(attributes[of]) for of in names if of in attributes]
    spec, after = program.spec(values[0]), program.spec(operation.results[0])
    if axes is None:
        return planned(None, reasons.GROUPS_OF_NO_AXES)
    if len(values) != 1 or None in avals:
        return planned(None, reasons.SEVERAL_OPERANDS if len(values) > 1 else reasons.UNKNOWN_DTYPE)
    for block in (block for region in operation.regions for block in region.blocks):
        reduction = reduction_of(block)
        if reduction is None or (name == "reduce_scatter" and reduction[1] != "psum"):
            return planned(None, reasons.NO_SUM)
        collective = reduction[1]
    if spec is None or spec != after or any(spec[dimension] for dimension in dimensions):
        return planned(None, reasons.DIMENSION_OF_AUTO_AXES)
    for value in (values[0], operation.results[0]):
        shape = ir.RankedTensorType(value.type).shape
        if plans.local_size(shape, spec, dict(program.mesh.shape)) is None:
            return planned(None, reasons.UNEVEN)
    plan = Plan((spec,), (), (), spec)
    if name == "all_reduce":
        return planned(dataclasses.replace(plan, sums=(Sum(axes),)))
    if name == "reduce_scatter":
        return planned(dataclasses.replace(plan, sums=(Sum(axes, dimensions[0]),)))
    if name == "all_gather":
        return planned(dataclasses.replace(plan, gathers=(Gather(0, dimensions[0], axes),)))
    if name != "all_to_all":
        return planned(None, reasons.NOT_IN_AUTO.of(name=name))
    split, concat = dimensions
    return planned(plan, None, lambda x: lax.all_to_all(x, axes, split, concat, tiled=True))


def _axes_of(groups: Any, mesh: Any) -> Axes | None:
    """The axes of a collective's groups, major ones first; None if they are not known."""
    if isinstance(groups, ir.DenseIntElementsAttr):  # jax 0.10: lists of positions
        lists, names = np.array(groups).tolist(), mesh.axis_names
        positions = np.arange(mesh.size).reshape(mesh.devices.shape)
        found = partitioner.axes_of_groups(frozenset(map(frozenset, lists)), names, positions)
        for order in itertools.permutations(found or ()):
            moved = np.moveaxis(positions, [*map(names.index, order)], range(-len(order), 0))
            if sorted(moved.reshape(-1, len(lists[0])).tolist()) == sorted(lists):
                return order
        return None
    try:
        of_groups: Any = stablehlo.ReplicaGroupMeshAxesAttr(groups).axes
        axes = [stablehlo.AxisRefAttr(axis) for axis in of_groups]
    except ValueError:
        return None
    if any(axis.sub_axis_info for axis in axes):
        return None
    return tuple(axis.name for axis in axes)
