"""The C++ tests: the protocols, the CPU groups, the watch and the order of fused kernels' tiles.

Models run the protocols in all behaviours of few ranks (tests/native/model). The full tier runs
more of them. There the protocols, the CPU groups and the watch also run under ThreadSanitizer,
AddressSanitizer and UndefinedBehaviorSanitizer.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parent.parent
NATIVE = Path(__file__).parent / "native"
SOURCES = {
    "protocol_test": [NATIVE / "protocol_test.cc"],
    "host_group_test": [
        NATIVE / "host_group_test.cc",
        ROOT / "xla_ffi/host/host_group.cc",
        ROOT / "xla_ffi/host/progress.cc",
    ],
    "fused_order_test": [NATIVE / "fused_order_test.cc"],
    "peer_test": [
        NATIVE / "peer_test.cc",
        ROOT / "xla_ffi/host/host_group.cc",
        ROOT / "xla_ffi/host/progress.cc",
    ],
    "failed_launch_test": [
        NATIVE / "failed_launch_test.cc",
        ROOT / "xla_ffi/ffi/collectives_cuda.cc",
    ],
    "peer_input_fuzz": [NATIVE / "peer_input_fuzz.cc"],
    "monitor_test": [
        NATIVE / "monitor_test.cc",
        ROOT / "xla_ffi/health/monitor.cc",
        ROOT / "xla_ffi/health/peer_socket.cc",
    ],
    "machine_test": [NATIVE / "model/machine_test.cc"],
    "collectives_model": [NATIVE / "model/collectives_model.cc"],
    "peer_model": [NATIVE / "model/peer_model.cc"],
    "log_model": [NATIVE / "model/log_model.cc"],
    "health_model": [NATIVE / "model/health_model.cc"],
    "pipeline_model": [NATIVE / "model/pipeline_model.cc"],
    "fused_model": [NATIVE / "model/fused_model.cc"],
}
FLAGS = {
    "plain": [],
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
BUILDS = ("plain", *(pytest.param(b, marks=pytest.mark.full) for b in ("thread", "address")))
# Exit status 66 is that of a race. The programs themselves never exit with it.
_SANITIZER = {"TSAN_OPTIONS": "halt_on_error=1 atexit_sleep_ms=100 exitcode=66"}
_RACE = """
#include <thread>
int shared = 0;
int main() {
  std::thread a([] { for (int i = 0; i < 100000; ++i) ++shared; });
  std::thread b([] { for (int i = 0; i < 100000; ++i) ++shared; });
  a.join();
  b.join();
}
"""


def run(*command: str | Path, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **_SANITIZER},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


class Programs:
    """Compiles each program when a test first asks for it."""

    def __init__(self, directory: Path, build: str):
        self._directory = directory
        self._flags = FLAGS[build]
        compiler = shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            pytest.skip("no C++ compiler (c++ or g++) on PATH")
        self._compiler = compiler
        if build == "thread":
            self._skip_unless_sanitizer_works()

    def _compile(self, program: Path, sources: list[Path]) -> subprocess.CompletedProcess[str]:
        optimize = "-O2" if program.name.endswith("_model") else "-O1"
        return run(
            self._compiler, "-std=c++20", optimize, "-g1", *self._flags, "-I", str(ROOT),
            "-I", str(NATIVE / "model/fake_cuda"), "-I", jax.ffi.include_dir(), "-pthread",
            *map(str, sources), "-o", str(program), timeout_s=200,
        )  # fmt: skip

    def _skip_unless_sanitizer_works(self) -> None:
        source, program = self._directory / "race.cc", self._directory / "race"
        source.write_text(_RACE)
        compiled = self._compile(program, [source])
        if compiled.returncode != 0:
            pytest.skip(f"ThreadSanitizer can't be linked: {compiled.stdout[-300:]}")
        outcome = run(program)
        if outcome.returncode != 66:
            pytest.skip(f"ThreadSanitizer does not run here: {outcome.stdout[-300:]}")

    def get(self, name: str) -> Path:
        program = self._directory / name
        if not program.exists():
            compiled = self._compile(program, SOURCES[name])
            assert compiled.returncode == 0, compiled.stdout
        return program


@pytest.fixture(scope="module", params=BUILDS)
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp(request.param), request.param)


def quick_and_full(*loops: tuple[int, ...]) -> list[Any]:
    """The quick tier runs a third of the loops, whose number comes last."""
    quick = [(*parameters, count // 3) for *parameters, count in loops]
    return quick + [pytest.param(*loop, marks=pytest.mark.full) for loop in loops]


@pytest.mark.parametrize(
    ("ranks", "calls"), quick_and_full((2, 2000), (3, 1500), (4, 1000), (8, 400))
)
def test_sound_protocols(programs: Programs, ranks: int, calls: int) -> None:
    outcome = run(programs.get("protocol_test"), "sound", str(ranks), str(calls), "30")
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == f"sound: ranks {ranks} calls {calls} wrong 0 bytes left 0 busy 0\n"


def test_messages_of_more_than_4_gib(programs: Programs) -> None:
    outcome = run(programs.get("protocol_test"), "offsets")
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == "offsets: wrong 0\n"


@pytest.mark.parametrize(("ranks", "calls"), [(2, 100), (4, 300), (8, 200)])
def test_sound_protocol_of_a_cube_mesh(programs: Programs, ranks: int, calls: int) -> None:
    arguments = ("sound", str(ranks), str(calls), "30", "mesh")
    outcome = run(programs.get("protocol_test"), *arguments)
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == f"sound: ranks {ranks} calls {calls} wrong 0 bytes left 0 busy 0\n"


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize("variant", ["one_epoch_buffer", "never_armed", "first_word_only"])
def test_broken_protocol_of_a_cube_mesh_is_found(programs: Programs, variant: str) -> None:
    outcome = run(programs.get("protocol_test"), variant, "8", "300", "1", "mesh")
    assert outcome.returncode == 1, outcome.stdout


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
def test_a_byte_along_no_link_is_found(programs: Programs) -> None:
    """A rank takes another one for its relay, to which it has no link, and so no address."""
    outcome = run(programs.get("protocol_test"), "wrong_relay", "8", "10", "5", "mesh")
    assert outcome.returncode == -signal.SIGSEGV, outcome.stdout


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("variant", "ends"),
    [
        # A rank that has ended operation e writes packets of e + 1 where a peer still awaits e.
        ("one_epoch_buffer", "waits"),
        # A rank takes the packets of e for those of e + 2.
        ("never_armed", "waits or is wrong"),
        # A rank takes the words of a packet that arrive late for those of the next packet.
        ("first_word_only", "waits or is wrong"),
        # A block that was not launched for some operations writes into the epoch buffer that the
        # blocks of the same number don't read.
        ("idle_epochs", "waits"),
        # An all-to-all in place stores packs that another thread has not sent yet.
        ("other_thread", "waits or is wrong"),
        # The last of several segments has fewer packs, so some threads don't work in it.
        ("short_segment", "waits or is wrong"),
        # A rank tells its next operation before a peer has read what it ran in the last one.
        ("one_operation_word", "waits"),
        # No fault of the protocol: one rank runs another operation, once.
        ("other_operation", "is wrong"),
    ],
)
def test_broken_protocol_is_found(programs: Programs, variant: str, ends: str, ranks: int) -> None:
    # Variants that should not wait for ever get more time, so that a slow machine passes.
    patience = "1" if "waits" in ends else "10"
    for _ in range(3):  # a fault shows only where threads overtake each other
        outcome = run(programs.get("protocol_test"), variant, str(ranks), "300", patience)
        if outcome.returncode == 1:
            break
    assert outcome.returncode == 1, outcome.stdout
    waits = "a wait without end" in outcome.stdout
    is_wrong = f"{variant}: ranks {ranks} " in outcome.stdout and " wrong 0 " not in outcome.stdout
    assert ("waits" in ends and waits) or ("is wrong" in ends and is_wrong), outcome.stdout
    assert "busy 1" not in outcome.stdout


@pytest.mark.parametrize(
    ("ranks", "processes", "rounds"),
    quick_and_full(
        *((2, 1, 100), (2, 2, 100), (3, 3, 60), (4, 2, 60), (8, 1, 30), (8, 4, 30), (8, 8, 30))
    ),
)
def test_cpu_groups(programs: Programs, ranks: int, processes: int, rounds: int) -> None:
    arguments = [str(n) for n in (ranks, processes, rounds)]
    outcome = run(programs.get("host_group_test"), "sound", *arguments)
    assert outcome.returncode == 0, outcome.stdout
    assert f"checked {ranks * 12 * rounds}\n" in outcome.stdout


def test_cpu_groups_on_a_cube_mesh(programs: Programs) -> None:
    outcome = run(programs.get("host_group_test"), "mesh", "8", "4", "10")
    assert outcome.returncode == 0, outcome.stdout
    assert f"checked {8 * 12 * 10}\n" in outcome.stdout


def test_no_byte_outside_of_a_result_is_written(programs: Programs) -> None:
    outcome = run(programs.get("host_group_test"), "guards")
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == "guards: done\n"


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
def test_order_of_fused_matmuls(programs: Programs) -> None:
    outcome = run(programs.get("fused_order_test"))
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == "done\n"


@pytest.mark.parametrize("mode", ["deadline", "mismatch", "fail"])
def test_cpu_groups_report_failures(programs: Programs, mode: str) -> None:
    outcome = run(programs.get("host_group_test"), mode)
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout.endswith(f"{mode}: done\n")


@pytest.mark.parametrize("cases", ["quick", pytest.param("all", marks=pytest.mark.full)])
def test_watch_of_the_peers(programs: Programs, cases: str) -> None:
    """Processes that end in each way, and what their peers are told."""
    outcome = run(programs.get("monitor_test"), *([] if cases == "all" else [cases]))
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == "done\n"


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "calls"), [(2, 300), (3, 200), (4, 200)])
def test_peer_buffers(programs: Programs, ranks: int, calls: int) -> None:
    outcome = run(programs.get("peer_test"), "sound", str(ranks), str(calls))
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == f"sound: ranks {ranks} calls {calls} wrong 0\n"


@pytest.mark.full
def test_a_body_is_stopped_before_its_call_fails(programs: Programs) -> None:
    outcome = run(programs.get("peer_test"), "stop")
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == "stop: wrong 0\n"


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
def test_a_failed_launch_ends_a_communicator(programs: Programs) -> None:
    outcome = run(programs.get("failed_launch_test"))
    assert outcome.returncode == 0, outcome.stdout


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
def test_each_wait_of_a_body_is_timed_by_itself(programs: Programs) -> None:
    outcome = run(programs.get("peer_test"), "timer")
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == "timer: wrong 0\n"


@pytest.mark.full
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize("variant", ["one_half", "never_cleared"])
def test_broken_peer_buffers_are_found(programs: Programs, variant: str) -> None:
    outcome = run(programs.get("peer_test"), variant, "3", "300", "2")
    assert outcome.returncode == 1, outcome.stdout


@pytest.mark.full
def test_random_input_from_peers(programs: Programs) -> None:
    outcome = run(programs.get("peer_input_fuzz"), "300000")
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == "done\n"


def only_full(*parameters: Any) -> Any:
    return pytest.param(*parameters, marks=[pytest.mark.full, pytest.mark.timeout(1200)])


def run_model(programs: Programs, name: str, *arguments: str | int) -> str:
    """Runs a model and returns its last line."""
    outcome = run(programs.get(name), *map(str, arguments), timeout_s=1200)
    assert outcome.returncode in (0, 1), outcome.stdout
    return outcome.stdout.splitlines()[-1]


@pytest.mark.full
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
def test_checker_of_models(programs: Programs) -> None:
    assert run_model(programs, "machine_test") == "done"


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize(
    ("ranks", "operations", "depth"),
    [
        (2, 4, "quick"),
        only_full(2, 4, "full"),
        only_full(2, 8, "quick"),
        only_full(2, 3, "every_access"),
        only_full(3, 4, "full"),
    ],
)
def test_model_of_collectives(programs: Programs, ranks: int, operations: int, depth: str) -> None:
    line = run_model(programs, "collectives_model", "sound", ranks, operations, depth)
    assert line.startswith(f"sound: ranks {ranks} operations {operations} wrong 0 sequences "), line
    print(line)


BROKEN_COLLECTIVES = [
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
    "no_reduce_fence",  # two-shot: sums may take a place before the arming that made room for them
]


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize(
    ("ranks", "operations"), [(2, 4), only_full(2, 8), only_full(4, 4), only_full(4, 6)]
)
def test_model_of_a_cube_mesh(programs: Programs, ranks: int, operations: int) -> None:
    line = run_model(programs, "collectives_model", "sound", ranks, operations, "mesh")
    assert line.startswith(f"sound: ranks {ranks} operations {operations} wrong 0 sequences "), line
    print(line)


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize(
    ("variant", "ranks", "operations"),
    [
        *(
            (variant, 4, 3)
            for variant in (
                "one_epoch_buffer",
                "never_armed",
                "armed_late",
                "first_word_only",
                "wrong_epoch",
                "no_release",
                "no_acquire",
                "wrong_relay",  # a rank writes to one that it has no link to
            )
        ),
        ("idle_epochs", 2, 6),
    ],
)
def test_model_finds_a_broken_cube_mesh(
    programs: Programs, variant: str, ranks: int, operations: int
) -> None:
    line = run_model(programs, "collectives_model", variant, ranks, operations, "mesh")
    assert line.startswith(f"{variant}: ranks {ranks} operations {operations} ends wrong, "), line


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize("ranks", [2, only_full(3)])
@pytest.mark.parametrize("variant", BROKEN_COLLECTIVES)
def test_model_finds_broken_collectives(programs: Programs, variant: str, ranks: int) -> None:
    line = run_model(programs, "collectives_model", variant, ranks, 3)
    assert line.startswith(f"{variant}: ranks {ranks} operations 3 ends wrong, "), line


@pytest.mark.full
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize(("ranks", "calls"), [(2, 8), (3, 8)])
def test_model_of_log(programs: Programs, ranks: int, calls: int) -> None:
    line = run_model(programs, "log_model", "sound", ranks, calls)
    assert line.startswith(f"sound: ranks {ranks} operations {calls} wrong 0 states "), line
    print(line)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize(
    ("ranks", "calls", "depth"), [(2, 3, "full"), (2, 4, "quick"), (3, 2, "full")]
)
def test_model_of_peer_buffers(programs: Programs, ranks: int, calls: int, depth: str) -> None:
    line = run_model(programs, "peer_model", "sound", ranks, calls, depth)
    assert line.startswith(f"sound: ranks {ranks} operations {calls} wrong 0 sequences "), line
    print(line)


@pytest.mark.full
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [
        *((variant, ranks) for variant in ("one_half", "never_cleared") for ranks in (2, 3)),
        ("no_end", 2),  # End() does not wait until the peers have begun the call
        ("no_end", 3),
        ("idle_epochs", 2),  # blocks that a call does not launch keep their epoch
        ("no_release", 2),  # of the words by which the ranks tell each other
        ("no_acquire", 2),
        ("no_barrier", 2),
    ],
)
def test_model_finds_broken_peer_buffers(programs: Programs, variant: str, ranks: int) -> None:
    line = run_model(programs, "peer_model", variant, ranks, 3)
    assert line.startswith(f"{variant}: ranks {ranks} operations 3 ends wrong, "), line


BROKEN_LOG = [
    "number_first",  # the number of an entry is stored before the entry
    "one_entry_more",  # the leader reuses an entry one operation too early
    "any_number",  # a process takes whatever it finds in the entry
    "no_release",
    "no_acquire",
    "no_fence",  # between operations
]


@pytest.mark.full
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("variant", BROKEN_LOG)
def test_model_finds_broken_log(programs: Programs, variant: str, ranks: int) -> None:
    line = run_model(programs, "log_model", variant, ranks, 5)
    assert line.startswith(f"{variant}: ranks {ranks} operations 5 ends wrong, "), line


@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize(
    ("processes", "stops", "places"),
    [(2, 0, "quick"), only_full(2, 2, "all"), only_full(3, 2, "all")],
)
def test_model_of_health(programs: Programs, processes: int, stops: int, places: str) -> None:
    line = run_model(programs, "health_model", "sound", processes, stops, places)
    assert line.startswith(f"sound: ranks {processes} operations {stops} wrong 0 states "), line
    print(line)


BROKEN_HEALTH = [
    "end_first",  # an end is judged before the socket has been read
    "proc_last",  # /proc is asked when the socket has been read
    "silence_first",  # a silence is judged before the socket has been read
    "reset_is_end",  # what a peer sent before it closed its socket is not read
    "forgets_before_arm",  # what came before the watch was armed is dropped
    "no_goodbye",  # nobody remembers that a peer has finished
    "stays_silent",  # a peer that is heard again is not present again
    "stays_finished",  # a call after the end takes nothing back
    "last_fault",  # the last fault of a peer counts, not the first one
    "socket_only",  # only the socket tells of an end
    "one_bit",  # the return of one peer clears the absence of all
    "no_patience",  # a call gives up at once for a peer that may come back
    "close_any_time",  # Close() does not wait until the platform has been told
]


@pytest.mark.full
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize("variant", BROKEN_HEALTH)
def test_model_finds_broken_health(programs: Programs, variant: str) -> None:
    processes = 3 if variant == "one_bit" else 2
    line = run_model(programs, "health_model", variant, processes, 1, "quick")
    assert line.startswith(f"{variant}: ranks {processes} operations 1 ends wrong, "), line


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize(
    ("ranks", "operations", "order"),
    [
        (2, 3, "streams"),
        (3, 1, "streams"),
        (3, 2, "streams"),
        (2, 1, "queue"),
        (3, 1, "queue"),
    ],
)
def test_model_of_pipeline(programs: Programs, ranks: int, operations: int, order: str) -> None:
    line = run_model(programs, "pipeline_model", "sound", ranks, operations, order)
    assert line.startswith(f"sound: ranks {ranks} operations {operations} wrong 0 sequences "), line
    print(line)


BROKEN_PIPELINE = [
    "no_release",  # a signal may overtake the data
    "no_acquire",
    "never_reset",  # signals of the last operation count for the next one
    "no_grant",  # a rank sends into slots that are in use
    "no_arrival",  # a rank reads slots before the data have arrived
    "one_slot_fewer",  # two slots share their memory
    "no_event",  # a stream does not wait for the one that waits for a peer
]


@pytest.mark.full
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("variant", BROKEN_PIPELINE)
def test_model_finds_broken_pipeline(programs: Programs, variant: str, ranks: int) -> None:
    line = run_model(programs, "pipeline_model", variant, ranks, 2)
    assert line.startswith(f"{variant}: ranks {ranks} operations 2 ends wrong, "), line


@pytest.mark.full
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize(
    ("ranks", "operations", "products"),
    [(2, 6, "copied"), (3, 4, "copied"), (2, 6, "direct"), (3, 3, "direct")],
)
def test_model_of_fused(programs: Programs, ranks: int, operations: int, products: str) -> None:
    line = run_model(programs, "fused_model", "sound", ranks, operations, products)
    assert line.startswith(f"sound: ranks {ranks} operations {operations} wrong 0 sequences "), line
    print(line)


BROKEN_FUSED = [
    ("flag_first", "copied"),  # the flag is set before the data are written
    ("no_fence", "copied"),
    ("no_acquire", "copied"),
    ("no_grant", "copied"),  # a rank writes into a ring that is in use
    ("any_flag", "copied"),  # the flag of an earlier operation counts
    ("any_grant", "copied"),  # the grant of an earlier operation counts
    ("own_number", "copied"),  # flags get the sender's number, not the receiver's
    ("granted_early", "copied"),  # the ring is granted to the next operation during this one
    ("no_fence", "direct"),
    ("no_acquire", "direct"),
]


@pytest.mark.full
@pytest.mark.parametrize("programs", ["plain"], indirect=True)
@pytest.mark.parametrize(("variant", "products"), BROKEN_FUSED)
def test_model_finds_broken_fused(programs: Programs, variant: str, products: str) -> None:
    line = run_model(programs, "fused_model", variant, 3, 3, products)
    assert line.startswith(f"{variant}: ranks 3 operations 3 ends wrong, "), line
