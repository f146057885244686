"""Flax's WMT example: trains a translation Transformer with data parallelism, by jax.pmap."""

import functools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

REPOSITORY = "https://github.com/google/flax"
COMMIT = "18f8f311c275"
FOLDER = "flax/examples/wmt"
PACKAGES = ("flax", "optax", "ml_collections", "orbax-checkpoint", "absl-py")
TOLERANCE = 1e-3


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Takes training steps; yields the metrics of each."""
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
    from flax import jax_utils

    vocabulary, width, layers, batch, length = 32_000, 1024, 6, 16, 256
    if small:
        vocabulary, width, layers, batch, length = 64, 32, 1, 2, 16
    config = models.TransformerConfig(
        vocab_size=vocabulary,
        output_vocab_size=vocabulary,
        share_embeddings=True,
        logits_via_embedding=True,
        emb_dim=width,
        num_heads=4 if small else 16,
        num_layers=layers,
        qkv_dim=width,
        mlp_dim=4 * width,
        max_len=length,
    )
    key = jax.random.key(0)
    model = models.Transformer(config.replace(deterministic=True))
    ones = jnp.ones((batch, length), jnp.float32)
    rate = train.create_learning_rate_schedule(learning_rate=2e-3, warmup_steps=10)
    state = train.TrainState.create(
        apply_fn=model.apply,
        params=jax.jit(model.init)(key, ones, ones)["params"],
        tx=optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9),
        dynamic_scale=None,
    )
    devices = jax.local_device_count()
    state = jax_utils.replicate(state)
    step = jax.pmap(
        functools.partial(
            train.train_step, config=config, learning_rate_fn=rate, label_smoothing=0.1
        ),
        axis_name="batch",
        donate_argnums=(0,),
    )
    dropout_rngs = jax.random.split(key, devices)
    random = np.random.default_rng(0)
    while True:
        words = random.integers(1, vocabulary, (2, devices, batch, length))
        state, metrics = step(
            state, {"inputs": words[0], "targets": words[1]}, dropout_rng=dropout_rngs
        )
        yield {"loss": metrics["loss"] / metrics["denominator"]}
