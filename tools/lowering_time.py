"""How much longer tracing and lowering take when a program is rewritten.

    python tools/lowering_time.py [--layers 32] [--repetitions 7]

Traces and lowers one training step of a tensor-parallel transformer, written with jax.lax for four
CPU devices, as it is and under `jax_intranode.accelerate()` in turns. The layers are unrolled, so
the program has two sums a layer forward, two backward, and a mean of each gradient.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_intranode

WIDTH = 64
MATRICES = ("query", "key", "value", "output", "up", "gate", "down")


def norm(x: Any) -> Any:
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def layer(x: Any, w: Any) -> Any:
    h = norm(x)
    scores = jax.nn.softmax((h @ w["query"]) @ (h @ w["key"]).swapaxes(-1, -2))
    x = x + lax.psum(scores @ (h @ w["value"]) @ w["output"], "model")
    h = norm(x)
    return x + lax.psum((jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], "model")


def make_step(mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = layer(x, w)
        return (x**2).mean()

    def step(params: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        gradients = jax.tree.map(lambda g: lax.pmean(g, "data"), gradients)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)

    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    return jax.jit(sharded)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = [dict.fromkeys(MATRICES, jnp.ones((WIDTH, WIDTH))) for _ in range(options.layers)]
    x = jnp.ones((2, 8, WIDTH))

    def seconds() -> tuple[float, float, int]:
        step = make_step(mesh)
        start = time.perf_counter()
        traced = step.trace(params, x)
        middle = time.perf_counter()
        lowered = traced.lower()
        end = time.perf_counter()
        return middle - start, end - middle, lowered.as_text().count("@jax_intranode")

    plain, accelerated = [], []
    for repetition in range(-1, options.repetitions):
        of_plain = seconds()
        with jax_intranode.accelerate():
            of_accelerated = seconds()
        if repetition >= 0:
            plain.append(of_plain)
            accelerated.append(of_accelerated)
    totals = []
    for name, runs in (("jax.lax", plain), ("accelerated", accelerated)):
        trace, lower = (statistics.median(run[k] for run in runs) for k in (0, 1))
        totals.append(statistics.median(run[0] + run[1] for run in runs))
        print(
            f"{name:>12}: trace {trace:.3f} s, lower {lower:.3f} s, both {totals[-1]:.3f} s; "
            f"{runs[0][2]} operations of jax_intranode"
        )
    print(f"{'ratio':>12}: {totals[1] / totals[0]:.3f}")


if __name__ == "__main__":
    main()
