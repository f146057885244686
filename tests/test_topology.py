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


def make_reports(
    size: int, direct: Mapping[tuple[int, int], int], switch_links: Sequence[int] = ()
) -> list[LinkReport]:
    """Builds the reports of `size` GPUs with these direct links and switch links."""
    peers: list[dict[str, int]] = [{} for _ in range(size)]
    for (i, j), count in direct.items():
        peers[i][bus_id(j)] = count
        peers[j][bus_id(i)] = count
    return [
        LinkReport(
            bus_id=bus_id(gpu),
            uuid=f"GPU-{gpu}",
            name="Test GPU",
            switch_links=switch_links[gpu] if switch_links else 0,
            peer_links=tuple(sorted(peers[gpu].items())),
        )
        for gpu in range(size)
    ]


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
    "DGX-1": (CUBE, make_reports(8, DGX1)),
    **{f"DGX-1 without {pair}": (UNKNOWN, make_reports(8, without(pair))) for pair in DGX1},
    "DGX-1 with a link too many": (UNKNOWN, make_reports(8, {**DGX1, (0, 5): 1})),
    "two halves": (UNKNOWN, make_reports(8, HALVES)),
    "ring": (UNKNOWN, make_reports(8, RING)),
    "switch": (FULLY, make_reports(8, {}, [18] * 8)),
    "switch that one reaches by fewer links": (FULLY, make_reports(8, {}, [18] * 7 + [16])),
    "switch that one does not reach": (UNKNOWN, make_reports(8, {}, [18] * 7 + [0])),
    **{f"{size} without NVLink": (UNKNOWN, make_reports(size, {})) for size in (2, 4, 8)},
    "four linked directly": (FULLY, make_reports(4, all_pairs(0, 1, 2, 3))),
    "four without a link": (UNKNOWN, make_reports(4, all_pairs(0, 1, 2) | all_pairs(0, 3))),
    "two": (FULLY, make_reports(2, {(0, 1): 4})),
    "one": (FULLY, make_reports(1, {})),
    "none": (UNKNOWN, []),
}


@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str) -> None:
    kind, reports = KINDS[name]
    for seed in range(5):  # the order of the GPUs does not matter
        assert topo.classify(topo.link_matrix(reports)) is kind
        random.Random(seed).shuffle(reports)


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


SWITCH_LINK = (1, 2, "FFFFFFFF:FF:FF.0")  # as an H200 in a virtual machine answers


def direct_links(size: int, direct: Mapping[tuple[int, int], int]) -> list[list[tuple]]:
    """Returns the links of a fake host whose GPUs are linked to each other."""
    links: list[list[tuple]] = [[] for _ in range(size)]
    for (i, j), count in direct.items():
        links[i] += [(1, 0, bus_id(j).upper())] * count
        links[j] += [(1, 0, bus_id(i).upper())] * count
    return links


def install(monkeypatch: pytest.MonkeyPatch, nvml: types.ModuleType | None) -> None:
    """Makes `import pynvml` find `nvml`, or nothing, with no topology forced."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(topo.config, "get", lambda: types.SimpleNamespace(topology=None))


def test_nvml_with_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([[SWITCH_LINK] * 18] * 8)
    install(monkeypatch, nvml)
    found = topo.topology()
    assert found.kind is TopologyKind.FULLY_CONNECTED
    assert not found.forced
    assert [gpu.switch_links for gpu in found.gpus] == [18] * 8
    assert all(gpu.peer_links == () for gpu in found.gpus)
    assert found.links[3][5] == 18
    assert found.gpus[2] == LinkReport(bus_id(2), "GPU-2", "Test GPU", 18, ())
    assert nvml.users == 0


@pytest.mark.parametrize("knows_remote_type", [True, False])
def test_nvml_with_direct_links(monkeypatch: pytest.MonkeyPatch, knows_remote_type: bool) -> None:
    nvml = FakeNvml(direct_links(8, DGX1))
    nvml.knows_remote_type = knows_remote_type
    install(monkeypatch, nvml)
    found = topo.topology()
    assert found.kind is TopologyKind.HYBRID_CUBE_MESH
    assert found.gpus == tuple(
        LinkReport(report.bus_id, report.uuid, report.name, 0, report.peer_links)
        for report in make_reports(8, DGX1)
    )


def test_read_links_keeps_the_order_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml([[SWITCH_LINK]] * 4))
    cuda_ids = ["0000:09:00.0", "0000:06:00.0", "0000:77:00.0"]  # the last is not of this host
    assert [gpu.uuid for gpu in topo.read_links(cuda_ids)] == ["GPU-3", "GPU-0"]


def test_a_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([[SWITCH_LINK]] * 3)
    nvml.lost = {1}
    install(monkeypatch, nvml)
    assert [gpu.uuid for gpu in topo.read_links()] == ["GPU-0", "GPU-2"]


def test_nvml_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError_LibraryNotFound

    install(monkeypatch, Broken([[SWITCH_LINK]] * 2))
    assert topo.read_links() == []
    assert topo.topology() == Topology(TopologyKind.UNKNOWN, (), (), False)
