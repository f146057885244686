"""Operations become shard_maps, whose bodies are rewritten like any other.

Operations that do not need each other share a shard_map where this merges their communication.
Such are operations that use the same gathered array, and sums over the same axes, up to a size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.extend.mlir import ir

from jax_intranode._src.rewrite import sums
from jax_intranode._src.rewrite.auto.modules import inner_blocks, number, operations, owner
from jax_intranode._src.rewrite.auto.operations import Found, Kind
from jax_intranode._src.rewrite.auto.plans import Axes, Plan, Spec, local_size

# Sums of more bytes together are not merged.
MERGED_BYTES = 1 << 20

_HEAVY = frozenset(
    f"stablehlo.{name}" for name in ("dot_general", "convolution", "dot", "while", "custom_call")
)
# Operations that nothing is moved across.
_FENCES = frozenset({"stablehlo.optimization_barrier", "stablehlo.custom_call"})


@dataclass(frozen=True)
class Input:
    """An operand of a shard_map's body.

    Attributes:
        value: the value in the program.
        aval: its type.
        spec: how the shard_map shards it.
    """

    value: Any
    aval: Any
    spec: Spec


# How an input is gathered: dimensions and axes, in order.
Gathers = tuple[tuple[int, Axes], ...]


@dataclass
class Member:
    """An operation in a shard_map.

    Attributes:
        found: the operation.
        inputs: its operands.
        gathers: how each is gathered.
    """

    found: Found
    inputs: list[Input]
    gathers: list[Gathers]

    @property
    def kind(self) -> Kind:
        """What it computes."""
        return self.found.kind

    @property
    def plan(self) -> Plan:
        """How it is computed."""
        assert self.found.plan is not None  # or it would be no member
        return self.found.plan

    def computation(self) -> tuple[Callable[..., Any], list[Gathers], Plan]:
        """What it computes, how its operands are gathered, and its plan."""
        assert self.kind.compute is not None  # as there is a plan
        return self.kind.compute, self.gathers, self.plan

    def communicates(self) -> bool:
        """Whether it sends anything."""
        return any(self.gathers) or bool(self.plan.sums) or bool(self.kind.axes)

    def key(self) -> Any:
        """Identifies what the body does, but for the operands."""
        plan = self.plan
        return self.kind.key, tuple(self.gathers), plan.sums, plan.result


@dataclass
class Group:
    """The operations of one shard_map, in the order of the program."""

    members: list[Member] = field(default_factory=list)
    nbytes: int = 0

    def inputs(self) -> tuple[list[Input], list[list[int]]]:
        """The different operands, and which of them each member has."""
        found: list[Input] = []
        where: list[list[int]] = []
        for member in self.members:
            places = []
            for one in member.inputs:
                place = next(
                    (
                        i
                        for i, other in enumerate(found)
                        if other.value == one.value and other.spec == one.spec
                    ),
                    len(found),
                )
                if place == len(found):
                    found.append(one)
                places.append(place)
            where.append(places)
        return found, where

    def body(self) -> Callable[..., list[Any]]:
        """What each device computes."""
        _, where = self.inputs()
        members = [m.computation() for m in self.members]

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

            results = []
            for (compute, gathers, plan), places in zip(members, where, strict=True):
                result = compute(*map(whole, places, gathers))
                for each in plan.sums:
                    if each.dimension is None:
                        result = lax.psum(result, each.axes)
                    else:
                        result = lax.psum_scatter(
                            result, each.axes, scatter_dimension=each.dimension, tiled=True
                        )
                results.append(result)
            return results

        return body

    def key(self) -> Any:
        """Identifies the body."""
        inputs, where = self.inputs()
        types = tuple((one.aval.shape, one.aval.dtype.name, one.spec) for one in inputs)
        return types, tuple(map(tuple, where)), tuple(member.key() for member in self.members)


def member_of(found: Found, before: dict[int, Found]) -> Member:
    """An operation as a member. An operand that a reshard gathers is gathered in the same body.

    Args:
        found: the operation.
        before: the reshards that gather, by the numbers of their operations.
    """
    plan = found.plan
    assert plan is not None  # or there would be nothing to replace
    inputs, gathers = [], []
    for operand, (value, aval) in enumerate(zip(found.values, found.avals, strict=True)):
        spec = plan.operands[operand]
        own: Gathers = tuple((g.dimension, g.axes) for g in plan.gathers if g.operand == operand)
        maker = owner(value)
        reshard = None if maker is None else before.get(number(maker))
        if reshard is not None and reshard.operation.block == found.operation.block:
            gathering = reshard.plan
            assert gathering is not None  # as it is among those that gather
            if gathering.result == spec:
                value, spec = reshard.values[0], gathering.operands[0]
                own = (*((g.dimension, g.axes) for g in gathering.gathers), *own)
        inputs.append(Input(value, aval, spec))
        gathers.append(own)
    return Member(found, inputs, gathers)


class Block:
    """The order of a block's operations, and what needs what."""

    def __init__(self, block: Any, replaced: dict[Any, Any], manual: frozenset[str]):
        """Reads the block.

        Args:
            block: the block.
            replaced: what takes the place of the values of the program so far. The operations that
                made them are erased at the end, so that no new one has their identity.
            manual: the axes that shard_maps around it have bound.
        """
        self.block = block
        self.manual = manual
        self.replaced = replaced
        self.operations = operations(block)
        # By the numbers of operations.
        self.numbered = {number(operation): operation for operation in self.operations}
        self.position = {each: float(i) for i, each in enumerate(self.numbered)}

    def add_before(self, operation: Any, first: Any, *others: Any) -> None:
        """Adds operations that are before an operation; the others need the first one."""
        end = self.place(operation)
        start = max((p for p in self.position.values() if p < end), default=end - 1)
        for each in (first, *others):
            self.numbered[number(each)] = each
            self.position[number(each)] = (start + end) / 2 if each is first else end

    def place(self, operation: Any) -> float:
        """The position of an operation of this block."""
        return self.position[number(operation)]

    def resolve(self, value: Any) -> Any:
        """What a value of the program is now."""
        return self.replaced.get(value, value)

    def within(self, operation: Any) -> Any:
        """The operation of this block that is or holds an operation."""
        while operation.block != self.block:
            operation = operation.parent.operation
        return operation

    def add_users(self, found: set[int], operation: Any, until: float = math.inf) -> None:
        """Adds the operations up to a position that need an operation, also indirectly.

        What needs those that were found before has been found, too.
        """
        todo = [operation]
        while todo:
            for result in todo.pop().results:
                for use in result.uses:
                    user = self.within(use.owner.operation)
                    each = number(user)
                    if each not in found and self.position[each] <= until:
                        found.add(each)
                        todo.append(user)

    def move_behind(self, users: set[int], anchor: Any) -> None:
        """Moves operations behind another one, in their order."""
        start = self.place(anchor)
        moved = sorted(users, key=self.position.__getitem__)
        gap = min((p for p in self.position.values() if p > start), default=start + 1) - start
        for step, each in enumerate(moved, 1):
            self.numbered[each].move_after(anchor)
            anchor = self.numbered[each]
            self.position[each] = start + gap * step / (len(moved) + 1)


def groups_of(members: Sequence[Member], block: Block, sizes: dict[str, int]) -> Iterator[Group]:
    """Groups the members of a block, in the order of the program."""
    fences = sorted(block.place(o) for o in block.operations if o.name in _FENCES)
    buckets: dict[Any, Group] = {}
    done: list[Group] = []
    for member in members:
        position = block.place(member.found.operation)
        plan = member.plan
        era = sum(fence < position for fence in fences)
        nbytes = sum_bytes(member, sizes)
        key: Any = None
        gathered = [i for i, g in zip(member.inputs, member.gathers, strict=True) if g]
        if gathered and not plan.sums:
            key = (
                "gather",
                era,
                tuple(hash(one.value) for one in gathered),
                tuple(g for g in member.gathers if g),
            )
            nbytes = 0
        elif not gathered and not plan.scatters:
            key = "sum", era, plan.sums, member.found.avals[0].dtype
        group = None if key is None else buckets.get(key)
        if group is None or group.nbytes + nbytes > MERGED_BYTES:
            group = Group()
            done.append(group)
            if key is not None:
                buckets[key] = group
        group.members.append(member)
        group.nbytes += nbytes
    yield from done


def independent(group: Group, block: Block) -> Iterator[tuple[Group, set[int]]]:
    """Divides a group into groups whose members do not need each other.

    Each comes with what needs its members and stands before the last one.
    """
    left = sorted(group.members, key=lambda m: block.place(m.found.operation))
    while left:
        part, users, rest = Group(), set[int](), []
        last = block.place(left[-1].found.operation)
        for member in left:
            operation = member.found.operation
            makers = [owner(block.resolve(one.value)) for one in member.inputs]
            needed = {
                number(maker)
                for maker in makers
                if maker is not None and maker.block == block.block
            }
            if number(operation) in users or needed & users:
                rest.append(member)
            else:
                part.members.append(member)
                block.add_users(users, operation, last)
        end = block.place(part.members[-1].found.operation)
        yield part, {user for user in users if block.position[user] < end}
        left = rest


# What XLA overlaps.


def sum_bytes(member: Member, sizes: dict[str, int]) -> int:
    """The bytes that a device gathers or sums, at most."""
    plan = member.plan
    largest = 0
    for one, gathers in zip(member.inputs, member.gathers, strict=True):
        if gathers:
            held = local_size(one.aval.shape, one.spec, sizes) or 0
            held *= math.prod(sizes[axis] for _, axes in gathers for axis in axes)
            largest = max(largest, held * one.aval.dtype.itemsize)
    if plan.sums:
        result = jax.ShapeDtypeStruct(
            ir.RankedTensorType(member.found.operation.results[0].type).shape,
            member.found.avals[0].dtype,
        )
        held = local_size(result.shape, plan.result, sizes) or 0
        held *= math.prod(sizes[axis] for each in plan.scatters for axis in each.axes)
        largest = max(largest, held * result.dtype.itemsize)
    return largest


def is_overlapped(member: Member, block: Block, sizes: dict[str, int]) -> bool:
    """Whether XLA can run a large collective at the same time as a matmul after it.

    A gather can begin as soon as its operand is there, a sum when the operation is done.
    """
    if sum_bytes(member, sizes) <= sums.OVERLAPPED_BYTES:
        return False
    operation = member.found.operation
    ready = block.place(operation)
    for one, gathers in zip(member.inputs, member.gathers, strict=True):
        if gathers:
            maker = owner(one.value)
            here = maker is not None and maker.block == block.block
            ready = min(ready, block.place(maker) if here else -1.0)
    needing: set[int] = set()
    block.add_users(needing, operation)
    return any(
        block.place(other) > ready
        and other != operation
        and number(other) not in needing
        and is_heavy(other)
        for other in block.operations
    )


def is_heavy(operation: Any) -> bool:
    """Whether an operation multiplies matrices, or loops."""
    if operation.name in _HEAVY:
        return True
    return any(
        is_heavy(inner.operation) for block in inner_blocks(operation) for inner in block.operations
    )


def reshards_that_gather(found: Sequence[Found]) -> dict[int, Found]:
    """The reshards among these that gather, by the numbers of their operations."""
    return {
        number(each.operation): each
        for each in found
        if each.plan is not None
        and each.kind.name in ("reshard", "all_gather")
        and each.plan.gathers
    }
