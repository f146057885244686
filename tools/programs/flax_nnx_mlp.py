"""Flax's example 10_fsdp_and_optimizer: trains an MLP of NNX whose parameters are divided."""

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

REPOSITORY = "https://github.com/google/flax"
COMMIT = "18f8f311c275"
FOLDER = "flax/examples/nnx_toy_examples"
PACKAGES = ("flax", "optax")
TOLERANCE = 1e-4
AUTO = True


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Takes training steps; yields the loss of each."""
    sys.modules["matplotlib"] = mock.MagicMock()
    found = importlib.util.find_spec("10_fsdp_and_optimizer")
    assert found is not None and found.origin is not None  # a file in FOLDER
    # All that comes before its loop, whose steps are taken here.
    definitions, loop, _ = Path(found.origin).read_text().partition("losses = []\n")
    assert loop
    script = sys.modules["script"] = types.ModuleType("script")
    np.random.seed(0)
    exec(compile(definitions, found.origin, "exec"), script.__dict__)

    import jax

    for x, y in script.dataset(batch_size=32, num_steps=10_000):
        x, y = jax.device_put((x, y), script.named_sharding("data"))
        yield {"loss": script.train_step(script.model, script.optimizer, x, y)}
