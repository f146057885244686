"""The command `info`: what is installed, what this node has, and what is wrong with either.

It starts no backend of JAX, asks the driver through NVML only, and never fails: what cannot be
found out is a problem in the report.
"""

import argparse
import importlib
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax_intranode
from jax_intranode._src.command_line import checks, machine, versions
from jax_intranode._src.command_line.options import add_json
from jax_intranode._src.group import nvml, topology
from jax_intranode._src.native import ffi_headers
from jax_intranode._src.selection import config

DESCRIPTION = (
    "Prints the versions of what is installed, whether the CUDA kernels were built and for which "
    "architectures, GPUs and their links, which modes work here, the environment variables in "
    "force, and problems. Starts no backend of JAX, so it takes no memory of a GPU. It always "
    "succeeds: a broken installation is a problem in the report. Add its output to bug reports."
)
EXAMPLES = """\
python -m jax_intranode info
python -m jax_intranode info --json > info.json"""

# What matters to this package besides jax and jaxlib; for `pip` all of them are optional.
_DISTRIBUTIONS = (
    "numpy",
    "nvidia-ml-py",
    *("jax-cuda12-plugin", "jax-cuda13-plugin"),
    *("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"),
    *("nvidia-cublas-cu12", "nvidia-cublas"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    "matplotlib",
)

# Other programs' variables that change what this package finds or how it runs.
_OTHER_VARIABLES = ("JAX_", "XLA_", "NCCL_", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "TF_CPP")

_T = TypeVar("_T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report."""
    found = report()
    print(json.dumps(found, indent=2) if arguments.json else text_of(found))
    return 0


def report() -> dict[str, Any]:
    """Returns everything that the command prints, as JSON has it."""
    problems: list[str] = []

    def attempt(what: str, ask: Callable[[], _T]) -> _T | None:
        try:
            return ask()
        except Exception as error:
            problems.append(f"{what}: {checks.described(error)}")
            return None

    ffi = attempt("jaxlib", _ffi_of_jaxlib)
    cpu = _part("_host", ffi)
    cuda = _part("_cuda", ffi)
    found = attempt("GPUs", topology.read_links) or []
    links = topology.link_matrix(found)
    variables = attempt("environment variables", _variables) or []
    tuned = attempt("tuning", _tuning)
    gpus = attempt("GPUs", lambda: _gpus(found)) or []
    report = {
        "jax_intranode": {
            "version": jax_intranode.__version__,
            "path": str(Path(jax_intranode.__file__).parent),
        },
        "python": platform.python_version(),
        "system": {
            "platform": platform.platform(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "versions": {
            name: versions.of(name)
            for name in ("jax", "jaxlib", *_DISTRIBUTIONS)
            if name in ("jax", "jaxlib") or versions.of(name)
        },
        "ffi_of_jaxlib": ffi,
        "cpu_part": cpu,
        "cuda_part": cuda,
        "driver": machine.driver(),
        "gpus": gpus,
        "topology": {"kind": topology.classify(links).value, "links": links},
        "modes": _modes(cpu, cuda, gpus, topology.classify(links)),
        "environment": variables,
        "tuning": tuned,
    }
    for check in checks.of_installation(report):
        if check.verdict in (checks.FAILS, checks.WARNING):
            problems.append(f"{check.name}: {check.reason}. To do: {check.remedy}")
    return {**report, "problems": problems}


def _tuning() -> dict[str, Any] | None:
    """What JAX_INTRANODE_TUNING names; None if it is not set, or where its file is a problem."""
    path = os.environ.get("JAX_INTRANODE_TUNING")
    if not path or jax_intranode._import_error is not None:
        return None
    # It needs the native module, which a broken installation lacks.
    tuning = importlib.import_module("jax_intranode._src.selection.tuning").read(path)
    return {
        "path": path,
        "digest": tuning.digest,
        "device": tuning.device,
        "devices": tuning.devices,
        "date": tuning.date,
        "versions": dict(tuning.versions),
        "tables": len(tuning.rows),
        "profile": tuning.profile is not None,
        "text": str(tuning),
    }


def _ffi_of_jaxlib() -> list[int]:
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise ImportError("it is not installed: pip install 'jax>=0.10.2'")
    return list(ffi_headers.version_in(Path(spec.origin).parent / "include"))


def _part(name: str, ffi: list[int] | None) -> dict[str, Any]:
    """What a native module says about itself, and why it cannot be used."""
    part: dict[str, Any] = {"built": versions.has_native_module(name), "ffi": None, "error": None}
    if not part["built"]:
        if name == "_host":  # without _cuda, all falls back: no problem without GPUs
            part["error"] = "not built: this is a source tree, or the installation is incomplete"
        return part
    try:
        module = importlib.import_module(f"jax_intranode.{name}")
        part["ffi"] = list(module.FFI_API_VERSION)
        if name == "_cuda":
            number = module.CUDA_VERSION
            part["cuda"] = f"{number // 1000}.{number % 1000 // 10}"
            part["architectures"] = module.ARCHITECTURES.split(",")
    except Exception as error:
        part["error"] = f"it cannot be loaded: {checks.described(error)}"
    if ffi is not None and part["ffi"] is not None and part["ffi"] > ffi:
        built, has = checks.dotted(part["ffi"]), checks.dotted(ffi)
        part["error"] = f"built against FFI headers {built}, and jaxlib has {has}"
    return part


def _gpus(found: list[topology.LinkReport]) -> list[dict[str, Any]]:
    gpus = []
    for report_of_one in found:
        facts = topology.read_facts(report_of_one.bus_id, report_of_one.name)
        memory = _memory(report_of_one.bus_id)
        gpus.append(
            {
                "name": report_of_one.name,
                "bus_id": report_of_one.bus_id,
                "compute_capability": checks.dotted(list(facts.compute_capability)),
                "memory_mib": memory and memory[0],
                "free_mib": memory and memory[1],
            }
        )
    return gpus


def _memory(bus_id: str) -> tuple[int, int] | None:
    """MiB of a GPU, in all and free; None if it does not say."""
    try:
        with nvml.session() as module:
            handle = module.nvmlDeviceGetHandleByPciBusId(bus_id)
            memory = module.nvmlDeviceGetMemoryInfo(handle)
            return int(memory.total) >> 20, int(memory.free) >> 20
    except Exception:
        return None


def _modes(
    cpu: dict[str, Any],
    cuda: dict[str, Any],
    gpus: list[dict[str, Any]],
    kind: topology.TopologyKind,
) -> list[dict[str, Any]]:
    """The combinations of devices and processes, and why one does not work here."""
    of_gpus = None
    if cuda["error"] or not cuda["built"]:
        of_gpus = f"the CUDA part {'cannot be used' if cuda['built'] else 'was not built'}"
    if len(gpus) < 2:
        of_gpus = f"a group has 2 or more GPUs, and this node has {len(gpus)}"
    elif kind is topology.TopologyKind.UNKNOWN:
        of_gpus = of_gpus or f"not all GPUs are linked by NVLink (topology {kind.value})"
    of_cpus = "the CPU part cannot be used" if cpu["error"] else None
    rows = {
        "GPUs, one process": of_gpus,
        "GPUs, one process per GPU": of_gpus,
        "CPU devices, one process": of_cpus,
        "CPU devices, several processes": of_cpus or machine.problem_of_shared_memory(),
    }
    return [{"mode": mode, "works": why is None, "reason": why} for mode, why in rows.items()]


def _variables() -> list[dict[str, Any]]:
    """Our variables, set or not, and those of other programs that are set."""

    def row(name: str, default: str | None = None, problem: str | None = None) -> dict[str, Any]:
        value = os.environ.get(name) or None
        if value and name in secrets:
            value = "(set, not shown)"
        return {"name": name, "value": value, "default": default, "problem": problem}

    secrets = {variable.name for variable in config.VARIABLES if variable.is_secret}
    rows = []
    for variable in config.VARIABLES:
        if variable.reader == "package" or variable.name in os.environ:
            problem = None
            try:
                config.parse({variable.name: os.environ.get(variable.name, "")})
            except ValueError as error:
                problem = str(error)
            rows.append(row(variable.name, variable.default.replace("`", ""), problem))
    for name, meant in config.unknown(os.environ).items():
        problem = f"{name} is set, but no such variable exists. Did you mean {meant}?"
        rows.append(row(name, problem=problem))
    ours = {of_one["name"] for of_one in rows}
    others = [name for name in sorted(os.environ) if name.startswith(_OTHER_VARIABLES)]
    return rows + [row(name) for name in others if name not in ours]


def text_of(found: dict[str, Any]) -> str:
    """Returns the report as text."""
    rows: list[tuple[str, str]] = []

    def add(title: str, *lines: str) -> None:
        for number, line in enumerate(lines):
            rows.append((title if number == 0 else "", line))

    add("jax_intranode", f"{found['jax_intranode']['version']}, {found['jax_intranode']['path']}")
    system = found["system"]
    add("python", f"{found['python']}, {system['platform']}, {system['cores']} cores")
    add("versions", *(f"{name} {version}" for name, version in found["versions"].items()))
    add("CPU part", _text_of_part(found["cpu_part"]))
    add("CUDA part", _text_of_part(found["cuda_part"]))
    driver = found["driver"]
    add(
        "driver",
        f"{driver['version']}, for CUDA up to {driver['cuda']}"
        if driver["version"]
        else f"none: {driver['reason']}",
    )
    links = found["topology"]["links"]
    gpus = [
        f"{number}: {gpu['name']}, {gpu['bus_id']}, compute capability "
        f"{gpu['compute_capability']}, {gpu['free_mib']} of {gpu['memory_mib']} MiB free"
        for number, gpu in enumerate(found["gpus"])
    ]
    add("GPUs", *(gpus or ["none"]))
    if len(gpus) > 1:
        add("links", *topology.matrix_lines(links), found["topology"]["kind"])
    add(
        "modes",
        *(
            f"{mode['mode']}: {'works' if mode['works'] else 'no, ' + mode['reason']}"
            for mode in found["modes"]
        ),
    )
    add(
        "environment",
        *(
            f"{row['name']}={row['value']}{'  <- see problems' if row['problem'] else ''}"
            for row in found["environment"]
            if row["value"] is not None
        ),
        "not set: "
        + ", ".join(
            f"{row['name']} ({row['default']})"
            for row in found["environment"]
            if row["value"] is None and row["default"]
        ),
    )
    if found["tuning"] is not None:
        add("tuning", found["tuning"]["text"])
    add("problems", *(found["problems"] or ["none"]))
    width = max(len(title) for title, _ in rows)
    return "\n".join(f"{title:<{width}}  {line}" for title, line in rows)


def _text_of_part(part: dict[str, Any]) -> str:
    if part["error"]:
        return part["error"]
    if not part["built"]:
        return "not built"
    cuda = f"CUDA {part['cuda']} for {', '.join(part['architectures'])}, " if "cuda" in part else ""
    return f"built, {cuda}FFI {checks.dotted(part['ffi'])}"
