"""Issues collectives that do not depend on each other as one operation, as XLA's combiner does.

Sums are merged with sums, maxima with maxima, and permutes with permutes, where axes and dtypes are
the same: see `waiting.Merging`. A bucket is also issued at a fence (an optimization barrier, or an
equation that the program has placed on the host or in a scheduling group), before an effect that
depends on it, and when it would become too large for one operation. One operation of several
permutes waits for all its sources.
"""

import bisect
import itertools
import operator
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import equation_kinds, jaxpr_walk, lax_collectives
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.ops import primitive
from jax_intranode._src.rewrite import collectives
from jax_intranode._src.rewrite.collectives import Body, Choice
from jax_intranode._src.rewrite.waiting import Merging, Needs

# Collectives of more bytes than this stay lax's if there are matmuls after them that need not wait
# for them: XLA runs its own collectives next to these, and ours only before or after them.
# Between two H100 this makes up for the slower all-reduce (docs/measurements/experiments.md).
OVERLAPPED_BYTES = 1 << 20

_HEAVY = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while"})


def issue(equations: Sequence[Any], choices: dict[int, Choice], body: Body) -> list[Any]:
    """Replaces collectives by their choices, by the identity of the equation, and merges sums."""
    order = Merging(lambda bucket: [bucket.merged(body)])
    overlap = Overlap(equations, body)
    for position, equation in enumerate(equations):
        choice = choices.get(id(equation))
        if choice is not None and overlap.has_matmul(position, position + 1):
            body.decide(equation, reasons.OVERLAPS)
        elif choice is not None and RECORDS[choice.primitive.operation].takes_many:
            dtype = equation.invars[0].aval.dtype
            key = choice.primitive, choice.params.family, dtype, id(equation.ctx)
            fits = partial(_Bucket.fits, equation=equation, choice=choice, body=body)
            bucket = order.join(key, equation, fits, _Bucket)
            bucket.equations.append(equation)
            bucket.choices.append(choice)
            continue
        elif choice is not None:
            equation = collectives.replace(equation, choice, body)
        if order.opened and equation_kinds.is_fence(equation):
            order.end(order.opened.values())
        if order.opened and equation_kinds.has_effects(equation):
            order.end(order.needed(equation))
        order.emit(equation)
    order.end(order.opened.values())
    return order.emitted


class _Bucket:
    """Collectives that are issued together, and the choice for each."""

    def __init__(self) -> None:
        self.equations: list[Any] = []
        self.choices: list[Choice] = []

    def fits(self, equation: Any, choice: Choice, body: Body) -> bool:
        """Whether the bucket is one operation with this collective, too."""
        members = [*self.equations, equation]
        avals = [v.aval for member in members for v in member.invars]
        joined = _joined([*self.choices, choice])
        operations = joined.primitive.decide(body.site, avals, joined.params).operations()
        return len(operations) == 1 and operations[0].selected.algorithm != "lax"

    def merged(self, body: Body) -> Any:
        """The equation of all."""
        first, *others = members = self.equations
        if others:
            first = first.replace(
                invars=[v for member in members for v in member.invars],
                outvars=[v for member in members for v in member.outvars],
            )
        return collectives.replace(first, _joined(self.choices), body)


def _joined(choices: Sequence[Choice]) -> Choice:
    first, *others = choices
    params = first.params.joined([other.params for other in others])
    return Choice(first.primitive, params)


# Collectives that XLA can overlap.


class Overlap:
    """Which collectives of lax may run at the same time as a matmul after them."""

    def __init__(self, equations: Sequence[Any], body: Body):
        self._equations = equations
        self._body = body

    def has_matmul(self, position: int, start: int) -> bool:
        """Whether a matmul at `start` or later does not need a collective, if it is large.

        From `start` on the collective could run.
        """
        if not _on_gpus(self._body) or not _is_large(self._equations[position]):
            return False
        heavy, needed_by_all, bits = self._needs
        index = bisect.bisect_left(heavy, start)
        return index < len(heavy) and not needed_by_all[index] & bits[position]

    @cached_property
    def _needs(self) -> tuple[list[int], list[int], dict[int, int]]:
        """Positions of matmuls and loops, what each and all later ones need, and bits.

        The bits are those of the large collectives, by position.
        """
        bits: dict[int, int] = {}
        for position, equation in enumerate(self._equations):
            if lax_collectives.lax_collective(equation) is not None and _is_large(equation):
                bits[position] = 2 << len(bits)
        heavy = {position for position, each in enumerate(self._equations) if is_heavy(each)}
        found = Needs(self._equations, bits, heavy).heavy
        later = itertools.accumulate((need for _, need in reversed(found)), operator.and_)
        return [position for position, _ in found], [*later][::-1], bits


def _is_large(equation: Any) -> bool:
    return _nbytes(equation) > OVERLAPPED_BYTES


def _nbytes(equation: Any) -> int:
    """Bytes of the array that a device gathers or sums."""
    sizes = (
        sum(primitive.nbytes(v.aval) for v in vs) for vs in (equation.invars, equation.outvars)
    )
    return max(sizes)


def _on_gpus(body: Body) -> bool:
    mesh = body.site.mesh
    return mesh is not None and mesh.devices.flat[0].platform == "gpu"


def _takes_long(equation: Any) -> bool:
    if equation.primitive.name in _HEAVY:
        return True
    own = primitive.BY_PRIMITIVE.get(equation.primitive)
    return own is not None and "matmul" in own.operation


# Whether an equation takes long: it multiplies matrices, or loops.
is_heavy = jaxpr_walk.Contains(_takes_long).within
