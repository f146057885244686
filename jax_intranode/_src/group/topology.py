"""The NVLink mesh of this host: which GPUs are linked, by how many links, and in what shape.

Everything here comes from NVML, so it needs neither CUDA nor a JAX backend. `read_links` asks the
driver, `link_matrix` and `classify` are pure, and `topology` puts the three together.
"""

import contextlib
import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jax_intranode._src.group import nvml as nvml_lib
from jax_intranode._src.selection import config
from jax_intranode._src.selection.overlap.profiles import GpuFacts

_SWITCH = "switch"  # what `_remote_end` returns for a switch


class TopologyKind(enum.Enum):
    """The shape of an NVLink mesh, as far as the algorithms depend on it."""

    FULLY_CONNECTED = "fully_connected"  #: Every pair is linked, directly or through a switch.
    HYBRID_CUBE_MESH = "hybrid_cube_mesh"  #: Two linked quads, each GPU linked to its relay.
    UNKNOWN = "unknown"  #: Anything else, including no links or no GPUs.


@dataclasses.dataclass(frozen=True)
class LinkReport:
    """The active NVLinks of one GPU.

    Attributes:
        bus_id: PCI bus id, such as ``00000000:1B:00.0``.
        uuid: NVML's UUID of the GPU.
        name: The GPU's product name.
        switch_links: Number of links that end at an NVSwitch.
        peer_links: (bus id, number of links) of each GPU linked directly, sorted by bus id.
    """

    bus_id: str
    uuid: str
    name: str
    switch_links: int
    peer_links: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Topology:
    """The NVLink mesh of a host.

    Attributes:
        kind: The mesh's shape.
        gpus: One report per GPU.
        links: Number of links between GPUs i and j of `gpus`, at `links[i][j]`.
        forced: whether the configuration set `kind`, which may then disagree with `links`.
    """

    kind: TopologyKind
    gpus: tuple[LinkReport, ...]
    links: tuple[tuple[int, ...], ...]
    forced: bool

    def __str__(self) -> str:
        """Returns the kind and a matrix of link counts, in the style of `nvidia-smi topo -m`."""
        forced = " (forced by the configuration)" if self.forced else ""
        lines = [f"{self.kind.value}{forced}, {len(self.gpus)} GPU(s)"]
        names = [f"{gpu.bus_id}  {gpu.name}" for gpu in self.gpus]
        lines += matrix_lines(self.links, names)
        return "\n".join(lines)


def matrix_lines(links: Sequence[Sequence[int]], names: Sequence[str] = ()) -> list[str]:
    """A matrix of link counts as lines, in the style of `nvidia-smi topo -m`."""
    if not links:
        return []
    lines = [" " * 5 + "".join(f"{f'GPU{j}':>6}" for j in range(len(links)))]
    for i, row in enumerate(links):
        cells = [f"NV{count}" if count else "-" for count in row]
        cells[i] = "X"
        name = f"  {names[i]}" if names else ""
        lines.append(f"{f'GPU{i}':<5}" + "".join(f"{cell:>6}" for cell in cells) + name)
    return lines


def normalise_bus_id(bus_id: str) -> str:
    """Returns a PCI bus id (domain:bus:device.function) in lower case with an 8-digit domain.

    NVML writes "00000000:06:00.0" where CUDA writes "0000:06:00.0".

    Raises:
        ValueError: `bus_id` is not of that form.
    """
    parts = bus_id.strip().lower().split(":")
    if len(parts) != 3:
        raise ValueError(f"not a PCI bus id (domain:bus:device.function): {bus_id!r}")
    domain, bus, device = parts
    return f"{int(domain, 16):08x}:{bus}:{device}"


def read_links(bus_ids: Sequence[str] | None = None) -> list[LinkReport]:
    """Reads from NVML the active NVLinks of these GPUs, or of all of this host in its order.

    Returns:
        One report per GPU that NVML shows to this process; without NVML, none.
    """
    with contextlib.suppress(nvml_lib.Unavailable), nvml_lib.session() as nvml:
        handles = handles_by_bus_id(nvml)
        wanted = list(handles) if bus_ids is None else [normalise_bus_id(b) for b in bus_ids]
        return [
            _read_gpu(nvml, bus_id, handles[bus_id], host_gpus=frozenset(handles))
            for bus_id in wanted
            if bus_id in handles
        ]
    return []


def link_matrix(reports: Sequence[LinkReport]) -> tuple[tuple[int, ...], ...]:
    """Counts the links between each pair of GPUs of one host: symmetric, with a zero diagonal.

    A direct link counts if both ends report it. Two GPUs with links to switches are linked through
    them, because a host's switches form one fabric. The GPU with fewer such links sets their
    number.
    """
    direct = [dict(report.peer_links) for report in reports]

    def links(i: int, j: int) -> int:
        if i == j:
            return 0
        a, b = reports[i], reports[j]
        both_ends = min(direct[i].get(b.bus_id, 0), direct[j].get(a.bus_id, 0))
        return both_ends + min(a.switch_links, b.switch_links)

    gpus = range(len(reports))
    return tuple(tuple(links(i, j) for j in gpus) for i in gpus)


def classify(matrix: Sequence[Sequence[int]]) -> TopologyKind:
    """Names the shape of a mesh with these link counts, whatever the order of its GPUs."""
    everyone = set(range(len(matrix)))
    if everyone and all(n == everyone - {i} for i, n in enumerate(neighbours(matrix))):
        return TopologyKind.FULLY_CONNECTED
    return TopologyKind.UNKNOWN if relays(matrix) is None else TopologyKind.HYBRID_CUBE_MESH


def neighbours(matrix: Sequence[Sequence[int]]) -> list[set[int]]:
    """Returns for each GPU those that it is linked to, from link counts."""
    return [{j for j, links in enumerate(row) if j != i and links} for i, row in enumerate(matrix)]


def relays(matrix: Sequence[Sequence[int]]) -> list[int] | None:
    """Returns the relay of each GPU of a hybrid cube mesh; None if the GPUs are none.

    In quads {0, 1, 2, 3} and {4, 5, 6, 7}, GPU 0 is linked to 1, 2, 3 and its relay 4. It lacks 5,
    6 and 7, to which 4 alone of its neighbours is linked. Of all graphs of eight GPUs with four
    neighbours each, exactly the hybrid cube meshes have this at every GPU.
    """
    if len(matrix) != 8:
        return None
    of_all = neighbours(matrix)
    found = []
    for gpu, linked in enumerate(of_all):
        lacking = set(range(8)) - linked - {gpu}
        candidates = [n for n in linked if lacking <= of_all[n]]
        if len(linked) != 4 or len(candidates) != 1:
            return None
        found += candidates
    return found


# The links of a hybrid cube mesh that JAX_INTRANODE_TOPOLOGY forces: quads of the first and of the
# last four, relays four apart.
FORCED_CUBE_MESH = tuple(
    tuple(int(i != j and (i // 4 == j // 4 or i % 4 == j % 4)) for j in range(8)) for i in range(8)
)


def topology() -> Topology:
    """Returns this host's GPUs and the NVLinks between them, as NVML sees them.

    It starts no JAX backend, waits for no other process, and ignores `CUDA_VISIBLE_DEVICES`.
    Without NVML or without a GPU the result is empty and of unknown kind.
    """
    gpus = tuple(read_links())
    links = link_matrix(gpus)
    forced = config.get().topology
    kind = classify(links) if forced is None else TopologyKind(forced)
    return Topology(kind=kind, gpus=gpus, links=links, forced=forced is not None)


def handles_by_bus_id(nvml: ModuleType) -> dict[str, Any]:
    """Returns the NVML handle of each GPU that this process may see, by bus id."""
    handles = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        except nvml.NVMLError:  # one lost or forbidden GPU does not hide the others
            continue
        handles[normalise_bus_id(bus_id)] = handle
    return handles


def _read_gpu(nvml: ModuleType, bus_id: str, handle: Any, host_gpus: frozenset[str]) -> LinkReport:
    """Reads the links of one GPU."""
    switch_links = 0
    peer_links: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            remote = _remote_end(nvml, handle, link, host_gpus)
        except nvml.NVMLError:
            # NotSupported or InvalidArgument: the GPU has no further links. After any other error,
            # too: a link of which NVML knows nothing must not be used.
            break
        if remote == _SWITCH:
            switch_links += 1
        elif remote is not None:
            peer_links[remote] += 1
    return LinkReport(
        bus_id=bus_id,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        switch_links=switch_links,
        peer_links=tuple(sorted(peer_links.items())),
    )


def _remote_end(nvml: ModuleType, handle: Any, link: int, host_gpus: frozenset[str]) -> str | None:
    """Returns the other end of an active link: `_SWITCH`, a GPU's bus id, or None.

    Only its type identifies a switch: on a virtual machine, every switch can have the address
    FFFFFFFF:FF:FF.0.
    """
    try:
        remote_type = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
    except nvml.NVMLError_FunctionNotFound:  # an old driver, which knows only the address
        address = normalise_bus_id(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
        return address if address in host_gpus else None
    if remote_type == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return _SWITCH
    if remote_type == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
        return normalise_bus_id(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
    return None


def _text(value: str | bytes) -> str:
    """Returns a string from NVML as str; some versions of its bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


# FP32 cores of an SM: 64 on the A100 and A30. NVML reports only the total of a GPU.
_CORES_PER_SM = {(8, 0): 64}
_OTHER_CORES_PER_SM = 128
# Bytes per second of an NVLink in one direction, if NVML does not report it: NVLink 4's.
_LINK_BYTES_PER_S = 26.5625e9


def read_facts(bus_id: str, device_kind: str) -> GpuFacts:
    """Reads from NVML how fast a GPU is; zeros where NVML is absent or does not report it."""
    unknown = GpuFacts(device_kind, (0, 0), 0, 0.0, 0.0, 0.0)
    with contextlib.suppress(nvml_lib.Unavailable), nvml_lib.session() as nvml:
        handle = handles_by_bus_id(nvml).get(normalise_bus_id(bus_id))
        if handle is None:
            return unknown

        def ask(question: str, *arguments: Any) -> Any:
            try:
                return getattr(nvml, question)(handle, *arguments)
            except (AttributeError, nvml.NVMLError):  # old bindings or driver, or not supported
                return 0

        capability = ask("nvmlDeviceGetCudaComputeCapability") or (0, 0)
        major, minor = (int(number) for number in capability)
        cores_per_sm = _CORES_PER_SM.get((major, minor), _OTHER_CORES_PER_SM)
        links = sum(
            ask("nvmlDeviceGetNvLinkState", link) == nvml.NVML_FEATURE_ENABLED
            for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        )
        speeds = ask("nvmlDeviceGetFieldValues", [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
        reported = 1e6 * speeds[0].value.uiVal if speeds and speeds[0].nvmlReturn == 0 else 0.0
        memory_hz = 1e6 * ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM)
        return GpuFacts(
            device_kind=device_kind,
            compute_capability=(major, minor),
            sms=ask("nvmlDeviceGetNumGpuCores") // cores_per_sm,
            sm_clock_hz=1e6 * ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            link_bytes_per_s=links * (reported or _LINK_BYTES_PER_S),
            # Two transfers per clock.
            memory_bytes_per_s=2 * memory_hz * ask("nvmlDeviceGetMemoryBusWidth") / 8,
        )
    return unknown
