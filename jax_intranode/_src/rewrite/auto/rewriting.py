"""What runs when JAX has lowered a program: collectives of XLA's partitioner become ours.

A copy of the lowered program is propagated. Operations that communicate as one of their plans says
become shard_maps; if none does, XLA gets the program as JAX has lowered it. It gets that, too, if
anything here goes wrong, or if XLA refuses the copy.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import json
import logging
import math
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
from jax_intranode._src.jax_private import lowering_hooks, trace_state
from jax_intranode._src.jax_private.mlir_text import same_in_all_processes, source_of
from jax_intranode._src.ops import fallback
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.rewrite import agreement, mode, norms
from jax_intranode._src.rewrite.auto import groups, moved, overlap, plans, tails
from jax_intranode._src.rewrite.auto.bodies import Bodies
from jax_intranode._src.rewrite.auto.groups import Group, Member
from jax_intranode._src.rewrite.auto.modules import (
    RESHARDS,
    Unsuitable,
    manual_axes_attribute,
    names_around,
    number,
    operations,
)
from jax_intranode._src.rewrite.auto.operations import Candidate, find, sum_of
from jax_intranode._src.rewrite.auto.program import Program

_log = logging.getLogger("jax_intranode")

# For tests: XLA gets the propagated copy even if nothing of it was replaced.
propagated_only = False

# For tests: gathers and sums are moved on CPU devices, too, where no matmul overlaps.
moves_on_cpus = False

# Operations that take an operand as it is sharded: the ends of blocks, and those that send nothing
# if they have no plan.
_TAKE_SHARDS = frozenset(
    {"return", *(f"{dialect}.return" for dialect in ("func", "stablehlo", "sdy"))}
    | {f"stablehlo.{name}" for name in ("dot_general", "dot", "reduce")}
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
        copies: whether XLA may have to write an operand for a custom call of few rows.
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
    copies: bool = False
    in_branch: bool = False
    number: int = 0


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


# The lowered programs whose collectives of XLA's partitioner are replaced, and by which call.
divided: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


# Whether this thread is in `explaining`.
_explaining = contextvars.ContextVar("explaining", default=False)


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
    if module not in divided or mode.enabled.value not in (mode.ON, mode.AUTO) or len(devices) < 2:
        return Outcome()
    known = _outcomes.setdefault(module, {})
    ids = tuple(d.id for d in devices)
    key = ids, tuple(platforms), rendezvous.generation(ids), propagated_only
    if key not in known:
        with mode.enabled(mode.PART):
            known[key] = _rewritten(module, tuple(devices), tuple(platforms))
    if not _explaining.get():
        missed = [r for r in known[key].records if reasons.is_missed(r.reason)]
        fallback.refuse_missed(
            "Collectives that XLA's partitioner adds",
            [(record.operation, record.source, record.reason or "") for record in missed],
            f"{divided[module]} and {divided[module].replace('install', 'accelerate')}",
        )
    return known[key]


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """What this thread lowers inside is shown, and no error of JAX_INTRANODE_STRICT=1."""
    before = _explaining.set(True)
    try:
        yield
    finally:
        _explaining.reset(before)


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
        kind, text = type(error).__name__, " ".join(str(error).split())[:300]
        outcome.module, outcome.reason = None, f"{kind}: {error}"
        _log.warning("%s is left to XLA, because rewriting it failed: %s: %s", name, kind, text)
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


class _Rewriting:
    """The rewriting of one program."""

    def __init__(
        self, module: Any, name: str, devices: Any, platforms: tuple[str, ...], outcome: Outcome
    ):
        self._name = name
        self._lowered = module
        self._call = divided[module]
        self._outcome = outcome
        self._program = Program(module, devices)
        self._mesh = outcome.mesh = self._program.mesh
        self._sizes = dict(self._mesh.shape)
        self._site = LoweringSite(self._mesh, frozenset(self._mesh.axis_names), platforms)
        self._bodies = Bodies(name.removeprefix("jit_"), self._program, self._site)
        self._overlap: set[int] = set()  # the numbers of members that overlap
        self._divided = 0  # how many sums have been divided by rows
        self._new_values: dict[Any, Any] = {}  # by the values whose place they have taken
        self._dead: list[Any] = []
        self._calls = 0

    def run(self) -> None:
        """Rewrites the program; the outcome has its module if anything was replaced."""
        moves = (moves_on_cpus or self._on_gpus()) and not propagated_only
        before = self._program.copy() if moves else self._program
        blocks = self._blocks(moves)
        has_plans = any(candidate.plan for *_, candidates in blocks for candidate in candidates)
        reason = None
        if has_plans:
            reason = self._site.traced_here().reason_for_lax()
            reason = reason or agreement.reason_for_no_auto(
                self._mesh, self._call, self._fingerprint
            )
        takes = has_plans and reason is None and not propagated_only
        if moves and takes and not moves_on_cpus:
            for block, _, candidates in blocks:
                self._overlapping(block, candidates)
            # Where XLA would permute, too, divided sums have no plan. Most of them need one.
            scattered = sum(
                max(1, len(candidate.terms))
                for *_, candidates in blocks
                for candidate in candidates
                if candidate.plan is not None and candidate.plan.scatters
            )
            moves = len(self._overlap) > self._divided <= 2 * scattered
            if not moves:
                blocks = self._start_again(before)
        replacements = self._replaced(blocks, takes, reason)
        is_kept = not (replacements or propagated_only) or self._finish()
        if moves and not is_kept:
            replacements = self._replaced(self._start_again(before), takes, reason)
            is_kept = not replacements or self._finish()
        if replacements:
            text = json.dumps(sorted(replacements))
            same = self._mesh, self._call, self._fingerprint
            reason = agreement.same_everywhere(*same, text)
        if reason is None and not is_kept:
            reason = reasons.SHARDED_DIFFERENTLY
        if reason is None:
            if replacements or propagated_only:
                self._outcome.module = self._program.module
            self._log_totals()
            return
        self._outcome.reason = reason
        self._outcome.records = [
            dataclasses.replace(record, reason=record.reason or reason, jaxpr=None)
            for record in self._outcome.records
        ]

    def _fingerprint(self) -> str:
        """Identifies the program in all processes, without what differs between them."""
        text = same_in_all_processes(self._lowered)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _start_again(self, program: Program) -> list[Any]:
        """The blocks of the program without moves."""
        self._program = program
        self._overlap, self._new_values, self._dead = set(), {}, []
        self._calls = 0
        self._outcome.records.clear()
        return self._blocks(False)

    def _replaced(self, blocks: Sequence[Any], takes: bool, reason: str | None) -> list[Any]:
        """Replaces what it can in the blocks if it takes any; returns what identifies that."""
        replacements: list[Any] = []
        for block, manual_axes, candidates in blocks:
            if takes:
                replacements += self._rewrite_block(block, manual_axes, candidates)
            else:
                self._leave(candidates, reason or "for a test")
        return replacements

    def _finish(self) -> bool:
        """Prepares the program for XLA; whether XLA shards it as it is."""
        for operation in reversed(self._dead):
            operation.erase()
        return self._program.keeps_shardings()

    def _log_totals(self) -> None:
        left = sum(record.reason is not None for record in self._outcome.records)
        if self._outcome.records:
            _log.info(
                "Lowered %s: of %d matmuls, reductions and reshardings to which XLA's partitioner "
                "would add collectives, %d became %d operations of this package. XLA may "
                "communicate for others, too: explain(f, compiled=True) lists what is left.",
                *(self._name, len(self._outcome.records)),
                *(len(self._outcome.records) - left, self._calls),
            )

    def _blocks(self, moves: bool) -> list[Any]:
        """The blocks of the program, with their manual axes and candidates."""
        if moves:
            self._divided = moved.move(self._program)
        found = []
        for block, axes in self._program.blocks():
            candidates = self._candidates(block)
            if moves:
                if moved.share(candidates, self._program):
                    candidates = self._candidates(block)
                candidates = self._added_up(block, candidates)
            found.append((block, axes, candidates))
        return found

    def _overlapping(self, block: Any, candidates: Sequence[Candidate]) -> None:
        """Finds the members that become overlapped matmuls."""
        members = self._members(candidates)
        of_xla = overlap.at_the_ends(members, block)
        sharing: dict[Any, list[Member]] = {}
        for member in members:
            if member.number not in of_xla and not self._all_users_gather(member, members):
                shared = member.shared() if member.gathered() else None
                sharing.setdefault(shared or member.number, []).append(member)
        for together in sharing.values():
            if self._bodies.judged(Group(together)).overlaps:
                self._overlap.update(member.number for member in together)

    def _members(self, candidates: Sequence[Candidate]) -> list[Member]:
        """The candidates that communicate, as members."""
        gathers = {c.operation.results[0]: c for c in candidates if c.is_gather}
        members = [groups.member_of(c, gathers) for c in candidates if c.plan is not None]
        return [member for member in members if member.communicates()]

    def _candidates(self, block: Any) -> list[Candidate]:
        """The operations of a block that communicate or use what one gathers, in order."""
        candidates: list[Candidate] = []
        gathered: set[Any] = set()
        for operation in operations(block):
            if gathered.isdisjoint(operation.operands) and self._program.changes_nothing(operation):
                continue  # JAX constrains each value over Explicit axes
            candidate = find(operation, self._program)
            if candidate is None:
                continue
            if candidate.sends or not gathered.isdisjoint(candidate.values):
                candidates.append(candidate)
                if candidate.is_gather:
                    gathered.add(operation.results[0])
        return candidates

    def _added_up(self, block: Any, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates, with additions of scattered sums as one."""
        found = {candidate.operation.results[0]: candidate for candidate in candidates}
        for operation in operations(block):
            terms = [found[value] for value in operation.operands if value in found]
            if operation.name == "stablehlo.add" and len(terms) == 2:
                total = sum_of(operation, *terms)
                alone = all(len(list(value.uses)) == 1 for value in operation.operands)
                if alone and total is not None:
                    for value in operation.operands:
                        del found[value]
                    found[operation.results[0]] = total
        places = {number(operation): i for i, operation in enumerate(operations(block))}
        return sorted(found.values(), key=lambda each: places[each.number])

    # What became of an operation.

    def _leave(self, candidates: Sequence[Candidate], reason: str) -> None:
        """Records that operations are left: those without a plan for a reason of their own."""
        for candidate in candidates:
            if candidate.plan is None or candidate.sends:
                self._record(candidate, candidate.reason or reason)

    def _record(
        self,
        candidate: Candidate,
        reason: str | None,
        jaxpr: Any = None,
        sources: tuple[str, ...] = (),
        copies: bool = False,
    ) -> None:
        plan = candidate.plan
        axes = dict.fromkeys((*candidate.kind.axes, *(plan.axes if plan is not None else ())))
        around = names_around(candidate.operation)
        self._outcome.records.append(
            Record(
                candidate.kind.name,
                source_of(candidate.operation),
                tuple(aval for aval in candidate.avals if aval is not None),
                tuple(axes),
                reason,
                jaxpr,
                sources,
                in_loop="stablehlo.while" in around,
                copies=copies,
                in_branch=bool({"stablehlo.case", "stablehlo.if"} & around),
                number=candidate.number,
            )
        )

    # What of a block is replaced.

    def _rewrite_block(
        self, block: Any, manual_axes: frozenset[str], candidates: Sequence[Candidate]
    ) -> list[Any]:
        """Replaces what it can; returns what identifies that."""
        self._leave([candidate for candidate in candidates if candidate.plan is None], "")
        members = self._members(candidates)
        left = self._left_before(members, candidates, block)
        for member in members:
            if reason := left.get(member.number):
                self._record(member.candidate, reason)
        members = [member for member in members if member.number not in left]
        members = [member for member in members if not self._all_users_gather(member, members)]
        members = self._accepted(members)
        members = [self._with_norm(member, block, members) for member in members]
        replacements: list[Any] = []

        def insert(group: Group) -> list[Any]:
            replacements.append([group.members[-1].number, repr(group.key())])
            return self._insert(group, manual_axes)

        groups.replace(block, members, self._sizes, insert)
        return replacements

    def _left_before(
        self, members: Sequence[Member], candidates: Sequence[Candidate], block: Any
    ) -> dict[int, str]:
        """Why members are left whatever would run of them, by their numbers."""
        left: dict[int, str] = {}
        if self._on_gpus():
            others = [member for member in members if member.number not in self._overlap]
            left = overlap.overlapped(others, block, self._sizes)
            if overlap.permutes(block, self._program) >= len(members):
                left = {member.number: reasons.PERMUTES for member in others}
        by_number = {candidate.number: candidate for candidate in candidates}
        for member in members:
            is_scattered = member.plan.scatters and not member.kind.axes
            if is_scattered and not self._all_users_take_shards(member, by_number):
                left.setdefault(member.number, reasons.WHOLE_SUM)
        if self._on_gpus() and _share_a_reshape(candidates, left):
            for member in members:
                if member.number not in self._overlap and any(
                    1 in aval.shape for aval in member.candidate.avals
                ):
                    left.setdefault(member.number, reasons.SHORTER)
        return left

    def _on_gpus(self) -> bool:
        return self._mesh.devices.flat[0].platform == "gpu"

    def _all_users_take_shards(self, member: Member, candidates: dict[int, Candidate]) -> bool:
        """Whether all users of a scattered sum take it as it is sharded.

        XLA scatters some sums by an all-reduce, and lets the other users have all of it.
        """
        values = [member.candidate.operation.results[0]]
        while values:
            value = values.pop()
            spec = self._program.spec(value)
            for use in value.uses:
                user = use.owner.operation
                candidate = candidates.get(number(user))
                if candidate is not None:
                    if number(user) in self._program.added or candidate.plan is None:
                        return False
                    if candidate.plan.operands[use.operand_number] != spec:
                        return False
                elif user.name in RESHARDS:
                    if self._program.spec(user.results[0]) != spec:
                        return False
                    values.append(user.results[0])
                elif user.name == "stablehlo.transpose":
                    order = ir.DenseI64ArrayAttr(user.attributes["permutation"])
                    transposed = None if spec is None else tuple(spec[i] for i in order)
                    if spec is None or self._program.spec(user.results[0]) != transposed:
                        return False
                    values.append(user.results[0])
                elif user.name not in _TAKE_SHARDS:
                    alike = [result for result in user.results if result.type == value.type]
                    if not alike or self._program.spec(alike[0]) != spec:
                        return False
        return True

    def _all_users_gather(self, member: Member, members: Sequence[Member]) -> bool:
        """Whether a member is a reshard whose users are members that gather its operand."""
        if not member.candidate.is_gather:
            return False
        result = member.candidate.operation.results[0]
        gathering = {
            other.number
            for other in members
            if result in other.candidate.values
            and all(operand.value != result for operand in other.inputs)
        }
        return {number(use.owner.operation) for use in result.uses} <= gathering

    def _accepted(self, members: Sequence[Member]) -> list[Member]:
        """The members that this package would run.

        XLA gathers an array once for all operations that use it. If one of them is left, all are.
        """
        left = {
            m.number: None if m.number in self._overlap else self._bodies.judged(Group([m])).left
            for m in members
        }
        by_gather: dict[Any, list[Member]] = {}
        for member in members:
            for operand in member.gathered():
                gather = operand.value, operand.spec, operand.gathers
                by_gather.setdefault(gather, []).append(member)
        changed = True
        while changed:
            changed = False
            for sharing in by_gather.values():
                ours = [member for member in sharing if left[member.number] is None]
                if 0 < len(ours) < len(sharing):
                    left.update((member.number, reasons.SHARED) for member in ours)
                    changed = True
        for member in members:
            reason = left[member.number]
            if reason is not None and member.communicates():
                self._record(member.candidate, reason)
        return [member for member in members if left[member.number] is None]

    def _with_norm(self, member: Member, block: Any, members: Sequence[Member]) -> Member:
        """A member, with the norm behind its sum if this package makes one operation of both."""
        if len(member.plan.sums) != 1 or member.kind.axes or member.kind.collective != "psum":
            return member
        ((axes, dimension),) = [(step.axes, step.dimension) for step in member.plan.sums]
        total = member.candidate.operation.results[0]
        ranks = math.prod(self._sizes[axis] for axis in axes)
        shape = [
            plans.local_size((length,), (over,), self._sizes)
            for length, over in zip(total.type.shape, member.plan.result, strict=True)
        ]
        if dimension is not None:
            shape[dimension] *= ranks
        x = jax.ShapeDtypeStruct(shape, member.candidate.avals[0].dtype)
        if not norms.may_be_normed(x, axes, dimension, ranks, self._site):
            return member
        all_of_block = operations(block)
        start = [number(operation) for operation in all_of_block].index(member.number)
        taken = {other.number for other in members}
        for tail in tails.tails(total, all_of_block, start, taken, self._program):
            longer = member.with_tail(tail, self._program)
            if longer is not None:
                judged = self._bodies.judged(Group([longer]))
                if judged.left is None and judged.has_norm:
                    return longer
        return member

    def _insert(self, group: Group, manual_axes: frozenset[str]) -> list[Any]:
        """Inserts the shard_map of a group; returns the new operations, in order."""
        lowered = self._bodies.lowered(group)
        if lowered is None:
            if len(group.members) == 1:
                (member,) = group.members
                if member.number not in self._overlap:
                    raise RuntimeError("a shard_map is not lowered as expected")
                self._record(member.candidate, reasons.SHARED)  # not beside what it overlaps with
                return member.replaced()
            middle = len(group.members) // 2  # they may be too large together for a buffer
            halves = group.members[:middle], group.members[middle:]
            return [o for half in halves for o in self._insert(Group(half), manual_axes)]
        body, calls = lowered
        last = group.members[-1].candidate.operation
        operands, _ = group.inputs()
        new = body.clone(ip=ir.InsertionPoint(last)).operation
        for index, operand in enumerate(operands):
            new.operands[index] = self._new_values.get(operand.value, operand.value)
        if manual_axes:  # a region of a partly manual shard_map has bound these
            names = [axis for axis in self._mesh.axis_names if axis not in manual_axes]
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
            self._new_values[old] = results[-1]
        sources = tuple(source_of(member.candidate.operation) for member in group.members)
        for index, member in enumerate(group.members):
            jaxpr = None if index else self._bodies.judged(group).jaxpr
            of_first = () if index else sources
            self._record(member.candidate, None, jaxpr, of_first, group.copies())
            self._dead += member.replaced()
        self._calls += calls
        return [new, *(result.owner.operation for result in results)]


def _share_a_reshape(candidates: Sequence[Candidate], left: Collection[int]) -> bool:
    """Whether dots that XLA still partitions share an operand with a dimension of one element.

    For GPUs XLA makes dots without such dimensions before it partitions, and so all between them.
    Where a shard_map is in between, it reshapes the operand for each dot instead, and would send
    it for each.
    """
    users = Counter(
        value
        for candidate in candidates
        if candidate.kind.name == "dot_general"
        and (candidate.plan is None or candidate.number in left)
        for value in {*candidate.values}
        if 1 in ir.RankedTensorType(value.type).shape
    )
    return any(count > 1 for count in users.values())
