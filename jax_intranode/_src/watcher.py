"""The watcher: a thread that turns what the native modules report into failures and log lines.

On GPUs a kernel that gives up loses the CUDA context, and XLA raises an error that says nothing of
the cause. The kernel leaves a record in host memory before. On the CPU the groups of ranks report
why they fail, and waits that have lasted long.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax_intranode._src import (
    compat,
    config,
    counts,
    failures,
    limits,
    long_waits,
    native,
    peers,
    source,
)
from jax_intranode._src.partition import Partition

_log = logging.getLogger("jax_intranode")

# On the CPU the call itself raises, and only the log line waits for the poll.
_POLL_S = {"cpu": 0.25, "gpu": 0.05}
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
        platform: "cpu" or "gpu".
        device_ids: returns the ids of this process's devices, by the ordinals of the native module.
        process_of: returns the process of a device, by its id; None if it is not known.
    """
    if platform in _watched:
        return
    _watched.add(platform)
    poll: Callable[[], None]
    if platform == "cpu":
        native.module("cpu").set_patience(config.get().report_after_s)
        failures.add_source(lambda: _failures_on_cpu(process_of))
        poll = _poll_cpu
    else:
        settings = config.get()
        notes = long_waits.Notes(compat.key_value_client)
        waits = long_waits.LongWaits(notes, settings.report_after_s, settings.wait_s)
        failures.add_source(_Records(device_ids, process_of, waits))
        failures.on_failure(_end_waits_on_gpus)
        poll = functools.partial(_poll_gpus, device_ids, waits)
    threading.Thread(target=poll, name=f"jax_intranode watcher, {platform}", daemon=True).start()


def _reason(number: int) -> str:
    return next(name for name, value in limits.FAILURE_REASONS.items() if value == number)


# On the CPU.


def _poll_cpu() -> None:
    module = native.module("cpu")
    while True:
        for warning in module.take_warnings():
            _log.warning(warning)
            counts.waited(warning)
        failures.current()
        time.sleep(_POLL_S["cpu"])


def _failures_on_cpu(process_of: Callable[[int], int | None]) -> list[failures.Failure]:
    found = []
    for report in native.module("cpu").take_failures():
        group, missing = tuple(report["device_ids"]), report["missing"]
        if report["shared"]:
            source.has_equal_calls(report["site"])
        found.append(
            failures.Failure(
                message=report["message"],
                reason=_reason(report["reason"]),
                platform="cpu",
                operation=report["operation"],
                nbytes=report["nbytes"] or source.bytes_of_site(report["site"]),
                rank=report["rank"],
                device_ids=group,
                missing_rank=missing if missing >= 0 else None,
                missing_process=process_of(group[missing]) if missing >= 0 else None,
                source=source.place_of_site(report["site"]),
                calls=report["calls"],
            )
        )
    return found


# On GPUs.


def _end_waits_on_gpus(failure: failures.Failure) -> None:
    if failure.platform == "gpu":
        native.module("gpu").fail(failure.message)


def _poll_gpus(device_ids: Callable[[], dict[int, int]], waits: long_waits.LongWaits) -> None:
    module = native.module("gpu")
    # After the first failure the context is lost.
    while (failure := failures.current()) is None or failure.platform != "gpu":
        going_on = [_wait(record, device_ids()) for record in module.waits()]
        for warning in waits.update([wait for wait in going_on if wait is not None]):
            _log.warning(warning)
            counts.waited(warning)
        time.sleep(_POLL_S["gpu"])


def _group(
    all_ids: Sequence[int], group_size: int, rank: int, device_id: int | None
) -> tuple[int, ...]:
    """The group in which a device has a rank; empty if there is none."""
    groups = Partition(tuple(all_ids), group_size).groups()
    return next((tuple(g) for g in groups if g[rank] == device_id), ())


def _wait(record: tuple[Any, ...], device_ids: dict[int, int]) -> long_waits.Wait | None:
    all_ids, group_size, ordinal, rank, missing, seconds, site, shared = record
    if shared:
        source.has_equal_calls(site)
    group = _group(all_ids, group_size, rank, device_ids.get(ordinal))
    if missing >= len(group):
        return None
    partition = f"{group_size}: {list(all_ids)}"
    return long_waits.Wait(partition, group, rank, missing, seconds, site)


class _Records:
    """Finds the records of kernels that gave up."""

    def __init__(
        self,
        device_ids: Callable[[], dict[int, int]],
        process_of: Callable[[int], int | None],
        waits: long_waits.LongWaits,
    ):
        self._device_ids = device_ids
        self._process_of = process_of
        self._waits = waits
        self._found = False

    def __call__(self) -> list[failures.Failure]:
        """The failure of the first record; nothing if it was found before."""
        if self._found:
            return []
        records = native.module("gpu").failures()
        if not records:
            return [self._refusal(refusal) for refusal in native.module("gpu").refusals()]
        self._found = True
        # The records of aborted kernels come last: they don't show which wait failed first.
        records.sort(key=lambda r: (r[3] == limits.FAILURE_REASONS["aborted"], r[2]))
        return [self._failure(records[0])]

    def _refusal(self, refusal: tuple[Any, ...]) -> failures.Failure:
        all_ids, group_size, ordinal, rank, message = refusal
        group = _group(all_ids, group_size, rank, self._device_ids().get(ordinal))
        reason, _ = peers.absence(group) or ("peer_gone", "")
        return failures.Failure(
            message=message, reason=reason, platform="gpu", rank=rank, device_ids=group
        )

    def _failure(self, record: tuple[Any, ...]) -> failures.Failure:
        all_ids, group_size, ordinal, reason, algorithm, rank, missing, site, shared, told = record
        if shared:
            source.has_equal_calls(site)
        group = _group(all_ids, group_size, rank, self._device_ids().get(ordinal))
        timeout_s = config.get().wait_s
        known = 0 <= missing < len(group)
        detail = f", which runs {told}" if told else ""
        if known and reason == limits.FAILURE_REASONS["timeout"]:
            partition = f"{group_size}: {list(all_ids)}"
            wait = long_waits.Wait(partition, group, rank, missing, timeout_s, site)
            detail, mismatch = self._waits.instead(wait)
            if mismatch:
                reason = limits.FAILURE_REASONS["mismatch"]
        call = source.call_details(site)
        message = limits.failure_message(
            reason, algorithm, timeout_s, group, rank, missing, ordinal, call, detail
        )
        name = _reason(reason)
        if name == "other_operation":
            name = "mismatch"
        if name == "aborted" and (absence := peers.absence(group)):
            name, what = absence
            message = f"{message} The cause: {what}."
        return failures.Failure(
            message=message,
            reason=name,
            platform="gpu",
            operation=(
                algorithm
                if isinstance(algorithm, str)
                else limits.OPERATIONS[limits.ALGORITHMS[algorithm]]
            ),
            nbytes=source.bytes_of_site(site),
            rank=rank,
            device_ids=group,
            missing_rank=missing if missing >= 0 else None,
            missing_process=self._process_of(group[missing]) if known else None,
            source=source.place_of_site(site),
        )
