"""The performance page is up to date with the measurements, and is made correctly from them."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jax_intranode._src.command_line.launcher import MODES, PROCESS_PER_DEVICE

ROOT = Path(__file__).parent.parent
TOOL = ROOT / "tools" / "performance_page.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance_page", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["performance_page.py", "--check"])
    assert tool._main() == 0, capsys.readouterr().err


def test_measurements_name_no_paths() -> None:
    for file in (ROOT / "docs" / "measurements").glob("*.json"):
        assert not re.search(r"/(work|root|home|tmp)/", file.read_text()), file.name


# Made-up results.

HEADER = {
    "jax": "1.2.3",
    "jaxlib": "1.2.3",
    "jax_intranode": "0.1.0",
    "nccl": "2.0",
    "driver": "570",
    "platform": "gpu",
    "device": "NVIDIA X1",
    "devices": 2,
    "backward": False,
    "date": "2000-01-02T10:00:00+00:00",
}


def collective(modes: tuple[str, ...] = MODES) -> dict[str, Any]:
    rows = [
        {
            **{"size": size, "dtype": "bfloat16", "mode": mode, "algorithm": algorithm},
            **{"graph_time_us": None if algorithm == "lax" else 2.0, "graph_wrong": 0},
            **{"time_us": us, "wrong": 0, "lax_time_us": 6.0, "lax_wrong": 0, "ratio": 6.0 / us},
        }
        for mode in modes
        for size, us, algorithm in ((1024, 3.0, "one_shot"), (4096, 5.95, "two_shot"))
    ]
    rows.append({**rows[0], "size": 16384, "algorithm": "lax", "graph_time_us": None})
    rows[-1] |= {"mode": modes[0], "ratio": 1.01}
    rows += [{**rows[-1], "mode": mode} for mode in modes[1:]]
    header = {**HEADER, "operation": "psum", "command": "python -m jax_intranode bench psum"}
    return {"version": 2, "header": header, "rows": rows, "peers": {"versions": [], "rows": []}}


def matmul() -> dict[str, Any]:
    shape = {"m": 64, "k": 32, "n": 48}
    row = {
        **{"operation": "all_gather_matmul", "dtype": "bfloat16", "mode": PROCESS_PER_DEVICE},
        **shape,
        **{"algorithm": "overlapped", "plans": [{"tile_columns": 192}], "backward": False},
        **{"time_us": 2000.0, "lax_time_us": 3000.0, "ratio": 1.5, "share": 0.75},
        **{"alone_time_us": 1500.0, "bound_us": 1500.0, "wrong": 1, "lax_wrong": 0},
    }
    header = {**HEADER, "operation": "all_gather_matmul", "command": "python -m ..."}
    peer = {"library": "torch fused", "dtype": "bfloat16", **shape, "time_us": 2500.0}
    peers = {"versions": ["torch 3"], "rows": [peer]}
    return {"version": 2, "header": header, "rows": [row], "peers": peers}


def test_table_of_collectives(tool: ModuleType) -> None:
    lines = tool.collectives(collective()).splitlines()
    assert lines[2].startswith("| size | one process per device: in a graph | from JAX | ")
    assert lines[4].split(" | ")[:6] == ["| 1 KB", "2.00", "3.00", "one-shot", "6.00", "2.00"]
    # A ratio of two times of jax.lax means nothing.
    assert lines[6].split(" | ")[:6] == ["| 16 KB", "", "3.00", "`jax.lax`", "6.00", ""]
    assert all(line.count("|") == 12 for line in lines[2:])


def test_table_of_matmuls(tool: ModuleType) -> None:
    lines = tool.matmuls(matmul()).splitlines()
    cells = ["1.500", "1.500", "2.000", "0.75", "fused kernel", "3.000", "1.50", "2.500"]
    assert lines[-1].strip("| ").split(" | ")[1:] == cells
    assert lines[2].endswith(" | `jax.lax` | ratio | torch fused |")


def test_sentences(tool: ModuleType) -> None:
    assert "a `psum` of 1 KB to 4 KB takes 3.0 to 6.0 µs" in tool.headline(collective())
    setup = tool.setup(matmul())
    assert "NVIDIA X1, driver 570, jax 1.2.3" in setup
    assert "torch 3, 2000-01-02; 1 wrong elements" in setup
    assert setup.endswith("\n    python -m ...\n")


def test_where_it_does_not_win(tool: ModuleType) -> None:
    rows = tool.losses(collective((PROCESS_PER_DEVICE,)), matmul()).splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == ["4 KB", "16 KB"]
    assert tool.losses(matmul()) == "In no row of these tables.\n"


def test_page_is_made(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "measurements").mkdir()
    (tmp_path / "figures").mkdir()
    page = "a\n<!-- make: collectives psum.json -->\nold\n<!-- end -->\nb\n"
    made = tool.render(page, tmp_path, True)
    assert made == page
    (tmp_path / "measurements" / "psum.json").write_text(json.dumps(collective()))
    made = tool.render(page, tmp_path, True)
    assert made == page.replace("old\n", tool.collectives(collective()))
    assert tool.render(made, tmp_path, True) == made
    with pytest.raises(ValueError, match="make: tables is none of headline"):
        tool.render(page.replace("collectives", "tables"), tmp_path, True)


def test_figure_is_that_of_its_files(tool: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "measurements").mkdir()
    (tmp_path / "figures").mkdir()
    file = tmp_path / "measurements" / "psum.json"
    file.write_text(json.dumps(collective()))
    page = "<!-- make: figure psum.png psum.json -->\n<!-- end -->\n"
    with pytest.raises(ValueError, match=r"psum\.png is not the figure of psum\.json"):
        tool.render(page, tmp_path, True)
    made = tool.render(page, tmp_path, False)
    assert "![psum](figures/psum.png)" in made
    assert tool.render(made, tmp_path, True) == made
    file.write_text(json.dumps(collective((PROCESS_PER_DEVICE,))))
    with pytest.raises(ValueError, match=r"psum\.png is not the figure"):
        tool.render(made, tmp_path, True)


def test_programs(tool: ModuleType) -> None:
    row = {"program": "mlp_block", "mode": PROCESS_PER_DEVICE, "time_us": 100.0, "ratio": 1.5}
    row |= {"lax_time_us": 150.0, "unedited_time_us": 120.0, "unedited_ratio": 1.25}
    text = tool.programs({"rows": [row]}, {"rows": [{**row, "program": "transformer"}]})
    cells = "one process per device | 0.100 | 0.150 | 1.50 | 0.120 | 1.25 |"
    assert text.endswith(f"| `mlp_block` | {cells}\n| `transformer` | {cells}\n")
