"""Cases of how processes set up: again and again, and on several nodes."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import jax
import numpy as np
from cases import Case, line, make_mesh, put, sharded
from cases import case as register
from jax.sharding import PartitionSpec as P
from processes import segments_of

import jax_intranode
from jax_intranode._src.group import rendezvous
from jax_intranode._src.jax_private.distributed import key_value_client

CASES: dict[str, Case] = {}


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Before and after this nothing is set up."""
    jax_intranode.shutdown()
    jax.clear_caches()
    try:
        yield
    finally:
        jax_intranode.shutdown()
        jax.clear_caches()


def case(devices: int = 2, **parameters: Sequence[Any]) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        @functools.wraps(function)
        def alone(**chosen: Any) -> None:
            with apart():
                function(**chosen)

        return register(devices, CASES, **parameters)(alone)

    return add


def check_sum(seed: int, world: int | None = None) -> None:
    mesh = line(world)
    parts = cases.random("float32", (mesh.size, 100), seed)
    cases.check(cases.psum_of(parts, mesh), cases.everywhere(cases.oracle(parts), mesh.size))


# Set up and shut down.


@case()
def shut_down_one_after_another() -> None:
    """A rank shuts down while the others still use the communicators. Then all rendezvous again."""
    for first in range(jax.process_count()):
        check_sum(first)
        for turn in range(jax.process_count()):
            key_value_client().wait_at_barrier(f"shutdown {first} {turn}", 60_000)
            if (first + turn) % jax.process_count() == jax.process_index():
                jax_intranode.shutdown()
                jax.clear_caches()
    check_sum(10)
    set_up_often(20)


@case(devices=4)
def some_processes_before_all() -> None:
    """Processes that have met before, and ended their communicators, meet those that have not."""
    if cases.takes_part(line(2)):
        check_sum(1, world=2)
    key_value_client().wait_at_barrier("some", 60_000)
    jax.clear_caches()
    jax_intranode.shutdown()  # does nothing in the other processes
    before = jax_intranode.usage_counter()
    check_sum(2)
    assert jax_intranode.usage_counter() > before, "ours did not run"


def resources() -> dict[str, int]:
    """What this process holds of the system."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "segments": len(segments_of(os.getpid())),
    }


def set_up_often(times: int) -> None:
    """Sets communicators up and ends them again and again. Nothing may be left each time."""
    mesh = line()
    check_sum(0)
    jax_intranode.shutdown()
    for turn in range(times):
        if turn == min(5, times // 2):
            before = resources()
        jax_intranode.initialize(mesh)
        assert rendezvous.rendezvous_of(mesh.devices.flat).reason is None
        assert rendezvous.rendezvous_of(mesh.devices.flat).watch is not None
        jax_intranode.shutdown()
    after = resources()
    # XLA's and gRPC's threads come and go.
    assert after["threads"] <= before["threads"] + 10, (before, after)
    assert after["mappings"] <= before["mappings"] + 40, (before, after)
    assert after["descriptors"] <= before["descriptors"] + 4, (before, after)
    assert after["segments"] == 0, (before, after)
    jax.clear_caches()
    check_sum(1)
    print("DONE", before, after, flush=True)


# Nodes. Processes of one machine stand in for several nodes: they say that they are on different
# ones. tools/nodes.sh has nodes that differ in truth, and test_environments.py containers.

DIFFERENT = {
    "machine": "on different machines",
    "name": "under different host names",
    "shared_memory": "with a /dev/shm of their own each",
}


@case(devices=4, differs=DIFFERENT)
def sums_on_two_nodes(differs: str) -> None:
    """Ranks 0 and 1 are one node, 2 and 3 another one: groups inside a node are accelerated."""
    real, other = rendezvous._host, {differs: f"that of node {jax.process_index() // 2}"}
    mesh = make_mesh((2, 2), ("data", "model"))
    x = put(mesh, P(("data", "model")), np.array([1, 2, 4, 8]))
    wanted = {("model",): [3, 12], ("data",): [5, 10], ("data", "model"): [15]}
    with mock.patch.object(rendezvous, "_host", lambda where: real(where)._replace(**other)):
        for axes, sums in wanted.items():
            rest = P(*(a for a in mesh.axis_names if a not in axes))

            def total(v: jax.Array, axes: tuple[str, ...] = axes) -> jax.Array:
                return jax_intranode.psum(v, axes)

            f = sharded(total, mesh, P(("data", "model")), rest)
            (call,) = jax_intranode.explain(f)(x)
            if axes == ("model",):
                assert call.algorithm == "one_shot", call
            else:
                assert call.algorithm == "lax" and "spans hosts" in call.reason, call
                assert call.reason.endswith(DIFFERENT[differs]), call
            mine = jax.jit(f)(x).addressable_data(0)
            assert mine.shape == (1,) and int(mine[0]) in sums, (axes, mine)
