"""The settings of a measurement, which the parent process sends to the ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jax_intranode._src.command_line.bench.operations import MATMULS, Shape
from jax_intranode._src.command_line.launcher.runs import Devices
from jax_intranode._src.command_line.options import WrongInput

# Versions of a program.
WAYS = ("ours", "lax", "unedited", "none")


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement.

    Attributes:
        name: a key of OPERATIONS or MATMULS; of programs (tools/bench.py) one or several.
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
        ways: which versions of a program to run; see tools/bench_programs/measure.py.
        lax_tuned: p50, p99 and wrong elements of each row of jax.lax with XLA's flags tuned.
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
    plan: dict[str, Any] | None = None
    settle_ms: int = 0
    ways: list[str] = field(default_factory=lambda: list(WAYS))
    lax_tuned: list[list[float | None]] = field(default_factory=list)

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


# Shapes of collective matmuls.

# Of a transformer's layer: the widths of activations and of keys (or values), and inside the MLP.
_MODELS = {
    "llama-8b": (4096, 1024, 14336),
    "llama-70b": (8192, 1024, 28672),
    "llama-405b": (16384, 1024, 53248),
}
_SEQUENCE = 8192
_SWEEP = (512, 2048, 8192, 32768)

# The same for any number of devices: N or K is that of one device.
_REFERENCE_SUMS = [
    Shape(32768, 2048, 8192),
    Shape(8192, 3584, 8192),
    Shape(8192, 1024, 8192),
    Shape(4096, 1024, 28672),
]
_REFERENCE = {
    "all_gather_matmul": [
        Shape(32768, 16384, 8192),
        Shape(32768, 16384, 1024),
        Shape(8192, 8192, 8192),
        Shape(8192, 8192, 7168),
        Shape(8192, 8192, 1024),
        Shape(8192, 4096, 1792),
        Shape(4096, 8192, 3584),
    ],
    "matmul_reduce_scatter": _REFERENCE_SUMS,
    "matmul_all_reduce": _REFERENCE_SUMS,
}

PRESETS = ("reference", *_MODELS, "ddlb", "sweep", "tiny")


def parse_shapes(text: str) -> list[Shape]:
    """Returns the shapes that a text such as "8192,4096,1792;4096,8192,3584" means."""
    shapes = []
    for part in text.split(";"):
        numbers = [number.strip() for number in part.split(",")]
        if len(numbers) != 3 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
            raise WrongInput(
                f"{part!r} is not M,K,N: three positive integers; separate shapes by semicolons"
            )
        shapes.append(Shape(*map(int, numbers)))
    return list(dict.fromkeys(shapes))


def of_presets(names: Iterable[str], operation: str, devices: int) -> list[Shape]:
    """Returns the shapes of presets, each once."""
    gathers = MATMULS[operation].gathers
    shapes: list[Shape] = []

    def add(name: str, m: int, k: int, n: int) -> None:
        """Adds a matmul: a device has columns of w after an all-gather, otherwise rows."""
        whole = n if gathers else k
        part, rest = divmod(whole, devices)
        if rest:
            raise WrongInput(
                f"preset {name}: {devices} devices can't share {whole} columns evenly; choose "
                "--devices from 1, 2, 4 and 8, or give --shapes"
            )
        shapes.append(Shape(m, k, part) if gathers else Shape(m, part, n))

    for name in names:
        if name == "reference":
            shapes += _REFERENCE[operation]
        elif name == "tiny":
            shapes += [Shape(16 * devices, 32, 48), Shape(64 * devices, 64, 32)]
        elif name == "ddlb":
            add(name, 32768, 16384, 8192 * (devices if gathers else 1))
        else:
            for m in _SWEEP if name == "sweep" else (_SEQUENCE,):
                for model in _MODELS.values() if name == "sweep" else (_MODELS[name],):
                    for k, n in _layer(*model, gathers):
                        add(name, m, k, n)
    return list(dict.fromkeys(shapes))


def _layer(width: int, keys: int, inner: int, gathers: bool) -> list[tuple[int, int]]:
    """Returns K and N of a layer's matmuls before they are divided among devices.

    With an all-gather: query, key and value together, gate and up together. Otherwise: the
    attention's output, and down.
    """
    if gathers:
        return [(width, width + 2 * keys), (width, 2 * inner)]
    return [(width, width), (inner, width)]
