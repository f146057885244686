"""Communicators: what the groups of one partition of a mesh's devices communicate through.

The processes of a mesh rendezvous once (rendezvous.py). From then on no process waits for another.
A communicator needs a region of the slabs, the same one on all devices: the first process that
asks claims the next free region in the key-value store, and the others find the claim there.
"""

import dataclasses
from collections.abc import Mapping
from itertools import combinations

import jax
import numpy as np

from jax_intranode._src import reasons
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.group import slabs, topology
from jax_intranode._src.group.agreed import Rendezvous, native_ordinal
from jax_intranode._src.group.partition import Partition, partition
from jax_intranode._src.group.rendezvous import rendezvous_of
from jax_intranode._src.health import failures, peers
from jax_intranode._src.native import definitions, extension
from jax_intranode._src.selection import config


def initialize(mesh: jax.sharding.Mesh | None = None) -> None:
    """Sets up communicators for a mesh, instead of at the first lowering that needs one.

    All processes with devices of the mesh must call it. It returns when they have agreed, or after
    JAX_INTRANODE_TIMEOUT_S, at most 5 minutes. It does not raise if the devices can't be used:
    operations then fall back to ``jax.lax``, and the reason is logged once. A program that was
    compiled elsewhere needs this call before it is loaded. Calling it again does nothing.

    Each combination of mesh axes of size 2 or more takes one of the 8 regions of the devices'
    memory, used or not: a mesh of three axes takes 7. A mesh of four axes leaves none for permutes
    and for some combinations, whose calls then fall back. Don't call it there: programs take only
    the regions that they need.

    Args:
        mesh: the mesh; by default, one axis over all devices.

    Raises:
        TypeError: `mesh` is not a mesh.
        CommunicationError: an operation on these devices has failed before.
        RuntimeError: this process was forked from one that had communicators.

    Examples:
        >>> jax_intranode.initialize(mesh)
    """
    if mesh is None:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"jax_intranode.initialize got {mesh!r}; pass a jax.sharding.Mesh, for example "
            'jax.make_mesh((8,), ("model",)).'
        )
    rendezvous = rendezvous_of(mesh.devices.flat)
    if rendezvous.reason is None:
        axes = [name for name in mesh.axis_names if mesh.shape[name] > 1]
        for count in range(1, len(axes) + 1):
            for subset in combinations(axes, count):
                communicator(rendezvous, partition(mesh, subset))


def shutdown() -> None:
    """Ends all communicators of this process.

    Block on results before: operations that still run fail. Programs that were compiled with the
    communicators must not run any more: they raise. If XLA replays one from a CUDA graph, its error
    loses the CUDA context. The memory is freed when the last of these programs is gone. A later
    call sets up new communicators; all processes must have called ``shutdown`` before that. Without
    communicators the call does nothing.

    Raises:
        RuntimeError: this process was forked from one that had communicators.
    """
    rendezvous_lib.refuse_fork()
    with rendezvous_lib.lock:
        if not rendezvous_lib.all_rendezvous():
            return  # the next rendezvous is the same one in all processes
        failures.current()  # what failed before is no consequence of this
        for platform in ("cpu", "gpu"):
            module = extension.module(platform)
            if module is not None:
                module.close()
        peers.close_all()
        rendezvous_lib.forget_all()
    failures.forget()


def usage_counter() -> int:
    """How many operations the devices of this process have executed.

    An operation counts once for each device that took part. Operations that XLA replayed from a
    CUDA graph count too: the devices count. Operations that fell back to ``jax.lax`` do not. A
    collective matmul that runs in rounds (``explain`` says so) counts once for each round. The
    number never falls, not even after ``shutdown``.

    Raises:
        CommunicationError: the CUDA context is lost.
        RuntimeError: this process was forked from one that had communicators.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def total(x):
        ...     return jax_intranode.psum(x, "model")
        >>> before = jax_intranode.usage_counter()
        >>> jax.block_until_ready(total(jnp.ones(4)))
        Array([2., 2.], dtype=float32)
        >>> jax_intranode.usage_counter() - before  # one operation on two devices
        2
    """
    rendezvous_lib.refuse_fork()
    modules = [extension.module(platform) for platform in ("cpu", "gpu")]
    try:
        return sum(module.operations() for module in modules if module is not None)
    except RuntimeError as error:
        failure = failures.current()
        if failure is None:
            raise
        raise failures.CommunicationError(failure.message, failure) from error


def communicator(
    rendezvous: Rendezvous, groups: Partition, algorithm: str | None = None
) -> str | None:
    """Sets up the communicator of a partition; returns why an algorithm can't use it, or None.

    Without an algorithm it is for those of fully connected groups.
    """
    if rendezvous.reason is not None:
        return rendezvous.reason
    if algorithm is not None and definitions.has_own_region(algorithm):
        groups = dataclasses.replace(groups, permutes=True)
    with rendezvous_lib.lock:
        if groups not in rendezvous.communicators:
            rendezvous.communicators[groups] = _create(rendezvous, groups)
        reason = rendezvous.communicators[groups]
    cube_mesh = topology.TopologyKind.HYBRID_CUBE_MESH
    if (
        reason is None
        and topology_of(rendezvous, groups) is cube_mesh
        and algorithm != cube_mesh.value
    ):
        return reasons.HYBRID_CUBE_MESH
    return reason


def _create(rendezvous: Rendezvous, groups: Partition) -> str | None:
    if groups.group_size > definitions.MAX_WORLD_SIZE:
        most = definitions.MAX_WORLD_SIZE
        return reasons.TOO_MANY_RANKS.of(ranks=groups.group_size, most=most)
    for group in groups.groups():
        first, *others = dict.fromkeys(rendezvous.hosts[i] for i in group)
        if others:
            return reasons.HOSTS.of(group=group, difference=first.difference(others[0]))
    reason = _reason_of_links(rendezvous, groups)
    if reason is not None:
        return reason
    region = _claim_region(rendezvous, groups)
    if region is None:
        return reasons.REGIONS.of(regions=slabs.REGIONS)
    module = extension.module(rendezvous.platform)
    module.create_communicator(
        list(groups.device_ids),
        groups.group_size,
        _members_in_region(rendezvous, groups, region),
        rendezvous.epoch_buffer_bytes,
        config.get().wait_s,
        rendezvous.memory,
        _links(rendezvous, groups),
        groups.permutes,
    )
    if rendezvous.reason_for_no_matmuls is None and not groups.permutes:
        # The ring buffers lie behind the slabs.
        behind = config.get().slab_bytes(rendezvous.platform)
        members = members_of(rendezvous, groups, rendezvous.addresses, rendezvous.records, behind)
        rings = [(ordinal, addresses) for ordinal, _, _, addresses, _ in members]
        module.add_rings(list(groups.device_ids), groups.group_size, rings, rendezvous.ring_bytes)
    return None


# The links of groups. On a hybrid cube mesh a group is linked in full, or is the whole mesh, or is
# left to lax.


def topology_of(rendezvous: Rendezvous, groups: Partition) -> topology.TopologyKind:
    """How the devices of each group are linked; unknown if no communicator serves such groups."""
    if not rendezvous.linked:
        return topology.TopologyKind.FULLY_CONNECTED
    kinds = {topology.classify(_matrix(rendezvous, group)) for group in groups.groups()}
    return kinds.pop() if len(kinds) == 1 else topology.TopologyKind.UNKNOWN


def _matrix(rendezvous: Rendezvous, group: tuple[int, ...]) -> list[list[int]]:
    return [[int(i != j and rendezvous.are_linked(i, j)) for j in group] for i in group]


def _reason_of_links(rendezvous: Rendezvous, groups: Partition) -> str | None:
    if topology_of(rendezvous, groups) is not topology.TopologyKind.UNKNOWN:
        return None
    for group in groups.groups():
        for i, j in combinations(group, 2):
            if not rendezvous.are_linked(i, j):
                return reasons.NO_LINK.of(first=i, second=j, group=list(group))
    return None


def _links(rendezvous: Rendezvous, groups: Partition) -> list[list[tuple[int, int]]]:
    """For each group and rank the ranks it is linked to, as bits, and its relay.

    Nothing if all ranks of the groups are linked to each other.
    """
    if topology_of(rendezvous, groups) is not topology.TopologyKind.HYBRID_CUBE_MESH:
        return []
    links = []
    for group in groups.groups():
        matrix = _matrix(rendezvous, group)
        relays = topology.relays(matrix)
        assert relays is not None  # a hybrid cube mesh in any order is one
        peers = [sum(1 << j for j, linked in enumerate(row) if linked) for row in matrix]
        links.append(list(zip(peers, relays, strict=True)))
    return links


def _claim_region(rendezvous: Rendezvous, groups: Partition) -> int | None:
    """The region that serves a partition; None if all regions serve others."""
    text = f"{groups.group_size}: {groups.device_ids}"
    if groups.permutes:
        text += " for permutes"
    for region in range(slabs.REGIONS):
        if rendezvous.store.claim(f"region/{region}", text) == text:
            return region
    return None


# A local device of a partition, as the native module takes it: its ordinal, the number of its group
# and its rank there, the addresses of the ranks' memory (0: not linked), and that of its record.
Member = tuple[int, int, int, list[int], int]


def members_of(
    rendezvous: Rendezvous,
    groups: Partition,
    addresses: Mapping[int, Mapping[int, int]],
    records: Mapping[int, int],
    offset: int = 0,
) -> list[Member]:
    """The local devices of a partition, with what lies at an offset of each rank's memory.

    `addresses` are those of each peer's memory, by local device id and the peer's id, and `records`
    those of the local devices' failure records.
    """
    return [
        (
            native_ordinal(rendezvous.devices[i]),
            number,
            rank,
            [addresses[i][peer] and addresses[i][peer] + offset for peer in group],
            records[i],
        )
        for number, group in enumerate(groups.groups())
        for rank, i in enumerate(group)
        if i in addresses
    ]


def _members_in_region(rendezvous: Rendezvous, groups: Partition, region: int) -> list[Member]:
    record_bytes = extension.module(rendezvous.platform).RECORD_BYTES
    records = {i: record + region * record_bytes for i, record in rendezvous.records.items()}
    offset = slabs.PROBE_BYTES + region * rendezvous.region_bytes()
    return members_of(rendezvous, groups, rendezvous.addresses, records, offset)
