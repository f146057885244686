"""Flax's language model example: trains with FSDP and tensor parallelism, by logical axes."""

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

REPOSITORY = "https://github.com/google/flax"
COMMIT = "18f8f311c275"
FOLDER = "flax/examples/lm1b"
PACKAGES = ("flax", "optax", "ml_collections", "orbax-checkpoint", "absl-py")
TOLERANCE = 1e-3
AUTO = True


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Takes training steps; yields the loss of each."""
    import flax.training.checkpoints  # noqa: F401  It looks for tensorflow, and mocks confuse it.

    # They read sentences from files.
    absent = ("clu", "tensorflow", "tensorflow_datasets", "tensorflow_text", "sentencepiece")
    for name in absent:
        sys.modules[name] = mock.MagicMock()

    import jax
    import jax.numpy as jnp
    import models
    import optax
    import train
    import utils
    from configs import default
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    config = default.get_config()
    config.update(
        ici_data_parallelism=2, ici_fsdp_parallelism=-1, ici_tensor_parallelism=2, warmup_steps=10
    )
    if small:
        config.update(vocab_size=64, emb_dim=32, qkv_dim=32, mlp_dim=128, num_heads=4)
        config.update(num_layers=2, max_target_length=16, per_device_batch_size=1)
    fields = ("emb_dim", "num_heads", "num_layers", "qkv_dim", "mlp_dim")
    of_model = models.TransformerConfig(
        vocab_size=config.vocab_size,
        output_vocab_size=config.vocab_size,
        max_len=config.max_target_length,
        dtype=jnp.float32 if small else jnp.bfloat16,
        **{name: config[name] for name in fields},
    )
    model = models.TransformerLM(of_model.replace(deterministic=True))
    rate = train.create_learning_rate_schedule(config.learning_rate, config.warmup_steps)
    mesh = Mesh(utils.create_device_mesh(config), config.mesh_axes)
    adam = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
    key = jax.random.key(0)
    state, shardings = utils.setup_initial_state(model, adam, config, key, mesh)
    of_data = NamedSharding(mesh, PartitionSpec(config.data_sharding))
    step = jax.jit(
        train.train_step,
        in_shardings=(shardings, of_data, None),
        out_shardings=(shardings, None),
        static_argnums=(2, 3, 4),
        donate_argnums=0,
    )
    random = np.random.default_rng(0)
    batch = config.per_device_batch_size * jax.device_count()
    while True:
        words = random.integers(1, config.vocab_size, (batch, config.max_target_length))
        state, metrics = step(state, {"inputs": words}, of_model, rate, 0.0, key)
        yield {"loss": metrics["loss"] / metrics["denominator"]}
