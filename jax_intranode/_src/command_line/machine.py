"""What this machine has and what is installed, found without starting JAX or CUDA."""

import argparse
import ctypes
import importlib.util
import os
import tempfile
from importlib import metadata
from pathlib import Path

import jax_intranode
from jax_intranode._src.command_line.options import WrongInput
from jax_intranode._src.group import nvml

# POSIX shared memory, through which the processes of CPU devices communicate.
SHARED_MEMORY = Path("/dev/shm")
NO_GPUS = (
    "NVML finds no GPU that JAX would see: check CUDA_VISIBLE_DEVICES, and the driver's state in "
    "`python -m jax_intranode info`"
)


def driver() -> dict[str, str | None]:
    """The "version" of NVIDIA's driver and the newest "cuda" for it, or the "reason" for none."""
    try:
        with nvml.session() as module:
            version = module.nvmlSystemGetDriverVersion()
            cuda = module.nvmlSystemGetCudaDriverVersion_v2()
    except Exception as error:
        return {"version": None, "cuda": None, "reason": str(error) or type(error).__name__}
    version = version.decode() if isinstance(version, bytes) else version
    return {"version": version, "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}", "reason": None}


def visible_gpus() -> int:
    """The number of GPUs that CUDA programs see here; 0 where NVML cannot be used."""
    try:
        with nvml.session() as module:
            count = int(module.nvmlDeviceGetCount())
    except Exception:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # NVML ignores it
    if visible is None:
        return count
    names = [name.strip() for name in visible.split(",")]
    for end in ("", "-1"):  # CUDA sees those before the first that it does not know
        if end in names:
            names = names[: names.index(end)]
    return min(count, len(names)) if count else 0


def chosen_platform(asked: str) -> str:
    """Returns "cpu" or "gpu": what was asked for, or for "auto" what JAX would use."""
    if asked != "auto":
        return asked
    return "gpu" if os.environ.get("JAX_PLATFORMS") != "cpu" and visible_gpus() else "cpu"


def platform_and_devices(arguments: argparse.Namespace, *, fewest: int = 1) -> tuple[str, int]:
    """Returns the platform and the number of devices that --platform and --devices ask for.

    Args:
        fewest: the least number of devices.

    Raises:
        WrongInput: there are not as many.
    """
    gpus, platform = visible_gpus(), chosen_platform(arguments.platform)
    if platform == "cpu":
        return platform, arguments.devices or 2
    if not gpus:
        raise WrongInput(f"--platform gpu: {NO_GPUS}")
    devices = arguments.devices or gpus
    if devices > gpus:
        raise WrongInput(
            f"this node has {gpus} visible GPUs, not {devices}: choose --devices {gpus} or less"
        )
    if devices < fewest:
        otherwise = "choose --platform cpu" if arguments.platform == "auto" else "make more visible"
        raise WrongInput(
            f"a group has {fewest} or more GPUs; {gpus} are visible, and {devices} are asked for: "
            f"{'choose --devices' if gpus >= fewest else otherwise}"
        )
    return platform, devices


def has_one_gpu() -> bool:
    """Whether the ranks of a job have to share a GPU (`launcher.sharing_env`)."""
    return visible_gpus() == 1


def load() -> tuple[float, int]:
    """How many programs run on this machine, and how many cores this process may use."""
    return os.getloadavg()[0], len(os.sched_getaffinity(0))


def free_shared_memory() -> int:
    """Bytes of shared memory that are free. Raises OSError if there is none."""
    stats = os.statvfs(SHARED_MEMORY)
    return stats.f_bavail * stats.f_frsize


def problem_of_shared_memory() -> str | None:
    """Why processes cannot share memory; None if they can."""
    try:
        free = free_shared_memory()
        with tempfile.TemporaryFile(dir=SHARED_MEMORY):
            pass
    except OSError as error:
        return f"{SHARED_MEMORY} cannot be written: {error.strerror}"
    return f"{SHARED_MEMORY} is full" if free == 0 else None


def version_of(distribution: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def loaded_nccl() -> str | None:
    """The version of the NCCL library in this process; None if it has loaded none."""
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def has_native_module(name: str) -> bool:
    """Whether there is a native module "_host" or "_cuda", whether or not it can be loaded."""
    return importlib.util.find_spec(f"jax_intranode.{name}") is not None


def versions() -> str:
    """The versions in one line."""
    kernels = f"{'with' if has_native_module('_cuda') else 'without'} CUDA kernels"
    parts = [f"jax_intranode {jax_intranode.__version__} ({kernels})"]
    parts += [f"{name} {version_of(name) or 'not installed'}" for name in ("jax", "jaxlib")]
    return ", ".join(parts)
