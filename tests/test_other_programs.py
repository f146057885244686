"""tools/other_programs.py compares a program without and with the rewriting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_version

TOOL = Path(__file__).parent.parent / "tools" / "other_programs.py"

PROGRAM = """
import jax
import jax.numpy as jnp

from jax_intranode._src.rewrite import mode

REPOSITORY, COMMIT, FOLDER, PACKAGES, TOLERANCE = "none", "none", "some/folder", (), 1e-6


def steps(small):
    import its_source  # in FOLDER

    f = jax.pmap(lambda v: its_source.mean(v) + {change}, "i")
    x = jnp.arange(4.0 * jax.device_count()).reshape(-1, 4)
    while True:
        yield {{"mean": f(x)}}
"""


def run(
    tmp_path: Path, change: str, source: str, program: str = PROGRAM
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(program.format(change=change))
    (tmp_path / "some" / "folder").mkdir(parents=True)
    (tmp_path / "some" / "folder" / "its_source.py").write_text(f"import jax\nmean = {source}\n")
    options = ["--steps", "16", "--work", tmp_path / "work"]
    return subprocess.run(
        [sys.executable, TOOL, tmp_path, tmp_path / "program.py", *options],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )


CHANGED = "(0 if mode.enabled.value is None else 0.001)"
PMEAN = "lambda v: jax.lax.pmean(v, 'i')"


def test_a_program_that_gives_the_same(tmp_path: Path) -> None:
    found = run(tmp_path, "1", PMEAN)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "times as fast" in found.stdout and "replaced: 1 pmean" in found.stdout
    assert "1 of 1 programs give the same results" in found.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "change, source, message",
    [
        (CHANGED, PMEAN, "FAILED: it may differ by 1e-06 of the largest value"),
        (f"{CHANGED} * jnp.inf", PMEAN, "FAILED: there is no difference of its results"),
        ("1", "lambda v: jax.lax.pmax(v > 0, 'i')", "FAILED: nothing was replaced"),
        ("its_source.missing", PMEAN, "FAILED: exit code 1"),
    ],
)
def test_a_program_that_does_not(tmp_path: Path, change: str, source: str, message: str) -> None:
    found = run(tmp_path, change, source)
    assert found.returncode == 1, found.stdout + found.stderr
    assert message in found.stdout
    assert "0 of 1 programs give the same results" in found.stdout
