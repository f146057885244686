"""psum on a hybrid cube mesh: 8 CPU devices whose links JAX_INTRANODE_TOPOLOGY sets.

Forced links: quads of the devices 0 to 3 and 4 to 7; devices that are 4 apart are relays.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import need_devices
from test_topology import DGX1, FakeNvml, all_pairs, install, links_of

from jax_intranode._src import reasons
from jax_intranode._src.group import communicator, key_value_store, rendezvous, topology
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.native import extension
from jax_intranode._src.ops.collective import chooser
from jax_intranode._src.selection import config, select

pytestmark = pytest.mark.one_version

DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "uint32", "int64")


def oracle(parts: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """The right bits: each quad in rank order, the one with rank 0 first, rounded once.

    Args:
        parts: the operand of each rank.
        order: the device of each rank.
    """
    wide = np.float32 if parts.dtype in (np.float16, jnp.bfloat16) else parts.dtype
    quads = sorted([r for r in range(8) if order[r] // 4 == quad] for quad in (0, 1))
    first, second = (functools.reduce(np.add, parts[quad].astype(wide)) for quad in quads)
    return (first + second).astype(parts.dtype)


@pytest.fixture
def cube_mesh(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The devices are a hybrid cube mesh."""
    if jax.devices()[0].platform != "cpu":
        pytest.skip("GPUs have the links that they have")
    need_devices(8)
    monkeypatch.setenv("JAX_INTRANODE_TOPOLOGY", "hybrid_cube_mesh")
    config.get.cache_clear()
    yield
    monkeypatch.undo()
    config.get.cache_clear()


ORDERS = [list(range(8)), [4, 5, 6, 7, 0, 1, 2, 3], [6, 0, 3, 5, 2, 7, 4, 1]]


@pytest.mark.usefixtures("cube_mesh")
@pytest.mark.parametrize("order", ORDERS, ids=("in order", "quads swapped", "shuffled"))
def test_all_ranks_have_the_bits_of_the_sum_of_quads(order: list[int]) -> None:
    mesh = cases.make_mesh((8,), ("x",), np.array(order))
    with jax.enable_x64(True):
        for seed, (dtype, count) in enumerate(itertools.product(DTYPES, (1, 77))):
            parts = cases.random(dtype, (8, count), seed)
            before = extension.handler_calls()
            result = jax.block_until_ready(cases.psum_of(parts, mesh))
            assert extension.handler_calls() > before
            cases.check(result, cases.everywhere(oracle(parts, order), 8))


@pytest.mark.usefixtures("cube_mesh")
def test_what_groups_run() -> None:
    mesh = cases.make_mesh((2, 4), ("pair", "quad"), np.arange(8))
    dtype = np.dtype(np.float32)

    def choose(operation: str, axes: Sequence[str], nbytes: int = 400) -> select.Selection:
        return chooser(operation, mesh, axes, dtype)(nbytes)

    assert choose("psum", ("pair", "quad")).algorithm == "hybrid_cube_mesh"
    # Ranks that are all linked have all operations.
    assert choose("psum", ("quad",)).algorithm == "one_shot"
    assert choose("all_gather", ("quad",)).algorithm == "all_gather"
    assert choose("psum", ("pair",)).algorithm == "one_shot"
    for operation in set(cases.OPERATIONS) - {"psum"}:
        chosen = choose(operation, ("pair", "quad"))
        assert chosen.algorithm == "lax" and chosen.cause == reasons.UNSUPPORTED
        assert chosen.reason == reasons.HYBRID_CUBE_MESH
    assert "are faster than lax" in choose("psum", ("pair", "quad"), 1 << 20).reason

    # Operations of other kinds ask for a communicator only.
    found = rendezvous.rendezvous_of(mesh.devices.flat)
    whole, quads = (partition_lib.partition(mesh, axes) for axes in (("pair", "quad"), ("quad",)))
    reason = communicator.communicator(found, whole, "one_shot_rms_norm")
    assert reason == "only psum has kernels for a hybrid cube mesh"
    assert communicator.communicator(found, quads, "one_shot_rms_norm") is None

    crossed = cases.make_mesh((2, 4), ("pair", "quad"), np.array([0, 1, 2, 7, 4, 5, 6, 3]))
    chosen = chooser("psum", crossed, ("quad",), dtype)(400)
    assert chosen.algorithm == "lax"
    assert "devices 0 and 7 of group [0, 1, 2, 7] have no link to each other" in chosen.reason
    assert chooser("psum", crossed, ("quad", "pair"), dtype)(400).algorithm == "hybrid_cube_mesh"


# The links that GPUs report.


def test_links_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def neighbours(*nvml: Any) -> Any:
        install(monkeypatch, FakeNvml(links_of(*nvml)))
        return rendezvous._links_of_host([*enumerate(topology.read_links(), 10)])

    linked_to = neighbours(8, DGX1)
    assert sorted(linked_to) == list(range(10, 18))
    assert linked_to[10] == {11, 12, 13, 14} and linked_to[17] == {14, 15, 16, 13}
    assert neighbours(8, {}, [18] * 8) == neighbours(4, all_pairs(0, 1, 2, 3)) == {}
    with pytest.raises(key_value_store.Refused) as refusal:
        neighbours(4, {(0, 1): 4, (2, 3): 4})  # pairs with NVLink bridges
    reason = str(refusal.value)
    assert "are not all linked by NVLink (topology unknown, links (" in reason
    assert "00000000:06:00.0" in reason
