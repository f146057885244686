"""Which processes are on one host, and a mesh over several.

Processes of one machine stand in for several nodes: they say that they are on different ones.
tools/nodes.sh has nodes that differ in truth, and test_environments.py containers.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from devices import need_ranks
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from multiprocess_ranks import run_in_ranks

import jax_intranode
from jax_intranode._src.group import rendezvous


def sums_on_two_nodes(differs: str) -> None:
    """Ranks 0 and 1 are one node, 2 and 3 another one. Prints the algorithm over each axis."""
    real, other = rendezvous._host, {differs: f"that of node {jax.process_index() // 2}"}
    rendezvous._host = lambda platform: real(platform)._replace(**other)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(("data", "model")))
    x = jax.make_array_from_callback((4,), sharding, lambda i: np.array([1, 2, 4, 8])[i])
    wanted = {"model": [3, 12], "data": [5, 10], ("data", "model"): [15]}
    for axes, sums in wanted.items():
        rest = P(*(a for a in mesh.axis_names if a not in axes))

        @jax.shard_map(mesh=mesh, in_specs=P(("data", "model")), out_specs=rest)
        def total(v: jax.Array, axes: object = axes) -> jax.Array:
            return jax_intranode.psum(v, axes)

        (call,) = jax_intranode.explain(total)(x)
        print(axes, call.algorithm, call.reason)
        mine = jax.jit(total)(x).addressable_data(0)
        assert mine.shape == (1,) and int(mine[0]) in sums, (axes, mine)


@pytest.mark.parametrize(
    ("differs", "reason"),
    [
        pytest.param("machine", "on different machines", marks=pytest.mark.full),
        pytest.param("name", "under different host names", marks=pytest.mark.full),
        ("shared_memory", "with a /dev/shm of their own each"),
    ],
)
def test_groups_inside_a_node_are_accelerated(differs: str, reason: str, tmp_path: Path) -> None:
    need_ranks(4)
    for log in run_in_ranks(sums_on_two_nodes, 4, tmp_path, arguments=[differs]):
        lines = [line for line in log.splitlines() if " one_shot " in line or " lax " in line]
        assert lines[0].startswith("model one_shot"), log
        assert lines[1].startswith("data lax") and "spans hosts" in lines[1], log
        assert lines[2].startswith("('data', 'model') lax") and "spans hosts" in lines[2], log
        assert all(line.endswith(reason) for line in lines[1:]), log


def test_the_same_dev_shm_is_one_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = rendezvous._host("cpu")
    assert here == rendezvous._host("cpu") and all(here)
    # Two directories of one device, for instance of containers that have no tmpfs there.
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    hosts = [here]
    for name in ("first", "second", "missing"):
        monkeypatch.setattr(rendezvous, "_SHARED_MEMORY", tmp_path / name)
        hosts.append(rendezvous._host("cpu"))
    assert len(set(hosts)) == 4
    assert {host[:2] for host in hosts} == {here[:2]}
    assert here.difference(hosts[1]) == "on one machine, with a /dev/shm of their own each"


def test_dev_shm_does_not_matter_on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = rendezvous._host("gpu")
    monkeypatch.setattr(rendezvous, "_SHARED_MEMORY", tmp_path)
    assert rendezvous._host("gpu") == here
