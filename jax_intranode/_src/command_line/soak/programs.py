"""Random programs: a seed and a number always make the same one, on every rank."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

# Sums of floats round. Everything else is exact.
FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
COPIED = ("int16", "uint16")  # only what copies takes these
MATMUL_DTYPES = ("float32", "bfloat16", "float16")

SUMS = ("psum", "pmean", "psum_tree", "psum_scatter")
GATHERS = ("all_gather", "all_to_all")
MATMULS = (
    "matmul_all_reduce",
    "mlp",
    "mlp_of_sequences",
    "two_matrices",
    "column_and_row_parallel",
)
LOCAL = ("negate", "roll", "reverse", "negate_odd_ranks")
WRAPPERS = ("jit", "checkpoint", "scan", "fori_loop", "cond", "vmap")

# A life: this many programs between two calls of shutdown(). They share a few meshes, because the
# slab has room for eight partitions of a set of devices.
PROGRAMS_OF_A_LIFE = 12


@dataclass(frozen=True)
class Step:
    """One step of a program.

    Attributes:
        name: one of SUMS, GATHERS, MATMULS, LOCAL, or "delay".
        axes: the mesh axes of a collective, in rank order.
        number: says which variant of the step it is.
    """

    name: str
    axes: tuple[str, ...] = ()
    number: int = 0

    def __str__(self) -> str:
        """Returns the step as text."""
        return f"{self.name}({', '.join([*self.axes, f'#{self.number}'])})"


@dataclass(frozen=True)
class Wrapped:
    """Steps inside a transformation or control flow, one of WRAPPERS."""

    wrapper: str
    steps: "tuple[Step | Wrapped, ...]"

    def __str__(self) -> str:
        """Returns the steps as text."""
        return f"{self.wrapper}[{' '.join(map(str, self.steps))}]"


Steps = tuple[Step | Wrapped, ...]


@dataclass(frozen=True)
class Layout:
    """The devices of a mesh: the first of the job, in some order, and their shape."""

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh's axes."""
        return ("x", "y", "z")[: len(self.shape)]


@dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
        seed: the seed of the run.
        number: the number of the program in the run.
        layout: its mesh.
        dtype: the dtype of its array.
        rows: rows of a device's array.
        columns: columns of a device's array.
        steps: what it does, in this order.
        unedited: whether it calls `jax.lax` under `accelerate()`, or else our functions.
        check_vma: the argument of shard_map.
        gradient: whether it also computes the gradient.
        integers: whether its data are small integers, so that nothing rounds.
        algorithm: JAX_INTRANODE_ALGORITHM of its life.
        rounds: how often it runs, each time with other data.
        delays: whether ranks pause now and then before they run it.
    """

    seed: int
    number: int
    layout: Layout
    dtype: str
    rows: int
    columns: int
    steps: Steps
    unedited: bool
    check_vma: bool
    gradient: bool
    integers: bool
    algorithm: str
    rounds: int
    delays: bool

    def __str__(self) -> str:
        """Returns the program as text."""
        n = math.prod(self.layout.shape)
        facts = [
            f"{self.dtype}[{self.rows}, {self.columns}] on each device of a mesh "
            f"{self.layout.shape} of {list(self.layout.order)[:n]}",
            "jax.lax under accelerate()" if self.unedited else "functions of jax_intranode",
            f"check_vma={self.check_vma}",
            f"JAX_INTRANODE_ALGORITHM={self.algorithm}",
        ]
        facts += ["with gradient"] * self.gradient + ["small integers"] * self.integers
        facts += ["delays"] * self.delays
        return f"program {self.number}: {' '.join(map(str, self.steps))}; {', '.join(facts)}"


def has(steps: Steps, names: tuple[str, ...]) -> bool:
    """Whether one of these steps, also inside wrappers, has one of these names."""
    return any(has(s.steps, names) if isinstance(s, Wrapped) else s.name in names for s in steps)


def without_pmean(program: Program) -> Program:
    """Returns the program with small integers as data, and psum in the place of pmean."""

    def changed(steps: Steps) -> Steps:
        return tuple(
            dataclasses.replace(s, steps=changed(s.steps))
            if isinstance(s, Wrapped)
            else dataclasses.replace(s, name="psum" if s.name == "pmean" else s.name)
            for s in steps
        )

    return dataclasses.replace(program, steps=changed(program.steps), integers=True)


def layouts(seed: int, life: int, devices: int, platform: str) -> list[Layout]:
    """Returns the meshes of a life, from which its programs choose."""
    generator = np.random.default_rng((seed, 1, life))
    found = [Layout((devices,), _order(generator, devices))]
    factors = [k for k in range(2, devices) if devices % k == 0]
    if factors:
        first = int(generator.choice(factors))
        shape: tuple[int, ...] = (first, devices // first)
        if devices == 8 and generator.integers(3) == 0:
            shape = (2, 2, 2)
        found.append(Layout(shape, _order(generator, devices)))
    if devices > 2 and (platform == "cpu" or generator.integers(3) == 0):
        fewer = int(generator.integers(2, devices))
        found.append(Layout((fewer,), _order(generator, fewer)))
    return found


def _order(generator: np.random.Generator, devices: int) -> tuple[int, ...]:
    order = generator.permutation(devices) if generator.integers(2) else np.arange(devices)
    return tuple(int(k) for k in order)


def algorithm_of(seed: int, life: int) -> str:
    """Returns the value of JAX_INTRANODE_ALGORITHM in a life."""
    choices = ("auto", "auto", "one_shot", "two_shot")
    return choices[int(np.random.default_rng((seed, 2, life)).integers(len(choices)))]


def make(seed: int, number: int, devices: int, platform: str) -> Program:
    """Makes the program of this number.

    Args:
        platform: "cpu" or "gpu"; arrays are larger on GPUs.
    """
    life = number // PROGRAMS_OF_A_LIFE
    generator = np.random.default_rng((seed, 3, number))

    def chance(p: float) -> bool:
        return bool(generator.random() < p)

    def choice(values: Any) -> Any:
        return values[int(generator.integers(len(values)))]

    layout = choice(layouts(seed, life, devices, platform))
    world = math.prod(layout.shape)
    matmuls = chance(0.25)
    kinds: tuple[str, ...]
    if matmuls:
        dtype, kinds = choice(MATMUL_DTYPES), (*MATMULS, *MATMULS, "psum", "psum_scatter")
    elif chance(0.1):
        dtype, kinds = choice(COPIED), GATHERS
    else:
        dtype = choice((*FLOATS * 4, *INTEGERS))
        kinds = (*SUMS, *GATHERS) if dtype in FLOATS else ("psum", "psum_tree", "psum_scatter",
                                                          *GATHERS)  # fmt: skip
    gradient = dtype in FLOATS and chance(0.4)
    # Bits are known only where the program has all sums: JAX inserts none without check_vma.
    check_vma = chance(0.4)
    integers = matmuls or (check_vma and gradient)
    if integers:
        kinds = tuple(kind for kind in kinds if kind != "pmean")

    def axes() -> tuple[str, ...]:
        names = [str(name) for name in generator.permutation(layout.axes)]
        return tuple(names[: int(generator.integers(1, len(names) + 1))])

    def step(collective: bool) -> Step:
        if collective:
            return Step(choice(kinds), axes(), int(generator.integers(8)))
        if not gradient and chance(0.25):
            return Step("delay", (), int(generator.integers(1, 200)))
        return Step(choice(LOCAL), (), int(generator.integers(8)))

    def some(depth: int) -> Steps:
        found: list[Step | Wrapped] = []
        for _ in range(int(generator.integers(1, 4))):
            if depth < 2 and chance(0.3):
                found.append(Wrapped(choice(WRAPPERS), some(depth + 1)))
            else:
                found.append(step(chance(0.75)))
        if not has(tuple(found), kinds):
            found.append(step(True))
        return tuple(found)

    rows, columns = _shape(generator, world, dtype, matmuls, platform)
    return Program(
        seed=seed,
        number=number,
        layout=layout,
        dtype=dtype,
        rows=rows,
        columns=columns,
        steps=some(0),
        unedited=chance(0.3),
        check_vma=check_vma,
        gradient=gradient,
        integers=integers,
        algorithm=algorithm_of(seed, life),
        rounds=int(choice((10, 40, 150))) * (1 if platform == "cpu" else 4),
        delays=chance(0.3),
    )


def _shape(
    generator: np.random.Generator, world: int, dtype: str, matmuls: bool, platform: str
) -> tuple[int, int]:
    """Chooses rows, a multiple of twice the world size, and columns."""
    rows = 2 * world * int(generator.integers(1, 4))
    if matmuls:
        # Overlapped matmuls need columns that are multiples of 8, and pay where they are large.
        largest = 64 if platform == "cpu" else 4096
        columns = 8 * int(2 ** generator.uniform(0, math.log2(largest / 8)))
        if platform == "gpu":
            rows *= int(2 ** generator.uniform(0, 7))
        return rows, columns
    itemsize = 2 if dtype in ("bfloat16", "float16") else np.dtype(dtype).itemsize
    # On CPU devices jax.lax is faster from a few KB on, unless the algorithm of psum is forced.
    few, many = (2 << 10, 32 << 10) if platform == "cpu" else (64 << 10, 8 << 20)
    largest = (few if generator.random() < 0.7 else many) // (rows * itemsize)
    columns = max(1, int(2 ** generator.uniform(0, math.log2(max(2, largest)))))
    return rows, columns
