"""Which devices the suite runs on: all GPUs of the machine, or 8 CPU devices.

JAX_INTRANODE_REQUIRE_GPUS=n makes the run fail where fewer than n GPUs are found, and turns every
skip for want of GPUs into a failure.
"""

import os

import jax
import pytest
from devices import REQUIRED_GPUS

# A wait without end is found soon, by its message and not by the test's own limit.
os.environ.setdefault("JAX_INTRANODE_TIMEOUT_S", "60")
jax.config.update("jax_num_cpu_devices", 8)


def pytest_report_header() -> str:
    devices = jax.devices()
    return f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}"


def pytest_configure(config: pytest.Config) -> None:
    gpus = sum(d.platform == "gpu" for d in jax.devices())
    if gpus < REQUIRED_GPUS:
        pytest.exit(
            f"JAX_INTRANODE_REQUIRE_GPUS={REQUIRED_GPUS}, but JAX sees {gpus} GPUs", returncode=1
        )
