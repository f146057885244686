"""Brings gathers and sums next to the matmuls that they can overlap with. No value changes.

Propagation shards elementwise operations as their users need them. So a gather may come before a
product with a norm's weight, not before the matmul after that, and a sum may be whole although each
user takes a part of it. Here a gather moves behind elementwise operations. A gather that a matmul
and weight gradients need becomes one. And rows that all devices compute alike behind large sums are
divided among them: in the way in which users of a sum take their parts, if any do.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir

from jax_intranode._src.rewrite import sums
from jax_intranode._src.rewrite.auto.kinds import aval
from jax_intranode._src.rewrite.auto.modules import (
    RESHARDS,
    dot_dimensions,
    names_around,
    number,
    owner,
)
from jax_intranode._src.rewrite.auto.operations import Candidate
from jax_intranode._src.rewrite.auto.plans import Gather, Labels, Spec, dot_labels, local_size
from jax_intranode._src.rewrite.auto.program import ELEMENTWISE, MADE_ANYWHERE, Program

_DOTS = frozenset({"stablehlo.dot_general", "stablehlo.dot"})
# They neither change shapes nor widen what is sent.
_MOVABLE = ELEMENTWISE | {"stablehlo.negate", "stablehlo.maximum", "stablehlo.minimum"}
_LOCAL = _MOVABLE | RESHARDS | {"stablehlo.convert"}
# Each element of the result needs one element of each operand.
_BY_ELEMENT = _LOCAL | {
    f"stablehlo.{name}"
    for name in (
        *("abs", "and", "compare", "cosine", "exponential", "exponential_minus_one", "log"),
        *("log_plus_one", "logistic", "not", "or", "power", "rsqrt", "sine", "sqrt", "tanh"),
    )
}
# The elements of new sums are few if so many times as many would still not be more than before.
_MANY = 8


def move(program: Program) -> int:
    """Moves what it can in a program after propagation; how many sums it divided by rows."""
    divided = _Division(program).apply()
    _drop(program)
    for operation in program.all():
        if operation.name in RESHARDS and number(operation) in program.added:
            _sink(operation, program)
    _drop(program)
    return divided


def _drop(program: Program) -> None:
    """Erases added reshards that do nothing any more."""
    for operation in program.all():
        if number(operation) in program.added and program.changes_nothing(operation):
            operation.results[0].replace_all_uses_with(operation.operands[0])
            program.added.discard(number(operation))
            operation.erase()


def _finer(part: Spec | None, whole: Spec | None) -> bool:
    """Whether one sharding divides an array further than another one."""
    if part is None or whole is None or part == whole or len(part) != len(whole):
        return False
    return all(p[: len(w)] == w for p, w in zip(part, whole, strict=True))


# Rows.


class _Division:
    """Divides rows that all devices compute alike behind large sums, as sequence parallelism does.

    Such a sum is scattered, and where an operation needs all of a value, mostly a matmul, the value
    is gathered. Both can overlap with matmuls. Together they send as much as the whole sum does.
    If they would send more, nothing is divided. Small sums, as of a norm's gradients, may be added.
    """

    def __init__(self, program: Program):
        self._program = program
        self._parts: dict[Any, Spec] = {}  # the results that are divided, and how
        self._whole: list[tuple[Any, int]] = []  # the operations and operands that need all rows
        self._sums = self._summed = 0  # how many are divided, and their elements
        self._added = 0  # the elements of the sums that dividing adds
        self._taken: dict[Any, Spec] = {}  # the parts that users take of values, if of any
        operations = program.all()
        for operation in reversed(operations):
            self._take(operation)
        for operation in operations:
            if operation.name == "stablehlo.optimization_barrier":
                pairs = zip(operation.operands, operation.results, strict=True)
                of_both = [(self._parts.get(value), result) for value, result in pairs]
                self._parts |= {result: part for part, result in of_both if part}
            elif part := self._of_user(operation) or self._of_sum(operation):
                self._parts[operation.results[0]] = part

    def apply(self) -> int:
        """Divides the rows; returns how many sums are divided."""
        program, parts = self._program, self._parts
        wholes = {value: program.spec(value) or () for value in parts}
        gathered = {operation.operands[index] for operation, index in self._whole}
        if max(sum(map(_elements, gathered)), _MANY * self._added) > self._summed:
            return 0
        for value, part in parts.items():
            operation = value.owner.operation
            program.set_spec(value, part)
            if operation.name in _BY_ELEMENT - RESHARDS:
                self._keep_whole(operation, part)
                program.add_reshards(operation, [part] * len(operation.operands))
        gathers: dict[Any, Any] = {}
        for operation, index in self._whole:
            value = operation.operands[index]
            if value not in gathers:
                new = program.resharded(value, wholes[value], before=operation)
                new.move_after(owner(value))
                program.added.discard(number(new))
                gathers[value] = new.results[0]
            operation.operands[index] = gathers[value]
        return self._sums

    def _keep_whole(self, operation: Any, part: Spec) -> None:
        """Constrains the operands that are not divided, so that XLA does not divide them either.

        Broadcasts are divided where all users are.
        """
        for value in operation.operands:
            maker = owner(value)
            while maker is not None and maker.name == "stablehlo.broadcast_in_dim":
                users = [use.owner.operation.results for use in maker.results[0].uses]
                if _shape(maker.results[0]) == _shape(operation.results[0]) and all(
                    len(results) and results[0] in self._parts for results in users
                ):
                    self._program.set_spec(maker.results[0], part)
                value, maker = maker.operands[0], owner(maker.operands[0])
            if value in self._parts or maker is None or maker.name in RESHARDS | MADE_ANYWHERE:
                continue
            spec = self._program.spec(value)
            if spec:
                new = self._program.resharded(value, spec, behind=maker)
                self._program.added.discard(number(new))

    def _of_sum(self, dot: Any) -> Spec | None:
        """How the sum of a dot is divided; None if it is small, or no sum of activations."""
        if dot.name not in _DOTS or names_around(dot):
            return None
        if dot_dimensions(dot)[0][0] != (len(_shape(dot.operands[0])) - 1,):  # of gradients
            return None
        of, spec = aval(dot.results[0]), self._program.spec(dot.results[0])
        axes = _summed(dot, self._program)
        if of is None or spec is None or not axes or {*axes} & {a for each in spec for a in each}:
            return None
        if of.size * of.dtype.itemsize <= sums.OVERLAPPED_BYTES:
            return None
        # The last one is no dimension of rows.
        parts = [_divided(spec, dimension, axes) for dimension in range(of.ndim - 1)]
        for part in sorted(parts, key=lambda part: part != self._taken.get(dot.results[0])):
            if local_size(of.shape, part, dict(self._program.mesh.shape)) is not None:
                self._sums += 1
                self._summed += of.size
                return part
        return None

    def _take(self, operation: Any) -> None:
        """Remembers which part of its operands an operation takes, or those that use its result."""
        spec = self._program.spec(operation.results[0]) if operation.results else None
        if spec is not None and operation.name in _LOCAL:
            is_added = number(operation) in self._program.added
            part = spec if is_added else self._taken.get(operation.results[0])
            for value in operation.operands:
                if part and _finer(part, self._program.spec(value)):
                    self._taken.setdefault(value, part)

    def _of_user(self, operation: Any) -> Spec | None:
        """How the result of an operation is divided that uses divided rows; None if it is not."""
        own = [i for i, value in enumerate(operation.operands) if value in self._parts]
        part = self._of_rows(operation, own) if own else ()
        if part is None:
            self._whole += [(operation, index) for index in own]
        return part

    def _of_rows(self, operation: Any, own: Sequence[int]) -> Spec | None:
        """The same. Empty if the result is not divided; None if the operation needs all rows."""
        name = operation.name
        labels = _labels(operation) if len(operation.results) == 1 else None
        if labels is None:
            return None
        divided, dots = set(), name in _DOTS
        for index in own:
            value = operation.operands[index]
            part, whole = self._parts[value], self._program.spec(value) or ()
            for label, new, old in zip(labels.operands[index], part, whole, strict=True):
                divided |= {(label, new[len(old) :])} if new != old else set()
        ((label, axes), *more), spec = divided, self._program.spec(operation.results[0])
        if more or spec is None:
            return None
        if label not in labels.result:
            if dots and len(own) < 2:
                return None
            self._added += _elements(operation.results[0])
            return ()
        if dots and (
            len(own) == 2 or any(self._program.spec(operation.operands[1 - own[0]]) or ())
        ):
            return None
        if name in _BY_ELEMENT and spec != whole:
            return () if spec == part else None  # it takes its part already
        return _divided(spec, labels.result.index(label), axes)


def _labels(operation: Any) -> Labels | None:
    """The labels of an operation of rows; None if it is not known how it uses them."""
    name, after = operation.name, tuple(range(len(_shape(operation.results[0]))))
    first = tuple(range(len(_shape(operation.operands[0]))))
    if name in _DOTS:
        return dot_labels(*dot_dimensions(operation), [*map(len, map(_shape, operation.operands))])
    if name in _BY_ELEMENT:
        return Labels((after,) * len(operation.operands), after)
    if name == "stablehlo.transpose":
        order = ir.DenseI64ArrayAttr(operation.attributes["permutation"])
        return Labels((first,), tuple(order))
    if name == "stablehlo.reduce":
        reduced = [*ir.DenseI64ArrayAttr(operation.attributes["dimensions"])]
        return Labels((first,), tuple(i for i in first if i not in reduced))
    if name == "stablehlo.broadcast_in_dim":
        return Labels(
            (tuple(ir.DenseI64ArrayAttr(operation.attributes["broadcast_dimensions"])),), after
        )
    if name == "stablehlo.reshape":  # dimensions of one size, behind as many elements
        before, now = _shape(operation.operands[0]), _shape(operation.results[0])
        places = {(n, math.prod(now[:i])): i for i, n in enumerate(now)}
        of = (places.get((n, math.prod(before[:i])), -1) for i, n in enumerate(before))
        return Labels((tuple(of),), after)
    return None


def _shape(value: Any) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def _elements(value: Any) -> int:
    return math.prod(_shape(value))


def _divided(spec: Spec, dimension: int, axes: Any) -> Spec:
    """A sharding that divides one dimension over more axes."""
    return (*spec[:dimension], (*spec[dimension], *axes), *spec[dimension + 1 :])


# Sums.


def _summed(dot: Any, program: Program) -> tuple[str, ...]:
    """The mesh axes over which the products of a dot are summed."""
    contracting, _ = dot_dimensions(dot)
    spec = program.spec(dot.operands[0])
    return tuple(a for i in contracting[0] for a in (spec[i] if spec else ()))


# Gathers.


def _sink(gather: Any, program: Program) -> None:
    """Moves an added gather behind the elementwise operations that alone use it."""
    while True:
        (value,), (result,) = gather.operands, gather.results
        part, whole = program.spec(value), program.spec(result)
        uses = list(result.uses)
        if part is None or whole is None or len(uses) != 1 or not _finer(part, whole):
            return
        user = uses[0].owner.operation
        if user.name in RESHARDS and program.spec(user.results[0]) == whole:
            user.operands[0] = value  # which gathers now
            gather.erase()
            return
        if user.name not in _MOVABLE or program.spec(user.results[0]) != whole:
            return
        if user.results[0].type != result.type:  # a select of booleans would send more
            return
        for operand in user.operands:
            if operand != result and program.spec(operand) not in (whole, ((),) * len(whole)):
                return
        user.operands[uses[0].operand_number] = value
        program.set_spec(user.results[0], part)
        program.add_reshards(user, [part] * len(user.operands))
        new = program.resharded(user.results[0], whole, behind=user)
        program.added.discard(number(gather))
        gather.erase()
        gather = new


def share(candidates: Sequence[Candidate], program: Program) -> bool:
    """Makes gathers that a matmul and weight gradients share operations; whether there are any."""
    sharing: dict[Any, list[tuple[Candidate, Gather]]] = {}
    for candidate in candidates:
        if candidate.kind.name == "dot_general" and candidate.plan is not None:
            for gather in candidate.plan.gathers:
                value = candidate.values[gather.operand]
                sharing.setdefault((value, gather.dimension, gather.axes), []).append(
                    (candidate, gather)
                )
    places = {number(operation): i for i, operation in enumerate(program.all())}
    found = False
    for (value, dimension, axes), uses in sharing.items():
        first, spec = uses[0][0].operation, [*(program.spec(value) or ())]
        gradients = [(c.operation, g.operand) for c, g in uses if c.contracts(g)]
        matmuls = [c.operation for c, g in uses if not c.contracts(g)]
        if not gradients or not matmuls or spec[dimension] != axes:
            continue
        makers = [maker for maker in map(owner, matmuls[0].operands) if maker is not None]
        if any(places.get(number(maker), 0) > places[number(first)] for maker in makers):
            continue
        if matmuls[0] != first:
            matmuls[0].move_before(first)
        spec[dimension] = ()
        new = program.resharded(value, tuple(spec), before=matmuls[0])
        program.added.discard(number(new))
        for gradient, operand in gradients:
            gradient.operands[operand] = new.results[0]
        found = True
    return found
