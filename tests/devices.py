"""The devices that tests need. Without them a test is skipped, or fails where they are promised."""

import os

import jax
import pytest

from jax_intranode._src.group import topology
from jax_intranode._src.native import extension
from jax_intranode._src.selection.overlap import profiles

REQUIRED_GPUS = int(os.environ.get("JAX_INTRANODE_REQUIRE_GPUS", "0"))
MOST_RANKS_OF_A_GPU = 4


def need_devices(count: int) -> None:
    """Skips the test where there are fewer devices.

    Fails instead where JAX_INTRANODE_REQUIRE_GPUS promises that many.
    """
    found = len(jax.devices())
    if found < count:
        skip_or_fail = pytest.fail if count <= REQUIRED_GPUS else pytest.skip
        skip_or_fail(f"needs {count} devices; JAX sees {found}")


def ranks_share_a_gpu() -> bool:
    """Whether processes of a test share the machine's only GPU: see `launcher.sharing_env`."""
    return len(jax.devices()) == 1 and jax.devices()[0].platform == "gpu"


def need_ranks(count: int) -> None:
    """Skips the test where `count` processes can't have a device each, or share the only GPU.

    Fails instead where JAX_INTRANODE_REQUIRE_GPUS promises that many GPUs.
    """
    if not (ranks_share_a_gpu() and count <= MOST_RANKS_OF_A_GPU):
        need_devices(count)


def need_gpus() -> None:
    """Skips the test where there is no GPU; fails instead where GPUs are required."""
    if jax.devices()[0].platform != "gpu":
        (pytest.fail if REQUIRED_GPUS else pytest.skip)("needs GPUs; JAX sees none")


def module_needs_gpus() -> None:
    """Skips the test module that is being imported where there is no GPU and none is required.

    Its tests call `need_gpus` or `need_overlap` as well. This only saves the time of many skips.
    """
    if jax.devices()[0].platform != "gpu" and not REQUIRED_GPUS:
        pytest.skip("needs GPUs; JAX sees none", allow_module_level=True)


def need_overlap() -> None:
    """Skips the test where collective matmuls are not overlapped; as `need_gpus` without a GPU."""
    need_gpus()
    bus_id = topology.normalise_bus_id(extension.module("gpu").pci_bus_id(0))
    profile = profiles.from_facts([topology.read_facts(bus_id, jax.devices()[0].device_kind)])
    if isinstance(profile, str):
        pytest.skip(f"collective matmuls are not overlapped: {profile}")
