"""Runs functions of the test files in one process a device."""

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from jax_intranode._src import launcher

_MAIN = Path(__file__).with_name("rank_main.py")


def run_in_ranks(
    function: Callable[..., Any],
    world: int,
    log_dir: Path,
    *,
    timeout_s: float = 120,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
    arguments: Sequence[Any] = (),
    local_devices: Sequence[Sequence[int]] | None = None,
) -> list[str]:
    """Calls a module-level function in `world` processes, each with one device.

    Args:
        function: is imported by the ranks from its file.
        world: number of processes.
        log_dir: gets a log a rank.
        timeout_s: after which all of them are ended.
        env: more environment variables, for all ranks or for each.
        arguments: for the function; JSON.
        local_devices: each rank's devices, where it is not one device a rank.

    Returns:
        What each rank printed.

    Raises:
        launcher.RankError: a rank failed; the first failure's text comes first.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    port = launcher.free_port()
    platform = jax.devices()[0].platform
    environments = []
    for rank in range(world):
        extra = env if isinstance(env, Mapping) else (env[rank] if env else {})
        # The parent's own JAX holds most of a GPU's memory.
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if platform == "gpu" else {}
        environments.append(
            {
                **launcher.rank_env(rank, world, port, local_devices and local_devices[rank]),
                **memory,
                **extra,
            }
        )
    command = [
        sys.executable, str(_MAIN), platform, function.__code__.co_filename, function.__name__,
        json.dumps(list(arguments)),
    ]  # fmt: skip
    launcher.run_ranks([command] * world, timeout_s=timeout_s, log_dir=log_dir, env=environments)
    return [(log_dir / f"rank{rank}.log").read_text() for rank in range(world)]


def worlds() -> list[int]:
    """World sizes to test: 2 and 4 on the CPU, 2 and all on GPUs."""
    devices = len(jax.devices())
    if jax.devices()[0].platform == "gpu":
        return sorted({2, devices} & set(range(2, devices + 1)))
    return [2, 4]


def run_cases(of: str) -> None:
    """In a rank: runs all cases of a module, and says how each went."""
    from jax_intranode._src.compat import key_value_client

    for name, case in importlib.import_module(of).CASES.items():
        if case.devices > len(jax.devices()):
            print(f"CASE {name} skipped: needs {case.devices} devices", flush=True)
            continue
        try:
            case.run()
        except BaseException:
            traceback.print_exc()
            print(f"CASE {name} failed", flush=True)
            raise
        # A case ends on all ranks before the next one begins: a failure is found where it is.
        key_value_client().wait_at_barrier(f"case {name}", 60_000)
        print(f"CASE {name} passed", flush=True)


def outcome_of_cases(of: str, world: int, log_dir: Path, env: Mapping[str, str] = {}) -> str:
    """Runs all cases of a module in `world` processes; what rank 0 said, and any failure."""
    try:
        run_in_ranks(run_cases, world, log_dir, timeout_s=280, env=env, arguments=[of])
    except launcher.RankError as error:
        return (log_dir / "rank0.log").read_text() + "\n" + str(error)
    return (log_dir / "rank0.log").read_text()


def check_case(name: str, outcome: str) -> None:
    """Fails unless a case has passed; skips the test if it was skipped."""
    if f"CASE {name} skipped" in outcome:
        pytest.skip(outcome.split(f"CASE {name} skipped: ")[1].splitlines()[0])
    assert f"CASE {name} passed\n" in outcome, outcome[-6000:]
