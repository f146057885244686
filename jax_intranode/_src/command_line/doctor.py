"""The command `doctor`: does this package work on this node, and what does the node gain?

Each check has a verdict, a reason and, unless all is well, a remedy. What could take this process
down or hang runs in processes of its own with a time limit. Nothing here fails where `info` does
not: what a broken installation cannot run is skipped.
"""

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax_intranode
from jax_intranode._src.command_line import info, shared_memory
from jax_intranode._src.group import nvml, topology

DESCRIPTION = (
    "Checks whether this package works on this node: versions, driver, links, memory, shared "
    "memory, and a test with two ranks in both process modes. Each check says what was found and "
    "what to do about it. Ends with what the node gains. The exit code is 1 if a check fails, else "
    "0; a warning is no failure. Takes about 20 seconds."
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Prints the checks as they end, then the benefits; returns the exit code."""
    checks = []
    for check in all_checks():
        checks.append(check)
        if not arguments.json:
            print(text_of(check), flush=True)
    sentence, rows, table = _benefits(checks)
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


def all_checks() -> Iterator[Check]:
    """Yields the checks. The later ones take seconds."""
    found = info.report()
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
    error = jax_intranode._import_error
    if error is None:
        return Check("package", OK, f"jax_intranode {jax_intranode.__version__} can be imported")
    return Check(
        "package",
        FAILS,
        f"`import jax_intranode` fails: {type(error).__name__}: {error}",
        "follow the message, or install anew; `python -m jax_intranode info` shows all versions",
    )


def _ffi(found: dict[str, Any]) -> Check:
    name = "FFI version"
    runtime = found["ffi_of_jaxlib"]
    built = {part: found[part]["ffi"] for part in ("cpu_part", "cuda_part") if found[part]["ffi"]}
    if runtime is None or not built:
        return Check(name, SKIPPED, "jaxlib, or this package's native modules, cannot be read")
    newest = max(built.values())
    reason = f"built against {info.dotted(newest)}, jaxlib has {info.dotted(runtime)}"
    if newest > runtime:
        return Check(name, FAILS, reason, "install a newer jaxlib: pip install -U jax")
    return Check(name, OK, reason)


def _environment(found: dict[str, Any]) -> Iterator[Check]:
    for row in found["environment"]:
        if row["problem"]:
            exists = row["default"] is not None
            yield Check(
                "environment",
                FAILS if exists else WARNING,
                row["problem"],
                f"correct or unset {row['name']}",
            )
    falls_back = {"JAX_INTRANODE_DISABLE": "1", "JAX_INTRANODE_ALGORITHM": "lax"}
    for name, value in falls_back.items():
        if os.environ.get(name) == value:
            reason = f"{name}={value}: everything falls back to jax.lax"
            yield Check("environment", WARNING, reason, f"unset {name}")
    if not any(row["problem"] for row in found["environment"]):
        names = [row["name"] for row in found["environment"] if row["value"] and row["default"]]
        yield Check("environment", OK, f"variables set: {', '.join(names) or 'none'}")


def _tuning(found: dict[str, Any]) -> Iterator[Check]:
    tuning = found["tuning"]
    if tuning is None:  # not set, or a problem of the package or of the environment
        return
    here = {gpu["name"] for gpu in found["gpus"]} or {"cpu"}
    if here == {tuning["device"]}:
        yield Check("tuning", OK, tuning["text"])
    else:
        yield Check(
            "tuning",
            FAILS if found["gpus"] else WARNING,
            f"{tuning['path']} was measured on {tuning['device']}; this node has "
            f"{' and '.join(sorted(here))}",
            "measure again with `python -m jax_intranode tune`, or unset JAX_INTRANODE_TUNING",
        )


def _driver(found: dict[str, Any]) -> Check:
    driver, cuda = found["driver"], found["cuda_part"]
    if driver["version"] is None:
        if _device_files():
            return Check(
                "driver",
                FAILS,
                f"there are GPUs in /dev, but {driver['reason']}",
                "install NVIDIA's driver, or give the container its libraries (--gpus all)",
            )
        return Check("driver", SKIPPED, f"{_NO_GPUS}: {driver['reason']}")
    reason = f"{driver['version']}, for CUDA up to {driver['cuda']}"
    needed = cuda.get("cuda")
    if needed and int(needed.split(".")[0]) > int(driver["cuda"].split(".")[0]):
        return Check(
            "driver",
            FAILS,
            f"{reason}; the CUDA part was built with CUDA {needed}",
            "install a newer driver, or build with an older CUDA toolkit",
        )
    return Check("driver", OK, reason)


def _device_files() -> list[Path]:
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def _cuda_part(found: dict[str, Any]) -> Check:
    part, gpus, name = found["cuda_part"], found["gpus"], "CUDA part"
    if not gpus:
        built = f"built for {', '.join(part['architectures'])}" if "cuda" in part else "not built"
        return Check(name, SKIPPED, f"{_NO_GPUS}; {built}")
    if not part["built"] or part["error"]:
        return Check(
            name,
            FAILS,
            f"{part['error'] or 'not built'}; this node has {len(gpus)} GPU(s)",
            "install jax_intranode anew with nvcc on PATH, or with JAX_INTRANODE_CUDA_WHEELS=1",
        )
    if not any(name.startswith("jax-cuda") for name in found["versions"]):
        return Check(
            name, FAILS, "JAX has no CUDA plugin", "pip install 'jax_intranode[cuda13]', or cuda12"
        )
    for gpu in gpus:
        major, minor = map(int, gpu["compute_capability"].split("."))
        if not _runs_on(part["architectures"], 10 * major + minor):
            return Check(
                name,
                FAILS,
                f"built for {', '.join(part['architectures'])}; {gpu['name']} has compute "
                f"capability {major}.{minor}",
                "build with CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=native",
            )
    return Check(name, OK, f"CUDA {part['cuda']} for {', '.join(part['architectures'])}")


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
        return Check(name, SKIPPED, _too_few(links))
    missing = _pairs(len(links), lambda i, j: links[i][j] == 0)
    if topology.relays(links) is not None:
        return Check(
            name,
            OK,
            "a hybrid cube mesh: psum among all 8 GPUs, and all operations within groups whose "
            "GPUs are linked to each other; jax.lax runs the rest",
        )
    if missing:
        return Check(
            name,
            WARNING,
            f"not linked: {', '.join(missing)}",
            "a mesh with such a pair falls back to jax.lax: make meshes of linked GPUs only "
            "(`python -m jax_intranode topology` shows them)",
        )
    fewest = min(links[i][j] for i in range(len(links)) for j in range(i))
    return Check(name, OK, f"{len(links)} GPUs, each pair has {fewest} links or more")


def _pairs(count: int, chosen: Callable[[int, int], bool]) -> list[str]:
    return [f"GPU {j} and {i}" for i in range(count) for j in range(i) if chosen(i, j)]


def _too_few(gpus: Sequence[Any]) -> str:
    return _NO_GPUS if not gpus else "a single GPU has no peers"


def _peer_access(found: dict[str, Any]) -> Check:
    """What the driver says. The tests below find out whether it is true."""
    name, gpus = "peer access", found["gpus"]
    if len(gpus) < 2:
        return Check(name, SKIPPED, _too_few(gpus))
    try:
        with nvml.session() as module:
            handles = [module.nvmlDeviceGetHandleByPciBusId(gpu["bus_id"]) for gpu in gpus]

            def lacks(i: int, j: int) -> bool:
                kinds = (module.NVML_P2P_CAPS_INDEX_READ, module.NVML_P2P_CAPS_INDEX_WRITE)
                states = [
                    module.nvmlDeviceGetP2PStatus(handles[a], handles[b], kind)
                    for a, b in ((i, j), (j, i))
                    for kind in kinds
                ]
                return any(state != module.NVML_P2P_STATUS_OK for state in states)

            # On a hybrid cube mesh only linked pairs need it.
            links = found["topology"]["links"]
            needed = topology.relays(links) is None
            missing = _pairs(len(gpus), lambda i, j: (needed or links[i][j] > 0) and lacks(i, j))
    except Exception as error:
        return Check(name, SKIPPED, f"NVML does not say: {error or type(error).__name__}")
    if missing:
        return Check(
            name,
            FAILS,
            f"the driver allows no access between {', '.join(missing)}",
            "switch MIG off, and IOMMU or ACS in virtual machines; see `nvidia-smi topo -p2p w`",
        )
    return Check(name, OK, "the driver allows reads and writes between all pairs")


def _namespaces() -> Check:
    own = []
    for kind, host in _HOST_NAMESPACES.items():
        try:
            if os.stat(f"/proc/self/ns/{kind}").st_ino != host:
                own.append(kind.upper())
        except OSError as error:
            return Check("namespaces", SKIPPED, f"/proc/self/ns/{kind}: {error.strerror}")
    if not own:
        return Check("namespaces", OK, "the host's")
    return Check(
        "namespaces",
        OK,
        f"this is a container with {' and '.join(own)} namespaces of its own: run all processes of "
        "a node in one container",
    )


def _dev_shm(found: dict[str, Any]) -> Check:
    name = str(shared_memory.DIRECTORY)
    remedy = (
        "give the container more (docker run --shm-size=1g, or --ipc=host); without it, processes "
        "of CPU devices fall back to jax.lax"
    )
    if problem := shared_memory.problem():
        verdict = WARNING if found["gpus"] else FAILS
        return Check(name, verdict, problem, remedy)
    free = shared_memory.free_bytes()
    needed = 2 * _slab_bytes("cpu")
    reason = (
        f"writable, {free >> 20} MiB free; a process with a CPU device needs {needed >> 21} MiB"
    )
    return Check(name, OK, reason) if free >= needed else Check(name, WARNING, reason, remedy)


def _slab_bytes(platform: str) -> int:
    from jax_intranode._src.selection import config

    try:
        settings = config.parse(os.environ)
    except ValueError:  # another check reports it
        settings = config.Config()
    return settings.slab_bytes(platform) + settings.ring_bytes(platform)


def _memory(found: dict[str, Any]) -> Iterator[Check]:
    if not found["gpus"]:
        yield Check("GPU memory", SKIPPED, _NO_GPUS)
    for number, gpu in enumerate(found["gpus"]):
        yield _memory_of(number, gpu)


def _memory_of(number: int, gpu: dict[str, Any]) -> Check:
    name = f"memory of GPU {number}"
    if gpu["free_mib"] is None:
        return Check(name, SKIPPED, "NVML does not say how much is free")
    needed = _slab_bytes("gpu") >> 20
    # JAX takes this fraction of the memory at its start, and the slab lies outside of it.
    preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() != "false"
    try:
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ".75"))
    except ValueError:
        fraction = 0.75
    of_jax = int(fraction * gpu["memory_mib"]) if preallocates else 0
    reason = f"{gpu['free_mib']} of {gpu['memory_mib']} MiB free; slab and ring need {needed} MiB"
    if of_jax:
        reason += f" beside JAX's {of_jax} MiB"
    if gpu["free_mib"] < needed:
        return Check(name, FAILS, reason, "end other programs on this GPU")
    if gpu["free_mib"] < needed + of_jax:
        return Check(
            name,
            WARNING,
            reason,
            "end other programs on this GPU, or lower XLA_PYTHON_CLIENT_MEM_FRACTION, "
            "JAX_INTRANODE_SLAB_MIB or JAX_INTRANODE_RING_MIB",
        )
    return Check(name, OK, reason)


# Tests in processes of their own.


def _tests(found: dict[str, Any]) -> Iterator[Check]:
    names = ("peer write and read", "memory of another process", "one process", "two processes")
    if jax_intranode._import_error is not None:
        for name in names:
            yield Check(name, SKIPPED, "the package cannot be imported")
        return
    count = _usable_gpus(found)
    platform = "gpu" if count >= 2 else "cpu"
    if count < 2:
        yield Check(names[0], SKIPPED, _too_few(found["gpus"]))
    else:
        yield _probe(names[0], "peers", str(count), what=f"each of {count} GPUs to each other")
    device = {"gpu": "CUDA IPC", "cpu": "POSIX shared memory"}[platform]
    second = "1" if platform == "gpu" else "0"
    yield _probe(names[1], "owner", platform, "0", second, what=device)
    yield _self_test("single", platform)
    yield _self_test("multi", platform)


def _usable_gpus(found: dict[str, Any]) -> int:
    """The GPUs that tests can use: those that CUDA shows, if the CUDA part was built."""
    if not found["cuda_part"]["built"] or found["cuda_part"]["error"]:
        return 0
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    from jax_intranode._src.command_line.bench import machine

    return machine.gpus_and_driver()[0]


def _probe(name: str, *arguments: str, what: str) -> Check:
    remedy = (
        "check the driver and `nvidia-smi topo -p2p w`; in a container, run with --ipc=host"
        if "gpu" in arguments or "peers" in arguments
        else f"check {shared_memory.DIRECTORY}"
    )
    output, problem = _run_module("probe", [arguments])
    failures = [problem] if problem else json.loads(output.splitlines()[-1])
    if failures:
        return Check(name, FAILS, f"{what}: {'; '.join(failures[:3])}", remedy)
    return Check(name, OK, f"{what}: what was written is read")


def _self_test(mode: str, platform: str) -> Check:
    devices = {"gpu": "two GPUs", "cpu": "two CPU devices"}[platform]
    name = {"single": f"one process with {devices}", "multi": f"two processes, {devices}"}[mode]
    with tempfile.TemporaryDirectory(prefix="jax_intranode_doctor_") as directory:
        file = Path(directory) / "result.json"
        ranks = 1 if mode == "single" else 2
        _, problem = _run_module("selftest", [(platform, mode, str(file))] * ranks)
        remedy = "`python -m jax_intranode info` shows all versions; report this with its output"
        if problem:
            return Check(name, FAILS, problem, remedy)
        result = json.loads(file.read_text())
    if not result["right"]:
        return Check(name, FAILS, "a psum or an all-gather was wrong", remedy)
    if result["algorithm"] == "lax":
        return Check(
            name,
            WARNING,
            f"right, but jax.lax ran it: {result['reason']}",
            "remove the reason, or expect no gain here",
        )
    if not result["operations"]:
        return Check(name, FAILS, "the results are right, but our kernels ran nothing", remedy)
    return Check(name, OK, f"psum and all_gather are right; psum ran as {result['algorithm']}")


def _run_module(name: str, ranks: Sequence[Sequence[str]]) -> tuple[str, str | None]:
    """Runs a module of this package in a process for each rank, with a time limit.

    Returns:
        What the first rank has printed, and the problem, if there was one.
    """
    import sys

    from jax_intranode._src.command_line import launcher

    command = [sys.executable, "-P", "-m", f"jax_intranode._src.command_line.{name}"]
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_INTRANODE_TIMEOUT_S": "60"}
    with tempfile.TemporaryDirectory(prefix="jax_intranode_doctor_") as directory:
        try:
            launcher.run_ranks(
                [[*command, *arguments] for arguments in ranks],
                timeout_s=_LIMIT_S,
                log_dir=Path(directory),
                env=[variables] * len(ranks),
                joined=len(ranks) > 1,
            )
        except launcher.RankError as error:
            if error.first_failed is None:
                return "", str(error).splitlines()[0]
            return "", _cause(error.logs[error.first_failed])
        return (Path(directory) / "rank0.log").read_text(errors="replace"), None


def _cause(log: str) -> str:
    """The last line of a log that names an exception, or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (errors or lines)[-1]


# The end of the report.


def _benefits(checks: Sequence[Check]) -> tuple[str, list[dict[str, Any]], str]:
    """The last sentence, the benefits as JSON, and as a table."""
    lead = "Your node benefits: "
    if jax_intranode._import_error is not None:
        return f"{lead}not until the package can be imported.", [], ""
    from jax_intranode._src.command_line import benefits

    found = info.report()
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
    sentence = f"{lead}between {where}, {benefits.summary(rows)}."
    if not on_gpus:
        sentence += (
            "\nCPU devices are for development and tests. This table was measured between two of "
            "them, on 2 cores:"
        )
    return sentence, [asdict(row) for row in rows], benefits.table_of(rows)
