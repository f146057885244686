"""The watcher: a thread that turns the record of a kernel that gave up into a message.

A kernel on a GPU that gives up loses the CUDA context, and XLA raises an error that says nothing of
the cause. The kernel leaves a record in host memory before.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from jax_intranode._src import config, limits, native
from jax_intranode._src.partition import Partition

_log = logging.getLogger("jax_intranode")

_POLL_S = 0.05
_watched: set[str] = set()


def start(
    platform: str, device_ids: Callable[[], dict[int, int]], fail: Callable[[str, str], None]
) -> None:
    """Starts the thread of a platform, unless it runs already.

    The thread never ends, because programs may be replayed after a shutdown. It keeps no rendezvous
    alive.

    Args:
        platform: "gpu".
        device_ids: returns the ids of this process's devices, by the ordinals of the native module.
        fail: called once with the platform and the message.
    """
    if platform in _watched:
        return
    _watched.add(platform)

    def poll() -> None:
        module = native.module(platform)
        while not (failures := module.failures()):
            time.sleep(_POLL_S)
        # The records of aborted kernels come last: they don't show which wait failed first.
        failures.sort(key=lambda f: (f[3] == limits.FAILURE_REASONS["aborted"], f[2]))
        message = _message(failures[0], device_ids())
        module.fail(message)
        _log.error(message)
        fail(platform, message)

    threading.Thread(target=poll, name="jax_intranode watcher", daemon=True).start()


def _message(failure: tuple[Any, ...], device_ids: dict[int, int]) -> str:
    all_ids, group_size, ordinal, reason, algorithm, rank, missing = failure
    groups = Partition(tuple(all_ids), group_size).groups()
    group = next((g for g in groups if g[rank] == device_ids.get(ordinal)), ())
    timeout_s = config.get().timeout_s
    return limits.failure_message(reason, algorithm, timeout_s, group, rank, missing, ordinal)
