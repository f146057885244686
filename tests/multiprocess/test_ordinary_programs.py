"""Ordinary programs of several processes that must not fail, and say nothing of a failure.

What they have in common: nobody is missing, somebody is late, and the processes end as programs do.
"""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import ordinary_programs
import pytest
from devices import need_ranks
from multiprocess_ranks import params_of, run_in_ranks, said
from tiers import quick

SIX, NONE = ["6.0"], list[str]()  # with two ranks a sum is 3 times its scale
# What each rank says, and how the ranks are run.
PROGRAMS: dict[str, tuple[list[list[str]], dict[str, Any]]] = {
    # How they end.
    "ends_while_it_computes_in_a_thread": ([SIX, NONE], {}),
    "ends_long_before_its_peer": ([["4.0"], NONE], {}),
    "signals_at_its_end": ([SIX, NONE], {}),
    "ends_jax_itself shuts_down": ([SIX] * 2, {}),
    "ends_jax_itself clears_backends": ([SIX] * 2, {}),
    "leaves_after_shutdown": ([SIX] * 2, {}),
    "calls_after_its_end": ([SIX] * 2, {}),
    "distributed_shutdown_in_the_middle": ([["6.0", "False"], SIX], {}),
    # Ranks that are not equally fast; processes, threads, signals, exceptions.
    "all_that_go_on": (
        [
            [
                *("2.0", "6.0", "3.0", "9.0", "6.0"),
                *("interrupted", "6.0", "9.0", "36", "6.0", "None"),
            ],
            [
                *("6.0", "9.0", "6.0", "interrupted", "6.0", "9.0"),
                *("JaxRuntimeError", "NameError", "4.0", "36"),
            ],
        ],
        {},
    ),
    "all_ranks_are_stopped": ([SIX] * 2, {"env": {"JAX_INTRANODE_TIMEOUT_S": "5"}}),
    "all_ranks_are_stopped 35 5": ([SIX] * 2, {"env": {"JAX_INTRANODE_TIMEOUT_S": "90"}}),
    "plain": ([SIX] * 2, {"options": ["-X", "dev", "-W", "error"]}),
}
# Variants of others, and those that take long.
FULL = (
    *("ends_long_before_its_peer", "all_ranks_are_stopped 35 5"),
    *("distributed_shutdown_in_the_middle", "ends_jax_itself clears_backends"),
)


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[list[str]]]]:
    """The programs that this session tests. Some run at once: they sleep most of the time."""
    need_ranks(2)
    logs = tmp_path_factory.mktemp("ordinary")
    with ThreadPoolExecutor(4 if jax.devices()[0].platform == "cpu" else 2) as pool:
        yield {
            name: pool.submit(
                run_in_ranks,
                ordinary_programs.run,
                2,
                logs / name,
                arguments=name.split(),
                **PROGRAMS[name][1],
            )
            for name in (params["name"] for params in params_of(request))
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", quick(PROGRAMS, PROGRAMS.keys() - FULL))
def test_does_not_fail(started: Mapping[str, Future[list[str]]], name: str) -> None:
    results, how = PROGRAMS[name]
    if name == "all_ranks_are_stopped" and jax.devices()[0].platform == "gpu":
        pytest.skip("a kernel goes on while its process is stopped")
    logs = started[name].result()
    assert [said(log) for log in logs] == results, logs
    for log in logs:
        assert said(log, "END") == ["None"], log
        assert not re.search(r"^(ERROR|CRITICAL):jax_intranode", log, re.MULTILINE), log
        assert "fall back to jax.lax" not in log, log
        assert "nanobind" not in log, log  # leaks that it sees when Python ends
        assert not how.get("options") or "Exception ignored" not in log, log
