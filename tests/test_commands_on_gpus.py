"""What `info` and `doctor` say of a node with GPUs, by a stand-in for NVML."""

import json
import sys
import types
from typing import Any

import pytest
from test_topology import SWITCH_LINK, FakeNvml, bus_id

from jax_intranode import __main__ as command_line

pytestmark = pytest.mark.one_version


class Node(FakeNvml):
    """A node with GPUs, as far as the commands ask about it."""

    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    NVML_CLOCK_MEM, NVML_CLOCK_SM = 2, 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13010

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetHandleByPciBusId(self, wanted: str) -> int:
        return [bus_id(gpu) for gpu in range(len(self.links))].index(wanted)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(total=143771 << 20, free=143000 << 20)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetNumGpuCores(self, handle: int) -> int:
        return 132 * 128

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return 3201 if clock == self.NVML_CLOCK_MEM else 1980

    def nvmlDeviceGetMemoryBusWidth(self, handle: int) -> int:
        return 6144

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
        return []


@pytest.fixture
def two_h200s(monkeypatch: pytest.MonkeyPatch) -> Node:
    """Two GPUs at a switch, seen by this process."""
    node = Node([[SWITCH_LINK] * 18] * 2)
    monkeypatch.setitem(sys.modules, "pynvml", node)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return node


def test_info(two_h200s: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["driver"] == {"version": "580.1", "cuda": "13.1", "reason": None}
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA H200"] * 2
    assert found["gpus"][1]["compute_capability"] == "9.0"
    assert (found["gpus"][1]["memory_mib"], found["gpus"][1]["free_mib"]) == (143771, 143000)
    assert found["topology"] == {"kind": "fully_connected", "links": [[0, 18], [18, 0]]}
    if not found["cuda_part"]["built"]:
        assert any("CUDA part: not built" in problem for problem in found["problems"])
    assert command_line.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "0: NVIDIA H200, 00000000:06:00.0, compute capability 9.0, 143000 of 143771" in out
    assert "GPU0      X  NV18" in out and "fully_connected" in out
    assert "580.1, for CUDA up to 13.1" in out
    assert two_h200s.users == 0
