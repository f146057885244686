"""Optax: trains a small transformer block, whose parameters are divided (FSDP), by Muon."""

from collections.abc import Iterator
from typing import Any

REPOSITORY = "https://github.com/google-deepmind/optax"
COMMIT = "v0.2.8"
FOLDER = "optax"
PACKAGES = ("optax==0.2.8",)
TOLERANCE = 1e-4
AUTO = True


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Takes training steps; yields the loss of each."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    width, length = (64, 16) if small else (2048, 1024)
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def matrix(*shape: int) -> Any:
        return jax.device_put(jax.random.normal(next(keys), shape) * shape[0] ** -0.5, rows)

    params = {
        "qkv": matrix(width, 3 * width),
        "out": matrix(width, width),
        "up": matrix(width, 4 * width),
        "down": matrix(4 * width, width),
        "scale": jax.device_put(jnp.ones(width), whole),
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.contrib.muon(optax.cosine_decay_schedule(1e-2, 100))
    )
    state = jax.jit(optimizer.init)(params)

    def block(params: Any, x: Any) -> Any:
        normed = params["scale"] * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        heads = jnp.stack(jnp.split(normed @ params["qkv"], 3, -1))
        q, k, v = heads.reshape(*heads.shape[:-1], 4, -1)
        x = (
            x
            + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ params["out"]
        )
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return jnp.mean((block(params, x[:, :-1]) - x[:, 1:]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    for number in range(10_000):
        shape = (mesh.size, length + 1, width)
        x = jax.device_put(jax.random.normal(jax.random.key(number), shape), rows)
        params, state, loss = step(params, state, x)
        yield {"loss": loss}
