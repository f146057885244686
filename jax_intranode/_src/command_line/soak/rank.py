"""The program of each rank: builds, runs and compares random programs until rank 0 says stop."""

import contextlib
import dataclasses
import math
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.command_line.launcher.function_rank import Rank
from jax_intranode._src.command_line.soak import programs, reference, steps
from jax_intranode._src.command_line.soak.programs import Program
from jax_intranode._src.selection import config

# More failures than this are counted, but not described.
_MOST_FAILURES = 5


def run(rank: Rank, seed: int, seconds: float, program: int | None = None) -> dict[str, Any]:
    """Runs programs until the time is over, and returns the counts of all ranks together.

    Rank 0 tells when a program begins, and all counts so far when it has ended.

    Args:
        program: the number of the only program to run; None to run one after the other.
    """
    rank.mesh()  # checks the platform
    jax.config.update("jax_enable_x64", True)
    counts: dict[str, Any] = {
        **dict.fromkeys(("programs", "runs", "operations", "elements", "wrong"), 0),
        "failures": [],
    }
    end = time.monotonic() + seconds
    number = program or 0
    life = None
    while True:
        # Rank 0 decides for all: clocks differ.
        over = time.monotonic() >= end or (program is not None and counts["programs"] > 0)
        name = f"soak/{number}"
        if all_ranks.values(f"{name}/over", float(over))[0]:
            return counts
        if number // programs.PROGRAMS_OF_A_LIFE != life:
            life = number // programs.PROGRAMS_OF_A_LIFE
            _begin_life(seed, life)
        made = programs.make(seed, number, rank.devices.size, rank.devices.platform)
        rank.begin(str(made))
        before = jax_intranode.usage_counter()
        try:
            wrong, elements = run_program(made)
        except BaseException:
            sys.stderr.write(f"This failed: {made}\n")
            raise
        wrong = all_ranks.total(f"{name}/wrong", wrong)
        counts["programs"] += 1
        counts["runs"] += made.rounds
        counts["operations"] += all_ranks.total(
            f"{name}/operations", jax_intranode.usage_counter() - before
        )
        counts["elements"] += all_ranks.total(f"{name}/elements", elements)
        counts["wrong"] += wrong
        if wrong and len(counts["failures"]) < _MOST_FAILURES:
            counts["failures"].append({"program": number, "wrong": wrong, "text": str(made)})
        rank.tell(counts=counts)
        number += 1


def _begin_life(seed: int, life: int) -> None:
    """Ends all communicators. The programs of the new life make their own."""
    jax_intranode.shutdown()
    jax.clear_caches()
    os.environ["JAX_INTRANODE_ALGORITHM"] = programs.algorithm_of(seed, life)
    config.get.cache_clear()


def run_program(program: Program) -> tuple[int, int]:
    """Runs a program in all its rounds.

    Returns:
        The number of wrong elements and of all elements compared, on this process's devices.
    """
    layout = program.layout
    devices = np.array(jax.devices())[list(layout.order)[: math.prod(layout.shape)]]
    mesh = Mesh(
        devices.reshape(layout.shape), layout.axes, axis_types=(AxisType.Auto,) * len(layout.shape)
    )
    if not any(d.process_index == jax.process_index() for d in devices):
        return 0, 0
    lib = steps.LaxMatmuls(lax) if program.unedited else jax_intranode
    setting = jax_intranode.accelerate if program.unedited else contextlib.nullcontext
    data = _operands(program, mesh)
    with setting():
        if not program.integers and _has_sums_of_lax(_sharded(program, mesh, lib), data):
            program = programs.without_pmean(program)
            data = _operands(program, mesh)
        return _repeat(program, mesh, lib, data)


def _has_sums_of_lax(f: Any, data: tuple[Any, ...]) -> bool:
    """Whether a sum of floats falls back to lax, whose order of summation is not known."""
    return any(
        call.algorithm == "lax"
        and call.operation not in programs.GATHERS
        and call.dtype in programs.FLOATS
        for call in jax_intranode.explain(f)(np.int32(0), *data)
    )


def _sharded(program: Program, mesh: Mesh, lib: Any) -> Any:
    """The program as a function of (turn, v, w, ct)."""
    by_device = P(mesh.axis_names)
    return jax.shard_map(
        steps.build(program, lib),
        mesh=mesh,
        in_specs=(P(), by_device, by_device, by_device),
        out_specs=(by_device,) * (4 if program.gradient else 2),
        check_vma=program.check_vma,
    )


def _repeat(program: Program, mesh: Mesh, lib: Any, data: tuple[Any, ...]) -> tuple[int, int]:
    generator = np.random.default_rng((program.seed, 4, program.number, jax.process_index()))
    plan = np.random.default_rng((program.seed, 5, program.number))  # the same on all ranks
    f = _sharded(program, mesh, lib)
    ours = into_poison(f)
    types = jax.eval_shape(f, np.int32(0), *data)
    poison = jax.jit(
        lambda: tuple(_poison(t) for t in types),
        out_shardings=(NamedSharding(mesh, P(mesh.axis_names)),) * len(types),
    )
    compare = jax.jit(_comparison(program, mesh))
    wrong = elements = turn = 0
    while turn < program.rounds:
        burst = min(int(plan.integers(1, 4)), program.rounds - turn)
        results = []
        for k in range(burst):
            if program.delays and generator.random() < 0.3:
                time.sleep(generator.uniform(0, 0.005))
            args = (_replicated(mesh, turn + k), *data)
            results.append((args, ours(jax.block_until_ready(poison()), *args)))
        jax.block_until_ready(results)
        for args, found in results:
            counts = jax.block_until_ready(compare(*args, *found))
            wrong += sum(int(np.sum(shard.data)) for shard in counts.addressable_shards)
            elements += sum(
                shard.data.size for array in found for shard in array.addressable_shards
            )
        turn += burst
    return wrong, elements


def into_poison(f: Any) -> Any:
    """Compiles `f` so that its results take the memory of a first argument of the same types.

    What `f` does not write is seen then.
    """
    return jax.jit(lambda poison, *args: f(*args), donate_argnums=0, keep_unused=True)


def _poison(kind: Any) -> Any:
    if jnp.issubdtype(kind.dtype, jnp.floating):
        return jnp.full(kind.shape, jnp.nan, kind.dtype)
    return jnp.full(kind.shape, 0x5A, kind.dtype)


def _replicated(mesh: Mesh, turn: int) -> Any:
    value = np.array(turn, np.int32)
    return jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda _: value)


def _comparison(program: Program, mesh: Mesh) -> Any:
    """A function of the operands and our results: how many elements are wrong on each device."""
    lib = steps.LaxMatmuls(lax if program.integers else reference)
    expected_of = steps.build(dataclasses.replace(program, check_vma=False), lib)

    def body(turn: Any, v: Any, w: Any, ct: Any, *found: Any) -> Any:
        expected = expected_of(turn, v, w, ct)
        total = jnp.zeros((), jnp.int32)
        for k, (a, b) in enumerate(zip(found, expected, strict=True)):
            # A gradient may have either zero: some ways to compute it add a zero.
            same = a == b
            if k == 0 and not program.integers:
                same = steps.raw_bits(a) == steps.raw_bits(b)
            if jnp.issubdtype(a.dtype, jnp.floating):
                same |= jnp.isnan(a) & jnp.isnan(b)
            total += jnp.sum(~same, dtype=jnp.int32)
        return total[None]

    by_device = P(mesh.axis_names)
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(), *(by_device,) * (3 + (4 if program.gradient else 2))),
        out_specs=by_device,
        check_vma=False,
    )


def _operands(program: Program, mesh: Mesh) -> tuple[Any, ...]:
    """Returns v, w and the cotangent; those that the program does not need have one element."""
    rows, columns = program.rows, program.columns
    square = columns if programs.has(program.steps, programs.MATMULS) else 1
    shapes = [(rows, columns), (square, square), (rows, columns) if program.gradient else (1, 1)]
    return tuple(_random(program, mesh, which, shape) for which, shape in enumerate(shapes))


def _random(program: Program, mesh: Mesh, which: int, shape: tuple[int, int]) -> Any:
    dtype = jnp.dtype(program.dtype)

    def of_device(index: Any) -> np.ndarray:
        rank = (index[0].start or 0) // shape[0]
        generator = np.random.default_rng((program.seed, 6, program.number, which, rank))
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            return generator.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
        if program.integers:
            values = generator.integers(-1, 2, shape)
            if which == 1:  # a matrix with few elements, so that sums of products are small
                values = values * (generator.random(shape) < 8 / shape[0])
            return values.astype(dtype)
        values = generator.uniform(-1, 1, shape) * 2.0 ** generator.integers(-3, 4, shape)
        return np.where(generator.random(shape) < 0.01, -0.0, values).astype(dtype)

    return jax.make_array_from_callback(
        (mesh.size * shape[0], shape[1]), NamedSharding(mesh, P(mesh.axis_names)), of_device
    )
