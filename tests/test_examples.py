"""The examples run as their users run them: in a fresh process, from the command line."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str, *options: str, **variables: str) -> str:
    """Runs one example and returns what it prints.

    Args:
        name: The file's name in the folder of examples.
        options: Its command line.
        variables: Environment variables to set for it.
    """
    # This process may hold most of the GPUs' memory already, so the example must take little.
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **variables}
    command = [sys.executable, EXAMPLES / name, *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
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


def test_tensor_parallel_transformer(tmp_path: Path) -> None:
    options = "--steps 25 --layers 2 --width 32 --heads 8 --sequence 16 --batch 2 --dtype float32"
    plot = tmp_path / "losses.png"
    if importlib.util.find_spec("matplotlib") is not None:
        options += f" --plot {plot}"
    # GPUs would round the matmuls' operands to 10 bits, which makes the two differ by more.
    output = run_example(
        "tensor_parallel_transformer.py", *options.split(), JAX_DEFAULT_MATMUL_PRECISION="highest"
    )
    rows = re.findall(r"^\d+ +(\d\.\d+) +(\d\.\d+)$", output, re.MULTILINE)
    assert len(rows) == 11, output
    losses = [(float(ours), float(lax)) for ours, lax in rows]
    # The two round float32 sums in different places. In so few steps Adam makes nothing of it that
    # is printed (5 digits); if some gradients lacked one rank's part, it would be 0.02 and more.
    assert all(abs(ours - lax) < 1e-3 for ours, lax in losses), output
    # It begins with all bytes equally likely.
    assert losses[0] == pytest.approx((math.log(256), math.log(256)), abs=1e-4), output
    assert max(losses[-1]) < 4.5, output

    speeds = re.search(r"^tokens per second +(\d+) +(\d+)$", output, re.MULTILINE)
    assert speeds is not None and all(int(speed) > 0 for speed in speeds.groups()), output
    # A layer has two of each; backward, each becomes one of the other kind.
    for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert len(re.findall(rf"^{operation} ", output, re.MULTILINE)) == 4, output
    assert plot.exists() == ("--plot" in options)
