"""MaxText: trains a small dense decoder on made data, with FSDP and tensor parallelism."""

import os
from collections.abc import Iterator
from typing import Any

REPOSITORY = "https://github.com/AI-Hypercomputer/maxtext"
COMMIT = "e591f30cb"
FOLDER = "maxtext/src"
# What its modules import. Those of Google Cloud have stand-ins.
PACKAGES = ("flax", "optax", "orbax-checkpoint", "grain", "tensorflow-cpu", "transformers")
PACKAGES += ("sentencepiece", "datasets", "aqtp", "qwix", "tokamax", "drjax", "sympy", "jinja2")
PACKAGES += ("omegaconf", "pathwaysutils", "tensorboardX", "psutil", "requests", "tiktoken")
PACKAGES += ("ml_collections", "pillow")
TOLERANCE = 1e-3
AUTO = True

SMALL = "base_emb_dim=32 base_mlp_dim=128 base_num_query_heads=4 base_num_kv_heads=4 head_dim=8 "
SMALL += "base_num_decoder_layers=2 vocab_size=64 max_target_length=32 dtype=float32"
LARGE = "base_emb_dim=2048 base_mlp_dim=8192 base_num_decoder_layers=4 max_target_length=2048"
BOTH = "run_name=compared base_output_directory=/tmp dataset_type=synthetic steps=1000 "
BOTH += "enable_checkpointing=false attention=dot_product log_config=false "
BOTH += "enable_goodput_recording=false skip_jax_distributed_system=true "
BOTH += "ici_fsdp_parallelism=-1 ici_tensor_parallelism=2 hardware="


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Takes training steps; yields the loss of each."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"

    import jax
    import maxtext
    from flax import nnx
    from flax.linen import partitioning
    from maxtext.trainers.pre_train import train
    from maxtext.utils import sharding, train_utils

    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    options = f"{BOTH}{'cpu' if small else 'gpu'} {SMALL if small else LARGE}".split()
    config, recorder = train.initialize(["train", base, *options])
    made = train_utils.setup_train_loop(config, recorder)
    _, _, shardings, _, mesh, _, _, loader, rampup, _, state = made
    graph, state = nnx.split(state)
    of_params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    step, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, shardings, train.train_step, params_shardings=of_params
    )
    while True:
        batch = loader.load_next_batch(rampup_manager=rampup)
        with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
            state, metrics = step(state, batch)
        yield {"loss": metrics["scalar"]["learning/loss"]}
