"""Equinox: trains an MLP whose layers are divided over "model", and whose data over "data"."""

from collections.abc import Iterator
from typing import Any

REPOSITORY = "https://github.com/patrick-kidger/equinox"
COMMIT = "v0.13.8"
FOLDER = "equinox"
PACKAGES = ("equinox==0.13.8", "optax==0.2.8")
TOLERANCE = 1e-5
AUTO = True


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Takes training steps; yields the loss of each."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    width = 64 if small else 4096
    shape = (2, len(jax.devices()) // 2)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def divided(module: Any) -> Any:
        """Weights [out, in]: columns and rows of two consecutive layers; the rest is replicated."""
        specs = iter((P("model", None), P(None, "model")) * 2)

        def place(x: Any) -> Any:
            spec = next(specs) if x.ndim == 2 else P()
            return eqx.filter_shard(x, NamedSharding(mesh, spec))

        return jax.tree.map(lambda x: place(x) if eqx.is_array(x) else x, module)

    model = divided(eqx.nn.MLP(width, width, 4 * width, depth=3, key=jax.random.key(0)))
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="none")
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    for number in range(10_000):
        x = jax.random.normal(jax.random.key(number), (8 * shape[0], width))
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        model, state, loss = step(model, state, x, jnp.sin(x))
        yield {"loss": loss}
