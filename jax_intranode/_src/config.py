"""The environment variables of the package: names, types, defaults and meanings.

Importing the package checks them; the values are read once, at first use. All processes of a
program need the same values of the variables in `Config`; the rendezvous compares them.
"""

import difflib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax_intranode._src import table

_log = logging.getLogger("jax_intranode")

_PREFIX = "JAX_INTRANODE_"
# What a launcher sets for each rank (launcher.py): its rank, the number of ranks, the address of
# rank 0's coordination service, and which devices it uses, as numbers with commas between them.
RANK = _PREFIX + "RANK"
WORLD_SIZE = _PREFIX + "WORLD_SIZE"
COORDINATOR = _PREFIX + "COORDINATOR"
LOCAL_DEVICES = _PREFIX + "LOCAL_DEVICES"
# Read elsewhere: by the build (pyproject.toml: whether and by which compiler to build the CUDA
# kernels) and by the tests (fail instead of skipping if there are fewer GPUs).
_READ_ELSEWHERE = ("CUDA", "CUDA_WHEELS", "REQUIRE_GPUS")

_TOPOLOGIES = ("fully_connected", "hybrid_cube_mesh", "unknown")
ALGORITHMS = ("auto", *table.PSUM_ALGORITHMS, "lax")


@dataclass(frozen=True)
class Config:
    """The values in force.

    Attributes:
        disable: JAX_INTRANODE_DISABLE, 0 or 1 (default 0). 1: every operation falls back to
            ``jax.lax``.
        topology: JAX_INTRANODE_TOPOLOGY: fully_connected, hybrid_cube_mesh or unknown. Assumes
            this shape of the NVLinks instead of asking NVML. For tests.
        slab_mib: JAX_INTRANODE_SLAB_MIB, MiB of each device's slab, the memory that peers write
            into, for all communicators together (default 392 on GPUs, 8 on the CPU).
        ring_mib: JAX_INTRANODE_RING_MIB, MiB of each GPU's ring buffer, through which the rows and
            products of collective matmuls travel (default 512). 0: they are not overlapped.
        timeout_s: JAX_INTRANODE_TIMEOUT_S, seconds (default 300). How long a rank waits for its
            peers, in the rendezvous and in each operation, before it raises an error.
        algorithm: JAX_INTRANODE_ALGORITHM: auto, one_shot, two_shot or lax (default auto). Uses
            this algorithm wherever it fits, instead of selecting by size.
        strict: JAX_INTRANODE_STRICT, 0 or 1 (default 0). 1: what is not accelerated raises an
            error, unless selection prefers ``jax.lax``. See `is_strict`.
    """

    disable: bool = False
    topology: str | None = None
    slab_mib: int | None = None
    ring_mib: int = 512
    timeout_s: float = 300.0
    algorithm: str = "auto"
    strict: bool = False

    @property
    def is_strict(self) -> bool:
        """Whether fallbacks are errors: not where the other variables ask for ``jax.lax``."""
        return self.strict and not self.disable and self.algorithm != "lax"

    def ring_bytes(self, platform: str) -> int:
        """Bytes of a device's ring buffer on a platform."""
        return 0 if platform == "cpu" else self.ring_mib << 20

    def slab_bytes(self, platform: str) -> int:
        """Bytes of a device's slab on a platform."""
        return (self.slab_mib or (8 if platform == "cpu" else 392)) << 20


def _choice(name: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise ValueError(f"{name}={text!r}: use one of {', '.join(allowed)}.")
    return text


def _positive(name: str, text: str, kind: type) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value <= 10**9:
        what = "integer" if kind is int else "number"
        raise ValueError(f"{name}={text!r}: use a positive {what}, at most 10**9.")
    return value


# For each field of Config, the function that turns its variable's name and text into a value. The
# keys are the variables' names without the prefix.
_READERS: dict[str, Callable[[str, str], Any]] = {
    "DISABLE": lambda name, text: _choice(name, text, ("0", "1")) == "1",
    "TOPOLOGY": lambda name, text: _choice(name, text, _TOPOLOGIES),
    "SLAB_MIB": lambda name, text: int(_positive(name, text, int)),
    "RING_MIB": lambda name, text: 0 if text == "0" else int(_positive(name, text, int)),
    "TIMEOUT_S": lambda name, text: _positive(name, text, float),
    "ALGORITHM": lambda name, text: _choice(name, text, ALGORITHMS),
    "STRICT": lambda name, text: _choice(name, text, ("0", "1")) == "1",
}


def parse(environ: Mapping[str, str]) -> Config:
    """Reads the variables.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    values = {}
    for name, reader in _READERS.items():
        text = environ.get(_PREFIX + name, "")
        if text:
            values[name.lower()] = reader(_PREFIX + name, text)
    return Config(**values)


def check(environ: Mapping[str, str]) -> None:
    """Logs one warning for each variable with our prefix that nothing reads.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    parse(environ)
    ours = [_PREFIX + name for name in (*_READERS, *_READ_ELSEWHERE)]
    known = (*ours, RANK, WORLD_SIZE, COORDINATOR, LOCAL_DEVICES)
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            # Compared without the prefix, which makes any two names look alike.
            near = difflib.get_close_matches(
                name.removeprefix(_PREFIX), [k.removeprefix(_PREFIX) for k in known], cutoff=0.5
            )
            meant = " or ".join(_PREFIX + k for k in near) or ", ".join(ours)
            _log.warning("%s is set, but no such variable exists. Did you mean %s?", name, meant)


@functools.cache
def get() -> Config:
    """The values in force in this process."""
    return parse(os.environ)
