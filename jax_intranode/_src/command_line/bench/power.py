"""The power that GPUs draw, and the clock of their SMs, while a program runs: by NVML."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.group import agreed, topology
from jax_intranode._src.group import nvml as nvml_lib
from jax_intranode._src.native import extension

# How long a program runs before and while its energy is read. NVML's counter lags by up to 0.1 s.
_BEFORE_S, _FOR_S = 0.2, 0.5
_SM_CLOCK = 1  # NVML_CLOCK_SM


def draws(
    runs: Mapping[str, Callable[[], Any]], seconds: Mapping[str, float], mesh: Mesh, label: str
) -> dict[str, list[float | None]]:
    """Calls each function for 0.7 s; returns the most watts of a GPU, and the lowest clock in MHz.

    None stands for what NVML does not tell. `seconds` is how long a call of each function takes. It
    is the same on all ranks, so that they make as many calls.
    """
    found = {}
    with contextlib.ExitStack() as stack:
        read = _reader(stack, mesh)
        for name, run in runs.items():
            before, during = (math.ceil(s / max(seconds[name], 1e-4)) for s in (_BEFORE_S, _FOR_S))
            for _ in range(before):
                jax.block_until_ready(run())
            begun, joules = time.perf_counter(), read("TotalEnergyConsumption")
            for call in range(during):
                result = run()
                if call == during // 2:
                    mhz = float(min(read("ClockInfo", _SM_CLOCK)))
                jax.block_until_ready(result)
            used = read("TotalEnergyConsumption") - joules
            watts = 1e-3 * float(max(used)) / (time.perf_counter() - begun)
            most = all_ranks.largest(f"{label}/{name}/watts", watts)
            lowest = -all_ranks.largest(f"{label}/{name}/sm_mhz", -mhz)
            found[name] = [None if math.isnan(value) else value for value in (most, lowest)]
    return found


def _reader(stack: contextlib.ExitStack, mesh: Mesh) -> Callable[..., Any]:
    """Returns a function that reads a number of each GPU of this process, or NaN, by NVML."""
    module: Any = extension.module("gpu")
    try:
        nvml = stack.enter_context(nvml_lib.session())
        known = topology.handles_by_bus_id(nvml)
        local = [device for device in mesh.devices.flat if agreed.is_local(device)]
        ids = [module.pci_bus_id(agreed.native_ordinal(device)) for device in local]
        handles = [known[topology.normalise_bus_id(bus_id)] for bus_id in ids]
    except (nvml_lib.Unavailable, AttributeError, KeyError):  # no NVML, kernels or permission
        return lambda *_: np.array([math.nan])

    def read(what: str, *arguments: Any) -> Any:
        try:
            return np.array([getattr(nvml, f"nvmlDeviceGet{what}")(h, *arguments) for h in handles])
        except nvml.NVMLError:  # the GPU does not tell
            return np.array([math.nan])

    return read
