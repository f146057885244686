"""Trains a transformer with FSDP and tensor parallelism on a 2-D mesh, under plain jit.

    python examples/train_fsdp_tp.py [STEPS [TP]]

The model learns the texts of Python's `help()`. XLA gathers a layer's matrix over "data" before it
is used (FSDP). Over "model" (TP devices), heads, MLP columns and the sequence are divided. The
program uses all GPUs (`python -m jax_intranode launch`: a process for each), or four CPU devices.
"""

import functools
import sys
import time
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

jax.config.update("jax_num_cpu_devices", 4)  # has no effect on GPUs
ON_GPUS = jax.default_backend() == "gpu"
LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = (4, 4096, 32, 2048, 2) if ON_GPUS else (2, 64, 4, 64, 8)
RATE, DTYPE = (3e-4, jnp.bfloat16) if ON_GPUS else (3e-3, jnp.float32)
COLUMNS, ROWS = P("data", "model"), P("model", "data")
# Name: rows, columns, sharding.
LAYER = {name: (WIDTH, WIDTH, COLUMNS) for name in ("query", "key", "value")}
LAYER |= {name: (WIDTH, 3 * WIDTH, COLUMNS) for name in ("gate", "up")}
LAYER |= {"out": (WIDTH, WIDTH, ROWS), "down": (3 * WIDTH, WIDTH, ROWS)}
SHAPES = {"embed": (256, WIDTH, P("data")), "positions": (SEQUENCE, WIDTH, P("data"))}
SHAPES |= {f"{name}_{i}": matrix for i in range(LAYERS) for name, matrix in LAYER.items()}


def norm(x: jax.Array) -> jax.Array:
    """RMSNorm of each position."""
    square = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)


def columns(x: jax.Array, ws: list[jax.Array]) -> list[jax.Array]:
    """[x @ w for w in ws]: gathers the sequence once, and divides the columns."""
    return jax_intranode.column_parallel_matmul(x, ws, "model", gather_axis=1, batch_axes="data")


def rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w: sums over the ranks, and divides the sequence."""
    return jax_intranode.row_parallel_matmul(x, w, "model", scatter_dimension=1, batch_axes="data")


@jax.checkpoint  # the backward pass gathers the weights again, and does not keep them
def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Attention and a gated MLP. x is [batch, sequence, width]."""
    qkv = columns(norm(x), [w["query"], w["key"], w["value"]])
    qkv = [y.reshape(*y.shape[:2], HEADS, -1) for y in qkv]
    mixed = jax.nn.dot_product_attention(*qkv, is_causal=True)
    x = x + rows(mixed.reshape(x.shape), w["out"])
    gate, up = columns(norm(x), [w["gate"], w["up"]])
    return x + rows(jax.nn.silu(gate) * up, w["down"])


def loss_of(params: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean loss in nats per byte."""
    params = {name: matrix.astype(DTYPE) for name, matrix in params.items()}
    x = params["embed"][tokens] + params["positions"]
    for i in range(LAYERS):
        x = block(x, {name: params[f"{name}_{i}"] for name in LAYER})
    logits = (norm(x) @ params["embed"].T).astype(jnp.float32) * WIDTH**-0.5
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1).mean()


def train_step(state: dict, tokens: jax.Array, targets: jax.Array) -> tuple:
    """One step of Adam."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], tokens, targets)
    t = state["step"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, state["square"], grads)
    rate = RATE * jnp.minimum(1, t / 20) * jnp.sqrt(1 - 0.95**t) / (1 - 0.9**t)
    steps = jax.tree.map(lambda m, s: rate * m / (jnp.sqrt(s) + 1e-8), mean, square)
    params = jax.tree.map(jnp.subtract, state["params"], steps)
    return {"params": params, "mean": mean, "square": square, "step": t}, loss


def main() -> None:
    """Prints how the collectives of a step are run, and trains."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    tp = int(sys.argv[2]) if len(sys.argv) > 2 else max(2, jax.device_count() // 2)
    mesh = jax.make_mesh((jax.device_count() // tp, tp), ("data", "model"), (AxisType.Auto,) * 2)
    matrices = {name: NamedSharding(mesh, spec) for name, (*_, spec) in SHAPES.items()}
    batches = NamedSharding(mesh, P("data", "model"))
    zeros = {"mean": matrices, "square": matrices, "step": None}
    shardings = {"params": matrices, **zeros}
    text = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)

    @functools.cache  # XLA compiles a few small programs sooner than one that makes all matrices
    def random_matrix(m: int, n: int, sharding: NamedSharding, factor: float) -> Any:
        normal = functools.partial(jax.random.normal, shape=(m, n))
        return jax.jit(lambda key: normal(key) * factor, out_shardings=sharding)

    def initial() -> dict:
        params = {}
        for i, (name, (m, n, _)) in enumerate(SHAPES.items()):
            factor = m**-0.5 if "_" in name else 1.0  # "_": of a layer
            params[name] = random_matrix(m, n, matrices[name], factor)(jax.random.key(i))

        def first() -> dict:
            mean = {name: jnp.zeros((m, n)) for name, (m, n, _) in SHAPES.items()}
            return {"mean": mean, "square": mean, "step": 0.0}

        return {"params": params, **jax.jit(first, out_shardings=zeros)()}

    def batch(index: int) -> list[jax.Array]:
        rng = np.random.default_rng(index)
        starts = rng.integers(len(text) - SEQUENCE, size=(BATCH * mesh.shape["data"], 1))
        windows = text[starts + np.arange(SEQUENCE + 1)].astype(np.int32)
        return jax.device_put([windows[:, :-1], windows[:, 1:]], batches)

    with jax.set_mesh(mesh):
        device = f"{jax.device_count()} devices ({jax.devices()[0].device_kind})"
        print(f"{device}: making {len(SHAPES)} matrices, and compiling", flush=True)
        state = initial()
        step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
        print(jax_intranode.explain(step, compiled=True)(state, *batch(0)))
        start = time.perf_counter()
        for index in range(steps + 1):
            state, loss = step(state, *batch(index))
            if index % 10 == 0:
                print(f"step {index}: loss {loss:.3f}, after {time.perf_counter() - start:.3f} s")


if __name__ == "__main__":
    main()
