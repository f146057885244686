"""The command `doctor`: does this package work on this node, and what does the node gain?

Each check has a verdict, a reason and, unless all is well, a remedy. What could take this process
down or hang runs in processes of its own with a time limit. Nothing here fails where `info` does
not: what a broken installation cannot run is skipped.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax_intranode
from jax_intranode._src.command_line import info, machine
from jax_intranode._src.command_line.launcher.files import RankError
from jax_intranode._src.command_line.launcher.functions import (
    PROCESS_PER_DEVICE,
    SINGLE_PROCESS,
    Devices,
    run_function,
)
from jax_intranode._src.command_line.options import add_json
from jax_intranode._src.group import nvml, topology

DESCRIPTION = (
    "Checks whether this package works on this node: versions, driver, links, memory, shared "
    "memory, and a test with two ranks in both process modes. Each check says what was found and "
    "what to do about it. Ends with what the node gains. The exit code is 1 if a check fails, else "
    "0; a warning is not a failure. Takes about 20 seconds."
)
EXAMPLES = """\
python -m jax_intranode doctor
python -m jax_intranode doctor --json > doctor.json"""

OK, WARNING, FAILS, SKIPPED = "ok", "warning", "fails", "skipped"

# Each process of a test gets this long, also on a busy machine.
_LIMIT_S = 120.0
# The namespaces of the host have these inode numbers (linux/proc_ns.h).
_HOST_NAMESPACES = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
_NO_GPUS = "no GPUs here"


@dataclass(frozen=True)
class Check:
    """What a check has found.

    Attributes:
        name: what was checked.
        verdict: OK, WARNING, FAILS or SKIPPED.
        reason: what was found, or why it was skipped.
        remedy: what to do; empty if nothing.
    """

    name: str
    verdict: str
    reason: str
    remedy: str = ""


def _made(verdict: str, name: str, reason: str, remedy: str = "") -> Check:
    return Check(name, verdict, reason, remedy)


_ok, _skipped = partial(_made, OK), partial(_made, SKIPPED)
_warning, _fails = partial(_made, WARNING), partial(_made, FAILS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the checks as they end, then the benefits; returns the exit code."""
    report, checks = info.report(), []
    for check in all_checks(report):
        checks.append(check)
        if not arguments.json:
            print(text_of(check), flush=True)
    sentence, rows, table = _benefits(report, checks)
    fails = sum(check.verdict == FAILS for check in checks)
    if arguments.json:
        found = {
            "checks": [asdict(check) for check in checks],
            "passes": fails == 0,
            "summary": sentence,
            "benefits": rows,
        }
        print(json.dumps(found, indent=2))
    else:
        warnings = sum(check.verdict == WARNING for check in checks)
        print(f"\n{len(checks)} checks: {fails} failed, {warnings} with a warning.\n")
        print(sentence + (f"\n{table}" if table else ""))
    return 1 if fails else 0


def text_of(check: Check) -> str:
    """Returns a check as text."""
    lines = [f"{check.verdict:<8} {check.name}: {check.reason}"]
    if check.remedy:
        lines.append(f"{'':<8} -> {check.remedy}")
    return "\n".join(lines)


def all_checks(found: dict[str, Any]) -> Iterator[Check]:
    """Yields the checks. The later ones take seconds."""
    yield _package()
    yield _ffi(found)
    yield from _environment(found)
    yield from _tuning(found)
    yield _driver(found)
    yield _cuda_part(found)
    yield _links(found)
    yield _peer_access(found)
    yield _namespaces()
    yield _dev_shm(found)
    yield from _memory(found)
    yield from _tests(found)


# Checks that only look.


def _package() -> Check:
    name, error = "package", jax_intranode._import_error
    if error is None:
        return _ok(name, f"jax_intranode {jax_intranode.__version__} can be imported")
    reason = f"`import jax_intranode` fails: {type(error).__name__}: {error}"
    remedy = (
        "follow the message, or install anew; `python -m jax_intranode info` shows all versions"
    )
    return _fails(name, reason, remedy)


def _ffi(found: dict[str, Any]) -> Check:
    name, runtime = "FFI version", found["ffi_of_jaxlib"]
    built = [found[part]["ffi"] for part in ("cpu_part", "cuda_part") if found[part]["ffi"]]
    if runtime is None or not built:
        return _skipped(name, "jaxlib, or this package's native modules, cannot be read")
    newest = max(built)
    reason = f"built against {info.dotted(newest)}, jaxlib has {info.dotted(runtime)}"
    if newest > runtime:
        return _fails(name, reason, "install a newer jaxlib: pip install -U jax")
    return _ok(name, reason)


def _environment(found: dict[str, Any]) -> Iterator[Check]:
    name, rows = "environment", found["environment"]
    for row in rows:
        if row["problem"]:
            say = _fails if row["default"] is not None else _warning
            yield say(name, row["problem"], f"correct or unset {row['name']}")
    for variable, value in {"JAX_INTRANODE_DISABLE": "1", "JAX_INTRANODE_ALGORITHM": "lax"}.items():
        if os.environ.get(variable) == value:
            reason = f"{variable}={value}: everything falls back to jax.lax"
            yield _warning(name, reason, f"unset {variable}")
    if not any(row["problem"] for row in rows):
        names = [row["name"] for row in rows if row["value"] and row["default"]]
        yield _ok(name, f"variables set: {', '.join(names) or 'none'}")


def _tuning(found: dict[str, Any]) -> Iterator[Check]:
    tuning = found["tuning"]
    if tuning is None:  # not set, or a problem of the package or of the environment
        return
    here = {gpu["name"] for gpu in found["gpus"]} or {"cpu"}
    if here == {tuning["device"]}:
        yield _ok("tuning", tuning["text"])
        return
    say = _fails if found["gpus"] else _warning
    yield say(
        "tuning",
        f"{tuning['path']} was measured on {tuning['device']}; this node has "
        f"{' and '.join(sorted(here))}",
        "measure again with `python -m jax_intranode tune`, or unset JAX_INTRANODE_TUNING",
    )


def _driver(found: dict[str, Any]) -> Check:
    name, driver, needed = "driver", found["driver"], found["cuda_part"].get("cuda")
    if driver["version"] is None:
        if not _device_files():
            return _skipped(name, f"{_NO_GPUS}: {driver['reason']}")
        remedy = "install NVIDIA's driver, or give the container its libraries (--gpus all)"
        return _fails(name, f"there are GPUs in /dev, but {driver['reason']}", remedy)
    reason = f"{driver['version']}, for CUDA up to {driver['cuda']}"
    if needed and int(needed.split(".")[0]) > int(driver["cuda"].split(".")[0]):
        reason = f"{reason}; the CUDA part was built with CUDA {needed}"
        return _fails(name, reason, "install a newer driver, or build with an older CUDA toolkit")
    return _ok(name, reason)


def _device_files() -> list[Path]:
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def _cuda_part(found: dict[str, Any]) -> Check:
    part, gpus, name = found["cuda_part"], found["gpus"], "CUDA part"
    built_for = f"built for {', '.join(part['architectures'])}" if "cuda" in part else "not built"
    if not gpus:
        return _skipped(name, f"{_NO_GPUS}; {built_for}")
    if not part["built"] or part["error"]:
        reason = f"{part['error'] or 'not built'}; this node has {len(gpus)} GPU(s)"
        remedy = "install jax_intranode anew with nvcc on PATH, or with JAX_INTRANODE_CUDA_WHEELS=1"
        return _fails(name, reason, remedy)
    if not any(name.startswith("jax-cuda") for name in found["versions"]):
        remedy = "pip install 'jax_intranode[cuda13]', or cuda12"
        return _fails(name, "JAX has no CUDA plugin", remedy)
    for gpu in gpus:
        capability = gpu["compute_capability"]
        major, minor = map(int, capability.split("."))
        if not _runs_on(part["architectures"], 10 * major + minor):
            reason = f"{built_for}; {gpu['name']} has compute capability {capability}"
            return _fails(name, reason, "build with CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=native")
    return _ok(name, f"CUDA {part['cuda']} for {', '.join(part['architectures'])}")


def _runs_on(architectures: Sequence[str], capability: int) -> bool:
    """Whether code for these architectures runs on a GPU of this compute capability, as 90."""
    for name in architectures:
        if name in ("native", "all", "all-major"):  # CMake's words; the build chose
            return True
        # As nvcc names them (compute_80, sm_90), or as CMake does (80-virtual, 90-real, 90a).
        found = re.fullmatch(r"(compute_|sm_)?(\d+)([af]?)(-real|-virtual)?", name)
        if found is None or name == "sm_90a":  # the fused kernels, without which the rest runs
            continue
        prefix, number, suffix, kind = found.groups()
        if suffix == "a":
            runs = capability == int(number)
        # PTX runs on all later GPUs, machine code on those of the same major version.
        elif not suffix and (prefix == "compute_" or (prefix is None and kind != "-real")):
            runs = capability >= int(number)
        else:
            runs = capability // 10 == int(number) // 10 and capability >= int(number)
        if runs:
            return True
    return False


def _links(found: dict[str, Any]) -> Check:
    links, name = found["topology"]["links"], "NVLink"
    if len(links) < 2:
        return _skipped(name, _too_few(links))
    missing = _pairs(len(links), lambda i, j: links[i][j] == 0)
    if topology.relays(links) is not None:
        return _ok(
            name,
            "a hybrid cube mesh: psum among all 8 GPUs, and all operations within groups whose "
            "GPUs are linked to each other; jax.lax runs the rest",
        )
    if missing:
        return _warning(
            name,
            f"not linked: {', '.join(missing)}",
            "a mesh with such a pair falls back to jax.lax: make meshes of linked GPUs only "
            "(`python -m jax_intranode topology` shows them)",
        )
    fewest = min(links[i][j] for i in range(len(links)) for j in range(i))
    return _ok(name, f"{len(links)} GPUs, each pair has {fewest} links or more")


def _pairs(count: int, chosen: Callable[[int, int], bool]) -> list[str]:
    return [f"GPU {j} and {i}" for i in range(count) for j in range(i) if chosen(i, j)]


def _too_few(gpus: Sequence[Any]) -> str:
    return _NO_GPUS if not gpus else "a single GPU has no peers"


def _peer_access(found: dict[str, Any]) -> Check:
    """What the driver says. The tests below find out whether it is true."""
    name, gpus = "peer access", found["gpus"]
    if len(gpus) < 2:
        return _skipped(name, _too_few(gpus))
    try:
        with nvml.session() as module:
            handles = [module.nvmlDeviceGetHandleByPciBusId(gpu["bus_id"]) for gpu in gpus]
            kinds = (module.NVML_P2P_CAPS_INDEX_READ, module.NVML_P2P_CAPS_INDEX_WRITE)

            def lacks(i: int, j: int) -> bool:
                return any(
                    module.nvmlDeviceGetP2PStatus(handles[a], handles[b], kind)
                    != module.NVML_P2P_STATUS_OK
                    for a, b in ((i, j), (j, i))
                    for kind in kinds
                )

            # On a hybrid cube mesh only linked pairs need it.
            links = found["topology"]["links"]
            needed = topology.relays(links) is None
            missing = _pairs(len(gpus), lambda i, j: (needed or links[i][j] > 0) and lacks(i, j))
    except Exception as error:
        return _skipped(name, f"NVML does not say: {error or type(error).__name__}")
    if missing:
        remedy = (
            "switch MIG off, and IOMMU or ACS in virtual machines; see `nvidia-smi topo -p2p w`"
        )
        return _fails(name, f"the driver allows no access between {', '.join(missing)}", remedy)
    return _ok(name, "the driver allows reads and writes between all pairs")


def _namespaces() -> Check:
    name, own = "namespaces", []
    for kind, host in _HOST_NAMESPACES.items():
        try:
            if os.stat(f"/proc/self/ns/{kind}").st_ino != host:
                own.append(kind.upper())
        except OSError as error:
            return _skipped(name, f"/proc/self/ns/{kind}: {error.strerror}")
    if not own:
        return _ok(name, "the host's")
    return _ok(
        name,
        f"this is a container with {' and '.join(own)} namespaces of its own: run all processes of "
        "a node in one container",
    )


def _dev_shm(found: dict[str, Any]) -> Check:
    name = str(machine.SHARED_MEMORY)
    remedy = (
        "give the container more (docker run --shm-size=1g, or --ipc=host); without it, processes "
        "of CPU devices fall back to jax.lax"
    )
    if problem := machine.problem_of_shared_memory():
        return (_warning if found["gpus"] else _fails)(name, problem, remedy)
    free, needed = machine.free_shared_memory(), 2 * _slab_bytes("cpu")
    reason = (
        f"writable, {free >> 20} MiB free; a process with a CPU device needs {needed >> 21} MiB"
    )
    return _ok(name, reason) if free >= needed else _warning(name, reason, remedy)


def _slab_bytes(platform: str) -> int:
    from jax_intranode._src.selection import config

    try:
        settings = config.parse(os.environ)
    except ValueError:  # another check reports it
        settings = config.Config()
    return settings.slab_bytes(platform) + settings.ring_bytes(platform)


def _memory(found: dict[str, Any]) -> Iterator[Check]:
    if not found["gpus"]:
        yield _skipped("GPU memory", _NO_GPUS)
    for number, gpu in enumerate(found["gpus"]):
        yield _memory_of(number, gpu)


def _memory_of(number: int, gpu: dict[str, Any]) -> Check:
    name, free = f"memory of GPU {number}", gpu["free_mib"]
    if free is None:
        return _skipped(name, "NVML does not say how much is free")
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
        return _fails(name, reason, remedy)
    if free < needed + of_jax:
        return _warning(
            name,
            reason,
            f"{remedy}, or lower XLA_PYTHON_CLIENT_MEM_FRACTION, JAX_INTRANODE_SLAB_MIB or "
            "JAX_INTRANODE_RING_MIB",
        )
    return _ok(name, reason)


# Tests in processes of their own.


def _tests(found: dict[str, Any]) -> Iterator[Check]:
    names = ("peer write and read", "memory of another process", "one process", "two processes")
    if jax_intranode._import_error is not None:
        for name in names:
            yield _skipped(name, "the package cannot be imported")
        return
    count = _usable_gpus(found)
    platform = "gpu" if count >= 2 else "cpu"
    remedy = f"check {machine.SHARED_MEMORY}"
    if platform == "gpu":
        remedy = (
            "check the driver and `nvidia-smi topo -p2p w`; in a container, run with --ipc=host"
        )
        what = f"each of {count} GPUs to each other"
        yield _probe(names[0], what, remedy, "peers", platform, count, 1)
    else:
        yield _skipped(names[0], _too_few(found["gpus"]))
    what = {"gpu": "CUDA IPC", "cpu": "POSIX shared memory"}[platform]
    yield _probe(names[1], what, remedy, "memory_of_a_process", platform, 2, 2)
    devices = {"gpu": "two GPUs", "cpu": "two CPU devices"}[platform]
    yield _self_test(f"one process with {devices}", platform, 1)
    yield _self_test(f"two processes, {devices}", platform, 2)


def _usable_gpus(found: dict[str, Any]) -> int:
    """The GPUs that tests can use: those that CUDA shows, if the CUDA part was built."""
    if not found["cuda_part"]["built"] or found["cuda_part"]["error"]:
        return 0
    return 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else nvml.visible_gpus()


def _probe(
    name: str, what: str, remedy: str, test: str, platform: str, devices: int, ranks: int
) -> Check:
    found, problem = _run_test(test, platform, devices, ranks)
    failures = [problem] if problem else found
    if failures:
        return _fails(name, f"{what}: {'; '.join(failures[:3])}", remedy)
    return _ok(name, f"{what}: the written data can be read")


def _self_test(name: str, platform: str, ranks: int) -> Check:
    result, problem = _run_test("operations", platform, 2, ranks)
    fails = partial(
        _fails,
        name,
        remedy="`python -m jax_intranode info` shows all versions; report this with its output",
    )
    if problem:
        return fails(problem)
    if not result["right"]:
        return fails("a psum or an all-gather was wrong")
    if result["algorithm"] == "lax":
        reason = f"right, but jax.lax ran it: {result['reason']}"
        return _warning(name, reason, "remove the reason, or expect no gain here")
    if not result["operations"]:
        return fails("the results are right, but our kernels ran nothing")
    return _ok(name, f"psum and all_gather are right; psum ran as {result['algorithm']}")


def _run_test(name: str, platform: str, devices: int, ranks: int) -> tuple[Any, str | None]:
    """Runs a test of probe.py, with a time limit; returns its result and the problem, if any."""
    mode = SINGLE_PROCESS if ranks == 1 else PROCESS_PER_DEVICE
    try:
        result = run_function(
            f"jax_intranode._src.command_line.probe:{name}",
            {},
            Devices(platform, devices, mode),
            timeout_s=_LIMIT_S,
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
    found: dict[str, Any], checks: Sequence[Check]
) -> tuple[str, list[dict[str, Any]], str]:
    """The last sentence, the benefits as JSON, and as a table."""
    lead = "Your node benefits: "
    if jax_intranode._import_error is not None:
        return f"{lead}not until the package can be imported.", [], ""
    from jax_intranode._src.command_line import benefits

    gpus = found["gpus"]
    count = _usable_gpus(found)
    failed = [check for check in checks[-2:] if check.verdict in (FAILS, WARNING)]
    if len(failed) == 2:
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
