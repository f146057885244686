"""Compares programs that XLA partitions with and without accelerate()."""

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
def not_installed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing has failed, which would be a warning, unless the test has cleared what was logged."""
    need_devices(4)
    yield
    jax_intranode.uninstall()
    jax.clear_caches()  # tests share functions, and rewrite them under other conditions
    assert not [r for r in caplog.get_records("call") if r.levelname == "WARNING"]


def two_axes(order: Any = None, *kinds: AxisType, shape: Any = (2, -1)) -> Mesh:
    devices = np.array(jax.devices())[list(order or range(N))].reshape(shape)
    return Mesh(devices, ("data", "model"), axis_types=kinds or (AxisType.Auto,) * 2)


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / 4


def put(value: Any, *spec: Any, mesh: Mesh | None = None) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh or two_axes(), P(*spec)))


def of(shape: tuple[int, ...], *spec: Any, dtype: str = "float32") -> Callable[[int], jax.Array]:
    """An argument of random numbers, made from a seed when its program runs."""
    scale = 1 if dtype == "float32" else 10
    return lambda seed: put((scale * normal(seed, *shape)).astype(dtype), *spec)


def constrained(x: Any, *spec: Any, mesh: Mesh | None = None) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(mesh or two_axes(), P(*spec)))


def collectives(compiled: Any) -> Counter[str]:
    return hlo.in_compiled(compiled.as_text())


def of_xla(found: Counter[str]) -> int:
    return sum(found[kind] for kind in hlo.KINDS)


def compiled(f: Callable[..., Any], *args: Any) -> Any:
    return (f if hasattr(f, "lower") else jax.jit(f)).lower(*args).compile()


def same_results(wanted: Any, found: Any) -> None:
    for w, v in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert w.sharding.is_equivalent_to(v.sharding, w.ndim) and w.dtype == v.dtype
        np.testing.assert_allclose(np.asarray(w), np.asarray(v), rtol=1e-5, atol=1e-6)


def check(
    f: Callable[..., Any], *args: Any, auto: bool = True, left: int | None = None, **ours: int
) -> tuple[Counter[str], Counter[str]]:
    """Compares results and shardings; returns the collectives before and after.

    Args:
        auto: whether the program is over Auto axes.
        left: how many of XLA's must be left, of more that it had. If None, not more than it had.
        ours: how many operations of this package there must be, for some of them.
    """
    wanted_program = compiled(f, *args)
    with jax_intranode.accelerate(auto=auto):
        found_program = compiled(f, *args)
    same_results(wanted_program(*args), found_program(*args))
    before, after = collectives(wanted_program), collectives(found_program)
    for kind in hlo.KINDS:
        assert after[kind] <= before[kind], (kind, before, after)
    assert left is None or of_xla(after) == left < of_xla(before), (before, after)
    found = {name: after[f"jax_intranode_{name}"] for name in ours}
    assert found == ours, (before, after)
    return before, after


def check_left(f: Callable[..., Any], *args: Any) -> None:
    """Nothing of a program to which XLA adds collectives is replaced."""
    before, after = check(f, *args)
    assert before == after and of_xla(before) > 0
