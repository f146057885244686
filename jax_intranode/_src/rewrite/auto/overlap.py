"""What XLA overlaps stays XLA's: large collectives that need not wait for the matmuls after them.

XLA runs its own collectives next to matmuls, and ours only before or after them. It also combines
collectives of one kind over the same axes. So what it would combine is judged, and left, as one:
the gathers that need no matmul, such as those of parameters, and the sums that no matmul needs,
such as those of gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.mlir import ir

from jax_intranode._src import reasons
from jax_intranode._src.rewrite import sums
from jax_intranode._src.rewrite.auto.groups import Member, Step
from jax_intranode._src.rewrite.auto.modules import number, operands, operations, owner, walk
from jax_intranode._src.rewrite.auto.program import Program
from jax_intranode._src.rewrite.waiting import Needs

_HEAVY = frozenset(
    f"stablehlo.{name}" for name in ("dot_general", "convolution", "dot", "while", "custom_call")
)

_OF_PARTS = frozenset({"stablehlo.slice", "stablehlo.dynamic_slice"})


def overlapped(members: Sequence[Member], block: Any, sizes: Mapping[str, int]) -> dict[int, str]:
    """Why some members of a block are left, by the numbers of their operations."""
    needs, bits = _needs(members, block)
    places = {number(operation): place for place, operation in enumerate(operations(block))}

    def begins(member: Member) -> int:
        """Where it can begin: a gather behind its operand, a sum behind its operation."""
        makers = [owner(one.value) for one in member.gathered()]
        return min(
            [places[member.number], *(places.get(number(m), -1) if m else -1 for m in makers)]
        )

    combined: dict[Any, list[Member]] = {}
    for member in members:
        gathered = member.gathered()
        key: Any = member.number
        if gathered and not any(needs.of.get(one.value, 0) & 1 for one in gathered):
            key = "gathers", frozenset(a for one in gathered for _, of in one.gathers for a in of)
        elif not gathered and not needs.by_heavy & bits[member.number]:
            key = "sums", frozenset(member.plan.axes)
        combined.setdefault(key, []).append(member)
    left: dict[int, str] = {}
    for together in combined.values():
        if sum(member.nbytes(sizes) for member in together) <= sums.OVERLAPPED_BYTES:
            continue
        for member in together:
            start, own = begins(member), bits[member.number]
            if any(at > start and not need & own for at, need in needs.heavy):
                reason = reasons.OVERLAPS_SEVERAL if len(together) > 1 else reasons.OVERLAPS
                left |= {m.number: reason for m in together}
                break
    return left


def at_the_ends(members: Sequence[Member], block: Any) -> set[int]:
    """The numbers of the members that gather what needs no matmul, or sum what no matmul needs.

    Such are the gathers of FSDP's parameters and the sums of gradients, which XLA can run next to
    any matmul before or after.
    """
    needs, bits = _needs(members, block)
    return {
        m.number
        for m in members
        if not all(needs.of.get(one.value, 0) & 1 for one in m.gathered())
        or (m.plan.sums and not needs.by_heavy & bits[m.number])
    }


def _needs(members: Sequence[Member], block: Any) -> tuple[Needs, dict[int, int]]:
    """What needs matmuls and loops, and which members, whose bits are by their numbers."""
    bits = {member.number: 2 << i for i, member in enumerate(members)}
    steps = [Step(o, operands(o), o.results) for o in operations(block)]
    of_steps = [bits.get(number(step.operation), 0) for step in steps]
    heavy = {place for place, step in enumerate(steps) if _is_heavy(step.operation)}
    return Needs(steps, dict(enumerate(of_steps)), heavy), bits


def permutes(block: Any, program: Program) -> int:
    """How many operations of a block take a part of a dimension that stays sharded.

    Such is the division of one product into queries, keys and values. XLA permutes for them.
    """
    count = 0
    for operation in operations(block):
        if operation.name in _OF_PARTS:
            value, result = operation.operands[0], operation.results[0]
            spec = program.spec(value) or ()
            shapes = [ir.RankedTensorType(each.type).shape for each in (value, result)]
            count += any(axes and n != m for axes, n, m in zip(spec, *shapes, strict=True))
    return count


def _is_heavy(operation: Any) -> bool:
    """Whether an operation multiplies matrices, or loops."""
    inside = walk(operation) if len(operation.regions) else [operation]
    return any(inner.name in _HEAVY for inner in inside)
