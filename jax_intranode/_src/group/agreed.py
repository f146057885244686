"""What the processes of a set of devices agree on at a rendezvous, and what follows from it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from jax_intranode._src.group import key_value_store
from jax_intranode._src.group.partition import Partition
from jax_intranode._src.health import peers
from jax_intranode._src.native import extension
from jax_intranode._src.selection.overlap.profiles import Profile


class Host(NamedTuple):
    """Where processes can share memory with each other: those for which all of this is the same.

    Attributes:
        machine: the boot id of the running kernel.
        name: the host name. Containers on one machine usually have different ones.
        shared_memory: which directory /dev/shm is, in which processes with CPU devices share
            memory; empty for GPUs, whose memory they share through the driver.
    """

    machine: str
    name: str
    shared_memory: str

    def difference(self, other: "Host") -> str:
        """Why processes there and on another host share no memory, as part of a sentence."""
        if self.machine != other.machine:
            return "on different machines"
        if self.name != other.name:
            return "on one machine, under different host names"
        return "on one machine, with a /dev/shm of their own each"


@dataclass
class Rendezvous:
    """What the processes of a set of devices agreed on.

    Attributes:
        devices: all devices, by id.
        platform: "cpu" or "gpu".
        mode: "single" if one process has all devices, else "multi".
        reason: why there are no communicators; None if there are.
        store: the key-value store through which regions are claimed.
        hosts: each device's host, by device id.
        linked: by device id, the devices that it is linked to, on hosts that are a hybrid cube
            mesh. Devices of other hosts, which are not in it, are linked to all others there.
        epoch_buffer_bytes: bytes of each of the two epoch buffers of a region.
        ring_bytes: bytes of a device's ring buffer; 0 if there is none.
        reason_for_no_matmuls: why collective matmuls are not overlapped; None if they may be.
        shipped_profile: the GPUs' constants without a tuning, or why there are none.
        addresses: the address of each peer's slab, by local device id and the peer's id.
        memory: owns the slabs.
        records: the address of each local device's failure records, by device id.
        communicators: by partition, why there is no communicator, or None if there is one.
        watch: the watch over the other processes of this host; None if there are none, or if they
            can't be watched.
        peer_buffers: the open peer buffers, by name (peer_buffer.py).
        peer_buffers_made: how often a peer buffer of a name was asked for.
    """

    devices: dict[int, Any]
    platform: str
    mode: str
    reason: str | None = None
    store: Any = None
    hosts: dict[int, Host] = field(default_factory=dict)
    linked: dict[int, frozenset[int]] = field(default_factory=dict)
    epoch_buffer_bytes: int = 0
    ring_bytes: int = 0
    reason_for_no_matmuls: str | None = None
    shipped_profile: Profile | str | None = None
    addresses: dict[int, dict[int, int]] = field(default_factory=dict)
    memory: list[Any] = field(default_factory=list)
    records: dict[int, int] = field(default_factory=dict)
    communicators: dict[Partition, str | None] = field(default_factory=dict)
    watch: peers.Watch | None = None
    peer_buffers: dict[str, Any] = field(default_factory=dict)
    peer_buffers_made: dict[str, int] = field(default_factory=dict)

    def exchange(
        self, stage: str, step: Callable[[], Any], deadline: key_value_store.Deadline
    ) -> list[Any]:
        """Exchanges what a step returns in each process.

        Processes in which it failed take part as well, so that all of them see a failure at once.

        Raises:
            Refused: it failed in a process.
        """
        try:
            value = step()
        except Exception as error:
            value = {"error": f"process {jax.process_index()}: {error}"}
        values = self.store.gather(stage, value, deadline)
        errors = [v["error"] for v in values if isinstance(v, dict) and v.get("error")]
        if errors:
            raise key_value_store.Refused(errors[0])
        return values

    def are_linked(self, first: int, second: int) -> bool:
        """Whether data may travel between two devices of a host, given by their ids."""
        return first == second or first not in self.linked or second in self.linked[first]

    def region_bytes(self) -> int:
        """Bytes of a region: its header and its epoch buffers."""
        return extension.module(self.platform).HEADER_BYTES + 2 * self.epoch_buffer_bytes


def mode_of(devices: Iterable[Any]) -> str:
    """The process mode: "single" if one process has all of these devices, else "multi"."""
    return "single" if len({device.process_index for device in devices}) == 1 else "multi"


def native_ordinal(device: Any) -> int:
    """The number by which XLA's handlers know a device: on CPUs the global id, else CUDA's."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def is_local(device: Any) -> bool:
    """Whether a device is of this process."""
    return device.process_index == jax.process_index()


def device_ids_of(rendezvous: Rendezvous) -> list[list[int]]:
    """The ids of each process's devices, in process order."""
    of_process: dict[int, list[int]] = {}
    for device_id, device in rendezvous.devices.items():
        of_process.setdefault(device.process_index, []).append(device_id)
    return [ids for _, ids in sorted(of_process.items())]


def devices_of_host(rendezvous: Rendezvous) -> tuple[list[int], list[int]]:
    """The ids of this process's devices, and of all devices of this host."""
    local = [i for i, device in rendezvous.devices.items() if is_local(device)]
    here = rendezvous.hosts[local[0]]
    return local, [i for i in rendezvous.devices if rendezvous.hosts[i] == here]
