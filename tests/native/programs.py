"""The native tests (tests/test_native.py): each program's arguments, and how it must end."""

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parent.parent.parent


def _folder(name: str) -> tuple[str, ...]:
    """The C++ files of a folder of the product."""
    return tuple(
        str(path.relative_to(_ROOT)) for path in sorted(_ROOT.glob(f"xla_ffi/{name}/*.cc"))
    )


@dataclass(frozen=True)
class Program:
    """A program, tests/native/NAME.cc or the model of that name, and its arguments.

    Attributes:
        quick, full, long: the arguments of sound runs, by tier, with commas between runs.
        others: what is compiled with it.
        sanitized: whether it also runs under the sanitizers, which do not follow a model's jumps
            between stacks.
    """

    quick: str = ""
    full: str = ""
    long: str = ""
    others: tuple[str, ...] = ()
    sanitized: bool = False

    def runs(self) -> list[tuple[str, str]]:
        """The tier and the arguments of each sound run."""
        tiers = {"quick": self.quick, "full": self.full, "long": self.long}
        return [(tier, run) for tier, runs in tiers.items() if runs for run in runs.split(", ")]


PROGRAMS = {
    # Ranks, calls.
    "protocol_test": Program(
        quick="2 300, 3 200, 4 100, 8 60, 3 500 permutes, 2 300 ragged, 3 300 experts, offsets",
        full="2 2000, 3 1500, 4 1000, 8 400, 2 2000 permutes, 8 400 permutes, "
        "2 2000 ragged, 8 400 ragged, 2 2000 experts, 8 400 experts",
        sanitized=True,
    ),
    # Ranks, processes, rounds.
    "host_group_test": Program(
        quick="sound 2 1 33, sound 2 2 33, sound 3 3 20, sound 8 4 10, mesh 8 4 10, others",
        full="sound 2 1 100, sound 2 2 100, sound 3 3 60, sound 4 2 60, "
        "sound 8 1 30, sound 8 4 30, sound 8 8 30",
        others=_folder("host"),
        sanitized=True,
    ),
    "fused_order_test": Program(quick="all"),
    "gpu_calls_test": Program(
        quick="2000",
        full="100000",
        others=("xla_ffi/ffi/collectives_cuda.cc", *_folder("health")),
        sanitized=True,
    ),
    "monitor_test": Program(quick="quick", full="all", others=_folder("health"), sanitized=True),
    "peer_record_test": Program(quick="all"),
    # Ranks, operations, and how much of their behaviours.
    "collectives_model": Program(
        quick="sound 2 3 quick, sound 2 4 mesh, sound 2 1 few_rows",
        full="sound 2 4 quick, sound 2 8 mesh, sound 2 2 few_rows",
        long="sound 2 4 full, sound 2 6 quick, sound 3 2 quick, sound 4 4 mesh, sound 4 6 mesh",
    ),
    "permute_model": Program(
        quick="sound 2 3 quick, sound 2 3 together",
        full="sound 2 4 together, sound 3 2 together",
        long="sound 2 3 full, sound 3 2 quick, sound 3 3 together",
    ),
    "ragged_model": Program(
        quick="sound 2 2 full, sound 2 2 experts",
        full="sound 2 3 quick, sound 2 3 experts, sound 3 2 experts",
        long="sound 2 3 full, sound 3 2 quick",
    ),
    "peer_model": Program(long="sound 2 3 full, sound 2 4 quick, sound 3 2 full"),
    "log_model": Program(full="sound 2 8, sound 3 8"),
    # Ranks, operations, what runs at the same time, random orders.
    "pipeline_test": Program(
        quick="sound 2 2 streams, sound 3 2 streams 20, sound 2 2 queue, sound 3 2 queue 20",
        full="sound 2 3 streams, sound 2 3 queue",
    ),
}


def sources(name: str) -> list[str]:
    """The C++ files of a program."""
    own = next(_ROOT.glob(f"tests/native/**/{name}.cc"))
    return [str(own.relative_to(_ROOT)), *PROGRAMS[name].others]


# Of all that send packets.
_PACKETS = [
    "one_epoch_buffer",  # one buffer fewer
    "never_armed",
    "first_word_only",  # the mark may arrive before the data
]

_COLLECTIVES = [
    *_PACKETS,
    "idle_epochs",  # blocks that an operation does not launch keep their epoch
    "wrong_epoch",  # a rank looks into the epoch buffer of the next operation
    "no_release",  # arming may become visible after the next operation's packets
    "no_acquire",  # packets may take a place before the arming that made room for them
    "no_segment_release",  # the same between two epochs of one operation
    "no_segment_acquire",
    "short_segment",  # the last segment has fewer packs, so some threads don't work in it
    "sent_early",  # a segment is sent before the one whose place it takes has been read
    "odd_segments",  # of two phases: the next operation may take the place of an unread segment
    "no_reduce_fence",  # two-shot: sums may take a place before the arming that made room for them
]

# Of two kernels: the first one sends, and the second one awaits.
_FEW_ROWS = [
    *_PACKETS,
    "one_not_awaited",  # the sum takes what is there of one rank
    "cleared_early",  # the second kernel clears the busy words before it has read the packets
    "ended_by_first",  # the first kernel advances the epoch
    "first_early",  # a first kernel begins before the second one of the operation before has ended
]

_CUBE_MESH = [
    *_PACKETS,
    "wrong_epoch",
    "no_release",
    "no_acquire",
    "wrong_relay",  # a rank writes to one that it has no link to
]

_PERMUTES = [
    "room_a_call_early",  # a rank sends when its destination has begun the call before the last one
    "no_room",  # a rank waits for its source only
    "unsigned_room",  # the comparison of two numbers of calls does not wrap
    "begun_early",  # a rank tells of the next call before it has read the packets of this one
    "begun_late",  # it tells in the kernel that has read them, so nothing orders the arming
    "no_release",  # arming may become visible after the next call is told
    "no_acquire",  # packets may take a place before the arming that made room for them
    *_PACKETS,
]

# Of the check that ranks run the same operation.
_PERMUTES_CHECK = [
    "one_operation_word",
    "told_without_room",  # a rank tells what it runs before the destination has read the last word
    "told_to_all",  # not only to destinations: nothing says that those have read the last word
]

_RAGGED = [
    "no_room",  # a rank sends windows without waiting
    "room_a_window_early",  # it sends when the window before the last one of its room is taken
    "taken_early",  # a rank tells that it has taken the next window, too
    "no_fence",  # the clearing may become visible after it is told
    "never_cleared",  # what was told in a call counts in the next one
    "no_release",  # of the end of a kernel
    "no_acquire",
    *_PACKETS,
]

_PEER_BUFFERS = [
    "one_half",
    "never_cleared",
    "no_end",  # End() does not wait until the peers have begun the call
    "idle_epochs",  # blocks that a call does not launch keep their epoch
    "no_release",  # of the words by which the ranks tell each other
    "no_acquire",
    "no_barrier",
]

_LOG = [
    "number_first",  # the number of an entry is stored before the entry
    "one_entry_more",  # the leader reuses an entry one operation too early
    "any_number",  # a process takes whatever it finds in the entry
    "no_release",
    "no_acquire",
    "no_fence",  # between operations
]

_PIPELINE = [
    "never_reset",  # signals of the last operation count for the next one
    "no_grant",  # a rank sends into slots that are in use
    "no_arrival",  # a rank reads slots before the data have arrived
    "one_slot_fewer",  # two slots share their memory
    "no_event",  # a stream does not wait for the one that waits for a peer
]

# Each variant breaks a protocol, and its program must find it.
BROKEN_ENDS = "{0}: ranks {1} operations {2} ends wrong, "
# Program, variants, arguments behind the variant, which of them are quick (every so many; 0: none),
# and the tier of the others.
_BROKEN = [
    ("collectives_model", _COLLECTIVES, "2 3", 6, "full"),
    ("collectives_model", _COLLECTIVES, "3 3", 0, "long"),
    ("collectives_model", _CUBE_MESH, "4 3 mesh", 0, "full"),
    ("collectives_model", ["idle_epochs"], "2 6 mesh", 1, "full"),
    ("collectives_model", _FEW_ROWS, "2 3 few_rows", 4, "full"),
    ("collectives_model", _FEW_ROWS, "3 3 few_rows", 0, "full"),
    ("permute_model", _PERMUTES + _PERMUTES_CHECK, "2 3", 6, "full"),
    ("permute_model", _PERMUTES, "3 3 together", 0, "full"),
    ("ragged_model", _RAGGED, "2 2", 3, "full"),
    ("ragged_model", _RAGGED, "2 2 experts", 0, "full"),
    ("peer_model", _PEER_BUFFERS, "2 3", 0, "full"),
    ("log_model", _LOG, "2 5", 0, "full"),
    ("log_model", _LOG, "3 5", 0, "full"),
    ("pipeline_test", _PIPELINE, "2 1 streams", 1, "full"),
    ("pipeline_test", ["no_arrival", "no_event"], "2 2 queue", 1, "full"),
]
# Program, arguments, tier.
BROKEN = [
    (program, f"{variant} {more}", "quick" if every and k % every == 0 else tier)
    for program, variants, more, every, tier in _BROKEN
    for k, variant in enumerate(variants)
]
