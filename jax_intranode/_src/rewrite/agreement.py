"""The processes of a mesh agree on whether to rewrite a program.

All processes must rewrite a program, or none: a process that runs our operation waits for peers
that run it too. All processes come to a program that is called, some late: they load data first. So
a call waits as long as a rendezvous for a process that has said that it has called ``install``. A
process may lower a program that the others do not lower (``f.lower(...)`` on one rank), and a
process may have nothing installed: it already waits in JAX's own set-up, which on CPU devices gives
up after 30 s. Neither may cost more than a few seconds.

So before the first rewriting over a set of devices, each process says in JAX's key-value store that
it lowers this program, and waits for the others. If all are there, one of them claims the decision
"rewrite"; the first one whose time is up claims the decision to leave the program to lax. The claim
that came first counts for all. It counts for this program only: others are decided on their own.
Once all processes have been there at the same time, all of them have the rewriting installed, and
nobody waits any more.

Programs whose collectives XLA's partitioner adds are agreed on in the same way. When all processes
have met, they also compare what they would replace in that program, and leave all such programs
over these devices to XLA if it differs. After that nobody waits.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from jax_intranode._src import reasons, timeouts
from jax_intranode._src.group import key_value_store, rendezvous
from jax_intranode._src.health import failures, peers
from jax_intranode._src.jax_private import (
    distributed,
    jaxpr_walk,
    lax_collectives,
    lowering_context,
)
from jax_intranode._src.ops.lowering_site import device_ids
from jax_intranode._src.rewrite import mode
from jax_intranode._src.selection import config

_log = logging.getLogger("jax_intranode")

# What processes say that they have called.
CALLS = INSTALL, INSTALL_AUTO = "install()", "install(auto=True)"


def call_for_partitioners(jaxpr: Any) -> str | None:
    """What replaces collectives that XLA's partitioner adds to a program; None if nothing here."""
    on = mode.enabled.value
    if on in (mode.ON, mode.AUTO) and jaxpr_walk.has_explicit_shardings(jaxpr):
        return INSTALL
    return INSTALL_AUTO if on == mode.AUTO else None


@dataclass
class _Meeting:
    """How the processes of a mesh have met.

    Attributes:
        met: whether all processes have been there at the same time; False after a call that has
            waited in vain; None before the first call.
        compared: whether they have found that they take the same of a program.
        reason: why they leave all programs to XLA; None if they don't.
    """

    met: bool | None = None
    compared: bool = False
    reason: str | None = None


# For shard_maps, by the ids of the devices. For programs whose collectives XLA's partitioner adds,
# by what processes have called, and the generation and the ids of the devices.
_meetings: dict[Any, _Meeting] = {}


def reason_not_to_rewrite(mesh: jax.sharding.Mesh, body: Any) -> str | None:
    """Why the body of a shard_map is left to lax; None if all processes rewrite it.

    Raises:
        CommunicationError: a process is gone. With lax the others would wait for it without end.
    """
    devices = device_ids(mesh)
    place = lambda: f"rewrite/{_fingerprint(devices, body)}"  # noqa: E731
    return _reason_to_leave(mesh, devices, INSTALL, place, "jax.lax")


def reason_for_no_auto(
    mesh: jax.sharding.Mesh, call: str, program: Callable[[], str]
) -> str | None:
    """Why a program is left to XLA; None if all processes of its mesh rewrite it.

    `call` is what all must have called. Under Explicit axes this is INSTALL. `program` identifies
    the program.

    Raises:
        CommunicationError: a process is gone. With XLA the others would wait for it without end.
    """
    place = lambda: _place_of_auto(mesh, call, f"meeting/{program()}")  # noqa: E731
    return _reason_to_leave(mesh, _meeting_of(mesh, call), call, place, "XLA")


def _reason_to_leave(
    mesh: jax.sharding.Mesh, key: Any, call: str, place: Callable[[], str], to: str
) -> str | None:
    processes = _processes(mesh)
    if len(processes) == 1:
        return None
    if jax.process_index() not in processes:
        return reasons.NOT_HERE
    meeting = _meetings.setdefault(key, _Meeting())
    if meeting.reason is not None:
        return meeting.reason
    try:
        store = _store(mesh, place())
    except RuntimeError as error:
        return str(error)
    wait_s = wait_s_of_program() if meeting.met is None else timeouts.LATER_WAIT_S
    reason = _decide(store, mesh, "", 0 if meeting.met else wait_s, call)
    if reason is None or lowering_context.lowering_for_call():
        meeting.met = bool(meeting.met) or reason is None
    if reason is not None:
        _log.warning("A program is left to %s: %s.", to, reason)
    return reason


def same_everywhere(
    mesh: jax.sharding.Mesh, call: str, program: Callable[[], str], taken: str
) -> str | None:
    """Why a program is left to XLA; None if all processes of a mesh, which have met, take the same.

    Raises:
        CommunicationError: a process is gone.
        RuntimeError: the processes have compared a program before, and another one takes something
            else of this program. It runs already.
    """
    if len(_processes(mesh)) == 1:
        return None
    taken = hashlib.sha256(taken.encode()).hexdigest()[:16]
    meeting = _meetings[_meeting_of(mesh, call)]
    store = _store(mesh, _place_of_auto(mesh, call, f"program/{program()}"))
    reason = _decide(store, mesh, taken, 0 if meeting.compared else wait_s_of_program(), call)
    if reason is None:
        meeting.compared = True
        if store.claim("taken", taken) != taken:
            raise RuntimeError(
                "another process replaces other operations of this program; all must run the same "
                "program, with the same versions and settings"
            )
    elif reason == reasons.OTHER_OPERATIONS:
        meeting.reason = reason
        _log.warning("Programs over these devices are left to XLA: %s.", reason)
    return reason


def _meeting_of(mesh: jax.sharding.Mesh, call: str) -> Any:
    return call, rendezvous.generation(device_ids(mesh)), device_ids(mesh)


def _place_of_auto(mesh: jax.sharding.Mesh, call: str, what: str) -> str:
    devices = hashlib.sha256(repr(device_ids(mesh)).encode()).hexdigest()[:16]
    return f"{call}/{devices}/{what}"


# How the processes of a mesh decide.


def wait_s_of_program() -> float:
    """How long a process waits for the others to lower the program that it lowers."""
    return config.get().meeting_s if lowering_context.lowering_for_call() else timeouts.FIRST_WAIT_S


def _why_late(call: str) -> str:
    """Why a process may not have come. Which it is can't be known.

    The processes watch each other once they communicate, which they may not have done yet.
    """
    return f"it has ended or is late, or it has not called jax_intranode.{call}"


def _processes(mesh: jax.sharding.Mesh) -> list[int]:
    return sorted({device.process_index for device in mesh.devices.flat})


def _store(mesh: jax.sharding.Mesh, place: str) -> key_value_store.Store:
    prefix = f"jax_intranode/{rendezvous.generation(device_ids(mesh))}/{place}/"
    return key_value_store.store(prefix, jax.process_index(), _processes(mesh))


def _decide(
    store: key_value_store.Store, mesh: jax.sharding.Mesh, said: str, seconds: float, call: str
) -> str | None:
    """Why a program is left as it is; None if it is not. The process that is first decides for all.

    It says something, which all must say alike, and waits for the others, unless `seconds` is 0.
    `call` is what a process that does not come may not have called.
    """
    store.claim(f"here/{jax.process_index()}", said)
    decision = ""
    if seconds:
        decision = _missing(store, mesh, seconds, call)
        if not decision and any(
            store.wait(f"here/{process}", key_value_store.Deadline(timeouts.SAYING_S)) != said
            for process in _processes(mesh)
        ):
            decision = reasons.OTHER_OPERATIONS
    return store.claim("decision", decision) or None


def _missing(
    store: key_value_store.Store, mesh: jax.sharding.Mesh, seconds: float, call: str
) -> str:
    """Which process has not come in time; empty if all have come."""
    deadline = key_value_store.Deadline(seconds)
    first = key_value_store.Deadline(min(seconds, timeouts.FIRST_WAIT_S))
    report = key_value_store.Deadline(config.get().report_after_s)
    is_reported = False
    for process in _processes(mesh):
        rendezvous.raise_if_failed(mesh.devices.flat)
        ids = tuple(d.id for d in mesh.devices.flat if d.process_index == process)
        while True:
            # Before the look: a process that is here may come to its end then.
            absence = peers.absence(ids)
            if store.wait(f"here/{process}", deadline.at_most(timeouts.LOOK_S)) is not None:
                break
            rendezvous.raise_if_failed(mesh.devices.flat)
            if absence:
                _fail(process, mesh, ids, *absence)
            limit = deadline if first.passed() and distributed.said(call, process) else first
            if limit.passed():
                late = f"process {process} has not lowered this program within {limit.seconds:g} s"
                return f"{late}: {_why_late(call)}"
            if report.passed() and not is_reported:
                is_reported = True
                _log.warning(
                    "This process has waited %g s for process %d to lower the same program: %s. "
                    "It goes on without it after %g s.",
                    *(report.seconds, process, _why_late(call), seconds),
                )
    return ""


def _fail(
    process: int, mesh: jax.sharding.Mesh, ids: tuple[int, ...], reason: str, what: str
) -> NoReturn:
    """Raises: a process has ended, also in order, or is stopped, and this one waits for it.

    Calls are patient with such a process (xla_ffi/health/peer_table.h). Here it would not help: a
    process that has finished has forgotten its meshes, and meets nobody until all start anew.
    """
    failure = failures.Failure(
        message=f"jax_intranode: {what}, and this process has lowered a program that needs it. "
        "Restart all processes from the last checkpoint.",
        reason=reason,
        platform=mesh.devices.flat[0].platform,
        device_ids=ids,
        missing_process=process,
    )
    failures.report(failure)
    raise failures.CommunicationError(failure.message, failure)


def _fingerprint(devices: tuple[int, ...], body: Any) -> str:
    """Identifies a program: the same in all processes that lower it."""
    types = [v.aval.str_short() for v in body.invars]
    text = [repr(devices), repr(types), str(len(body.eqns)), *_described(body)]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _described(jaxpr: Any) -> Iterator[str]:
    """Describes the collectives of a jaxpr, and of those inside."""
    for equation in jaxpr_walk.equations(jaxpr):
        if lax_collectives.lax_collective(equation) is not None:
            types = ",".join(v.aval.str_short() for v in equation.invars)
            yield f"{equation.primitive.name} {types} {sorted(map(str, equation.params.items()))}"
