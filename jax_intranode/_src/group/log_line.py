"""The line that the log has for each set of devices that communicates."""

from collections.abc import Sequence
from typing import Any

from jax_intranode._src.group import topology as topology_lib
from jax_intranode._src.native import definitions
from jax_intranode._src.operations import COLLECTIVE, HYBRID_CUBE_MESH, of_kind
from jax_intranode._src.selection import generations, records, table, tuning


def describe(rendezvous: Any, hellos: Sequence[dict[str, Any]]) -> str:
    """The devices, their links, the process mode, and what runs which sizes."""
    devices = list(rendezvous.devices.values())
    kinds = " and ".join(dict.fromkeys(device.device_kind for device in devices))
    facts = [{"single": "one process", "multi": f"{len(hellos)} processes"}[rendezvous.mode]]
    hosts = len(set(rendezvous.hosts.values()))
    if hosts > 1:
        facts.append(f"{hosts} hosts")
    links = [device["links"] for hello in hellos for device in hello["devices"]]
    if hosts == 1 and len(links) > 1 and None not in links:
        matrix = topology_lib.link_matrix(
            [records.from_json(topology_lib.LinkReport, of) for of in links]
        )
        fewest = min(matrix[i][j] for i in range(len(matrix)) for j in range(i))
        facts.append(
            "a hybrid cube mesh of NVLinks"
            if rendezvous.linked
            else f"{fewest} NVLinks between each pair"
        )
    hardware = generations.hardware_of(rendezvous.platform, devices[0].device_kind)
    world_size = min(-(-len(devices) // hosts), definitions.MAX_WORLD_SIZE)
    tuned = tuning.rows_for(device.device_kind for device in devices)
    thresholds = []
    for record in of_kind(COLLECTIVE):
        if rendezvous.linked and HYBRID_CUBE_MESH not in record.algorithms:
            continue
        rows, _ = table.rows_and_source(
            hardware, rendezvous.mode, record.name, "bare", world_size, tuned
        )
        upto = {row.algorithm: row.nbytes for row in rows or ()}
        if rendezvous.linked:
            upto = {HYBRID_CUBE_MESH: max(upto.values(), default=0)}
        thresholds += [f"{record.name} {name} up to {size} bytes" for name, size in upto.items()]
    why = rendezvous.reason_for_no_matmuls
    matmuls = "overlapped" if why is None else f"not overlapped ({why})"
    by = "" if tuned is None else f", by {tuned.by}"
    return (
        f"Devices {list(rendezvous.devices)} ({len(devices)} x {kinds}, {', '.join(facts)}) "
        f"communicate through jax_intranode{by}. Among {world_size} ranks: "
        f"{', '.join(thresholds)}; matmuls are {matmuls}."
    )
