"""Matmuls of plain jit programs under a mesh with Explicit axes."""

from collections.abc import Callable
from typing import Any

import auto_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from auto_programs import N, normal, not_installed
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

__all__ = ["not_installed"]
EXPLICIT = AxisType.Explicit


def explicit_mesh(order: Any = None, **of: Any) -> Mesh:
    return auto_programs.two_axes(order, EXPLICIT, EXPLICIT, **of)


def put(seed: int, shape: tuple[int, ...], *spec: Any) -> jax.Array:
    return jax.device_put(normal(seed, *shape), P(*spec))


def check(f: Callable[..., Any], *args: Any) -> int:
    """Compares results and shardings; returns how many operations of ours the program has."""
    _, after = auto_programs.check(f, *args, auto=False)
    return sum(n for name, n in after.items() if name.startswith("jax_intranode"))


def batches_in_a_loop(x: Any, w: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        y = jnp.einsum("bsk,kn->bsn", c, w, out_sharding=P("data", None, None))
        return jax.reshard(jnp.tanh(y), P("data", None, "model")), None

    return lax.scan(jax.checkpoint(step), x, None, length=3)[0]


def reductions_that_jax_decorates(x: Any, w: Any) -> Any:
    """JAX says of the numbers that argmax compares how they are sharded."""
    y = jnp.dot(x, w, out_sharding=P("data", None))
    return jnp.argmax(y, 0), jnp.max(y, 0), y.sum()


def lookups(table: Any, words: Any) -> Any:
    """A lookup and its gradient, with the next word by argmax."""

    def loss(table: Any, words: Any) -> Any:
        rows = table.at[words].get(out_sharding=P("data", None))
        chosen = jnp.argmax(jnp.dot(rows, table.T, out_sharding=P("data", "model")), -1)
        return (rows**2).sum(), chosen

    return jax.grad(loss, has_aux=True)(table, words.astype(int) % 64)


Array = tuple[tuple[int, ...], Any]
PROGRAMS: dict[str, tuple[Callable[..., Any], Array, Array, int]] = {
    "a gathered batch": (
        lambda x, w: jnp.einsum("bij,bjk->bik", x, w, out_sharding=P()),
        ((8, 4, 16), P("model")),
        ((8, 16, 4), P()),
        1,
    ),
    "batches in a loop": (
        batches_in_a_loop,
        ((4, 2, 16), P("data", None, "model")),
        ((16, 16), P("model")),
        1,
    ),
    "reductions": (
        reductions_that_jax_decorates,
        ((8, 32), P("data", "model")),
        ((32, 16), P("model")),
        5,
    ),
    "lookups": (lookups, ((64, 16), P("model")), ((8,), P("data")), 4),
    "faster by lax": (
        lambda x, w: jnp.dot(x, w, out_sharding=P()),
        ((512, 64), P(None, "model")),
        ((64, 2048), P("model")),
        0,
    ),
    "nothing to communicate": (jnp.dot, ((8, 16), P("data")), ((16, 32), P(None, "model")), 0),
    "booleans, which lax.psum would count": (
        lambda x, w: jnp.dot(x > 0, w > 0, out_sharding=P()),
        ((8, 16), P(None, "model")),
        ((16, 8), P("model")),
        0,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    f, left, right, count = PROGRAMS[name]
    with jax.set_mesh(explicit_mesh()):
        assert check(f, put(0, left[0], *left[1]), put(1, right[0], *right[1])) == count


def test_axes_of_one_device_and_of_other_types() -> None:
    """Axes of one device are in the types, and nothing is sent over them."""
    with jax.set_mesh(explicit_mesh(shape=(N, 1))):
        x, w = put(0, (8, 32), "data", "model"), put(1, (32, 16), "data", "model")
        assert check(lambda x, w: jnp.dot(x, w, out_sharding=P("data", "model")), x, w) == 1
    with jax.set_mesh(auto_programs.two_axes(None, AxisType.Auto, EXPLICIT)):
        x, w = put(0, (8, 16), None, "model"), put(1, (16, 8), "model", None)
        # A shard_map can't be fully manual.
        assert check(lambda x, w: jnp.dot(x, w, out_sharding=P()), x, w) == 0


def test_fsdp_and_tensor_parallelism() -> None:
    """Matmuls with a gather and a sum or two gathers, forward and backward, and nothing is left."""

    def loss(weights: Any, x: Any) -> Any:
        up, down = weights
        h = jax.nn.relu(jnp.dot(x, up, out_sharding=P("data", "model")))
        return (jnp.dot(h, down, out_sharding=P("data", "model")) ** 2).mean()

    with jax.set_mesh(explicit_mesh()):
        weights = put(1, (16, 32), "data", "model"), put(2, (32, 16), "model", "data")
        gradient = jax.jit(jax.value_and_grad(loss))
        x = put(0, (8, 16), "data", "model")
        assert check(gradient, weights, x) >= 8
        with jax_intranode.accelerate():
            found = jax_intranode.explain(gradient, compiled=True)(weights, x)
    assert found.compiled is not None
    assert not [kind for kind in found.compiled if not kind.startswith("jax_intranode_")]


@pytest.mark.parametrize("context", [jax.set_mesh, jax.sharding.use_abstract_mesh])
def test_another_order_of_devices(context: Any) -> None:
    f = jax.jit(lambda x, w: jnp.dot(x, w, out_sharding=P()))
    x, w = np.arange(128.0).reshape(8, 16) % 7, np.arange(128.0).reshape(16, 8) % 5
    with jax_intranode.accelerate():
        for order in (range(N), range(N)[::-1], [*range(1, N), 0]):
            mesh = explicit_mesh(order)
            with context(mesh if context is jax.set_mesh else mesh.abstract_mesh):
                args = (
                    jax.device_put(x, NamedSharding(mesh, P(None, "model"))),
                    jax.device_put(w, NamedSharding(mesh, P("model", None))),
                )
                np.testing.assert_array_equal(f(*args), x @ w)
                assert check(lambda x, w: jnp.dot(x, w, out_sharding=P()), *args) == 1


@pytest.mark.parametrize(
    ("left", "right", "result", "wanted"),
    [
        (P(None, "model"), P("model"), P(), ["psum"]),
        (P("data", "model"), P("model"), P("data"), ["psum"]),
        (P(None, "model"), P("model"), P("model"), ["psum_scatter"]),
        (P(None, "model"), P("model"), P(None, "model"), ["psum_scatter"]),
        (P("model"), P(), P(), ["all_gather"]),
        (P("model"), P(None, "data"), P(None, "data"), ["all_gather"]),
        (P(), P(None, "model"), P(), ["all_gather"]),
        (P("data"), P(None, "model"), P("data", "model"), []),
        (P("data", "model"), P("model"), P(), ["all_gather", "psum"]),
        (P("data"), P(None, "model"), P(), ["all_gather", "all_gather"]),
        (P("data"), P("data", "model"), P("data", "model"), ["all_gather"]),  # FSDP
        (P("data", "model"), P("model", "data"), P("data"), ["all_gather", "psum"]),  # and TP
        (P(("data", "model")), P(), P("data"), ["all_gather"]),  # over the minor axis alone
        # Scattered behind an axis that stays.
        (P("data", "model"), P("model"), P(("data", "model")), ["psum_scatter"]),
    ],
)
def test_communication(left: P, right: P, result: P, wanted: list[str]) -> None:
    with jax.set_mesh(explicit_mesh()):
        x, w = put(0, (16, 32), *left), put(1, (32, 8), *right)
        f = jax.jit(lambda x, w: jnp.dot(x, w, out_sharding=result))
        assert check(f, x, w) == len(wanted)
        with jax_intranode.accelerate():
            found = [c.operation for c in jax_intranode.explain(f)(x, w) if c.algorithm != "lax"]
        assert sorted(found) == wanted
