"""What whole programs of several processes share (program_main.py): a mesh, sums, what is said."""

import functools
import os
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.native import extension

# How much longer one rank works than the other. A wait of 1 s tells nothing of a peer.
LATER_S = 2.0
ROWS = P("x")
# XLA:CPU runs a program of less than 1000 floating-point operations in the thread that calls it.
COLUMNS = 4096


def say(text: object, label: str = "RESULT") -> None:
    # Text and newline in one write, because threads that log write to the same file.
    print(f"{label}: {' '.join(str(text).split())}\n", end="", flush=True)


def rank() -> int:
    return jax.process_index()


def line() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


def on(mesh: Mesh, body: Callable[..., jax.Array], *, spec: P = ROWS) -> Any:
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def parts(mesh: Mesh, scale: float = 1.0, *, spec: P = ROWS) -> jax.Array:
    """The device with number r has a part of (r + 1) * scale."""
    column = np.arange(1, mesh.size + 1, dtype=np.float32)[:, None]
    values = column * np.full((1, COLUMNS), scale, np.float32)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(values.shape, sharding, lambda i: values[i])


@functools.cache
def summing(mesh: Mesh) -> Any:
    return on(mesh, lambda v: jax_intranode.psum(v * 2, "x") / 2)


def total(scale: float = 1.0) -> jax.Array:
    """Dispatches a sum over all ranks: with two ranks 3 * scale."""
    mesh = line()
    return summing(mesh)(parts(mesh, scale))


def read(result: jax.Array) -> float:
    return float(np.asarray(result.addressable_data(0)).flat[0])


def begin() -> None:
    """The first sum: from here on the processes watch each other."""
    before = extension.handler_calls()
    result = read(total())
    assert result == sum(range(1, jax.process_count() + 1)), result
    assert extension.handler_calls() > before, "ours did not run"


def pids() -> list[int]:
    return np.asarray(multihost_utils.process_allgather(np.int32(os.getpid()))).tolist()


def in_background(*commands: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", "; ".join(commands)])
