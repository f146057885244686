"""Flax's ImageNet example: trains a ResNet with data parallelism, by jax.pmap."""

import functools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

REPOSITORY = "https://github.com/google/flax"
COMMIT = "18f8f311c275"
FOLDER = "flax/examples/imagenet"
PACKAGES = ("flax", "optax", "ml_collections", "orbax-checkpoint", "absl-py")
TOLERANCE = 1e-3


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Takes training steps; yields the metrics of each."""
    import flax.training.checkpoints  # noqa: F401  It looks for tensorflow, and mocks confuse it.

    # They read images from files.
    for name in ("clu", "tensorflow", "tensorflow_datasets"):
        sys.modules[name] = mock.MagicMock()

    import jax
    import models
    import train
    from configs import default

    config = default.get_config()
    batch, size = (2, 16) if small else (64, 224)
    model_cls = functools.partial(models._ResNet1, num_filters=8) if small else models.ResNet50
    model = train.create_model(model_cls=model_cls, half_precision=False)
    rate = train.create_learning_rate_fn(config, config.learning_rate, steps_per_epoch=10)
    state = train.create_train_state(jax.random.key(0), config, model, size, rate)
    step = jax.pmap(
        functools.partial(train.train_step, learning_rate_fn=rate),
        in_axes=(None, 0),
        out_axes=(None, 0),
        axis_name="batch",
    )
    random = np.random.default_rng(0)
    devices = jax.local_device_count()
    while True:
        images = random.standard_normal((devices, batch, size, size, 3), np.float32)
        labels = random.integers(0, train.NUM_CLASSES, (devices, batch))
        state, metrics = step(state, {"image": images, "label": labels})
        yield {"loss": metrics["loss"]}
