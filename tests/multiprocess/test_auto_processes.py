"""Auto-sharded programs with a process per device, and ranks that do not agree."""

import time
from typing import Any

import jax
import numpy as np
from devices import need_ranks
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.rewrite import agreement
from jax_intranode._src.rewrite.auto import rewriting


def _mesh() -> Mesh:
    return jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))


def _put(mesh: Mesh, seed: int, shape: tuple[int, ...], *spec: Any) -> jax.Array:
    whole = np.random.default_rng(seed).standard_normal(shape, np.float32) / 4
    return jax.make_array_from_callback(
        shape, NamedSharding(mesh, P(*spec)), lambda index: whole[index]
    )


def _arguments(mesh: Mesh, rows: int = 4) -> tuple[jax.Array, ...]:
    return (
        _put(mesh, 0, (rows, 16)),
        _put(mesh, 1, (16, 32), None, "x"),
        _put(mesh, 2, (32, 16), "x"),
    )


def _program() -> Any:
    def loss(x: Any, up: Any, down: Any) -> Any:
        return ((jax.nn.relu(x @ up) @ down) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


def _check(arguments: Any, *, ours: bool) -> None:
    """Compares with XLA's results, and whether operations of this package ran."""
    before = jax_intranode.usage_counter()
    found = jax.tree.map(_local, _program()(*arguments))
    assert (jax_intranode.usage_counter() > before) is ours
    jax_intranode.uninstall()
    wanted = jax.tree.map(_local, _program()(*arguments))
    for v, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(v, w, rtol=1e-4, atol=1e-6)


def _local(x: jax.Array) -> np.ndarray:
    return np.asarray(x.addressable_shards[0].data)


def _barrier(name: str) -> None:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


# Functions of the ranks.


def all_ranks_rewrite() -> None:
    jax_intranode.install(auto=True)
    mesh = _mesh()
    calls = jax_intranode.explain(_program())(*_arguments(mesh))
    assert any(call.algorithm != "lax" for call in calls), calls
    for rows in (4, 8):
        jax_intranode.install(auto=True)
        _check(_arguments(mesh, rows), ours=True)
    if jax.process_index() == 0:  # now that they have compared a program, nobody waits
        jax_intranode.install(auto=True)
        start = time.monotonic()
        assert "jax_intranode" in _program().lower(*_arguments(mesh, 16)).as_text()
        assert time.monotonic() - start < agreement.FIRST_WAIT_S
    _barrier("done")


def one_rank_has_no_auto(wait_s: float) -> None:
    agreement.FIRST_WAIT_S = wait_s
    mesh = _mesh()
    for rows in (4, 8):
        jax_intranode.install(auto=jax.process_index() == 0)
        start = time.monotonic()
        _check(_arguments(mesh, rows), ours=False)
        assert rows == 4 or time.monotonic() - start < wait_s + 10
    _barrier("done")


def ranks_take_different_operations() -> None:
    jax_intranode.install(auto=True)
    if jax.process_index() == 1:
        accepted = rewriting._Rewriting._accepted
        rewriting._Rewriting._accepted = lambda self, members: accepted(self, members[1:])
    _check(_arguments(_mesh()), ours=False)
    _barrier("done")


# Tests.


def test_two_ranks(ranks: Any) -> None:
    need_ranks(2)
    ranks(all_ranks_rewrite, 2)


def test_four_ranks(ranks: Any) -> None:
    need_ranks(4)
    ranks(all_ranks_rewrite, 4)


WAIT_S = 2


def test_one_rank_has_no_auto(ranks: Any) -> None:
    need_ranks(2)
    log, _ = ranks(one_rank_has_no_auto, 2, arguments=[WAIT_S])
    assert "has not called jax_intranode.install(auto=True)" in log
    assert log.count("Auto-sharded programs are left to XLA") == 1


def test_ranks_take_different_operations(ranks: Any) -> None:
    need_ranks(2)
    for log in ranks(ranks_take_different_operations, 2):
        assert log.count("would replace different operations") == 1
