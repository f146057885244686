"""The watch of the peers: processes of a mesh on one host notice when one of them is gone.

The native monitor watches, without Python's lock, and ends the waits (xla_ffi/health/monitor.h).
This file connects the processes, and says goodbye at exit.
"""

import contextlib
import hashlib
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from opcode import opname
from typing import Any

import jax

from jax_intranode._src import timeouts
from jax_intranode._src.health import failures
from jax_intranode._src.jax_private import distributed, last_program
from jax_intranode._src.native import extension

# How much processor time between two looks counts as computing: a process at rest uses a third.
_COMPUTES_S = 0.002
# How many files XLA:GPU may need to compile a small program: its own and those of ptxas.
_FILES_TO_COMPILE = 16
# The outermost frame of a program: its main module, or what runs that for `python -m`.
_OUTERMOST = ("<module>", "_run_module_as_main")
_PRESENT = ("unheard", "running")
_FAULTS = ("failed", "lost")


class Watch:
    """This process's watch over its peers in one mesh, from the rendezvous to the shutdown."""

    def __init__(self, process: int):
        """Listens for peers.

        Raises:
            RuntimeError: the system does not allow it.
        """
        self.native = extension.module("cpu").PeerWatch(process)
        self._token = secrets.token_hex(32)
        self.platform = ""  # of its devices
        self.device_ids: dict[int, list[int]] = {}  # of each peer

    def hello(self) -> dict[str, str]:
        """What the other processes need to connect."""
        return {"address": self.native.address, "token": self._token}

    def connect(
        self, others: Iterable[tuple[int, str, list[int]]], tokens: Sequence[str], timeout_s: float
    ) -> None:
        """Connects with all peers, while they do the same.

        Args:
            others: the other processes of the mesh on this host: number, address, devices.
            tokens: those of all processes of the mesh. Who knows all of them is one of these.
            timeout_s: the limit in seconds.

        Raises:
            RuntimeError: a peer can't be reached; the text says which, and why.
        """
        self.device_ids = {process: ids for process, _, ids in others}
        secret = hashlib.sha256(" ".join(tokens).encode()).digest()
        self.native.connect(others, secret, min(timeout_s, timeouts.CONNECT_S))

    def arm(self, platform: str) -> None:
        """Begins to watch, when all have connected. From then on a lost peer is a failure."""
        self.platform = platform
        self.native.arm(extension.module(platform).platform(), timeouts.SILENT_S)
        _watches.append(self)
        _take_part_in_the_end()

    def close(self) -> None:
        """Says goodbye and ends the watch."""
        global _has_lost
        _has_lost = _has_lost or self.lost() is not None
        self.native.close()
        if self in _watches:
            _watches.remove(self)

    def peers(self) -> list[tuple[int, int, str, bool, str, bool]]:
        """Returns what is known of each peer.

        Process, pid, state (of xla_ffi/health/peer_table.h), whether its process has ended, how it
        went, and whether it waits in JAX's last barrier.
        """
        return self.native.peers()

    def lost(self) -> str | None:
        """How a peer was lost; None if none was."""
        return next((what for _, _, state, _, what, _ in self.peers() if state in _FAULTS), None)


def close_all() -> None:
    """Says goodbye to all peers, because of ``shutdown``."""
    for watch in list(_watches):
        watch.close()


def absence(device_ids: Iterable[int]) -> tuple[str, str] | None:
    """Why a process that has one of these devices is absent; None if all are present.

    Returns:
        The reason as in `failures.Failure`, and a clause that says which process, and why.
    """
    wanted = set(device_ids)
    for watch in list(_watches):
        for process, _, state, _, what, _ in watch.peers():
            if state not in _PRESENT and wanted & set(watch.device_ids[process]):
                return "peer_stopped" if state == "silent" else "peer_gone", what
    return None


_watches: list[Watch] = []
_takes_part = False
_fails = False  # whether this process ends because of a failure
_has_lost = False  # whether a peer was lost in a mesh that was shut down since
_pid = os.getpid()
_exit: BaseException | None = None  # what `fails_with` was told


def _take_part_in_the_end() -> None:
    """Has the peers told, once this process watches any, when it ends in order."""
    global _takes_part, _pid
    if _takes_part:
        return
    _takes_part, _pid = True, os.getpid()
    distributed.at_end_of_backends(_drain)
    distributed.bound_distributed_shutdown(_say_goodbye, _won_t_come, _after_barrier)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        with contextlib.suppress(RuntimeError):  # it is at its end already
            getattr(threading, "_register_atexit")(_end_of_child)  # noqa: B009, not in the stubs


def _end_of_child() -> None:
    """Tells the peers when the function of a process of `multiprocessing` has returned or raised.

    By the methods "fork" and "forkserver" the process may end without exit handlers. Python has
    shown an exception and forgotten it; what remains is the exit code. Threads of the program may
    go on: then they take back that this process has finished.
    """
    frame = sys._getframe()
    while frame.f_code.co_name != "_bootstrap" and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_locals.get("exitcode")
    if code:
        fails_with(RuntimeError("exit code 1") if code == 1 else SystemExit(code))
    _drain()
    for watch in [] if _fails else _watches:
        watch.native.finish()


def _uncaught() -> BaseException | None:
    """The exception that has ended the program, if one has.

    ``sys.last_exc`` is also set by consoles, debuggers, test runners and programs that show an
    exception and go on. What ends a program has passed through all frames of the main thread. So
    its traceback begins with the outermost frame, and that one stopped where the exception left it:
    where it came from, or at an instruction that raises it again.
    """
    error = getattr(sys, "last_exc" if sys.version_info >= (3, 12) else "last_value", None)
    trace = getattr(sys, "last_traceback", None)  # the program's hook may have changed the error's
    if hasattr(sys, "ps1") or trace is None:
        return None
    outermost, stopped = trace.tb_frame, trace.tb_frame.f_lasti
    code = outermost.f_code
    if outermost.f_back or code.co_name not in _OUTERMOST:
        return None
    operation, argument = code.co_code[stopped : stopped + 2]
    again = opname[operation] == "RERAISE" or (opname[operation], argument) == ("RAISE_VARARGS", 0)
    return error if stopped == trace.tb_lasti or again else None


def fails_with(error: BaseException) -> None:
    """Notes what ends a program that this package runs."""
    global _exit
    _exit = error


def _failed() -> str:
    """How this program has failed, in a line; empty if it has not."""
    error, failure = _exit or _uncaught(), failures.current()
    if failure is not None:
        return failure.message.removeprefix("jax_intranode: ").partition(". ")[0]
    if error is None:
        return ""
    text = ""
    with contextlib.suppress(Exception):  # an exception of the program may have no text
        text = str(error).strip()
    return f"{type(error).__name__}: {text}".splitlines()[0].rstrip(": .")


def _tell_failure() -> bool:
    """Tells the peers how this program has failed. Returns whether it has."""
    global _fails
    if text := _failed():
        _fails = True
        for watch in _watches:
            watch.native.fail(text.encode("ascii", "backslashreplace").decode()[:500])
    return _fails


def _drain() -> None:
    """Waits until nothing that this process has dispatched can still run.

    A program that has failed does not wait, and tells its peers here: JAX's backends may take long
    to end, because on GPUs they wait for kernels, which may wait for peers. What a program that
    ends with an error code has dispatched may serve its peers, so such a program waits a little.
    """
    if os.getpid() != _pid or not _watches:
        return
    exits = isinstance(_exit, SystemExit) and failures.current() is None
    if not exits and _tell_failure():
        return
    end = time.monotonic() + (timeouts.DRAIN_BEFORE_FAILURE_S if exits else math.inf)
    for platform in {watch.platform for watch in _watches}:
        arrays: list[Any] = []
        with contextlib.suppress(Exception):
            arrays += jax.live_arrays(platform)
            arrays += _last_results(platform)
        for array in arrays:
            with contextlib.suppress(Exception):  # who needed a result has seen its error
                while not array.is_ready() and time.monotonic() < end:
                    time.sleep(timeouts.LAST_LOOK_S)
        with contextlib.suppress(Exception):
            if platform == "gpu" and not exits:
                extension.module("gpu").synchronize()
    _tell_failure()


def _last_results(platform: str) -> list[jax.Array]:
    """Arrays that are ready when nothing runs that was dispatched before on these devices.

    Live arrays don't tell: a program whose results were dropped runs on. The result of a program
    over all local devices does, because XLA's CPU client runs such programs one after another.

    Raises OSError where few files can be opened: XLA:GPU, which needs some, would abort.
    """
    with contextlib.ExitStack() as opened:
        for _ in range(_FILES_TO_COMPILE if platform == "gpu" else 0):
            opened.enter_context(open(os.devnull))
    return last_program.results(platform)


def _say_goodbye() -> None:
    """When JAX ends with the process, and nothing of the program runs: tells the peers.

    JAX's last barrier gives up after 5 minutes, so a program that has finished waits here until
    each peer has finished, too, or is lost.

    On CPU devices something may still run: `_drain` does not wait for what another thread has
    dispatched, and not at all where the program has cleared JAX's backends itself. So this process
    takes back that it has finished while other threads use a processor. Threads of other libraries
    count, too, and may never rest. So a peer that has finished once is not awaited again: two
    processes with such threads would wait for each other.
    """
    if os.getpid() != _pid:
        return
    if not distributed.is_ending():
        # The program calls jax.distributed.shutdown() itself, and may go on, also in exit handlers.
        if not distributed.exits() or not _tell_failure():
            _after_barrier(in_barrier=True)
        return
    if _tell_failure():
        return
    for watch in _watches:
        watch.native.finish()
    on_cpu = [watch for watch in _watches if watch.platform == "cpu"]
    # Without it there is no barrier any more: the program has called jax.distributed.shutdown().
    awaits_peers = distributed.key_value_client() is not None
    finished: set[tuple[Watch, int]] = set()
    rests, told_to_rest = not on_cpu, True
    used, began = _cpu_s_of_other_threads(), time.monotonic()
    looked = began
    while not _all_have_finished(finished) and (
        awaits_peers or not (rests or looked > began + timeouts.REST_S)
    ):
        time.sleep(timeouts.LAST_LOOK_S)
        if not on_cpu or time.monotonic() - looked < timeouts.COMPUTES_LOOK_S:
            continue
        before, used, looked = used, _cpu_s_of_other_threads(), time.monotonic()
        rests = used - before < _COMPUTES_S
        if told_to_rest != rests:
            told_to_rest = rests
            for watch in on_cpu:
                (watch.native.finish if rests else watch.native.go_on)()
    if not told_to_rest:
        for watch in on_cpu:
            watch.native.finish()


def _cpu_s_of_other_threads() -> float:
    return time.process_time() - time.thread_time()


def _all_have_finished(finished: set[tuple[Watch, int]]) -> bool:
    """Whether all peers have finished, or are lost, now or before. `finished` remembers them.

    A peer that waits in JAX's last barrier, which the program has called itself, waits for this
    process.
    """
    peers = [(watch, *peer) for watch in _watches for peer in watch.peers()]
    for watch, process, _, state, _, _, waits in peers:
        if waits or state not in (*_PRESENT, "silent"):
            finished.add((watch, process))
    return all((watch, process) in finished for watch, process, *_ in peers)


def _after_barrier(in_barrier: bool = False) -> None:
    for watch in _watches:
        watch.native.set_in_barrier(in_barrier)


def _won_t_come(seconds: float, serves: bool) -> bool:
    """Whether JAX's last barrier is to be given up, so many seconds after it began."""
    peers = [peer for watch in list(_watches) for peer in watch.peers()]
    lost = _has_lost or any(state in (*_FAULTS, "silent") for _, _, state, *_ in peers)
    ended = [has_ended for _, _, _, has_ended, *_ in peers]
    if not lost and not _fails:
        # A peer that has finished ends before the barrier only where a signal ends it.
        return any(ended) and seconds > timeouts.BARRIER_S
    limit = timeouts.HOPELESS_BARRIER_S if _has_lost or any(ended) else timeouts.BARRIER_S
    if serves and not all(ended):
        limit += timeouts.LAST_S
    return seconds > limit
