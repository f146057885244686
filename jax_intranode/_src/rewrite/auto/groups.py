"""Operations become shard_maps, whose bodies are rewritten like any other.

Operations that do not need each other share a shard_map where this merges their communication.
Such are operations that use the same gathered array, sums over the same axes, and gathers of small
arrays, up to a size.

They are put together by `waiting.Merging`; a group also ends at a fence, and when it would become
too large.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax
from jax.extend.mlir import ir

from jax_intranode._src.rewrite.auto.kinds import Kind, aval
from jax_intranode._src.rewrite.auto.modules import (
    FENCES,
    RESHARDS,
    names_around,
    number,
    operands,
    operations,
    owner,
)
from jax_intranode._src.rewrite.auto.operations import Candidate
from jax_intranode._src.rewrite.auto.plans import Axes, Plan, Spec, local_size
from jax_intranode._src.rewrite.auto.program import Program
from jax_intranode._src.rewrite.auto.tails import Tail
from jax_intranode._src.rewrite.waiting import Merging

# Sums of more bytes together are not merged.
MERGED_BYTES = 1 << 20
# Nor are gathers of larger arrays, such as of norms and biases, which were measured up to this.
VECTOR_BYTES = 16 << 10


# How an input is gathered: dimensions and axes, in order.
Gathers = tuple[tuple[int, Axes], ...]


@dataclass(frozen=True)
class Input:
    """An operand of a shard_map's body.

    Attributes:
        value: the value in the program.
        aval: its type.
        spec: how the shard_map shards it.
        gathers: how the operation that has it gathers it.
    """

    value: Any
    aval: Any
    spec: Spec
    gathers: Gathers = ()


@dataclass
class Member:
    """An operation in a shard_map.

    Attributes:
        candidate: the operation.
        inputs: its operands.
        tail: what is computed from its sum, of the last inputs; None if nothing is.
    """

    candidate: Candidate
    inputs: list[Input]
    tail: Tail | None = None

    @property
    def number(self) -> int:
        """Identifies it in the program."""
        return self.candidate.number

    @property
    def kind(self) -> Kind:
        """What it computes."""
        return self.candidate.kind

    @property
    def plan(self) -> Plan:
        """How it is computed."""
        assert self.candidate.plan is not None  # or it would be no member
        return self.candidate.plan

    def outputs(self) -> tuple[Any, ...]:
        """The values of the program that it makes, all sharded as its plan says."""
        return self.tail.outputs if self.tail else tuple(self.candidate.operation.results)

    def replaced(self) -> list[Any]:
        """The operations of the program that are not needed any more."""
        own = [self.candidate]
        for each in own:
            own += each.terms
        operations = [each.operation for each in reversed(own)]
        return [*operations, *(self.tail.operations if self.tail else ())]

    def with_tail(self, tail: Tail, program: Program) -> "Member | None":
        """The member with what follows its sum; None if its inputs are not known."""
        inputs = []
        for value in tail.inputs:
            of, spec = aval(value), program.spec(value)
            if of is None or spec is None:
                return None
            inputs.append(Input(value, of, spec))
        return Member(self.candidate, [*self.inputs, *inputs], tail)

    def compute(self, operands: Sequence[Any]) -> list[Any]:
        """Its results on a device, from its gathered operands."""
        assert self.kind.compute is not None  # as there is a plan
        count = len(self.candidate.values)
        if self.kind.on_shards is not None:
            results = self.kind.on_shards(self.plan, *operands[:count])
        else:
            product = self.kind.compute(*operands[:count])
            results = (self.plan.summed(product, self.kind.collective),)
        return self.tail(results[0], operands[count:]) if self.tail else [*results]

    def communicates(self) -> bool:
        """Whether it sends anything."""
        return bool(self.gathered()) or self.candidate.sends

    def gathered(self) -> list[Input]:
        """The operands that are gathered."""
        return [one for one in self.inputs if one.gathers]

    def is_vector(self) -> bool:
        """Whether all it does is to gather a small array along its first dimension."""
        first, *others = self.inputs
        return (
            self.candidate.is_gather
            and not others
            and [dimension for dimension, _ in first.gathers] == [0]
            and first.aval.size * first.aval.dtype.itemsize <= VECTOR_BYTES
        )

    def shared(self) -> Any:
        """What members of a group have in common; None if it shares no shard_map."""
        gathered = self.gathered()
        if self.tail:
            return None
        if gathered and not self.plan.sums:
            return "gather", *((one.value, one.gathers) for one in gathered)
        if not gathered and not self.plan.scatters:
            return self.kind.collective, self.plan.sums, self.candidate.avals[0].dtype
        return None

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        """The bytes that a device gathers or sums, at most."""
        largest = 0
        for one in self.gathered():
            held = local_size(one.aval.shape, one.spec, sizes) or 0
            held *= math.prod(sizes[axis] for _, axes in one.gathers for axis in axes)
            largest = max(largest, held * one.aval.dtype.itemsize)
        if self.plan.sums:
            shape = ir.RankedTensorType(self.candidate.operation.results[0].type).shape
            held = local_size(shape, self.plan.result, sizes) or 0
            held *= math.prod(sizes[axis] for each in self.plan.scatters for axis in each.axes)
            largest = max(largest, held * self.candidate.avals[0].dtype.itemsize)
        return largest

    def key(self) -> Any:
        """Identifies what the body does, but for the operands."""
        plan = self.plan
        tail = self.tail.key() if self.tail else None
        gathers = tuple(one.gathers for one in self.inputs)
        return self.kind.key, gathers, plan.sums, plan.result, tail


def _elements(value: Any) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)


def _is_computed(value: Any) -> bool:
    """Whether an operation makes a value, other than by giving it another shape or sharding."""
    while (made_by := owner(value)) is not None and made_by.name in _SAME_MEMORY:
        value = made_by.operands[0]
    return made_by is not None


_SAME_MEMORY = RESHARDS | {"stablehlo.reshape"}


@dataclass(eq=False)
class Group:
    """The operations of one shard_map, in the order of the program."""

    members: list[Member] = field(default_factory=list)
    nbytes: int = 0

    def inputs(self) -> tuple[list[Input], list[list[int]]]:
        """The different operands, and which of them each member has."""
        found: dict[Any, Input] = {}
        places: dict[Any, int] = {}
        for one in (one for member in self.members for one in member.inputs):
            found.setdefault((one.value, one.spec), one)
            places.setdefault((one.value, one.spec), len(places))
        where = [[places[one.value, one.spec] for one in m.inputs] for m in self.members]
        return list(found.values()), where

    def copies(self) -> bool:
        """Whether XLA may have to write the matrix of a dot for a custom call, but not for its own.

        It is the largest operand. In a loop it may be a slice of those of all layers. Elsewhere the
        program may compute it.
        """
        largest = [max((one.value for one in m.inputs), key=_elements) for m in self.members]
        return any(_is_computed(value) for value in largest) or "stablehlo.while" in names_around(
            self.members[0].candidate.operation
        )

    def body(self) -> Callable[..., list[Any]]:
        """What each device computes."""
        _, where = self.inputs()

        def body(*operands: Any) -> list[Any]:
            gathered: dict[Any, Any] = {}

            def whole(place: int, gathers: Gathers) -> Any:
                if not gathers:
                    return operands[place]
                if (place, gathers) not in gathered:
                    *before, (dimension, axes) = gathers
                    gathered[place, gathers] = lax.all_gather(
                        whole(place, tuple(before)), axes, axis=dimension, tiled=True
                    )
                return gathered[place, gathers]

            results: list[Any] = []
            if len(set(map(tuple, where))) > 1 and all(m.is_vector() for m in self.members):
                ((_, axes),) = self.members[0].inputs[0].gathers
                return _gathered_at_once([operands[place] for (place,) in where], axes)
            for member, places in zip(self.members, where, strict=True):
                gathers = [one.gathers for one in member.inputs]
                results += member.compute([*map(whole, places, gathers)])
            return results

        return body

    def key(self) -> Any:
        """Identifies the body."""
        inputs, where = self.inputs()
        types = tuple((one.aval.shape, one.aval.dtype.name, one.spec) for one in inputs)
        return types, tuple(map(tuple, where)), tuple(member.key() for member in self.members)


def _gathered_at_once(vectors: Sequence[Any], axes: Axes) -> list[Any]:
    """Arrays that are gathered along their first dimension, by one all_gather."""
    parts = lax.all_gather(lax.concatenate([v.ravel() for v in vectors], 0), axes)
    ends = itertools.accumulate(v.size for v in vectors)
    return [
        parts[:, end - v.size : end].reshape(-1, *v.shape[1:])
        for v, end in zip(vectors, ends, strict=True)
    ]


def member_of(candidate: Candidate, gathered: Mapping[Any, Candidate]) -> Member:
    """An operation as a member. An operand that a reshard gathers is gathered in the same body.

    Args:
        candidate: the operation.
        gathered: the reshards of its block that gather, by their results.
    """
    plan = candidate.plan
    assert plan is not None  # or there would be nothing to replace
    inputs = []
    for operand, (value, of) in enumerate(zip(candidate.values, candidate.avals, strict=True)):
        spec = plan.operands[operand]
        own: Gathers = tuple((g.dimension, g.axes) for g in plan.gathers if g.operand == operand)
        reshard = gathered.get(value)
        if reshard is not None and not candidate.terms:
            gathering = reshard.plan
            assert gathering is not None  # as it is among those that gather
            # A weight gradient uses what a matmul has gathered.
            contracts = candidate.kind.name == "dot_general" and any(
                candidate.contracts(dataclasses.replace(g, operand=operand))
                for g in gathering.gathers
            )
            if gathering.result == spec and not contracts:
                value, spec = reshard.values[0], gathering.operands[0]
                of = reshard.avals[0]  # an all_gather's result has another shape
                own = (*((g.dimension, g.axes) for g in gathering.gathers), *own)
        inputs.append(Input(value, of, spec, own))
    return Member(candidate, inputs)


@dataclass(frozen=True)
class Step:
    """An operation of a block, with what it and all inside it use, as an equation."""

    operation: Any
    invars: Collection[Any]
    outvars: Collection[Any]


def replace(
    block: Any,
    members: Sequence[Member],
    sizes: Mapping[str, int],
    insert: Callable[[Group], Sequence[Any]],
) -> None:
    """Makes shard_maps of the members of a block, and moves behind them what needs them.

    Args:
        block: the block.
        members: the operations. They stay where they are, for the caller to erase.
        sizes: the sizes of the mesh's axes.
        insert: inserts the shard_map of a group; returns the new operations, in order.
    """
    by_operation = {member.number: member for member in members}
    gathered = Counter(one.value for member in members for one in member.gathered())
    gone = {number(o) for member in members for o in member.replaced()} - by_operation.keys()

    def run(group: Group) -> list[Step]:
        # A tail may use what was not there yet when its group began.
        order.end(order.needed(Step(None, [one.value for one in group.inputs()[0]], ())))
        return [Step(o, o.operands, o.results) for o in insert(group)]

    order = Merging(run)
    for operation in operations(block):
        member = by_operation.get(number(operation))
        if number(operation) in gone:
            continue
        if member is None:
            if operation.name in FENCES:
                order.end(order.opened.values())
            order.emit(Step(operation, operands(operation), operation.results))
            continue
        step = Step(operation, [one.value for one in member.inputs], member.outputs())
        key, first = member.shared() or member.number, member.inputs[0]
        alone = member.is_vector() and gathered[first.value] == 1
        key = ("vectors", first.gathers, first.aval.dtype) if alone else key
        nbytes = member.nbytes(sizes) if alone or not member.gathered() else 0

        def fits(group: Group, nbytes: int = nbytes) -> bool:
            return group.nbytes + nbytes <= MERGED_BYTES

        group = order.join(key, step, fits, Group)
        group.members.append(member)
        group.nbytes += nbytes
    previous = None
    for each in order.emitted:
        if previous is not None:
            each.operation.move_after(previous)
        previous = each.operation
