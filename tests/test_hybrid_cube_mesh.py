"""psum on a hybrid cube mesh: 8 CPU devices whose links JAX_INTRANODE_TOPOLOGY sets.

Forced links: quads of the devices 0 to 3 and 4 to 7; devices that are 4 apart are relays.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import need_devices
from test_topology import DGX1, make_reports

import jax_intranode
from jax_intranode._src import reasons
from jax_intranode._src.group import communicator, key_value_store, rendezvous, topology
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.native import extension
from jax_intranode._src.ops.collective import chooser
from jax_intranode._src.selection import config, select

sys.path.append(str(Path(__file__).parent / "multiprocess"))

pytestmark = pytest.mark.one_version

VARIABLE = {"JAX_INTRANODE_TOPOLOGY": "hybrid_cube_mesh"}
DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "uint32", "int64")


def oracle(parts: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """The right bits: each quad in rank order, the one with rank 0 first, rounded once.

    Args:
        parts: the operand of each rank.
        order: the device of each rank.
    """
    quads = [[r for r in range(8) if order[r] // 4 == quad] for quad in (0, 1)]
    quads.sort()
    wide = parts.dtype
    if parts.dtype in (np.float16, jnp.bfloat16):
        wide = np.dtype(np.float32)
    sums = []
    for quad in quads:
        total = parts[quad[0]].astype(wide)
        for rank in quad[1:]:
            total = total + parts[rank].astype(wide)
        sums.append(total)
    return (sums[0] + sums[1]).astype(parts.dtype)


@pytest.fixture
def cube_mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The devices are a hybrid cube mesh, and no rendezvous has taken place before."""
    if jax.devices()[0].platform != "cpu":
        pytest.skip("GPUs have the links that they have")
    need_devices(8)
    monkeypatch.setenv(*next(iter(VARIABLE.items())))
    config.get.cache_clear()
    jax_intranode.shutdown()
    jax.clear_caches()
    yield
    monkeypatch.undo()
    config.get.cache_clear()
    jax_intranode.shutdown()
    jax.clear_caches()


def mesh_of(order: Sequence[int]) -> jax.sharding.Mesh:
    return cases.make_mesh((8,), ("x",), np.array(order))


def check_psum(dtype: str, count: int, order: Sequence[int], seed: int) -> None:
    parts = cases.random(dtype, (8, count), seed)
    before = extension.handler_calls()
    result = jax.block_until_ready(cases.psum_of(parts, mesh_of(order)))
    assert extension.handler_calls() > before
    cases.check(result, cases.everywhere(oracle(parts, order), 8))


ORDERS = [list(range(8)), [4, 5, 6, 7, 0, 1, 2, 3], [6, 0, 3, 5, 2, 7, 4, 1]]


@pytest.mark.usefixtures("cube_mesh")
@pytest.mark.parametrize("order", ORDERS, ids=("in order", "quads swapped", "shuffled"))
def test_all_ranks_have_the_bits_of_the_sum_of_quads(order: list[int]) -> None:
    with jax.enable_x64(True):
        for seed, (dtype, count) in enumerate(itertools.product(DTYPES, (1, 77))):
            check_psum(dtype, count, order, seed)


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
    found = rendezvous_lib.rendezvous_of(mesh.devices.flat)
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


def links_of(reports: Sequence[topology.LinkReport], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rendezvous.config, "get", lambda: config.Config())
    return rendezvous._links_of_host([(10 + i, report) for i, report in enumerate(reports)])


def test_links_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    linked_to = links_of(make_reports(8, DGX1), monkeypatch)
    assert sorted(linked_to) == list(range(10, 18))
    assert linked_to[10] == {11, 12, 13, 14} and linked_to[17] == {14, 15, 16, 13}
    assert links_of(make_reports(8, {}, [18] * 8), monkeypatch) == {}
    assert links_of(make_reports(2, {(0, 1): 4}), monkeypatch) == {}
    quad = {(i, j): 1 for i in range(4) for j in range(i + 1, 4)}
    assert links_of(make_reports(4, quad), monkeypatch) == {}


PAIRS = {(0, 1): 4, (2, 3): 4}


@pytest.mark.parametrize(
    ("size", "direct"),
    [
        pytest.param(4, PAIRS, id="pairs with NVLink bridges"),
        pytest.param(8, {**DGX1, (0, 5): 1}, id="a link more"),
    ],
)
def test_gpus_that_are_linked_in_part_fall_back(
    monkeypatch: pytest.MonkeyPatch, size: int, direct: dict[tuple[int, int], int]
) -> None:
    with pytest.raises(key_value_store.Refused) as refusal:
        links_of(make_reports(size, direct), monkeypatch)
    reason = str(refusal.value)
    assert "are not all linked by NVLink (topology unknown, links (" in reason
    assert "00000000:06:00.0" in reason
