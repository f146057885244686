"""The watch of the peers: processes of a mesh on one host notice when one of them is gone.

The native module watches, without Python's lock, and ends the waits (xla_ffi/host/peer_watch.h).
This file connects the processes, reports what the watch finds, and says goodbye at exit.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jax_intranode._src import compat, failures, native

_log = logging.getLogger("jax_intranode")

# How long a process may be silent until it counts as stopped. JAX ends all processes when one has
# been silent for 100 s.
SILENT_S = 30.0
# How long the processes of a mesh may take to connect after all have come to the rendezvous.
_CONNECT_S = 30.0
# How long, at the end of a process after a failure, JAX's last barrier may take: while all peers
# run, and when one has ended, which won't come.
_BARRIER_S = 5.0
_HOPELESS_BARRIER_S = 0.5
# How long the process with JAX's coordination service then waits for its peers to end: when it
# ends, JAX aborts those that are left.
_LAST_S = 5.0
# How often a process that has finished looks whether its peers have.
_LOOK_S = 0.02
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True)
class Peer:
    """A process of the mesh on this host.

    Attributes:
        process: its number.
        address: where it listens.
        device_ids: its devices in the mesh.
    """

    process: int
    address: str
    device_ids: tuple[int, ...]


class Watch:
    """This process's watch over its peers in one mesh, from the rendezvous to the shutdown."""

    def __init__(self, process: int):
        """Listens for peers.

        Raises:
            RuntimeError: the system does not allow it.
        """
        self._native = native.module("cpu").PeerWatch(process)
        self._token = secrets.token_hex(32)
        self._platform = ""
        self.device_ids: dict[int, tuple[int, ...]] = {}
        self._reported: set[int] = set()
        self._stopped: set[int] = set()

    def hello(self) -> dict[str, str]:
        """What the other processes need to connect."""
        return {"address": self._native.address, "token": self._token}

    def connect(self, peers: Sequence[Peer], tokens: Sequence[str], timeout_s: float) -> None:
        """Connects with all peers, while they do the same.

        Args:
            peers: the other processes of the mesh on this host.
            tokens: those of all processes of the mesh. Who knows all of them is one of these.
            timeout_s: the limit in seconds.

        Raises:
            RuntimeError: a peer can't be reached; the text says which, and why.
        """
        self.device_ids = {peer.process: peer.device_ids for peer in peers}
        self._native.connect(
            [(peer.process, peer.address, list(peer.device_ids)) for peer in peers],
            hashlib.sha256(" ".join(tokens).encode()).digest(),
            min(timeout_s, _CONNECT_S),
        )

    def arm(self, platform: str) -> None:
        """Begins to watch, when all have connected. From then on a lost peer is a failure."""
        self._platform = platform
        self._native.arm(native.module(platform).peer_sink(), SILENT_S)
        _watches.append(self)
        _follow()

    @property
    def platform(self) -> str:
        """The platform of its devices."""
        return self._platform

    def announce(self) -> None:
        """Tells new communicators of the peers that are gone already."""
        self._native.announce()

    def close(self) -> None:
        """Says goodbye and ends the watch."""
        global _has_lost
        _has_lost = _has_lost or self.lost() is not None
        self._native.close()
        if self in _watches:
            _watches.remove(self)
        if not _watches and self._platform == "gpu":
            native.module("gpu").forget_peers()

    def finish(self) -> None:
        """Tells the peers that the program has come to its end, and that nothing of it runs."""
        self._native.finish()

    def fail(self, text: str) -> None:
        """Tells the peers that the process ends because of a failure."""
        self._native.fail(text.encode("ascii", "backslashreplace").decode()[:500])

    def peers(self) -> list[tuple[int, int, str, bool, str]]:
        """For each peer: process, pid, state, whether it has ended, and how it went.

        The state is "present", "gone", "stopped" or "dead".
        """
        return self._native.peers()

    def lost(self) -> str | None:
        """How a peer was lost; None if none was."""
        return next((what for _, _, state, _, what in self.peers() if state == "dead"), None)

    def new_failures(self) -> Iterator[failures.Failure]:
        """The failures that this has not returned before. Logs which peers stop and come back."""
        for process, _, state, _, what in self.peers():
            if state == "stopped" and process not in self._stopped:
                self._stopped.add(process)
                _log.warning("jax_intranode: %s. Calls that wait for it fail.", what)
            elif state == "present" and process in self._stopped:
                self._stopped.remove(process)
                _log.warning("jax_intranode: process %d runs again.", process)
            elif state == "dead" and process not in self._reported:
                self._reported.add(process)
                yield failures.Failure(
                    message=f"jax_intranode: {what}. {_advice(self._platform)}",
                    reason="peer_gone",
                    platform=self._platform,
                    device_ids=self.device_ids[process],
                    missing_process=process,
                )


def _advice(platform: str) -> str:
    if platform == "gpu":
        return "Restart all processes from the last checkpoint."
    return (
        "Restart all processes, or call jax_intranode.shutdown() in those that are left and go on "
        "with their devices."
    )


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
        for process, _, state, _, what in watch.peers():
            if state != "present" and wanted & set(watch.device_ids[process]):
                return "peer_stopped" if state == "stopped" else "peer_gone", what
    return None


_watches: list[Watch] = []
_thread: threading.Thread | None = None
_fails = False  # whether this process ends because of a failure
_has_lost = False  # whether a peer was lost in a mesh that was shut down since
_pid = os.getpid()
_program = ""  # the file that Python runs
_ending = threading.Event()


def _new_failures() -> list[failures.Failure]:
    return [failure for watch in list(_watches) for failure in watch.new_failures()]


def _follow() -> None:
    """Starts, once, what reports failures, and what ends the process in order."""
    global _thread, _pid, _program
    if _thread is not None:
        return
    _pid = os.getpid()
    # At exit __main__ has it no more.
    _program = os.path.abspath(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    module = native.module("cpu")

    def poll() -> None:
        seen = 0
        while not _ending.is_set():
            seen = module.wait_for_peers(seen, 3600.0)
            failures.current()

    _thread = threading.Thread(target=poll, name="jax_intranode peers", daemon=True)
    _thread.start()

    failures.add_source(_new_failures)
    compat.at_end_of_backends(_drain)
    compat.bound_distributed_shutdown(_say_goodbye, _won_t_come)
    atexit.register(_end_thread)


def _end_thread() -> None:
    """At exit: a thread that comes back from C++ while Python ends would abort the process."""
    if os.getpid() != _pid or _thread is None:
        return
    _ending.set()
    native.module("cpu").wake_waiting()
    _thread.join(1)


def _uncaught() -> BaseException | None:
    """The exception that has ended the program, if one has.

    ``sys.last_exc`` is also set by consoles, debuggers and test runners that show an exception and
    go on. What ends a program has passed through the module that Python runs.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if hasattr(sys, "ps1") or error is None:
        return None
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_name == "<module>":
            is_program = code.co_filename in ("<string>", "<stdin>") or (
                os.path.abspath(code.co_filename) == _program
            )
            return error if is_program else None
        file = code.co_filename
        if not (file.startswith(("<frozen ", _PACKAGE)) or os.path.basename(file) == "runpy.py"):
            return None
        traceback = traceback.tb_next
    return None


def _failed() -> str:
    """How this program has failed, in a line; empty if it has not."""
    error, failure = _uncaught(), failures.current()
    if failure is not None:
        return failure.message.removeprefix("jax_intranode: ").partition(". ")[0]
    return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]


def _drain() -> None:
    """Waits until nothing that this process has dispatched can still run.

    Live arrays don't tell: a program whose results were dropped runs on. What waits for it is a
    program on each device, one over all local devices, and on GPUs the driver.
    """
    if os.getpid() != _pid or not _watches or _failed():
        return
    for platform in {watch.platform for watch in _watches}:
        with contextlib.suppress(Exception):  # who needed a result has seen its error
            for array in jax.live_arrays(platform):
                array.block_until_ready()
        with contextlib.suppress(Exception):
            devices = np.array(jax.local_devices(backend=platform))
            for device in devices:
                jax.jit(lambda x: x + 1)(jax.device_put(np.float32(0), device)).block_until_ready()
            if len(devices) > 1:
                mesh = jax.sharding.Mesh(devices, ("x",))
                over_all = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
                on_each = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
                x = jax.device_put(np.zeros(len(devices), np.float32), over_all)
                jax.jit(lambda x: x.sum(), out_shardings=on_each)(x).block_until_ready()
        with contextlib.suppress(Exception):
            if platform == "gpu":
                native.module("gpu").synchronize()


def _say_goodbye() -> None:
    """When JAX ends with the process, and nothing of the program runs: tells the peers.

    JAX's last barrier gives up after 5 minutes, so a program that has finished waits here until its
    peers have finished, too, or are lost.
    """
    global _fails
    if os.getpid() != _pid or threading.main_thread().is_alive():
        return  # the program calls jax.distributed.shutdown() itself, and may go on
    if text := _failed():
        _fails = True
        for watch in _watches:
            watch.fail(text)
        return
    for watch in _watches:
        watch.finish()
    while any(
        state in ("present", "stopped") for watch in _watches for _, _, state, _, _ in watch.peers()
    ):
        time.sleep(_LOOK_S)


def _won_t_come(seconds: float, serves: bool) -> bool:
    """Whether JAX's last barrier is to be given up, so many seconds after it began."""
    peers = [peer for watch in list(_watches) for peer in watch.peers()]
    lost = _has_lost or any(state in ("dead", "stopped") for _, _, state, _, _ in peers)
    if not lost and not _fails:
        return False
    ended = [has_ended for _, _, _, has_ended, _ in peers]
    limit = _HOPELESS_BARRIER_S if _has_lost or any(ended) else _BARRIER_S
    if serves and not all(ended):
        limit += _LAST_S
    return seconds > limit
