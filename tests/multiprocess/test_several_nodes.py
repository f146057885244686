"""A mesh over several nodes, for which processes stand in that give different hostnames."""

from pathlib import Path

import jax
import numpy as np
from devices import need_ranks
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from multiprocess_ranks import run_in_ranks

import jax_intranode
from jax_intranode._src import rendezvous


def sums_on_two_nodes() -> None:
    """Ranks 0 and 1 are one node, 2 and 3 another one. Prints the algorithm over each axis."""
    name = f"node {jax.process_index() // 2}"
    rendezvous.host_platform.node = lambda: name
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


def test_groups_inside_a_node_are_accelerated(tmp_path: Path) -> None:
    need_ranks(4)
    for log in run_in_ranks(sums_on_two_nodes, 4, tmp_path):
        lines = [line for line in log.splitlines() if " one_shot " in line or " lax " in line]
        assert lines[0].startswith("model one_shot"), log
        assert lines[1].startswith("data lax") and "spans hosts" in lines[1], log
        assert lines[2].startswith("('data', 'model') lax") and "spans hosts" in lines[2], log
