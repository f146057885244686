"""Runs the chosen cases, and prints those that failed."""

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from jax_intranode._src.command_line.options import WrongInput
from stress.faults import job, matrix, verdict
from stress.faults.matrix import Case

_LOG_TAIL_CHARS = 2500


def run(arguments: argparse.Namespace, platform: str, devices: int) -> int:
    """Runs cases.

    Args:
        arguments: those of run.py.
        platform: "cpu" or "gpu".
        devices: the largest number of processes.

    Returns:
        The exit code: 0 if all was as it must be in all cases.
    """
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    worlds = [world for world in matrix.WORLDS if world <= devices]
    if arguments.case is not None:
        try:
            cases = [matrix.parse(text) for text in arguments.case.split(",")]
        except ValueError as error:
            raise WrongInput(str(error)) from None
    else:
        cases = matrix.sample(worlds, arguments.cases, seed)
    print(f"# {len(cases)} faults of {platform} processes, --seed {seed}", flush=True)
    with _quiet_service():
        failed = _run_all(cases, platform, arguments.slack, arguments.jobs)
    if arguments.json is not None:
        result = {
            "seed": seed,
            "platform": platform,
            "cases": len(cases),
            "failed": [{"case": str(case), "problems": found} for case, found in failed],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    for what in ("fault", "phase", "operation", "world"):
        counts = Counter(str(getattr(case, what)) for case in cases)
        print(f"# {what}: {', '.join(f'{k} {v}' for k, v in sorted(counts.items()))}")
    print(f"# {len(cases) - len(failed)} of {len(cases)} as they must be", flush=True)
    print(f"# {'FAILED' if failed else 'OK'}", flush=True)
    return 1 if failed else 0


@contextlib.contextmanager
def _quiet_service() -> Iterator[None]:
    """Drops what JAX's coordination service, in this process, prints of each process that it loses.

    What Python writes to stderr is shown.
    """
    shown, python = os.dup(2), sys.stderr
    with open(os.devnull, "wb") as nothing, open(shown, "w", buffering=1) as stream:
        os.dup2(nothing.fileno(), 2)
        sys.stderr = stream
        try:
            yield
        finally:
            sys.stderr = python
            os.dup2(shown, 2)


def _run_all(
    cases: Sequence[Case], platform: str, slack: float, jobs: int
) -> list[tuple[Case, list[str]]]:
    """Runs cases, and a job without a fault after all of them."""
    failed: list[tuple[Case, list[str]]] = []
    started = time.monotonic()

    def show(number: int, case: Case, seen: job.Seen) -> None:
        found = verdict.problems(case, platform, seen, slack)
        left = int((time.monotonic() - started) / number * (len(cases) + 1 - number))
        print(
            f"{number} of {len(cases) + 1}, about {left // 60}:{left % 60:02} left: {case} "
            f"{'FAILED' if found else 'ok'}{_times(case, seen)}",
            flush=True,
        )
        if found:
            failed.append((case, found))
            _describe(case, platform, seen, found)

    last = Case(cases[-1].world, cases[-1].victim, "none", "first_run", cases[-1].operation)
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(job.run, case, platform, slack): case for case in cases}
        try:
            for number, done in enumerate(as_completed(running), 1):
                show(number, running[done], done.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    show(len(cases) + 1, last, job.run(last, platform, slack))
    return failed


def _times(case: Case, seen: job.Seen) -> str:
    """How long after the fault the failures were found, and the errors came."""
    fault = seen.processes[case.victim].first("fault")
    text = ""
    for what, key in (("found", "found"), ("errors", "time")):
        after = [
            event[key] - fault["time"]
            for rank in case.survivors
            for event in _first_errors(seen.processes[rank])
            if fault is not None and event.get(key) is not None
        ]
        text += f", {what} after {min(after):.2f} to {max(after):.2f} s" if after else ""
    return text


def _first_errors(process: job.Process) -> list[dict[str, Any]]:
    return (process.all("error") or process.all("refused"))[:1]


def _describe(case: Case, platform: str, seen: Any, found: Sequence[str]) -> None:
    print(
        "\n".join(f"  {text}" for text in found)
        + f"\n  again: python tests/stress/run.py --faults --platform {platform} --case {case}"
    )
    for rank, process in enumerate(seen.processes):
        tail = process.log[-_LOG_TAIL_CHARS:].rstrip().replace("\n", "\n    | ")
        print(f"  rank {rank}, exit code {process.exit_code}:\n    | {tail}")
    sys.stdout.flush()
