"""Runs of the benchmark on CPU devices, whole programs, options that are refused."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_programs import definitions as programs
from bench_programs import measure as measure_program
from bench_settings import RunHere, mesh_of_two, settings_of
from jax.sharding import PartitionSpec
from tiers import full

import jax_intranode
from jax_intranode._src.command_line import machine
from jax_intranode._src.command_line.bench import report, timing
from jax_intranode._src.command_line.launcher.runs import MODES
from jax_intranode._src.command_line.options import WrongInput
from jax_intranode._src.operations import RECORDS

pytestmark = pytest.mark.one_version

# Whole programs.


def stand_in(library: Any, mesh: jax.sharding.Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program with two arguments. Only lax's version has an error."""
    error, spec = 1e-3 if library is jax.lax else 0.0, PartitionSpec("x")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False)
    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return library.psum(x, "x") / 2 + error, y

    sharding = jax.sharding.NamedSharding(mesh, spec)
    return step, tuple(jax.device_put(v, sharding) for v in (jnp.ones(8), jnp.zeros(8)))


def test_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(programs.PROGRAMS, "stand_in", stand_in)
    row, _ = measure_program.measure(settings_of("stand_in"), mesh_of_two())
    assert row["difference"] == pytest.approx(1e-3, rel=0.01)
    assert row["ratio"] == pytest.approx(row["lax_time_us"] / row["time_us"])
    assert row["time_p99_us"] >= row["time_us"] > 0
    first, *cells = report.line(measure_program.TABLE, row).split()
    assert first == "stand_in" and "1.0e-03" in cells


def test_difference_of_infinite_values() -> None:
    good, bad = jnp.ones(2), jnp.array([1, jnp.inf])
    assert measure_program._difference(good, good) == 0
    assert np.isnan(measure_program._difference(bad, good))
    assert np.isnan(measure_program._difference(good, bad))


# Runs.

PAGE = Path(__file__).resolve().parent.parent / "docs" / "measurements" / "json_file.md"


def documented(kind: str) -> set[str]:
    """The fields that the page says a row of a kind has: the first column of its table."""
    table = PAGE.read_text().partition(f"A row of a {kind}")[2].partition("A row of")[0]
    keys = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return set(re.findall("`([a-z0-9_]+)`", "".join(keys)))


def measured(
    run_here: RunHere, command: str, file: Path
) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """The output of a run with two CPU devices, and the header and the rows of its file."""
    code, out, err = run_here(f"{command} --platform cpu --devices 2 --json {file}")
    assert code == 0, out + err
    assert "# wrong elements: 0 OK" in out or "tools" in command
    assert "\r" not in err
    written = json.loads(file.read_text())
    assert (list(written), written["version"]) == (["version", "header", "rows", "peers"], 2)
    assert written["peers"] == {"versions": [], "rows": []}
    return out, written["header"], written["rows"]


# An operation, arrays, the dtype, algorithms of ours, busbw / algbw, and the largest error.
COLLECTIVES = [
    ("psum", 1, "bfloat16", RECORDS["psum"].in_order, 1.0, 2.0**-7),
    full(("psum_scatter+all_gather", 3, "int32", ("push",), 1.0, None)),
    full(("psum_scatter", 1, "float16", ("reduce_scatter",), 0.5, 2.0**-10)),
    full(("all_gather", 1, "int16", ("all_gather",), 0.5, None)),
]


@pytest.mark.parametrize("case", COLLECTIVES, ids=lambda case: case[0])
def test_both_modes_on_the_cpu(case: Any, tmp_path: Path, run_here: RunHere) -> None:
    name, leaves, dtype, algorithms, factor, most = case
    words = f"bench {name} -b 1K -e 4K -d {dtype} --leaves {leaves} -n 2 -w 1 --chain 2"
    out, header, rows = measured(run_here, f"{words} --latency-hiding off", tmp_path / "rows.json")
    known = {"operation": name, "mode": "both", "devices": 2, "leaves": leaves, "chain": 2}
    known |= {"iterations": 2, "warmup_iterations": 1, "jax_intranode": jax_intranode.__version__}
    assert header | known == header
    assert header["command"].startswith(f"python -m jax_intranode {words}")
    assert "--json" not in header["command"]
    assert "latency_hiding_scheduler=false" in header["xla_flags"]  # as the ranks see it
    fell_back = any(row["algorithm"] == "lax" for row in rows)
    assert ("# fell back to jax.lax: " in out) == fell_back
    assert [(r["mode"], r["size"]) for r in rows] == [(m, s) for m in MODES for s in (1024, 4096)]
    for row in rows:
        assert set(row) == documented("collective")
        assert row["count"] * jnp.dtype(dtype).itemsize == row["size"] and row["dtype"] == dtype
        # In one process the larger size falls back to jax.lax.
        assert row["algorithm"] in algorithms or (row["mode"], row["size"]) == (MODES[1], 4096)
        assert row["operations"] == (6 if leaves == 3 else 1)
        assert row["wrong"] == row["lax_wrong"] == 0
        if most:
            # The error is 0 where float32 represents the sums exactly.
            assert 0 <= row["error"] < most / 2 and 0 <= row["lax_error"] < most
        else:
            assert row["error"] is row["lax_error"] is None
        assert row["graph_time_us"] is row["graph_time_p99_us"] is row["graph_wrong"] is None
        assert row["time_p99_us"] >= row["time_us"] >= 0
        assert row["lax_time_p99_us"] >= row["lax_time_us"] >= 0
        if row["algbw"] is not None:
            assert row["busbw"] == pytest.approx(factor * row["algbw"])
            assert row["ratio"] == pytest.approx(row["lax_time_us"] / row["time_us"])


SHAPES = ([32, 16, 24],)
MATMULS = [
    full("all_gather_matmul --shapes 32,16,24 --mode both", MODES, SHAPES, ["all_gather"]),
    (
        f"matmul_reduce_scatter --shapes 32,16,24 --backward -d float16 --mode {MODES[1]}",
        *(MODES[1:], SHAPES, ["all_gather"]),
    ),
    full(
        f"matmul_all_reduce --settle 1 --mode {MODES[0]}",
        *(MODES[:1], ([32, 32, 48], [128, 64, 32]), RECORDS["psum"].in_order),
    ),
]


@pytest.mark.parametrize(("command", "modes", "shapes", "algorithms"), MATMULS)
def test_matmuls_on_the_cpu(
    command: str, modes: Any, shapes: Any, algorithms: Any, tmp_path: Path, run_here: RunHere
) -> None:
    out, header, rows = measured(
        run_here, f"bench {command} -n 1 -w 0 --chain 1", tmp_path / "rows.json"
    )
    name, backward, settles = command.split()[0], "--backward" in command, "--settle" in command
    known = {"operation": name, "backward": backward, "settle_ms": int(settles)}
    assert header | known == header
    assert (", each after 1 ms of untimed calls;" in out) is settles
    assert [(row["mode"], [row[key] for key in "mkn"]) for row in rows] == [
        (mode, shape) for mode in modes for shape in shapes
    ]
    for row in rows:
        assert set(row) == documented("collective matmul")
        assert row["operation"] == name and row["backward"] is backward
        assert row["algorithm"] in algorithms
        assert row["wrong"] == row["lax_wrong"] == 0
        assert 0 < row["error"] < 2.0**-7 and 0 < row["lax_error"] < 2.0**-7
        assert row["bound_us"] is row["share"] is row["lax_share"] is None


@pytest.mark.full
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_whole_programs_on_the_cpu(name: str, tmp_path: Path, run_here: RunHere) -> None:
    command = f"tools/bench.py {name} --mode single-process -n 1 -w 0 --chain 1"
    _, header, (row,) = measured(run_here, command, tmp_path / "rows.json")
    assert header["command"] == f"python {command} --platform cpu --devices 2"
    assert set(row) == documented("program")
    assert row["program"] == name and row["handler_calls"] > 0
    assert row["difference"] < 0.1


@pytest.mark.full
def test_ranks_end_with_the_benchmark(tmp_path: Path) -> None:
    command = "-m jax_intranode bench psum --platform cpu --mode single-process -n 100000"
    bench = subprocess.Popen(
        [sys.executable, *command.split()], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert bench.stdout is not None
    assert bench.stdout.readline().startswith("# psum")  # a rank has started
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
    bench.terminate()
    assert bench.wait(timeout=60) == 128 + 15
    bench.stdout.close()
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)


# Marks of doubtful rows.


def test_doubts() -> None:
    right = timing.Times(10.0, 11.0, 0.2)
    assert timing.fields({"ours": right, "lax": right})["doubts"] == []
    times = {"ours": timing.Times(0.004, 1.0, 0.1), "lax": right, "alone": right._replace(spread=1)}
    fields = timing.fields(times)
    assert fields["doubts"] == ["ours 0.00 us", "alone spread 100%"]
    assert (fields["spread"], fields["lax_spread"]) == (0.1, 0.2)


def test_the_spread_is_that_of_the_quartiles() -> None:
    # Of the two devices of this process the second has the larger spread, the first larger times.
    first, second = [100.0] * 4, [10.0, 20, 30, 90]
    times = timing.of_slowest("spread", first, second)
    assert times.p50 == 100
    assert times.spread == pytest.approx((45 - 17.5) / 25)


# Options.


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(gpus: int, asked: int | None, **how: Any) -> tuple[str, int]:
        monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
        options = argparse.Namespace(platform="gpu", devices=asked)
        return machine.platform_and_devices(options, **how)

    assert devices(4, None) == ("gpu", 4)
    for gpus, asked, how, message in (
        (0, None, {}, "--platform gpu: NVML finds no GPU that JAX would see: check CUDA_VIS"),
        (2, 4, {}, "has 2 visible GPUs, not 4: choose --devices 2 or less"),
        (1, None, {"fewest": 2}, "2 or more GPUs; 1 are visible, and 1 are asked for: make"),
        (4, 1, {"fewest": 2}, "4 are visible, and 1 are asked for: choose --devices"),
    ):
        with pytest.raises(WrongInput, match=message):
            devices(gpus, asked, **how)
