"""The ways in which an operation over sharded arrays can be computed.

An operation multiplies, sums or moves dimensions. Each dimension of an operand or of the result has
a label: a number that is the same for dimensions that belong together, as in an einsum. While the
operation is computed, each label is sharded in one way. An operand that is sharded more finely is
gathered before, and products are summed over the axes of labels that the result does not have.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# The mesh axes over which a dimension is sharded; none if it is not.
Axes = tuple[str, ...]
# Those of each dimension of an array.
Spec = tuple[Axes, ...]

# A collective: its kind, the axes of its groups, and the elements of a device's result.
Collective = tuple[str, frozenset[str], int]


@dataclass(frozen=True)
class Labels:
    """The labels of an operation's dimensions.

    Attributes:
        operands: those of each operand.
        result: those of the result.
    """

    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]


@dataclass(frozen=True)
class Gather:
    """An operand that is gathered along a dimension before the operation is computed."""

    operand: int
    dimension: int
    axes: Axes


@dataclass(frozen=True)
class Plan:
    """A way in which an operation is computed.

    Attributes:
        operands: how each operand is sharded at first. An operand of the program may be less so:
            taking a part of it costs nothing.
        gathers: what is gathered.
        sums: the axes of each sum of the products, one sum after the other.
        scatter: the dimension of the result that the last sum is scattered along; None if it isn't.
        result: how the result is sharded.
    """

    operands: tuple[Spec, ...]
    gathers: tuple[Gather, ...]
    sums: tuple[Axes, ...]
    scatter: int | None
    result: Spec


def plans(labels: Labels, operands: Sequence[Spec], result: Spec) -> Iterator[Plan]:
    """All ways to compute an operation whose operands and result are sharded like this."""
    known = sorted({label for of in (*labels.operands, labels.result) for label in of})
    options: list[list[Axes]] = []
    for label in known:
        found: dict[Axes, None] = {(): None}
        for of, spec in zip((*labels.operands, labels.result), (*operands, result), strict=True):
            found.update((spec[i], None) for i, other in enumerate(of) if other == label)
        options.append(list(found))
    for choice in itertools.product(*options):
        used = [axis for axes in choice for axis in axes]
        if len(set(used)) == len(used):
            plan = _plan(labels, operands, result, dict(zip(known, choice, strict=True)))
            if plan is not None:
                yield plan


def _plan(
    labels: Labels, operands: Sequence[Spec], result: Spec, computed: Mapping[int, Axes]
) -> Plan | None:
    gathers, ins = [], []
    for operand, (of, spec) in enumerate(zip(labels.operands, operands, strict=True)):
        first = []
        for dimension, (label, before) in enumerate(zip(of, spec, strict=True)):
            now = computed[label]
            if before[: len(now)] == now:
                first.append(before)
                if before != now:
                    # The minor axes: shards that follow each other.
                    gathers.append(Gather(operand, dimension, before[len(now) :]))
            elif now[: len(before)] == before:
                first.append(now)
            else:
                return None
        if len({axis for axes in first for axis in axes}) < sum(map(len, first)):
            return None
        ins.append(tuple(first))
    summed = tuple(
        axis for label, axes in computed.items() if label not in labels.result for axis in axes
    )
    scatter = None
    for dimension, (label, after) in enumerate(zip(labels.result, result, strict=True)):
        now = computed[label]
        if now == after:
            continue
        scattered = after[len(now) :]
        if scatter is not None or after[: len(now)] != now or set(scattered) != set(summed):
            return None
        scatter, summed = dimension, scattered
    return Plan(tuple(ins), tuple(gathers), (summed,) if summed else (), scatter, result)


def local_size(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> int | None:
    """The elements that a device has of an array; None if a dimension is not divisible."""
    count = 1
    for extent, axes in zip(shape, spec, strict=True):
        parts = math.prod(sizes[axis] for axis in axes)
        if extent % parts:
            return None
        count *= extent // parts
    return count


def with_sums_of(
    plan: Plan,
    found: Sequence[Collective],
    shapes: Sequence[Sequence[int]],
    result: Sequence[int],
    sizes: Mapping[str, int],
) -> Plan | None:
    """The plan if it communicates what was found, with its sums in the same order; None if not.

    Args:
        plan: the plan.
        found: the collectives, in order.
        shapes: the shapes of the operands.
        result: that of the result.
        sizes: the sizes of the mesh's axes.
    """
    expected: Counter[Collective] = Counter()
    for operand, shape in enumerate(shapes):
        held = local_size(shape, plan.operands[operand], sizes)
        if held is None:
            return None
        for gather in plan.gathers:
            if gather.operand == operand:
                held *= math.prod(sizes[axis] for axis in gather.axes)
                expected["all-gather", frozenset(gather.axes), held] += 1
    part = local_size(result, plan.result, sizes)
    if part is None:
        return None
    summed = frozenset(axis for axes in plan.sums for axis in axes)
    of_sums = []
    for collective in found:
        kind, axes, count = collective
        if kind == "all-gather":
            expected[collective] -= 1
        else:
            of_sums.append((kind, axes, count))
    if any(expected.values()):
        return None
    if not of_sums or not summed:
        return plan if not of_sums and not summed else None
    whole = part * (math.prod(sizes[axis] for axis in summed) if plan.scatter is not None else 1)
    if plan.scatter is not None:
        one = of_sums[0] in (("all-reduce", summed, whole), ("reduce-scatter", summed, part))
        return plan if one and len(of_sums) == 1 else None
    (order,) = plan.sums
    if of_sums == [("all-reduce", summed, whole)]:
        return plan
    seen = [axis for _, axes, _ in of_sums for axis in axes]
    if (
        any(kind != "all-reduce" or count != whole for kind, _, count in of_sums)
        or len(set(seen)) < len(seen)
        or set(seen) != summed
    ):
        return None
    stages = tuple(tuple(a for a in order if a in axes) for _, axes, _ in of_sums)
    return Plan(plan.operands, plan.gathers, stages, None, plan.result)
