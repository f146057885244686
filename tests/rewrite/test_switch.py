"""install, uninstall and accelerate: which programs are rewritten, and which caches serve them."""

import dataclasses
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from cases import line, make_mesh, sharded
from jax import lax
from jax._src.interpreters import pxla  # noqa: TID251 - programs count compilations by it
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.jax_private import hlo
from jax_intranode._src.selection import config

pytestmark = pytest.mark.usefixtures("not_installed")
N = len(jax.devices())


def program() -> Callable[..., Any]:
    return jax.jit(sharded(lambda v: lax.psum(v, "x"), line(), P("x"), P()))


X = jnp.arange(N * 4, dtype=jnp.float32).reshape(N, 4)


def ours(f: Callable[..., Any], *args: Any) -> int:
    """How many operations of this package a function lowers to."""
    found = hlo.in_lowered(f.lower(*args).as_text())
    return sum(count for name, count in found.items() if name.startswith("jax_intranode"))


def executed(f: Callable[..., Any], *args: Any) -> int:
    """How many operations of this package a call runs on all devices."""
    before = jax_intranode.usage_counter()
    jax.block_until_ready(f(*args))
    return jax_intranode.usage_counter() - before


def test_install_and_uninstall_recompile_what_was_compiled_before() -> None:
    f = program()
    assert executed(f, X) == 0
    jax_intranode.install()
    assert executed(f, X) == N
    assert executed(f, X) == N
    jax_intranode.install()  # again: no change
    assert executed(f, X) == N
    jax_intranode.uninstall()
    assert executed(f, X) == 0


def test_the_variable_that_disables_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    disabled = dataclasses.replace(config.get(), disable=True)
    monkeypatch.setattr(config, "get", lambda: disabled)
    with jax_intranode.accelerate():
        assert ours(program(), X) == 0
    jax_intranode.install()
    assert ours(program(), X) == 0


def test_accelerate_is_a_context_and_a_decorator() -> None:
    f = program()
    with jax_intranode.accelerate():
        assert executed(f, X) == N
        with jax_intranode.accelerate():
            assert executed(f, X) == N
    assert executed(f, X) == 0
    assert executed(jax_intranode.accelerate()(f), X) == N


def test_accelerate_holds_for_its_thread_only() -> None:
    f = program()
    with jax_intranode.accelerate(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(ours, f, X).result() == 0
        assert ours(f, X) == 1


def test_accelerate_of_contexts_that_overlap() -> None:
    """As two tasks of a thread have them. It is not accelerated when both have ended."""
    f = program()
    first, second = jax_intranode.accelerate(), jax_intranode.accelerate()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert ours(f, X) == 1
    second.__exit__()
    assert ours(f, X) == 0


def test_accelerate_refuses_functions_whose_body_runs_later() -> None:
    def generates() -> Any:
        yield

    async def awaits() -> None: ...

    async def generates_later() -> Any:
        yield

    for function in (generates, awaits, generates_later):
        with pytest.raises(TypeError, match=f"can't decorate.*{function.__name__}.*runs after"):
            jax_intranode.accelerate()(function)


def test_locations_in_lowered_programs_are_the_users() -> None:
    """Also those of programs without collectives."""
    package = str(Path(jax_intranode.__file__).parent)
    jax_intranode.install()
    for f, x in ((jax.jit(jnp.sin), X), (program(), X)):
        text = f.lower(x).as_text(debug_info=True)
        assert __file__ in text and package not in text


def test_the_cache_of_lowered_programs_can_be_asked() -> None:
    jax_intranode.install()
    f = program()
    before = pxla._cached_lowering_to_hlo.cache_info().misses
    f.lower(X)
    f.lower(X)
    assert pxla._cached_lowering_to_hlo.cache_info().misses == before + 1


def test_threads_that_install_and_uninstall_get_right_results() -> None:
    wanted = np.asarray(program()(X))

    def work(change: Callable[[], None]) -> None:
        for _ in range(10):
            change()
            np.testing.assert_array_equal(program()(X), wanted)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (jax_intranode.install, jax_intranode.uninstall)))


def test_another_order_of_devices_under_set_mesh() -> None:
    """JAX would reuse the lowering of the first mesh: rows would come in the wrong order."""
    f = jax.jit(
        jax.shard_map(
            lambda v: lax.all_gather(v, "x", tiled=True),
            in_specs=P("x"),
            out_specs=P(None),
            check_vma=False,
        )
    )
    jax_intranode.install()
    x = np.arange(N * 2.0, dtype=np.float32)
    for order in (range(N), range(N)[::-1], [*range(1, N), 0]):
        mesh = make_mesh((N,), ("x",), order=list(order))
        with jax.set_mesh(mesh):
            result = f(jax.device_put(x, NamedSharding(mesh, P("x"))))
            for shard in result.addressable_shards:
                np.testing.assert_array_equal(shard.data, x)


def test_persistent_compilation_cache(tmp_path: Path) -> None:
    """It separates programs compiled with and without, and is hit by both."""
    out = python(tmp_path, "-c", CACHED, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"))
    again = python(tmp_path, "-c", CACHED, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"))
    plain, both = map(int, out.stdout.split())
    assert 0 < plain < both
    assert again.stdout.split() == [str(both)] * 2


CACHED = """
import os, jax, jax.numpy as jnp, jax_intranode
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2],
                     axis_types=(jax.sharding.AxisType.Auto,))
@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P())
def program(v):
    return jax.lax.psum(v, "x")
def entries():
    return sum("program" in name and "atime" not in name
               for name in os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"]))
x = jnp.ones((2, 4))
program(x)
print(entries())
with jax_intranode.accelerate():
    program(x)
print(entries())
"""


CHANGED = """
from jax._src import shard_map
from jax._src.interpreters import mlir, pxla
import jax_intranode
from jax_intranode._src.rewrite import switch
del shard_map._extend_axis_env
rule, lower = mlir._lowerings[shard_map.shard_map_p], pxla._cached_lowering_to_hlo
def refused(enable):
    try:
        enable()
    except RuntimeError as error:
        print(error)
    assert mlir._lowerings[shard_map.shard_map_p] is rule and pxla._cached_lowering_to_hlo is lower
    assert switch.mode.enabled.value is None
refused(jax_intranode.install)
refused(jax_intranode.accelerate().__enter__)
"""


def test_a_changed_jax_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    out = python(tmp_path, "-c", CHANGED)
    first, second, _ = out.stdout.split("\n")
    assert first == second
    assert "no attribute '_extend_axis_env'" in first and "with jax 0.10.2 to" in first


def python(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, with this package."""
    root = str(Path(jax_intranode.__file__).parent.parent)
    out = processes.python(*arguments, cwd=folder, stderr=subprocess.PIPE, PYTHONPATH=root, **env)
    assert out.returncode == 0, out.stderr
    return out
