"""What tests of collective matmuls share: programs over ranks, gradients, comparison."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, random, sharded
from devices import need_devices
from jax.sharding import PartitionSpec as P
from models import OF_LAX
from tiers import full

import jax_intranode
from jax_intranode._src.jax_private import hlo

N = min(4, len(jax.devices()))
GATHER, SCATTER, SUM = "all_gather", "psum_scatter", "psum"
BOTH = pytest.mark.parametrize("check_vma", [True, False])
MOSTLY_CHECKED = pytest.mark.parametrize("check_vma", [True, full(False)])


@pytest.fixture(autouse=True)
def float32_products() -> Iterator[None]:
    """Multiplies in float32; the default on GPUs is TF32."""
    need_devices(2)
    with jax.default_matmul_precision("highest"):
        yield


def values(*shapes: Sequence[int], dtype: str = "float32") -> list[np.ndarray]:
    return [random(dtype, shape, seed) for seed, shape in enumerate(shapes)]


BY_X = P("x")


def over_x(body: Any, in_specs: Any, out_specs: Any = BY_X, check_vma: bool = False) -> Any:
    return sharded(body, line(N), in_specs, out_specs, check_vma)


def with_gradients(
    f: Callable[..., Any], argnums: Sequence[int] | None = None
) -> Callable[..., Any]:
    """A function that returns results, and gradients of a loss that is not linear in them."""

    def both(*args: Any) -> Any:
        if argnums is None:
            results, pull_back = jax.vjp(f, *args)
            return results, pull_back(jax.tree.map(jnp.cos, results))

        def of_some(*some: Any) -> Any:
            given = dict(zip(argnums, some, strict=True))
            return f(*(given.get(i, arg) for i, arg in enumerate(args)))

        results, pull_back = jax.vjp(of_some, *(args[i] for i in argnums))
        return results, pull_back(jax.tree.map(jnp.cos, results))

    return both


def same(ours: Any, theirs: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = (
            np.asarray(v).astype("complex128" if v.dtype.kind == "c" else float) for v in (a, b)
        )
        scale = max(1, np.abs(b).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


def like_lax(program: Callable[[Any], Callable[..., Any]], *args: Any) -> None:
    """Compares a program with ours to one with lax's; ours has to have custom calls."""
    ours = jax.jit(program(jax_intranode))
    assert collectives(ours, *args)
    same(ours(*args), jax.jit(program(OF_LAX))(*args))


def collectives(f: Callable[..., Any], *args: Any) -> Counter[str]:
    """Counts the collectives of a program: ours by name, lax's as "lax" and HLO's name."""
    ours = "jax_intranode_"
    found = hlo.in_lowered(jax.jit(f).lower(*args).as_text())
    return Counter(
        {
            name.removeprefix(ours) if name.startswith(ours) else f"lax {name}": k
            for name, k in found.items()
        }
    )
