"""Qwen3 of jax-llm-examples with random weights: decoding."""

from collections.abc import Iterator
from typing import Any

from programs import jax_llm
from programs.jax_llm import COMMIT as COMMIT
from programs.jax_llm import PACKAGES as PACKAGES
from programs.jax_llm import REPOSITORY as REPOSITORY
from programs.jax_llm import TOLERANCE as TOLERANCE

FOLDER = "jax-llm-examples/qwen3"


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Prefills and decodes; see jax_llm.steps."""
    from qwen3_jax import model

    yield from jax_llm.steps(
        model,
        {
            "embed": 64 if small else 2048,
            "q_heads": 8 if small else 32,
            "kv_heads": 4,
            "head_dim": 16 if small else 128,
            "num_layers": 2 if small else 12,
            "vocab_size": 128 if small else 32_768,
            "max_seq_len": 128,
            "quant_cache": False,
            "moe_ffw_size": 64 if small else 768,
            "moe_experts_per_tok": 4 if small else 8,
            "moe_num_experts": 8 if small else 128,
        },
    )
