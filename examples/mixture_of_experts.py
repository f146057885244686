"""A layer of experts: with moe_dispatch and moe_combine, and with jax.lax.all_to_all.

    python examples/mixture_of_experts.py [STEPS]
    python -m jax_intranode launch examples/mixture_of_experts.py    # a process per GPU

Each device has some tokens and the weights of some experts. Each token goes to the experts that the
router has chosen for it. `ours` sends them as they are. `dense` has room for the same number of
tokens for each pair of a device and an expert, and sends all of it. Where no token is dropped, both
layers have the same results and gradients, but for rounding. The program compares them, trains a
few steps with ours, and prints tokens per second. All GPUs take part, or four CPU devices.
"""

import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

jax.config.update("jax_num_cpu_devices", 4)  # has no effect on GPUs
ON_GPUS = jax.default_backend() == "gpu"
TOKENS, HIDDEN, WIDE = (2048, 2048, 1024) if ON_GPUS else (64, 32, 64)  # TOKENS: of a device
DTYPE = jnp.bfloat16 if ON_GPUS else jnp.float32
EXPERTS_OF_DEVICE, CHOICES = (16, 8) if ON_GPUS else (4, 2)

Params = dict[str, jax.Array]
Layer = Callable[[jax.Array, Params], jax.Array]
SPECS = {"router": P(), "up": P("expert"), "down": P("expert")}


def route(x: jax.Array, params: Params) -> tuple[jax.Array, jax.Array]:
    """The weights and the numbers of the experts of each token."""
    scores = jnp.dot(x, params["router"], preferred_element_type=jnp.float32)
    weights, ids = lax.top_k(scores, CHOICES)
    return jax.nn.softmax(weights), ids


def ours(x: jax.Array, params: Params, *, room: int) -> jax.Array:
    """The layer with jax_intranode. Each expert takes up to n `room` tokens, of all n devices."""
    weights, ids = route(x, params)
    experts, n = params["router"].shape[1], lax.axis_size("expert")
    how = {"num_experts": experts, "capacity": min(n * len(x) * CHOICES, experts * room)}
    rows, sizes, state = jax_intranode.moe_dispatch(x, ids, weights, "expert", **how)
    # XLA's ragged_dot would multiply all rows by the weights of all experts.
    first, number = (jnp.cumsum(sizes) - sizes)[:, None], jnp.arange(n * room)
    place = jnp.where(number < sizes[:, None], first + number, len(rows))
    of_expert = rows.at[place].get(mode="fill", fill_value=0, unique_indices=True)
    results = jax.nn.gelu(of_expert @ params["up"]) @ params["down"]
    results = jnp.zeros_like(rows).at[place].set(results, mode="drop", unique_indices=True)
    return jax_intranode.moe_combine(results, state)


def dense(x: jax.Array, params: Params, *, room: int) -> jax.Array:
    """The layer with jax.lax. Each device may send `room` tokens to an expert."""
    weights, ids = route(x, params)
    experts, n = params["router"].shape[1], lax.axis_size("expert")
    chosen = jax.nn.one_hot(ids.reshape(-1), experts, dtype=jnp.int32)
    number = (jnp.cumsum(chosen, axis=0) * chosen).sum(1) - 1  # among those of the expert
    place = jnp.where(number < room, ids.reshape(-1) * room + number, experts * room)
    sent = jnp.zeros_like(x, shape=(experts * room, x.shape[1]))
    sent = sent.at[place].set(jnp.repeat(x, CHOICES, axis=0), mode="drop")
    received = lax.all_to_all(sent.reshape(n, -1, x.shape[1]), "expert", 0, 0)
    of_expert = received.reshape(n, experts // n, room, -1).swapaxes(0, 1)
    rows = of_expert.reshape(experts // n, n * room, -1)
    results = jax.nn.gelu(rows @ params["up"]) @ params["down"]
    of_device = results.reshape(experts // n, n, room, -1).swapaxes(0, 1)
    back = lax.all_to_all(of_device.reshape(n, -1, x.shape[1]), "expert", 0, 0)
    rows = back.reshape(sent.shape).at[place].get(mode="fill", fill_value=0)
    products = rows.reshape(len(x), CHOICES, -1).astype(jnp.float32) * weights[..., None]
    return products.sum(1).astype(x.dtype)


def program(layer: Layer, mesh: jax.sharding.Mesh) -> Callable[..., tuple[jax.Array, Params]]:
    """The loss and the gradients, as a jitted function of parameters, tokens and targets."""

    def loss(params: Params, x: jax.Array, target: jax.Array) -> jax.Array:
        error = layer(x, params).astype(jnp.float32) - target.astype(jnp.float32)
        return lax.pmean(jnp.square(error).mean(), "expert")

    specs = (SPECS, P("expert"), P("expert"))
    whole = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    return jax.jit(jax.value_and_grad(whole))


def tokens_per_second(run: Callable[..., object], *arguments: object, calls: int = 20) -> float:
    """Of the forward and the backward pass."""
    jax.block_until_ready(run(*arguments))  # compiles
    begun = time.perf_counter()
    for _ in range(calls):
        done = run(*arguments)
        if not ON_GPUS:  # docs/limits.md
            jax.block_until_ready(done)
    jax.block_until_ready(done)
    return calls * TOKENS * jax.device_count() / (time.perf_counter() - begun)


def largest_difference(ours: object, dense: object) -> float:
    """Of two trees, where 1 is the largest value of an array."""
    trees = [[x.astype(jnp.float32) for x in jax.tree.leaves(tree)] for tree in (ours, dense)]
    pairs = zip(*trees, strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def main() -> None:
    """Compares both layers, trains with ours, and times both."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    n = jax.device_count()
    experts, kind = n * EXPERTS_OF_DEVICE, jax.devices()[0].device_kind
    mesh = jax.make_mesh((n,), ("expert",), (AxisType.Auto,))
    print(f"{n} devices ({kind}): compiling; {CHOICES} of {experts} experts", flush=True)

    def put(shape: tuple[int, ...], spec: P, scale: float, seed: int) -> jax.Array:
        values = scale * np.random.default_rng(seed).standard_normal(shape, np.float32)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, sharding, lambda at: values[at].astype(DTYPE))

    params = {
        "router": put((HIDDEN, experts), SPECS["router"], HIDDEN**-0.5, 0),
        "up": put((experts, HIDDEN, WIDE), SPECS["up"], HIDDEN**-0.5, 1),
        "down": put((experts, WIDE, HIDDEN), SPECS["down"], WIDE**-0.5, 2),
    }
    data = [put((n * TOKENS, HIDDEN), P("expert"), 1, seed) for seed in (3, 4)]
    room = -(-2 * TOKENS * CHOICES // experts)  # twice the mean: not enough for few tokens
    layers = [partial(layer, room=room if ON_GPUS else TOKENS) for layer in (ours, dense)]
    train, whole = (program(layer, mesh) for layer in layers)
    difference = largest_difference(train(params, *data), whole(params, *data))
    print(f"losses and gradients differ by at most {difference:.1e}", flush=True)

    update = jax.jit(lambda params, g: jax.tree.map(lambda p, d: p - 3.0 * d, params, g))
    trained = params
    for step in range(steps):
        loss, gradients = train(trained, *data)
        trained = jax.block_until_ready(update(trained, gradients))
        if step in (0, steps - 1):
            print(f"step {step}: loss {loss:.4f}", flush=True)

    for layer in (ours, dense):
        rate = tokens_per_second(program(partial(layer, room=room), mesh), params, *data)
        print(f"{layer.__name__}: {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
