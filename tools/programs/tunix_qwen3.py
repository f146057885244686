"""Tunix: trains a Qwen3 model, divided over "fsdp" and "tp", by its trainer."""

from collections.abc import Iterator
from typing import Any

import numpy as np

REPOSITORY = "https://github.com/google/tunix"
COMMIT = "v0.1.7"
FOLDER = "tunix"
PACKAGES = ("google-tunix==0.1.7",)
TOLERANCE = 1e-5
AUTO = True


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Takes training steps; yields the loss of each."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.sharding import AxisType
    from tunix.models.qwen3.model import ModelConfig, Qwen3
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

    length = 32 if small else 1024
    config = ModelConfig.qwen3_0p6b()
    config.num_layers = 2 if small else 8
    if small:
        config.vocab_size, config.embed_dim, config.hidden_dim = 256, 64, 128
        config.num_heads, config.num_kv_heads, config.head_dim = 4, 4, 16
    shape = (len(jax.devices()) // 2, 2)
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def inputs_of(batch: Any) -> dict[str, Any]:
        causal = jnp.tril(jnp.ones((length, length), jnp.bool_))
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": jnp.broadcast_to(jnp.arange(length), batch.input_tokens.shape),
            "attention_mask": jnp.broadcast_to(causal, (len(batch.input_tokens), length, length)),
        }

    def divided() -> Any:
        model = Qwen3(config, rngs=nnx.Rngs(0))
        state = nnx.state(model)
        specs = nnx.get_partition_spec(state)
        nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
        return model

    random = np.random.default_rng(0)
    with mesh:
        model = nnx.jit(divided)()
        trainer = PeftTrainer(model, optax.adamw(1e-3), TrainingConfig(eval_every_n_steps=1000))
        step, _ = trainer.with_gen_model_input_fn(inputs_of).jit_train_and_eval_step()
        while True:
            tokens = random.integers(config.vocab_size, size=(2 * shape[0], length))
            batch = TrainingInput(jnp.asarray(tokens), jnp.ones(tokens.shape, jnp.bool_))
            yield {"loss": step(jax.device_put(batch, jax.NamedSharding(mesh, jax.P("fsdp"))))[0]}
