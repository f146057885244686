"""The command `doctor`: does this package work on this node, and what runs a call here?

Each check has a verdict, a reason and, unless all is well, a remedy. What could take this process
down or hang runs in processes of its own with a time limit. Nothing here fails where `info` does
not: what a broken installation cannot run is skipped.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax_intranode
from jax_intranode._src import timeouts
from jax_intranode._src.command_line import info, machine
from jax_intranode._src.command_line.info import (
    FAILS,
    NO_GPUS,
    OK,
    SKIPPED,
    WARNING,
    Check,
    Finding,
    check,
)
from jax_intranode._src.command_line.launcher.runs import (
    PROCESS_PER_DEVICE,
    SINGLE_PROCESS,
    Devices,
    RankError,
    run_function,
)
from jax_intranode._src.command_line.options import add_json
from jax_intranode._src.group import topology

DESCRIPTION = (
    "Checks whether this package works on this node: versions, driver, links, memory, shared "
    "memory, the results of all collectives while matmuls run, and a test with two ranks in both "
    "process modes. Each check says what was found and what to do about it. Ends with what runs "
    "each operation and size. The exit code is 1 if a check fails, else 0; a warning is not a "
    "failure. Takes about 20 seconds."
)
EXAMPLES = """\
python -m jax_intranode doctor
python -m jax_intranode doctor --json > doctor.json"""

# The namespaces of the host have these inode numbers (linux/proc_ns.h).
_HOST_NAMESPACES = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the checks as they end, then the benefits; returns the exit code."""
    report, done = info.report(), []
    for one in all_checks(report):
        done.append(one)
        if not arguments.json:
            print(one, flush=True)
    sentence, rows, table = _benefits(report, done)
    fails = sum(one.verdict == FAILS for one in done)
    if arguments.json:
        found = {
            "checks": [asdict(one) for one in done],
            "passes": fails == 0,
            "summary": sentence,
            "benefits": rows,
        }
        print(json.dumps(found, indent=2))
    else:
        warnings = sum(one.verdict == WARNING for one in done)
        print(f"\n{len(done)} checks: {fails} failed, {warnings} with a warning.\n")
        print(sentence + (f"\n{table}" if table else ""))
    return 1 if fails else 0


def all_checks(found: dict[str, Any]) -> Iterator[Check]:
    """Yields the checks. The later ones take seconds."""
    yield from info.of_installation(found)
    yield from _tuning(found)
    yield _driver(found)
    yield _links(found)
    yield _namespaces(found)
    yield _dev_shm(found)
    yield from _memory(found)
    yield from _tests(found)


# Checks that only look.


def _tuning(found: dict[str, Any]) -> Iterator[Check]:
    tuning = found["tuning"]
    if tuning is None:  # not set, or a problem of the package or of the environment
        return
    here = {gpu["name"] for gpu in found["gpus"]} or {"cpu"}
    if here == {tuning["device"]}:
        yield Check("tuning", OK, tuning["text"])
        return
    yield Check(
        "tuning",
        FAILS if found["gpus"] else WARNING,
        f"{tuning['path']} was measured on {tuning['device']}; this node has "
        f"{' and '.join(sorted(here))}",
        "measure again with `python -m jax_intranode tune`, or unset JAX_INTRANODE_TUNING",
    )


@check("driver")
def _driver(found: dict[str, Any]) -> Finding:
    driver, needed = found["driver"], found["cuda_part"].get("cuda")
    asked = os.environ.get("JAX_PLATFORMS", "")
    if {"cuda", "gpu"}.intersection(asked.split(",")) and not machine.visible_gpus():
        remedy = "see whether nvidia-smi shows GPUs; for CPU devices, set JAX_PLATFORMS=cpu"
        why = driver["reason"] or "NVML and CUDA_VISIBLE_DEVICES show none"
        return FAILS, f"JAX_PLATFORMS={asked} asks for GPUs, and there are none: {why}", remedy
    if driver["version"] is None:
        if not _device_files():
            return SKIPPED, f"{NO_GPUS}: {driver['reason']}"
        remedy = "install NVIDIA's driver, or give the container its libraries (--gpus all)"
        return FAILS, f"there are GPUs in /dev, but {driver['reason']}", remedy
    reason = f"{driver['version']}, for CUDA up to {driver['cuda']}"
    if needed and int(needed.split(".")[0]) > int(driver["cuda"].split(".")[0]):
        reason = f"{reason}; the CUDA part was built with CUDA {needed}"
        return FAILS, reason, "install a newer driver, or build with an older CUDA toolkit"
    return OK, reason


def _device_files() -> list[Path]:
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


@check("NVLink")
def _links(found: dict[str, Any]) -> Finding:
    links = found["topology"]["links"]
    if len(links) < 2:
        return SKIPPED, _too_few(links)
    missing = [f"GPU {j} and {i}" for i in range(len(links)) for j in range(i) if links[i][j] == 0]
    if topology.relays(links) is not None:
        return OK, (
            "a hybrid cube mesh: psum among all 8 GPUs, and all operations within groups whose "
            "GPUs are linked to each other; jax.lax runs the rest"
        )
    if missing:
        remedy = (
            "a mesh with such a pair falls back to jax.lax: make meshes of linked GPUs only "
            "(`python -m jax_intranode info` shows them)"
        )
        return WARNING, f"not linked: {', '.join(missing)}", remedy
    fewest = min(links[i][j] for i in range(len(links)) for j in range(i))
    return OK, f"{len(links)} GPUs, each pair has {fewest} links or more"


def _too_few(gpus: Sequence[Any]) -> str:
    return NO_GPUS if not gpus else "a single GPU has no peers"


@check("namespaces")
def _namespaces(found: dict[str, Any]) -> Finding:
    own = []
    for kind, host in _HOST_NAMESPACES.items():
        try:
            if os.stat(f"/proc/self/ns/{kind}").st_ino != host:
                own.append(kind.upper())
        except OSError as error:
            return SKIPPED, f"/proc/self/ns/{kind}: {error.strerror}"
    if not own:
        return OK, "the host's"
    return OK, (
        f"this is a container with {' and '.join(own)} namespaces of its own: run all processes of "
        "a node in one container"
    )


@check(str(machine.SHARED_MEMORY))
def _dev_shm(found: dict[str, Any]) -> Finding:
    remedy = (
        "give the container more (docker run --shm-size=1g, or --ipc=host); without it, processes "
        "of CPU devices fall back to jax.lax"
    )
    if problem := machine.problem_of_shared_memory():
        return WARNING if found["gpus"] else FAILS, problem, remedy
    free, needed = machine.free_shared_memory(), 2 * _slab_bytes("cpu")
    reason = (
        f"writable, {free >> 20} MiB free; a process with a CPU device needs {needed >> 21} MiB"
    )
    return (WARNING, reason, remedy) if free < needed else (OK, reason)


def _slab_bytes(platform: str) -> int:
    from jax_intranode._src.selection import config

    try:
        settings = config.parse(os.environ)
    except ValueError:  # another check reports it
        settings = config.Config()
    return settings.slab_bytes(platform) + settings.ring_bytes(platform)


def _memory(found: dict[str, Any]) -> Iterator[Check]:
    if not found["gpus"]:
        yield Check("GPU memory", SKIPPED, NO_GPUS)
    for number, gpu in enumerate(found["gpus"]):
        yield _memory_of(number, gpu)


def _memory_of(number: int, gpu: dict[str, Any]) -> Check:
    name, free = f"memory of GPU {number}", gpu["free_mib"]
    if free is None:
        return Check(name, SKIPPED, "NVML does not say how much is free")
    needed = _slab_bytes("gpu") >> 20
    # JAX takes this fraction of the memory at its start, and the slab lies outside of it.
    preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() != "false"
    try:
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ".75"))
    except ValueError:
        fraction = 0.75
    of_jax = int(fraction * gpu["memory_mib"]) if preallocates else 0
    reason = f"{free} of {gpu['memory_mib']} MiB free; slab and ring need {needed} MiB"
    if of_jax:
        reason += f" beside JAX's {of_jax} MiB"
    remedy = "end other programs on this GPU"
    if free < needed:
        return Check(name, FAILS, reason, remedy)
    if free < needed + of_jax:
        return Check(
            name,
            WARNING,
            reason,
            f"{remedy}, or lower XLA_PYTHON_CLIENT_MEM_FRACTION, JAX_INTRANODE_SLAB_MIB or "
            "JAX_INTRANODE_RING_MIB",
        )
    return Check(name, OK, reason)


# Tests in processes of their own.


def _tests(found: dict[str, Any]) -> Iterator[Check]:
    names = ("peer write and read", "memory of another process", "values under load")
    both_modes = ("one process", "two processes")
    if jax_intranode._import_error is not None:
        for name in (*names, *both_modes):
            yield Check(name, SKIPPED, "the package cannot be imported")
        return
    count = _usable_gpus(found)
    platform = "gpu" if count >= 2 else "cpu"
    remedy = f"check {machine.SHARED_MEMORY}"
    if platform == "gpu":
        remedy = (
            "check the driver and `nvidia-smi topo -p2p w`; switch MIG off, and IOMMU or ACS in "
            "virtual machines; in a container, run with --ipc=host"
        )
        what = f"each of {count} GPUs to each other"
        yield _probe(names[0], what, remedy, "peers", platform, count, 1)
    else:
        yield Check(names[0], SKIPPED, _too_few(found["gpus"]))
    what = {"gpu": "CUDA IPC", "cpu": "POSIX shared memory"}[platform]
    yield _probe(names[1], what, remedy, "memory_of_a_process", platform, 2, 2)
    yield _values(names[2], platform, min(count, 8) if platform == "gpu" else 2)
    devices = {"gpu": "two GPUs", "cpu": "two CPU devices"}[platform]
    yield _self_test(f"one process with {devices}", platform, 1)
    yield _self_test(f"two processes, {devices}", platform, 2)


def _usable_gpus(found: dict[str, Any]) -> int:
    """The GPUs that tests can use: those that CUDA shows, if the CUDA part was built."""
    if not found["cuda_part"]["built"] or found["cuda_part"]["error"]:
        return 0
    return 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else machine.visible_gpus()


def _probe(
    name: str, what: str, remedy: str, test: str, platform: str, devices: int, ranks: int
) -> Check:
    found, problem = _run_test(test, platform, devices, ranks)
    failures = [problem] if problem else found
    if failures:
        return Check(name, FAILS, f"{what}: {'; '.join(failures[:3])}", remedy)
    return Check(name, OK, f"{what}: the written data can be read")


def _values(name: str, platform: str, ranks: int) -> Check:
    result, problem = _run_test("values_under_load", platform, ranks, ranks)
    if not problem and result["wrong"]:
        problem = f"{result['wrong']} of {result['elements']} elements were wrong"
    if problem:
        remedy = f"test the hardware and {machine.SHARED_MEMORY}; report this with `info`'s output"
        return Check(name, FAILS, problem, remedy)
    what = f"{ranks} processes, with matmuls and late ranks"
    return Check(name, OK, f"{what}: {result['elements']:.1e} elements, all right")


def _self_test(name: str, platform: str, ranks: int) -> Check:
    result, problem = _run_test("operations", platform, 2, ranks)
    if not problem and not result["right"]:
        problem = "a psum or an all-gather was wrong"
    if not problem and result["algorithm"] == "lax":
        reason = f"right, but jax.lax ran it: {result['reason']}"
        return Check(name, WARNING, reason, "remove the reason, or expect no gain here")
    if not problem and not result["operations"]:
        problem = "the results are right, but our kernels ran nothing"
    if problem:
        remedy = "`python -m jax_intranode info` shows all versions; report this with its output"
        return Check(name, FAILS, problem, remedy)
    return Check(name, OK, f"psum and all_gather are right; psum ran as {result['algorithm']}")


def _run_test(name: str, platform: str, devices: int, ranks: int) -> tuple[Any, str | None]:
    """Runs a test of probe.py, with a time limit; returns its result and the problem, if any."""
    mode = SINGLE_PROCESS if ranks == 1 else PROCESS_PER_DEVICE
    try:
        result = run_function(
            f"jax_intranode._src.command_line.probe:{name}",
            {},
            Devices(platform, devices, mode),
            timeout_s=timeouts.DOCTOR_S,
            variables={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_INTRANODE_TIMEOUT_S": "60"},
        )
    except RankError as error:
        if error.first_failed is None:
            return None, str(error).splitlines()[0]
        return None, _cause(error.logs[error.first_failed])
    return result, None


def _cause(log: str) -> str:
    """The last line of a log that names an exception, or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (errors or lines)[-1]


# The end of the report.


def _benefits(
    found: dict[str, Any], done: Sequence[Check]
) -> tuple[str, list[dict[str, Any]], str]:
    """The last sentence, the benefits as JSON, and as a table."""
    lead = "Your node benefits: "
    if jax_intranode._import_error is not None:
        return f"{lead}not until the package can be imported.", [], ""
    from jax_intranode._src.command_line import benefits

    gpus = found["gpus"]
    count = _usable_gpus(found)
    failed = [one for one in done if (one.name, one.verdict) == ("driver", FAILS)]
    failed += [one for one in done[-2:] if one.verdict in (FAILS, WARNING)]
    if len(failed) > 1 or (failed and failed[0].name == "driver"):
        return f"{lead}not now: {failed[0].reason}.", [], ""
    on_gpus = count >= 2
    if on_gpus:
        facts = [topology.read_facts(gpu["bus_id"], gpu["name"]) for gpu in gpus[:count]]
        rows = benefits.of_node("gpu", gpus[0]["name"], min(count, 8), facts)
    else:
        rows = benefits.of_node("cpu", "cpu", 2, [])
    where = f"{min(count, 8)} GPUs" if on_gpus else "processes with a CPU device each"
    sentence = (
        f"{lead}between {where}, {benefits.summary(rows)}. `python -m jax_intranode demo` measures "
        "how much."
    )
    if not on_gpus:
        sentence += "\nCPU devices are for development and tests."
    return sentence, [asdict(row) for row in rows], benefits.table_of(rows)
