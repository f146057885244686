"""Random programs (tests/stress): they find wrong values, and can be run again."""

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from devices import need_devices
from stress import calls, chains, run
from stress.calls import Call

import jax_intranode
from jax_intranode._src import operations
from jax_intranode._src.command_line import machine

pytestmark = pytest.mark.one_version


def program(*of: Call, shape: tuple[int, ...] = (4,), unedited: bool = False) -> chains.Program:
    order = (2, 0, 1, 3)
    return chains.Program(0, shape, order, of, unedited, False, "auto", rounds=3, delays=True)


# Whose sums depend on the order of the ranks, and which has what follows a wrong one, too.
LOOP = program(
    Call("psum", ("x",), "float32", (8, 5), way="scan"),
    Call("all_gather", ("x",), "int16", (8, 5)),
)
OPERATIONS = {
    "psum": Call("psum", ("y", "x"), "bfloat16", (9, 3), leaves=3),
    "psum_scatter": Call("psum_scatter", ("x",), "float16", (3, 2), 1, tiled=False),
    "all_gather": Call("all_gather", ("y",), "complex64", (3,), 1, tiled=False),
    "all_to_all": Call("all_to_all", ("x", "y"), "bool", (8, 2), 0, 1),
    "pmax": Call("pmax", ("y", "x"), "bfloat16", (9, 3), leaves=2),
    "pmin": Call("pmin", ("x",), "int32", (9, 3)),
    "ppermute": Call("ppermute", ("x", "y"), "float16", (9, 3), perm=((0, 3), (3, 1)), leaves=2),
    "ragged_all_to_all": Call("ragged_all_to_all", ("x", "y"), "uint8", (9, 3), 2, 6),
    "all_gather_matmul": Call("all_gather_matmul", ("x",), "float32", (8, 16), 0, 8, leaves=2),
    "matmul_reduce_scatter": Call("matmul_reduce_scatter", ("x", "y"), "bfloat16", (8, 8), 0, 16),
    "matmul_all_reduce": Call("matmul_all_reduce", ("y",), "float16", (8, 8), 0, 24),
    "moe_dispatch": Call("moe_dispatch", ("y", "x"), "bfloat16", (9, 6), 2, 12, leaves=2),
}


def wrong_in_one_element(f: Any) -> Any:
    """A function of a library, wrong on the last rank of its group."""

    def wrong(x: Any, *arguments: Any, **options: Any) -> Any:
        ys, tree = jax.tree.flatten(f(x, *arguments, **options))
        (axes,) = (a for a in (*arguments, *options.values()) if isinstance(a, tuple))
        last = jax.lax.axis_index(axes) == jax.lax.axis_size(axes) - 1
        y = ys[0].reshape(-1)
        off = ~y[1] if y.dtype == bool else y[1] + jnp.ones((), y.dtype)
        ys[0] = y.at[1].set(jnp.where(last, off, y[1])).reshape(ys[0].shape)
        return jax.tree.unflatten(tree, ys)

    return wrong


def pairs() -> Iterator[Any]:
    """Each operation in the ways in which it is called; each way once in the quick tier."""
    for k, (operation, call) in enumerate(OPERATIONS.items()):
        ways = [*calls.WAYS[k:], *calls.WAYS[:k]]
        if operation in calls.COMPARED:
            ways.remove("vmap")
        if call.dtype not in calls.FLOATS or operation in calls.EXTREMES:
            ways = [way for way in ways if way not in ("gradient", "checkpoint")]
        for way in ways:
            quick = way == ways[0]
            yield pytest.param(operation, way, marks=[] if quick else pytest.mark.full)


@pytest.mark.parametrize(("operation", "way"), [*pairs()])
def test_right_and_wrong_values(operation: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_devices(4)
    call, small = OPERATIONS[operation], operation in calls.COMPARED
    call = dataclasses.replace(call, way=way, small=small)
    made = program(call, shape=(2, 2))
    assert chains.run_program(made, 1)[0] == 0
    right = getattr(jax_intranode, operation)
    monkeypatch.setattr(jax_intranode, operation, wrong_in_one_element(right))
    wrong, elements, first = chains.run_program(made, 1)
    assert wrong > 0 and elements > 0 and first == 0


def test_order_of_a_sum_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    need_devices(4)
    assert chains.run_program(LOOP, 1) == (0, 3 * 4 * 80, 2)
    in_order = operations.total
    monkeypatch.setattr(operations, "total", lambda parts: in_order(parts[::-1]))
    wrong, _, first = chains.run_program(LOOP, 1)
    assert wrong > 0 and first == 0
    # Data that do not round have no order.
    small = program(*(dataclasses.replace(call, small=True) for call in LOOP.calls))
    assert chains.run_program(small, 1)[0] == 0


def test_programs_can_be_made_again() -> None:
    made = [chains.make(7, number, 8, "cpu") for number in range(100)]
    assert made == [chains.make(7, number, 8, "cpu") for number in range(100)]
    assert len({str(program) for program in made}) == 100
    texts = "".join(map(str, made))
    for name in (*calls.OPERATIONS, *calls.COMPARED, *calls.WAYS, "accelerate()", "two_shot"):
        assert name in texts, name


# The runner.


@pytest.fixture(autouse=True)
def no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handler would stay


def test_runner(tmp_path: Path) -> None:
    """As a program, in another folder: it tests the package that is installed."""
    file = tmp_path / "counts.json"
    options = "--platform cpu --devices 2 --mode process-per-device --seed 3 --program 11 --json"
    command = [sys.executable, run.__file__, *options.split(), str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 programs" in done.stdout and "0 wrong\n# OK" in done.stdout
    (found,) = json.loads(file.read_text())["modes"]
    assert found["elements"] > 0 and found["operations"] > 0 and found["error"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--program 3", ("--program", "--seed")),
        ("--minutes 0", ("--minutes", "use a positive number")),
        ("--devices 9", ("9 devices", "use 2 to 8")),
        ("--faults --case psum:inside", ("'psum:inside'", "one is psum:")),
        ("--minutes soon", ("--minutes", "'soon'", "--help")),
    ],
)
def test_wrong_options(
    options: str, says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--platform", "cpu", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (message,) = err.splitlines()
    assert all(text in message for text in says)


def test_processes_share_a_single_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: 1)
    asked = argparse.Namespace(platform="gpu", devices=3)
    assert run._platform_and_devices(asked) == ("gpu", 3)
    asked.devices = None
    assert run._platform_and_devices(asked) == ("gpu", 2)
    asked.platform = "cpu"
    assert run._platform_and_devices(asked) == ("cpu", 4)
