"""Keras' distribution API: trains an MLP with `ModelParallel` and a `LayoutMap`."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

REPOSITORY = "https://github.com/keras-team/keras"
COMMIT = "v3.15.1"
FOLDER = "keras"
PACKAGES = ("keras==3.15.1",)
TOLERANCE = 1e-5
AUTO = True


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Takes training steps; yields the loss of each."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import keras

    width = 64 if small else 4096
    devices = len(jax.devices())
    mesh = keras.distribution.DeviceMesh((2, devices // 2), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    layout["up.*/kernel"] = (None, "model")
    layout["down.*/kernel"] = ("model", None)
    layout["up.*/bias"] = ("model",)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((width,))
    for number in range(2):
        y = keras.layers.Dense(4 * width, activation="gelu", name=f"up{number}")(x)
        x = keras.layers.LayerNormalization()(
            x + keras.layers.Dense(width, name=f"down{number}")(y)
        )
    model = keras.Model(inputs, x)
    model.compile(optimizer="adamw", loss="mse")
    random = np.random.default_rng(0)
    while True:
        batch = random.standard_normal((16, width), np.float32)
        yield {"loss": np.asarray(model.train_on_batch(batch, np.sin(batch)))}
