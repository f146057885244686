"""Ordinary programs of several processes that must not fail, and say nothing of a failure.

What they have in common: nobody is missing, somebody is late, and the processes end as programs do.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import python
from program_ranks import MAIN, Program, Started, start_all
from tiers import quick

SHORT = {"JAX_INTRANODE_TIMEOUT_S": "5"}


# With two ranks a sum is 3 times its scale.
PROGRAMS = {
    # How they end.
    "last_step_unread": Program([["6.0"], []]),
    "computes_in_the_last_step": Program([["6.0"], []]),
    **{
        f"ends_while_it_computes {how}": Program([["6.0"], []])
        for how in ("in_a_thread", "with_a_mesh", "shuts_down", "clears_backends")
    },
    "other_threads_never_rest": Program([[]] * 3),
    "ends_at_different_times": Program([["12.0", "4.0"]] * 3, env=SHORT),
    "ends_long_before_its_peer": Program([["4.0"], []]),
    "half_of_the_ranks_end": Program([["3.0", "6.0", "9.0"]] * 2 + [["7.0"]] * 2),
    # XLA:GPU would ask the peer for its share of the autotuning.
    "ends_before_its_peer_lowers": Program(
        [["True"], []], env={"XLA_FLAGS": "--xla_gpu_shard_autotuning=false"}
    ),
    "collective_in_exit_handlers": Program([["6.0", "9.0"]] * 2),
    "shuts_down_in_an_exit_handler": Program([["6.0"]] * 2),
    "signals_at_its_end": Program([["6.0"], []]),
    "ends_jax_itself shuts_down": Program([["6.0"]] * 2),
    "ends_jax_itself clears_backends": Program([["6.0"]] * 2),
    "leaves_after_shutdown": Program([["6.0"]] * 2),
    "thread_after_the_end": Program([["6.0", "9.0"]] * 2),
    "calls_after_its_end": Program([["6.0"], ["6.0"]]),
    "distributed_shutdown_at_the_end": Program([["6.0", "4.0"], ["4.0"]]),
    "distributed_shutdown_in_the_middle": Program([["6.0", "False"], ["6.0"]]),
    "distributed_again": Program([["6.0"], []]),
    # Ranks that are not equally fast; processes, threads, signals, exceptions.
    "all_that_go_on": Program(
        [
            [
                *("3.0", "6.0", "2.0", "6.0", "3.0", "9.0", "6.0", "3.0"),
                *("interrupted", "6.0", "9.0", "6.0", "6.0", "0", "36", "6.0", "None"),
            ],
            [
                *("3.0", "6.0", "6.0", "9.0", "6.0", "3.0"),
                *("interrupted", "6.0", "9.0", "6.0", "6.0", "0", "JaxRuntimeError"),
                *("NameError", "4.0", "36"),
            ],
        ],
    ),
    "one_rank_is_stopped": Program([["6.0", "9.0"]] * 2),
    "all_ranks_are_stopped": Program(
        [["6.0"]] * 2, env=SHORT, only_cpu="a kernel goes on while its process is stopped"
    ),
    "all_ranks_are_stopped 35 5": Program([["6.0"]] * 2, env={"JAX_INTRANODE_TIMEOUT_S": "90"}),
    "spawned_workers": Program([["4.0", "6.0"]] * 2),
    "checkpoints_at_sigterm": Program([["6.0"]] * 2),
    # Exceptions that do not end them.
    "console_that_showed_an_exception": Program([["None"], ["7"]]),
    "exit_handler_of_jax_fails": Program([["None"], []]),
    "plain": Program([["6.0"]] * 2, options=["-X", "dev", "-W", "error"]),
}


# Variants of others, and those that take long.
FULL = (
    *("ends_while_it_computes with_a_mesh", "ends_while_it_computes shuts_down"),
    "ends_while_it_computes clears_backends",
    "ends_long_before_its_peer",
    "distributed_shutdown_at_the_end",
    *("one_rank_is_stopped", "spawned_workers", "console_that_showed_an_exception"),
    *("all_ranks_are_stopped 35 5", "distributed_again"),
    *("ends_at_different_times", "half_of_the_ranks_end", "collective_in_exit_handlers"),
    *("distributed_shutdown_in_the_middle", "checkpoints_at_sigterm", "thread_after_the_end"),
    *("exit_handler_of_jax_fails", "ends_before_its_peer_lowers"),
    *("shuts_down_in_an_exit_handler", "ends_jax_itself clears_backends"),
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


@pytest.mark.full
def test_an_error_code_takes_no_data_from_a_peer() -> None:
    """All ranks exit with it; rank 1 computes then, and rank 0 waits for its data."""
    done = python(
        *("-P", "-m", "jax_intranode", "launch", "--platform", "cpu", "-n", "2"),
        *("--timeout", "100", MAIN, "launch", "exits_with_a_code_while_it_computes"),
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 3 and "[0] RESULT: 6.0" in done.stdout, done


@pytest.mark.full
def test_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The second run finds nothing of the first, and ends with a step that rank 1 has not read."""
    done = python(
        *("-P", "-m", "jax_intranode", "launch", "--platform", "cpu", "-n", "2"),
        *("--grace", "1", "--restarts", "1", "--timeout", "100"),
        *(MAIN, "launch", "resumes", tmp_path / "checkpoint"),
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 0, done
    found = re.findall(r"^\[(\d)\] RESULT: (.*)$", done.stdout, re.MULTILINE)
    assert sorted(found) == [
        ("0", "6.0"), ("0", "from 0"), ("0", "from 1.0"), ("1", "from 0"), ("1", "from 1.0"),
    ], done  # fmt: skip
    last = done.stderr.partition("launch: restart 1 of 1")[2]
    assert last and "ERROR:jax_intranode" not in last, done
