"""Compares auto-sharded programs with and without accelerate(auto=True)."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from devices import need_devices
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.jax_private import hlo

N = len(jax.devices())


@pytest.fixture(autouse=True)
def not_installed() -> Iterator[None]:
    need_devices(4)
    yield
    jax_intranode.uninstall()
    jax.clear_caches()  # tests share functions, and rewrite them under other conditions


def two_axes(order: Any = None) -> Mesh:
    devices = np.array(jax.devices())[list(order or range(N))]
    return Mesh(devices.reshape(2, -1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / 4


def put(mesh: Mesh, value: Any, *spec: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def constrained(mesh: Mesh, x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def collectives(compiled: Any) -> Counter[str]:
    return hlo.in_compiled(compiled.as_text())


def of_xla(found: Counter[str]) -> int:
    return sum(found[kind] for kind in hlo.KINDS)


def check(f: Callable[..., Any], *args: Any) -> tuple[Counter[str], Counter[str]]:
    """Compares results, shardings and what is left; returns the collectives before and after."""
    wanted_program = jax.jit(f).lower(*args).compile()
    with jax_intranode.accelerate(auto=True):
        found_program = jax.jit(f).lower(*args).compile()
    wanted, found = wanted_program(*args), found_program(*args)
    for w, v in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert w.sharding.is_equivalent_to(v.sharding, w.ndim) and w.dtype == v.dtype
        np.testing.assert_allclose(np.asarray(w), np.asarray(v), rtol=1e-5, atol=1e-6)
    before, after = collectives(wanted_program), collectives(found_program)
    for kind in hlo.KINDS:
        assert after[kind] <= before[kind], (kind, before, after)
    return before, after
