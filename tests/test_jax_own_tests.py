"""tools/jax_own_tests.py finds the tests that differ with install()."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_version

TOOLS = Path(__file__).parent.parent / "tools"

# A test that passes in both runs, one that passes without install() only, one with it only.
TEST_FILE = """
import jax
import jax.numpy as jnp
import pytest

f = jax.pmap(lambda v: jax.lax.psum(v, "i"), "i")
x = jnp.ones((jax.device_count(), 4))


def test_result():
    assert f(x)[0, 0] == jax.device_count()
    g = jax.pmap(lambda v: jax.lax.ppermute(v, "i", [(0, 1)]), "i")
    assert g(x)[:, 0].tolist() == [0, 1] + [0] * (jax.device_count() - 2)


@pytest.mark.parametrize("name", ["stablehlo.all_reduce", "jax_intranode_psum"])
def test_text(name):
    assert name in f.lower(x).as_text()
"""


@pytest.mark.full
def test_it_runs_a_tree_in_both_ways(tmp_path: Path) -> None:
    (tmp_path / "tree" / "tests").mkdir(parents=True)
    (tmp_path / "tree" / "tests" / "some_test.py").write_text(TEST_FILE)
    # The sources of the tree must not be imported.
    (tmp_path / "tree" / "jax").mkdir()
    (tmp_path / "tree" / "jax" / "__init__.py").write_text("raise ImportError")
    tree, out = str(tmp_path / "tree"), str(tmp_path)
    run = subprocess.run(
        [sys.executable, TOOLS / "jax_own_tests.py", tree, "some_test.py", "--out", out],
        env=os.environ | {"PYTEST_XDIST_AUTO_NUM_WORKERS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    _, _, differences = run.stdout.partition("Pass without install() and not with it:\n")
    assert run.returncode == 1, run.stdout + run.stderr
    assert differences.splitlines() == [
        "  tests/some_test.py::test_text[stablehlo.all_reduce]: failed",
        "Pass with install() only:",
        "  tests/some_test.py::test_text[jax_intranode_psum]: failed without",
        "Without install(): 1 failed, 2 passed",
        "With install(): 1 failed, 2 passed",
        "1 test ran our kernels, 16 operations in all",
        "Tests that lowered ppermute: 1, psum: 1",
        "1 test differs, and 0 for a known reason",
    ]
