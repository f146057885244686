"""What a check has found, and the checks of the installation, by the report of `info`."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax_intranode

OK, WARNING, FAILS, SKIPPED = "ok", "warning", "fails", "skipped"
NO_GPUS = "no GPUs here"


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


def text_of(check: Check) -> str:
    """Returns a check as text."""
    lines = [f"{check.verdict:<8} {check.name}: {check.reason}"]
    if check.remedy:
        lines.append(f"{'':<8} -> {check.remedy}")
    return "\n".join(lines)


def of_installation(found: dict[str, Any]) -> Iterator[Check]:
    """Yields the checks of what is installed and set. They only look."""
    yield _package()
    yield cpu_part(found)
    yield cuda_part(found)
    yield from environment(found)


def described(error: BaseException) -> str:
    """Returns an exception as text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def dotted(version: Sequence[int] | None) -> str:
    """Returns a version as text."""
    return ".".join(map(str, version)) if version else "unknown"


def _package() -> Check:
    name, error = "package", jax_intranode._import_error
    if error is None:
        return Check(name, OK, f"jax_intranode {jax_intranode.__version__} can be imported")
    remedy = (
        "follow the message, or install anew; `python -m jax_intranode info` shows all versions"
    )
    return Check(name, FAILS, f"`import jax_intranode` fails: {described(error)}", remedy)


def cpu_part(found: dict[str, Any]) -> Check:
    """Whether the native module for CPU devices can be used."""
    name, part, runtime = "CPU part", found["cpu_part"], found["ffi_of_jaxlib"]
    if part["error"]:
        return Check(name, FAILS, part["error"], _remedy_of_part(part))
    if runtime is None:
        return Check(name, SKIPPED, "jaxlib cannot be read")
    return Check(name, OK, f"built against FFI {dotted(part['ffi'])}, jaxlib has {dotted(runtime)}")


def _remedy_of_part(part: dict[str, Any]) -> str:
    if part["ffi"] is not None:  # it can be loaded
        return "install a newer jaxlib: pip install -U jax"
    if part["built"]:
        return "install jax_intranode anew"
    return "run `pip install .`, and leave the source tree"


def cuda_part(found: dict[str, Any]) -> Check:
    """Whether the native module for GPUs can be used on those of this node."""
    part, gpus, name = found["cuda_part"], found["gpus"], "CUDA part"
    built_for = f"built for {', '.join(part['architectures'])}" if "cuda" in part else "not built"
    if part["error"]:
        return Check(name, FAILS if gpus else WARNING, part["error"], _remedy_of_part(part))
    if not gpus:
        return Check(name, SKIPPED, f"{NO_GPUS}; {built_for}")
    if not part["built"]:
        reason = f"not built; this node has {len(gpus)} GPU(s), and jax.lax runs all on them"
        remedy = "install jax_intranode anew with nvcc on PATH, or with JAX_INTRANODE_CUDA_WHEELS=1"
        return Check(name, FAILS, reason, remedy)
    if not any(name.startswith("jax-cuda") for name in found["versions"]):
        remedy = "pip install 'jax_intranode[cuda13]', or cuda12"
        return Check(name, FAILS, "JAX has no CUDA plugin", remedy)
    for gpu in gpus:
        capability = gpu["compute_capability"]
        major, minor = map(int, capability.split("."))
        if not runs_on(part["architectures"], 10 * major + minor):
            reason = f"{built_for}; {gpu['name']} has compute capability {capability}"
            return Check(
                name, FAILS, reason, "build with CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=native"
            )
    return Check(name, OK, f"CUDA {part['cuda']} for {', '.join(part['architectures'])}")


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
