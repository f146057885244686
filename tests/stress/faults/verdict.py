"""What must have happened in a case."""

import re

from stress.faults.job import TIMEOUT_S, Process, Seen
from stress.faults.matrix import Case

# A process that has not been heard for so long is stopped. Only the fault "stop" waits for that.
SILENT_S = 3.0
# From the end of a process to the failure of the others.
_DEAD_S = 1.0
# The same if it ends in order. Its peers first wait 3 s (kPatience in xla_ffi/health/timeouts.h),
# in which another thread of it may still make the call.
_GOODBYE_S = 4.0
# From the failure to the exception on GPUs: XLA asks each stream every 5 s whether it has failed
# (CONTRIBUTING.md, "Failures"), and raises 0.1 s later.
_XLA_ASKS_S = 5.1
# From the exception to the end of a process that does not catch it.
_END_S = 8.0
# What the others say of a fault, and the reason in last_failure().
_SAID = {
    "kill": ("has exited without notice", "peer_gone"),
    "os_exit": ("has exited without notice", "peer_gone"),
    "exception": ("has failed: Injected: the injected fault", "peer_gone"),
    "interrupt": ("has failed: KeyboardInterrupt", "peer_gone"),
    "exit": ("has come to the end of its program", "peer_gone"),
    "shutdown": ("has called jax_intranode.shutdown()", "peer_gone"),
    "stop": ("has shown no sign of life for 3 s: it is stopped", "peer_stopped"),
    "away": (f"timed out after {TIMEOUT_S:.0f} s", "timeout"),
}
# The types of exceptions that tell of a failure.
_TYPES = ("CommunicationError", "JaxRuntimeError", "XlaRuntimeError", "ValueError")


def problems(case: Case, platform: str, seen: Seen, slack: float) -> list[str]:
    """Returns what was not as it must be; nothing if all was."""
    found = [f"left behind: {what}" for what in seen.left]
    for rank, process in enumerate(seen.processes):
        wrong = [event["turn"] for event in process.all("wrong")]
        if wrong:
            found.append(f"rank {rank}: wrong values in runs {wrong}")
    victim = seen.processes[case.victim]
    if case.fault != "none" and victim.first("fault") is None:
        return [*found, f"the victim never came to its fault; it said {victim.events}"]
    for rank, process in enumerate(seen.processes):
        if not case.fails:
            texts = _of_healthy(process)
            if case.fault == "late" and rank != case.victim:
                texts += _of_waiting(case, process)
        elif rank != case.victim:
            texts = _of_survivor(case, platform, process, victim, slack)
        else:
            texts = _of_victim(case, process)
        found += [f"rank {rank}: {text}" for text in texts]
    return found


def _of_healthy(process: Process) -> list[str]:
    found = []
    if process.exit_code != 0:
        found.append(f"exit code {process.exit_code}, not 0")
    if process.first("done") is None:
        found.append("did not come to its end")
    return found


def _of_waiting(case: Case, process: Process) -> list[str]:
    reports = [line for line in process.log.splitlines() if "has waited 10 s" in line]
    if not any(_names(case, line) for line in reports):
        return [f"no report that it waits for process {case.victim}; the reports are {reports}"]
    return []


def _of_victim(case: Case, process: Process) -> list[str]:
    expected = {"kill": -9, "exception": 1, "interrupt": -2, "exit": 3, "os_exit": 3}.get(
        case.fault
    )
    if case.before_watch and (case.raises or case.fault == "exit"):
        return []  # it waits in JAX's last barrier
    if expected is not None and process.exit_code != expected:
        return [f"the victim's exit code is {process.exit_code}, not {expected}"]
    if case.raises and "ERROR:jax_intranode" in process.log:
        return ["the victim logs that the others fail because of it"]
    return []


def _of_survivor(
    case: Case, platform: str, process: Process, victim: Process, slack: float
) -> list[str]:
    fault = victim.first("fault")
    assert fault is not None
    if process.exit_code is None:
        return [f"had not ended long after the fault; it said {process.events}"]
    if process.first("done") is not None:
        return ["came to its end as if nothing had happened"]
    errors = process.all("error") or process.all("refused")
    if not errors:
        return [f"has seen no error; exit code {process.exit_code}, it said {process.events}"]
    found = []
    first = errors[0]
    if case.rest_goes_on(platform):
        if process.exit_code != 0 or process.first("went on") is None:
            found.append(f"did not go on without the victim; exit code {process.exit_code}")
    elif process.exit_code == 0:
        found.append("exit code 0 after a failure")
    if first["event"] == "error" and first["type"] not in _TYPES:
        found.append(f"the exception is a {first['type']}")
    for error in errors:
        if not _names(case, error["text"]):
            found.append(f"the error does not name process {case.victim}: {error['text']}")
        if error["event"] == "error" and not _names(case, error["failure"]):
            found.append(f"last_failure() does not name it: {error['failure']}")
        if error["event"] == "error" and not case.in_meeting:
            said, reason = _SAID[case.fault]
            if said not in error["text"]:
                found.append(f"the error does not say {said!r}: {error['text']}")
            # Of several, one may have failed before because of the victim, and passes that on.
            alone = case.world == 2
            if alone and (error["reason"], error["missing"]) != (reason, case.victim):
                record = f"{error['reason']}, process {error['missing']}"
                found.append(f"last_failure() has {record}, not {reason}, process {case.victim}")
    if first["event"] == "error" and "jax_intranode" not in first["text"]:
        found.append(f"the error is not ours: {first['text']}")
    last = (process.log.rstrip().splitlines() or [""])[-1]
    ends_by_it = first["event"] == "error" and not case.rest_goes_on(platform)
    if ends_by_it and not _names(case, last):
        found.append(f"the last line that it printed does not say why it ended: {last}")
    began = max(e["time"] for e in process.all("begins") if e["time"] < first["time"])
    began = max(fault["time"], began)
    waited = first["time"] - began
    limit = slack * _limit(case)
    if first.get("found") is not None and (after := first["found"] - began) > limit:
        found.append(f"the failure was found after {after:.2f} s; the limit is {limit:.2f} s")
    limit += _XLA_ASKS_S if platform == "gpu" else 0
    if waited > limit:
        found.append(f"the error came after {waited:.2f} s; the limit is {limit:.2f} s")
    if case.fault == "away" and not case.in_meeting and waited < TIMEOUT_S - 0.5:
        found.append(f"the error came after {waited:.2f} s, before JAX_INTRANODE_TIMEOUT_S")
    if process.first("no later error") is not None:
        found.append("the call after the error raised none")
    for error in errors[1:]:
        began = max(e["time"] for e in process.all("begins") if e["time"] <= error["time"])
        later = error["time"] - began
        if later > slack * _DEAD_S:
            found.append(f"the next error came after {later:.2f} s")
    assert process.ended is not None
    end = process.ended - errors[-1]["time"]
    if end > slack * _END_S:
        found.append(f"the process ended {end:.1f} s after the error")
    return found


def _names(case: Case, text: str) -> bool:
    """Whether a text names the victim."""
    return re.search(rf"\b(process|rank) {case.victim}\b", text) is not None


def _limit(case: Case) -> float:
    """Seconds from the fault, or from the call after it, to the failure."""
    if case.before_watch or (case.in_meeting and not case.dies):
        # The first process to give up says so. Others wait for its verdict 10 s longer.
        return TIMEOUT_S + 12
    if case.dies:
        return _GOODBYE_S if case.fault == "exit" else _DEAD_S
    if case.fault == "shutdown":
        return _DEAD_S
    return (SILENT_S if case.fault == "stop" else TIMEOUT_S) + 1
