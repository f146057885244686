"""The examples run as their users run them: in a fresh process, from the command line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str) -> str:
    """Runs one example and returns what it prints.

    Args:
        name: The file's name in the folder of examples.
    """
    # This process may hold most of the GPUs' memory already, so the example must take little.
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_tensor_parallel_mlp() -> None:
    pytest.importorskip("sklearn")
    output = run_example("tensor_parallel_mlp.py")
    for psum in ("jax_intranode.psum", "jax.lax.psum"):
        row = re.search(rf"^{re.escape(psum)} +([\d.]+) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
        assert row is not None, output
        last_loss, accuracy, seconds_per_step = map(float, row.groups())
        assert last_loss < 0.1
        assert accuracy > 0.95
        assert seconds_per_step > 0
    algorithms = re.findall(r" as (one_shot|two_shot|lax): ", output)
    assert len(algorithms) == 6, output
