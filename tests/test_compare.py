"""`run --compare`: which program each call runs, what is timed, and what is said."""

import contextlib
import functools
import math
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line
from devices import need_devices
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import python
from tiers import full

import jax_intranode
from jax_intranode._src.command_line import compare

pytestmark = pytest.mark.one_version

STEPS = 16
Started = Callable[..., Callable[[], str]]


@pytest.fixture
def started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Started]:
    """Begins a comparison of what the test jits; the result ends it, and is what it has said."""
    for name in ("jit", "pmap"):
        monkeypatch.setattr(jax, name, getattr(jax, name))  # puts it back
    monkeypatch.setattr(compare, "_current", None)

    def start(**how: Any) -> Callable[[], str]:
        comparison = compare.start(STEPS, **how)

        def said() -> str:
            comparison.finish()
            return capsys.readouterr().err

        return said

    yield start
    jax_intranode.uninstall()


def total_of_two(x: Any, factor: int = 1) -> Any:
    return jax.shard_map(
        lambda x: factor * jax.lax.psum(x, "x"),
        mesh=line(2), in_specs=P("x"), out_specs=P("x"), check_vma=False,
    )(x)  # fmt: skip


def test_the_order_of_the_programs(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    need_devices(2)
    programs: list[str] = []
    real = jax_intranode.accelerate

    @contextlib.contextmanager
    def accelerate(*, auto: bool) -> Iterator[None]:
        programs[-1] = "A"
        with real(auto=auto):
            yield

    monkeypatch.setattr(jax_intranode, "accelerate", accelerate)
    said = started()
    total = jax.jit(total_of_two, donate_argnums=0)
    x = jnp.ones(4)
    for turn in range(1, STEPS + 4):
        programs.append("P")
        x = total(x)
        assert np.array_equal(x, np.full(4, 2.0**turn)), turn
    # One call of each, then blocks of two. After the report the script has JAX's own.
    assert "".join(programs) == "PA" + "PPAAAAPPPPAAAAPP" + "P"
    assert not isinstance(jax.jit(lambda x: x), compare._Jitted)
    first, plain, accelerated, faster, *rest = said().splitlines()
    assert first.startswith("compare: total_of_two (test_compare.py:")
    assert f", {STEPS + 2} calls; median" in first
    # Not timed is the first call after a change of the program.
    assert "  plain " in plain and plain.endswith(", 5 calls)")
    assert "  accelerated " in accelerated and accelerated.endswith(", 6 calls)")
    assert "times as fast" in faster
    assert rest == [
        "compare:   results: all have the same values",
        "compare:   replaced: 1 psum (one_shot)",
        "compare: the script goes on, accelerated",
    ]


def test_what_scripts_do_with_jitted_functions(started: Started) -> None:
    """Methods, static arguments, keys, trees, functions in functions, and jit with options only."""

    def run_script() -> list[Any]:
        @jax.jit(static_argnames="power")
        def inner(x: Any, power: int = 2) -> Any:
            return x**power

        class Model:
            scale = 3.0
            dtype = np.float32  # a static argument that is no array, although it has this

            @functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=(1,))
            def step(self, state: Any, name: str, *, rate: float) -> Any:
                key, draw = jax.random.split(state["key"])
                w = state["w"] * rate + inner(jax.random.normal(draw, state["w"].shape))
                return {"key": key, "w": w * self.scale}, {name: w.sum()}

        model, sums = Model(), []
        state: Any = {"key": jax.random.key(0), "w": jnp.ones(3)}
        for _ in range(STEPS):
            state, metrics = model.step(state, "sum", rate=0.5)
            sums.append(metrics["sum"])
        gradient = jax.grad(lambda v: inner(v, power=3).sum())(jnp.ones(2))
        exported = jax.export.export(inner)(jnp.ones(2))
        return [sums, state["w"], gradient, inner(state["w"]), exported.call(jnp.ones(2))]

    expected = run_script()
    said = started()
    found = run_script()
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    err = said()
    assert "compare: step (test_compare.py:" in err and f" {STEPS} calls" in err
    assert "results: all have the same values" in err
    assert "collectives: it calls none of jax.lax, so nothing was replaced" in err


@pytest.mark.parametrize("kind", ["callback", "mutable array"])
def test_effects_happen_once(kind: str, started: Started) -> None:
    said = started()
    seen: list[int] = []

    @jax.jit
    def step(x: Any) -> Any:
        if kind == "callback":
            io_callback(lambda v: seen.append(int(v)), None, x, ordered=True)
            return x + 1
        x[...] += 1
        return None

    x = jnp.int32(0) if kind == "callback" else jax.new_ref(jnp.int32(0))
    for _ in range(4):
        y = step(x)
        x = x if y is None else y
    jax.effects_barrier()
    assert x[...] == 4 and seen in ([], [0, 1, 2, 3])
    assert "results: not compared: it has effects that must not happen twice: " in said()


def test_a_program_that_the_script_compiles_itself(started: Started) -> None:
    need_devices(2)
    said = started()
    jitted = jax.jit(total_of_two, static_argnums=1, donate_argnums=0)
    x = jax.device_put(jnp.ones(4), jax.NamedSharding(line(2), P("x")))
    lowered = jitted.lower(x, 2)
    assert "jax_intranode" not in lowered.as_text()
    step = lowered.compile()
    for _ in range(STEPS):
        x = step(x)
    assert np.array_equal(x, np.full(4, 4.0**STEPS))
    err = said()
    assert f" {STEPS} calls" in err and "replaced: 1 psum (one_shot)" in err
    assert "results: all have the same values" in err


def test_the_script_goes_on_as_it_was_compared(started: Started) -> None:
    need_devices(2)
    started(auto=True)
    x = jax.device_put(jnp.ones((2, 4)), NamedSharding(line(2), P(None, "x")))
    total = jax.jit(lambda x: x.sum(1))
    for _ in range(STEPS + 2):
        total(x)
    text = jax.jit(lambda x: 2 * x.sum(1)).lower(x).as_text()
    assert "jax_intranode_psum" in text


def test_one_call_is_nothing_to_compare(started: Started) -> None:
    said = started()
    jax.jit(lambda x: x + 1)(1)
    first, second = said().splitlines()
    assert said() == ""
    assert first.startswith("compare: there is nothing to compare: ")
    assert re.search(r"jax.pmap twice; once: <lambda> \(test_compare.py:\d+\)$", first)
    assert f"  call one in a loop, {STEPS + 2} times: " in second


def test_difference_of_results() -> None:
    def of(*values: Any) -> list[tuple[str, list[np.ndarray]]]:
        return [(f"[{k}]", [np.asarray(value)]) for k, value in enumerate(values)]

    inf, nan = math.inf, math.nan
    assert compare.difference(of([1.0, nan, inf]), of([1.0, nan, inf])) == (0, "")
    assert compare.difference(of([1.0], [10.0, 4.5]), of([1.0], [10.0, 4.0])) == (0.05, "[1]")
    assert compare.difference(of(np.int8(-3)), of(np.int8(0))) == (3, "[0]")
    assert compare.difference(of(jnp.bfloat16(2)), of(jnp.bfloat16(1))) == (1, "[0]")
    for a, b in ((nan, 1.0), (1.0, nan), (inf, 1.0), (inf, -inf)):
        assert math.isnan(compare.difference(of(a), of(b))[0])


SCRIPT = """
    import sys
    import jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    def main():
        mesh = jax.make_mesh((2,), "x", axis_types=(jax.sharding.AxisType.Auto,))

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        def step(w):
            return w - 0.1 * jax.lax.psum(w, "x")

        sharding = jax.NamedSharding(mesh, P("x"))
        w = jax.make_array_from_callback((64,), sharding, lambda index: jnp.arange(64.0)[index])
        for _ in range(20):
            w = step(w)
        print("argument", sys.argv[1], flush=True)

    main()
    sys.exit(0)
"""


@pytest.mark.parametrize(("ranks", "steps"), [(1, 100), full(2, 16)])
def test_a_script(ranks: int, steps: int, tmp_path: Path) -> None:
    """In one process, and in two that `launch` starts; reported in the middle, and at the end."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    launch = ["launch", "-n", "2", "--platform", "cpu"] if ranks == 2 else []
    options = ["--compare", "--steps", str(steps), "script.py", "--steps=1"]
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(3 - ranks)}
    command = ("-m", "jax_intranode", *launch, "run", *options)
    done = python(*command, cwd=tmp_path, stderr=subprocess.PIPE, **env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("argument --steps=1") == ranks
    calls = 18 if steps == 16 else 20
    assert done.stderr.count(f"compare: step (script.py:9), {calls} calls") == 1, done.stderr
    assert "times as fast" in done.stderr and "replaced: 1 psum (one_shot)" in done.stderr
