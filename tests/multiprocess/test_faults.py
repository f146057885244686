"""Faults of processes: what `tests/stress/run.py --faults` starts, and how it judges what it sees.

The full tier runs more cases, `tools/full_checks faults` runs 300, and `tools/gpu_checks.py OUT
faults` runs 10 on GPUs.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import pytest
from devices import need_devices
from stress.faults import job, matrix, verdict
from stress.faults.job import Process, Seen
from stress.faults.matrix import Case
from tiers import full

# On machines that run other tests at the same time.
SLACK = 6
PLATFORM = jax.devices()[0].platform
# Each kind of end, and ranks that are late for ever, also for the rendezvous.
QUICK = (
    "psum:inside:kill:1of2",
    "psum:second_run:exception:1of2",
    "psum:idle:exit:1of2",
    "psum:first_run:away:0of2",
    "psum:meeting:away:1of2",
)
# The same in the pipeline and in the fused kernel.
ON_GPUS = (
    *("matmul_all_reduce:second_run:os_exit:1of2", "gradient:second_run:away:0of2"),
    *("all_gather_matmul:second_run:away:0of2", "matmul_reduce_scatter:second_run:os_exit:1of2"),
)
MORE = (
    *("psum:fourth_run:stop:1of2", "psum:second_run:shutdown:1of2", "psum:idle:interrupt:1of2"),
    *("all_gather_matmul:second_run:exception:0of2", "psum:second_run:os_exit:1of3"),
    *map(str, matrix.sample(matrix.WORLDS, 30, seed=0)),
)


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Future[job.Seen]]]:
    """The jobs of the cases that this session tests; some run at once, because most of them wait.

    When kernels of several programs trap on one GPU at the same time, the driver may miss one
    (docs/how_it_works.md).
    """
    found = [item for item in request.session.items if item.path == request.path]
    texts = [
        i.callspec.params["text"] for i in found if getattr(i, "originalname", "") == "test_fault"
    ]
    cases = {text: matrix.parse(text) for text in texts}
    with ThreadPoolExecutor(1 if PLATFORM == "gpu" else 3) as pool:
        yield {
            text: pool.submit(job.run, case, PLATFORM, SLACK)
            for text, case in cases.items()
            if case.world <= len(jax.devices())
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "text", [*QUICK, *(t if PLATFORM == "gpu" else full(t) for t in ON_GPUS), *map(full, MORE)]
)
def test_fault(text: str, jobs: Mapping[str, Future[job.Seen]]) -> None:
    case = matrix.parse(text)
    need_devices(case.world)
    seen = jobs[text].result()
    found = verdict.problems(case, PLATFORM, seen, SLACK)
    assert found == [], [p.log[-3000:] for p in seen.processes]


# The matrix.


def test_names_of_cases() -> None:
    for case in matrix.cases(matrix.WORLDS):
        assert matrix.parse(str(case)) == case
    for text in ("psum", "psum:inside:kill:2of2", "psum:inside:kill:1of5", "a:b:c:1of2"):
        with pytest.raises(ValueError, match=f"^'{text}' names no case; one is psum:"):
            matrix.parse(text)


# The verdict.

CASE = Case(2, 1, "kill", "first_run", "psum")


def event(name: str, time: float, **facts: Any) -> dict[str, Any]:
    return {"event": name, "time": time, **facts}


def error(time: float, **facts: Any) -> dict[str, Any]:
    text = "jax_intranode: process 1 has exited without notice"
    record = {"failure": text, "reason": "peer_gone", "missing": 1}
    return event("error", time, **{"type": "JaxRuntimeError", "text": text, **record, **facts})


def survivor() -> Process:
    events = [
        event("begins", 1.0),
        event("right", 1.1, turn=0),
        event("begins", 1.2),
        error(2.4),
        event("begins", 2.4),
        error(2.5),
    ]
    return Process(
        events, exit_code=1, ended=3.0, log="Traceback\n\njax_intranode: process 1 ended\n"
    )


def victim(time: float = 2.0) -> Process:
    return Process([event("fault", time)], exit_code=-9, ended=time)


def problems(
    process: Process, of_victim: Process | None = None, left: Any = (), platform: str = "cpu"
) -> list[str]:
    return verdict.problems(CASE, platform, Seen([process, of_victim or victim()], list(left)), 1)


def test_verdict_of_what_must_happen() -> None:
    assert problems(survivor()) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p.events.insert(2, event("wrong", 1.15, turn=1)), "wrong values in runs [1]"),
        (
            lambda p: p.events.__setitem__(slice(3, None), [error(3.1)]),
            "came after 1.10 s; the limit",
        ),
        (
            lambda p: p.events.__setitem__(slice(3, None), [error(2.9, found=3.2)]),
            "was found after 1.20 s; the limit is 1.00 s",
        ),
        (lambda p: p.events.insert(3, error(2.3, text="jax_intranode: no")), "name process 1"),
        (lambda p: p.events.insert(3, error(2.3, text="process 1")), "the error is not ours"),
        (
            lambda p: p.events.insert(3, error(2.3, text="process 1 is late")),
            "does not say 'has ex",
        ),
        (
            lambda p: p.events.insert(3, error(2.3, missing=0)),
            "peer_gone, process 0, not peer_gone",
        ),
        (lambda p: p.events.insert(3, error(2.3, type="OSError")), "the exception is a OSError"),
        (lambda p: p.events.append(event("no later error", 2.5)), "the call after the error"),
        (lambda p: p.events.append(event("done", 2.5)), "as if nothing had happened"),
        (lambda p: p.events.__delitem__(slice(3, None)), "has seen no error"),
        (lambda p: p.events.insert(3, error(2.3, failure="")), "last_failure() does not name it"),
        (lambda p: setattr(p, "log", "process 1\nTraceback"), "the last line that it printed"),
        (lambda p: setattr(p, "exit_code", 0), "exit code 0 after a failure"),
        (lambda p: setattr(p, "exit_code", None), "had not ended long after the fault"),
        (lambda p: setattr(p, "ended", 20.0), "ended 17.5 s after the error"),
    ],
)
def test_verdict_of_what_must_not_happen(change: Any, text: str) -> None:
    process = survivor()
    change(process)
    assert text in " ".join(problems(process))


def test_verdict_of_xla_on_gpus() -> None:
    """XLA may be late, but the failure must be found as soon as on CPU devices."""
    process = survivor()
    process.ended = 8.0
    process.events[3:] = [error(7.9, found=2.9)]
    assert problems(process, platform="gpu") == []
    process.events[3:] = [error(7.9, found=3.2)]
    assert "was found after 1.20 s" in " ".join(problems(process, platform="gpu"))
    process.events[3:] = [error(8.2, found=2.9)]
    assert "came after 6.20 s; the limit is 6.10 s" in " ".join(problems(process, platform="gpu"))
