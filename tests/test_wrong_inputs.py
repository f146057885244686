"""Wrong inputs: each message names what failed, the value, and what to do.

For each input there are texts that its message must have, in this order: the function, command or
option; the value; the remedy. Those of collective matmuls are in test_collective_matmul.py and
test_global_arrays.py, those of variables in test_config.py.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from devices import need_devices
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from processes import python

import jax_intranode as jin
from jax_intranode import __main__ as command_line

# Calls, inside of a shard_map over two ranks with the axis "model": x and w are 4 x 4 on each rank.
INSIDE: dict[str, tuple[Callable[[Any, Any], Any], str, str, str]] = {
    "misspelt axis of psum": (
        lambda x, w: jin.psum(x, "modle"),
        *("jax_intranode.psum", "'modle'", "Name some of these"),
    ),
    "misspelt axis of all_gather": (
        lambda x, w: jin.all_gather(x, "modle"),
        *("jax_intranode.all_gather", "modle", "Name some of these"),
    ),
    "text in place of an array": (
        lambda x, w: jin.psum("text", "model"),
        *("jax_intranode.psum", "'text'", "takes arrays, or pytrees of arrays"),
    ),
    "text in a pytree": (
        lambda x, w: jin.all_gather({"x": x, "name": "text"}, "model"),
        *("jax_intranode.all_gather", "'text'", "takes arrays, or pytrees of arrays"),
    ),
    "rows that cannot be divided": (
        lambda x, w: jin.psum_scatter(x[:3], "model", tiled=True),
        *("jax_intranode.psum_scatter", "(3, 4)", "must be a multiple of 2"),
    ),
    "rows that are not the ranks": (
        lambda x, w: jin.psum_scatter(x, "model"),
        *("jax_intranode.psum_scatter", "(4, 4)", "must be 2, or pass tiled=True"),
    ),
    "scatter_dimension out of range": (
        lambda x, w: jin.psum_scatter(x, "model", scatter_dimension=5),
        *("jax_intranode.psum_scatter", "scatter_dimension is 5", "must be from 0 to 1"),
    ),
    "scatter_dimension of another type": (
        lambda x, w: jin.psum_scatter(x, "model", scatter_dimension=1.5),
        *("psum_scatter", "scatter_dimension is 1.5", "pass an integer"),
    ),
    "axis out of range": (
        lambda x, w: jin.all_gather(x, "model", axis=7, tiled=True),
        *("jax_intranode.all_gather", "axis is 7", "must be from -2 to 1"),
    ),
    "axis of another type": (
        lambda x, w: jin.all_gather(x, "model", axis="rows"),
        *("all_gather", "axis is 'rows'", "pass an integer"),
    ),
    "split_axis out of range": (
        lambda x, w: jin.all_to_all(x, "model", 3, 0, tiled=True),
        *("jax_intranode.all_to_all", "split_axis is 3", "must be from -2 to 1"),
    ),
    "concat_axis of another type": (
        lambda x, w: jin.all_to_all(x, "model", 0, "rows"),
        *("all_to_all", "concat_axis is 'rows'", "pass an integer"),
    ),
    "parts that are not the ranks": (
        lambda x, w: jin.all_to_all(x, "model", 0, 0),
        *("jax_intranode.all_to_all", "(4, 4)", "must be 2, or pass tiled=True"),
    ),
}

# Calls outside of a shard_map: with the mesh, x and w.
OUTSIDE: dict[str, tuple[Callable[[Any, Any, Any], Any], str, str, str]] = {
    "no shard_map": (
        lambda mesh, x, w: jin.psum(x, "model"),
        *("jax_intranode.psum", "model", "call it inside a jax.shard_map"),
    ),
    "initialize without a mesh": (
        lambda mesh, x, w: jin.initialize((2,)),
        *("jax_intranode.initialize", "(2,)", "pass a jax.sharding.Mesh"),
    ),
    "explain of a result": (
        lambda mesh, x, w: jin.explain(3),
        *("jax_intranode.explain", "got 3", "pass a function"),
    ),
}

# Command lines, after `python -m jax_intranode`. {files} has files that are wrong.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "benhc psum": ("no command", "'benhc'", "did you mean bench?"),
    "frobnicate": ("no command", "'frobnicate'", "use one of demo, doctor"),
    "bench": ("bench", "NAME", "--help"),
    "bench psun": ("argument NAME", "'psun'", "is none of psum, "),
    "bench psum -b 16K -e 1K": ("--minbytes 16K", "1K", "choose a smaller -b"),
    "bench psum -d float12": ("--datatype", "'float12'", "none of bfloat16"),
    "bench psum --devices 64": ("bench: psum", "8 ranks, not 64", "choose --devices 8 or less"),
    "bench matmul_all_reduce --devices 9": ("matmul_all_reduce", "not 9", "choose --devices"),
    "bench psum --datatpye=int8": ("unrecognized arguments", "=int8", "Did you mean --datatype?"),
    "bench all_gather_matmul --shapes 1,2": ("--shapes", "'1,2'", "three positive integers"),
    "bench all_gather_matmul --plan x=1": ("--plan", "'x'", "it has first_pieces"),
    "bench psum -b 1M": ("--minbytes 1M", "--maxbytes 64K (the default)", "choose"),
    "bench all_gather_matmul --shapes 7,8,9": ("7 x 8 x 9", "M is 7", "multiple of the 2"),
    "bench matmul_all_reduce --devices 3 --preset llama-8b": (
        *("preset llama-8b", "3 devices can't share 4096 columns", "choose --devices"),
    ),
    "bench psum --platform gpu": ("--platform gpu", "no GPU", "check CUDA_VISIBLE_DEVICES"),
    "bench psum --json /no/such/a.json": ("--json", "/no/such/a.json", "make it, or choose"),
    "demo --platform gpu": ("--platform gpu", "0 are visible", "check CUDA_VISIBLE_DEVICES"),
    "bench mlp_block": ("argument NAME", "'mlp_block'", "is none of psum, "),
    "doctor --fix": ("doctor", "--fix", "--help"),
    "run": ("run", "SCRIPT", "--help"),
    "run missing.py": ("run", "missing.py", "name a script"),
    "run -m missing_module": ("run: -m", "missing_module", "install it"),
    "run --comapre text": ("run", "--comapre", "Did you mean --compare?"),
    "run --steps 10 text": ("--steps", "10", "those of the script stand behind its name"),
    "launch --platfrom cpu -n 2 text": ("launch", "--platfrom", "Did you mean --platform?"),
    "launch -n 2 --platform cpu run --comapre text": (
        *("launch", "--comapre", "Did you mean --compare?"),
    ),
    "launch -n 2 missing.py": ("launch", "missing.py", "name a script, or with -m a module"),
    "launch -n 2 --log-dir /dev/null/logs text": ("--log-dir", "/dev/null/logs", "Not a directory"),
    "launch text": ("launch", "", "say how many processes to start: -n 2"),
    "launch -n 2 --platform gpu text": ("launch", "no GPU that JAX would see", "check CUDA"),
    "launch --restarts -1 train.py": ("--restarts", "'-1'", "use an integer of at least 0"),
    "launch -n 2 --platform cpu run --steps 3 text": ("--steps", "'3'", "integer of at least 9"),
    "launch -n 2 --platform cpu run --fast text": ("unrecognized arguments", "--fast", "--help"),
}


def message_of(call: Callable[[], Any]) -> str:
    """What a user sees of the exception: its text, and the notes below it."""
    # jax 0.10 raises IndexError for a dimension that is out of range.
    with pytest.raises((ValueError, TypeError, NameError, AssertionError, IndexError)) as raised:
        call()
    return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


def mesh_of_two() -> jax.sharding.Mesh:
    need_devices(2)
    return jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


@pytest.mark.parametrize("name", INSIDE)
def test_call(name: str) -> None:
    call, *says = INSIDE[name]
    mapped = jax.shard_map(
        call, mesh=mesh_of_two(), in_specs=(P("model"), P()), out_specs=P("model")
    )
    message = message_of(lambda: jax.eval_shape(mapped, jnp.ones((8, 4)), jnp.ones((4, 4))))
    for text in says:
        assert text in message, message


@pytest.mark.parametrize("name", OUTSIDE)
def test_call_outside_of_shard_map(name: str) -> None:
    call, *says = OUTSIDE[name]
    mesh = mesh_of_two()
    message = message_of(lambda: call(mesh, jnp.ones((4, 4)), jnp.ones((4, 4))))
    for text in says:
        assert text in message, message


@pytest.mark.parametrize("line", COMMANDS)
def test_command_line(
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "gpu" in line and jax.devices()[0].platform == "gpu":
        pytest.skip("there are GPUs here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no JSON")
    argv = [word.format(files=tmp_path) for word in line.split()]
    before = list(sys.path)
    try:
        code: Any = command_line.main(argv)
    except SystemExit as end:
        code = end.code
    finally:
        sys.path[:] = before
        jin.uninstall()
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    (message,) = err.splitlines()  # one line, and no traceback
    assert message.startswith("python -m jax_intranode")
    for text in COMMANDS[line]:
        assert text.format(files=tmp_path) in message, message


@pytest.mark.full
def test_no_traceback(tmp_path: Path) -> None:
    done = python("-m", "jax_intranode", "run", "missing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1, done.stdout
