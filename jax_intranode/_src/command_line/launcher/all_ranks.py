"""Numbers that all ranks exchange through JAX's key-value store."""

import jax

from jax_intranode._src.jax_private import distributed

# A rank that compiles for long keeps the others waiting.
_TIMEOUT_MS = 600_000


def values(name: str, value: float) -> list[float]:
    """Returns the values of all ranks; only this process's without `jax.distributed`.

    Args:
        name: identifies the value; each name may be used once.
    """
    client = distributed.key_value_client()
    if client is None:
        return [value]
    prefix = f"jax_intranode/command/{name}"
    client.key_value_set(f"{prefix}/{jax.process_index()}", repr(float(value)))
    return [
        float(client.blocking_key_value_get(f"{prefix}/{rank}", _TIMEOUT_MS))
        for rank in range(jax.process_count())
    ]


def total(name: str, value: int) -> int:
    """Returns the sum of all ranks' values."""
    return int(sum(values(name, value)))


def largest(name: str, value: float) -> float:
    """Returns the largest value of all ranks; NaN if one is NaN."""
    of_all = values(name, value)
    return next((v for v in of_all if v != v), max(of_all))
