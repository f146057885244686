"""Flax's example gemma: trains over Explicit axes, with FSDP and tensor parallelism."""

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

REPOSITORY = "https://github.com/google/flax"
COMMIT = "18f8f311c275"
FOLDER = "flax/examples/gemma"
PACKAGES = ("flax", "optax", "orbax-checkpoint", "absl-py", "jaxtyping")
TOLERANCE = 1e-3
EXPLICIT = True


def steps(small: bool, tensor: int = 2) -> Iterator[dict[str, Any]]:
    """Takes training steps; yields the loss of each. `tensor` is the size of the second axis."""
    for name in ("clu", "grain", "sentencepiece"):  # they read sentences from files
        sys.modules[name] = mock.MagicMock()

    import jax
    import jax.numpy as jnp
    import optax
    import train
    from configs import tiny
    from flax import nnx

    config = tiny.get_config().replace(tensor_parallelism=tensor, warmup_steps=10)
    words, length, batch = config.vocab_size, config.max_target_length, config.per_device_batch_size
    params = dict(config.transformer_params)
    if small:
        words, length, batch = 64, 16, 1
        params |= {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "head_dim": 8}
        params |= {"attention_types": (1, 1)}
    batch *= jax.device_count()
    mesh = jax.make_mesh(config.get_mesh_shape(jax.device_count()), config.mesh_axes)
    of_model = train.transformer_lib.TransformerConfig.from_dict(
        **params,
        num_embed=words,
        dtype=jnp.float32 if small else jnp.bfloat16,
        shd_config=train.ShardingConfig.fsdp_tp_sharding(
            fsdp_axis_name="fsdp", tensor_parallel_axis_name="tensor"
        ),
    )
    rate = train.create_learning_rate_schedule(config.learning_rate, config.warmup_steps)
    adam = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    step = jax.jit(
        train.jax_train_step,
        static_argnames=("label_smoothing", "pad_id", "with_capture"),
        donate_argnames=("model", "optimizer"),
    )
    random = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        rngs = nnx.Rngs(params=0, dropout=0)
        model = train.transformer_lib.Transformer(of_model, rngs=rngs)
        optimizer = nnx.Optimizer(model, tx=adam, wrt=nnx.Param)
        of_data = jax.sharding.NamedSharding(mesh, jax.P(config.data_sharding))
        while True:
            # Packed examples, as the input pipeline makes them.
            data = {
                "inputs": random.integers(1, words, (batch, length)),
                "targets": random.integers(1, words, (batch, length)),
                "inputs_position": np.tile(np.arange(length), (batch, 1)),
                "inputs_segmentation": np.ones((batch, length), np.int32),
            }
            data = {name: jax.device_put(x, of_data) for name, x in data.items()}
            updates, _ = step(model, optimizer, rngs, data, metrics)
            nnx.update((model, optimizer, rngs, metrics), updates)
            yield {"loss": metrics.compute()["loss"]}
