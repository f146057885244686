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
