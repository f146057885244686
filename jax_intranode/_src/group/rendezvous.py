"""The rendezvous: the processes of a mesh agree once on whether and how its devices communicate.

A rendezvous belongs to a set of devices. It ends in one verdict for all of its processes. Either
every device of a host can write into the slabs of all others, or there is a reason why operations
on these devices fall back to ``jax.lax``. The verdict is final, so that all processes compile the
same program.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import platform as host_platform
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_intranode._src import reasons, timeouts
from jax_intranode._src.group import agreed, key_value_store, log_line
from jax_intranode._src.group import slabs as slabs_lib
from jax_intranode._src.group import topology as topology_lib
from jax_intranode._src.group.agreed import Host, Rendezvous
from jax_intranode._src.group.key_value_store import Refused, reading
from jax_intranode._src.health import failures, peers
from jax_intranode._src.jax_private import distributed
from jax_intranode._src.native import definitions, extension
from jax_intranode._src.selection import config, records, select, tuning
from jax_intranode._src.selection.overlap import choice, profiles
from jax_intranode._src.selection.quoting import shown
from jax_intranode._src.version import __version__

_log = logging.getLogger("jax_intranode")

# Increase it whenever the layout of slabs or the protocols change: processes of different versions
# must not share memory.
_PROTOCOL = 10

_SHARED_MEMORY = Path("/dev/shm")

# Guards every rendezvous, and what follows from it.
lock = threading.RLock()
_all: dict[tuple[int, ...], "Rendezvous"] = {}
# How often a rendezvous of these devices was ended. All processes of the devices count alike, also
# when some of them have had other rendezvous, without the rest.
_ended: collections.Counter[tuple[int, ...]] = collections.Counter()
_forked = False


def rendezvous_of(devices: Iterable[Any]) -> Rendezvous:
    """The rendezvous of these devices. The first call performs it; later ones return the same.

    Raises:
        CommunicationError: these devices can't communicate any more.
        RuntimeError: this process was forked from one that had communicators.
    """
    refuse_fork()
    by_id = {device.id: device for device in devices}
    key = tuple(sorted(by_id))
    with lock:
        rendezvous = _all.get(key)
        if rendezvous is None:
            devices = {i: by_id[i] for i in key}
            processes = sorted({device.process_index for device in devices.values()})
            rendezvous = Rendezvous(
                devices, devices[key[0]].platform, agreed.mode_of(devices.values())
            )
            # Stored first: if it is interrupted, it is not tried again with the same keys.
            _all[key] = rendezvous
            _perform(rendezvous, processes)
            if rendezvous.reason is not None:
                _log.log(
                    logging.INFO if config.get().disable else logging.WARNING,
                    "Operations on devices %s fall back to jax.lax: %s.",
                    list(key),
                    rendezvous.reason,
                )
    raise_if_failed(rendezvous.devices.values())
    return rendezvous


def raise_if_failed(devices: Iterable[Any]) -> None:
    """Raises CommunicationError if these devices can't communicate any more.

    An operation on them has failed, or a process of theirs is gone.
    """
    failure = failures.current()
    devices = list(devices)
    if failure is None or failure.platform != devices[0].platform:
        return
    if not failure.device_ids or any(device.id in failure.device_ids for device in devices):
        raise failures.CommunicationError(failure.message, failure)


def forget_all() -> None:
    """Ends every rendezvous of this process; the next use of the same devices starts anew."""
    _ended.update(_all.keys())
    _all.clear()


def generation(device_ids: Iterable[int]) -> int:
    """How many rendezvous of these devices were ended. Processes meet in the same generation."""
    return _ended[tuple(sorted(device_ids))]


def refuse_fork() -> None:
    """Raises RuntimeError in a process that was forked from one that had communicators."""
    if _forked:
        raise RuntimeError(
            "jax_intranode: this process was forked from one that had communicators; devices and "
            "shared memory do not survive a fork. Start processes with the method 'spawn'."
        )


def _after_fork() -> None:
    global _forked
    _forked = _forked or any(rendezvous.reason is None for rendezvous in _all.values())


def _perform(rendezvous: Rendezvous, processes: list[int]) -> None:
    """Fills in the rendezvous, or its reason."""
    rendezvous.reason = reasons.INTERRUPTED
    if jax.process_index() not in processes:
        rendezvous.reason = reasons.NOT_HERE
        return
    deadline = key_value_store.Deadline(config.get().meeting_s)
    name = hashlib.sha256(repr(tuple(rendezvous.devices)).encode()).hexdigest()[:16]
    try:
        store = rendezvous.store = key_value_store.store(
            f"jax_intranode/{generation(rendezvous.devices)}/{name}/",
            *(jax.process_index(), processes),
        )
    except RuntimeError as error:
        rendezvous.reason = str(error)
        return
    # A process that can't go on claims the verdict at once. The first process claims it when all is
    # well. If it doesn't, the first process that gives up waiting for it does.
    verdict: str | None
    description = ""
    try:
        description = _share_slabs(rendezvous, deadline)
        if jax.process_index() == processes[0]:
            verdict = store.claim("verdict", "")
        else:
            verdict = store.wait(
                "verdict",
                key_value_store.Deadline(deadline.remaining_ms() / 1e3 + timeouts.VERDICT_S),
            )
        if verdict is None:
            verdict = store.claim("verdict", f"process {processes[0]} gave no verdict in time")
    except Refused as refusal:
        verdict = store.claim("verdict", str(refusal))
    except BaseException as error:
        store.claim("verdict", f"process {jax.process_index()} was interrupted by {error!r}")
        raise
    rendezvous.reason = shown(verdict) if verdict else None
    if verdict:
        # The slabs stay: a peer that has not seen the verdict yet may still write into them.
        rendezvous.addresses.clear()
    else:
        failures.watch(rendezvous.platform, _process_of, config.get().report_after_s)
        # Programs keep alive what they still use.
        distributed.at_end_of_backends(forget_all)
        _log.info(description)


def all_rendezvous() -> list[Rendezvous]:
    """The rendezvous since the last shutdown."""
    return list(_all.values())


def _share_slabs(rendezvous: Rendezvous, deadline: key_value_store.Deadline) -> str:
    """Fills in the rendezvous, or raises why it can't. Every stage ends with an exchange.

    Returns:
        What the log says of it.
    """
    hellos = rendezvous.exchange("hello", lambda: _hello(rendezvous), deadline)
    ids_of_processes = agreed.device_ids_of(rendezvous)
    with reading("hello"):
        processes = sorted({device.process_index for device in rendezvous.devices.values()})
        rendezvous.linked = _check_hellos(hellos, processes)
        if [[device["id"] for device in hello["devices"]] for hello in hellos] != ids_of_processes:
            raise ValueError("other devices than the mesh has")
        for hello in hellos:
            host, watch = hello["host"], hello["watch"]
            if not all(isinstance(part, str) for part in Host(*host)):
                raise TypeError("a host that is not text")
            if watch and "reason" not in watch and not {"address", "token"} <= watch.keys():
                raise ValueError("neither an address nor a reason for none")
            if not all(isinstance(value, str) for value in watch.values()):
                raise TypeError("an address that is not text")
        rendezvous.reason_for_no_matmuls = _reason_for_no_matmuls(rendezvous, hellos)

    _watch(rendezvous, hellos, deadline)

    for ids, hello in zip(ids_of_processes, hellos, strict=True):
        rendezvous.hosts.update(dict.fromkeys(ids, Host(*hello["host"])))
    rendezvous.addresses = slabs_lib.share(
        rendezvous,
        "",
        deadline,
        lambda local, shared: slabs_lib.allocate(rendezvous, local, shared),
        rendezvous.memory,
    )[1]
    local, peers = agreed.devices_of_host(rendezvous)
    probe = functools.partial(slabs_lib.probe, rendezvous, local, peers)
    rendezvous.exchange("write", lambda: probe(write=True), deadline)
    rendezvous.exchange("read", lambda: probe(write=False), deadline)
    return log_line.describe(rendezvous, hellos)


def _watch(
    rendezvous: Rendezvous, hellos: list[dict[str, Any]], deadline: key_value_store.Deadline
) -> None:
    """Makes the processes of this host watch each other; on all hosts, or else on none.

    Nothing else depends on it. Without it a lost peer is noticed when a wait runs out of time.
    """
    if rendezvous.mode == "single":
        return
    processes = sorted({device.process_index for device in rendezvous.devices.values()})
    mine = hellos[processes.index(jax.process_index())]
    others = [
        (process, hello["watch"]["address"], [d["id"] for d in hello["devices"]])
        for process, hello in zip(processes, hellos, strict=True)
        if hello["host"] == mine["host"] and hello is not mine and "address" in hello["watch"]
    ]
    why = next((h["watch"]["reason"] for h in hellos if "reason" in h["watch"]), "")
    if not why and rendezvous.watch is not None:
        try:
            tokens = [hello["watch"]["token"] for hello in hellos]
            rendezvous.watch.connect(others, tokens, deadline.remaining_ms() / 1e3)
        except RuntimeError as error:
            why = f"process {jax.process_index()}: {error}"
    reasons = rendezvous.store.gather("watch", why, deadline)
    why = next(filter(None, reasons), "")
    if why:
        rendezvous.watch = None
        _log.warning(
            "jax_intranode: the processes can't watch each other (%s). A lost process is noticed "
            "only after JAX_INTRANODE_TIMEOUT_S.",
            why,
        )
    elif rendezvous.watch is not None and others:
        failures.watch(rendezvous.platform, _process_of, config.get().report_after_s)
        rendezvous.watch.arm(rendezvous.platform)
        rendezvous.store.lost = rendezvous.watch.lost


def _hello(rendezvous: Rendezvous) -> dict[str, Any]:
    """What a process says about itself: versions, settings and its devices."""
    module = extension.module(rendezvous.platform)
    if config.get().disable:
        return {"error": reasons.DISABLED}
    if module is None:
        what = (
            "CUDA kernels" if rendezvous.platform == "gpu" else f"kernels for {rendezvous.platform}"
        )
        return {"error": f"process {jax.process_index()}: jax_intranode was built without {what}"}
    refusal = tuning.refusal(device.device_kind for device in rendezvous.devices.values())
    if refusal is not None:
        return {"error": refusal}
    local = [device for device in rendezvous.devices.values() if agreed.is_local(device)]
    links, facts = {}, {}
    if rendezvous.platform == "gpu":
        bus_ids = {
            d.id: topology_lib.normalise_bus_id(module.pci_bus_id(agreed.native_ordinal(d)))
            for d in local
        }
        reports = {r.bus_id: r for r in topology_lib.read_links(list(bus_ids.values()))}
        for device_id, bus_id in bus_ids.items():
            if bus_id not in reports:
                return {"error": f"NVML does not show the GPU {bus_id}"}
            links[device_id] = dataclasses.asdict(reports[bus_id])
            kind = rendezvous.devices[device_id].device_kind
            facts[device_id] = dataclasses.asdict(topology_lib.read_facts(bus_id, kind))
    watch = {}
    if rendezvous.mode == "multi":
        try:
            rendezvous.watch = peers.Watch(jax.process_index())
            watch = rendezvous.watch.hello()
        except RuntimeError as error:
            watch = {"reason": f"process {jax.process_index()}: {error}"}
    return {
        "host": _host(rendezvous.platform),
        "watch": watch,
        "config": config.get().of_all_processes(),
        "tuning": tuning.digest(),  # processes may find the same file under other names
        "version": __version__,
        "protocol": _PROTOCOL,
        "table": [select.digest(), choice.digest()],
        "matmuls": 0 if rendezvous.platform == "cpu" else module.cublas_lt_version(),
        "devices": [
            {"id": device.id, "links": links.get(device.id), "facts": facts.get(device.id)}
            for device in local
        ],
    }


def _reason_for_no_matmuls(rendezvous: Rendezvous, hellos: list[dict[str, Any]]) -> str | None:
    """Why collective matmuls are not overlapped on these devices, or None."""
    if rendezvous.platform == "cpu":
        return reasons.CPU_DEVICES
    facts = [device["facts"] for hello in hellos for device in hello["devices"]]
    kinds = [device.device_kind for device in rendezvous.devices.values()]
    known = [records.from_json(profiles.GpuFacts, of_one) for of_one in facts]
    rendezvous.shipped_profile = profiles.from_facts(known)
    profile = tuning.profile_for(kinds) or rendezvous.shipped_profile
    if isinstance(profile, str):
        return profile
    versions = {hello["matmuls"] for hello in hellos}
    if 0 in versions:
        return reasons.NO_CUBLAS
    if len(versions) > 1:
        return reasons.CUBLAS_VERSIONS.of(versions=sorted(versions))
    if config.get().ring_bytes(rendezvous.platform) == 0:
        return reasons.NO_RING
    if rendezvous.linked:
        return reasons.CUBE_MESH_OF_MATMULS
    return None


def _host(platform: str) -> Host:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    shared_memory = ""
    if platform == "cpu":
        # Containers may share it or not, whatever their IPC namespaces are. The device alone does
        # not tell two directories apart that are not mounts of their own.
        with contextlib.suppress(OSError):
            found = os.stat(_SHARED_MEMORY)
            shared_memory = f"{found.st_dev}:{found.st_ino}"
    machine = boot_id.read_text().strip() if boot_id.exists() else ""
    return Host(machine, host_platform.node(), shared_memory)


def _refuse_differences(facts: list[dict[str, Any]], processes: list[int]) -> None:
    """Refuses processes whose facts, each by its name, are not those of the first process."""
    first = facts[0]
    for process, other in zip(processes, facts, strict=True):
        different = [f"{k}: {first[k]} and {other[k]}" for k in first if first[k] != other[k]]
        if different:
            raise Refused(
                f"processes {processes[0]} and {process} of the mesh have a different "
                f"{', '.join(different[:4])}; give them the same version and environment"
            )


def _check_hellos(hellos: list[dict[str, Any]], processes: list[int]) -> dict[int, frozenset[int]]:
    """Refuses ranks that would not decide alike, and GPUs that are not linked.

    Returns:
        The links of hybrid cube meshes: `Rendezvous.linked`.
    """
    versions = ("version", "protocol", "table")
    _refuse_differences(
        [{k: h.get(k, "an older one") for k in versions} for h in hellos], processes
    )
    content = f"{tuning.VARIABLE} (digest of the file)"
    _refuse_differences([{content: h["tuning"], **h["config"]} for h in hellos], processes)
    by_host: dict[tuple[str, ...], list[Any]] = {}
    for hello in hellos:
        for device in hello["devices"]:
            links = device["links"]
            report = None if links is None else records.from_json(topology_lib.LinkReport, links)
            by_host.setdefault(tuple(hello["host"]), []).append((device["id"], report))
    linked: dict[int, frozenset[int]] = {}
    for devices in by_host.values():
        linked |= _links_of_host(sorted(devices, key=lambda device: int(device[0])))
    return linked


def _links_of_host(
    devices: list[tuple[int, topology_lib.LinkReport | None]],
) -> dict[int, frozenset[int]]:
    """The links of a host that is a hybrid cube mesh; nothing for fully connected devices.

    Args:
        devices: ids, and what GPUs report of their links.

    Raises:
        Refused: the devices are linked in another way.
    """
    cube_mesh = topology_lib.TopologyKind.HYBRID_CUBE_MESH.value
    full = topology_lib.TopologyKind.FULLY_CONNECTED.value
    forced = config.get().topology
    ids = [device_id for device_id, _ in devices]
    reports = [report for _, report in devices if report is not None]
    matrix: Sequence[Sequence[int]]
    if forced is not None:
        if forced == full:
            return {}
        if forced != cube_mesh or len(ids) != len(topology_lib.FORCED_CUBE_MESH):
            raise Refused(
                f"JAX_INTRANODE_TOPOLOGY={forced}, and devices {ids} on a host; only fully "
                f"connected devices, and hybrid cube meshes of {definitions.MAX_WORLD_SIZE}, have "
                "kernels"
            )
        matrix = topology_lib.FORCED_CUBE_MESH
    elif not reports:  # CPU devices
        return {}
    else:
        seen: dict[str, int] = {}
        for device_id, report in zip(ids, reports, strict=True):
            if report.uuid in seen:
                raise Refused(f"devices {seen[report.uuid]} and {device_id} are one GPU")
            seen[report.uuid] = device_id
        matrix = topology_lib.link_matrix(reports)
        kind = topology_lib.classify(matrix)
        if kind.value == full:
            return {}
        if kind.value != cube_mesh:
            raise Refused(
                f"GPUs {[report.bus_id for report in reports]} are not all linked by NVLink "
                f"(topology {kind.value}, links {matrix})"
            )
    neighbours = topology_lib.neighbours(matrix)
    return {device_id: frozenset(ids[j] for j in neighbours[i]) for i, device_id in enumerate(ids)}


def _process_of(device_id: int) -> int | None:
    """The process of a device; None if no rendezvous has it."""
    for rendezvous in list(_all.values()):
        if device_id in rendezvous.devices:
            return int(rendezvous.devices[device_id].process_index)
    return None


os.register_at_fork(after_in_child=_after_fork)
