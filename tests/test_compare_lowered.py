"""tools/compare_lowered.py finds that programs are the same, and that they differ."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "compare_lowered.py"


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.full
def test_it_compares_programs(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    only = "^products-(cpu-2|gpu-8-narrow)-gradient$"
    written = run("--write", before, "--only", only)
    assert written.returncode == 0, written.stderr
    after.mkdir()
    cpu, gpu = (f"products-{name}-gradient.txt" for name in ("cpu-2", "gpu-8-narrow"))
    assert {path.name for path in before.iterdir()} == {cpu, gpu}
    assert "wgrads = 1" in (before / gpu).read_text()

    for name in (cpu, gpu):
        (after / name).write_text((before / name).read_text())
    same = run("--compare", before, after)
    assert (same.returncode, same.stdout) == (0, "2 programs compared; 0 differ\n")

    (after / gpu).write_text((before / gpu).read_text().replace("wgrads = 1", "wgrads = 2"))
    different = run("--compare", before, after)
    assert different.returncode == 1
    assert gpu in different.stdout and "wgrads = 2" in different.stdout
