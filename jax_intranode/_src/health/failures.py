"""Failures of communication: the record, the exception, and what the native monitor has to say.

The monitor (xla_ffi/health/monitor.h) watches over the calls of this process and over its peers. A
thread of this file waits for what it finds. The first failure is kept, because the later ones
follow from it, until ``shutdown`` ends the communicators. It is logged once, raised by each later
call that sets up or lowers an operation, shown by XLA's own errors, and printed last when the
process ends because of it.
"""

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from jax_intranode._src.health import call_sites, counts
from jax_intranode._src.jax_private import runtime_errors
from jax_intranode._src.native import definitions, extension, threads

_log = logging.getLogger("jax_intranode")


@dataclass(frozen=True)
class Failure:
    """Why the devices of this process can't communicate any more.

    Attributes:
        message: what happened and what to do, in one paragraph.
        reason: "timeout": a peer did not come in time. "peer_gone": the process of a peer has
            ended. "peer_stopped": it does not run. "mismatch": a peer runs another operation.
            "busy": two operations of one group overlapped on a device. "closed": a program from
            before ``shutdown``, or on a closed peer buffer, was replayed. "bad_update": a size or
            an offset of a ragged_all_to_all does not fit. "aborted": another failure ended the
            operation.
        platform: "cpu" or "gpu". On GPUs the CUDA context is lost.
        operation: the operation that failed, for instance "psum"; None if none was running.
        nbytes: the bytes of its operand on one device, if they are known.
        rank: the rank of this process that waited, in its group; None if none did.
        device_ids: the devices of its group, in rank order; empty if they are not known.
        missing_rank: the rank that it waited for, in the same group.
        missing_process: the process of the missing rank, by ``jax.process_index()``.
        source: where the program calls the operation, as ``file:line (function)``, if it is known.
        calls: how often this place had been called before, if it is known.
        time: when the failure was found, in seconds as of ``time.time()``.
    """

    message: str
    reason: str
    platform: str
    operation: str | None = None
    nbytes: int | None = None
    rank: int | None = None
    device_ids: tuple[int, ...] = ()
    missing_rank: int | None = None
    missing_process: int | None = None
    source: str | None = None
    calls: int | None = None
    time: float = field(default_factory=time.time)


class CommunicationError(RuntimeError):
    """The devices of this process can't communicate with their peers any more.

    Python code of this package raises it. XLA raises ``jax.errors.JaxRuntimeError`` or
    ``ValueError`` while a program runs, with the same message; see `communication_errors`.

    Attributes:
        failure: the failure, as `last_failure` returns it; None if the exception was not made from
            one.
    """

    def __init__(self, message: str, failure: Failure | None = None):
        super().__init__(message)
        self.failure = failure


# Guards what follows.
_lock = threads.RLock()
_last: Failure | None = None
_in_force = False  # whether `_last` has happened since the last `shutdown`
_pid = os.getpid()

# The process of a device, by the device's id; once a platform is watched.
_process_of: Callable[[int], int | None] | None = None
_thread: threads.Thread | None = None
_ending = False

# Errors of XLA with these beginnings tell of a wrong program, and not of a lost context.
_UNRELATED = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "RESOURCE_EXHAUSTED")


def watch(platform: str, process_of: Callable[[int], int | None], report_after_s: float) -> None:
    """Makes the monitor watch a platform. It never ends: programs may run after a shutdown.

    Args:
        platform: "cpu" or "gpu".
        process_of: returns the process of a device, by its id; None if it is not known.
        report_after_s: when a wait is reported.
    """
    global _process_of, _thread, _pid
    module = extension.module("cpu")
    module.monitor(extension.module(platform).platform(), report_after_s)
    _process_of = process_of
    if _thread is None:
        _pid = os.getpid()
        runtime_errors.show_in_runtime_errors(_shown_in)
        _thread = threads.Thread(_follow, "jax_intranode monitor")
        atexit.register(_end_thread)


def _follow() -> None:
    module = extension.module("cpu")
    while not _ending:
        module.await_news(3600.0)
        for is_wait, text in module.take_warnings():
            _logged(logging.WARNING, text)
            if is_wait:
                counts.waited(text)
        current()


def _end_thread() -> None:
    """At exit: a thread that comes back from C++ while Python ends would abort the process."""
    global _ending
    if os.getpid() != _pid or _thread is None:
        return
    _ending = True
    extension.module("cpu").end_news()
    _thread.join(1)


def _found() -> list[Failure]:
    """The failures that nobody has taken from the monitor; what says more comes first."""
    if _process_of is None:
        return []
    found = [_record(**fields) for fields in extension.module("cpu").take_failures()]
    return sorted(found, key=lambda failure: failure.operation is None)


def _record(site: str, shared: bool, reason: int, **fields: Any) -> Failure:
    if shared:
        call_sites.has_equal_calls(site)
    for name in ("calls", "rank", "missing_rank", "missing_process"):
        fields[name] = fields[name] if fields[name] >= 0 else None
    devices = fields["device_ids"] = tuple(fields["device_ids"])
    if fields["missing_rank"] is not None and _process_of is not None:
        fields["missing_process"] = _process_of(devices[fields["missing_rank"]])
    name = next(name for name, value in definitions.FAILURE_REASONS.items() if value == reason)
    fields["operation"] = fields["operation"] or None
    fields["nbytes"] = fields["nbytes"] or call_sites.bytes_of_site(site)
    return Failure(
        **fields,
        reason="mismatch" if name == "other_operation" else name,
        source=call_sites.place_of_site(site),
    )


def report(failure: Failure) -> bool:
    """Enters a failure. Any thread may call it.

    Returns:
        Whether it was the first one since the start or the last `shutdown`. A later one is logged
        at level INFO and else forgotten.
    """
    return _enter(lambda: [failure])


def _enter(find: Callable[[], list[Failure]]) -> bool:
    global _last, _in_force
    # Who comes second waits until the first one has entered what it found. Log handlers run without
    # the lock, because they may wait for a thread that asks here.
    with _lock:
        failures = find()
        first = bool(failures) and (not _in_force or _says_more(failures[0]))
        if first:
            _last, _in_force = failures[0], True
            runtime_errors.show_in_runtime_errors(_shown_in)
            # On GPUs the destructors of a lost context print so much that the message is lost, too.
            extension.module("cpu").set_exit_message(_last.message, _last.platform == "gpu")
    for failure in failures[:first]:
        _logged(logging.ERROR, failure.message)
    for failure in failures[first:]:
        _logged(logging.INFO, f"Another failure followed: {failure.message}")
    return first


def _logged(level: int, text: str) -> None:
    """Logs a text. A handler of the program that raises must not hide the failure."""
    with contextlib.suppress(Exception):
        _log.log(level, "%s", text)


def _says_more(failure: Failure) -> bool:
    """Whether a failure takes the place of the first one.

    The loss of a process is told at once. A kernel that waits for it gives up later, and only then
    it is known which call has failed.
    """
    return (
        _last is not None
        and _last.operation is None
        and failure.operation is not None
        and failure.missing_process == _last.missing_process
    )


def current() -> Failure | None:
    """The failure since the last `shutdown`, or None.

    Asks the monitor, too: the thread that waits for its news may be late.
    """
    if os.getpid() != _pid:
        return None  # a forked child: nothing of its parent's communication concerns it
    _enter(_found)
    return _last if _in_force else None


def last_failure() -> Failure | None:
    """The failure that ended communication in this process, or None.

    It is the first one since the communicators were set up, since later ones follow from it. If
    that is the loss of a process, the first call that fails because of it takes its place. After
    ``shutdown`` it is still there, until another one takes its place.
    """
    current()
    return _last


def forget() -> None:
    """Ends a failure on CPU devices, because the communicators that failed are gone.

    A failure on GPUs stays: the CUDA context is lost.
    """
    global _in_force
    current()
    with _lock:
        _in_force = _in_force and _last is not None and _last.platform == "gpu"
        if not _in_force:
            extension.module("cpu").set_exit_message("", False)


@contextlib.contextmanager
def communication_errors() -> Iterator[None]:
    """Makes every failure of communication in its body a `CommunicationError`.

    XLA chooses the type of the exception of a call that fails while it runs:
    ``jax.errors.JaxRuntimeError`` or ``ValueError``. Only later calls raise `CommunicationError`
    by themselves. Within this context one handler is enough. XLA runs programs while Python goes
    on, so block on the results inside.

    Raises:
        CommunicationError: the body has raised an exception of XLA or of this package, and the
            devices of this process can't communicate any more. Other exceptions pass.

    Examples:
        >>> try:
        ...     with jax_intranode.communication_errors():
        ...         total = jax.block_until_ready(jnp.ones(4).sum())
        ... except jax_intranode.CommunicationError as error:
        ...     print(error.failure.missing_process)
    """
    try:
        yield
    except CommunicationError:
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        failure = current()
        if failure is None or (failure.platform == "cpu" and "jax_intranode" not in str(error)):
            raise
        raise CommunicationError(failure.message, failure) from error


def _begin_exit() -> None:
    current()  # the last chance to find a failure, for the message that is printed last
    extension.module("cpu").begin_exit()


atexit.register(_begin_exit)


def _shown_in(text: str) -> str | None:
    """What an error of XLA's shows above its own text, or None.

    On CPU devices the error of a failed call has our text already. On GPUs a failed kernel loses
    the CUDA context, and what XLA says of that does not tell why.
    """
    if text.startswith(_UNRELATED) or "callback" in text:
        return None
    failure = current()
    if failure is None or failure.platform != "gpu" or failure.message in text:
        return None
    return failure.message
