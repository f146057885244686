"""What the parent process asks of the machine, without starting JAX or CUDA."""

import os


def gpus_and_driver() -> tuple[int, str | None]:
    """Returns the number of NVIDIA GPUs that JAX would see, and the driver's version.

    Asks NVML, because this process must start neither JAX nor CUDA.
    """
    try:
        import pynvml
    except ImportError:
        return 0, None
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0, None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # NVML ignores this variable.
        count = min(count, len([name for name in visible.split(",") if name.strip()]))
    return count, driver


def chosen_platform(asked: str, gpus: int) -> str:
    """Returns "cpu" or "gpu": what was asked for, or for "auto" what JAX would use."""
    if asked != "auto":
        return asked
    return "gpu" if gpus and os.environ.get("JAX_PLATFORMS") != "cpu" else "cpu"


def ranks_share_a_gpu(platform: str) -> bool:
    """Whether processes have to share the machine's only GPU (`launcher.sharing_env`)."""
    return platform == "gpu" and gpus_and_driver()[0] == 1
