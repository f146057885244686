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
from typing import Any

from jax import lax
from jax.sharding import PartitionSpec as P

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


# Dimensions of a dot's operands.
OfBoth = tuple[Sequence[int], Sequence[int]]


def dot_labels(contracting: OfBoth, batch: OfBoth, ranks: Sequence[int]) -> Labels:
    """The labels of a product of two arrays of these ranks."""
    of_both = range(len(batch[0]) + len(contracting[0]))
    new = itertools.count(len(of_both))
    operands, result = [], list(range(len(batch[0])))
    for side, rank in enumerate(ranks):
        own = dict(zip((*batch[side], *contracting[side]), of_both, strict=True))
        for dimension in range(rank):
            if dimension not in own:
                own[dimension] = next(new)
                result.append(own[dimension])
        operands.append(tuple(own[dimension] for dimension in range(rank)))
    return Labels(tuple(operands), tuple(result))


@dataclass(frozen=True)
class Gather:
    """An operand that is gathered along a dimension before the operation is computed."""

    operand: int
    dimension: int
    axes: Axes


@dataclass(frozen=True)
class Sum:
    """A sum of products, scattered along a dimension of the result if there is one."""

    axes: Axes
    dimension: int | None = None


@dataclass(frozen=True)
class Plan:
    """A way in which an operation is computed.

    Attributes:
        operands: how each operand is sharded at first. An operand of the program may be less so:
            taking a part of it costs nothing.
        gathers: what is gathered, in order.
        sums: the sums of the products, one after the other. Those that are scattered come first,
            because what they leave is smaller.
        result: how the result is sharded.
    """

    operands: tuple[Spec, ...]
    gathers: tuple[Gather, ...]
    sums: tuple[Sum, ...]
    result: Spec

    @property
    def axes(self) -> Axes:
        """The axes that it communicates over, in order."""
        of_gathers = (axis for each in self.gathers for axis in each.axes)
        return (*of_gathers, *(axis for each in self.sums for axis in each.axes))

    @property
    def scatters(self) -> tuple[Sum, ...]:
        """The sums that are scattered."""
        return tuple(each for each in self.sums if each.dimension is not None)

    def computed(self, operand: int, dimension: int) -> Axes:
        """The axes over which a dimension of an operand is sharded while it is computed."""
        found = self.operands[operand][dimension]
        for each in self.gathers:
            if (each.operand, each.dimension) == (operand, dimension):
                found = found[: -len(each.axes)]
        return found

    def summed(self, product: Any, collective: str) -> Any:
        """The result on a device, from its product, by "psum", "pmax" or "pmin"."""
        for each in self.sums:
            if each.dimension is None:
                product = getattr(lax, collective)(product, each.axes)
            else:
                product = lax.psum_scatter(
                    product, each.axes, scatter_dimension=each.dimension, tiled=True
                )
        return product


def partition_spec(axes: Spec) -> P:
    """The PartitionSpec of a sharding."""
    return P(*(of or None for of in axes))


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
    sums = []
    for dimension, (label, after) in enumerate(zip(labels.result, result, strict=True)):
        now = computed[label]
        if now != after:
            scattered = after[len(now) :]
            if after[: len(now)] != now or not set(scattered) <= set(summed):
                return None
            sums.append(Sum(scattered, dimension))
            summed = tuple(axis for axis in summed if axis not in scattered)
    if summed:
        sums.append(Sum(summed))
    return Plan(tuple(ins), tuple(gathers), tuple(sums), result)


def local_size(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> int | None:
    """The elements that a device has of an array; None if a dimension is not divisible."""
    count = 1
    for extent, axes in zip(shape, spec, strict=True):
        parts = math.prod(sizes[axis] for axis in axes)
        if extent % parts:
            return None
        count *= extent // parts
    return count


def as_found(
    plan: Plan,
    found: Sequence[Collective],
    shapes: Sequence[Sequence[int]],
    result: Sequence[int],
    sizes: Mapping[str, int],
) -> Plan | None:
    """The plan, in the order of the collectives that were found; None if it has not these.

    Args:
        plan: the plan.
        found: the collectives, in order.
        shapes: the shapes of the operands.
        result: that of the result.
        sizes: the sizes of the mesh's axes.
    """
    of_gathers = Counter(each for each in found if each[0] == "all-gather")
    for gathers in itertools.permutations(plan.gathers):
        if _gathered(plan, gathers, shapes, sizes) == of_gathers:
            break
    else:
        return None
    part = local_size(result, plan.result, sizes)
    if part is None:
        return None
    # Elements of the result before some of the scatters.
    counts = {part}
    for each in plan.scatters:
        counts |= {n * math.prod(sizes[axis] for axis in each.axes) for n in counts}
    stages = []
    for kind, axes, count in found:
        if kind != "all-gather":
            scatters = any(frozenset(each.axes) == axes for each in plan.scatters)
            if count not in counts or not (
                kind == "all-reduce" or (kind == "reduce-scatter" and scatters)
            ):
                return None
            stages.append(axes)
    order = [axis for each in plan.sums for axis in each.axes]
    if sorted(axis for axes in stages for axis in axes) != sorted(order):
        return None
    sums = plan.sums
    if not plan.scatters:
        sums = tuple(Sum(tuple(axis for axis in order if axis in axes)) for axes in stages)
    return Plan(plan.operands, gathers, sums, plan.result)


def _gathered(
    plan: Plan,
    gathers: Sequence[Gather],
    shapes: Sequence[Sequence[int]],
    sizes: Mapping[str, int],
) -> Counter[Collective] | None:
    """What the gathers communicate in this order; None if a dimension is not divisible."""
    held = [local_size(*of, sizes) for of in zip(shapes, plan.operands, strict=True)]
    expected: Counter[Collective] = Counter()
    for gather in gathers:
        before = held[gather.operand]
        if before is None:
            return None
        after = held[gather.operand] = before * math.prod(sizes[axis] for axis in gather.axes)
        expected["all-gather", frozenset(gather.axes), after] += 1
    return expected
