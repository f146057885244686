"""The command `soak`: it finds wrong values, and programs can be run again."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import jax.numpy as jnp
import numpy as np
import pytest
from devices import need_devices
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode.__main__ import main
from jax_intranode._src.command_line import launcher
from jax_intranode._src.command_line.options import WrongInput
from jax_intranode._src.command_line.soak import command, programs, rank, reference
from jax_intranode._src.command_line.soak.programs import Layout, Program, Step, Wrapped

# The ranks order their sums, and the loop sums parts that differ between the ranks.
PROGRAM = Program(
    seed=1,
    number=0,
    layout=Layout((4,), (2, 0, 1, 3)),
    dtype="float32",
    rows=8,
    columns=5,
    steps=(Wrapped("scan", (Step("psum", ("x",), 1), Step("roll", (), 1))),),
    unedited=False,
    check_vma=False,
    gradient=False,
    integers=False,
    algorithm="auto",
    rounds=3,
    delays=True,
)


def test_right_and_wrong_values(monkeypatch: pytest.MonkeyPatch) -> None:
    need_devices(4)
    # Of each device, v and the digest.
    assert rank.run_program(PROGRAM) == (0, 4 * 3 * 2 * 8 * 5)
    psum = jax_intranode.psum

    def wrong_in_one_element(x: Any, axes: Any) -> Any:
        y = psum(x, axes)
        return y.at[3, 2].set(jnp.nextafter(y[3, 2], jnp.inf))

    monkeypatch.setattr(jax_intranode, "psum", wrong_in_one_element)
    wrong, _ = rank.run_program(PROGRAM)
    assert wrong >= 4 * 3


def test_order_of_a_sum_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    need_devices(4)
    in_order = reference._sum
    monkeypatch.setattr(reference, "_sum", lambda parts: in_order(parts[::-1]))
    wrong, _ = rank.run_program(PROGRAM)
    assert wrong > 0


def test_data_that_do_not_round_have_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    need_devices(4)
    in_order = reference._sum
    monkeypatch.setattr(reference, "_sum", lambda parts: in_order(parts[::-1]))
    assert rank.run_program(dataclasses.replace(PROGRAM, integers=True))[0] == 0


def test_results_take_the_memory_of_the_poison() -> None:
    need_devices(2)
    mesh = cases.line(2)
    f = cases.sharded(lambda v: (jax_intranode.psum(v, "x"),), mesh, P("x"), (P("x"),))
    poison = (cases.put(mesh, P("x"), np.full((2, 100), np.nan, np.float32)) + 0,)
    before = [shard.data.unsafe_buffer_pointer() for shard in poison[0].addressable_shards]
    values = cases.random("float32", (2, 100))
    (result,) = rank.into_poison(f)(poison, cases.put(mesh, P("x"), values))
    cases.check(result, cases.reference("psum", values))
    assert [s.data.unsafe_buffer_pointer() for s in result.addressable_shards] == before


def test_programs_can_be_made_again() -> None:
    made = [programs.make(7, number, 8, "cpu") for number in range(200)]
    assert made == [programs.make(7, number, 8, "cpu") for number in range(200)]
    assert len({str(program) for program in made}) == 200
    texts = "".join(map(str, made))
    names = (*programs.SUMS, *programs.GATHERS, *programs.MATMULS, *programs.LOCAL)
    for name in (*names, *programs.WRAPPERS, "delay", "with gradient", "accelerate()", "two_shot"):
        assert name in texts, name


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jax_intranode", "soak", "--platform", "cpu", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    done = soak(
        *("--devices", "2", "--mode", "process-per-device", "--seed", "3", "--program", "1"),
        *("--json", str(file)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 programs" in done.stdout and "0 wrong\n# OK" in done.stdout
    (found,) = json.loads(file.read_text())["modes"]
    assert found["elements"] > 0 and found["operations"] > 0 and found["error"] is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--program", "3"], "--seed"),
        (["--minutes", "0"], "--minutes 0: use a positive number"),
        (["--devices", "9"], "9 devices: use 2 to 8"),
        (["--json", "/nowhere/soak.json"], "/nowhere"),
        (["--faults", "--cases", "0"], "--cases 0: use a positive number"),
        (["--faults", "--case", "psum:inside"], "'psum:inside' names no case; one is psum:"),
    ],
)
def test_wrong_input(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--platform", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@pytest.mark.full
def test_both_modes() -> None:
    done = soak("--minutes", "1", "--devices", "4", "--seed", "11")
    assert done.returncode == 0, done.stdout + done.stderr


def test_processes_share_a_single_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.nvml, "visible_gpus", lambda: 1)
    assert command.platform_and_devices("gpu", None) == ("gpu", 2)
    assert command.platform_and_devices("gpu", 4) == ("gpu", 4)
    monkeypatch.setattr(command.nvml, "visible_gpus", lambda: 2)
    with pytest.raises(WrongInput, match="there are 2 GPUs here"):
        command.platform_and_devices("gpu", 4)
    # Each rank says that it is of another host, so that NCCL takes it.
    hosts = {launcher.sharing_env(rank)["NCCL_HOSTID"] for rank in range(4)}
    assert len(hosts) == 4
