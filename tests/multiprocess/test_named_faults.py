"""Faults of whole programs that the other ranks are told of: by their words, and within seconds."""

import re
from collections.abc import Iterator

import jax
import pytest
from program_ranks import Outcome, Program, Started, start_all
from tiers import quick

# The promise is 10 s; the rest is for machines that run other tests, too.
NAMED_S = 10 + 10

# Rank 1 raises. tests/stress/faults has faults that need no program of their own, and
# tests/native/monitor_test.cc loses processes in more ways.
RAISES = ("raises", "raises_and_ends_slowly")
PROGRAMS = {
    **dict.fromkeys(RAISES, Program()),
    "waits_in_another_group": Program(env={"JAX_INTRANODE_REPORT_AFTER_S": "1"}),
    "is_lost_among_three": Program([()] * 3, only_cpu="on GPUs the context is lost"),
    "unrelated_errors": Program(),
}


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    # When kernels of several programs trap on one GPU at the same time, the driver may miss one
    # (docs/how_it_works.md).
    yield from start_all(
        request,
        PROGRAMS,
        tmp_path_factory.mktemp("faults"),
        at_once={"cpu": 4, "gpu": 1},
        grace_s=30,
    )


def said(outcome: Outcome, label: str, rank: int = 0) -> str:
    """The only text that a rank said with a label."""
    found = outcome.said(rank, label)
    assert len(found) == 1, (label, outcome)
    return found[0]


@pytest.mark.parametrize("name", quick(RAISES, RAISES[:1]))
def test_rank_0_is_told_of_rank_1(started: Started, name: str) -> None:
    outcome = started[name].result()
    text, (seconds,) = said(outcome, "RESULT"), outcome.said(0, "TOOK")
    assert re.search(
        r"psum.*rank 0 .*rank 1 .*process 1 .*has failed: ValueError: loss is NaN", text
    ), outcome
    assert float(seconds) < NAMED_S, str(outcome)
    assert said(outcome, "RECORD") == "peer_gone 1", str(outcome)
    assert outcome.exit_codes == [0, 1], str(outcome)
    assert "ERROR:jax_intranode" not in outcome.logs[1], str(outcome)  # what rank 0 tells in turn


@pytest.mark.full
@pytest.mark.parametrize("name", ["waits_in_another_group"])
def test_ranks_that_wait_for_each_other_are_told(started: Started, name: str) -> None:
    outcome = started[name].result()
    for rank in range(2):
        told, seconds = outcome.said(rank), outcome.said(rank, "TOOK")
        assert told and float(seconds[0]) < NAMED_S, str(outcome)


@pytest.mark.parametrize("name", ["unrelated_errors"])
def test_unrelated_errors_stay_as_they_are(started: Started, name: str) -> None:
    """An error that the loss of a rank did not cause has its own text, before and after it."""
    outcome = started[name].result()
    assert "process 1 " in said(outcome, "RESULT"), str(outcome)
    assert said(outcome, "RECORD") == "peer_gone 1", str(outcome)
    assert said(outcome, "BEFORE AGAIN") == said(outcome, "BEFORE"), str(outcome)
    on_cpu = jax.devices()[0].platform == "cpu"
    for label in ("BEFORE", "CALLBACK") if on_cpu else ("BEFORE",):
        text = said(outcome, label)
        assert "the callback's own error" in text and "process 1 " not in text, str(outcome)
    if on_cpu:  # on GPUs the CUDA context is lost, and nothing else can fail
        text = said(outcome, "MEMORY")
        assert "RESOURCE_EXHAUSTED" in text and "process 1 " not in text, str(outcome)


@pytest.mark.parametrize("name", ["is_lost_among_three"])
def test_the_rest_goes_on(started: Started, name: str) -> None:
    """After a fault the other processes set up anew, run, and end in order."""
    outcome = started[name].result()
    assert outcome.exit_codes == [0, -9, 0], str(outcome)
    for rank in (0, 2):
        assert "has exited without notice" in said(outcome, "RESULT", rank), str(outcome)
        assert float(outcome.said(rank, "TOOK")[0]) < NAMED_S, str(outcome)
        assert said(outcome, "REST", rank) == "3.0", str(outcome)
