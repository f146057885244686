"""tools/tune.py runs on the CPU and prints a row for each size and algorithm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TUNE = Path(__file__).parent.parent / "tools" / "tune.py"

pytestmark = pytest.mark.skipif(not TUNE.exists(), reason="tools are not in the sdist")


def test_tune_on_the_cpu(tmp_path: Path) -> None:
    outcome = subprocess.run(
        # -P: imports the installed package, not the source tree.
        [
            *(sys.executable, "-P", str(TUNE), "--platform", "cpu", "--mode", "single-process"),
            *("--minbytes", "512", "--maxbytes", "512", "psum", "all_gather"),
        ],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert outcome.returncode == 0, outcome.stdout
    for algorithm in ("one_shot", "two_shot", "all_gather"):
        (row,) = [line for line in outcome.stdout.splitlines() if f" {algorithm} " in line]
        mode, devices, _, _, dtype, nbytes, *times, _ = row.split()
        assert (mode, devices, dtype, nbytes) == ("single-process", "2", "float32", "512")
        assert len(times) == 2 and all(float(time) >= 0 for time in times)
        assert f"# {algorithm}: not slower than lax up to" in outcome.stdout
