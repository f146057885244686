"""Versions of what is installed, found without importing it."""

import importlib.util
from importlib import metadata


def of(distribution: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def has_native_module(name: str) -> bool:
    """Whether there is a native module "_host" or "_cuda", whether or not it can be loaded."""
    return importlib.util.find_spec(f"jax_intranode.{name}") is not None


def line() -> str:
    """The versions in one line."""
    import jax_intranode

    kernels = f"{'with' if has_native_module('_cuda') else 'without'} CUDA kernels"
    parts = [f"jax_intranode {jax_intranode.__version__} ({kernels})"]
    parts += [f"{name} {of(name) or 'not installed'}" for name in ("jax", "jaxlib")]
    return ", ".join(parts)
