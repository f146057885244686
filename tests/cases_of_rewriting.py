"""Cases of rewritten programs with a process per device, and of ranks that do not agree."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from cases import Case, line
from cases import case as register
from jax import lax
from jax.experimental import multihost_utils
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src import timeouts
from jax_intranode._src.jax_private import distributed, hlo
from jax_intranode._src.rewrite import agreement
from jax_intranode._src.rewrite.auto import rewriting
from jax_intranode._src.selection import config

CASES: dict[str, Case] = {}
WAIT_S = 2
# In place of a wait that must not take place.
FOREVER_S = 100_000.0


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a case of ranks that have not met before, and leaves none that have."""

    @functools.wraps(function)
    def apart() -> None:
        agreement._meetings.clear()
        try:
            function()
            multihost_utils.sync_global_devices(function.__name__)
            jax_intranode.initialize(line())  # so that shutdown() ends what was agreed on
        finally:
            jax_intranode.uninstall()
            jax_intranode.shutdown()
            jax.clear_caches()

    return register(into=CASES)(apart)


@contextlib.contextmanager
def warnings(tell: Callable[[str], object] = lambda text: None) -> Iterator[list[str]]:
    """What this rank warns of. `tell` gets each text, too."""
    said: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        tell(said[-1])

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("jax_intranode")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def made(mesh: Mesh, seed: int, shape: tuple[int, ...], *spec: Any) -> Any:
    """A random array, sharded, of which all ranks make the same."""
    whole = np.random.default_rng(seed).standard_normal(shape, np.float32) / shape[0] ** 0.5
    return jax.make_array_from_callback(
        shape, NamedSharding(mesh, P(*spec)), lambda index: whole[index]
    )


def local(x: jax.Array) -> np.ndarray:
    return np.asarray(x.addressable_shards[0].data, np.float32)


# Collectives of jax.lax.


def summing() -> Any:
    return jax.jit(
        jax.shard_map(lambda v: lax.psum(v, "x"), mesh=line(), in_specs=P("x"), out_specs=P())
    )


def columns_of(count: int) -> jax.Array:
    mesh = line()
    whole = np.arange(mesh.size * count, dtype=np.float32).reshape(mesh.size, count)
    sharding = NamedSharding(mesh, P("x"))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def sums(f: Any, x: jax.Array) -> int:
    """Checks the sum of a program, and says how many operations of this package ran."""
    before = jax_intranode.usage_counter()
    whole = np.arange(x.size, dtype=np.float32).reshape(x.shape)
    np.testing.assert_array_equal(local(f(x)), whole.sum(0, keepdims=True))
    return jax_intranode.usage_counter() - before


@case
def one_rank_is_late_to_its_first_call() -> None:
    """It loads data, say, until rank 0 says that it waits."""
    jax_intranode.install()
    multihost_utils.sync_global_devices("installed")
    soon = dataclasses.replace(config.get(), report_after_s=0.5)
    client = distributed.key_value_client()

    def tell(text: str) -> None:
        if "for process 1 to lower the same program: it has" in text:
            client.key_value_set("rank 0 waits", text, allow_overwrite=True)

    with (
        mock.patch.object(timeouts, "FIRST_WAIT_S", 0.1),
        mock.patch.object(config, "get", lambda: soon),
        warnings(tell),
    ):
        if jax.process_index() == 1:
            client.blocking_key_value_get("rank 0 waits", 60_000)
        assert sums(summing(), columns_of(4)) == 1
    (call,) = jax_intranode.explain(summing())(columns_of(8))
    assert (call.origin, call.algorithm != "lax") == ("jax.lax", True), call


@case
def one_rank_lowers_alone() -> None:
    """It costs rank 0 some seconds, and this program its acceleration; the next one has it."""
    jax_intranode.install()
    x, alone = columns_of(4), summing()
    with mock.patch.object(timeouts, "FIRST_WAIT_S", WAIT_S), warnings() as said:
        if jax.process_index() == 0:
            assert "jax_intranode_psum" not in hlo.in_lowered(alone.lower(x).as_text())
        multihost_utils.sync_global_devices("lowered")
        assert sums(alone, x) == 0  # by lax, on all ranks
    assert any(f"within {WAIT_S} s" in text for text in said), said
    assert sums(summing(), columns_of(8)) == 1
    if jax.process_index() == 0:  # now that all ranks have met, nobody waits
        with mock.patch.object(timeouts, "LATER_WAIT_S", FOREVER_S):
            text = summing().lower(columns_of(16)).as_text()
        assert "jax_intranode_psum" in hlo.in_lowered(text)


@case
def one_rank_has_nothing_installed() -> None:
    if jax.process_index() == 0:
        jax_intranode.install()
    with mock.patch.object(timeouts, "FIRST_WAIT_S", WAIT_S), warnings() as said:
        assert [sums(summing(), columns_of(columns)) for columns in (4, 8)] == [0, 0]
    if jax.process_index() == 0:
        assert f"process 1 has not lowered this program within {WAIT_S} s" in said[0], said
        assert "it has not called jax_intranode.install()" in said[0], said


# Auto-sharded programs.


def auto_arguments(rows: int) -> tuple[jax.Array, ...]:
    mesh = line()
    return (
        made(mesh, 0, (rows, 16)),
        made(mesh, 1, (16, 32), None, "x"),
        made(mesh, 2, (32, 16), "x"),
    )


def auto_program() -> Any:
    def loss(x: Any, up: Any, down: Any) -> Any:
        return ((jax.nn.relu(x @ up) @ down) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


def check_auto(program: Any, arguments: Any, *, ours: bool) -> None:
    """Compares with XLA's results, and whether operations of this package ran."""
    before = jax_intranode.usage_counter()
    found = jax.tree.map(local, program(*arguments))
    assert (jax_intranode.usage_counter() > before) is ours
    jax_intranode.uninstall()
    wanted = jax.tree.map(local, program(*arguments))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(mine / scale, theirs / scale, atol=1e-4)


@case
def auto_all_ranks_rewrite() -> None:
    jax_intranode.install(auto=True)
    calls = jax_intranode.explain(auto_program())(*auto_arguments(4))
    assert any(call.algorithm != "lax" for call in calls), calls
    for rows in (4, 8):
        jax_intranode.install(auto=True)
        check_auto(auto_program(), auto_arguments(rows), ours=True)
    if jax.process_index() == 0:  # now that they have compared a program, nobody waits
        jax_intranode.install(auto=True)
        with mock.patch.object(timeouts, "FIRST_WAIT_S", FOREVER_S):
            assert "jax_intranode" in auto_program().lower(*auto_arguments(16)).as_text()


@case
def explicit_axes_need_no_auto() -> None:
    """Programs over Explicit axes are replaced although one rank alone has called for `auto`."""
    whole = line()
    mesh = Mesh(whole.devices, whole.axis_names, axis_types=(AxisType.Explicit,))
    jax_intranode.install(auto=jax.process_index() == 0)
    with jax.set_mesh(mesh):
        x, w = made(mesh, 0, (8, 16), "x"), made(mesh, 1, (16, 32), "x")
        program = jax.jit(lambda x, w: jax.numpy.dot(x, w, out_sharding=P("x")))
        check_auto(program, (x, w), ours=True)


@case
def auto_custom_partitioning() -> None:
    """A lowered call of custom_partitioning holds an address, which differs between processes."""
    relu = custom_partitioning(jax.nn.relu)
    relu.def_partition(
        partition=lambda mesh, operands, result: (
            mesh,
            jax.nn.relu,
            result.sharding,
            (operands[0].sharding,),
        ),
        infer_sharding_from_operands=lambda mesh, operands, result: operands[0].sharding,
        sharding_rule="i j -> i j",
    )
    jax_intranode.install(auto=True)
    program = jax.jit(lambda x, up, down: relu(x @ up) @ down)
    check_auto(program, auto_arguments(4), ours=True)


@case
def auto_one_rank_has_it_not() -> None:
    with mock.patch.object(timeouts, "FIRST_WAIT_S", WAIT_S), warnings() as said:
        for rows in (12, 20):
            jax_intranode.install(auto=jax.process_index() == 0)
            check_auto(auto_program(), auto_arguments(rows), ours=False)
    if jax.process_index() == 0:
        texts = [text for text in said if "A program is left to XLA" in text]
        assert len(texts) == 2, said
        assert "it has not called jax_intranode.install(auto=True)" in texts[0]


@case
def auto_ranks_take_different_operations() -> None:
    jax_intranode.install(auto=True)
    accepted = rewriting._Rewriting._accepted
    fewer = jax.process_index()
    with (
        mock.patch.object(
            rewriting._Rewriting, "_accepted", lambda self, all_: accepted(self, all_[fewer:])
        ),
        warnings() as said,
    ):
        check_auto(auto_program(), auto_arguments(24), ours=False)
    assert sum("would replace different operations" in text for text in said) == 1, said
