"""The NVLink mesh: links and shapes of known machines, and how they follow from NVML's answers."""

import random
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from jax_intranode._src.group import topology as topo
from jax_intranode._src.group.topology import LinkReport, Topology, TopologyKind

pytestmark = pytest.mark.one_version

# The direct links of a DGX-1 with V100: (i, j) -> links. Two linked quads and i <-> i + 4.
DGX1 = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def bus_id(gpu: int) -> str:
    """Returns the normalised bus id that GPU number `gpu` has in these tests."""
    return f"00000000:{gpu + 6:02x}:00.0"


SWITCH_LINK = (1, 2, "FFFFFFFF:FF:FF.0")  # as an H200 in a virtual machine answers
Links = list[list[tuple[int, int, str]]]  # of each GPU: state, remote type and remote bus id


def links_of(
    size: int, direct: Mapping[tuple[int, int], int], switch_links: Sequence[int] = ()
) -> Links:
    """The links of GPUs that have these direct links and switch links."""
    links: Links = [[SWITCH_LINK] * count for count in switch_links or [0] * size]
    for (i, j), count in direct.items():
        links[i] += [(1, 0, bus_id(j).upper())] * count
        links[j] += [(1, 0, bus_id(i).upper())] * count
    return links


def without(pair: tuple[int, int]) -> dict[tuple[int, int], int]:
    return {other: count for other, count in DGX1.items() if other != pair}


def all_pairs(*gpus: int) -> dict[tuple[int, int], int]:
    return {(i, j): 4 for i in gpus for j in gpus if i < j}


# Eight GPUs with four neighbours each, but no cube mesh.
HALVES = {(i, j): 1 for i in range(4) for j in range(4, 8)}
RING = {(min(i, j), max(i, j)): 1 for i in range(8) for j in ((i + 1) % 8, (i + 2) % 8)}
FULLY, CUBE, UNKNOWN = (
    TopologyKind.FULLY_CONNECTED, TopologyKind.HYBRID_CUBE_MESH, TopologyKind.UNKNOWN
)  # fmt: skip
KINDS = {
    "DGX-1": (CUBE, links_of(8, DGX1)),
    **{f"DGX-1 without {pair}": (UNKNOWN, links_of(8, without(pair))) for pair in DGX1},
    "DGX-1 with a link too many": (UNKNOWN, links_of(8, {**DGX1, (0, 5): 1})),
    "two halves": (UNKNOWN, links_of(8, HALVES)),
    "ring": (UNKNOWN, links_of(8, RING)),
    "switch": (FULLY, links_of(8, {}, [18] * 8)),
    "switch that one reaches by fewer links": (FULLY, links_of(8, {}, [18] * 7 + [16])),
    "switch that one does not reach": (UNKNOWN, links_of(8, {}, [18] * 7 + [0])),
    **{f"{size} without NVLink": (UNKNOWN, links_of(size, {})) for size in (2, 4, 8)},
    "four linked directly": (FULLY, links_of(4, all_pairs(0, 1, 2, 3))),
    "four without a link": (UNKNOWN, links_of(4, all_pairs(0, 1, 2) | all_pairs(0, 3))),
    "two": (FULLY, links_of(2, {(0, 1): 4})),
    "one": (FULLY, links_of(1, {})),
    "none": (UNKNOWN, []),
}


class FakeNvml(types.ModuleType):
    """A stand-in for the module `pynvml`. A device handle is the index of its GPU."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    class NVMLError(Exception):
        """The base of NVML's errors."""

    class NVMLError_LibraryNotFound(NVMLError):
        """There is no driver."""

    class NVMLError_FunctionNotFound(NVMLError):
        """The driver is older than the function."""

    class NVMLError_InvalidArgument(NVMLError):
        """There is no such link."""

    class NVMLError_GpuIsLost(NVMLError):
        """The GPU fell off the bus."""

    def __init__(self, links: Sequence[Sequence[tuple[int, int, str]]]) -> None:
        """Makes a host of GPUs.

        Args:
            links: For each GPU, (state, remote type, remote bus id) of each of its links.
        """
        super().__init__("pynvml")
        self.links = links
        self.users = 0
        self.lost: set[int] = set()
        self.knows_remote_type = True

    def nvmlInit(self) -> None:
        self.users += 1

    def does_not_start(self) -> None:
        raise self.NVMLError_LibraryNotFound

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.links)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise self.NVMLError_GpuIsLost
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(busId=bus_id(handle).upper())

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"Test GPU"

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return self._link(handle, link)[0]

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        if not self.knows_remote_type:
            raise self.NVMLError_FunctionNotFound
        return self._link(handle, link)[1]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return types.SimpleNamespace(busId=self._link(handle, link)[2])

    def _link(self, handle: int, link: int) -> tuple[int, int, str]:
        assert self.users > 0, "used outside nvmlInit and nvmlShutdown"
        if link >= len(self.links[handle]):
            raise self.NVMLError_InvalidArgument
        return self.links[handle][link]


def install(monkeypatch: pytest.MonkeyPatch, nvml: types.ModuleType | None) -> None:
    """Makes `import pynvml` find `nvml`, or nothing, with no topology forced."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(topo.config, "get", lambda: types.SimpleNamespace(topology=None))


@pytest.mark.parametrize("name", KINDS)
def test_kind(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, links = KINDS[name]
    nvml = FakeNvml(links)
    install(monkeypatch, nvml)
    found = topo.topology()
    assert found.kind is kind and not found.forced and nvml.users == 0
    for seed in range(5):  # the order of the GPUs does not matter
        gpus = random.Random(seed).sample(found.gpus, len(links))
        assert topo.classify(topo.link_matrix(gpus)) is kind


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(links_of(3, {(1, 2): 4}, [18, 14, 0]))
    install(monkeypatch, nvml)
    first, second, third = found = topo.read_links()
    assert first == LinkReport(bus_id(0), "GPU-0", "Test GPU", 18, ())
    assert second == LinkReport(bus_id(1), "GPU-1", "Test GPU", 14, ((bus_id(2), 4),))
    assert topo.topology().links == ((0, 14, 0), (14, 0, 4), (0, 4, 0))
    # In the order asked for; the last one is not of this host.
    assert topo.read_links(["0000:08:00.0", "0000:06:00.0", "0000:77:00.0"]) == [third, first]
    nvml.knows_remote_type = False  # as an old driver, which knows addresses
    assert [report.peer_links for report in topo.read_links()] == [r.peer_links for r in found]
    nvml.knows_remote_type = True
    nvml.lost = {1}  # which does not hide the others
    assert topo.read_links() == [found[0], found[2]]
    monkeypatch.setattr(nvml, "nvmlInit", nvml.does_not_start)
    assert topo.read_links() == []
    assert topo.topology() == Topology(UNKNOWN, (), (), False)
