"""The tools in their smallest runs. Their figures are judged by those who use them."""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import bench
import compare_versions
import gpu_checks
import jax
import jax.numpy as jnp
import performance_page
import profiled_overlap
import pytest
import tune_profile
from bench_peers import registry as peers
from bench_settings import settings_of
from devices import need_devices
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_intranode._src.command_line.bench import report
from jax_intranode._src.command_line.launcher.runs import (
    MODES,
    PROCESS_PER_DEVICE,
    SINGLE_PROCESS,
    ProgressLine,
)
from jax_intranode._src.native import definitions
from jax_intranode._src.selection import tuning
from jax_intranode._src.selection.overlap import plan as overlap_plan
from jax_intranode._src.selection.overlap.profiles import H200, Profile
from jax_intranode._src.selection.table import Row

pytestmark = pytest.mark.one_version

ROOT = Path(__file__).parent.parent

# `tools/bench.py --peers`.

NCCL_TESTS = """\
# nccl-tests version 2.17.1 nccl-headers=22809 nccl-library=22809
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
        1024           512  bfloat16     sum      -1    11.25    0.09    0.14      0    10.98
        4096          2048  bfloat16     sum      -1    11.40    0.36    0.54      3    11.10
       16384          8192  bfloat16    none      -1   1.2e+03    0.01    0.02    N/A    11.87
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_peer(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for nccl-tests is called, read and shown beside our times."""
    (tmp_path / "table").write_text(NCCL_TESTS)
    program = tmp_path / "all_reduce_perf"
    text = (
        "echo no device; exit 3" if fails else f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/table'
    )
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "torch", None)
    settings = settings_of("psum", platform="gpu", dtypes=["bfloat16", "int16"])
    found = peers.measure(list(peers.PEERS), settings, 20, ProgressLine(sys.stderr, 1))
    error = capsys.readouterr().err
    assert "# torch not measured: torch is not installed" in error
    if fails:
        assert found["rows"] == []
        assert "# nccl-tests not measured: it failed" in error and "no device" in error
        return
    assert "# nccl-tests does not know int16" in error
    assert found["versions"] == ["nccl-tests 2.17.1 (NCCL 22809)"]
    assert (tmp_path / "asked").read_text() == (
        "-g 2 -b 1024 -e 4096 -f 4 -d bfloat16 -n 3 -w 1 -G 20 -c 1\n"
    )
    ours = {"dtype": "bfloat16", "size": 1024, "mode": SINGLE_PROCESS, "graph_time_us": 2.5}
    table = [line.split() for line in peers.table_of(found, [ours]).splitlines()]
    assert table[2] == ["1024", "bfloat16", "|", "2.50", "11.25"]
    assert table[3] == ["4096", "bfloat16", "|", "-", "11.40"]
    assert table[4][-1] == "3"


# `tools/bench.py plot`.


def result_of(operation: str) -> dict[str, Any]:
    """The JSON file of a run of `bench` on GPUs."""
    if operation == "psum":
        columns, rows = report.COLLECTIVES, [{"size": 1024, "algorithm": "one_shot"}]
    else:
        shape = {"m": 8192, "k": 4096, "n": 1792}
        columns, rows = report.MATMULS, [{**shape, "operation": operation, "algorithm": operation}]
    times = {"time_us": 400.0, "lax_time_us": 500.0, "graph_time_us": 300.0, "bound_us": 300.0}
    zeros = {column.field: 0 for _, of_group in columns for column in of_group}
    header = {
        **dict.fromkeys(("jax", "jaxlib", "jax_intranode", "nccl"), "0.1"),
        **{"operation": operation, "devices": 4, "device": "NVIDIA H200", "platform": "gpu"},
        **{"backward": False, "date": "2026-11-21T10:00:00+00:00"},
    }
    return {
        "version": report.VERSION,
        "header": header,
        "rows": [
            {**zeros, **times, **row, "dtype": "bfloat16", "mode": mode}
            for row in rows
            for mode in MODES
        ],
        "peers": {"versions": [], "rows": []},
    }


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def draw(content: str) -> int:
        (tmp_path / "rows.json").write_text(content)
        return bench.main(["plot", f"{tmp_path}/rows.json", "-o", f"{tmp_path}/plot.png"])

    if importlib.util.find_spec("matplotlib") is None:
        assert draw(json.dumps(result_of("psum"))) == 2
        assert "jax_intranode[plot]" in capsys.readouterr().err
        return
    for operation in ("psum", "all_gather_matmul"):
        assert draw(json.dumps(result_of(operation))) == 0
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        (tmp_path / "plot.png").unlink()
    for content, says in (
        ("no JSON", "not what `bench --json` writes"),
        ('{"version": 1}', "1, not 2"),
    ):
        assert draw(content) == 2 and says in capsys.readouterr().err


# Pages and comparisons.


def test_the_figures_of_the_pages_are_up_to_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {str(page.relative_to(ROOT)) for page in performance_page.PAGES}
    files = ROOT.glob("docs/measurements/*.jsonl")
    runs = {str(file.relative_to(ROOT).with_suffix(".md")) for file in files}
    assert names == {
        "docs/performance.md",
        "docs/serving.md",
        "docs/experts.md",
        "docs/halo.md",
        "README.md",
        *runs,
    }
    for page in performance_page.PAGES:
        assert "<!-- make: " in page.read_text(), page
    monkeypatch.setattr(sys, "argv", ["performance_page.py", "--check"])
    assert performance_page._main() == 0, capsys.readouterr().err


def test_the_newest_run_of_a_minor_version_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = {"library": "pallas", "dtype": "bfloat16", "m": 8192, "k": 4096, "n": 1792}
    run = result_of("all_gather_matmul") | {
        "peers": {"versions": ["pallas of jax"], "rows": [peer | {"time_us": 350.0, "wrong": 0}]}
    }
    file = tmp_path / "large_4_h200.json"

    def add(jax: str, date: str, our_us: float) -> None:
        run["header"] |= {"jax": jax, "date": f"{date}T10:00:00+00:00", "driver": None}
        run["rows"][0] |= {"time_us": our_us, "none_time_us": our_us / 4, "tuned_time_us": None}
        file.write_text(json.dumps(run))
        performance_page.add([file], tmp_path)

    add("0.12.0.1", "2026-11-22", 401.0)
    add("0.12.1", "2026-11-23", 402.0)
    add("0.13.0", "2026-11-21", 403.0)
    add("0.12.2", "2026-11-22", 404.0)
    assert "left out, 4_h200.jsonl has a run of 2026-11-23" in capsys.readouterr().err

    lines = [json.loads(line) for line in (tmp_path / "4_h200.jsonl").read_text().splitlines()]
    assert [line["jax"] for line in lines] == ["0.12.1"] * 3 + ["0.13.0"] * 3
    assert {line["name"] for line in lines} == {"large"}
    assert lines[0]["none_time_us"] == 402.0 / 4 and "tuned_time_us" not in lines[0]
    assert lines[2]["library"] == "pallas" and lines[2]["libraries"] == ["pallas of jax"]
    newest, older = performance_page.everything(["4_h200"], tmp_path).split("## jax 0.12")
    assert "## jax 0.13" in newest and "| 0.403 (" in newest and "0.404" not in older
    assert "| 0.402 (" in older and "| 0.350 | pallas |" in older

    (tmp_path / "tuning.json").write_text('{"kind": "tuning"}')
    before = (tmp_path / "4_h200.jsonl").read_text()
    run["header"]["date"] = "2026-11-26"
    file.write_text(json.dumps(run))
    with pytest.raises(ValueError, match=r"tuning\.json is not what `bench --json` writes"):
        performance_page.add([file, tmp_path / "tuning.json"], tmp_path)
    assert (tmp_path / "4_h200.jsonl").read_text() == before


def written(folder: Path, node: str, *rows: dict[str, Any]) -> None:
    """Writes rows as `--add` does: the fields that all of a file share come first."""
    common = {"name": "psum", "operation": "psum", "mode": PROCESS_PER_DEVICE, "dtype": "float32"}
    common |= {
        "jax": "0.12.0",
        "date": "2026-11-25",
        "command": "bench",
        "time_us": 2.0,
        "wrong": 0,
    }
    lines = (json.dumps(common | row) + "\n" for row in rows)
    (folder / f"{node}.jsonl").write_text("".join(lines))


def test_tables_have_the_newest_jax_and_all_numbers_of_gpus_that_ran_it(tmp_path: Path) -> None:
    small, large = {"size": 1024, "lax_time_us": 5.0}, {"size": 4096, "lax_time_us": 2.06}
    single = {"mode": SINGLE_PROCESS, "lax_time_us": 77.0}
    old = {"jax": "0.9.3", "lax_time_us": 99.0}
    fell_back = {"size": 1 << 30, "algorithm": "lax", "lax_time_us": 8.0}
    program = {"name": "decode", "program": "step", "lax_time_us": 2.4e3, "time_us": 2e3}
    written(
        tmp_path,
        "2_h100",
        small | old,
        small | single,
        small | {"ratio": 2.5},
        large | {"ratio": 1.03, "sms": 4, "doubts": ["lax spread 56%"]},
        fell_back,
        program,
        program | old,
    )
    written(tmp_path, "4_h100", small | old)
    written(tmp_path, "2_cpu", small)

    caption, _, *table = performance_page.operations(["psum"], tmp_path).splitlines()
    assert "**`psum`**, float32; jax 0.12.0" in caption
    assert table == [
        "| 2 H100: size | ours | `jax.lax` | lax / ours | SMs, link |",
        "| --- | --- | --- | --- | --- |",
        "| 1 KB | 2.00 | 5.00 | 2.50 |  |",
        "| 4 KB | 2.00 | 2.06 ? | 1.03 | 4 |",
    ]
    assert "| `psum` | 4 KB | 2 H100 |" in performance_page.losses([], tmp_path)
    assert "1 KB" not in performance_page.losses([], tmp_path)
    assert performance_page.programs([], tmp_path).splitlines() == [
        "| 2 H100, jax 0.12: times in ms | lax | ours | lax / ours |",
        "| --- | --- | --- | --- |",
        "| `step` | 2.400 | 2.000 | 1.20 |",
    ]

    # New rows make columns, without an edit of the page.
    # "hidden" is beside the faster jax.lax, here the tuned one: (2.2 - 2.0) / (2.2 - 1.8).
    hidden = {"none_time_us": 1.8e3, "lax_tuned_time_us": 2.2e3}
    written(tmp_path, "4_h100", small | {"lax_time_us": 6.0}, program | hidden)
    first, _, *lines = performance_page.operations(["psum"], tmp_path).splitlines()[2:]
    assert first == (
        "| size | 2 H100: ours | `jax.lax` | lax / ours | SMs, link "
        "| 4 H100: ours | `jax.lax` | lax / ours |"
    )
    assert lines[0] == "| 1 KB | 2.00 | 5.00 | 2.50 |  | 2.00 | 6.00 | 3.00 |"
    head, _, line = performance_page.programs(
        ["step=A_step", "late=Not_there"], tmp_path
    ).splitlines()
    assert head.endswith(
        "| 4 H100, jax 0.12: lax | lax tuned | ours | lax / ours | tuned / ours | hidden |"
    )
    assert line.endswith("| 2.400 | 2.000 | 1.20 | 2.400 | 2.200 | 2.000 | 1.20 | 1.10 | 50% |")
    assert performance_page.gains(["2_h100/step", "4_h100/step"], tmp_path) == "20 and 10 %"
    # Ours is faster than the program without communication: that is no bound of it.
    written(tmp_path, "4_h100", program | hidden | {"none_time_us": 2.1e3})
    assert performance_page.programs(["step=A_step"], tmp_path).endswith("| 1.20 | 1.10 | - |\n")


def test_figures_in_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An outlier of jax.lax makes no headline, and a figure of other files fails the check."""
    # 35 at 16 KB is an outlier, and 64 MB is no size of a headline.
    times = {1 << 10: 6.0, 16 << 10: 35.0, 64 << 10: 8.0, 4 << 20: 5.0, 64 << 20: 40.0}
    written(tmp_path, "2_h100", *({"size": s, "lax_time_us": us} for s, us in times.items()))
    assert performance_page.ratios(["2_h100/psum"], tmp_path) == "2.50"
    times[4 << 20] = 9.0
    old = {"jax": "0.9.9", "lax_time_us": 50.0}
    written(tmp_path, "2_h100", old, *({"size": s, "lax_time_us": us} for s, us in times.items()))
    assert performance_page.ratios(["2_h100/psum"], tmp_path) == "3.00 to 4.50"
    written(tmp_path, "2_h100", {"program": "step", "unedited_time_us": 1.9})
    assert performance_page.fused(["2_h100/psum"], tmp_path) == "0.95"

    page = tmp_path / "page.md"
    head, end = "| <!-- make: ratios 2_h100/psum -->", "<!-- end --> |"
    monkeypatch.setattr(sys, "argv", ["performance_page.py", "--check", str(page)])
    page.write_text(f"{head}1.78 to 2.37{end}\n")
    assert performance_page._main() == 1 and "is not up to date" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["performance_page.py", str(page)])
    assert performance_page._main() == 0
    assert page.read_text() == f"{head}1.78 to 2.06{end}\n"
    page.write_text(f"{head.replace('2_h100', '3_h100')}1{end}\n")
    assert performance_page._main() == 1 and "no run psum" in capsys.readouterr().err
    page.write_text(f"{head[2:]}1.78 to 2.06{end}\n")
    assert performance_page._main() == 1 and "a line begins with it" in capsys.readouterr().err
    page.write_text(f"{head.replace('ratios', 'rations')}1{end}\n")
    assert performance_page._main() == 1 and "rations is none of" in capsys.readouterr().err


def test_rows_that_changed_between_versions() -> None:
    before = [(10.0, 20.0)] * 3
    rows = {
        "same": [(10.1, 20.0)] * 3,
        "slower": [(11.0, 20.0)] * 3,
        "other clocks": [(11.0, 22.0)] * 3,
        "noisy": [(9.0, 20.0), (13.0, 20.0), (18.0, 20.0)],
    }
    text = compare_versions.table(
        {(name,): before for name in rows}, {(k,): v for k, v in rows.items()}
    )
    (slower,) = (line for line in text.splitlines() if "SLOWER" in line)
    assert "slower" in slower


@pytest.mark.full
def test_lowered_programs_are_compared(tmp_path: Path) -> None:
    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tools/compare_lowered.py"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200)

    before, after = tmp_path / "before", tmp_path / "after"
    after.mkdir()
    written = run("--write", before, "--only", "^products-gpu-8-narrow-gradient$")
    assert written.returncode == 0, written.stderr
    (program,) = before.iterdir()
    (after / program.name).write_text(program.read_text())
    assert run("--compare", before, after).stdout == "1 programs compared; 0 differ\n"
    (after / program.name).write_text(program.read_text().replace("wgrads = 1", "wgrads = 2"))
    different = run("--compare", before, after)
    assert different.returncode == 1 and "wgrads = 2" in different.stdout


# `tune`'s profile of the overlap model, fitted to times that the model itself makes.


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize(
    "corrections",
    [
        {},
        {"stage": 2.6, "matmul": 0.35, "sender": 0.6},
        {"fixed": 1.5, "sum": 1.4, "stage": 1.1, "copy": 0.5},
    ],
)
def test_the_fit_returns_the_constants(corrections: dict[str, float], noise: float) -> None:
    """Constants that differ no more than runs do stay, and so do the plans of H200s."""
    truth, seeded = tune_profile.corrected(H200, corrections), random.Random(3)

    def jitter() -> float:
        return math.exp(seeded.gauss(0, noise))

    def run(shape: Any, texts: list[str], settle_ms: int = 0) -> list[tuple[float, float]]:
        if settle_ms:
            h200_ms = dict(tune_profile.MATMULS)[shape[2:]]
            return [(1.0, h200_ms * H200.matmul_flops / truth.matmul_flops * jitter())]
        runs = {(c.product, c.plan): c for c in tune_profile.CALIBRATIONS}
        return [
            (of.h200_ms * of.predicted_s(truth) / of.predicted_s(H200) * jitter(), 1.0)
            for of in (runs[shape, text] for text in texts)
        ]

    def copies() -> float:
        return truth.link_bound_bytes_per_s * jitter()

    got, _ = tune_profile.tune(H200, run, copies, tune_profile.Clock(1000))
    if not corrections:
        assert got == H200
    assert isinstance(got, Profile)
    for name in ("matmul_flops", "copy_bytes_per_s", "sender_bytes_per_s"):
        assert getattr(got, name) == pytest.approx(getattr(truth, name), rel=0.03 + noise)
    for columns, tile in truth.tiles.items():
        assert got.tiles[columns].stage_s == pytest.approx(tile.stage_s, rel=0.03 + noise)


def test_every_calibration_is_a_run_that_the_kernels_take() -> None:
    for run in tune_profile.CALIBRATIONS:
        parsed = overlap_plan.parse(run.plan)
        assert definitions.has_fused_kernel(run.product.operation, parsed.tile_columns, wgrad=False)
        assert run.product.sizes.fit_fused(parsed, 512 << 20)


def test_a_probe_with_wrong_results_gives_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the probe, for which everything takes 1 ms, so that short calls look slow."""

    def probe(line: str) -> Path:
        path = tmp_path / "probe"
        path.write_text(
            f"#!{sys.executable}\nimport sys\nfor _ in sys.argv[4:]:\n    print({line!r})\n"
        )
        path.chmod(0o755)
        return path

    monkeypatch.setattr(tune_profile, "start_profile", lambda: H200)
    monkeypatch.setattr(tune_profile, "measure_copies", lambda timeout_s: 384e9)
    monkeypatch.setattr(tune_profile, "reference_cases", lambda: [])
    good = probe("1.0000 ms, share 0.5, matmul alone 1.0000, #wrong 0")
    measured = tune_profile.measure(235, good, compares=True)
    assert isinstance(measured, Profile) and measured.tiles[192].stage_s > H200.tiles[192].stage_s
    with pytest.raises(ValueError, match="wrong results"):
        tune_profile.run_probe(
            probe("1 ms, share 1, matmul alone 1, #wrong 2"),
            ("all_gather_matmul", 2, 512, 64, 64),
            ["tile_columns=128"],
        )


# What needs GPUs.


def test_gpu_checks_measures_programs_in_four_ways(tmp_path: Path) -> None:
    """Decoding and training: lax, lax with tuned flags, ours, and without communication."""
    steps = [step for step in gpu_checks.steps(tmp_path, 2, True) if step[0] == "programs"]
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    asked = [parser.parse_args(command.split("bench.py ")[1].split()) for *_, command, _ in steps]
    assert ",".join(options.name for options in asked).split(",") == [
        *("decode_8b_1", "decode_8b_16", "decode_unrolled"),
        *("transformer", "train_step", "train_step_sequence_parallel", "mlp_block"),
    ]
    for options in asked:
        assert options.ways == ["ours", "lax", "none"] and options.lax_flags == "tuned"
    assert sum(limit_s for _, _, limit_s, *_ in steps) <= 570  # one run of the tool


class Event(NamedTuple):
    """A kernel in a profile."""

    name: str
    duration_ns: int
    stats: list[tuple[str, str]]


def test_kernels_by_call_site() -> None:
    need_devices(2)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def body(x: jax.Array) -> jax.Array:
        y = jax.lax.psum(x, "x")
        return jnp.sin(y)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())
    line = body.__code__.co_firstlineno
    text = jax.jit(mapped).lower(jnp.ones(8)).compile().as_text()
    sites = profiled_overlap.call_sites_in(text)
    psum, sine = f"{__file__}:{line + 1} (body)", f"{__file__}:{line + 2} (body)"
    assert {psum, sine} <= set(sites.values())

    def gathering(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jnp.sin(x), "x", tiled=True) ** 2

    mapped = jax.shard_map(gathering, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    text = jax.jit(jax.grad(lambda x: mapped(x).sum())).lower(jnp.ones(8)).compile().as_text()
    place = f"{__file__}:{gathering.__code__.co_firstlineno + 1} (gathering)"
    assert {place, f"{place}, backward"} <= set(profiled_overlap.call_sites_in(text).values())

    instruction = next(name for name, site in sites.items() if site == psum)
    events = [
        Event("void jax_intranode_kernel<OneShot>(int)", 2_000, [("hlo_op", instruction)]),
        Event("void jax_intranode_kernel<OneShot>(int)", 3_000, [("hlo_op", instruction)]),
        Event("loop_sine_fusion", 9_000, [("hlo_op", "another.1"), ("correlation_id", "7")]),
        Event("MemcpyD2D", 1_000, []),
    ]
    lines = [line.split(maxsplit=4) for line in profiled_overlap.by_call_site(events, sites)]
    assert lines == [  # of five steps
        ["0.2", "1.8", "us", "loop_sine_fusion", "another.1"],
        ["0.4", "1.0", "us", "jax_intranode_kernel", psum],
        ["0.2", "0.2", "us", "MemcpyD2D", "no instruction"],
    ]


def test_a_tuning_gets_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, rows = tmp_path / "node.json", (Row(1024, "one_shot", 1, 128),)
    tables = [tuning.table_fields("multi", "psum", "bare", 2, rows)]
    of_node = {"platform": "gpu", "device": H200.name, "devices": 2, "versions": {}, "date": "now"}
    tuning.write(file, {**of_node, "tables": tables, "profile": None})
    measured: list[Any] = ["no nvcc", dataclasses.replace(H200, sms=100)]
    monkeypatch.setattr(tune_profile, "measure", lambda *_: measured.pop(0))
    assert tune_profile.main([str(file)]) == 1 and "no nvcc" in capsys.readouterr().out
    assert tuning.read(str(file)).profile is None
    assert tune_profile.main([str(file)]) == 0 and "sms=100" in capsys.readouterr().out
    read = tuning.read(str(file))
    assert read.profile is not None and read.profile.sms == 100
    assert [*read.rows.values()] == [rows]
    file.write_text("{}")
    with pytest.raises(ValueError, match="JAX_INTRANODE_TUNING"):
        tune_profile.main([str(file)])


# Options of `tools/bench.py`.


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("psun", ("'psun'", "is none of psum, ", "mlp_block")),
        ("mlp_block,psum", ("'psum'", "is none of decode_scanned, ")),
        ("mlp_block --peers all", ("--peers and --plot", "are for operations")),
        ("psum --ways ours", ("--ways", "not for psum")),
        ("psum --peers ucx", ("--peers", "'ucx'", "none of torch")),
        ("psum --plot {files}", ("--plot", "{files}", "name a file")),
        ("psum --settle 100", ("--settle", "not for psum")),
        ("plot missing.json -o a.png", ("missing.json", "name files that `bench --json`")),
        ("plot {files}/text -o a.png", ("{files}/text", "measure again")),
        ("plot {files}/old.json -o a.png", ("layout 1", "measure again")),
    ],
)
def test_wrong_options_of_bench(
    line: str, says: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "old.json").write_text('{"version": 1}')
    platform = [] if line.startswith("plot") else ["--platform", "cpu"]
    with mock.patch.object(bench.signal, "signal"):
        assert bench.main([*line.format(files=tmp_path).split(), *platform]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("python tools/bench.py: ")
    assert all(text.format(files=tmp_path) in message for text in says), message
