"""Communicators: the processes of a mesh meet once, share slabs, and carve groups out of them.

A meeting belongs to a set of devices. It ends in one verdict for all of its processes: slabs that
every device of a host can write into, or a reason why the operations on these devices lower to
``jax.lax``. The verdict is final, so that all processes compile the same program.

After it nobody waits for anybody. A communicator serves a partition of the devices into groups. It
needs a region of the slabs, alike on all of them: the first process to ask for it claims the next
free one in the store, and the others find the claim.
"""

import atexit
import hashlib
import logging
import math
import os
import platform as host_platform
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_intranode._src import config, native, overlap, rendezvous, select, table
from jax_intranode._src import topology as topology_lib

_log = logging.getLogger("jax_intranode")

# Changes whenever the layout of slabs or the protocols do: processes of different versions must not
# meet.
_PROTOCOL = 6

# A slab: a page in which peers try their access, then regions. On GPUs a ring follows, through
# which rows of collective matmuls travel (xla_ffi/cuda/collective_matmul.h).
_PROBE_BYTES = 64 << 10
_REGIONS = 8

_lock = threading.RLock()
_meetings: dict[tuple[int, ...], "Meeting"] = {}
_generation = 0  # shutdowns so far: meetings before and after one don't mix


@dataclass(frozen=True)
class Partition:
    """A partition of devices into groups of one size.

    Attributes:
        device_ids: the global ids of all groups' devices one after another, in rank order.
        group_size: ranks a group.
    """

    device_ids: tuple[int, ...]
    group_size: int

    def groups(self) -> list[tuple[int, ...]]:
        """The groups' device ids, in rank order."""
        n = self.group_size
        return [self.device_ids[i : i + n] for i in range(0, len(self.device_ids), n)]


@dataclass
class Meeting:
    """What the processes of a set of devices agreed on.

    Attributes:
        devices: all devices, by id.
        platform: "cpu" or "gpu".
        mode: "single" if one process has all devices, else "multi".
        reason: why there are no communicators; None if there are.
        store: through which regions are claimed.
        hosts: number of each device's host, by device id.
        half_bytes: bytes of each of a region's two buffers.
        ring_bytes: bytes of a device's ring; 0 if there is none.
        reason_for_no_matmuls: why collective matmuls are not overlapped; None if they may be.
        addresses: by local device id and peer's id, where the peer's slab lies.
        memory: what keeps the slabs.
        records: where each local device's failure records are, by device id.
        communicators: reason, or None, by partition.
        failure: message of the operation that failed, after which nothing works any more.
    """

    devices: dict[int, Any]
    platform: str
    mode: str
    reason: str | None = None
    store: Any = None
    hosts: dict[int, int] = field(default_factory=dict)
    half_bytes: int = 0
    ring_bytes: int = 0
    reason_for_no_matmuls: str | None = None
    addresses: dict[int, dict[int, int]] = field(default_factory=dict)
    memory: list[Any] = field(default_factory=list)
    records: dict[int, int] = field(default_factory=dict)
    communicators: dict[Partition, str | None] = field(default_factory=dict)
    failure: str | None = None


def initialize(mesh: jax.sharding.Mesh | None = None) -> None:
    """Sets up communicators for a mesh, instead of at the first lowering that needs one.

    All processes with devices of the mesh must call it; it returns when they have agreed, or
    after JAX_INTRANODE_TIMEOUT_S. It never raises because the devices can't be used: operations
    then lower to ``jax.lax``, and the reason is logged once. Needed before a program that was
    compiled elsewhere is loaded. Calling it again does nothing.

    Args:
        mesh: the mesh; by default, one axis over all devices.
    """
    if mesh is None:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    meeting = meet(mesh.devices.flat)
    if meeting.reason is None:
        axes = [name for name in mesh.axis_names if mesh.shape[name] > 1]
        for count in range(1, len(axes) + 1):
            for subset in combinations(axes, count):
                communicator(meeting, partition(mesh, subset))


def shutdown() -> None:
    """Ends all communicators of this process.

    Block on results before: what is still being computed fails. Programs that were compiled with
    the communicators must not run any more: they raise. If XLA replays one from a CUDA graph, its
    error loses the CUDA context. The memory is given back when the last of these programs is gone.
    A later call meets anew; all processes must have called ``shutdown`` before.

    Raises:
        RuntimeError: this is a process that was forked from one that had communicators.
    """
    _refuse_fork()
    global _generation
    with _lock:
        for platform in ("cpu", "gpu"):
            module = native.module(platform)
            if module is not None:
                module.close()
        _meetings.clear()
        _generation += 1


def usage_counter() -> int:
    """How many operations the devices of this process have executed.

    An operation counts once for each device that took part. Those that XLA replayed from a CUDA
    graph count too: the figure comes from the devices. What lowered to ``jax.lax`` does not count.
    A collective matmul that is done in rounds (``explain`` says so) counts once for each of them.
    Never falls, also not after ``shutdown``.

    Raises:
        RuntimeError: the CUDA context is lost, or this process was forked from one that had
            communicators.
    """
    _refuse_fork()
    modules = [native.module(platform) for platform in ("cpu", "gpu")]
    return sum(module.operations() for module in modules if module is not None)


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _forked or any(meeting.reason is None for meeting in _meetings.values())


os.register_at_fork(after_in_child=_after_fork)
# What programs still use, communicators keep; the interpreter's end shall not find it here.
atexit.register(_meetings.clear)


def _refuse_fork() -> None:
    if _forked:
        raise RuntimeError(
            "jax_intranode: this process was forked from one that had communicators; devices and "
            "shared memory do not survive a fork. Start processes with the method 'spawn'."
        )


def partition(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> Partition:
    """The groups of an operation over `axes` of a mesh; ranks in row-major order of `axes`."""
    ids = np.vectorize(lambda device: device.id, otypes=[np.int64])(mesh.devices)
    kept = [i for i, name in enumerate(mesh.axis_names) if name not in axes]
    order = kept + [mesh.axis_names.index(name) for name in axes]
    size = math.prod(mesh.shape[name] for name in axes)
    return Partition(tuple(int(i) for i in ids.transpose(order).reshape(-1)), size)


def mode_of(devices: Iterable[Any]) -> str:
    """The process mode: "single" if one process has all of these devices, else "multi"."""
    return "single" if len({device.process_index for device in devices}) == 1 else "multi"


def meet(devices: Iterable[Any]) -> Meeting:
    """The meeting of these devices; held at the first call, the same ever after.

    Raises:
        RuntimeError: an operation on these devices has failed before, or this process was forked
            from one that had communicators.
    """
    _refuse_fork()
    by_id = {device.id: device for device in devices}
    key = tuple(sorted(by_id))
    with _lock:
        meeting = _meetings.get(key)
        if meeting is None:
            devices = {i: by_id[i] for i in key}
            processes = sorted({device.process_index for device in devices.values()})
            meeting = Meeting(devices, devices[key[0]].platform, mode_of(devices.values()))
            # Stored first: whatever interrupts it, no second meeting is held under its keys.
            _meetings[key] = meeting
            _hold_meeting(meeting, processes)
            if meeting.reason is not None:
                _log.log(
                    logging.INFO if config.get().disable else logging.WARNING,
                    "Operations on devices %s lower to jax.lax: %s.",
                    list(key),
                    meeting.reason,
                )
    if meeting.failure is not None:
        raise RuntimeError(meeting.failure)
    return meeting


def communicator(meeting: Meeting, groups: Partition) -> str | None:
    """Sets up the communicator of a partition; returns why there is none, or None."""
    if meeting.reason is not None:
        return meeting.reason
    with _lock:
        if groups not in meeting.communicators:
            meeting.communicators[groups] = _create_communicator(meeting, groups)
        return meeting.communicators[groups]


def _create_communicator(meeting: Meeting, groups: Partition) -> str | None:
    if groups.group_size > select.MAX_WORLD_SIZE:
        return (
            f"a group of {groups.group_size} ranks; at most {select.MAX_WORLD_SIZE} are supported"
        )
    for group in groups.groups():
        if len({meeting.hosts[i] for i in group}) > 1:
            return f"group {group} spans hosts"
    text = f"{groups.group_size}: {groups.device_ids}"
    for region in range(_REGIONS):
        if meeting.store.claim(f"region/{region}", text) == text:
            break
    else:
        return (
            f"the slab's {_REGIONS} regions serve other groups of these devices; a program can use "
            "that many partitions of a mesh"
        )
    module = native.module(meeting.platform)
    offset = _PROBE_BYTES + region * _region_bytes(meeting.half_bytes, module)
    members = []
    for number, group in enumerate(groups.groups()):
        for rank, device_id in enumerate(group):
            if device_id in meeting.addresses:
                regions = [meeting.addresses[device_id][peer] + offset for peer in group]
                ordinal = native_ordinal(meeting.devices[device_id])
                records = meeting.records[device_id] + region * module.RECORD_BYTES
                members.append((ordinal, number, rank, regions, records))
    module.create_communicator(
        list(groups.device_ids),
        groups.group_size,
        members,
        meeting.half_bytes,
        config.get().timeout_s,
        meeting.memory,
    )
    if meeting.reason_for_no_matmuls is None:
        start = config.get().slab_bytes(meeting.platform)
        rings = [
            (
                native_ordinal(meeting.devices[i]),
                [meeting.addresses[i][peer] + start for peer in group],
            )
            for group in groups.groups()
            for i in group
            if i in meeting.addresses
        ]
        module.add_rings(list(groups.device_ids), groups.group_size, rings, meeting.ring_bytes)
    return None


def native_ordinal(device: Any) -> int:
    # What XLA tells a handler of its device: on CPUs the global id, on GPUs the local ordinal.
    return device.id if device.platform == "cpu" else device.local_hardware_id


def _region_bytes(half_bytes: int, module: Any) -> int:
    return module.HEADER_BYTES + 2 * half_bytes


# The meeting itself.


class _Refusal(Exception):
    """Why these devices get no communicators."""


def _hold_meeting(meeting: Meeting, processes: list[int]) -> None:
    """Fills in the meeting, or its reason."""
    meeting.reason = "its meeting was interrupted"
    if jax.process_index() not in processes:
        meeting.reason = "this process has none of these devices"
        return
    deadline = rendezvous.Deadline(config.get().timeout_s)
    name = hashlib.sha256(repr(tuple(meeting.devices)).encode()).hexdigest()[:16]
    try:
        store = meeting.store = rendezvous.store(
            f"jax_intranode/{_generation}/{name}/", jax.process_index(), processes
        )
    except RuntimeError as error:
        meeting.reason = str(error)
        return
    # Whoever can't go on says so at once and for all. That all is well is for the first process to
    # say; if it says nothing, the first one to give up on it does.
    verdict: str | None
    try:
        _share_slabs(meeting, deadline)
        if jax.process_index() == processes[0]:
            verdict = store.claim("verdict", "")
        else:
            verdict = store.wait("verdict", rendezvous.Deadline(deadline.remaining_ms() / 1e3 + 10))
        if verdict is None:
            verdict = store.claim("verdict", f"process {processes[0]} gave no verdict in time")
    except (_Refusal, rendezvous.Refused) as refusal:
        verdict = store.claim("verdict", str(refusal))
    except BaseException as error:
        store.claim("verdict", f"process {jax.process_index()} was interrupted by {error!r}")
        raise
    meeting.reason = verdict or None
    if verdict:
        # Slabs are kept: a peer that has not heard of the verdict yet may still write into them.
        meeting.addresses.clear()
    elif meeting.platform == "gpu":
        _watch("gpu")


def _gather(meeting: Meeting, stage: str, value: Any, deadline: rendezvous.Deadline) -> list[Any]:
    """Exchanges values; a process that could not do its part says {"error": why} to all."""
    values = meeting.store.gather(stage, value, deadline)
    errors = [v["error"] for v in values if isinstance(v, dict) and v.get("error")]
    if errors:
        raise _Refusal(errors[0])
    return values


def _share_slabs(meeting: Meeting, deadline: rendezvous.Deadline) -> None:
    """Fills in the meeting, or raises why it can't be.

    Every stage ends with an exchange in which all processes take part, also those that failed in
    it, so that all of them learn of a failure at once.
    """

    def attempt(stage: str, step: Any) -> list[Any]:
        try:
            value = step()
        except Exception as error:
            value = {"error": f"process {jax.process_index()}: {error}"}
        return _gather(meeting, stage, value, deadline)

    hellos = attempt("hello", lambda: _hello(meeting))
    _check_hellos(hellos)
    meeting.reason_for_no_matmuls = _reason_for_no_matmuls(meeting, hellos)

    hosts = [hello["host"] for hello in hellos]
    described = {d["id"]: (process, d) for process, h in enumerate(hellos) for d in h["devices"]}
    for device_id in meeting.devices:
        meeting.hosts[device_id] = hosts.index(hosts[described[device_id][0]])
    here = meeting.hosts[next(i for i in meeting.devices if _is_local(meeting.devices[i]))]
    peers = [i for i in meeting.devices if meeting.hosts[i] == here]
    local = [i for i in peers if _is_local(meeting.devices[i])]
    shared = len(local) < len(peers)

    slabs: dict[int, Any] = {}
    handles: dict[int, str] = {}

    def allocate() -> dict[str, Any]:
        slabs.update(_allocate(meeting, local, shared))
        return {str(i): slab.handle().hex() if shared else "" for i, slab in slabs.items()}

    for mine in attempt("slabs", allocate):
        handles.update({int(i): handle for i, handle in mine.items()})
    attempt("open", lambda: _open_peers(meeting, slabs, handles, local, peers))
    if shared:
        for slab in slabs.values():
            slab.unlink()
    attempt("write", lambda: _probe(meeting, local, peers, write=True))
    attempt("read", lambda: _probe(meeting, local, peers, write=False))


def _is_local(device: Any) -> bool:
    return device.process_index == jax.process_index()


def _hello(meeting: Meeting) -> dict[str, Any]:
    """What a process says of itself: the same questions, whatever the answers."""
    module = native.module(meeting.platform)
    hello: dict[str, Any] = {
        "host": [_boot_id(), host_platform.node()],
        "config": repr(config.get()),
        "protocol": _PROTOCOL,
        "table": [select.digest(), overlap.digest()],
        "matmuls": 0 if meeting.platform == "cpu" or not module else module.cublas_lt_version(),
        "devices": [],
    }
    if config.get().disable:
        return {"error": "JAX_INTRANODE_DISABLE=1"}
    if module is None:
        what = "CUDA kernels" if meeting.platform == "gpu" else f"kernels for {meeting.platform}"
        return {"error": f"process {jax.process_index()}: jax_intranode was built without {what}"}
    local = [device for device in meeting.devices.values() if _is_local(device)]
    links = {}
    if meeting.platform == "gpu":
        bus_ids = {
            d.id: topology_lib.normalise_bus_id(module.pci_bus_id(native_ordinal(d))) for d in local
        }
        reports = {r.bus_id: r for r in topology_lib.read_links(list(bus_ids.values()))}
        for device_id, bus_id in bus_ids.items():
            if bus_id not in reports:
                return {"error": f"NVML does not show the GPU {bus_id}"}
            links[device_id] = reports[bus_id].to_json()
    for device in local:
        hello["devices"].append({"id": device.id, "links": links.get(device.id)})
    return hello


def _reason_for_no_matmuls(meeting: Meeting, hellos: list[dict[str, Any]]) -> str | None:
    """Why collective matmuls are not overlapped on these devices, or None."""
    if meeting.platform == "cpu":
        return "CPU devices"
    for device in meeting.devices.values():
        hardware = table.hardware_of(meeting.platform, device.device_kind)
        if hardware != overlap.HARDWARE:
            return f"not measured on {device.device_kind}"
    versions = {hello["matmuls"] for hello in hellos}
    if 0 in versions:
        return "cuBLASLt is not to be found"
    if len(versions) > 1:
        return f"processes with different versions of cuBLASLt: {sorted(versions)}"
    if config.get().ring_bytes(meeting.platform) == 0:
        return "JAX_INTRANODE_RING_MIB=0"
    return None


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _check_hellos(hellos: list[dict[str, Any]]) -> None:
    """Refuses meetings in which the ranks would not decide alike, or can't reach each other."""
    for what in ("protocol", "table", "config"):
        values = [hello[what] for hello in hellos]
        for process, value in enumerate(values):
            if value != values[0]:
                raise _Refusal(
                    f"processes 0 and {process} of the mesh have a different {what}: {values[0]} "
                    f"and {value}; give them the same version and environment"
                )
    by_host: dict[tuple[str, ...], list[Any]] = {}
    for hello in hellos:
        for device in hello["devices"]:
            if device["links"] is not None:
                report = topology_lib.LinkReport.from_json(device["links"])
                by_host.setdefault(tuple(hello["host"]), []).append((device["id"], report))
    forced = config.get().topology
    if forced not in (None, topology_lib.TopologyKind.FULLY_CONNECTED.value):
        raise _Refusal(
            f"JAX_INTRANODE_TOPOLOGY={forced}; only fully connected GPUs have kernels yet"
        )
    for devices in by_host.values():
        seen: dict[str, int] = {}
        for device_id, report in devices:
            if report.uuid in seen:
                raise _Refusal(f"devices {seen[report.uuid]} and {device_id} are one GPU")
            seen[report.uuid] = device_id
        matrix = topology_lib.link_matrix([report for _, report in devices])
        kind = topology_lib.classify(matrix)
        if forced is None and kind is not topology_lib.TopologyKind.FULLY_CONNECTED:
            raise _Refusal(
                f"GPUs {[report.bus_id for _, report in devices]} are not all linked by NVLink "
                f"(topology {kind.value}, links {matrix})"
            )


def _allocate(meeting: Meeting, local: list[int], shared: bool) -> dict[int, Any]:
    """A zeroed slab a device, its packet buffers armed (xla_ffi/kernels/group.h)."""
    module = native.module(meeting.platform)
    total = config.get().slab_bytes(meeting.platform)
    half = ((total - _PROBE_BYTES) // _REGIONS - module.HEADER_BYTES) // 2
    meeting.half_bytes = half // 4096 * 4096
    if meeting.half_bytes <= 0:
        raise RuntimeError(f"a slab of {total} bytes is too small; raise JAX_INTRANODE_SLAB_MIB")
    if meeting.reason_for_no_matmuls is None:
        meeting.ring_bytes = config.get().ring_bytes(meeting.platform)
    slabs = {}
    for device_id in local:
        ordinal = native_ordinal(meeting.devices[device_id])
        slab = module.allocate(ordinal, total + meeting.ring_bytes, shared)
        for region in range(_REGIONS):
            start = slab.address + _PROBE_BYTES + region * _region_bytes(meeting.half_bytes, module)
            module.fill(ordinal, start + module.HEADER_BYTES, 0xFF, 2 * meeting.half_bytes)
        module.load_kernels(ordinal)
        slabs[device_id] = slab
        meeting.records[device_id] = slab.records
    return slabs


def _open_peers(
    meeting: Meeting,
    slabs: dict[int, Any],
    handles: dict[int, str],
    local: list[int],
    peers: list[int],
) -> None:
    module = native.module(meeting.platform)
    meeting.memory.extend(slabs.values())
    opened: dict[Any, Any] = {}
    for device_id in local:
        ordinal = native_ordinal(meeting.devices[device_id])
        addresses = meeting.addresses[device_id] = {}
        for peer in peers:
            if peer in slabs:
                if peer != device_id:
                    module.enable_peer_access(ordinal, native_ordinal(meeting.devices[peer]))
                addresses[peer] = slabs[peer].address
                continue
            # A mapping belongs to a GPU; on the CPU one serves the whole process.
            key = (ordinal if meeting.platform == "gpu" else None, peer)
            if key not in opened:
                handle = bytes.fromhex(handles[peer])
                size = config.get().slab_bytes(meeting.platform) + meeting.ring_bytes
                opened[key] = module.open(ordinal, handle, size)
            addresses[peer] = opened[key].address
    meeting.memory.extend(opened.values())


def _probe(meeting: Meeting, local: list[int], peers: list[int], *, write: bool) -> None:
    """Tries every pair: each device writes a word into each slab, then all of them are read.

    A word is read back where it was written, through the link, and found by its owner.
    """
    module = native.module(meeting.platform)

    def word(writer: int, owner: int) -> int:
        return (peers.index(writer) * 4099 + peers.index(owner) * 17 + 1) & 0x7FFFFFFF

    def slot(writer: int) -> int:
        return 4 * (peers.index(writer) % (_PROBE_BYTES // 4))

    for device_id in local:
        ordinal = native_ordinal(meeting.devices[device_id])
        for peer in peers:
            there = meeting.addresses[device_id][peer] + slot(device_id)
            mine = meeting.addresses[device_id][device_id] + slot(peer)
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
                        f"read {found}"
                    )


# What goes wrong in a kernel.

_OPERATIONS = {
    "one_shot": "psum (one_shot)",
    "two_shot": "psum (two_shot)",
    "reduce_scatter": "psum_scatter",
    "all_gather": "all_gather",
    "all_gather_matmul": "all_gather_matmul",
    "matmul_reduce_scatter": "matmul_reduce_scatter",
}
_REASONS = {1: "timed out after {timeout} s", 2: "was aborted", 3: "met another one in flight"}


def _failure_message(failure: tuple[Any, ...]) -> str:
    device_ids, group_size, ordinal, reason, algorithm, rank, missing = failure
    if reason == 4:
        return (
            "jax_intranode: a program that was compiled before jax_intranode.shutdown() was "
            f"replayed from a CUDA graph, on CUDA device {ordinal}. The CUDA context is lost; "
            "restart the program, and call jax.clear_caches() after jax_intranode.shutdown()."
        )
    by_ordinal = {
        native_ordinal(device): device.id
        for meeting in list(_meetings.values())
        for device in meeting.devices.values()
        if _is_local(device) and device.platform != "cpu"
    }
    device = by_ordinal.get(ordinal)
    groups = Partition(tuple(device_ids), group_size).groups()
    group = next((g for g in groups if g[rank] == device), ())
    text = (
        f"jax_intranode: {_OPERATIONS[select.ALGORITHMS[algorithm]]} "
        + _REASONS[reason].format(timeout=config.get().timeout_s)
        + f": rank {rank} (device {device}) of devices {group}"
    )
    if missing >= 0:
        text += f" waited for rank {missing} (device {group[missing] if group else '?'})"
    if reason == 1:
        text += (
            ". Did that rank fail, or run another program? JAX_INTRANODE_TIMEOUT_S sets the limit"
        )
    elif reason == 3:
        text += (
            ". Operations of one group, and collective matmuls of one device, must run one after "
            "another, on one stream"
        )
    return text + ". The CUDA context is lost; restart the program."


_watched: set[str] = set()


def _watch(platform: str) -> None:
    """Has a thread turn the record of a kernel that gave up into a message.

    One a platform, for good: after a shutdown there may be programs left that are replayed. The
    thread keeps no meeting alive.
    """
    if platform in _watched:
        return
    _watched.add(platform)

    def poll() -> None:
        module = native.module(platform)
        while True:
            failures = module.failures()
            if failures:
                # Of several records the first that names a missing rank tells most.
                failures.sort(key=lambda f: (f[3] == 2, f[2]))
                message = _failure_message(failures[0])
                # Without the lock: a thread may hold it for long in a meeting of its own.
                module.fail(message)
                _log.error(message)
                for meeting in list(_meetings.values()):
                    if meeting.platform == platform:
                        meeting.failure = message
                return
            time.sleep(0.05)

    threading.Thread(target=poll, name="jax_intranode watcher", daemon=True).start()
