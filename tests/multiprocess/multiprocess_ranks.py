"""Runs functions of the test files in one process per device."""

import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from devices import MOST_RANKS_OF_A_GPU, ranks_share_a_gpu
from processes import free_port

import jax_intranode
from jax_intranode._src.command_line.launcher.rank import rank_env, sharing_env
from jax_intranode._src.command_line.launcher.runs import RankError, run_ranks
from jax_intranode._src.jax_private.distributed import key_value_client

_MAIN = Path(__file__).with_name("rank_main.py")


def say(text: object, label: str = "RESULT") -> None:
    """In a rank: prints a line that `said` finds."""
    # Text and newline in one write, because threads that log write to the same file.
    print(f"{label}: {' '.join(str(text).split())}\n", end="", flush=True)


def said(log: str, label: str = "RESULT") -> list[str]:
    """What a rank said with a label."""
    return re.findall(rf"^{label}: (.*)$", log, re.MULTILINE)


def leave() -> None:
    """In a rank: ends it without JAX's shutdown, for which a rank that has failed is not there."""
    key_value_client().wait_at_barrier("leave", 60_000)
    if jax.process_index() == 0:
        time.sleep(1)  # it has JAX's coordination service, without which others abort
    sys.stdout.flush()
    os._exit(0)


def _environments(
    world: int,
    env: Mapping[str, str] | Sequence[Mapping[str, str]],
    local_devices: Sequence[Sequence[int]] | None,
) -> list[dict[str, str]]:
    """The variables of each rank, as `run_in_ranks` takes them."""
    port = free_port()
    environments = []
    for rank in range(world):
        extra = env if isinstance(env, Mapping) else (env[rank] if env else {})
        # JAX of this process has reserved most of each GPU's memory.
        on_gpu = jax.devices()[0].platform == "gpu"
        gpu = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if on_gpu else {}
        devices = local_devices and local_devices[rank]
        if ranks_share_a_gpu() and local_devices is None:
            gpu = sharing_env(rank)
            devices = [0]
        environments.append({**rank_env(rank, world, port, devices), **gpu, **extra})
    return environments


def run_in_ranks(
    function: Callable[..., Any],
    world: int,
    log_dir: Path,
    *,
    timeout_s: float = 120,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
    arguments: Sequence[Any] = (),
    local_devices: Sequence[Sequence[int]] | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """Calls a function, which the ranks import from its file, in `world` processes.

    Each has one device, or those in local_devices; ranks may share the machine's only GPU. The
    arguments travel as JSON. `env`: variables for all ranks, or for each. `options`: of Python.
    Returns what each rank printed, which log_dir keeps; a rank that fails raises RankError.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    platform = jax.devices()[0].platform
    environments = _environments(world, env, local_devices)
    command = [
        *(sys.executable, *options, str(_MAIN), platform, function.__code__.co_filename),
        *(function.__name__, json.dumps(list(arguments))),
    ]
    run_ranks([command] * world, timeout_s=timeout_s, log_dir=log_dir, env=environments)
    return [(log_dir / f"rank{rank}.log").read_text() for rank in range(world)]


def worlds() -> list[int]:
    """World sizes to test: 2 and 4 on CPUs or on one GPU, 2 and all on GPUs."""
    devices = len(jax.devices())
    if ranks_share_a_gpu():
        return [2, MOST_RANKS_OF_A_GPU]
    if jax.devices()[0].platform == "gpu":
        return sorted({2, devices} & set(range(2, devices + 1)))
    return [2, 4]


def params_of(request: pytest.FixtureRequest) -> list[Any]:
    """The parameters of the tests that this session runs with a fixture of their module."""
    return [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and request.fixturename in item.fixturenames
    ]


def run_cases(module: str, names: Sequence[str]) -> None:
    """In a rank: runs cases of a module and prints the outcome of each."""
    cases = importlib.import_module(module).CASES
    for name in names:
        case = cases[name]
        if case.devices > len(jax.devices()):
            print(f"CASE {name} skipped: needs {case.devices} devices", flush=True)
            continue
        try:
            case.run()
        except pytest.skip.Exception as skipped:
            print(f"CASE {name} skipped: {skipped}", flush=True)
            continue
        except BaseException:
            traceback.print_exc()
            print(f"CASE {name} failed", flush=True)
            raise
        # All ranks end a case before the next one begins, so a failure is that of its own case.
        key_value_client().wait_at_barrier(f"case {name}", 60_000)
        if len(jax.devices()) > 2:  # they have more partitions than a slab has regions
            jax.clear_caches()  # programs from before do not run after shutdown()
            jax_intranode.shutdown()
        print(f"CASE {name} passed", flush=True)


def outcome_of_cases(
    request: pytest.FixtureRequest,
    module: str,
    world: int,
    log_dir: Path,
    env: Mapping[str, str] = {},
    timeout_s: float = 280,
) -> str:
    """Starts `world` processes once, which run cases of a module.

    The tests that use the requesting fixture with the same parameter, and that this session runs,
    name the cases. Returns what rank 0 printed; after a failure the error of `run_in_ranks`, too.
    """
    names = [p["name"] for p in params_of(request) if p["outcome"] == request.param]
    try:
        run_in_ranks(
            run_cases, world, log_dir, timeout_s=timeout_s, env=env, arguments=[module, names]
        )
    except RankError as error:
        return (log_dir / "rank0.log").read_text() + "\n" + str(error)
    return (log_dir / "rank0.log").read_text()


def check_case(name: str, outcome: str) -> None:
    """Fails unless the case has passed; skips the test if the ranks skipped the case."""
    if f"CASE {name} skipped" in outcome:
        pytest.skip(outcome.split(f"CASE {name} skipped: ")[1].splitlines()[0])
    assert f"CASE {name} passed\n" in outcome, outcome[-6000:]
