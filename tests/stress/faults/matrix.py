"""The cases: every fault of every process in every phase of every operation."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stress.faults import operations

WORLDS = (2, 3, 4)

# What the victim does. "stop" is SIGSTOP, "interrupt" is SIGINT, "exit" is sys.exit and "os_exit"
# is os._exit. After "shutdown", jax_intranode.shutdown(), and "away" it lives, but makes no call.
# "delay" is a second, and "late" is so long that the others report that they wait.
FAULTS = (
    *("kill", "stop", "exception", "interrupt", "exit", "os_exit", "shutdown", "away"),
    *("delay", "late"),
)

# When it does so. A kernel runs eagerly first, is captured into a CUDA graph, and then replayed.
PHASES = (
    "meeting",  # before it calls initialize()
    "in_meeting_slabs",  # in the rendezvous, before its slab is known
    "in_meeting_read",  # in the rendezvous, before the last test of the memory
    "lowering",
    "first_run",
    "second_run",
    "fourth_run",
    "inside",  # while a program runs that does the operation over and over
    "idle",  # while nobody waits for it
)

# The phases in which a victim that comes late makes an operation of ours wait.
_LATE_PHASES = ("lowering", "first_run", "fourth_run", "inside")

OPERATIONS = tuple(operations.OPERATIONS)


@dataclass(frozen=True)
class Case:
    """A case."""

    world: int  # processes, each with one device
    victim: int  # the process that fails
    fault: str  # one of FAULTS, or "none"
    phase: str
    operation: str

    def __str__(self) -> str:
        return f"{self.operation}:{self.phase}:{self.fault}:{self.victim}of{self.world}"

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.victim]

    @property
    def dies(self) -> bool:
        """Whether the victim's process ends."""
        return self.fault in ("kill", "exception", "interrupt", "exit", "os_exit")

    @property
    def raises(self) -> bool:
        """Whether the victim ends by an exception."""
        return self.fault in ("exception", "interrupt")

    @property
    def fails(self) -> bool:
        """Whether the others can't go on without the victim."""
        return self.dies or self.fault in ("stop", "shutdown", "away")

    def rest_goes_on(self, platform: str) -> bool:
        """Whether the others set up anew, without the victim. On GPUs their context is lost."""
        alone = self.world == 2 or platform == "gpu" or self.in_meeting
        return self.fault == "kill" and not alone

    @property
    def exists(self) -> bool:
        """Whether the matrix has this case."""
        # The processes agree on rewriting a program when they lower it. If one does not come within
        # 10 s, the program is left to jax.lax, which waits for it in its own way.
        agreeing = self.operation == "unedited" and self.phase in ("lowering", "first_run")
        if self.fault == "late":
            return self.phase in _LATE_PHASES and not agreeing
        # Before the rendezvous has ended there is nothing to shut down. Later shutdown() waits for
        # the programs of its process.
        if self.fault == "shutdown" and (self.in_meeting or self.phase == "inside"):
            return False
        if self.fault == "away" and self.phase == "inside":
            return False  # the program that runs makes the victim's calls
        return not (self.fault in ("stop", "shutdown", "away") and agreeing)

    @property
    def before_watch(self) -> bool:
        """Whether the processes can't know each other yet."""
        return self.phase == "meeting"

    @property
    def in_meeting(self) -> bool:
        """Whether the rendezvous has not ended when the victim fails."""
        return self.phase == "meeting" or self.phase.startswith("in_meeting")


def parse(text: str) -> Case:
    """Returns the case that a text names."""
    operation, phase, fault, numbers = text.split(":")
    victim, world = map(int, numbers.split("of"))
    case = Case(world, victim, fault, phase, operation)
    known = operation in OPERATIONS and phase in PHASES and fault in (*FAULTS, "none")
    assert known and victim < world and case.exists, f"{text} is no case"
    return case


def cases(worlds: Sequence[int]) -> list[Case]:
    """Returns all cases with these numbers of processes."""
    found = [
        Case(world, victim, fault, phase, operation)
        for operation, phase, fault, world in itertools.product(OPERATIONS, PHASES, FAULTS, worlds)
        for victim in range(world)
    ]
    return [case for case in found if case.exists]


def sample(worlds: Sequence[int], count: int, seed: int) -> list[Case]:
    """Chooses cases: every pair of fault and phase as often as the others, each case once."""
    found = cases(worlds)
    random.Random(seed).shuffle(found)
    seen: Counter[tuple[str, str]] = Counter()
    turns = []
    for case in found:
        seen[case.fault, case.phase] += 1
        turns.append((seen[case.fault, case.phase], case))
    turns.sort(key=lambda turn: turn[0])
    return [case for _, case in turns[:count]]
