"""Brings gathers and sums next to the matmuls that they can overlap with. No value changes.

Propagation shards elementwise operations as their users need them. So a gather may come before a
product with a norm's weight, not before the matmul after that, and a sum may be whole although each
user takes a part of it. Here a gather moves behind elementwise operations, and a sum whose users
take the same part of it is scattered. Gathers that a matmul and a weight gradient share become one.
"""

from typing import Any

from jax.extend.mlir import ir

from jax_intranode._src.rewrite.auto.modules import dot_dimensions, number
from jax_intranode._src.rewrite.auto.plans import Spec
from jax_intranode._src.rewrite.auto.program import ELEMENTWISE, Program

_DOTS = frozenset({"stablehlo.dot_general", "stablehlo.dot"})
_SAME = frozenset({"sdy.reshard", "sdy.sharding_constraint"})
# They neither change shapes nor widen what is sent.
_MOVABLE = ELEMENTWISE | {"stablehlo.negate", "stablehlo.maximum", "stablehlo.minimum"}


def move(program: Program) -> None:
    """Moves what it can in a program after propagation."""
    for operation in program.all():
        if operation.name in _DOTS:
            _scatter(operation, program)
    _drop(program)
    for operation in program.all():
        if operation.name in _SAME and number(operation) in program.added:
            _sink(operation, program)
    _drop(program)
    shared: dict[Any, list[tuple[Any, int, bool, Spec]]] = {}
    for operation in program.all():
        if operation.name in _DOTS:
            for side, value in enumerate(operation.operands):
                found = _gathered(operation, side, program)
                if found is not None:
                    shared.setdefault((value, found[1]), []).append((operation, side, *found))
    for uses in shared.values():
        if len({contracts for _, _, contracts, _ in uses}) == 2:
            _share(uses, program)


def _drop(program: Program) -> None:
    """Erases added reshards that do nothing any more."""
    for operation in program.all():
        if operation.name in _SAME and number(operation) in program.added:
            (value,), (result,) = operation.operands, operation.results
            if program.spec(value) == program.spec(result):
                result.replace_all_uses_with(value)
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
            if node.name not in _SAME:
                program.add_reshards(node, [part] * len(node.operands))


def _users(value: Any, spec: Spec, parts: set[Spec], nodes: list[Any], program: Program) -> bool:
    """Whether all users, behind elementwise operations, take a part; `parts` gets which."""
    for use in value.uses:
        user = use.owner.operation
        if user.name in _SAME and number(user) in program.added:
            parts.add(program.spec(user.results[0]) or ())
        elif user.name not in _MOVABLE | _SAME | {"stablehlo.convert"} or program.spec(user.results[0]) != spec:
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
        if len(uses) != 1 or not _finer(part, whole):
            return
        user = uses[0].owner.operation
        if user.name in _SAME and program.spec(user.results[0]) == whole:
            user.operands[0] = value  # which gathers now
            gather.erase()
            return
        if user.name not in _MOVABLE or program.spec(user.results[0]) != whole:
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


def _gathered(dot: Any, side: int, program: Program) -> tuple[bool, Spec] | None:
    """Whether a dot contracts the dimension over which it has to gather an operand, and to what."""
    contracting, batch = dot_dimensions(dot)
    spec, other = (program.spec(dot.operands[k]) for k in (side, 1 - side))
    result = program.spec(dot.results[0])
    if spec is None or other is None or result is None or any(map(len, batch)):
        return None
    free = [i for i in range(len(spec)) if i not in contracting[side]]
    start = 0 if side == 0 else len(result) - len(free)
    for i, axes in enumerate(spec):
        if not axes:
            continue
        if i in contracting[side]:
            contracts = True
            taken = other[contracting[1 - side][list(contracting[side]).index(i)]]
        else:
            contracts, taken = False, result[start + free.index(i)]
        rest = tuple(() if k == i else of for k, of in enumerate(spec))
        if not taken and any(set(axes) & set(of) for of in result):
            return contracts, rest
    return None


def _share(uses: list[tuple[Any, int, bool, Spec]], program: Program) -> None:
    """Gives the weight gradients that need a gathered array that of the matmul before them."""
    first, side, _, whole = next(use for use in uses if not use[2])
    order = {number(operation): place for place, operation in enumerate(program.all())}
    value = first.operands[side]
    place = order[number(first)]
    if any(order[number(dot)] < place or dot.parent != first.parent for dot, *_ in uses):
        return
    reshard = program.resharded(value, whole, before=first)
    program.added.discard(number(reshard))
    for dot, which, contracts, _ in uses:
        if contracts:
            dot.operands[which] = reshard.results[0]
