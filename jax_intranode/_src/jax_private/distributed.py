"""``jax.distributed``: its key-value store, its beginning under a launcher, and its end."""

import atexit
import contextlib
import ctypes
import functools
import inspect
import os
import threading
import time
import traceback
from _queue import SimpleQueue  # gevent replaces that of `queue`
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any

import jax
from jax._src import api, distributed, xla_bridge
from jaxlib import _jax

from jax_intranode._src import timeouts
from jax_intranode._src.native import threads


def key_value_client() -> Any | None:
    """The client of JAX's key-value store; None if jax.distributed is not initialised.

    0.10.2 and later: ``jax.distributed`` has no public store.
    """
    return distributed.global_state.client


def say(key: str, value: str) -> None:
    """Sets a key for `said`, and again whenever ``jax.distributed`` is initialised later.

    0.10.2 to 0.12: ``jax.distributed.initialize`` calls a method of a private object.
    """
    state = distributed.global_state
    of_jax = state.initialize

    def tell() -> None:
        client: Any = state.client
        for key, value in _said.items():
            with contextlib.suppress(Exception):
                place = f"jax_intranode/{key}/{state.process_id}"
                client.key_value_set(place, value, allow_overwrite=True)

    @functools.wraps(of_jax)
    def initialize(*args: Any, **kwargs: Any) -> None:
        of_jax(*args, **kwargs)
        tell()

    if not _said:
        state.initialize = initialize  # type: ignore[method-assign]
    if _said.get(key, "") != value:
        _said[key] = value
        if state.client is not None:
            threads.Thread(tell).join(5)  # the store of a stopped process, or after a fork, hangs


_said: dict[str, str] = {}


def said(key: str, process: int) -> str:
    """What a process has set a key to; empty if it has not."""
    client: Any = distributed.global_state.client
    with contextlib.suppress(Exception):
        return str(client.key_value_try_get(f"jax_intranode/{key}/{process}"))
    return ""


def at_end_of_backends(action: Callable[[], None]) -> None:
    """Makes the end of the process call `action` before JAX clears its backends.

    0.10.2 to 0.12: JAX's exit handler, which was registered when JAX was imported, calls
    ``clear_backends`` of its module, unless the program has cleared them, then ``clear_caches`` and
    ``shutdown`` of ``jax.distributed``. The program's own exit handlers that were registered later
    have run by then.
    """
    if action in _at_end:
        return
    _at_end.append(action)
    of_jax, clear_caches_of_jax = api.clear_backends, api.clear_caches
    if len(_at_end) > 1:
        return

    @functools.wraps(of_jax)
    def clear_backends(*args: Any, **kwargs: Any) -> Any:
        global _is_ending
        if not exits():
            return of_jax(*args, **kwargs)
        _is_ending = True
        for action in _at_end:
            _undisturbed(action)
        try:
            return of_jax(*args, **kwargs)
        except Exception:  # such as that of a debugging callback
            distributed.global_state.shutdown()  # JAX's exit handler does not come to it
            raise

    @functools.wraps(clear_caches_of_jax)
    def clear_caches() -> None:
        global _is_ending
        _is_ending = _is_ending or exits()
        clear_caches_of_jax()

    api.clear_backends, api.clear_caches = clear_backends, clear_caches


_at_end: list[Callable[[], None]] = []
_is_ending = False
_exits = False


def exits() -> bool:
    """Whether Python has begun with the exit handlers."""
    return _exits or not threading.main_thread().is_alive()


@atexit.register
def _note_exit() -> None:
    """For gevent, with which the main thread stays alive."""
    global _exits
    _exits = True


def is_ending() -> bool:
    """Whether JAX's exit handler has begun, which also ends ``jax.distributed``."""
    return _is_ending


def _undisturbed(action: Callable[[], None]) -> None:
    """Calls `action`; at the end of the process again, if the handler of a signal raised in it.

    JAX's own waits there are in C++, and Python calls a handler only when they have ended. So
    `action` has to be one that can be called again, and that raises nothing itself. The first
    exception is shown, as Python shows those of exit handlers.
    """
    quiet: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit)
    for _ in range(_EXCEPTIONS):
        try:
            try:
                return action()
            except BaseException as error:
                if not _is_ending:
                    raise
                if not isinstance(error, quiet):
                    quiet = (BaseException,)
                    traceback.print_exc()
        except BaseException:  # while the first one was shown
            if not _is_ending:
                raise
    action()


# After so many exceptions they may be those of the action.
_EXCEPTIONS = 100_000


def bound_distributed_shutdown(
    begins: Callable[[], None], gives_up: Callable[[float, bool], bool], ends: Callable[[], None]
) -> None:
    """Makes the end of ``jax.distributed`` give up when peers won't come.

    ``jax.distributed.shutdown``, which JAX calls at exit, waits in a barrier for all processes, for
    up to 5 minutes, and aborts the process when that fails.

    0.10.2 to 0.12: ``jax.distributed.shutdown`` calls a method of a private object.

    Args:
        begins: is called first.
        gives_up: whether to give up, from the seconds that have passed since the end began, and
            whether JAX's coordination service runs in this process.
        ends: is called last.
    """
    state = distributed.global_state
    if getattr(state.shutdown, "of_jax_intranode", False):
        return
    of_jax = state.shutdown
    # A call asks with a list, which gets the error of JAX, or None, when JAX has ended.
    asked: SimpleQueue[list[BaseException | None]] = SimpleQueue()
    pid = os.getpid()

    def end() -> None:
        while True:
            outcome = asked.get()
            try:
                of_jax()
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)

    # Started here: at exit Python 3.12 starts no threads.
    threads.Thread(end, "jax_intranode shutdown")

    def shutdown() -> None:
        try:
            _undisturbed(begins)
            if state.client is None or os.getpid() != pid:  # a forked child has no thread
                return of_jax()
            started, serves = time.monotonic(), state.service is not None
            outcome: list[BaseException | None] = []
            asked.put(outcome)
            _undisturbed(lambda: wait(outcome, started, serves))
            if outcome and outcome[0] is not None:
                raise outcome[0]
        finally:
            ends()

    def wait(outcome: list[BaseException | None], started: float, serves: bool) -> None:
        while not outcome:
            time.sleep(timeouts.LAST_LOOK_S)
            if gives_up(time.monotonic() - started, serves):
                leave_without_waiting()
                return

    shutdown.of_jax_intranode = True  # type: ignore[attr-defined]
    state.shutdown = shutdown  # type: ignore[method-assign]


def leave_without_waiting() -> None:
    """Lets this process end without the barrier at which JAX waits for all processes.

    JAX's client and service are left to the end of the process: deleting them waits or aborts as
    well. 0.10.2 and later.
    """
    state = distributed.global_state
    for name in ("client", "service", "preemption_sync_manager"):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(state, name)))
        setattr(state, name, None)


# Processes under `launch`, whose coordination service runs in the launcher.


def start_coordination_service(address: str, processes: int) -> Any:
    """Starts the service that the processes of a program meet at; `shutdown` of it ends it.

    0.10.2 and later: ``jax.distributed`` starts it in process 0 only.
    """
    limit = timeouts.HEARTBEAT_S
    return _jax.get_distributed_runtime_service(address, processes, heartbeat_timeout=limit)


def use_service_elsewhere() -> None:
    """Makes this process a client of a coordination service that runs in another one.

    0.10.2 and later: ``jax.distributed.initialize`` starts one in process 0 in any case. 0.12: the
    client would use the certificates of JAX's settings, which are for a service on the network.
    """
    of_jax = _jax.get_distributed_runtime_client

    def client(*args: Any, **kwargs: Any) -> Any:
        of_network = [name for name in kwargs if name.startswith(("mtls_", "verify_"))]
        return of_jax(*args, **{k: v for k, v in kwargs.items() if k not in of_network})

    _jax.get_distributed_runtime_service = lambda *_, **__: None
    _jax.get_distributed_runtime_client = client


def join_at_first_use(arguments: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Makes this process a client of a coordination service that runs elsewhere.

    ``jax.distributed.initialize`` starts no service and gets arguments(those that were passed). If
    the program has not called it before its first use of a device, it is called then. 0.10.2 and
    later: JAX can detect the address, the number of processes and the rank, but a program that
    calls nothing stays alone.
    """
    use_service_elsewhere()
    state, backends = distributed.global_state, xla_bridge.backends
    initialize, lock = state.initialize, threading.RLock()
    parameters = inspect.signature(initialize)

    def initialize_client(*args: Any, **kwargs: Any) -> None:
        initialize(**arguments(dict(parameters.bind(*args, **kwargs).arguments)))

    def backends_of_all() -> Any:
        with lock:
            if xla_bridge.backends is backends_of_all:
                # A forked process of multiprocessing is a program of its own, as a spawned one.
                if state.client is None and parent_process() is None:
                    jax.distributed.initialize()
                xla_bridge.backends = backends
        return backends()

    state.initialize = initialize_client  # type: ignore[method-assign]
    xla_bridge.backends = backends_of_all
