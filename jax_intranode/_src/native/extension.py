"""Loads the native modules and registers their FFI handlers.

``_host`` serves CPU devices, ``_cuda`` serves GPUs. Both have the same functions.
"""

import importlib.util
import pathlib
from types import ModuleType
from typing import Any

import jax

from jax_intranode._src.native import ffi_headers


def _check_ffi_version(built: tuple[int, int]) -> None:
    # A runtime that gets handlers newer than itself refuses to start its backend.
    runtime = ffi_headers.version_in(pathlib.Path(jax.ffi.include_dir()))
    if built > runtime:
        raise ImportError(
            f"jax_intranode was built against FFI headers {built[0]}.{built[1]}, but the installed "
            f"jaxlib has {runtime[0]}.{runtime[1]}. Install a newer jaxlib, or build jax_intranode "
            "with the jaxlib that its pyproject.toml names."
        )


def _import() -> dict[str, ModuleType]:
    modules = {}
    for platform, name in (("cpu", "jax_intranode._host"), ("gpu", "jax_intranode._cuda")):
        if importlib.util.find_spec(name) is not None:
            modules[platform] = importlib.import_module(name)
    if "cpu" not in modules:
        raise ImportError(
            "jax_intranode is imported from its source tree, where its native modules are not "
            "built. Run `pip install .` and leave that directory, or `pip install -e .`."
        )
    return modules


def _load() -> dict[str, ModuleType]:
    modules = _import()
    # Checked before any handler is registered: a registration can't be undone.
    _check_ffi_version(max(module.FFI_API_VERSION for module in modules.values()))
    for platform, module in modules.items():
        ffi_platform = {"cpu": "cpu", "gpu": "CUDA"}[platform]
        for name, handlers in module.registrations().items():
            jax.ffi.register_ffi_target(name, handlers, platform=ffi_platform)
    return modules


_modules = _load()


def _on_duration(event: str, duration_secs: float, **kwargs: str | int) -> None:
    # The numbers of CPU call sites start anew in each program (xla_ffi/ffi/site_numbers.h).
    if event == "/jax/core/compile/backend_compile_duration":
        _modules["cpu"].end_compilation()


jax.monitoring.register_event_duration_secs_listener(_on_duration)


def module(platform: str) -> Any:
    """The native module for a device platform ("cpu" or "gpu"); None if it was not built."""
    return _modules.get(platform)


def handler_calls() -> int:
    """The number of times that XLA has called one of our handlers in this process.

    A call that is replayed from a CUDA graph does not count: XLA does not call the handler.
    """
    return sum(m.handler_calls() for m in _modules.values())
