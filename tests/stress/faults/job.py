"""The processes of a case: starts them, notes what they do, and leaves none behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import segments_of

import stress
from jax_intranode._src.command_line import machine
from jax_intranode._src.command_line.launcher.job import Job, Streams
from jax_intranode._src.command_line.launcher.own_files import private_directory
from jax_intranode._src.command_line.launcher.rank import rank_env, sharing_env
from jax_intranode._src.command_line.launcher.service import coordination_service
from jax_intranode._src.native import extension
from stress.faults.matrix import Case

# JAX_INTRANODE_TIMEOUT_S of the processes where they give up by it, and where they are to be told.
TIMEOUT_S = 4.0
_LONG_TIMEOUT_S = 60.0
# How long a survivor may take from the fault to its end; and a job in all, with its start.
_END_S = 20.0
_JOB_S = 150.0
_POLL_S = 0.005


@dataclass
class Process:
    """What a process did."""

    events: list[dict[str, Any]] = field(default_factory=list)  # each has "event" and "time"
    exit_code: int | None = None  # or minus a signal's number; None if it had to be killed
    ended: float | None = None  # when, on the clock of the events
    log: str = ""

    def first(self, event: str) -> dict[str, Any] | None:
        """The first event with this name."""
        return next((e for e in self.events if e["event"] == event), None)

    def all(self, event: str) -> list[dict[str, Any]]:
        """All events with this name."""
        return [e for e in self.events if e["event"] == event]


@dataclass
class Seen:
    """What happened in a case."""

    processes: list[Process]
    left: list[str]  # processes and segments, after the survivors had ended


def run(
    case: Case, platform: str, slack: float, prefixes: Sequence[Sequence[str]] = ((),) * 8
) -> Seen:
    """Runs the processes of a case until all survivors have ended.

    `slack` is a factor for the limits, on a machine that is busy. `prefixes`: what comes in front
    of the command of each.
    """
    ranks = range(case.world)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(private_directory())
        # Not in a rank: JAX ends the others when it loses the service, and no error is seen.
        coordinator = stack.enter_context(coordination_service(case.world))
        logs = [stack.enter_context((directory / f"{rank}.log").open("wb")) for rank in ranks]
        program = [sys.executable, "-P", "-m", "stress.faults.rank", str(case), platform]
        with Job(
            [[*prefixes[rank], *program, str(rank), str(directory)] for rank in ranks],
            env=[_environment(case, platform, rank, coordinator) for rank in ranks],
            streams=[Streams(stdout=log, stderr=subprocess.STDOUT) for log in logs],
        ) as job:
            seen = _watch(case, platform, job, directory, slack)
        for rank, process in enumerate(seen.processes):
            process.events = _events(directory, rank)
            process.log = (directory / f"{rank}.log").read_text(errors="replace")
        return seen


def _environment(case: Case, platform: str, rank: int, coordinator: str) -> dict[str, str]:
    patient = case.fault != "away" and not case.in_meeting
    environment = {
        **rank_env(rank, case.world, coordinator, [rank] if platform == "gpu" else [0]),
        "JAX_INTRANODE_TIMEOUT_S": str(_LONG_TIMEOUT_S if patient else TIMEOUT_S),
        "JAX_ENABLE_X64": "0",
        **stress.importable(),
    }
    if platform == "gpu":
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if machine.has_one_gpu():
            environment |= sharing_env(rank)
    else:
        # XLA takes long to optimize, and our handlers are no part of what it optimizes.
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return environment


def _events(directory: Path, rank: int) -> list[dict[str, Any]]:
    path = directory / f"{rank}.events"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # the last one may be unfinished


def _watch(case: Case, platform: str, job: Job, directory: Path, slack: float) -> Seen:
    """Waits for the survivors, and for the victim if it is to end by itself."""
    processes = [Process() for _ in job.processes]
    # A victim that ends before it has met the others waits for them in JAX's last barrier.
    ends = not case.fails or (case.dies and not case.before_watch)
    awaited = list(range(case.world)) if ends else case.survivors
    started, fault = time.monotonic(), None
    while any(processes[rank].ended is None for rank in awaited):
        job.wait(_POLL_S)
        now = time.monotonic()
        for process, code in zip(processes, job.exit_codes, strict=True):
            if process.ended is None and code is not None:
                process.ended, process.exit_code = now, code
        if fault is None and case.fault != "none":
            fault = next(
                (e["time"] for e in _events(directory, case.victim) if e["event"] == "fault"),
                None,
            )
        if now > started + _JOB_S * slack or (fault and now > fault + _END_S * slack):
            for rank in awaited:
                if processes[rank].ended is None:
                    # Python prints its stacks. Until the job's end its number is its own.
                    os.kill(job.processes[rank].pid, signal.SIGABRT)
            time.sleep(1)
            break
    pids = [process.pid for process in job.processes]
    left = [
        f"{len(found)} processes of rank {rank}"
        for rank, pid in enumerate(pids)
        if processes[rank].ended is not None and (found := _group(pid))
    ]
    if all(process.ended is not None for process in processes):
        if case.in_meeting and platform == "cpu":
            # Its peers have not mapped a segment yet. The next process to make one removes it.
            extension.module("cpu").allocate(0, 1 << 20, True).unlink()
        left += [f"segment {segment}" for pid in pids for segment in segments_of(pid)]
    return Seen(processes, left)


def _group(leader: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state ppid pgrp ..."; the name may have spaces.
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found
