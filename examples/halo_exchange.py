"""Diffusion on a 2-D grid whose devices exchange halos: three ways to run the same step.

    python examples/halo_exchange.py [STEPS]
    python -m jax_intranode launch examples/halo_exchange.py    # a process per GPU

Each device has a block of the grid. In each step it sends the edges of its block to its
neighbours: `ppermute` over one mesh axis after the other. The grid is periodic in its rows and has
walls on its left and right, so the permutations over "columns" are partial: where there is no
neighbour, zeros arrive. The step runs with the functions of jax.lax, with those of jax_intranode,
and with those of jax.lax under accelerate(), which makes one operation of the halos of an axis. The
results are equal to the bit. All GPUs take part, or four CPU devices, which wait for each step
(docs/limits.md).
"""

import contextlib
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

jax.config.update("jax_num_cpu_devices", 4)  # has no effect on GPUs
ON_GPUS = jax.default_backend() == "gpu"
BLOCK = 2048 if ON_GPUS else 32  # rows and columns of a device's block
STEPS_IN_PROGRAM = 10
RATE = 0.2


def make_mesh() -> jax.sharding.Mesh:
    """All devices: two rows of them, if their number is even."""
    rows = 2 if jax.device_count() % 2 == 0 and jax.device_count() > 2 else 1
    shape = (rows, jax.device_count() // rows)
    return jax.make_mesh(shape, ("rows", "columns"), (AxisType.Auto,) * 2)


def neighbours(n: int, periodic: bool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The permutations that send to the next rank of an axis, and to the one before."""
    forth = [(r, (r + 1) % n) for r in range(n if periodic else n - 1)]
    return forth, [(d, s) for s, d in forth]


def diffuse(library: Any, mesh: jax.sharding.Mesh, u: jax.Array) -> jax.Array:
    """One step on a device's block; `library` is jax.lax or jax_intranode."""
    down, up = neighbours(mesh.shape["rows"], periodic=True)
    right, left = neighbours(mesh.shape["columns"], periodic=False)
    above = library.ppermute(u[-1:], "rows", down)
    below = library.ppermute(u[:1], "rows", up)
    before = library.ppermute(u[:, -1:], "columns", right)
    after = library.ppermute(u[:, :1], "columns", left)
    padded = jnp.concatenate([above, u, below], 0)
    wide = jnp.concatenate([before, u, after], 1)
    around = padded[:-2] + padded[2:] + wide[:, :-2] + wide[:, 2:]
    return u + RATE * (around - 4 * u)


def program(library: Any, mesh: jax.sharding.Mesh) -> Any:
    """Some steps, as one jitted function of the grid, which it overwrites."""

    def steps(u: jax.Array) -> jax.Array:
        one = functools.partial(diffuse, library, mesh)
        return jax.lax.fori_loop(0, STEPS_IN_PROGRAM, lambda _, v: one(v), u)

    spec = P("rows", "columns")
    return jax.jit(jax.shard_map(steps, mesh=mesh, in_specs=spec, out_specs=spec))


def main() -> None:
    """Runs all three, compares the bits, and prints steps per second."""
    calls = max(1, (int(sys.argv[1]) if len(sys.argv) > 1 else 200) // STEPS_IN_PROGRAM)
    mesh = make_mesh()
    shape = tuple(BLOCK * n for n in mesh.devices.shape)
    kind = jax.devices()[0].device_kind
    print(f"{mesh.size} devices ({kind}), a grid of {shape}: compiling", flush=True)
    sharding = NamedSharding(mesh, P("rows", "columns"))
    hot = np.random.default_rng(0).random(shape, np.float32)
    grid = jax.make_array_from_callback(shape, sharding, lambda index: hot[index])
    results = []
    for name, library, context in (
        ("jax.lax", jax.lax, contextlib.nullcontext),
        ("jax_intranode", jax_intranode, contextlib.nullcontext),
        ("jax.lax under accelerate()", jax.lax, jax_intranode.accelerate),
    ):
        with context():
            run = program(library, mesh)
            u = jax.block_until_ready(run(grid))  # compiles
            start = time.perf_counter()
            for _ in range(calls):
                u = run(u)
                if not ON_GPUS:
                    jax.block_until_ready(u)
            jax.block_until_ready(u)
        rate = calls * STEPS_IN_PROGRAM / (time.perf_counter() - start)
        print(f"{name}: {rate:.0f} steps/s", flush=True)
        results.append([np.asarray(shard.data) for shard in u.addressable_shards])
    first, *others = results
    equal = all(np.array_equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    print(f"equal to the bit: {equal}", flush=True)


if __name__ == "__main__":
    main()
