"""DeepSeek R1 of jax-llm-examples with random weights: decoding."""

from collections.abc import Iterator
from typing import Any

from programs import jax_llm
from programs.jax_llm import COMMIT as COMMIT
from programs.jax_llm import PACKAGES as PACKAGES
from programs.jax_llm import REPOSITORY as REPOSITORY
from programs.jax_llm import TOLERANCE as TOLERANCE

FOLDER = "jax-llm-examples/deepseek_r1_jax"
AUTO = True


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Prefills and decodes; see jax_llm.steps."""
    from deepseek_r1_jax import model

    sizes = {"embed": 64, "ffw_size": 128, "moe_ffw_size": 64, "num_heads": 8, "num_layers": 4}
    sizes |= {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "vocab_size": 128}
    sizes |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "n_routed_experts": 32}
    more = sizes if small else {"num_layers": 6, "vocab_size": 32_768}
    config = {"max_seq_len": 128, "use_decode_ragged_dot_kernel": False, "quantize_cache": False}
    yield from jax_llm.steps(model, config | {"quantize_moe": False, **more}, "Auto")
