"""The examples run as users run them: in a fresh process, from the command line."""

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
    """Runs one example and returns its output.

    Args:
        name: Its file name.
        options: Its command-line options.
        variables: Environment variables to set for it.
    """
    # pytest's own process may already hold most of the GPUs' memory.
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
    # The reported operations cover every psum: the logits, and the loss with the four gradients.
    mesh = re.search(r"mesh \{'data': (\d+), 'model': (\d+)\}", output)
    assert mesh is not None, output
    data, model = map(int, mesh.groups())
    sums = re.findall(r"^ +(\d+) bytes over (\w+) +as (?:one_shot|two_shot|lax): ", output, re.M)
    reported = {axis: sum(int(n) for n, name in sums if name == axis) for axis in ("model", "data")}
    columns = 256 // model
    assert reported["model"] == 4 * (256 // data) * 10, output
    assert reported["data"] == 4 * (1 + 64 * columns + columns + columns * 10 + 10), output


def test_tensor_parallel_transformer(tmp_path: Path) -> None:
    options = "--steps 25 --layers 2 --width 32 --heads 8 --sequence 16 --batch 2 --rate 0.0044"
    options += " --dtype float32"
    plot = tmp_path / "losses.png"
    if importlib.util.find_spec("matplotlib") is not None:
        options += f" --plot {plot}"
    # By default GPUs round float32 operands of matmuls to 10 bits. Then the two differ by more.
    output = run_example(
        "tensor_parallel_transformer.py", *options.split(), JAX_DEFAULT_MATMUL_PRECISION="highest"
    )
    rows = re.findall(r"^\d+ +(\d\.\d+) +(\d\.\d+) +(\d\.\d+)$", output, re.MULTILINE)
    assert len(rows) == 11, output
    losses = [tuple(map(float, row)) for row in rows]
    # The ways round float32 sums at different points, which in so few steps stays below the printed
    # digits. If some gradients lacked one rank's part, the difference would be 0.02 or more.
    assert all(max(row) - min(row) < 1e-3 for row in losses), output
    # The initial model finds all bytes equally likely.
    assert losses[0] == pytest.approx([math.log(256)] * 3, abs=1e-4), output
    assert max(losses[-1]) < 4.5, output

    speeds = re.search(r"^tokens per second +(\d+) +(\d+) +(\d+)$", output, re.MULTILINE)
    assert speeds is not None and all(int(speed) > 0 for speed in speeds.groups()), output
    ratio = re.search(r"^jax_intranode / jax.lax: (\d+\.\d+) x the tokens", output, re.MULTILINE)
    assert ratio is not None and float(ratio[1]) > 0, output
    # A layer calls each twice, and its backward pass turns each call into one of the other kind.
    for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
        counts = re.findall(rf"^{operation} +(\d+) x ", output, re.MULTILINE)
        assert sum(map(int, counts)) == 4, output
    assert output.count("compiled the training step with ") == 3, output
    assert plot.exists() == ("--plot" in options)
