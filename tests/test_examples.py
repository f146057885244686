"""The examples run as users run them: in a fresh process, from the command line, with defaults.

.ci/run runs all of them once.
"""

import re
import shutil
import subprocess
from pathlib import Path

import jax
import pytest
from devices import need_devices
from processes import python
from tiers import full

pytestmark = pytest.mark.one_version

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str, *options: str | Path) -> str:
    """Runs one example and returns its output, whose first line comes before anything long."""
    done = python(EXAMPLES / name, *options, stderr=subprocess.PIPE, timeout_s=280)
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert re.match(r"\d+ devices \(.+\): \w+ing\b", done.stdout), done.stdout
    return done.stdout


@pytest.mark.parametrize("name", ["train_nnx_optax.py", full("train_fsdp_tp.py")])
def test_training(name: str) -> None:
    need_devices(2)
    if name == "train_nnx_optax.py":
        pytest.importorskip("flax")
        pytest.importorskip("optax")
    output = run_example(name)
    losses = [
        float(loss) for loss in re.findall(r"^step \d+: loss (.*), .* s$", output, re.MULTILINE)
    ]
    assert len(losses) == 7, output
    assert losses[0] > 5, output  # an untrained model knows no byte: ln 256 = 5.5
    assert losses[2] < 4.3 < losses[0], output
    for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert len(re.findall(rf"^{operation} ", output, re.MULTILINE)) >= 4, output


@pytest.mark.full
def test_training_without_and_with_auto() -> None:
    need_devices(2)
    output = run_example("train_auto.py")
    without, with_auto = re.findall(r"^with.* auto: loss (.*), .* s$", output, re.MULTILINE)
    assert abs(float(without) - float(with_auto)) < 1e-3 * float(without), output
    if jax.default_backend() == "cpu":
        # A sum for the hidden features, and one for each gradient and the loss.
        assert len(re.findall(r"^psum .* XLA's partitioner$", output, re.MULTILINE)) == 4, output


def test_halo_exchange() -> None:
    need_devices(2)
    output = run_example("halo_exchange.py", "40")
    speeds = re.findall(r"^(jax.*): (\d+) steps/s$", output, re.MULTILINE)
    names = ["jax.lax", "jax_intranode", "jax.lax under accelerate()"]
    assert [name for name, _ in speeds] == names, output
    assert output.endswith("equal to the bit: True\n"), output


@pytest.mark.full
def test_mixture_of_experts() -> None:
    need_devices(2)
    output = run_example("mixture_of_experts.py")
    (difference,) = re.findall(r"^losses and gradients differ by at most (.*)$", output, re.M)
    assert float(difference) < (0.05 if jax.default_backend() == "gpu" else 1e-5), output
    first, last = map(float, re.findall(r"^step \d+: loss (.*)$", output, re.MULTILINE))
    assert last < 0.8 * first, output
    speeds = re.findall(r"^(.*): (\d+) tokens/s$", output, re.MULTILINE)
    assert [name for name, _ in speeds] == ["ours", "dense"], output


@pytest.mark.full
def test_decode() -> None:
    need_devices(2)
    output = run_example("decode.py")
    speeds = re.findall(r"^.*: (\d+) tokens per second; XLA called .* (\d+) times$", output, re.M)
    assert len(speeds) == 3, output
    # XLA replays the steps on GPUs. Elsewhere it calls for each sum of each device.
    last = int(speeds[2][1])
    assert last == 0 if jax.default_backend() == "gpu" else last > 0, output
    tokens = output[output.rindex("[") + 1 : output.rindex("]")].split()
    assert len(tokens) == 1 + 3 * 64, output
    assert len(set(tokens)) > 1, output


@pytest.mark.full
def test_ring_shift(tmp_path: Path) -> None:
    for tools in (("cmake",), ("c++", "g++"), ("nvcc",)[: jax.default_backend() == "gpu"]):
        if tools and not any(map(shutil.which, tools)):
            pytest.skip(f"the example needs {' or '.join(tools)}")
    output = run_example("custom_collective/ring_shift.py", "--build", tmp_path)
    assert "gradient: differs by at most 0.0e+00" in output, output
