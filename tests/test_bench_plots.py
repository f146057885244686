"""Plots and tables of the JSON files of the benchmark."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_peers import registry as peers_report
from bench_plots import collectives as collectives_plot
from bench_plots import command as plot
from bench_plots import matmuls as matmul_plot
from bench_settings import RunHere

from jax_intranode import __main__ as command_line
from jax_intranode._src.command_line.bench import record, report
from jax_intranode._src.command_line.launcher.functions import MODES


def result_of(jax_version: str, algorithms: tuple[str, ...]) -> dict[str, Any]:
    """Returns the contents of the JSON file of a run on GPUs."""
    rows = [
        {
            "size": 1024 << 2 * i,
            "dtype": "bfloat16",
            "mode": mode,
            "algorithm": algorithm,
            "graph_time_us": None if algorithm == "lax" else 2.0 + i,
            "time_us": 3.0 + i if i else 0.0,
            "lax_time_us": 9.0 + i,
        }
        for mode in MODES
        for i, algorithm in enumerate(algorithms)
    ]
    peer = {"library": "torch nccl", "dtype": "bfloat16", "size": 1024, "time_us": 9.0}
    header = {
        "operation": "psum",
        "devices": 4,
        "device": "NVIDIA H200",
        "platform": "gpu",
        "jax": jax_version,
        "jaxlib": jax_version,
        "jax_intranode": "0.1.0",
        "nccl": None,
        "date": "2026-11-21T10:00:00+00:00",
    }
    peers_found = {"versions": ["torch 2.9 (NCCL 2.28)"], "rows": [peer]}
    return {"version": record.VERSION, "header": header, "rows": rows, "peers": peers_found}


def test_lines_of_a_plot() -> None:
    result = result_of("0.11.2", ("one_shot", "one_shot", "two_shot", "lax"))
    lines = list(collectives_plot.lines([result]))
    assert [line.label for line in lines] == [
        "ours from JAX, process-per-device",
        "ours in a graph, process-per-device",
        "lax from JAX, process-per-device",
        "ours from JAX, single-process",
        "ours in a graph, single-process",
        "lax from JAX, single-process",
        "torch nccl in a graph",
    ]
    # A logarithmic axis can't show a time of 0.
    assert lines[0].points[0] == (4096, 4.0, 2.5, "one_shot")
    assert [point.algorithm for point in lines[0].points] == ["one_shot", "two_shot", "lax"]
    assert [point.size for point in lines[1].points] == [1024, 4096, 16384]
    assert lines[6].points == [(1024, 9.0, 1.0, None)]
    both = list(collectives_plot.lines([result, result_of("0.12", ("one_shot",))]))
    assert both[0].label == "jax 0.11.2: ours from JAX, process-per-device"
    assert both[-1].label == "jax 0.12: torch nccl in a graph"


def draw(files: list[Path], output: Path) -> int:
    return command_line.main(["plot", *map(str, files), "-o", str(output)])


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for file, version in zip(files, ("0.11.2", "0.12"), strict=True):
        file.write_text(json.dumps(result_of(version, ("one_shot", "two_shot", "lax"))))
    code = draw(files, tmp_path / "plot.png")
    if plot.why_not() is None:
        assert code == 0
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    else:
        assert code == 2
        assert "pip install 'jax_intranode[plot]'" in capsys.readouterr().err


def matmul_result(backward: bool, on_gpus: bool, library: str) -> dict[str, Any]:
    """Returns the contents of the JSON file of a collective matmul."""
    rows = [
        {
            **{column.field: 0 for _, columns in report.MATMULS for column in columns},
            **{"operation": "all_gather_matmul", "backward": backward, "dtype": "bfloat16"},
            **{"m": m, "k": 4096, "n": 1792, "mode": mode, "algorithm": "all_gather"},
            **{"time_us": 400.0, "lax_time_us": 500.0, "ratio": 1.25},
            **{"alone_time_us": 200.0, "bound_us": 300.0 if on_gpus else None},
        }
        for mode in MODES
        for m in (8192, 4096)
    ]
    peer = {"library": library, "dtype": "bfloat16", "m": 8192, "k": 4096, "n": 1792}
    result = result_of("0.12", ())
    result["header"] |= {"operation": "all_gather_matmul", "backward": backward}
    result["peers"]["rows"] = [{**peer, "time_us": 600.0, "time_p99_us": 600.0, "wrong": 2}]
    return {**result, "rows": rows}


def test_lanes_of_a_plot() -> None:
    on_gpus, elsewhere = (matmul_result(False, there, "torch fused") for there in (True, False))
    lanes = matmul_plot.lanes([on_gpus])
    # Both modes of a shape are neighbours.
    assert [(lane.shape.split()[0], lane.mode) for lane in lanes] == [
        (m, mode) for m in ("8192", "4096") for mode in MODES
    ]
    assert lanes[0].shares == {"ours": 0.75, "lax": 0.6, "torch fused": 0.5}
    assert lanes[2].shares == {"ours": 0.75, "lax": 0.6}
    assert lanes[0].text.startswith("1.25 ")
    # Without a bound, shares are those of the matmul alone.
    assert matmul_plot.lanes([elsewhere])[2].shares == {"ours": 0.5, "lax": 0.4}
    both = matmul_plot.lanes([on_gpus, matmul_result(True, True, "torch nccl")])
    assert both[-1].shape.startswith("all_gather_matmul backward, jax 0.12: 4096 ")


def test_plot_of_matmuls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if plot.why_not() is not None:
        pytest.skip("matplotlib is not installed")
    files = [tmp_path / "forward.json", tmp_path / "backward.json", tmp_path / "psum.json"]
    for file, result in zip(
        files,
        (
            matmul_result(False, True, "torch fused"),
            matmul_result(True, False, "another"),
            result_of("0.12", ("one_shot",)),
        ),
        strict=True,
    ):
        file.write_text(json.dumps(result))
    assert draw(files[:2], tmp_path / "plot.png") == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert draw(files[1:], tmp_path / "plot.png") == 2
    assert "can't be drawn in one plot" in capsys.readouterr().err


def test_table_of_the_peers_of_matmuls() -> None:
    result = matmul_result(False, True, "torch fused")
    table = peers_report.table_of(result["peers"], result["rows"]).splitlines()
    columns = [word.strip() for word in table[1].split("  ") if word.strip()]
    assert columns[-2:] == ["ours, single-process", "torch fused"]
    cells = ["0.400", "(0.75)", "0.400", "(0.75)"]
    assert table[2].split() == ["8192", "4096", "1792", "bfloat16", "|", *cells, "0.600", "(0.50)"]
    assert table[3].split() == ["4096", "4096", "1792", "bfloat16", "|", *cells, "-"]
    assert table[4].endswith(": 2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "is not what `bench --json` writes"),
        ("[]", "is not what `bench --json` writes"),
        ('{"version": 1}', "has layout 1, not 2"),
        ('{"version": 2, "rows": [{"program": "mlp"}], "peers": {"rows": []}}', "no rows"),
    ],
)
def test_plot_of_other_files(
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plot, "why_not", lambda: None)
    file = tmp_path / "rows.json"
    file.write_text(text)
    assert draw([file], tmp_path / "plot.png") == 2
    assert message in capsys.readouterr().err


def test_missing_matplotlib_is_reported_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: RunHere
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run_here(f"bench psum --platform cpu --plot {tmp_path}/plot.png")
    assert (code, out) == (2, "") and "pip install 'jax_intranode[plot]'" in err
