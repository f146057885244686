"""Brings gathers and sums next to the matmuls that they can overlap with. No value changes.

Propagation shards elementwise operations as their users need them. So a gather may come before a
product with a norm's weight, not before the matmul after that, and a sum may be whole although each
user takes a part of it. Here a gather moves behind elementwise operations, and a sum whose users
take the same part of it is scattered. A gather that a matmul and weight gradients need becomes one.
"""

from collections.abc import Sequence
from typing import Any

from jax_intranode._src.rewrite.auto.modules import RESHARDS, dot_dimensions, number, owner
from jax_intranode._src.rewrite.auto.operations import Candidate
from jax_intranode._src.rewrite.auto.plans import Gather, Spec
from jax_intranode._src.rewrite.auto.program import ELEMENTWISE, Program

_DOTS = frozenset({"stablehlo.dot_general", "stablehlo.dot"})
# They neither change shapes nor widen what is sent.
_MOVABLE = ELEMENTWISE | {"stablehlo.negate", "stablehlo.maximum", "stablehlo.minimum"}
_LOCAL = _MOVABLE | RESHARDS | {"stablehlo.convert"}


def move(program: Program) -> None:
    """Moves what it can in a program after propagation."""
    for operation in program.all():
        if operation.name in _DOTS:
            _scatter(operation, program)
    _drop(program)
    for operation in program.all():
        if operation.name in RESHARDS and number(operation) in program.added:
            _sink(operation, program)
    _drop(program)


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


# Sums.


def _scatter(dot: Any, program: Program) -> None:
    """Scatters the sum of a dot if all of its users take the same part of it."""
    contracting, _ = dot_dimensions(dot)
    spec = program.spec(dot.operands[0])
    summed = {a for i in contracting[0] for a in (spec[i] if spec else ())}
    before = program.spec(dot.results[0])
    parts: set[Spec] = set()
    nodes: list[Any] = []
    if not summed or before is None or not _users(dot.results[0], before, parts, nodes, program):
        return
    if len(parts) != 1:
        return
    (part,) = parts
    new = [a for p, w in zip(part, before, strict=True) for a in p[len(w) :]]
    if _finer(part, before) and set(new) == summed:
        for node in (dot, *nodes):
            program.set_spec(node, part)
        for node in nodes:
            if node.name not in RESHARDS:
                program.add_reshards(node, [part] * len(node.operands))


def _users(value: Any, spec: Spec, parts: set[Spec], nodes: list[Any], program: Program) -> bool:
    """Whether all users, behind elementwise operations, take a part; `parts` gets which."""
    for use in value.uses:
        user = use.owner.operation
        if user.name in RESHARDS and number(user) in program.added:
            parts.add(program.spec(user.results[0]) or ())
        elif user.name not in _LOCAL or program.spec(user.results[0]) != spec:
            return False
        elif user not in nodes:
            nodes.append(user)
            if not _users(user.results[0], spec, parts, nodes, program):
                return False
    return bool(parts)


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
        program.set_spec(user, part)
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
