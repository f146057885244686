"""The watts and the SM clock that the benchmark shows, read from a stand-in for NVML."""

import sys
import time
import types
from typing import Any

import jax.numpy as jnp
import pytest
from bench_programs import measure as measure_program
from bench_settings import mesh_of_two, settings_of

from jax_intranode._src.command_line.bench import power, report, timing

pytestmark = pytest.mark.one_version

WATTS, MHZ = (250, 300), (1700, 1500)


class Nvml(types.ModuleType):
    """NVML of two GPUs, whose handles are 0 and 1."""

    class NVMLError(Exception):
        """The base of NVML's errors."""

    knows_energy = True

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(busId=f"00000000:0{handle}:00.0")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if not self.knows_energy:
            raise self.NVMLError
        return round(1000 * WATTS[handle] * time.perf_counter())  # millijoules

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        assert which == 1  # NVML_CLOCK_SM
        return MHZ[handle]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """NVML and a native module that agree on the GPUs; runs are short."""
    found = Nvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", found)
    module = types.SimpleNamespace(pci_bus_id=lambda ordinal: f"0000:0{ordinal}:00.0")
    monkeypatch.setattr(power.extension, "module", lambda platform: module)
    monkeypatch.setattr(power, "_FOR_S", 0.1)
    monkeypatch.setattr(power, "_BEFORE_S", 0.02)
    return found


def test_draws(nvml: Nvml) -> None:
    """The most watts and the lowest clock of both GPUs, in as many calls as take the time."""
    calls = []

    def run() -> Any:
        calls.append(1)
        time.sleep(0.01)
        return jnp.ones(())

    def draws(label: str) -> list[float | None]:
        return power.draws({"ours": run}, {"ours": 0.01}, mesh_of_two(), label)["ours"]

    watts, mhz = draws("first")
    assert watts == pytest.approx(300, rel=0.05) and mhz == 1500
    assert len(calls) == 10 + 2
    nvml.knows_energy = False
    assert draws("no energy") == [None, 1500]


def test_draws_without_nvml(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    runs, seconds = {"ours": lambda: jnp.ones(())}, {"ours": 0.05}
    assert power.draws(runs, seconds, mesh_of_two(), "none") == {"ours": [None, None]}


def test_fields_of_rows(nvml: Nvml) -> None:
    """Programs that settle, on GPUs, have them; and the tables have columns for them."""
    del nvml
    runs = {name: lambda: jnp.ones(()) for name in ("ours", "lax")}
    for platform, untimed, wanted in (("gpu", 1, 1500), ("gpu", 0, None), ("cpu", 1, None)):
        settings = settings_of("psum", platform=platform)
        label = f"{platform}/{untimed}"
        times, _ = timing.compare(runs, mesh_of_two(), settings, label, calls=1, untimed=untimed)
        fields = timing.draw_fields(times, "ours", "lax", "none")
        assert fields["sm_mhz"] == fields["lax_sm_mhz"] == wanted
        assert (fields["watts"] is None) == (wanted is None)
        assert fields["none_watts"] is fields["none_sm_mhz"] is None
    for table in (report.MATMULS, measure_program.TABLE):
        columns = {column.field: column for _, group in table for column in group}
        row = {"watts": 312.4, "sm_mhz": 1500.0, "lax_watts": None}
        cells = [columns[field].cell(row) for field in row]
        assert cells == [" 312", "1500", "   -"]
