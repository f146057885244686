"""Numbers of all ranks."""

import jax

from jax_intranode._src import compat

# A rank that is slow to compile keeps the others waiting for its numbers.
_TIMEOUT_MS = 600_000


def from_all_ranks(name: str, value: float) -> list[float]:
    """Returns every rank's value; without `jax.distributed`, this process's only.

    Args:
        name: says which value this is; each name may be used once.
        value: this rank's value.
    """
    client = compat.key_value_client()
    if client is None:
        return [value]
    prefix = f"jax_intranode/bench/{name}"
    client.key_value_set(f"{prefix}/{jax.process_index()}", repr(float(value)))
    return [
        float(client.blocking_key_value_get(f"{prefix}/{rank}", _TIMEOUT_MS))
        for rank in range(jax.process_count())
    ]


def sum_over_ranks(name: str, value: int) -> int:
    """Returns the sum of all ranks' values."""
    return int(sum(from_all_ranks(name, value)))


def max_over_ranks(name: str, value: float) -> float:
    """Returns the largest value of all ranks; NaN if one is."""
    values = from_all_ranks(name, value)
    return next((v for v in values if v != v), max(values))
