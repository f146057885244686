"""The native tests (tests/test_native.py): each program's arguments, and how it must end."""

from pathlib import Path

_ROOT = Path(__file__).parent.parent.parent


def _folder(name: str) -> list[str]:
    """The C++ files of a folder of the product."""
    return [str(path.relative_to(_ROOT)) for path in sorted(_ROOT.glob(f"xla_ffi/{name}/*.cc"))]


# What is compiled with each program. Its own source is tests/native/NAME.cc, or that of the model.
_WITH = {
    "protocol_test": [],
    "host_group_test": _folder("host"),
    "fused_order_test": [],
    "failed_launch_test": ["xla_ffi/ffi/collectives_cuda.cc"],
    "gpu_monitor_test": _folder("health"),
    "handler_input_fuzz": [
        "xla_ffi/ffi/collectives_host.cc",
        "xla_ffi/ffi/communicator_host.cc",
        *_folder("host"),
    ],
    "peer_input_fuzz": [],
    "monitor_test": _folder("health"),
    "segment_test": ["xla_ffi/host/segment.cc"],
    "collectives_model": [],
    "permute_model": [],
    "ragged_model": [],
    "peer_model": [],
    "log_model": [],
    "peer_record_test": [],
    "pipeline_model": [],
}
PROGRAMS = {
    name: [str(next(_ROOT.glob(f"tests/native/**/{name}.cc")).relative_to(_ROOT)), *sources]
    for name, sources in _WITH.items()
}

# Those that also run under the sanitizers. These do not follow a model's jumps between stacks.
SANITIZED = [
    "protocol_test",
    "host_group_test",
    "monitor_test",
    "gpu_monitor_test",
    "handler_input_fuzz",
    "peer_input_fuzz",
]

# What sound programs print, as patterns. {1}, {2}: their arguments; {checked}: the results of
# ranks and rounds.
_MODEL = "sound: ranks {1} operations {2} wrong 0 (sequences|states) .*\n"
OUTPUT = {
    "protocol_test": "sound: ranks {1} calls {2} wrong 0 bytes left 0 busy 0\n|offsets: wrong 0\n",
    "host_group_test": "(.*\n)* ?.* checked {checked}\n|(.*\n)*{0}: done\n",
    "fused_order_test": "done\n",
    "failed_launch_test": "failed launch: OK\n",
    "gpu_monitor_test": "done\n",
    "handler_input_fuzz": "done\n",
    "peer_input_fuzz": "done\n",
    "monitor_test": "done\n",
    "segment_test": "done\n",
    "collectives_model": _MODEL,
    "permute_model": _MODEL,
    "ragged_model": _MODEL,
    "peer_model": _MODEL,
    "log_model": _MODEL,
    "peer_record_test": "done\n",
    "pipeline_model": _MODEL,
}

# The programs must find nothing wrong. Tiers: "quick"; "full"; and "long".
SOUND = {
    "protocol_test": {
        # A wait that lasts 30 seconds is without end.
        "quick": [
            "sound 2 300 30",
            "sound 3 200 30",
            "sound 4 100 30",
            "sound 8 60 30",
            "sound 2 100 30 mesh",
            "sound 8 100 30 mesh",
            "sound 3 300 30 permutes",
            "sound 2 300 30 ragged",
            "sound 3 300 30 experts",
            "offsets",
        ],
        "full": [
            "sound 2 2000 30",
            "sound 3 1500 30",
            "sound 4 1000 30",
            "sound 8 400 30",
            "sound 4 300 30 mesh",
            "sound 2 2000 30 permutes",
            "sound 8 400 30 permutes",
            "sound 2 2000 30 ragged",
            "sound 8 400 30 ragged",
            "sound 2 2000 30 experts",
            "sound 8 400 30 experts",
        ],
    },
    # Ranks, processes, rounds.
    "host_group_test": {
        "quick": [
            "sound 2 1 33",
            "sound 2 2 33",
            "sound 3 3 20",
            "sound 8 4 10",
            "mesh 8 4 10",
            "guards",
            "behind",
            "deadline",
            "mismatch",
            "fail",
            "bodies",
            "sites",
        ],
        "full": [
            "sound 2 1 100",
            "sound 2 2 100",
            "sound 3 3 60",
            "sound 4 2 60",
            "sound 8 1 30",
            "sound 8 4 30",
            "sound 8 8 30",
        ],
    },
    "fused_order_test": {"quick": [""]},
    "failed_launch_test": {"quick": ["", "captured", "unclosed"]},
    "gpu_monitor_test": {"quick": ["2000"], "full": ["100000"]},
    "handler_input_fuzz": {"quick": ["5000"], "full": ["20000"]},
    "peer_input_fuzz": {"full": ["300000"]},
    "monitor_test": {"quick": ["quick"], "full": [""]},
    "segment_test": {"quick": [""]},
    # Ranks, operations, and how much of their behaviours.
    "collectives_model": {
        "quick": ["sound 2 3 quick", "sound 2 4 mesh", "sound 2 1 few_rows"],
        "full": ["sound 2 4 quick", "sound 2 8 mesh", "sound 2 2 few_rows"],
        "long": [
            "sound 2 4 full",
            "sound 2 6 quick",
            "sound 2 3 every_access",
            "sound 3 2 quick",
            "sound 4 4 mesh",
            "sound 4 6 mesh",
        ],
    },
    "permute_model": {
        "quick": ["sound 2 3 quick", "sound 2 3 together"],
        "full": ["sound 2 4 together", "sound 3 2 together"],
        "long": [
            "sound 2 3 full",
            "sound 2 3 every_access",
            "sound 3 2 quick",
            "sound 3 3 together",
        ],
    },
    "ragged_model": {
        "quick": ["sound 2 2 full", "sound 2 2 experts"],
        "full": ["sound 2 3 quick", "sound 2 3 experts", "sound 3 2 experts"],
        "long": ["sound 2 3 full", "sound 3 2 quick"],
    },
    "peer_model": {"long": ["sound 2 3 full", "sound 2 4 quick", "sound 3 2 full"]},
    "log_model": {"full": ["sound 2 8", "sound 3 8"]},
    "peer_record_test": {"quick": [""]},
    "pipeline_model": {
        "full": ["sound 2 1 queue"],
        "long": ["sound 2 3 streams", "sound 3 1 streams", "sound 3 2 streams", "sound 3 1 queue"],
    },
}

_COLLECTIVES = [
    "one_epoch_buffer",  # one buffer fewer
    "never_armed",
    "armed_late",  # armed when the next operation has been run
    "first_word_only",  # the mark may arrive before the data
    "idle_epochs",  # blocks that an operation does not launch keep their epoch
    "wrong_epoch",  # a rank looks into the epoch buffer of the next operation
    "no_release",  # arming may become visible after the next operation's packets
    "no_acquire",  # packets may take a place before the arming that made room for them
    "no_fence",
    "no_segment_release",  # the same between two epochs of one operation
    "no_segment_acquire",
    "no_segment_fence",
    "short_segment",  # the last segment has fewer packs, so some threads don't work in it
    "sent_early",  # a segment is sent before the one whose place it takes has been read
    "odd_segments",  # of two phases: the next operation may take the place of an unread segment
    "no_reduce_fence",  # two-shot: sums may take a place before the arming that made room for them
]

# Of two kernels: the first one sends, and the second one awaits.
_FEW_ROWS = [
    "one_epoch_buffer",
    "never_armed",
    "first_word_only",
    "one_not_awaited",  # the sum takes what is there of one rank
    "cleared_early",  # the second kernel clears the busy words before it has read the packets
    "ended_by_first",  # the first kernel advances the epoch
    "first_early",  # a first kernel begins before the second one of the operation before has ended
]

_CUBE_MESH = [
    "one_epoch_buffer",
    "never_armed",
    "armed_late",
    "first_word_only",
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
    "one_epoch_buffer",
    "never_armed",
    "first_word_only",
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
    "one_epoch_buffer",
    "never_armed",
    "first_word_only",
]

_PEER_BUFFERS = [
    ("one_half", [2, 3]),
    ("never_cleared", [2, 3]),
    ("no_end", [2, 3]),  # End() does not wait until the peers have begun the call
    ("idle_epochs", [2]),  # blocks that a call does not launch keep their epoch
    ("no_release", [2]),  # of the words by which the ranks tell each other
    ("no_acquire", [2]),
    ("no_barrier", [2]),
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
    "no_release",  # a signal may overtake the data
    "no_acquire",
    "never_reset",  # signals of the last operation count for the next one
    "no_grant",  # a rank sends into slots that are in use
    "no_arrival",  # a rank reads slots before the data have arrived
    "one_slot_fewer",  # two slots share their memory
    "no_event",  # a stream does not wait for the one that waits for a peer
]

# Each variant breaks a protocol, and its program must find it. The first argument is the variant.
BROKEN_ENDS = "{0}: ranks {1} operations {2} ends wrong, "
# Program, arguments, tier.
BROKEN = (
    [
        ("collectives_model", variant + " 2 3", "quick" if k % 6 == 0 else "full")
        for k, variant in enumerate(_COLLECTIVES)
    ]
    + [("collectives_model", variant + " 3 3", "long") for variant in _COLLECTIVES]
    + [("collectives_model", variant + " 4 3 mesh", "full") for variant in _CUBE_MESH]
    + [
        ("collectives_model", f"{variant} {ranks} 3 few_rows", tier)
        for k, variant in enumerate(_FEW_ROWS)
        for ranks, tier in [(2, "quick" if k % 4 == 0 else "full"), (3, "full")]
    ]
    + [
        ("collectives_model", "idle_epochs 2 6 mesh", "quick"),
    ]
    + [
        ("permute_model", variant + " 2 3", "quick" if k % 6 == 0 else "full")
        for k, variant in enumerate(_PERMUTES + _PERMUTES_CHECK)
    ]
    + [("permute_model", variant + " 3 3 together", "full") for variant in _PERMUTES]
    + [
        ("ragged_model", variant + " 2 2", "quick" if k % 3 == 0 else "full")
        for k, variant in enumerate(_RAGGED)
    ]
    + [("ragged_model", variant + " 2 2 experts", "full") for variant in _RAGGED]
    + [
        ("peer_model", f"{variant} {ranks} 3", "full")
        for variant, worlds in _PEER_BUFFERS
        for ranks in worlds
    ]
    + [("log_model", f"{variant} {ranks} 5", "full") for variant in _LOG for ranks in [2, 3]]
    + [
        ("pipeline_model", f"{variant} {ranks} 2", "full")
        for variant in _PIPELINE
        for ranks in [2, 3]
    ]
)
