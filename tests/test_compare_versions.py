"""tools/compare_versions.py: its figures and table, and a run of the package against itself."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jax_intranode

TOOL = Path(__file__).parent.parent / "tools" / "compare_versions.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_versions", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_versions"] = module  # dataclasses look the module up
    spec.loader.exec_module(module)
    return module


def row(before: list[float], after: list[float], mode: str = "single-process") -> dict[str, Any]:
    return {"name": "psum 1024 B", "mode": mode, "before": before, "after": after}


def test_summary(tool: ModuleType) -> None:
    found = tool.summary(row([10, 12, 11, 10], [20, 22, 22, 24]))
    assert (found["before_min"], found["before_median"]) == (10, 10.5)
    assert (found["after_min"], found["after_median"]) == (20, 22)
    assert found["ratio_min"] == 2
    # The ratios of the rounds are 2, 22/12, 2 and 2.4; the middle half is 2 to 2.
    assert found["noise"] == 0


def test_rows_that_changed(tool: ModuleType) -> None:
    same, slower = row([10, 10, 10], [10.1, 10.1, 10.1]), row([10, 10, 10], [11, 11, 11])
    # Three rounds have no quartiles but their extremes.
    noisy = row([10, 10, 10], [10.5, 13, 16])
    text = tool.table([same, slower, noisy]).splitlines()
    assert ["SLOWER" in line for line in text[3:6]] == [False, True, False]
    assert text[-1] == "# of 3 rows 1 slower and 0 faster by more than 2 % and the noise"


def test_what_is_measured(tool: ModuleType) -> None:
    everything = tool.measurements(False, ["psum", "matmuls"])
    assert len(everything) == 7 + 2 * 11
    assert everything[0]["size"] == 1 << 10 and everything[6]["size"] == 4 << 20
    assert [item["kind"] for item in tool.measurements(True, ["psum"])] == ["psum", "psum"]


@pytest.mark.full
def test_a_version_against_itself(tmp_path: Path) -> None:
    site = Path(jax_intranode.__file__).parent.parent
    file = tmp_path / "compare.json"
    options = f"--platform cpu --tiny --rounds 3 --mode single-process --only psum --json {file}"
    run = subprocess.run(
        [sys.executable, str(TOOL), str(site), str(site), *options.split()],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(file.read_text())
    assert len(set(result["digests"].values())) == 1
    assert [len(r["before"]) for r in result["rows"]] == [3, 3]
    assert str(tmp_path) not in file.read_text()
