"""Trains a tensor-parallel transformer, written with Flax NNX and optax, under plain jit.

    pip install flax optax && python examples/train_nnx_optax.py [STEPS [TP]]
    python -m jax_intranode launch examples/train_nnx_optax.py    # a process per GPU

The model learns the texts of Python's `help()`. The batch is divided over "data"; heads, MLP
columns and the sequence over "model", which has TP devices: by default all that divide the heads.
CPU devices train a smaller model. JAX_INTRANODE_DISABLE=1 gives the time of 10 steps of jax.lax.
"""

import math
import sys
import time
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

jax.config.update("jax_num_cpu_devices", 4)  # has no effect on GPUs
ON_GPUS = jax.default_backend() == "gpu"
LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = (4, 4096, 32, 2048, 2) if ON_GPUS else (2, 64, 4, 64, 8)
RATE, DTYPE = (3e-4, jnp.bfloat16) if ON_GPUS else (3e-3, jnp.float32)
COLUMNS, ROWS = (None, "model"), ("model", None)


class Block(nnx.Module):
    """Attention and a gated MLP. Activations are [batch, sequence, width]."""

    def __init__(self, rngs: nnx.Rngs):
        def matrix(rows: int, columns: int, names: tuple[str | None, ...]) -> nnx.Param:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            return nnx.Param(init(rngs.params(), (rows, columns)))

        self.norms = nnx.List([nnx.RMSNorm(WIDTH, dtype=DTYPE, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.List([matrix(WIDTH, WIDTH, COLUMNS) for _ in range(3)])
        self.out = matrix(WIDTH, WIDTH, ROWS)
        self.gate_up = nnx.List([matrix(WIDTH, 3 * WIDTH, COLUMNS) for _ in range(2)])
        self.down = matrix(3 * WIDTH, WIDTH, ROWS)

    def columns(self, x: jax.Array, ws: nnx.List) -> list[jax.Array]:
        """[x @ w for w in ws]: gathers the sequence once, and divides the columns."""
        return jax_intranode.column_parallel_matmul(
            x, [w[...].astype(DTYPE) for w in ws], "model", gather_axis=1, batch_axes="data"
        )

    def rows(self, x: jax.Array, w: nnx.Param) -> jax.Array:
        """x @ w: sums over the ranks, and divides the sequence."""
        return jax_intranode.row_parallel_matmul(
            x, w[...].astype(DTYPE), "model", scatter_dimension=1, batch_axes="data"
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = self.columns(self.norms[0](x), self.qkv)
        qkv = [y.reshape(*y.shape[:2], HEADS, -1) for y in qkv]
        mixed = jax.nn.dot_product_attention(*qkv, is_causal=True)
        x = x + self.rows(mixed.reshape(x.shape), self.out)
        gate, up = self.columns(self.norms[1](x), self.gate_up)
        return x + self.rows(nnx.silu(gate) * up, self.down)


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, WIDTH, dtype=DTYPE, rngs=rngs)
        self.positions = nnx.Embed(SEQUENCE, WIDTH, dtype=DTYPE, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, dtype=DTYPE, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(SEQUENCE))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)


def main() -> None:
    """Prints how the collectives of a step are run, and trains."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    tp = int(sys.argv[2]) if len(sys.argv) > 2 else math.gcd(jax.device_count(), HEADS)
    mesh = jax.make_mesh((jax.device_count() // tp, tp), ("data", "model"), (AxisType.Auto,) * 2)
    text = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8).astype(np.int32)
    rng, sharding = np.random.default_rng(0), NamedSharding(mesh, P("data", "model"))

    def batch() -> list[jax.Array]:
        starts = rng.integers(len(text) - SEQUENCE, size=(BATCH * mesh.shape["data"], 1))
        windows = text[starts + np.arange(SEQUENCE + 1)]
        return jax.device_put([windows[:, :-1], windows[:, 1:]], sharding)

    device = f"{jax.device_count()} devices ({jax.devices()[0].device_kind})"
    print(f"{device}: making {LAYERS} layers, and compiling", flush=True)
    with jax.set_mesh(mesh):
        model = Transformer(nnx.Rngs(0))
        adam = optax.adamw(optax.warmup_constant_schedule(0, RATE, 20))
        adam = optax.chain(optax.clip_by_global_norm(1.0), adam)
        graph, state = nnx.split((model, nnx.Optimizer(model, adam, wrt=nnx.Param)))

        @jax.jit
        def step(state: nnx.State, tokens: jax.Array, targets: jax.Array) -> tuple:
            model, optimizer = nnx.merge(graph, state)
            loss_of = optax.softmax_cross_entropy_with_integer_labels
            loss, grads = nnx.value_and_grad(lambda m: loss_of(m(tokens), targets).mean())(model)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), loss

        print(jax_intranode.explain(step)(state, *batch()))
        start = time.perf_counter()
        for index in range(steps + 1):
            state, loss = step(state, *batch())
            if index % 10 == 0:
                jax.block_until_ready(state)
                print(f"step {index}: loss {loss:.3f}, {time.perf_counter() - start:.3f} s")
                start = time.perf_counter()


if __name__ == "__main__":
    main()
