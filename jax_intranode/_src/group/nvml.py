"""NVML, the management library of NVIDIA's driver: a session with it, or the reason for none."""

import contextlib
from collections.abc import Iterator
from types import ModuleType


class Unavailable(Exception):
    """NVML cannot be used. The message says why."""


@contextlib.contextmanager
def session() -> Iterator[ModuleType]:
    """Gives the module `pynvml` with NVML initialised.

    Raises Unavailable if there is no `pynvml`, no driver, or no permission to ask it.
    """
    try:
        import pynvml  # here, so that `import jax_intranode` does not need it
    except ImportError as error:
        raise Unavailable(
            f"the Python package nvidia-ml-py cannot be imported ({error}): "
            "pip install nvidia-ml-py"
        ) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unavailable(f"NVML does not start: {error or type(error).__name__}") from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()  # NVML counts its users: another one in this process stays
