"""Faults of whole programs that the other ranks are told of: by their words, and within seconds."""

import re
from collections.abc import Iterator

import pytest
from program_ranks import Outcome, Program, Started, start_all

# The promise is 10 s; the rest is for machines that run other tests, too.
NAMED_S = 10 + 10

# tests/stress/faults has faults that need no program of their own, and tests/native/monitor_test.cc
# loses processes in more ways.
PROGRAMS = {
    "raises_and_ends_slowly": Program(),
    "is_lost_among_three": Program([()] * 3, only_cpu="on GPUs the context is lost"),
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


@pytest.mark.parametrize("name", ["raises_and_ends_slowly"])
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


@pytest.mark.parametrize("name", ["is_lost_among_three"])
def test_the_rest_goes_on(started: Started, name: str) -> None:
    """After a fault the other processes set up anew, run, and end in order."""
    outcome = started[name].result()
    assert outcome.exit_codes == [0, -9, 0], str(outcome)
    for rank in (0, 2):
        assert "has exited without notice" in said(outcome, "RESULT", rank), str(outcome)
        assert float(outcome.said(rank, "TOOK")[0]) < NAMED_S, str(outcome)
        assert said(outcome, "REST", rank) == "3.0", str(outcome)
