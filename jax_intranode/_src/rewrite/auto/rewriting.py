"""What runs when JAX has lowered a program: collectives of XLA's partitioner become ours.

A copy of the lowered program is propagated. Operations that communicate as one of their plans says
become shard_maps; if none does, XLA gets the program as JAX has lowered it. It gets that, too, if
anything here goes wrong, or if XLA refuses the copy.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.mlir import ir

from jax_intranode._src import reasons
from jax_intranode._src.group import rendezvous
from jax_intranode._src.health import failures
from jax_intranode._src.jax_private import lax_collectives, lowering_hooks, trace_state
from jax_intranode._src.jax_private.mlir_text import same_in_all_processes, source_of
from jax_intranode._src.ops import fallback
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.rewrite import agreement, mode, norms
from jax_intranode._src.rewrite.auto import groups, overlap, plans, tails
from jax_intranode._src.rewrite.auto.bodies import Bodies
from jax_intranode._src.rewrite.auto.groups import Group, Member
from jax_intranode._src.rewrite.auto.modules import (
    Unsuitable,
    manual_axes_attribute,
    number,
    operations,
)
from jax_intranode._src.rewrite.auto.operations import Found, find
from jax_intranode._src.rewrite.auto.program import Program
from jax_intranode._src.selection import config

_log = logging.getLogger("jax_intranode")

# For tests: XLA gets the propagated copy even if nothing of it was replaced.
propagated_only = False

# Operations without a plan that were found to send nothing, or that end a block.
_TAKES_SHARDS = frozenset(
    {
        *("func.return", "return", "stablehlo.return", "sdy.return"),
        *("stablehlo.dot_general", "stablehlo.dot", "stablehlo.reduce"),
    }
)


@dataclass(frozen=True)
class Record:
    """What became of an operation that communicates.

    Attributes:
        operation: "dot_general", "reduce", "reshard", or another name of StableHLO.
        source: the user's line.
        avals: the types of its operands, over all devices.
        axes: the mesh axes it communicates over, as far as they are known.
        reason: why it was left; None if it was replaced.
        jaxpr: if it was replaced: the shard_map that has its place. Of operations that share one,
            the first has it.
        sources: the lines of the operations that share it.
        in_loop: whether it is in a loop.
        in_branch: whether it is in a branch.
        number: its place in the program.
    """

    operation: str
    source: str
    avals: tuple[Any, ...]
    axes: tuple[str, ...]
    reason: str | None
    jaxpr: Any = None
    sources: tuple[str, ...] = ()
    in_loop: bool = False
    in_branch: bool = False
    number: int = 0

    @property
    def missed(self) -> bool:
        """Whether it was left although this package might be faster."""
        return self.reason is not None and reasons.cause_of(self.reason) == reasons.REFUSED


@dataclass
class Outcome:
    """What became of a program.

    Attributes:
        module: the program that XLA gets; None if it is the one that JAX has lowered.
        records: what became of its operations.
        mesh: the mesh; None if it is not known.
        reason: why the program was left as a whole; None if it was not.
    """

    module: Any = None
    records: list[Record] = field(default_factory=list)
    mesh: jax.sharding.Mesh | None = None
    reason: str | None = None


# By the lowered program: what became of it, by the devices and settings. XLA's cache of programs
# needs the same module each time.
_outcomes: weakref.WeakKeyDictionary[Any, dict[Any, Outcome]] = weakref.WeakKeyDictionary()


class _Explaining(threading.local):
    """Whether this thread is in `explaining`."""

    value = False


_explaining = _Explaining()


def rewrite_program(module: Any, devices: Sequence[Any], platforms: Sequence[str]) -> Any:
    """The module that XLA gets for a lowered program.

    Raises:
        RuntimeError: JAX_INTRANODE_STRICT=1, and an operation was left that might be faster here.
    """
    return outcome_of(module, devices, platforms).module or module


def outcome_of(module: Any, devices: Sequence[Any], platforms: Sequence[str]) -> Outcome:
    """What becomes of a lowered program.

    Raises:
        RuntimeError: as `rewrite_program`.
    """
    if not mode.is_auto() or len(devices) < 2:
        return Outcome()
    known = _outcomes.setdefault(module, {})
    key = tuple(d.id for d in devices), tuple(platforms), rendezvous.generation(), propagated_only
    if key not in known:
        with mode.enabled(mode.PART):
            known[key] = _rewritten(module, tuple(devices), tuple(platforms))
    if not _explaining.value:
        _refuse_if_strict(known[key])
    return known[key]


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """What this thread lowers inside is shown, and no error of JAX_INTRANODE_STRICT=1."""
    before, _explaining.value = _explaining.value, True
    try:
        yield
    finally:
        _explaining.value = before


def forget(module: Any) -> None:
    """XLA has refused what a program became: it is left as it is from now on."""
    for outcome in _outcomes.get(module, {}).values():
        outcome.module = None
        outcome.reason = reasons.REFUSED_BY_XLA


def _rewritten(module: Any, devices: Any, platforms: tuple[str, ...]) -> Outcome:
    name = ir.StringAttr(module.operation.attributes["sym_name"]).value
    outcome = Outcome()
    try:
        if not lowering_hooks.uses_shardy():
            raise Unsuitable(reasons.NO_SHARDY)
        with module.context, ir.Location.unknown(), trace_state.without_mesh():
            _Rewriting(module, name, devices, platforms, outcome).run()
            outcome.records.sort(key=lambda record: record.number)
    except Unsuitable as reason:
        outcome.module, outcome.reason = None, str(reason)
    except failures.CommunicationError:
        raise  # a peer is gone, and XLA would wait for it
    except Exception as error:
        outcome.module, outcome.reason = None, f"{type(error).__name__}: {error}"
        _log.warning(
            "%s is left to XLA, because rewriting it failed: %s: %s",
            name,
            type(error).__name__,
            " ".join(str(error).split())[:300],
        )
        _log.debug("The error in full:", exc_info=True)
        return outcome
    if outcome.reason is not None:
        # Each operation outside of jit is a program in which nothing is sharded.
        level = logging.DEBUG if outcome.reason == reasons.NOTHING_SHARDED else logging.INFO
        fallback.logger.log(level, "%s is left to XLA: %s.", name, outcome.reason)
        return outcome
    for record in outcome.records:
        if record.reason is not None:
            fallback.log_once(record.operation, record.source, "is left to XLA", record.reason)
    return outcome


def _refuse_if_strict(outcome: Outcome) -> None:
    missed = [record for record in outcome.records if record.missed]
    if not missed or not config.get().is_strict:
        return
    lines = [f"  {r.operation} at {r.source}: {r.reason}" for r in missed]
    raise RuntimeError(
        "Collectives that XLA's partitioner adds were not replaced:\n"
        + "\n".join(lines)
        + "\nJAX_INTRANODE_STRICT=1 makes this an error. Fix the causes, compile this program "
        "without install(auto=True) and accelerate(auto=True), or unset the variable."
    )


def _share_a_reshape(found: Sequence[Found], left: Collection[int]) -> bool:
    """Whether dots that XLA still partitions share an operand with a dimension of one element.

    For GPUs XLA makes dots without such dimensions before it partitions, and so all between them.
    Where a shard_map is in between, it reshapes the operand for each dot instead, and would send
    it for each.
    """
    shared = Counter(
        value
        for each in found
        if each.kind.name == "dot_general" and (each.plan is None or number(each.operation) in left)
        for value in {*each.values}
        if 1 in ir.RankedTensorType(value.type).shape
    )
    return any(count > 1 for count in shared.values())


class _Rewriting:
    """The rewriting of one program."""

    def __init__(
        self, module: Any, name: str, devices: Any, platforms: tuple[str, ...], outcome: Outcome
    ):
        self._name = name
        self._lowered = module
        self._outcome = outcome
        self._program = Program(module, devices)
        self._mesh = outcome.mesh = self._program.mesh
        self._sizes = dict(self._mesh.shape)
        self._site = LoweringSite(self._mesh, frozenset(self._mesh.axis_names), platforms)
        self._bodies = Bodies(name.removeprefix("jit_"), self._program, self._site)
        self._replaced: dict[Any, Any] = {}
        self._dead: list[Any] = []
        self._calls = 0

    def run(self) -> None:
        """Rewrites the program; the outcome has its module if anything was replaced."""
        blocks = [(block, m, self._found(block)) for block, m in self._program.blocks()]
        if not any(each.plan for _, _, found in blocks for each in found):
            for _, _, found in blocks:
                self._leave_all(found, None)
            if propagated_only:
                self._finish()
            self._log_totals()
            return
        reason = self._site.traced_here().reason_for_lax()
        if reason is None:
            reason = agreement.reason_for_no_auto(self._mesh)
        taken = []
        for block, manual, found in blocks:
            if reason is not None or propagated_only:
                self._leave_all(found, reason or "for a test")
            else:
                taken += self._rewrite_block(block, manual, found)
        if taken:
            reason = agreement.same_everywhere(
                self._mesh, self._fingerprint, json.dumps(sorted(taken))
            )
        if reason is None and (taken or propagated_only):
            reason = self._finish()
        if reason is not None:
            self._outcome.records = [
                dataclasses.replace(r, reason=r.reason or reason, jaxpr=None)
                for r in self._outcome.records
            ]
            self._outcome.reason = reason
        else:
            self._log_totals()

    def _fingerprint(self) -> str:
        """Identifies the program in all processes, without what differs between them."""
        text = same_in_all_processes(self._lowered)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _finish(self) -> str | None:
        """Gives the outcome its module; returns why the program is left, or None."""
        for operation in reversed(self._dead):
            operation.erase()
        if not self._program.keeps_shardings():
            return reasons.SHARDED_DIFFERENTLY
        self._outcome.module = self._program.module
        return None

    def _log_totals(self) -> None:
        left = sum(record.reason is not None for record in self._outcome.records)
        if self._outcome.records:
            _log.info(
                "Lowered %s: %d operations that XLA's partitioner would add collectives to became "
                "%d of this package, %d are left.",
                self._name,
                len(self._outcome.records) - left,
                self._calls,
                left,
            )

    def _found(self, block: Any) -> list[Found]:
        """The operations of a block that communicate or use what one gathers, in order."""
        found: list[Found] = []
        gathered: set[Any] = set()
        for operation in operations(block):
            each = find(operation, self._program)
            if each is not None and (each.sends or not gathered.isdisjoint(each.values)):
                found.append(each)
                if each.is_gather:
                    gathered.add(operation.results[0])
        return found

    def _leave_all(self, found: Sequence[Found], reason: str | None) -> None:
        for each in found:
            if each.plan is None:
                self._record(each, each.reason)
            elif each.sends:
                self._record(each, reason)

    def _record(
        self,
        found: Found,
        reason: str | None,
        jaxpr: Any = None,
        sources: tuple[str, ...] = (),
    ) -> None:
        plan = found.plan
        axes: dict[str, None] = dict.fromkeys(found.kind.axes)
        if plan is not None:
            for of in (*(g.axes for g in plan.gathers), *(each.axes for each in plan.sums)):
                axes.update(dict.fromkeys(of))
        around = []
        parent = found.operation.parent
        while parent is not None and parent.operation.name != "func.func":
            around.append(parent.operation.name)
            parent = parent.operation.parent
        self._outcome.records.append(
            Record(
                found.kind.name,
                source_of(found.operation),
                tuple(a for a in found.avals if a is not None),
                tuple(axes),
                reason,
                jaxpr,
                sources,
                in_loop="stablehlo.while" in around,
                in_branch=bool({"stablehlo.case", "stablehlo.if"} & {*around}),
                number=number(found.operation),
            )
        )

    def _rewrite_block(
        self, block: Any, manual: frozenset[str], found: Sequence[Found]
    ) -> list[Any]:
        """Replaces what it can; returns what identifies that."""
        gathered = {each.operation.results[0]: each for each in found if each.is_gather}
        for each in found:
            if each.plan is None:
                self._record(each, each.reason)
        members = [groups.member_of(each, gathered) for each in found if each.plan is not None]
        members = [member for member in members if member.communicates()]
        left = overlap.overlapped(members, block, self._sizes) if self._on_gpus() else {}
        if self._on_gpus() and overlap.permutes(block, self._program) >= len(members):
            left.update((number(m.found.operation), reasons.PERMUTES) for m in members)
        known = {number(each.operation): each for each in found}
        for member in members:
            if member.plan.scatters and not member.kind.axes and not self._fits(member, known):
                left.setdefault(number(member.found.operation), reasons.WHOLE_SUM)
        if self._on_gpus() and _share_a_reshape(found, left):
            for member in members:
                if any(1 in aval.shape for aval in member.found.avals):
                    left.setdefault(number(member.found.operation), reasons.SHORTER)
        for member in members:
            if reason := left.get(number(member.found.operation)):
                self._record(member.found, reason)
        members = [m for m in members if number(m.found.operation) not in left]
        members = [m for m in members if not self._is_only_joined(m, members)]
        taken: list[Any] = []

        def insert(group: Group) -> list[Any]:
            taken.append([number(group.members[-1].found.operation), repr(group.key())])
            return self._insert(group, manual)

        members = self._accepted(members)
        normed = [self._with_norm(m, block, members) for m in members]
        groups.replace(block, normed, self._sizes, insert)
        return taken

    def _accepted(self, members: list[Any]) -> list[Any]:
        """The members that this package would run.

        XLA gathers an array once for all operations that use it. If one of them is left, all are.
        """
        left = {id(m): self._bodies.judged(Group([m])).left for m in members}
        by_gather: dict[Any, list[Any]] = {}
        for member in members:
            for one in member.gathered():
                by_gather.setdefault((one.value, one.spec, one.gathers), []).append(member)
        todo = [m for m in members if left[id(m)] is not None]
        while todo:
            member = todo.pop()
            for sharing in by_gather.values():
                if any(other is member for other in sharing):
                    for other in sharing:
                        if left[id(other)] is None:
                            left[id(other)] = reasons.SHARED
                            todo.append(other)
        for member in members:
            reason = left[id(member)]
            if reason is not None and member.communicates():
                self._record(member.found, reason)
        return [m for m in members if left[id(m)] is None]

    def _with_norm(self, member: Member, block: Any, members: Sequence[Member]) -> Member:
        """A member, with the norm behind its sum if this package makes one operation of both."""
        if len(member.plan.sums) != 1 or member.kind.axes or member.kind.collective != "psum":
            return member
        (of,) = member.plan.sums
        total = member.found.operation.results[0]
        ranks = math.prod(self._sizes[axis] for axis in of.axes)
        shape = [
            plans.local_size((n,), (axes,), self._sizes)
            for n, axes in zip(total.type.shape, member.plan.result, strict=True)
        ]
        if of.dimension is not None:
            shape[of.dimension] *= ranks
        kind = "psum" if of.dimension is None else "psum_scatter"
        collective = lax_collectives.LaxCollective(
            kind, of.axes, False, None, False, of.dimension or 0, True, ranks, 0
        )
        x = jax.ShapeDtypeStruct(shape, member.found.avals[0].dtype)
        if not norms.may_be_normed(x, collective, self._site):
            return member
        all_of_block = operations(block)
        numbers = [number(operation) for operation in all_of_block]
        taken = {number(m.found.operation) for m in members}
        start = numbers.index(number(member.found.operation))
        for tail in tails.tails(total, all_of_block, start, taken, self._program):
            longer = member.with_tail(tail, self._program)
            if longer is not None:
                judged = self._bodies.judged(Group([longer]))
                if judged.left is None and judged.has_norm:
                    return longer
        return member

    def _on_gpus(self) -> bool:
        return self._mesh.devices.flat[0].platform == "gpu"

    def _fits(self, member: Any, known: dict[int, Found]) -> bool:
        """Whether all users of a scattered sum take it as it is sharded.

        XLA scatters some sums by an all-reduce, and lets the other users have all of it.
        """
        todo = [member.found.operation.results[0]]
        while todo:
            value = todo.pop()
            spec = self._program.spec(value)
            for use in value.uses:
                user = use.owner.operation
                each = known.get(number(user))
                if each is not None:
                    if number(user) in self._program.added:
                        return False
                    if each.plan is None or each.plan.operands[use.operand_number] != spec:
                        return False
                elif user.name in ("sdy.reshard", "sdy.sharding_constraint"):
                    if self._program.spec(user.results[0]) != spec:
                        return False
                    todo.append(user.results[0])
                elif user.name == "stablehlo.transpose":
                    order = ir.DenseI64ArrayAttr(user.attributes["permutation"])
                    if spec is None or self._program.spec(user.results[0]) != tuple(
                        spec[i] for i in order
                    ):
                        return False
                    todo.append(user.results[0])
                elif user.name not in _TAKES_SHARDS:
                    same = [r for r in user.results if r.type == value.type]
                    if not same or self._program.spec(same[0]) != spec:
                        return False
        return True

    def _is_only_joined(self, reshard: Any, members: Sequence[Any]) -> bool:
        """Whether all users of a reshard gather its operand themselves."""
        if not reshard.found.is_gather:
            return False
        result = reshard.found.operation.results[0]
        joined = {
            number(m.found.operation)
            for m in members
            if result in m.found.values and result not in [one.value for one in m.inputs]
        }
        return {number(use.owner.operation) for use in result.uses} <= joined

    def _insert(self, group: Group, manual: frozenset[str]) -> list[Any]:
        body = self._bodies.lowered(group)
        if body is None and len(group.members) > 1:
            alone = [self._insert(Group([m]), manual) for m in group.members]
            return [each for one in alone for each in one]
        if body is None:
            raise RuntimeError("a shard_map is not lowered as expected")
        last = group.members[-1].found.operation
        inputs, _ = group.inputs()
        new = body.operation.clone(ip=ir.InsertionPoint(last)).operation
        for index, one in enumerate(inputs):
            new.operands[index] = self._replaced.get(one.value, one.value)
        if manual:  # a region of a partly manual shard_map has bound these
            names = [a for a in self._mesh.axis_names if a not in manual]
            new.attributes["manual_axes"] = manual_axes_attribute(names)
        # XLA gives the results of a manual computation other shardings where simplifications, such
        # as of two reshapes, leave its users nothing to do; not where something is in between.
        outputs = [(value, m.plan.result) for m in group.members for value in m.outputs()]
        results = []
        for (old, spec), result in zip(outputs, new.results, strict=True):
            if result.type != old.type:
                raise RuntimeError(f"{result.type} would take the place of {old.type}")
            results.append(self._program.constrained(result, spec, last))
            old.replace_all_uses_with(results[-1])
            self._replaced[old] = results[-1]
        sources = tuple(source_of(member.found.operation) for member in group.members)
        for index, member in enumerate(group.members):
            jaxpr = body.judged.jaxpr if index == 0 else None
            self._record(member.found, None, jaxpr, () if index else sources)
            self._dead += member.replaced()
        self._calls += body.calls
        return [new, *(result.owner.operation for result in results)]
