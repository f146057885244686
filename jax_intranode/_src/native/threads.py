"""Threads and locks of the system, also where gevent or eventlet has replaced those of Python.

A greenlet that waits in C++ stops the whole program. These libraries change the modules `threading`
and `_thread`; another instance of `_thread`, which is part of Python, has all as it was.
"""

import importlib.util
import threading
from collections.abc import Callable
from typing import Any

_spec: Any = importlib.util.find_spec("_thread")
_thread: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_thread)

Lock, RLock = _thread.allocate_lock, _thread.RLock


class Thread:
    """A daemon thread that calls a function."""

    def __init__(self, function: Callable[[], None], name: str = "") -> None:
        """Starts it. With a name it is in `threading.enumerate()`, in Python 3.11 for good."""
        self._ends = Lock()
        self._ends.acquire()

        def run() -> None:
            if name:
                threading.current_thread().name = name
            try:
                function()
            finally:
                self._ends.release()

        _thread.start_new_thread(run, ())

    def join(self, timeout_s: float) -> bool:
        """Waits so long for its end, and returns whether it has come."""
        return bool(self._ends.acquire(timeout=timeout_s))
