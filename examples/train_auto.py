"""Trains an MLP under plain jit, without and with install(auto=True).

    python examples/train_auto.py [STEPS]
    python -m jax_intranode launch examples/train_auto.py    # a process per GPU

The program only says how its arrays are sharded: the batch over "data", the hidden features over
"model". XLA's partitioner adds the collectives. All GPUs take part, or four CPU devices, which wait
for each step (docs/limits.md).
"""

import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

jax.config.update("jax_num_cpu_devices", 4)  # has no effect on GPUs
ON_GPUS = jax.default_backend() == "gpu"
BATCH, WIDTH, DTYPE = (512, 4096, jnp.bfloat16) if ON_GPUS else (32, 16, jnp.float32)
MODEL = 2 if jax.device_count() % 2 == 0 else 1
MESH = jax.make_mesh((jax.device_count() // MODEL, MODEL), ("data", "model"), (AxisType.Auto,) * 2)


def step(w: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> tuple:
    """A step of gradient descent."""

    def loss(w: dict[str, jax.Array]) -> jax.Array:
        found = jax.nn.gelu(x @ w["up"]) @ w["down"]
        return jnp.square(found - y).astype(jnp.float32).mean()

    value, gradients = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.5 * g, w, gradients), value


def main() -> None:
    """Trains both ways, and prints what ran each collective."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    device = f"{jax.device_count()} devices ({jax.devices()[0].device_kind})"
    print(f"{device}: compiling, and training for {steps} steps", flush=True)
    keys = jax.random.split(jax.random.key(0), 3)

    def normal(key: jax.Array, shape: tuple[int, int], *axes: str | None) -> jax.Array:
        values = jax.random.normal(key, shape, DTYPE) / WIDTH**0.5
        return jax.device_put(values, NamedSharding(MESH, P(*axes)))

    x = normal(keys[0], (BATCH, WIDTH), "data")
    y = jnp.sin(3 * x)
    for auto in (False, True):
        if auto:
            jax_intranode.install(auto=True)
        up = normal(keys[1], (WIDTH, 4 * WIDTH), None, "model")
        w = {"up": up, "down": normal(keys[2], (4 * WIDTH, WIDTH), "model")}
        if auto:
            print(jax_intranode.explain(step)(w, x, y))
        jitted = jax.jit(step, donate_argnums=0)
        w, loss = jitted(w, x, y)  # compiles
        start = time.perf_counter()
        for _ in range(steps):
            w, loss = jitted(w, x, y)
            if not ON_GPUS:
                jax.block_until_ready(loss)
        jax.block_until_ready(w)
        seconds = time.perf_counter() - start
        print(f"{'with' if auto else 'without'} auto: loss {loss:.6f}, {seconds:.3f} s", flush=True)


if __name__ == "__main__":
    main()
