"""Slabs: memory of one device that its peers write into.

A slab starts with a page in which the devices test their access, the probe page. Regions follow;
each serves the groups of one partition (communicator.py). On GPUs, the ring buffer of the
collective matmuls follows.
"""

from collections.abc import Callable
from typing import Any

from jax_intranode._src.group import agreed, key_value_store
from jax_intranode._src.native import extension
from jax_intranode._src.selection import config

PROBE_BYTES = 64 << 10
REGIONS = 8


def epoch_buffer_bytes(slab_bytes: int, header_bytes: int) -> int:
    """Bytes of each epoch buffer of a slab's regions; 0 or less if the slab is too small."""
    epoch_buffer = ((slab_bytes - PROBE_BYTES) // REGIONS - header_bytes) // 2
    return epoch_buffer // 4096 * 4096


def allocate(
    rendezvous: agreed.Rendezvous, local: list[int], shared: bool
) -> tuple[dict[int, Any], int]:
    """Allocates a zeroed slab for each device and arms its epoch buffers (kernels/group.h)."""
    module = extension.module(rendezvous.platform)
    total = config.get().slab_bytes(rendezvous.platform)
    rendezvous.epoch_buffer_bytes = epoch_buffer_bytes(total, module.HEADER_BYTES)
    if rendezvous.epoch_buffer_bytes <= 0:
        raise RuntimeError(f"a slab of {total} bytes is too small; raise JAX_INTRANODE_SLAB_MIB")
    if rendezvous.reason_for_no_matmuls is None:
        rendezvous.ring_bytes = config.get().ring_bytes(rendezvous.platform)
    slabs = {}
    for device_id in local:
        ordinal = agreed.native_ordinal(rendezvous.devices[device_id])
        slab = module.allocate(ordinal, total + rendezvous.ring_bytes, shared)
        for region in range(REGIONS):
            start = slab.address + PROBE_BYTES + region * rendezvous.region_bytes()
            module.fill(
                ordinal, start + module.HEADER_BYTES, 0xFF, 2 * rendezvous.epoch_buffer_bytes
            )
        module.load_kernels(ordinal)
        slabs[device_id] = slab
        rendezvous.records[device_id] = slab.records
    return slabs, total + rendezvous.ring_bytes


def share(
    rendezvous: agreed.Rendezvous,
    prefix: str,
    deadline: key_value_store.Deadline,
    allocate: Callable[[list[int], bool], tuple[dict[int, Any], int]],
    owners: list[Any],
) -> tuple[dict[int, Any], dict[int, dict[int, int]]]:
    """Allocates memory on all devices, which those of the same host can address.

    Args:
        rendezvous: that of the devices.
        prefix: what the exchanges begin with.
        deadline: when they time out.
        allocate: (local device ids, whether other processes open it) -> memory by device id, and
            the bytes of each.
        owners: gets what owns the memory.

    Returns:
        The memory of each local device, and addresses, as from `open_peers`.

    Raises:
        Refused: there is none, on any process.
    """
    local, peers = agreed.devices_of_host(rendezvous)
    shared = len(local) < len(peers)
    own: dict[int, Any] = {}
    handles: dict[int, str] = {}
    addresses: dict[int, dict[int, int]] = {}
    nbytes = 0

    def allocate_all() -> dict[str, str]:
        nonlocal nbytes
        found, nbytes = allocate(local, shared)
        own.update(found)
        owners.extend(own.values())
        return {str(i): memory.handle().hex() if shared else "" for i, memory in own.items()}

    def open_all() -> None:
        found, opened = open_peers(rendezvous, own, handles, nbytes)
        addresses.update(found)
        owners.extend(opened)

    records = rendezvous.exchange(f"{prefix}slabs", allocate_all, deadline)
    with key_value_store.reading("slabs"):
        for ids, record in zip(agreed.device_ids_of(rendezvous), records, strict=True):
            handles.update({i: record[str(i)] for i in ids})
    rendezvous.exchange(f"{prefix}open", open_all, deadline)
    if shared:
        for memory in own.values():
            memory.unlink()
    return own, addresses


def open_peers(
    rendezvous: agreed.Rendezvous, own: dict[int, Any], handles: dict[int, str], nbytes: int
) -> tuple[dict[int, dict[int, int]], list[Any]]:
    """Makes memory of every device of this host addressable on every local device.

    `own` is the memory of each local device, and `handles` what other processes sent to open
    theirs, both by device id. Each has `nbytes`.

    Returns:
        The address of each peer's memory, by local device id and the peer's id, and the owners of
        what was opened. The address is 0 where a GPU is not linked to the peer.
    """
    module = extension.module(rendezvous.platform)
    local, peers = agreed.devices_of_host(rendezvous)
    addresses: dict[int, dict[int, int]] = {}
    opened: dict[Any, Any] = {}
    for device_id in local:
        ordinal = agreed.native_ordinal(rendezvous.devices[device_id])
        addresses[device_id] = {}
        for peer in peers:
            # On CPU devices the log of calls is in memory of rank 0, which is linked or not.
            if rendezvous.platform == "gpu" and not rendezvous.are_linked(device_id, peer):
                addresses[device_id][peer] = 0
                continue
            if peer in own:
                if peer != device_id:
                    module.enable_peer_access(
                        ordinal, agreed.native_ordinal(rendezvous.devices[peer])
                    )
                addresses[device_id][peer] = own[peer].address
                continue
            # On GPUs each device maps a peer's memory; on the CPU one mapping serves the process.
            key = (ordinal if rendezvous.platform == "gpu" else None, peer)
            if key not in opened:
                opened[key] = module.open(ordinal, bytes.fromhex(handles[peer]), nbytes)
            addresses[device_id][peer] = opened[key].address
    return addresses, list(opened.values())


def probe(
    rendezvous: agreed.Rendezvous, local: list[int], peers: list[int], *, write: bool
) -> None:
    """Tests the access of every device to every slab that it is linked to.

    Each device writes a word into the probe page of each slab. When all have done so, the writer
    reads its words back through the link, and the owner reads the words in its own slab.
    """
    module = extension.module(rendezvous.platform)

    def word(writer: int, owner: int) -> int:
        return (peers.index(writer) * 4099 + peers.index(owner) * 17 + 1) & 0x7FFFFFFF

    def slot(writer: int) -> int:
        return 4 * (peers.index(writer) % (PROBE_BYTES // 4))

    for device_id in local:
        ordinal = agreed.native_ordinal(rendezvous.devices[device_id])
        for peer in peers:
            if not rendezvous.are_linked(device_id, peer):
                continue
            there = rendezvous.addresses[device_id][peer] + slot(device_id)
            mine = rendezvous.addresses[device_id][device_id] + slot(peer)
            if write:
                module.write_word(ordinal, there, word(device_id, peer))
                continue
            for address, expected in (
                (there, word(device_id, peer)),
                (mine, word(peer, device_id)),
            ):
                found = module.read_word(ordinal, address)
                if found != expected:
                    raise RuntimeError(
                        f"devices {device_id} and {peer} can't share memory: wrote {expected}, "
                        f"read {found}; run `python -m jax_intranode doctor`"
                    )
