"""The command `info`: what is installed, what this node has, and what is wrong with either.

It starts no backend of JAX, asks the driver through NVML only, and never fails: what cannot be
found out is a problem in the report.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax_intranode
from jax_intranode._src.command_line import machine
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

OK, WARNING, FAILS, SKIPPED = "ok", "warning", "fails", "skipped"
NO_GPUS = "no GPUs here"

_T = TypeVar("_T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
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
            problems.append(f"{what}: {described(error)}")
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
            name: machine.version_of(name)
            for name in ("jax", "jaxlib", *_DISTRIBUTIONS)
            if name in ("jax", "jaxlib") or machine.version_of(name)
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
    for check in of_installation(report):
        if check.verdict in (FAILS, WARNING):
            problems.append(f"{check.name}: {check.reason}. To do: {check.remedy}")
    return {**report, "problems": problems}


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def dotted(version: Sequence[int] | None) -> str:
    return ".".join(map(str, version)) if version else "unknown"


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
        raise ImportError(f"it is not installed: pip install 'jax>={jax_intranode._OLDEST_JAX}'")
    return list(ffi_headers.version_in(Path(spec.origin).parent / "include"))


def _part(name: str, ffi: list[int] | None) -> dict[str, Any]:
    """What a native module says about itself, and why it cannot be used."""
    part: dict[str, Any] = {"built": machine.has_native_module(name), "ffi": None, "error": None}
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
        part["error"] = f"it cannot be loaded: {described(error)}"
    if ffi is not None and part["ffi"] is not None and part["ffi"] > ffi:
        built, has = dotted(part["ffi"]), dotted(ffi)
        part["error"] = f"built against FFI headers {built}, and jaxlib has {has}"
    return part


def _gpus(found: list[topology.LinkReport]) -> list[dict[str, Any]]:
    gpus = []
    for one in found:
        facts = topology.read_facts(one.bus_id, one.name)
        gpu: dict[str, Any] = {
            "name": one.name,
            "bus_id": one.bus_id,
            "compute_capability": dotted(list(facts.compute_capability)),
            "memory_mib": None,
            "free_mib": None,
        }
        with contextlib.suppress(Exception), nvml.session() as module:  # it may not say
            handle = module.nvmlDeviceGetHandleByPciBusId(one.bus_id)
            memory = module.nvmlDeviceGetMemoryInfo(handle)
            gpu |= {"memory_mib": int(memory.total) >> 20, "free_mib": int(memory.free) >> 20}
        gpus.append(gpu)
    return gpus


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


# Checks of what is installed and set. They only look.


@dataclass(frozen=True)
class Check:
    """What was checked, what was found or why it was skipped, and what to do, if anything."""

    name: str
    verdict: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n{'':<8} -> {self.remedy}" if self.remedy else ""
        return f"{self.verdict:<8} {self.name}: {self.reason}{remedy}"


# The fields of a check after its name.
Finding = tuple[str, str] | tuple[str, str, str]


def check(name: str) -> Callable[[Callable[[dict[str, Any]], Finding]], Callable[..., Check]]:
    """Makes a check of a function that finds something in the report."""

    def decorated(find: Callable[[dict[str, Any]], Finding]) -> Callable[..., Check]:
        return lambda found: Check(name, *find(found))

    return decorated


def of_installation(found: dict[str, Any]) -> Iterator[Check]:
    """Yields the checks of what is installed and set."""
    yield _package(found)
    yield cpu_part(found)
    yield cuda_part(found)
    yield from environment(found)


@check("package")
def _package(found: dict[str, Any]) -> Finding:
    error = jax_intranode._import_error
    if error is None:
        return OK, f"jax_intranode {jax_intranode.__version__} can be imported"
    remedy = (
        "follow the message, or install anew; `python -m jax_intranode info` shows all versions"
    )
    return FAILS, f"`import jax_intranode` fails: {described(error)}", remedy


@check("CPU part")
def cpu_part(found: dict[str, Any]) -> Finding:
    """Whether the native module for CPU devices can be used."""
    part, runtime = found["cpu_part"], found["ffi_of_jaxlib"]
    if part["error"]:
        return FAILS, part["error"], _remedy_of_part(part)
    if runtime is None:
        return SKIPPED, "jaxlib cannot be read"
    return OK, f"built against FFI {dotted(part['ffi'])}, jaxlib has {dotted(runtime)}"


def _remedy_of_part(part: dict[str, Any]) -> str:
    if part["ffi"] is not None:  # it can be loaded
        return "install a newer jaxlib: pip install -U jax"
    if part["built"]:
        return "install jax_intranode anew"
    return "run `pip install .`, and leave the source tree"


@check("CUDA part")
def cuda_part(found: dict[str, Any]) -> Finding:
    """Whether the native module for GPUs can be used on those of this node."""
    part, gpus = found["cuda_part"], found["gpus"]
    built_for = f"built for {', '.join(part['architectures'])}" if "cuda" in part else "not built"
    if part["error"]:
        return FAILS if gpus else WARNING, part["error"], _remedy_of_part(part)
    if not gpus:
        return SKIPPED, f"{NO_GPUS}; {built_for}"
    if not part["built"]:
        reason = f"not built; this node has {len(gpus)} GPU(s), and jax.lax runs all on them"
        remedy = "install jax_intranode anew with nvcc on PATH, or with JAX_INTRANODE_CUDA_WHEELS=1"
        return FAILS, reason, remedy
    if not any(name.startswith("jax-cuda") for name in found["versions"]):
        return FAILS, "JAX has no CUDA plugin", "pip install 'jax_intranode[cuda13]', or cuda12"
    for gpu in gpus:
        capability = gpu["compute_capability"]
        major, minor = map(int, capability.split("."))
        if not runs_on(part["architectures"], 10 * major + minor):
            reason = f"{built_for}; {gpu['name']} has compute capability {capability}"
            return FAILS, reason, "build with CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=native"
    return OK, f"CUDA {part['cuda']} for {', '.join(part['architectures'])}"


def runs_on(architectures: Sequence[str], capability: int) -> bool:
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


def environment(found: dict[str, Any]) -> Iterator[Check]:
    """Whether the variables that are set exist, and what they say; what turns the package off."""
    name, rows = "environment", found["environment"]
    for row in rows:
        if row["problem"]:
            verdict = FAILS if row["default"] is not None else WARNING
            yield Check(name, verdict, row["problem"], f"correct or unset {row['name']}")
    for variable, value in {"JAX_INTRANODE_DISABLE": "1", "JAX_INTRANODE_ALGORITHM": "lax"}.items():
        if os.environ.get(variable) == value:
            reason = f"{variable}={value}: everything falls back to jax.lax"
            yield Check(name, WARNING, reason, f"unset {variable}")
    if not any(row["problem"] for row in rows):
        names = [row["name"] for row in rows if row["value"] and row["default"]]
        yield Check(name, OK, f"variables set: {', '.join(names) or 'none'}")


# The report as text.


def text_of(found: dict[str, Any]) -> str:
    own, system, driver = found["jax_intranode"], found["system"], found["driver"]
    driver_text = f"none: {driver['reason']}"
    if driver["version"]:
        driver_text = f"{driver['version']}, for CUDA up to {driver['cuda']}"
    gpus = [
        f"{number}: {gpu['name']}, {gpu['bus_id']}, compute capability "
        f"{gpu['compute_capability']}, {gpu['free_mib']} of {gpu['memory_mib']} MiB free"
        for number, gpu in enumerate(found["gpus"])
    ]
    topo = found["topology"]
    links = [*topology.matrix_lines(topo["links"]), topo["kind"]] if len(gpus) > 1 else []
    variables, unset = [], []
    for row in found["environment"]:
        if row["value"] is not None:
            note = "  <- see problems" if row["problem"] else ""
            variables.append(f"{row['name']}={row['value']}{note}")
        elif row["default"]:
            unset.append(f"{row['name']} ({row['default']})")
    titled: dict[str, list[str]] = {
        "jax_intranode": [f"{own['version']}, {own['path']}"],
        "python": [f"{found['python']}, {system['platform']}, {system['cores']} cores"],
        "versions": [f"{name} {version}" for name, version in found["versions"].items()],
        "CPU part": [_text_of_part(found["cpu_part"])],
        "CUDA part": [_text_of_part(found["cuda_part"])],
        "driver": [driver_text],
        "GPUs": gpus or ["none"],
        "links": links,
        "modes": [
            f"{mode['mode']}: {'works' if mode['works'] else 'no, ' + mode['reason']}"
            for mode in found["modes"]
        ],
        "environment": [*variables, f"not set: {', '.join(unset)}"],
        "tuning": [found["tuning"]["text"]] if found["tuning"] else [],
        "problems": found["problems"] or ["none"],
    }
    width = max(map(len, titled))
    return "\n".join(
        f"{'' if number else title:<{width}}  {line}"
        for title, lines in titled.items()
        for number, line in enumerate(lines)
    )


def _text_of_part(part: dict[str, Any]) -> str:
    if part["error"]:
        return part["error"]
    if not part["built"]:
        return "not built"
    cuda = f"CUDA {part['cuda']} for {', '.join(part['architectures'])}, " if "cuda" in part else ""
    return f"built, {cuda}FFI {dotted(part['ffi'])}"
