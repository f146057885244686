"""The settings of a measurement, which the parent process sends to the ranks."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp

from jax_intranode._src.command_line.launcher.runs import Devices


class Shape(NamedTuple):
    """The shape of the product [m, k] x [k, n] that one device computes."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        """Returns the shape as text."""
        return f"{self.m} x {self.k} x {self.n}"


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement.

    Attributes:
        name: a key of OPERATIONS, MATMULS or PROGRAMS.
        mode: one of `MODES` (launcher/runs.py).
        devices: the number of devices.
        platform: "cpu" or "gpu".
        dtypes: names of the dtypes. All of them are measured at each size.
        sizes: bytes of each measurement of a collective, as defined in `operations.Operation`.
        leaves: the number of arrays that one call takes as a pytree; a size is that of all of them
            together.
        iterations: the number of timed repetitions.
        warmup_iterations: the number of untimed repetitions before them.
        chain: the number of calls in a chain; None to choose it by platform and size.
        shapes: m, k and n of each measurement of a collective matmul.
        backward: whether to measure the backward pass of a collective matmul.
        plan: the fields of the `Plan` to use; None to choose the fastest plan.
        settle_ms: how long a collective matmul runs, untimed, right before each of its repetitions.
            A program runs for one untimed repetition if this is above 0.
    """

    name: str
    mode: str
    devices: int
    platform: str
    dtypes: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    leaves: int = 1
    iterations: int = 20
    warmup_iterations: int = 5
    chain: int | None = None
    shapes: list[list[int]] = field(default_factory=list)
    backward: bool = False
    plan: dict[str, int] | None = None
    settle_ms: int = 0

    @property
    def job(self) -> Devices:
        """The devices of the ranks."""
        return Devices(self.platform, self.devices, self.mode)

    def measurements(self) -> list[tuple[str, int]]:
        """Returns the dtypes and element counts to measure.

        Sizes that can't be divided evenly among the devices are left out.
        """
        counts = [
            (name, size // jnp.dtype(name).itemsize) for name in self.dtypes for size in self.sizes
        ]
        return [
            (name, count)
            for name, count in counts
            if count >= self.leaves and count % self.devices == 0
        ]

    def matmuls(self) -> list[tuple[str, Shape]]:
        """Returns the dtypes and shapes of collective matmuls to measure."""
        return [(name, Shape(*shape)) for shape in self.shapes for name in self.dtypes]
