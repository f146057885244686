"""Matmuls of plain jit programs under a mesh with Explicit axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import need_devices
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.jax_private import hlo

N = len(jax.devices())


def explicit_mesh(
    order: Any = None, kinds: tuple[AxisType, AxisType] = (AxisType.Explicit,) * 2
) -> Mesh:
    need_devices(4)
    devices = np.array(jax.devices())[list(order or range(N))]
    return Mesh(devices.reshape(2, N // 2), ("data", "model"), axis_types=kinds)


def put(seed: int, shape: tuple[int, ...], *spec: Any) -> jax.Array:
    return jax.device_put(jax.random.normal(jax.random.key(seed), shape), P(*spec))


def mlp(x: Any, w1: Any, w2: Any) -> Any:
    hidden = jax.nn.relu(x @ w1)
    return jnp.dot(hidden, w2, out_sharding=P("data", None))


def arguments() -> tuple[jax.Array, ...]:
    return (
        put(0, (8, 16), "data", None),
        put(1, (16, 32), None, "model"),
        put(2, (32, 16), "model", None),
    )


def check(f: Callable[..., Any], *args: Any) -> int:
    """Compares results and shardings; returns how many operations of ours the program has."""
    jitted = jax.jit(f)
    wanted = jitted(*args)
    with jax_intranode.accelerate():
        found = jitted(*args)
        text = jitted.lower(*args).as_text()
    for w, v in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert w.sharding == v.sharding and w.dtype == v.dtype
        np.testing.assert_allclose(np.asarray(w), np.asarray(v), rtol=1e-4, atol=1e-4)
    return sum(n for name, n in hlo.in_lowered(text).items() if name.startswith("jax_intranode"))


def test_row_parallel() -> None:
    with jax.set_mesh(explicit_mesh()):
        assert check(mlp, *arguments()) == 1


def test_gradients() -> None:
    """The sums over "data" for the weights, and those over "model" for the activations."""
    with jax.set_mesh(explicit_mesh()):
        gradient = jax.grad(lambda *args: (mlp(*args) ** 2).sum(), argnums=(0, 1, 2))
        assert check(gradient, *arguments()) >= 3


def test_scattered_sum_and_gathered_operand() -> None:
    with jax.set_mesh(explicit_mesh()):
        x, w = put(0, (8, 32), None, "model"), put(1, (32, 16), "model", None)
        assert check(lambda x, w: jnp.dot(x, w, out_sharding=P("model", None)), x, w) == 1
        x, w = put(0, (8, 16), "model", None), put(1, (16, 32), None, "model")
        assert check(lambda x, w: jnp.dot(x, w, out_sharding=P(None, "model")), x, w) == 1


def test_some_axes_of_a_dimension() -> None:
    with jax.set_mesh(explicit_mesh()):
        x, w = put(0, (8, 16), ("data", "model"), None), put(1, (16, 32), None, None)
        assert check(lambda x, w: jnp.dot(x, w, out_sharding=P("data", None)), x, w) == 1
        x, w = put(0, (8, 16), "data", "model"), put(1, (16, 32), "model", None)
        scattered = P(("data", "model"), None)
        assert check(lambda x, w: jnp.dot(x, w, out_sharding=scattered), x, w) == 1


def test_a_gathered_batch_dimension() -> None:
    with jax.set_mesh(explicit_mesh()):
        x, w = put(0, (8, 4, 16), "model", None, None), put(1, (8, 16, 4), None, None, None)
        assert check(lambda x, w: jnp.einsum("bij,bjk->bik", x, w, out_sharding=P()), x, w) == 1


def test_batch_dimensions_and_inner_functions() -> None:
    def f(x: Any, w: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            y = jnp.einsum("bsk,kn->bsn", c, w, out_sharding=P("data", None, None))
            return jax.reshard(jnp.tanh(y), P("data", None, "model")), None

        return lax.scan(jax.checkpoint(step), x, None, length=3)[0]

    with jax.set_mesh(explicit_mesh()):
        x, w = put(0, (4, 2, 16), "data", None, "model"), put(1, (16, 16), "model", None)
        assert check(f, x, w) == 1


def test_axes_of_one_device() -> None:
    """They are in the types, and nothing is sent over them."""
    need_devices(4)
    mesh = jax.make_mesh((N, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x, w = put(0, (8, 32), "data", "model"), put(1, (32, 16), "data", "model")
        assert check(lambda x, w: jnp.dot(x, w, out_sharding=P("data", "model")), x, w) == 1


def test_reductions_that_jax_decorates() -> None:
    """JAX says of the numbers that argmax compares how they are sharded."""

    def f(x: Any, w: Any) -> Any:
        y = jnp.dot(x, w, out_sharding=P("data", None))
        return jnp.argmax(y, 0), jnp.max(y, 0), y.sum()

    with jax.set_mesh(explicit_mesh()):
        assert check(f, put(0, (8, 32), "data", "model"), put(1, (32, 16), "model", None)) == 5


def test_lookups_in_a_sharded_table() -> None:
    """A lookup and its gradient, with the next word by argmax."""

    def loss(table: Any, words: Any) -> Any:
        rows = table.at[words].get(out_sharding=P("data", None))
        chosen = jnp.argmax(jnp.dot(rows, table.T, out_sharding=P("data", "model")), -1)
        return (rows**2).sum(), chosen

    with jax.set_mesh(explicit_mesh()):
        table = put(0, (64, 16), "model", None)
        words = jax.device_put(np.arange(8, dtype=np.int32) * 9, P("data"))
        assert check(jax.grad(loss, has_aux=True), table, words) >= 4


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


def test_another_order_of_devices() -> None:
    f = jax.jit(mlp)
    with jax_intranode.accelerate():
        for order in (range(N), range(N)[::-1]):
            with jax.set_mesh(explicit_mesh(order)):
                args = arguments()
                wanted = np.maximum(np.asarray(args[0]) @ np.asarray(args[1]), 0)
                np.testing.assert_allclose(
                    f(*args), wanted @ np.asarray(args[2]), rtol=1e-4, atol=1e-4
                )


def test_what_stays() -> None:
    def large(x: Any, w: Any) -> Any:
        return jnp.dot(x, w, out_sharding=P())

    with jax.set_mesh(explicit_mesh()):
        x, w = put(0, (512, 64), None, "model"), put(1, (64, 2048), "model", None)
        assert check(large, x, w) == 0  # lax is faster
        local = put(0, (8, 16), "data", None), put(1, (16, 32), None, "model")
        assert check(jnp.dot, *local) == 0  # nothing to communicate
        booleans = [put(0, (8, 16), None, "model") > 0, put(1, (16, 8), "model", None) > 0]
        assert check(large, *booleans) == 0  # lax.psum would count
    partly = explicit_mesh(kinds=(AxisType.Auto, AxisType.Explicit))
    with jax.set_mesh(partly):
        x, w = put(0, (8, 16), None, "model"), put(1, (16, 8), "model", None)
        assert check(large, x, w) == 0  # a shard_map can't be fully manual


def test_the_order_of_devices_without_set_mesh() -> None:
    mesh = explicit_mesh([*range(1, N), 0])
    x = jax.device_put(np.arange(128.0).reshape(8, 16), NamedSharding(mesh, P(None, "model")))
    w = jax.device_put(np.arange(128.0).reshape(16, 8), NamedSharding(mesh, P("model", None)))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert check(lambda x, w: jnp.dot(x, w, out_sharding=P()), x, w) == 1


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
