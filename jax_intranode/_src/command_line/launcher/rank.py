"""How a rank joins the others: in tests and benchmarks by `connect`, under `launch` by itself."""

import logging
import os
import secrets
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import jax

from jax_intranode._src import timeouts
from jax_intranode._src.jax_private import distributed
from jax_intranode._src.selection import config

_log = logging.getLogger("jax_intranode")

# Of the ranks that this process starts. Who does not know it can't set their keys beforehand.
_SECRET = secrets.token_hex(16)


def rank_env(
    rank: int, world_size: int, coordinator: int | str, local_devices: Sequence[int] | None = None
) -> dict[str, str]:
    """Returns the variables that say to a process which rank it is.

    Args:
        coordinator: The address of the coordination service, or a free port, the same for all
            ranks, where rank 0 starts one.
        local_devices: The devices of this process, as numbered among those that it sees; by
            default the one with the number of its rank. On the CPU only their count matters.
    """
    devices = [rank] if local_devices is None else local_devices
    address = coordinator if isinstance(coordinator, str) else f"127.0.0.1:{coordinator}"
    return {
        config.RANK: str(rank),
        config.WORLD_SIZE: str(world_size),
        config.COORDINATOR: address,
        config.LOCAL_DEVICES: ",".join(map(str, devices)),
        config.SECRET: _SECRET,
    }


def sharing_env(rank: int) -> dict[str, str]:
    """Returns variables with which several ranks share the machine's only GPU, for tests.

    The driver gives the ranks turns of about 2 ms, so a wait for a peer ends, but late: times mean
    nothing. NCCL refuses ranks of one host that share a GPU; it takes these for ranks of several.
    """
    return {
        config.LOCAL_DEVICES: "0",
        "JAX_INTRANODE_TOPOLOGY": "fully_connected",
        "NCCL_HOSTID": f"rank {rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def connect(platform: str) -> int:
    """Joins the other ranks' `jax.distributed` run. Call it before any other use of JAX.

    Afterwards an uncaught exception ends the process at once. Python's ordinary exit would first
    enter JAX's shutdown barrier and wait there for the healthy ranks.

    Returns:
        This process's rank.
    """
    sys.excepthook = _exit_at_once
    local_devices = _local_devices()
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", len(local_devices))
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        local_devices = list(range(len(local_devices)))
    if os.environ[config.COORDINATOR].startswith("unix:"):
        distributed.use_service_elsewhere()
    given = {**timeouts.OF_COMMANDS, "local_device_ids": local_devices}
    jax.distributed.initialize(**_arguments(given))
    return int(os.environ[config.RANK])


def join_at_first_use() -> None:
    """Makes this process a rank as its environment says, as soon as the program uses a device.

    If the program calls `jax.distributed.initialize` itself, this call joins the other ranks.
    """
    jax.config.update("jax_check_proxy_envs", False)  # gRPC asks none for a Unix socket
    distributed.join_at_first_use(_arguments)


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `jax.distributed.initialize` in a rank.

    Raises:
        ValueError: they are those of another rank.
    """
    rank, world_size = int(os.environ[config.RANK]), int(os.environ[config.WORLD_SIZE])
    for name, own in (("process_id", rank), ("num_processes", world_size)):
        if given.get(name) not in (None, own):
            raise ValueError(
                f"jax.distributed.initialize({name}={given[name]}): this is process {rank} of "
                f"{world_size} that `python -m jax_intranode launch` has started. Call "
                "jax.distributed.initialize() without arguments."
            )
    address = os.environ[config.COORDINATOR]
    if given.get("coordinator_address") not in (None, address) and rank == 0:
        _log.warning(
            "jax.distributed.initialize(coordinator_address=%r): the processes meet at %s, where "
            "`python -m jax_intranode launch` runs the coordination service.",
            given["coordinator_address"],
            address,
        )
    arguments = {
        **given,
        "coordinator_address": address,
        "coordinator_bind_address": address,  # by default all interfaces of the host; JAX logs it
        "num_processes": world_size,
        "process_id": rank,
        "cluster_detection_method": "deactivate",  # Slurm's, within an allocation
    }
    # Not CUDA_VISIBLE_DEVICES: peer access between GPUs is tested with both in sight, and JAX under
    # Slurm and Open MPI does it in this way, too.
    if given.get("local_device_ids") is None:
        arguments["local_device_ids"] = _local_devices()
    arguments.setdefault("heartbeat_timeout_seconds", timeouts.HEARTBEAT_S)
    return arguments


def _local_devices() -> list[int]:
    return [int(number) for number in os.environ[config.LOCAL_DEVICES].split(",")]


def _exit_at_once(*exception: Any) -> None:
    """A `sys.excepthook` that prints the error and ends the process without exit handlers."""
    traceback.print_exception(*exception)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
