"""Trains a transformer with FSDP and tensor parallelism on a 2-D mesh, inside shard_map.

    python examples/train_fsdp_tp.py [STEPS [TP]]
    python -m jax_intranode launch examples/train_fsdp_tp.py    # a process per GPU

The model learns the texts of Python's `help()`. Parameters and Adam's moments are sharded over both
axes. Layers gather their matrices over "data" (FSDP); heads, MLP columns and the sequence are
divided over "model", which has TP devices: by default half of all, at least two. CPU devices train
a smaller model. Prints the time of each 10 steps; JAX_INTRANODE_DISABLE=1 gives that of jax.lax.
"""

import sys
import time
from functools import partial
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

jax.config.update("jax_num_cpu_devices", 4)  # has no effect on GPUs
ON_GPUS = jax.default_backend() == "gpu"
LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = (4, 4096, 32, 2048, 2) if ON_GPUS else (2, 64, 4, 64, 8)
RATE, DTYPE = (1e-4, jnp.bfloat16) if ON_GPUS else (3e-3, jnp.float32)
AXES = ("data", "model")
TOKENS, COLUMNS, ROWS = P("data", "model"), P("data", "model"), P("model", "data")
LAYER = {"qkv": [(WIDTH, WIDTH, COLUMNS)] * 3, "gate_up": [(WIDTH, 3 * WIDTH, COLUMNS)] * 2}
LAYER.update(out=(WIDTH, WIDTH, ROWS), down=(3 * WIDTH, WIDTH, ROWS))
MODEL = {"embed": (256, WIDTH, P(AXES)), "positions": (SEQUENCE, WIDTH, ROWS)}
MODEL["layers"] = [LAYER] * LAYERS  # of each parameter: rows, columns, sharding
map_model = partial(jax.tree.map, is_leaf=lambda matrix: isinstance(matrix, tuple))
SPECS = map_model(lambda matrix: matrix[2], MODEL)


def gather(w: jax.Array, axis: int, over: str | tuple = "data") -> jax.Array:
    """Gathers a parameter. One psum_scatter sums and scatters its gradient."""
    return jax_intranode.all_gather(w.astype(DTYPE), over, axis=axis, tiled=True)


def norm(x: jax.Array) -> jax.Array:
    """RMSNorm of each position."""
    square = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)


@jax.checkpoint  # the backward pass gathers the weights again, and does not keep them
def block(x: jax.Array, w: dict) -> jax.Array:
    """Attention and a gated MLP. x is [batch, sequence, width], sharded over both axes."""
    columns = partial(jax_intranode.all_gather_matmul, axis_name="model", gather_axis=1)
    rows = partial(jax_intranode.matmul_reduce_scatter, axis_name="model", scatter_dimension=1)
    qkv = columns(norm(x), [gather(matrix, 0) for matrix in w["qkv"]])
    qkv = [y.reshape(*y.shape[:2], -1, WIDTH // HEADS) for y in qkv]
    mixed = jax.nn.dot_product_attention(*qkv, is_causal=True)
    x = x + rows(mixed.reshape(*mixed.shape[:2], -1), gather(w["out"], 1))
    gate, up = columns(norm(x), [gather(matrix, 0) for matrix in w["gate_up"]])
    return x + rows(jax.nn.silu(gate) * up, gather(w["down"], 1))


def loss_of(params: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """This rank's term of the mean loss in nats per byte."""
    embed = gather(params["embed"], 0, AXES)
    x = embed[tokens] + gather(params["positions"], 1)
    for w in params["layers"]:
        x = block(x, w)
    log_p = jax.nn.log_softmax((norm(x) @ embed.T).astype(jnp.float32))
    return -jnp.take_along_axis(log_p, targets[..., None], -1).mean() / jax.lax.axis_size(AXES)


def train_step(state: tuple, batch: list[jax.Array]) -> tuple:
    """One step of Adam, without bias correction. The gradients are sharded as the parameters."""
    params, mean, square = state
    loss, grads = jax.value_and_grad(loss_of)(params, *batch)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, square, grads)
    params = jax.tree.map(lambda p, m, s: p - RATE * m / (s**0.5 + 1e-8), params, mean, square)
    return (params, mean, square), jax_intranode.psum(loss, AXES)


def initial() -> tuple:
    """Random parameters, and the moments of their gradients."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + 7 * LAYERS))
    params = map_model(lambda m: jax.random.normal(next(keys), m[:2]) * m[1] ** -0.5, MODEL)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, zeros, zeros


def main() -> None:
    """Prints how the collectives of a step are run, and trains."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    tp = int(sys.argv[2]) if len(sys.argv) > 2 else max(2, jax.device_count() // 2)
    mesh = jax.make_mesh((jax.device_count() // tp, tp), AXES, (AxisType.Auto,) * 2)
    text = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8).astype(np.int32)
    specs = (SPECS, SPECS, SPECS)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def batch(index: int) -> list[jax.Array]:
        rng = np.random.default_rng(index)
        starts = rng.integers(len(text) - SEQUENCE, size=(BATCH * mesh.shape["data"], 1))
        windows = text[starts + np.arange(SEQUENCE + 1)]
        return jax.device_put([windows[:, :-1], windows[:, 1:]], NamedSharding(mesh, TOKENS))

    state = jax.jit(initial, out_shardings=shardings)()
    step = jax.shard_map(train_step, mesh=mesh, in_specs=(specs, TOKENS), out_specs=(specs, P()))
    step = jax.jit(step, donate_argnums=0)
    print(jax_intranode.explain(step)(state, batch(0)))
    start = time.perf_counter()
    for index in range(steps + 1):
        state, loss = step(state, batch(index))
        if index % 10 == 0:
            jax.block_until_ready(state)
            print(f"step {index}: loss {loss:.3f}, {time.perf_counter() - start:.3f} s", flush=True)
            start = time.perf_counter()


if __name__ == "__main__":
    main()
