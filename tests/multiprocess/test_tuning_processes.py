"""A tuning in several processes: what they load, and what `tune` measures in them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import cases
import jax
import pytest
from devices import need_ranks
from multiprocess_ranks import run_in_ranks

import jax_intranode
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.functions import PROCESS_PER_DEVICE
from jax_intranode._src.command_line.tune import command, sweep
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.selection import table, tuning


def row(nbytes: int) -> table.Row:
    on_gpus = jax.devices()[0].platform == "gpu"
    return table.Row(nbytes, "two_shot", 64 if on_gpus else 1, 2 if on_gpus else 1)


def obeys_and_measures() -> None:
    """In a rank: runs a psum as the tuning says, then measures launches."""
    mesh = cases.line()
    jax_intranode.initialize(mesh)
    for nbytes in (256, 4096):
        chosen = cases.selection(mesh, ("x",), (nbytes // 4,), "float32")
        assert chosen.algorithm == "two_shot" and "JAX_INTRANODE_TUNING=" in chosen.reason, chosen
    assert cases.selection(mesh, ("x",), (1025,), "float32").algorithm == "lax"
    parts = cases.random("float32", (mesh.size, 1024), 3)
    cases.check(cases.psum_of(parts, mesh), cases.everywhere(cases.oracle(parts), mesh.size))
    print("OBEYS", flush=True)

    platform = jax.devices()[0].platform
    (settings,) = (
        job
        for job in command.jobs(platform, mesh.size, [PROCESS_PER_DEVICE])
        if job.devices == mesh.size
    )
    settings = dataclasses.replace(settings, iterations=1, warmup_iterations=0, chain=1)
    _measure(settings, mesh, "psum" if platform == "gpu" else "all_gather", "bare")
    print("MEASURES", flush=True)


def _measure(settings: Settings, mesh: Any, operation: str, packets: str) -> None:
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    over = iter([False, True])
    of_one = sweep.Sweep(
        settings,
        mesh,
        rendezvous.epoch_buffer_bytes,
        operation,
        packets,
        # Only rank 0 says that the time is over, after one size.
        lambda name: sweep.ask_all_ranks(next(over) and jax.process_index() == 0, name),
    )
    measured = []
    with pytest.raises(sweep.OutOfTime):
        # On GPUs that share one, times mean nothing, and the first size may be lost.
        for of_size in of_one.run(lambda nbytes: None):
            measured.append(of_size)
            if not of_size.wins:
                raise sweep.OutOfTime
    assert all(of_size.us >= 0 and of_size.lax_us >= 0 for of_size in measured)


def test_processes_with_one_tuning(tmp_path: Path) -> None:
    """The file has another name in each process, and the same content."""
    need_ranks(2)
    fields = {
        "platform": jax.devices()[0].platform,
        "device": jax.devices()[0].device_kind,
        "devices": 2,
        "versions": {},
        "date": "2026-11-23",
        "tables": [tuning.table_fields("multi", "psum", "bare", 8, (row(256), row(4096)))],
        "profile": None,
    }
    env = []
    for rank in range(2):
        file = tmp_path / f"{rank}.json"
        tuning.write(file, fields | {"seconds": rank})
        env.append({tuning.VARIABLE: str(file)})
    contents = [json.loads(Path(of_rank[tuning.VARIABLE]).read_text()) for of_rank in env]
    assert contents[0] != contents[1]
    logs = run_in_ranks(obeys_and_measures, 2, tmp_path / "logs", env=env)
    for log in logs:
        assert "OBEYS" in log and "MEASURES" in log, log
