"""Communicators in one process: creation, limits, failures, and programs without one."""

import itertools
import logging
from typing import Any

import cases
import jax
import numpy as np
import pytest
from devices import need_devices
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.group import communicator, slabs
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.native import extension
from jax_intranode._src.ops import all_reduce
from jax_intranode._src.selection import config, select


def chosen_for(mesh: jax.sharding.Mesh, count: int = 100) -> select.Selection:
    return cases.selection(mesh, ("x",), (count,), "float32")


def check_sum(mesh: jax.sharding.Mesh, seed: int = 0, *, ours: bool = True) -> None:
    parts = cases.random("float32", (mesh.size, 100), seed)
    before = extension.handler_calls()
    result = jax.block_until_ready(cases.psum_of(parts, mesh))
    assert (extension.handler_calls() > before) == ours
    cases.check(result, cases.everywhere(cases.oracle(parts), mesh.size), exact=ours)


# Partitions.


@pytest.mark.parametrize(
    ("ids", "names", "axes", "groups"),
    [
        ([2, 0, 1], "x", "x", [(2, 0, 1)]),
        ([[0, 1, 2], [3, 4, 5]], "dt", "td", [(0, 3, 1, 4, 2, 5)]),
        ([[5, 3, 1], [4, 2, 0]], "dt", "d", [(5, 4), (3, 2), (1, 0)]),
        ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], "abc", "ca", [(0, 4, 1, 5), (2, 6, 3, 7)]),
        ([[1], [0]], "dt", "t", [(1,), (0,)]),
    ],
)
def test_partition(ids: Any, names: str, axes: str, groups: list[tuple[int, ...]]) -> None:
    places = np.array(ids)
    need_devices(places.size)
    mesh = cases.make_mesh(places.shape, names, places.ravel())
    partition = partition_lib.partition(mesh, tuple(axes))
    first = jax.devices()[0].id
    assert partition.groups() == [tuple(first + i for i in group) for group in groups]
    assert partition.group_size == len(groups[0])
    assert partition.device_ids == sum(partition.groups(), ())
    assert all(type(i) is int for i in partition.device_ids)


# Creation and shutdown.


@pytest.mark.usefixtures("fresh")
def test_initialize_sets_up_all_groups_of_a_mesh() -> None:
    need_devices(4)
    mesh = cases.make_mesh((2, 1, 2), ("a", "one", "b"))
    jax_intranode.initialize(mesh)
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    axes = (("a",), ("b",), ("a", "b"))
    assert set(rendezvous.communicators) == {partition_lib.partition(mesh, a) for a in axes}
    assert set(rendezvous.communicators.values()) == {None}


@pytest.mark.usefixtures("fresh")
def test_program_from_before_shutdown_raises() -> None:
    """test_replay_after_shutdown has one that GPUs replay, which loses the CUDA context."""
    need_devices(2)
    mesh = cases.line()
    program = jax.jit(cases.sharded(lambda v: jax_intranode.psum(v, "x"), mesh, P("x"), P()))
    x = cases.put(mesh, P("x"), cases.random("float32", (mesh.size, 100)))
    jax.block_until_ready(program(x))
    jax_intranode.shutdown()
    for _ in range(2):
        with pytest.raises(Exception, match=r"jax_intranode\.shutdown\(\).*jax\.clear_caches\(\)"):
            jax.block_until_ready(program(x))
    # A new rendezvous does not make it work again; the advice in the message does.
    check_sum(mesh)
    with pytest.raises(Exception, match=r"jax_intranode\.shutdown\(\)"):
        jax.block_until_ready(program(x))
    jax.clear_caches()
    jax.block_until_ready(program(x))


# Limits.


@pytest.mark.usefixtures("fresh")
def test_regions_run_out() -> None:
    need_devices(4)
    n = len(jax.devices())
    orders = list(itertools.islice(itertools.permutations(range(n)), slabs.REGIONS + 2))
    meshes = [cases.make_mesh((n,), ("x",), order) for order in orders]
    for mesh in meshes[: slabs.REGIONS]:
        assert chosen_for(mesh).algorithm != "lax"
    for mesh in meshes[slabs.REGIONS :]:
        chosen = chosen_for(mesh)
        assert chosen.algorithm == "lax"
        assert f"{slabs.REGIONS} regions" in chosen.reason
        check_sum(mesh, ours=False)
        jax_intranode.initialize(mesh)  # does not raise
    # Partitions that have a region keep it.
    assert chosen_for(meshes[0]).algorithm != "lax"
    check_sum(meshes[0])
    check_sum(meshes[slabs.REGIONS - 1])
    # Other devices have regions of their own.
    check_sum(cases.line(n - 1))


@pytest.mark.usefixtures("fresh")
def test_permutes_take_a_region_more_for_each_partition() -> None:
    need_devices(4)
    n = len(jax.devices())
    orders = list(itertools.islice(itertools.permutations(range(n)), slabs.REGIONS // 2 + 1))
    *meshes, last = [cases.make_mesh((n,), ("x",), order) for order in orders]
    for mesh in meshes:
        chosen = all_reduce.operations("ppermute", mesh, ("x",), [(2,)], np.dtype("float32"))[0][1]
        assert chosen_for(mesh).algorithm != "lax" and chosen.algorithm == "permute"
    for operation in ("psum", "ppermute"):
        chosen = all_reduce.operations(operation, last, ("x",), [(2,)], np.dtype("float32"))[0][1]
        assert chosen.algorithm == "lax"
        assert f"{slabs.REGIONS} regions" in chosen.reason
        assert "permutes take one more for each" in chosen.reason


def test_regions_lie_apart_in_the_slab() -> None:
    rendezvous = rendezvous_lib.rendezvous_of(cases.line().devices.flat)
    header = extension.module(rendezvous.platform).HEADER_BYTES
    assert rendezvous.region_bytes() >= header + 2 * rendezvous.epoch_buffer_bytes > header
    end = slabs.PROBE_BYTES + slabs.REGIONS * rendezvous.region_bytes()
    assert end <= config.get().slab_bytes(rendezvous.platform)


def test_partitions_of_the_same_devices_have_regions_of_their_own() -> None:
    need_devices(4)
    mesh = cases.make_mesh((2, 2), ("a", "b"))
    all_of_it = partition_lib.partition(mesh, ("a", "b"))
    halves = partition_lib.partition(mesh, ("b",))
    assert all_of_it.device_ids == halves.device_ids
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    regions = [communicator._claim_region(rendezvous, groups) for groups in (all_of_it, halves)]
    assert None not in regions and len({*regions}) == 2


@pytest.mark.usefixtures("fresh")
def test_addresses_that_are_mixed_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    need_devices(3)
    open_peers = slabs.open_peers

    def mixed_up(*arguments: Any) -> Any:
        addresses, opened = open_peers(*arguments)
        own, *others = addresses
        of_first = addresses[own]
        of_first[others[0]], of_first[others[1]] = of_first[others[1]], of_first[others[0]]
        return addresses, opened

    monkeypatch.setattr(slabs, "open_peers", mixed_up)
    chosen = chosen_for(cases.line())
    assert chosen.algorithm == "lax" and "can't share memory: wrote" in chosen.reason


@pytest.mark.usefixtures("fresh")
def test_reason_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_devices(2)

    def refuse(rendezvous: Any) -> dict[str, str]:
        return {"error": "for a test"}

    monkeypatch.setattr(rendezvous_lib, "_hello", refuse)
    with caplog.at_level(logging.INFO, "jax_intranode"):
        for _ in range(2):
            jax_intranode.initialize()
            check_sum(cases.line(), ours=False)
    assert chosen_for(cases.line()).reason == "for a test"
    assert [r.message.count("for a test") for r in caplog.records if r.name == "jax_intranode"] == [
        1
    ]
