"""The environment variables of the package: names, types, defaults and meanings.

They are read once, at first use. All processes of a program need the same values; the handshake
compares them.
"""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax_intranode._src import select

_PREFIX = "JAX_INTRANODE_"
_TOPOLOGIES = ("fully_connected", "hybrid_cube_mesh", "unknown")
ALGORITHMS = ("auto", *select.PSUM_ALGORITHMS, "lax")


@dataclass(frozen=True)
class Config:
    """The values in force.

    Attributes:
        disable: JAX_INTRANODE_DISABLE, 0 or 1 (default 0). Everything lowers to ``jax.lax``.
        topology: JAX_INTRANODE_TOPOLOGY: fully_connected, hybrid_cube_mesh or unknown. Takes the
            links to be so instead of asking NVML. For tests.
        slab_mib: JAX_INTRANODE_SLAB_MIB, MiB of memory a device that peers write into, for all
            its communicators together (default 392 on GPUs, 8 on the CPU).
        ring_mib: JAX_INTRANODE_RING_MIB, MiB of memory a GPU beside the slab, through which rows of
            collective matmuls travel (default 512). 0 for none: they are not overlapped then.
        timeout_s: JAX_INTRANODE_TIMEOUT_S, seconds (default 300). How long a rank waits for its
            peers, at the first meeting and in each operation, before it raises an error.
        algorithm: JAX_INTRANODE_ALGORITHM: auto, one_shot, two_shot or lax (default auto). Uses
            this algorithm wherever it fits, instead of choosing by size.
    """

    disable: bool = False
    topology: str | None = None
    slab_mib: int | None = None
    ring_mib: int = 512
    timeout_s: float = 300.0
    algorithm: str = "auto"

    def ring_bytes(self, platform: str) -> int:
        """Bytes of a device's ring on a platform."""
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


def parse(environ: Mapping[str, str]) -> Config:
    """Reads the variables.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    readers: dict[str, Callable[[str, str], dict[str, Any]]] = {
        "DISABLE": lambda n, t: {"disable": _choice(n, t, ("0", "1")) == "1"},
        "TOPOLOGY": lambda n, t: {"topology": _choice(n, t, _TOPOLOGIES)},
        "SLAB_MIB": lambda n, t: {"slab_mib": int(_positive(n, t, int))},
        "RING_MIB": lambda n, t: {"ring_mib": 0 if t == "0" else int(_positive(n, t, int))},
        "TIMEOUT_S": lambda n, t: {"timeout_s": _positive(n, t, float)},
        "ALGORITHM": lambda n, t: {"algorithm": _choice(n, t, ALGORITHMS)},
    }
    values: dict[str, Any] = {}
    for name, reader in readers.items():
        text = environ.get(_PREFIX + name, "")
        if text:
            values.update(reader(_PREFIX + name, text))
    return Config(**values)


@functools.cache
def get() -> Config:
    """The values in force in this process."""
    return parse(os.environ)
