"""Faults of processes, and how stress/faults/verdict.py judges what it sees.

The variable FAULTS chooses others than these: it is their number, or names cases with commas
between them. `tools/full_checks faults` runs 300.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import pytest
from devices import need_devices
from multiprocess_ranks import params_of
from stress.faults import job, matrix, verdict
from stress.faults.job import Process, Seen
from stress.faults.matrix import Case
from tiers import full

# On machines that run other tests at the same time.
SLACK = 6
PLATFORM = jax.devices()[0].platform
# Each kind of end, ranks that are late for ever, also for the rendezvous, and one that comes.
QUICK = (
    "psum:inside:kill:1of3",
    "psum:second_run:exception:1of2",
    "psum:idle:exit:1of2",
    "psum:first_run:away:0of2",
    "psum:meeting:away:1of2",
    "psum:lowering:delay:0of2",
)
# The same in the pipeline and in the fused kernel.
ON_GPUS = (
    "psum:inside:kill:1of2",
    *("matmul_all_reduce:second_run:os_exit:1of2", "gradient:second_run:away:0of2"),
    *("all_gather_matmul:second_run:away:0of2", "matmul_reduce_scatter:second_run:os_exit:1of2"),
)
MORE = (
    *("psum:second_run:shutdown:1of2", "psum:idle:interrupt:1of2"),
    *("all_gather_matmul:second_run:exception:0of2", "psum:second_run:os_exit:1of3"),
    *map(str, matrix.sample(matrix.WORLDS, 30, seed=0)),
)

CASES = [*QUICK, *(t if PLATFORM == "gpu" else full(t) for t in ON_GPUS), *map(full, MORE)]
if (chosen := os.environ.get("FAULTS", "")).isdecimal():
    worlds = [world for world in matrix.WORLDS if world <= len(jax.devices())]
    CASES = [str(case) for case in matrix.sample(worlds, int(chosen), seed=int(chosen))]
elif chosen:
    CASES = chosen.split(",")


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Future[job.Seen]]]:
    """The jobs of the cases that this session tests; some run at once, because most of them wait.

    When kernels of several programs trap on one GPU at the same time, the driver may miss one
    (docs/how_it_works.md).
    """
    texts = [params["text"] for params in params_of(request)]
    cases = {text: matrix.parse(text) for text in texts}
    with ThreadPoolExecutor(1 if PLATFORM == "gpu" else 3) as pool:
        yield {
            text: pool.submit(job.run, case, PLATFORM, SLACK)
            for text, case in cases.items()
            if case.world <= len(jax.devices())
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("text", CASES)
def test_fault(text: str, jobs: Mapping[str, Future[job.Seen]]) -> None:
    case = matrix.parse(text)
    need_devices(case.world)
    seen = jobs[text].result()
    found = verdict.problems(case, PLATFORM, seen, SLACK)
    assert found == [], [p.log[-3000:] for p in seen.processes]


# The verdict.


def event(name: str, time: float, **facts: Any) -> dict[str, Any]:
    return {"event": name, "time": time, **facts}


def error(time: float, **facts: Any) -> dict[str, Any]:
    text = "jax_intranode: process 1 has exited without notice"
    record = {"failure": text, "reason": "peer_gone", "missing": 1}
    return event("error", time, **{"type": "JaxRuntimeError", "text": text, **record, **facts})


FOUND = [error(2.4), event("begins", 2.4), error(2.5)]
# What a survivor said at last, what else is different, and what the verdict says of it.
VERDICTS: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    (FOUND, {}, ""),
    ([event("wrong", 1.15, turn=1), *FOUND], {}, "wrong values in runs [1]"),
    ([error(3.1)], {}, "came after 1.10 s; the limit"),
    ([error(2.9, found=3.2)], {}, "was found after 1.20 s; the limit is 1.00 s"),
    ([error(2.3, text="jax_intranode: no")], {}, "does not name process 1"),
    ([error(2.3, text="process 1")], {}, "the error is not ours"),
    ([error(2.3, text="process 1 is late")], {}, "does not say 'has exited"),
    ([error(2.3, missing=0)], {}, "peer_gone, process 0, not peer_gone"),
    ([error(2.3, type="OSError")], {}, "the exception is a OSError"),
    ([error(2.3, failure="")], {}, "last_failure() does not name it"),
    ([*FOUND, event("no later error", 2.5)], {}, "the call after the error"),
    ([*FOUND, event("done", 2.5)], {}, "as if nothing had happened"),
    ([], {}, "has seen no error"),
    (FOUND, {"log": "process 1\nTraceback"}, "the last line that it printed"),
    (FOUND, {"exit_code": 0}, "exit code 0 after a failure"),
    (FOUND, {"exit_code": None}, "had not ended long after the fault"),
    (FOUND, {"ended": 20.0}, "ended 17.5 s after the error"),
]


@pytest.mark.parametrize(("events", "changes", "says"), VERDICTS)
def test_verdict(events: list[dict[str, Any]], changes: dict[str, Any], says: str) -> None:
    before = [event("begins", 1.0), event("right", 1.1, turn=0), event("begins", 1.2)]
    log = "Traceback\n\njax_intranode: process 1 ended\n"
    survivor = Process([*before, *events], exit_code=1, ended=3.0, log=log)
    victim = Process([event("fault", 2.0)], exit_code=-9, ended=2.0)
    seen = Seen([dataclasses.replace(survivor, **changes), victim], [])
    found = verdict.problems(Case(2, 1, "kill", "first_run", "psum"), "cpu", seen, 1)
    assert says in " ".join(found) and bool(says) == bool(found), found
