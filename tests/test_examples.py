"""The examples run as users run them: in a fresh process, from the command line."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
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


def test_decode(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    options = "--size tiny --layers 1 --batch 2 --rounds 2 --steps 3 --prompt-tokens 5"
    options += f" --dtype float32 --json {file}"
    # By default GPUs round float32 operands of matmuls to 10 bits, and ways to compute differ more.
    output = run_example("decode.py", *options.split(), JAX_DEFAULT_MATMUL_PRECISION="highest")
    result = json.loads(file.read_text())
    names = ["jax.lax", "jax_intranode", "lax accelerated", "no sums or norms"]
    assert list(result["tokens_per_second"]) == names, output
    assert all(speed > 0 for speed in result["tokens_per_second"].values()), output
    assert result["same_sequences"] == {name: 2 for name in names[1:3]}, output
    assert result["handler_calls"]["jax.lax"] == 0, output
    calls = [result["handler_calls"][name] for name in names[1:3]]
    on_gpus = jax.default_backend() == "gpu" and jax.device_count() > 1
    # XLA replays the steps on GPUs. Elsewhere it calls for each sum of each device.
    assert calls == [0, 0] if on_gpus else min(calls) >= 2 * 3 * 2 * result["devices"], output
    # All tokens are there: those of the prompt, those of the first round and of the timed ones.
    assert {len(tokens) for tokens in result["tokens"]} == {5 + 1 + 3 * 3}, output


def test_decode_reads_the_weights_of_a_llama_model(tmp_path: Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    spec = importlib.util.spec_from_file_location("decode", EXAMPLES / "decode.py")
    assert spec is not None and spec.loader is not None
    decode = importlib.util.module_from_spec(spec)
    sys.modules["decode"] = decode
    spec.loader.exec_module(decode)
    model = decode.Model(2, 32, 48, 4, 2, 64)
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("model",), axis_types=axis_types, devices=jax.devices()[:1])
    params = jax.tree.map(np.asarray, decode.random_params(model, mesh, "float32"))
    arrays = {"model.embed_tokens": params.embedding, "lm_head": params.unembedding.T}
    arrays["model.norm"] = params.norm
    for i, layer in enumerate(params.layers):
        for name, array in zip(decode.NAMES, layer, strict=True):
            arrays[f"model.layers.{i}.{name}"] = array.T
    arrays = {f"{name}.weight": np.ascontiguousarray(array) for name, array in arrays.items()}
    half = len(arrays) // 2
    for k, part in enumerate((list(arrays)[:half], list(arrays)[half:])):
        numpy_files.save_file({name: arrays[name] for name in part}, tmp_path / f"{k}.safetensors")
    config = {name: getattr(model, name) for name in decode.Model.__dataclass_fields__}
    theta = config.pop("rope_theta")
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert decode.read_model(tmp_path) == model
    found = decode.read_params(tmp_path, model, mesh, "float32")
    jax.tree.map(np.testing.assert_array_equal, found, params)
    (tmp_path / "0.safetensors").unlink()
    with pytest.raises(SystemExit, match=r"has no model\..*weight"):
        decode.read_params(tmp_path, model, mesh, "float32")
