"""Ordinary programs of several processes that must not fail, and say nothing of a failure.

What they have in common: nobody is missing, somebody is late, and the processes end as programs do.
"""

import re
from collections.abc import Iterator

import pytest
from program_ranks import Program, Started, start_all
from tiers import quick

SHORT = {"JAX_INTRANODE_TIMEOUT_S": "5"}


# With two ranks a sum is 3 times its scale.
PROGRAMS = {
    # How they end.
    "computes_in_the_last_step": Program([["6.0"], []]),
    "ends_while_it_computes_in_a_thread": Program([["6.0"], []]),
    "other_threads_never_rest": Program([[]] * 3),
    "ends_long_before_its_peer": Program([["4.0"], []]),
    "shuts_down_in_an_exit_handler": Program([["6.0"]] * 2),
    "signals_at_its_end": Program([["6.0"], []]),
    "ends_jax_itself shuts_down": Program([["6.0"]] * 2),
    "ends_jax_itself clears_backends": Program([["6.0"]] * 2),
    "leaves_after_shutdown": Program([["6.0"]] * 2),
    "calls_after_its_end": Program([["6.0"], ["6.0"]]),
    "distributed_shutdown_in_the_middle": Program([["6.0", "False"], ["6.0"]]),
    # Ranks that are not equally fast; processes, threads, signals, exceptions.
    "all_that_go_on": Program(
        [
            [
                *("3.0", "6.0", "2.0", "6.0", "3.0", "9.0", "6.0"),
                *("interrupted", "6.0", "9.0", "6.0", "36", "6.0", "None"),
            ],
            [
                *("3.0", "6.0", "6.0", "9.0", "6.0"),
                *("interrupted", "6.0", "9.0", "6.0", "JaxRuntimeError"),
                *("NameError", "4.0", "36"),
            ],
        ],
    ),
    "all_ranks_are_stopped": Program(
        [["6.0"]] * 2, env=SHORT, only_cpu="a kernel goes on while its process is stopped"
    ),
    "all_ranks_are_stopped 35 5": Program([["6.0"]] * 2, env={"JAX_INTRANODE_TIMEOUT_S": "90"}),
    "plain": Program([["6.0"]] * 2, options=["-X", "dev", "-W", "error"]),
}


# Variants of others, and those that take long.
FULL = (
    *("ends_long_before_its_peer", "all_ranks_are_stopped 35 5"),
    *("distributed_shutdown_in_the_middle", "shuts_down_in_an_exit_handler"),
    *("ends_jax_itself clears_backends", "computes_in_the_last_step", "other_threads_never_rest"),
)


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    yield from start_all(request, PROGRAMS, tmp_path_factory.mktemp("ordinary"))


@pytest.mark.parametrize("name", quick(PROGRAMS, PROGRAMS.keys() - FULL))
def test_does_not_fail(started: Started, name: str) -> None:
    outcome = started[name].result()
    found = [outcome.said(rank) for rank in range(len(outcome.logs))]
    assert found == [list(results) for results in PROGRAMS[name].results], str(outcome)
    assert not any(outcome.exit_codes), str(outcome)
    for rank, log in enumerate(outcome.logs):
        assert outcome.said(rank, "END") == ["None"], str(outcome)
        assert not re.search(r"^(ERROR|CRITICAL):jax_intranode", log, re.MULTILINE), str(outcome)
        assert "fall back to jax.lax" not in log, str(outcome)
        assert "nanobind" not in log, str(outcome)  # leaks that it sees when Python ends
        if PROGRAMS[name].options:
            assert "Exception ignored" not in log, str(outcome)
