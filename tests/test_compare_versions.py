"""tools/compare_versions.py: its figures, and a run of the package against itself."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jax_intranode

TOOL = Path(__file__).parent.parent / "tools" / "compare_versions.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_versions", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_that_changed(tool: ModuleType) -> None:
    before = [(10.0, 20.0)] * 3
    rows = {
        "same": [(10.1, 20.0)] * 3,
        "slower": [(11.0, 20.0)] * 3,
        "other clocks": [(11.0, 22.0)] * 3,
        "noisy": [(9.0, 20.0), (13.0, 20.0), (18.0, 20.0)],
    }
    text = tool.table({(name,): before for name in rows}, {(k,): v for k, v in rows.items()})
    slower = [line for line in text.splitlines() if "SLOWER" in line]
    assert len(slower) == 1 and "slower" in slower[0]


@pytest.mark.full
def test_a_version_against_itself(tmp_path: Path) -> None:
    site = str(Path(jax_intranode.__file__).parent.parent)
    bench = "psum -b 1K -e 1K --platform cpu --devices 2 --mode single-process -n 2 -w 1"
    run = subprocess.run(
        [sys.executable, str(TOOL), site, site, "--rounds", "2", "--", *bench.split()],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "single-process bfloat16 1024" in run.stdout
