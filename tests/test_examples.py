"""The examples run as users run them: in a fresh process, from the command line."""

import re
import subprocess
from pathlib import Path

import jax
import pytest
from devices import need_devices
from processes import python
from tiers import full

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str, *options: str, **variables: str) -> str:
    """Runs one example and returns its output.

    Args:
        name: Its file name.
        options: Its command-line options.
        variables: Environment variables to set for it.
    """
    done = python(EXAMPLES / name, *options, stderr=subprocess.PIPE, timeout_s=300, **variables)
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("name", ["train_nnx_optax.py", full("train_fsdp_tp.py")])
def test_training(name: str) -> None:
    need_devices(2)
    if name == "train_nnx_optax.py":
        pytest.importorskip("flax")
        pytest.importorskip("optax")
    output = run_example(name, "20", JAX_NUM_CPU_DEVICES="4")
    losses = [
        float(loss) for loss in re.findall(r"^step \d+: loss (.*), .* s$", output, re.MULTILINE)
    ]
    assert len(losses) == 3, output
    assert losses[0] > 5, output  # an untrained model knows no byte: ln 256 = 5.5
    assert losses[2] < 4.3 < losses[0], output
    for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert len(re.findall(rf"^{operation} ", output, re.MULTILINE)) >= 4, output


def test_training_without_and_with_auto() -> None:
    need_devices(2)
    output = run_example("train_auto.py", "20", JAX_NUM_CPU_DEVICES="4")
    without, with_auto = re.findall(r"^with.* auto: loss (.*), .* s$", output, re.MULTILINE)
    assert abs(float(without) - float(with_auto)) < 1e-3 * float(without), output
    if jax.default_backend() == "cpu":
        # A sum for the hidden features, and one for each gradient and the loss.
        assert len(re.findall(r"^psum .* XLA's partitioner ", output, re.MULTILINE)) == 4, output


@pytest.mark.full
def test_decode() -> None:
    need_devices(2)
    output = run_example("decode.py", "4")
    speeds = re.findall(r"^.*: (\d+) tokens per second; XLA called .* (\d+) times$", output, re.M)
    assert len(speeds) == 3, output
    # XLA replays the steps on GPUs. Elsewhere it calls for each sum of each device.
    last = int(speeds[2][1])
    assert last == 0 if jax.default_backend() == "gpu" else last > 0, output
    tokens = output[output.rindex("[") + 1 : output.rindex("]")].split()
    assert len(tokens) == 1 + 3 * 4, output
    assert len(set(tokens)) > 1, output
