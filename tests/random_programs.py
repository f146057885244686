"""Chains of random calls (`stress/calls.py`), each of which reads the result of the one before."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from cases import (
    EXTREMES,
    case,
    check,
    compiled_of_ours,
    forced,
    in_segments,
    line,
    make_mesh,
    ours_up_to,
    segments_of,
    set_epochs,
    takes_part,
    x64,
)
from jax.sharding import Mesh
from stress import calls as stress_calls
from stress.calls import Call, Seeded, random_call, random_carries

import jax_intranode
from jax_intranode._src.rewrite.collectives import Body

WAYS_OF_PERMUTES = tuple(way for way in stress_calls.WAYS if way != "late")

# So few elements that all operations are ours on CPU devices.
FEW = {
    **{"psum": 1500, "psum_scatter": 120, "all_gather": 120, "all_to_all": 60},
    **{"pmax": 1500, "pmin": 1500, "ppermute": 200},
}


# How random programs make a call; a batch may be too large for ours.
WAYS = tuple(way for way in stress_calls.WAYS if way != "vmap")


def random_calls(
    seed: int,
    count: int,
    mesh: Mesh,
    ways: Sequence[str] = ("plain", "late"),
    most: dict[str, int] = FEW,
) -> list[Call]:
    choose = Seeded(seed)
    return [random_call(choose, mesh, most, ways=ways) for _ in range(count)]


def chain(calls: Sequence[Call], mesh: Mesh) -> Any:
    """The function from all ranks' carries to the carries after each call."""
    f = stress_calls.chain(calls, mesh)
    return lambda carries: f(carries, 0)


expected_of_chain = stress_calls.expected_of_chain


# Cases.


def meshes() -> list[Mesh]:
    """A line of all devices; of 4 or more devices also grids and lines of some of them."""
    n = len(jax.devices())
    found = [line()]
    if n >= 4:
        found += [make_mesh((2, n // 2), ("d", "t")), line(2), line(3)]
    if n >= 6:
        found.append(make_mesh((3, 2), ("d", "t"), (5, 0, 3, 1, 2, 4)))
    return found


@case(which=range(5))
def random_program(which: int) -> None:
    """A chain of random operations, dtypes, sizes, algorithms and groups; some ranks are late."""
    mesh = meshes()[which % len(meshes())]
    if not takes_part(mesh):
        return
    jax_intranode.initialize(mesh)
    most = FEW | {"ragged_all_to_all": 60}
    calls = random_calls(which, 40 if which < 2 else 15, mesh, WAYS, most)
    with x64("float64"), forced("one_shot", "two_shot", "two_shot"):
        carries, value = random_carries(mesh, which)
        program = compiled_of_ours(chain(calls, mesh), value)
        want = expected_of_chain(calls, mesh, carries)
        results = [program(value) for _ in range(6)]
        for result in results:
            check(result, want)


PERMUTES = {"ppermute": 60, "pmax": 60, "pmin": 60}


@case(first=range(0, 1000, 10))
def random_permutes(first: int) -> None:
    """Ten programs of permutes, maxima and minima among 2 to 8 ranks have the bits of jax.lax."""
    for seed in range(first, first + 10):
        world = 2 + seed % 7
        if world > len(jax.devices()):
            continue
        grid = seed % 4 == 1 and world > 3
        mesh = make_mesh((2, world // 2), ("d", "t")) if grid else line(world)
        if not takes_part(mesh):
            continue
        jax_intranode.initialize(mesh)
        choose = Seeded(seed)
        calls = [
            random_call(choose, mesh, PERMUTES, ways=WAYS_OF_PERMUTES, leaves=3)
            for _ in range(choose.integer(2, 5))  # cond leaves the first one out
        ]
        with x64("float64"):
            carries, value = random_carries(mesh, seed)
            want = expected_of_chain(calls, mesh, carries)
            check(compiled_of_ours(chain(calls, mesh), value)(value), want)
            f = stress_calls.chain(calls, mesh, jax.lax)
            check(jax.jit(lambda v, f=f: f(v, 0))(value), want)


# Extremes are not replaced: they were not measured. A matmul has so many columns.
REWRITTEN = {name: count for name, count in FEW.items() if name not in EXTREMES}
REWRITTEN |= {"ragged_all_to_all": 60} | dict.fromkeys(stress_calls.MATMULS, 16)


@case(seed=range(60))
@ours_up_to(1 << 15)
def rewritten_program(seed: int) -> None:
    """A chain of calls of jax.lax, in loops, branches and gradients, has our bits if rewritten."""
    if jax.devices()[0].platform == "gpu":
        pytest.skip("on GPUs some of them are left, where ours was not measured: see tests/stress")
    mesh = meshes()[seed % 3 % len(meshes())]
    if not takes_part(mesh):
        return
    jax_intranode.initialize(mesh)
    choose = Seeded(seed)
    check_vma = bool(seed % 2)
    # Under check_vma JAX inserts sums, and so other transposes.
    of_vma = ("late", "gradient", "checkpoint")
    ways = [w for w in stress_calls.WAYS if w not in (of_vma if check_vma else of_vma[:1])]
    calls = [random_call(choose, mesh, REWRITTEN, ways=ways, leaves=3) for _ in range(6)]
    f = stress_calls.chain(calls, mesh, jax.lax, check_vma)
    overlapped = mock.patch.object(Body, "is_overlapped", lambda *_, **__: True)
    with x64("float64"), jax_intranode.accelerate(), overlapped:
        carries, value = random_carries(mesh, seed)
        program = compiled_of_ours(lambda v: f(v, 0), value)
        check(program(value), expected_of_chain(calls, mesh, carries))


@case()
def random_programs_in_turn() -> None:
    """Programs over several meshes start in a random order, without a pause between them.

    One process keeps arrays of its own, so its addresses change. On GPUs XLA replays programs from
    graphs: where addresses have changed it captures them again, on each rank at a different time.
    """
    first = jax.devices()[0]
    programs = []
    with x64("float64"):
        for seed, mesh in enumerate(meshes()[:3] * 2):
            if not takes_part(mesh):
                continue
            jax_intranode.initialize(mesh)
            calls = random_calls(30 + seed, 4, mesh)
            carries, value = random_carries(mesh, seed)
            with forced("one_shot", "two_shot"):
                program = compiled_of_ours(chain(calls, mesh), value)
            programs.append((seed, program, value, expected_of_chain(calls, mesh, carries)))
        order = np.random.default_rng(31).integers(0, 6, 28)
        results, kept = [], []
        for k, chosen in enumerate(order):
            for seed, program, value, want in programs:
                if seed == chosen:
                    results.append((program(value), want))
                    if first.process_index == jax.process_index():
                        kept.append(jax.device_put(np.ones(1000 * k + 1, np.float32), first))
        for result, want in results:
            check(result, want)


@case(which=(0, 1))
def random_program_in_segments(which: int) -> None:
    """Operations of one epoch and of many follow each other, and the epoch passes 2^32."""
    mesh = meshes()[which % len(meshes())]
    if not takes_part(mesh):
        return
    jax_intranode.shutdown()
    jax.clear_caches()
    set_epochs(mesh, 2**32 - 30)
    calls = random_calls(70 + which, 15, mesh)
    with x64("float64"), in_segments(300):
        carries, value = random_carries(mesh, which)
        program = compiled_of_ours(chain(calls, mesh), value)
        segments = segments_of(program.as_text())
        assert len(segments) == len(calls) and 1 in segments and max(segments) >= 8
        before = jax_intranode.usage_counter()
        for _ in range(3):
            check(program(value), expected_of_chain(calls, mesh, carries))
    # An operation counts once, whatever the number of its segments.
    local = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
    assert jax_intranode.usage_counter() - before == 3 * len(calls) * local
