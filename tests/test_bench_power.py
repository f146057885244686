"""The watts and the SM clock that the benchmark shows, read from a stand-in for NVML."""

import sys
import types
from typing import Any

import jax.numpy as jnp
import pytest
from bench_settings import mesh_of_two
from test_topology import SWITCH_LINK, FakeNvml, bus_id

from jax_intranode._src.command_line.bench import power

pytestmark = pytest.mark.one_version

WATTS, MHZ = (250, 300), (1700, 1500)


class Nvml(FakeNvml):
    """NVML of two GPUs."""

    knows_energy = True
    seconds = 0.0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if not self.knows_energy:
            raise self.NVMLError
        return round(1000 * WATTS[handle] * self.seconds)  # millijoules

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        assert which == 1  # NVML_CLOCK_SM
        return MHZ[handle]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """NVML and a native module that agree on the GPUs; runs are short, by a clock of their own."""
    found = Nvml([[SWITCH_LINK]] * 2)
    monkeypatch.setitem(sys.modules, "pynvml", found)
    module = types.SimpleNamespace(pci_bus_id=bus_id)
    monkeypatch.setattr(power.extension, "module", lambda platform: module)
    monkeypatch.setattr(power, "time", types.SimpleNamespace(perf_counter=lambda: found.seconds))
    monkeypatch.setattr(power, "_FOR_S", 0.1)
    monkeypatch.setattr(power, "_BEFORE_S", 0.02)
    return found


def test_draws(nvml: Nvml) -> None:
    """The most watts and the lowest clock of both GPUs, in as many calls as take the time."""
    calls = []

    def run() -> Any:
        calls.append(1)
        nvml.seconds += 0.01
        return jnp.ones(())

    def draws(label: str) -> list[float | None]:
        return power.draws({"ours": run}, {"ours": 0.01}, mesh_of_two(), label)["ours"]

    watts, mhz = draws("first")
    assert watts == pytest.approx(300) and mhz == 1500
    assert len(calls) == 10 + 2
    nvml.knows_energy = False
    assert draws("no energy") == [None, 1500]
