"""The performance page is up to date with the measurements, and is made correctly from them."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jax_intranode._src.command_line.launcher.functions import MODES, PROCESS_PER_DEVICE

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
