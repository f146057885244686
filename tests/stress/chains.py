"""What each rank runs: random programs, one after the other, until rank 0 says stop."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cases
import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jax_intranode
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.command_line.launcher.all_ranks import Rank
from jax_intranode._src.selection import config
from stress import calls
from stress.calls import Call, Seeded

# A life: this many programs between two calls of shutdown(). They share a few meshes, because the
# slab has room for eight partitions of a set of devices.
PROGRAMS_OF_A_LIFE = 12
# Different data of a program; stale ones would be seen.
_DATA = 4
# The most elements of an operand, or of a part for each rank, and the most columns of a matmul.
# On CPU devices jax.lax is faster from a few KB on.
_FEW = {"cpu": (1 << 9, 64), "gpu": (1 << 14, 512)}
_MANY = {"cpu": (1 << 13, 64), "gpu": (1 << 18, 2048)}
# The same of a run of few operations, by their binary logarithm: sizes of all magnitudes.
_LOGARITHM = {"cpu": (2, 13), "gpu": (4, 24)}


@dataclass(frozen=True)
class Program:
    """A random program."""

    number: int  # in the run
    shape: tuple[int, ...]  # of its mesh
    order: tuple[int, ...]  # the devices of the mesh, by their place in the job
    calls: tuple[Call, ...]
    unedited: bool  # calls `jax.lax` under `accelerate()`, or else our functions
    check_vma: bool
    algorithm: str  # JAX_INTRANODE_ALGORITHM of its life
    rounds: int
    delays: bool  # ranks pause now and then before they run it

    def mesh(self) -> Mesh:
        return cases.make_mesh(self.shape, ("x", "y", "z")[: len(self.shape)], self.order)


def layouts(seed: int, life: int, devices: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes and orders of devices of a life's meshes, from which its programs choose."""
    generator = np.random.default_rng((seed, 1, life))
    factors = [k for k in range(2, devices) if devices % k == 0]
    shapes: list[tuple[int, ...]] = [(devices,)]
    if factors:
        first = int(generator.choice(factors))
        shapes.append((2, 2, 2) if devices == 8 and life % 3 == 0 else (first, devices // first))
    if devices > 2:
        shapes.append((int(generator.integers(2, devices)),))
    orders = []
    for shape in shapes:
        order = np.arange(math.prod(shape))
        orders.append(tuple(map(int, generator.permutation(order) if life % 2 else order)))
    return list(zip(shapes, orders, strict=True))


def make(
    seed: int, number: int, devices: int, platform: str, operations: Sequence[str] = ()
) -> Program:
    """Makes the program of this number, of some operations or all; arrays are larger on GPUs."""
    life = number // PROGRAMS_OF_A_LIFE
    choose = Seeded(seed, 3, number)
    shape, order = choose.one_of(layouts(seed, life, devices))
    axes = ("x", "y", "z")[: len(shape)]
    mesh: Any = jax.sharding.AbstractMesh(shape, axes)
    elements, columns = choose.one_of((_FEW, _FEW, _MANY))[platform]
    most = dict.fromkeys(calls.OPERATIONS, elements)
    if operations:
        most = dict.fromkeys(operations, 1 << choose.integer(*_LOGARITHM[platform]))
        most |= {name: columns for name in operations if name in calls.COMPARED}
    elif choose.integer(1, 4) == 1:
        most |= dict.fromkeys(calls.COMPARED, columns)
    check_vma = choose.integer(1, 5) < 3
    # Under check_vma JAX inserts sums, and so other transposes.
    ways = [w for w in calls.WAYS if not check_vma or w not in ("gradient", "checkpoint")]
    made = tuple(
        calls.random_call(choose, mesh, most, ways=ways, leaves=3)
        for _ in range(choose.integer(2, 8))
    )
    # On GPUs XLA's own ragged_all_to_all takes no complex128, and says nothing about writes that
    # overlap. An unedited program has it where ours was not measured.
    has_ragged = any(call.operation == "ragged_all_to_all" for call in made)
    return Program(
        number=number,
        shape=shape,
        order=order,
        calls=made,
        unedited=choose.integer(1, 3) == 1 and not (platform == "gpu" and has_ragged),
        check_vma=check_vma,
        algorithm=Seeded(seed, 2, life).one_of(("auto", "auto", "one_shot", "two_shot")),
        rounds=choose.one_of((10, 40, 150)) * (1 if platform == "cpu" else 4),
        delays=choose.integer(1, 3) == 1,
    )


def no_counts() -> dict[str, int]:
    """The counts of a run before its first program."""
    return dict.fromkeys(("programs", "runs", "operations", "elements"), 0)


def run(
    rank: Rank,
    seed: int,
    seconds: float,
    program: int | None = None,
    operations: Sequence[str] = (),
) -> dict[str, int]:
    """Runs programs until the time is over, and returns the counts of all ranks together.

    Rank 0 tells when a program begins, and all counts so far when it has ended.

    Args:
        program: the number of the only program to run; None to run one after the other.
        operations: what the programs call; none for all.
    """
    rank.mesh()  # checks the platform
    jax.config.update("jax_enable_x64", True)
    counts, end = no_counts(), time.monotonic() + seconds
    number = program or 0
    life = None
    while True:
        # Rank 0 decides for all: clocks differ.
        over = time.monotonic() >= end or (program is not None and counts["programs"] > 0)
        name = f"chains/{number}"
        if all_ranks.values(f"{name}/over", float(over))[0]:
            return counts
        made = make(seed, number, rank.devices.size, rank.devices.platform, operations)
        if number // PROGRAMS_OF_A_LIFE != life:
            life = number // PROGRAMS_OF_A_LIFE
            # All communicators end. The programs of the new life make their own.
            jax_intranode.shutdown()
            jax.clear_caches()
            os.environ["JAX_INTRANODE_ALGORITHM"] = made.algorithm
            config.get.cache_clear()
        rank.begin(str(made))
        before = jax_intranode.usage_counter()
        elements = run_program(made, seed)
        ours = jax_intranode.usage_counter() - before
        counts["programs"] += 1
        counts["runs"] += made.rounds
        counts["operations"] += all_ranks.total(f"{name}/operations", ours)
        counts["elements"] += all_ranks.total(f"{name}/elements", elements)
        rank.tell(counts=counts)
        number += 1


class Wrong(AssertionError):
    """A value is wrong."""


def run_program(program: Program, seed: int) -> int:
    """Runs a program in all its rounds.

    Returns:
        The number of elements on which the carries of this process's devices depend.

    Raises:
        Wrong: a carry is wrong.
    """
    mesh = program.mesh()
    own = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
    if not own:
        return 0
    lib = lax if program.unedited else jax_intranode
    setting = jax_intranode.accelerate if program.unedited else contextlib.nullcontext
    todo: Any = program.calls
    with setting():
        f = calls.chain(todo, mesh, lib, program.check_vma)
        data = [calls.random_carries(mesh, seed, 4, program.number, k) for k in range(_DATA)]
        if _has_sums_of_lax(f, np.int32(0), data[0][1]):
            todo = [dataclasses.replace(call, small=True) for call in todo]
            f = calls.chain(todo, mesh, lib, program.check_vma)
        expected = [calls.expected_of_chain(todo, mesh, d[0], k) for k, d in enumerate(data)]
        ours = jax.jit(f)
        pause = np.random.default_rng((seed, 5, program.number, jax.process_index()))
        plan = Seeded(seed, 6, program.number)  # the same on all ranks
        turn = 0
        while turn < program.rounds:
            results = []
            for _ in range(min(plan.integer(1, 3), program.rounds - turn)):
                if program.delays and pause.random() < 0.3:
                    time.sleep(pause.uniform(0, 0.005))
                k = plan.integer(0, _DATA - 1)
                results.append((k, ours(data[k][1], np.int32(k))))
            jax.block_until_ready(results)
            turn += len(results)
            for k, result in results:
                for shard in result.addressable_shards:
                    unlike = np.asarray(shard.data) != expected[k][shard.index]
                    if unlike.any():
                        first = int(np.argwhere(unlike)[:, 1].min())
                        raise Wrong(f"{unlike.sum()} words after call {first} of {program}")
    elements = sum(math.prod(call.shape) for call in todo)
    return program.rounds * own * elements


def _has_sums_of_lax(f: Any, turn: Any, carries: Any) -> bool:
    """Whether a sum of floats falls back to lax, whose order of summation is not known."""
    return any(
        call.algorithm == "lax" and call.operation in calls.SUMS and call.dtype in calls.FLOATS
        for call in jax_intranode.explain(f)(carries, turn)
    )
