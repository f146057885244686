"""The watcher: a thread that turns the record of a kernel that gave up into a failure.

A kernel on a GPU that gives up loses the CUDA context, and XLA raises an error that says nothing of
the cause. The kernel leaves a record in host memory before.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from jax_intranode._src import config, failures, limits, native
from jax_intranode._src.partition import Partition

_POLL_S = 0.05
_watched: set[str] = set()


def start(
    platform: str,
    device_ids: Callable[[], dict[int, int]],
    process_of: Callable[[int], int | None],
) -> None:
    """Starts the thread of a platform, unless it runs already.

    The thread never ends, because programs may be replayed after a shutdown. It keeps no rendezvous
    alive.

    Args:
        platform: "gpu".
        device_ids: returns the ids of this process's devices, by the ordinals of the native module.
        process_of: returns the process of a device, by its id; None if it is not known.
    """
    if platform in _watched:
        return
    _watched.add(platform)
    module = native.module(platform)

    def find() -> list[failures.Failure]:
        records = module.failures()
        # The records of aborted kernels come last: they don't show which wait failed first.
        records.sort(key=lambda r: (r[3] == limits.FAILURE_REASONS["aborted"], r[2]))
        return [_failure(platform, record, device_ids(), process_of) for record in records[:1]]

    def poll() -> None:
        while (failure := failures.current()) is None or failure.platform != platform:
            time.sleep(_POLL_S)

    def end_waits(failure: failures.Failure) -> None:
        module.fail(failure.message)

    failures.on_failure(end_waits)
    failures.add_source(find)
    threading.Thread(target=poll, name="jax_intranode watcher", daemon=True).start()


def _failure(
    platform: str,
    record: tuple[Any, ...],
    device_ids: dict[int, int],
    process_of: Callable[[int], int | None],
) -> failures.Failure:
    all_ids, group_size, ordinal, reason, algorithm, rank, missing = record
    groups = Partition(tuple(all_ids), group_size).groups()
    group = next((g for g in groups if g[rank] == device_ids.get(ordinal)), ())
    timeout_s = config.get().timeout_s
    known = 0 <= missing < len(group)
    return failures.Failure(
        message=limits.failure_message(reason, algorithm, timeout_s, group, rank, missing, ordinal),
        reason=next(name for name, number in limits.FAILURE_REASONS.items() if number == reason),
        platform=platform,
        operation=limits.OPERATIONS[limits.ALGORITHMS[algorithm]],
        rank=rank,
        device_ids=tuple(group),
        missing_rank=missing if missing >= 0 else None,
        missing_process=process_of(group[missing]) if known else None,
    )
