"""Decoding with mixture-of-experts models of jax-llm-examples: tensor and expert parallelism."""

from collections.abc import Iterator
from typing import Any

import numpy as np

REPOSITORY = "https://github.com/jax-ml/jax-llm-examples"
COMMIT = "8b4b24602e06"
PACKAGES = ("etils", "tensorstore", "tqdm")
TOLERANCE = 0.02  # activations are bfloat16


def steps(
    model: Any, config: dict[str, Any], axis_type: str = "Explicit"
) -> Iterator[dict[str, Any]]:
    """Prefills, then decodes token by token.

    The tokens are given (teacher forcing), so that a difference in one step does not change what
    the next step computes. The first result has the logits of the prompt. The others have the
    logits of a token, and the token that the model's own decode_step takes.

    Args:
        model: the module with the model.
        config: fields of its Config.
        axis_type: the type of the mesh's axes that the model is written for.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType

    # The batch over x, heads and features over y, experts over z.
    experts = 2 if jax.device_count() > 2 else 1
    shape = (1, jax.device_count() // experts, experts)
    mesh = jax.make_mesh(shape, ("x", "y", "z"), axis_types=(AxisType[axis_type],) * 3)
    cfg = model.Config(mesh=mesh, causal=True, **config)
    weights = model.Weights.init(jax.random.key(0), cfg)
    random = np.random.default_rng(0)
    batch, prompt = 4, 32
    words = jnp.asarray(random.integers(1, cfg.vocab_size, (batch, cfg.max_seq_len)), jnp.int32)
    forward = jax.jit(model.forward, donate_argnames=("cache",))

    def prefill() -> tuple[Any, Any]:
        with jax.set_mesh(mesh):
            cache = model.KVCache.init(jax.random.key(0), cfg, batch, cfg.max_seq_len)
            _, logits, cache = model.prefill(words[:, :prompt], weights, cache, cfg)
            return logits, cache

    _, cache = prefill()
    logits, cache_of_decode_step = prefill()
    yield {"logits": logits}
    for position in range(prompt, cfg.max_seq_len):
        word = words[:, position : position + 1]
        with jax.set_mesh(mesh):
            logits, cache = forward(
                word, jnp.ones(word.shape, jnp.int32), weights, cfg, cache=cache
            )
            tokens, cache_of_decode_step = model.decode_step(
                word, weights, cache_of_decode_step, cfg
            )
        yield {"logits": logits, "tokens": tokens}
