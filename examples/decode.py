"""Decodes with a tensor-parallel transformer that has the shape of Llama 8B, and random weights.

    python examples/decode.py [STEPS]
    python -m jax_intranode launch examples/decode.py    # a process per GPU

In each layer, attention and MLP each end in a 32 KB sum over the ranks, where only latency matters.
Layers are unrolled and each step donates its state to the next, so that XLA replays a CUDA graph.
CPU devices decode with a smaller model, and wait for each step (docs/limits.md).
JAX_INTRANODE_DISABLE=1 gives the speed with jax.lax.
"""

import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

jax.config.update("jax_num_cpu_devices", 4)  # has no effect on GPUs
ON_GPUS = jax.default_backend() == "gpu"
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 64
LLAMA, TINY = (32, 4096, 14336, 32, 8, 128_256), (2, 256, 768, 8, 8, 512)
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = LLAMA if ON_GPUS else TINY
DTYPE = jnp.bfloat16 if ON_GPUS else jnp.float32
BATCH, CHANNELS, LENGTH = 4, HIDDEN // HEADS, 1 + 3 * STEPS
COLUMNS, ROWS, CACHE = P(None, "model"), P("model", None), P(None, None, "model")
QUERY, KEY = (HIDDEN, HIDDEN, COLUMNS), (HIDDEN, KV_HEADS * CHANNELS, COLUMNS)
OUTPUT, UP, DOWN = (HIDDEN, HIDDEN, ROWS), (HIDDEN, INNER, COLUMNS), (INNER, HIDDEN, ROWS)
LAYER = {"query": QUERY, "key": KEY, "value": KEY, "output": OUTPUT}
LAYER.update(gate=UP, up=UP, down=DOWN)  # of each matrix: rows, columns, sharding
MODEL = {"embed": (VOCABULARY, HIDDEN, P()), "logits": (HIDDEN, VOCABULARY, COLUMNS)}
MODEL["layers"] = [LAYER] * LAYERS
STATE = {"caches": [(CACHE, CACHE)] * LAYERS, "tokens": P(), "position": P()}


def norm(x: jax.Array) -> jax.Array:
    """RMSNorm of each sequence's token."""
    square = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
    return (x * lax.rsqrt(square + 1e-5)).astype(x.dtype)


def rotary(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotary position embedding of [batch, heads, channels]."""
    angles = position * 500_000.0 ** (-2 * jnp.arange(CHANNELS // 2) / CHANNELS)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(w: Any, x: jax.Array, cache: Any, position: jax.Array) -> tuple[jax.Array, Any]:
    """Attention of the rank's heads: (the rank's term of the sum, the cache with the new token)."""
    q, k, v = ((x @ w[name]).reshape(BATCH, -1, CHANNELS) for name in ("query", "key", "value"))
    keys = cache[0].at[:, position].set(rotary(k, position))
    values = cache[1].at[:, position].set(v)
    seen = (jnp.arange(LENGTH) <= position)[None, None, None]
    mixed = jax.nn.dot_product_attention(rotary(q, position)[:, None], keys, values, mask=seen)
    return mixed.reshape(BATCH, -1) @ w["output"], (keys, values)


def step(params: Any, state: Any) -> Any:
    """Reads the last token of each sequence, and appends the most likely next one."""
    position, caches = state["position"], []
    x = params["embed"][state["tokens"][:, position]]
    for w, cache in zip(params["layers"], state["caches"], strict=True):
        mixed, cache = attention(w, norm(x), cache, position)
        caches.append(cache)
        x = x + jax_intranode.psum(mixed, "model")
        inner = jax.nn.silu(norm(x) @ w["gate"]) * (norm(x) @ w["up"])
        x = x + jax_intranode.psum(inner @ w["down"], "model")
    # The best logit of each rank, and its index, are gathered.
    logits = (norm(x) @ params["logits"]).astype(jnp.float32)
    first = lax.axis_index("model") * logits.shape[-1]
    best = jnp.stack([logits.max(-1), (first + logits.argmax(-1)).astype(jnp.float32)])
    best = jax_intranode.all_gather(best, "model")
    token = jnp.take_along_axis(best[:, 1], best[:, 0].argmax(0)[None], axis=0)[0]
    tokens = state["tokens"].at[:, position + 1].set(token.astype(jnp.int32))
    return {"caches": caches, "tokens": tokens, "position": position + 1}


def map_matrices(function: Any) -> Any:
    """`MODEL` with each matrix replaced by function(rows, columns, sharding)."""
    return jax.tree.map(lambda x: function(*x), MODEL, is_leaf=lambda x: isinstance(x, tuple))


@functools.cache
def random_matrix(m: int, n: int, sharding: NamedSharding) -> Any:
    """The program that makes a matrix from a key. XLA takes minutes for one that makes all."""
    normal = functools.partial(jax.random.normal, shape=(m, n), dtype=DTYPE)
    return jax.jit(lambda key: normal(key) * m**-0.5, out_shardings=sharding)


def initial(mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """Random parameters, the same on any number of devices, and the state before the first step."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + len(LAYER) * LAYERS))
    params = map_matrices(lambda m, n, p: random_matrix(m, n, NamedSharding(mesh, p))(next(keys)))

    def state() -> dict[str, Any]:
        cache = jnp.zeros((BATCH, LENGTH, KV_HEADS, CHANNELS), DTYPE)
        tokens = jnp.zeros((BATCH, LENGTH), jnp.int32).at[:, 0].set(jnp.arange(BATCH))
        return {"caches": [(cache, cache)] * LAYERS, "tokens": tokens, "position": 0}

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), STATE)
    return params, jax.jit(state, out_shardings=shardings)()


def main() -> None:
    """Prints how the collectives of a step are run, decodes, and prints tokens per second."""
    mesh = jax.make_mesh((jax.device_count(),), ("model",), (AxisType.Auto,))
    specs = map_matrices(lambda m, n, spec: spec), STATE
    device = f"{jax.device_count()} devices ({jax.devices()[0].device_kind})"
    print(f"{device}: making the matrices of {LAYERS} layers", flush=True)
    params, state = initial(mesh)
    # All ranks choose the same token, but check_vma cannot infer that.
    run = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=STATE, check_vma=False)
    run = jax.jit(run, donate_argnums=1)
    print(jax_intranode.explain(run)(params, state))
    for what in ("compiling", "capturing a graph", "replaying it"):
        print(f"{what}: ", end="", flush=True)
        before, start = jax_intranode.stats().handler_calls, time.perf_counter()
        for _ in range(STEPS):
            state = run(params, state)
            if not ON_GPUS:
                jax.block_until_ready(state)
        jax.block_until_ready(state)
        speed = BATCH * STEPS / (time.perf_counter() - start)
        calls = jax_intranode.stats().handler_calls - before
        print(f"{speed:.0f} tokens per second; XLA called jax_intranode {calls} times")
    print(state["tokens"][0])


if __name__ == "__main__":
    main()
