"""`tune`: what is measured becomes rows, and a file that programs obey."""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from bench_settings import mesh_of_two, settings_of
from tiers import quick

import jax_intranode
from jax_intranode._src.command_line.launcher.runs import MODES, SINGLE_PROCESS
from jax_intranode._src.command_line.tune import command, sweep
from jax_intranode._src.command_line.tune.sweep import Measured, fastest, rows_of
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.native import definitions
from jax_intranode._src.selection import table, tuning

pytestmark = pytest.mark.one_version

# Of the operations that are measured.
QUICK = ("psum", "psum_residual_rms_norm")
ONE, TWO = table.Row(0, "one_shot", 128, 256), table.Row(0, "two_shot", 256, 256)


def at(nbytes: int, row: table.Row, us: float = 1.0, lax_us: float = 2.0) -> Measured:
    return Measured(nbytes, dataclasses.replace(row, nbytes=nbytes), us, lax_us)


def test_rows_are_launches_up_to_the_first_loss() -> None:
    measured = [at(64, ONE), at(256, ONE), at(1024, TWO), at(4096, TWO, us=3), at(2048, TWO)]
    assert rows_of(measured) == (
        dataclasses.replace(ONE, nbytes=256),
        dataclasses.replace(TWO, nbytes=2048),
    )
    assert rows_of([*measured, at(128, ONE, us=2.1)]) == (dataclasses.replace(ONE, nbytes=64),)
    assert rows_of([at(64, ONE, us=2.0)]) == (dataclasses.replace(ONE, nbytes=64),)  # as fast
    assert rows_of([at(64, ONE, us=2.1)]) == () == rows_of([])


def test_shipped_rows_stay_above_the_sizes_that_there_was_time_for() -> None:
    shipped = tuple(dataclasses.replace(TWO, nbytes=nbytes) for nbytes in (128, 512, 2048))
    assert rows_of([at(64, ONE), at(512, ONE)], shipped) == (
        dataclasses.replace(ONE, nbytes=512),
        shipped[2],
    )
    lost = at(512, ONE, us=3)
    assert rows_of([at(64, ONE), lost], shipped) == (dataclasses.replace(ONE, nbytes=64),)


def test_the_launch_of_the_size_before_is_kept_if_it_is_as_fast() -> None:
    times = [(10.0, TWO), (10.2, ONE)]
    assert fastest(times, None, 0.03) == (10.0, TWO)
    assert fastest(times, ONE, 0.03) == (10.2, ONE)
    assert fastest(times, ONE, 0.01) == (10.0, TWO)


def test_worlds_and_jobs() -> None:
    assert command.worlds(2) == [2]
    assert command.worlds(4) == [4, 2]
    assert command.worlds(6) == [6, 4, 2]
    assert command.worlds(16) == [definitions.MAX_WORLD_SIZE, 4, 2]
    jobs = list(command.jobs("gpu", 4, list(MODES)))
    assert [(job.devices, job.mode) for job in jobs] == [(n, m) for n in (4, 2) for m in MODES]


class StandIn(sweep.Sweep):
    """A sweep whose times are those of a function of the row."""

    def __init__(self, loses_from: int, disturbed: tuple[int, ...] = ()):
        device = argparse.Namespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
        mesh: Any = argparse.Namespace(devices=argparse.Namespace(flat=[device]))
        settings = settings_of("psum", platform="gpu")
        super().__init__(settings, mesh, 1 << 25, "psum", "bare", math.inf)
        self._loses_from, self._disturbed = loses_from, disturbed
        self.tried: list[table.Row] = []

    def _time_in_graph(self, row: table.Row, label: str) -> float:
        # Two-shot is faster from 64 KB on, and 256 threads always.
        slow = (row.algorithm == "two_shot") != (row.nbytes >= 1 << 16)
        return 10.0 + 5 * slow + 0.01 * abs(row.threads - 256) + 0.001 * (256 - row.blocks)

    def _time_from_jax(self, row: table.Row, label: str) -> tuple[float, float]:
        self.tried.append(row)
        if len(self.tried) in self._disturbed:
            return 100.0, 20.0
        us = self._time_in_graph(row, label)
        return us, 20.0 if row.nbytes < self._loses_from else us - 1


def test_a_sweep_on_gpus_finds_launches_and_the_limit() -> None:
    of_one = StandIn(loses_from=3 << 20)
    begun: list[int] = []
    measured = list(of_one.run(begun.append))
    sizes = [m.nbytes for m in measured]
    assert sizes == begun == [1 << k for k in (10, 12, 14, 16, 18, 20, 22, 24, 21)]
    rows = rows_of(measured)
    assert [(row.nbytes, row.algorithm) for row in rows if row.nbytes >= 1 << 14] == [
        (1 << 14, "one_shot"),
        (1 << 21, "two_shot"),
    ]
    assert all(row.threads == 256 for row in rows if row.nbytes >= 1 << 16)
    # 4 MB were tried twice before they counted as lost.
    assert [row.nbytes for row in of_one.tried].count(1 << 22) == 2


@pytest.mark.parametrize("disturbed", [(1,), (3,), (3, 4), (1, 2)])
def test_a_disturbed_measurement_does_not_end_the_search(disturbed: tuple[int, ...]) -> None:
    of_one = StandIn(loses_from=1 << 20, disturbed=disturbed)
    measured = list(of_one.run(lambda _: None))
    assert rows_of(measured)[-1].nbytes == 1 << 19


@pytest.mark.parametrize("operation", quick(command.OPERATIONS, QUICK))
def test_measuring_on_devices(operation: str) -> None:
    """Two devices: GPUs with two launches, or CPU devices."""
    mesh = mesh_of_two()
    platform = mesh.devices.flat[0].platform
    settings = settings_of(operation, platform=platform, iterations=1, chain=1)
    jax_intranode.initialize(mesh)
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    packets = "bare" if operation in sweep.NORMS else "flagged"
    of_one = sweep.Sweep(
        settings, mesh, rendezvous.epoch_buffer_bytes, operation, packets, math.inf
    )
    before = jax_intranode.usage_counter()
    nbytes = 8192 if operation in sweep.NORMS and platform == "gpu" else 1024
    measured = of_one._measure(nbytes, None)
    assert jax_intranode.usage_counter() > before  # not lax, whatever the table says
    assert measured.nbytes == nbytes and measured.us >= 0 and measured.lax_us >= 0
    assert definitions.OPERATIONS[measured.best.algorithm] == operation
    assert str(measured.best.algorithm) in str(measured)


def run_tune(arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(command, "_ITERATIONS", {"gpu": 1, "cpu": 1})
    monkeypatch.setattr(command, "_CHAIN", {"gpu": 1, "cpu": 1})
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments.split()))


@pytest.mark.full
@pytest.mark.parametrize("mode", [SINGLE_PROCESS, "both"])
def test_the_file_of_the_command_is_what_programs_use(
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "node.json"
    options = f"--platform cpu --operations psum --minutes 3 --mode {mode} -o {file}"
    assert run_tune(options, monkeypatch) == 0
    output = capsys.readouterr().out
    tuned = tuning.read(str(file))
    modes = ("multi", "single") if mode == "both" else ("single",)
    assert set(tuned.rows) == {(m, "psum", p, 2) for m in modes for p in ("bare", "flagged")}
    assert (tuned.platform, tuned.device, tuned.devices) == ("cpu", "cpu", 2)
    assert tuned.profile is None and tuned.versions["jax"]
    assert f"export JAX_INTRANODE_TUNING={file}" in output
    assert "psum of int32, 2 x cpu, single-process" in output


def test_time_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.json"
    options = f"--platform cpu --operations psum --minutes 0.0001 --mode {SINGLE_PROCESS} -o {file}"
    assert run_tune(options, monkeypatch) == 0
    assert tuning.read(str(file)).rows == {}
    output = capsys.readouterr().out
    for dtype in ("float32", "int32"):
        assert f"for want of time: psum of {dtype}, 2 x cpu, single-process" in output
