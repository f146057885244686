"""Assignments of devices to processes: several per process, one visible each, any order."""

from collections.abc import Callable
from typing import Any

import cases
import jax
import pytest
from cases_of_processes import CASES
from devices import need_devices, need_gpus
from multiprocess_ranks import run_cases

NAMES = (
    "every_dtype_and_count-bfloat16-one_shot",
    "contract_several-axes",
    "independent_calls_of_unequal_cost-4",
    "input_overwritten-psum",
)


def check(ranks: Callable[..., Any], devices: int, world: int, **how: Any) -> None:
    """Runs one case of each kind. XLA connects no devices at the end."""
    for log in ranks(run_cases, world, arguments=["cases_of_processes", NAMES], **how):
        for name in NAMES:
            assert f"CASE {name} passed" in log or CASES[name].devices > devices, (name, log)
        assert "[Gloo]" not in log.rpartition("CASE")[2], log


@pytest.mark.full
def test_two_devices_a_process(ranks: Callable[..., Any]) -> None:
    need_devices(4)
    check(ranks, 4, 2, local_devices=[[0, 1], [2, 3]])


def test_all_devices_but_one_in_a_process(ranks: Callable[..., Any]) -> None:
    need_devices(4)
    if jax.devices()[0].platform == "gpu":
        pytest.skip("XLA refuses processes with different numbers of GPUs")
    check(ranks, 4, 2, local_devices=[[0], [1, 2, 3]])


def test_one_visible_gpu_a_process(ranks: Callable[..., Any]) -> None:
    need_gpus()
    need_devices(2)
    n = len(jax.devices())
    env = [{"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(n)]
    check(ranks, n, n, env=env, local_devices=[[0]] * n)


def test_permuted_visible_gpus(ranks: Callable[..., Any]) -> None:
    need_gpus()
    need_devices(2)
    n = len(jax.devices())
    orders = [[(k + rank) % n for k in range(n)] for rank in range(n)]
    env = [{"CUDA_VISIBLE_DEVICES": ",".join(map(str, order))} for order in orders]
    # Rank r takes GPU r, at whatever position r sees it.
    local = [[orders[rank].index(rank)] for rank in range(n)]
    check(ranks, n, n, env=env, local_devices=local)


def test_one_gpu_twice_is_refused(ranks: Callable[..., Any]) -> None:
    need_gpus()
    outputs = ranks(
        say_reason, 2, local_devices=[[0], [0]], env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}
    )
    assert all("are one GPU" in output for output in outputs), outputs


def say_reason() -> None:
    """In a rank: prints why psum falls back to lax."""
    print(cases.selection(cases.line(), ("x",), (1, 100), "float32").reason)
