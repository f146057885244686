"""What is to be measured: what the parent process tells the ranks."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp

PROCESS_PER_DEVICE = "process-per-device"
SINGLE_PROCESS = "single-process"
MODES = (PROCESS_PER_DEVICE, SINGLE_PROCESS)


class Shape(NamedTuple):
    """A product [m, k] x [k, n] as one device computes it, whatever is sent before or after it."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        """The shape as text."""
        return f"{self.m} x {self.k} x {self.n}"


@dataclass(frozen=True)
class Settings:
    """What a rank needs to know; travels to it as JSON.

    Attributes:
        name: one of OPERATIONS, MATMULS or PROGRAMS.
        sizes: bytes of each measurement, as `operations.Operation` counts them.
        leaves: arrays that these bytes are cut into and that one call takes as a pytree.
        dtypes: names of the dtypes, all of which are measured at each size.
        iterations: timed repetitions.
        warmup_iterations: untimed repetitions before them.
        chain: calls in a row; None to choose by platform and size.
        mode: one of MODES.
        devices: the number of devices that take part.
        platform: "cpu" or "gpu".
        shapes: M, K and N of each measurement of a collective matmul.
        backward: whether its backward pass is measured.
        plan: the forced plan of an overlapped matmul, as the fields of `overlap.Plan`; None to let
            the model choose.
        settle_ms: how long a collective matmul is called, untimed, right before each of its
            repetitions; a program for one more repetition, if at all.
    """

    name: str
    sizes: list[int]
    leaves: int
    dtypes: list[str]
    iterations: int
    warmup_iterations: int
    chain: int | None
    mode: str
    devices: int
    platform: str
    shapes: list[list[int]] = field(default_factory=list)
    backward: bool = False
    plan: dict[str, int] | None = None
    settle_ms: int = 0

    def to_json(self) -> str:
        """The settings as text."""
        return json.dumps(dataclasses.asdict(self))

    def measurements(self) -> list[tuple[str, int]]:
        """The dtypes and element counts to measure: those that n devices can share evenly."""
        counts = [
            (name, size // jnp.dtype(name).itemsize) for name in self.dtypes for size in self.sizes
        ]
        return [
            (name, count)
            for name, count in counts
            if count >= self.leaves and count % self.devices == 0
        ]

    def matmuls(self) -> list[tuple[str, Shape]]:
        """The dtypes and shapes of collective matmuls to measure."""
        return [(name, Shape(*shape)) for shape in self.shapes for name in self.dtypes]


def from_json(text: str) -> Settings:
    """The settings that `to_json` gave."""
    return Settings(**json.loads(text))
