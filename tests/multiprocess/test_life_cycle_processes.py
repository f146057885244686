"""The life cycle of communicators of several processes: shutdown and crashes."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import cases
import jax
import multiprocess_ranks
import pytest
from devices import need_ranks
from multiprocess_ranks import run_in_ranks
from processes import free_port

import jax_intranode
from jax_intranode._src.command_line.launcher.files import RankError
from jax_intranode._src.group import rendezvous
from jax_intranode._src.jax_private.distributed import key_value_client


def step(name: str) -> None:
    key_value_client().wait_at_barrier(name, 60_000)


def check_sum(seed: int) -> None:
    mesh = cases.line()
    parts = cases.random("float32", (mesh.size, 100), seed)
    cases.check(cases.psum_of(parts, mesh), cases.everywhere(cases.oracle(parts), mesh.size))


# In the ranks.


def shut_down_one_after_another() -> None:
    """A rank shuts down while the others still use the communicators. Then all rendezvous again."""
    for first in range(jax.process_count()):
        check_sum(first)
        for turn in range(jax.process_count()):
            step(f"shutdown {first} {turn}")
            if (first + turn) % jax.process_count() == jax.process_index():
                jax_intranode.shutdown()
                jax.clear_caches()
    check_sum(10)
    set_up_often(20)


def resources() -> dict[str, int]:
    """What this process holds of the system."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "segments": sum(
            path.name.startswith(f"jax_intranode.{os.getpid()}.")
            for path in Path("/dev/shm").iterdir()
        ),
    }


def set_up_often(times: int) -> None:
    """Sets communicators up and ends them again and again. Nothing may be left each time."""
    mesh = cases.line()
    check_sum(0)
    jax_intranode.shutdown()
    for turn in range(times):
        if turn == min(5, times // 2):
            before = resources()
        jax_intranode.initialize(mesh)
        assert rendezvous.rendezvous_of(mesh.devices.flat).reason is None
        assert rendezvous.rendezvous_of(mesh.devices.flat).watch is not None
        jax_intranode.shutdown()
    after = resources()
    # XLA's and gRPC's threads come and go.
    assert after["threads"] <= before["threads"] + 10, (before, after)
    assert after["mappings"] <= before["mappings"] + 40, (before, after)
    assert after["descriptors"] <= before["descriptors"] + 4, (before, after)
    assert after["segments"] == 0, (before, after)
    jax.clear_caches()
    check_sum(1)
    print("DONE", before, after, flush=True)


def crash(rank: int) -> None:
    check_sum(0)
    step("summed")
    if jax.process_index() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until the launcher ends it
        check_sum(1)


def sums() -> None:
    check_sum(2)
    print("DONE", flush=True)


def many_sums(times: int) -> None:
    for seed in range(times):
        check_sum(seed)
    print("DONE", flush=True)


# The tests.


def test_shut_down_one_after_another(ranks: Callable[..., list[str]]) -> None:
    need_ranks(2)
    assert all("DONE" in log for log in ranks(shut_down_one_after_another, 2))


@pytest.mark.full
def test_set_up_a_thousand_times(ranks: Callable[..., list[str]]) -> None:
    need_ranks(2)
    logs = ranks(set_up_often, 2, arguments=[1000], timeout_s=500)
    assert all("DONE" in log for log in logs)


@pytest.mark.full
def test_two_jobs_at_once(tmp_path: Path) -> None:
    """Jobs of one user on one node have nothing in common, and their ends do not matter."""
    need_ranks(4)
    failed: list[Exception] = []

    def job(number: int, function: Callable[..., None], arguments: list[int]) -> None:
        try:
            log_dir = tmp_path / str(number)
            assert all(
                "DONE" in log for log in run_in_ranks(function, 2, log_dir, arguments=arguments)
            )
        except Exception as error:
            failed.append(error)

    jobs = [(0, set_up_often, [30]), (1, many_sums, [40]), (2, many_sums, [10])]
    threads = [threading.Thread(target=job, args=arguments) for arguments in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_restart_after_a_crash(
    ranks: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
) -> None:
    """A crashed run leaves nothing that disturbs the next run at the same port."""
    need_ranks(2)
    port = free_port()
    monkeypatch.setattr(multiprocess_ranks, "free_port", lambda: port)
    with pytest.raises(RankError) as error:
        ranks(crash, 2, arguments=[rank], env={"JAX_INTRANODE_TIMEOUT_S": "20"})
    assert error.value.exit_codes[rank] == -signal.SIGKILL
    assert all("DONE" in log for log in ranks(sums, 2))
