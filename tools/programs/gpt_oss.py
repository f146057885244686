"""gpt-oss of jax-llm-examples with random weights: decoding."""

from collections.abc import Iterator
from typing import Any

from programs import jax_llm
from programs.jax_llm import COMMIT as COMMIT
from programs.jax_llm import PACKAGES as PACKAGES
from programs.jax_llm import REPOSITORY as REPOSITORY
from programs.jax_llm import TOLERANCE as TOLERANCE

FOLDER = "jax-llm-examples/gpt_oss"


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Prefills and decodes; see jax_llm.steps."""
    from gpt_oss_jax import model

    layers = 2 if small else 8
    yield from jax_llm.steps(
        model,
        {
            "embed": 64 if small else 2880,
            "q_heads": 16 if small else 64,  # its attention sinks need q_heads = head_dim
            "kv_heads": 4 if small else 8,
            "head_dim": 16 if small else 64,
            "num_layers": layers,
            "vocab_size": 128 if small else 32_768,
            "max_seq_len": 128,
            "quant_cache": False,
            "sliding_window_size": 128,
            "sliding_attention_map": ["sliding_attention", "full_attention"] * (layers // 2),
            "moe_ffw_size": 64 if small else 2880,
            "moe_experts_per_tok": 4,
            "moe_num_experts": 8 if small else 32,
        },
    )
