"""What follows a sum, up to a norm, joins its shard_map, where norms.py makes one operation of it.

That is the addition of a residual and what a norm computes. It is read as functions of jax.lax, of
the arrays that each device has.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend.mlir import ir

from jax_intranode._src.rewrite.auto.modules import FENCES, RESHARDS, number, operands, owner, splat
from jax_intranode._src.rewrite.auto.operations import aval, kind_of
from jax_intranode._src.rewrite.auto.plans import Spec, local_size
from jax_intranode._src.rewrite.auto.program import Program

# A norm has about ten operations; others may stand between.
_FARTHEST = 200

_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "stablehlo.add": lax.add,
    "stablehlo.subtract": lax.sub,
    "stablehlo.multiply": lax.mul,
    "stablehlo.divide": lax.div,
    "stablehlo.maximum": lax.max,
    "stablehlo.power": lax.pow,
    "stablehlo.negate": lax.neg,
    "stablehlo.rsqrt": lax.rsqrt,
    "stablehlo.sqrt": lax.sqrt,
}
_ROOTS = frozenset({"stablehlo.rsqrt", "stablehlo.sqrt", "stablehlo.power"})


@dataclass(frozen=True)
class Step:
    """An operation, of arrays that each device has.

    Attributes:
        name: the operation.
        operands: each is the place of an input or of an earlier step among the tail's steps; or a
            number, as a float.
        how: its parameters.
        shape: of its result.
        dtype: of its result.
    """

    name: str
    operands: tuple[int | float, ...]
    how: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    def __call__(self, known: Sequence[Any]) -> Any:
        """The result, given the inputs and results of the steps before."""
        xs = [
            lax.full(self.shape, x, self.dtype) if isinstance(x, float) else known[x]
            for x in self.operands
        ]
        if self.name in _ELEMENTWISE:
            return _ELEMENTWISE[self.name](*xs)
        if self.name == "stablehlo.convert":
            return lax.convert_element_type(xs[0], self.dtype)
        if self.name == "stablehlo.reduce":
            return lax.reduce_sum(xs[0], self.how)
        if self.name == "stablehlo.reshape":
            return lax.reshape(xs[0], self.shape)
        return lax.broadcast_in_dim(xs[0], self.shape, self.how)


@dataclass(frozen=True)
class Tail:
    """What is computed from a sum.

    Attributes:
        operations: the MLIR operations, in order.
        inputs: what else they use.
        steps: what they compute, and what computes their operands of inputs. None stands for an
            input, of which the sum is the first.
        outputs: the values that others need.
        results: their places among the steps.
    """

    operations: tuple[Any, ...]
    inputs: tuple[Any, ...]
    steps: tuple[Step | None, ...]
    outputs: tuple[Any, ...]
    results: tuple[Any, ...]

    def key(self) -> Any:
        """Identifies what it computes, but for the inputs."""
        return self.steps, self.results

    def __call__(self, total: Any, others: Sequence[Any]) -> list[Any]:
        """The outputs, from the sum and the other inputs."""
        inputs = iter((total, *others))
        known: list[Any] = []
        for step in self.steps:
            known.append(next(inputs) if step is None else step(known))
        return [known[i] for i in self.results]


class _Unreadable(Exception):
    """An operation is no step of a tail."""


class _Reader:
    """Reads the operations that a value needs as steps."""

    def __init__(self, total: Any, own: Mapping[int, Any], program: Program):
        """`own` are all operations that need the sum, by number; all else is there before."""
        self._own = own
        self._program = program
        self.inputs: list[Any] = []
        self.steps: list[Step | None] = [None]
        self.known: dict[Any, int | float] = {total: 0}

    def read(self, value: Any) -> int | float:
        """The place of a value among the steps; or the number that it is, as a float."""
        if value not in self.known:
            self.known[value] = self._read(value)
        return self.known[value]

    def _read(self, value: Any) -> int | float:
        maker = owner(value)
        is_own = maker is not None and number(maker) in self._own
        if maker is not None and (is_own or maker.name == "stablehlo.broadcast_in_dim"):
            return self._step(maker, value)
        of_constant = splat(value)
        if of_constant is not None:
            return of_constant
        self.inputs.append(value)
        self.steps.append(None)
        return len(self.steps) - 1

    def _step(self, operation: Any, value: Any) -> int | float:
        name, spec = operation.name, self._spec(value)
        first = operation.operands[0]
        if name in RESHARDS:
            self._check(self._spec(first) == spec)
            return self.read(first)
        found = aval(value)
        if found is None:
            raise _Unreadable
        shape = tuple(
            local_size((n,), (axes,), self._program.mesh.shape) or 0
            for n, axes in zip(found.shape, spec, strict=True)
        )
        self._check(0 not in shape)
        how: tuple[int, ...] = ()
        count = 1
        if name in _ELEMENTWISE or name == "stablehlo.convert":
            count = len(operation.operands)
        elif name == "stablehlo.broadcast_in_dim":
            how = tuple(ir.DenseI64ArrayAttr(operation.attributes["broadcast_dimensions"]))
        elif name == "stablehlo.reduce":
            kind = kind_of(operation)
            self._check(kind is not None and bool(kind.compute) and kind.collective == "psum")
            how = tuple(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))
        else:
            self._check(name == "stablehlo.reshape")
        refs = []
        for of in list(operation.operands)[:count]:
            ref = self.read(of)
            refs.append(ref)
            if not isinstance(ref, float):
                self._check(_is_local(name, self._shaped(of), (found.shape, spec), how))
            elif name in ("stablehlo.broadcast_in_dim", "stablehlo.convert"):
                return ref
            else:
                self._check(name in _ELEMENTWISE)
        self.steps.append(Step(name, tuple(refs), how, shape, found.dtype.name))
        return len(self.steps) - 1

    def _spec(self, value: Any) -> Spec:
        spec = self._program.spec(value)
        if spec is None:
            raise _Unreadable
        return spec

    def _shaped(self, value: Any) -> tuple[tuple[int, ...], Spec]:
        return tuple(ir.RankedTensorType(value.type).shape), self._spec(value)

    def _check(self, is_right: bool) -> None:
        if not is_right:
            raise _Unreadable


def _is_local(
    name: str,
    before: tuple[tuple[int, ...], Spec],
    after: tuple[tuple[int, ...], Spec],
    how: Sequence[int],
) -> bool:
    """Whether each device computes its part of the result from its part of an operand."""
    if name == "stablehlo.broadcast_in_dim":
        return all(
            before[1][i] == after[1][to] and before[0][i] == after[0][to]
            for i, to in enumerate(how)
            if before[0][i] > 1
        )
    if name == "stablehlo.reduce":
        left = [axes for i, axes in enumerate(before[1]) if i not in how]
        return tuple(left) == after[1] and not any(before[1][i] for i in how)
    long = [[pair for pair in zip(*of, strict=True) if pair[0] > 1] for of in (before, after)]
    return long[0] == long[1]


def tails(
    total: Any, block: Sequence[Any], start: int, members: Collection[int], program: Program
) -> Iterator[Tail]:
    """The tails of a sum that may be norms, the longest first.

    Args:
        total: the sum.
        block: the operations of its block.
        start: the place of the operation that makes it.
        members: the numbers of operations that become part of shard_maps.
        program: the program.
    """
    own: dict[int, Any] = {}
    dependent = {total}
    residual: Any = None
    ends = []
    for operation in block[start + 1 : start + _FARTHEST]:
        if operation.name in FENCES:
            break
        if not dependent.isdisjoint(operands(operation)):
            if number(operation) in members:
                break
            dependent.update(operation.results)
            if operation.name in RESHARDS and residual is None:
                own[number(operation)] = operation
            elif residual is None:
                if operation.name != "stablehlo.add":
                    return
                residual = operation.results[0]
                own[number(operation)] = operation
            else:
                own[number(operation)] = operation
                if [result.type for result in operation.results] == [total.type]:
                    ends.append(operation)
    for end in reversed(ends):
        found = _tail(total, residual, end.results[0], own, program)
        if found is not None:
            yield found


def _tail(total: Any, h: Any, y: Any, own: dict[int, Any], program: Program) -> Tail | None:
    reader = _Reader(total, own, program)
    try:
        results = reader.read(y), reader.read(h)
    except _Unreadable:
        return None
    read = {number(o) for o in map(owner, reader.known) if o is not None and number(o) in own}
    used = [each for n, each in own.items() if n in read]
    outputs = y, h
    if not any(each.name in _ROOTS for each in used) or program.spec(y) != program.spec(total):
        return None
    for each in used:
        for result in each.results:
            if result not in outputs and any(
                number(use.owner.operation) not in read for use in result.uses
            ):
                return None
    if any(number(use.owner.operation) not in read for use in total.uses):
        return None
    return Tail(tuple(used), tuple(reader.inputs), tuple(reader.steps), outputs, results)
