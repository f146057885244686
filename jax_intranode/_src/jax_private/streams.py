"""XLA's stream for collectives.

0.10.2 and later: jax.experimental.compute_on. Its function is `compute_on2` until 0.11.0, where
`compute_on` is a context manager, and `compute_on` later.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import compute_on


def on_collective_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run on the stream on which XLA's own collectives overlap with other work.

    XLA starts it as early and needs its results as late as the program allows.
    """
    place = getattr(compute_on, "compute_on2", compute_on.compute_on)
    placed: Callable[..., Any] = place(
        function,
        compute_type="gpu_stream:collective",
        out_memory_spaces=jax.memory.Space.Device,
    )
    return placed
