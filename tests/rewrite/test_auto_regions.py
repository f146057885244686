"""Partly manual shard_maps: collectives over manual axes of arrays sharded over Auto axes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from auto_programs import N, check, normal, not_installed, of_xla, put, two_axes
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src import operations

__all__ = ["not_installed"]


def over_data(mesh: Mesh, f: Any, ins: Any, outs: Any, vma: bool = True) -> Any:
    """A shard_map that binds "data" and leaves "model" to XLA."""
    return jax.shard_map(
        f, mesh=mesh, in_specs=ins, out_specs=outs, axis_names={"data"}, check_vma=vma
    )


@pytest.mark.parametrize("vma", [True, False])
def test_collectives_over_the_manual_axis(vma: bool) -> None:
    mesh = two_axes()

    def body(x: Any) -> Any:
        total = lax.psum(x, "data")
        whole = lax.all_gather(x, "data", axis=0, tiled=True)
        part = lax.psum_scatter(whole * 2, "data", scatter_dimension=0, tiled=True)
        turned = lax.all_to_all(jnp.sin(whole), "data", 0, 0, tiled=True)
        return total[None] + part[None], turned

    f = over_data(mesh, body, P("data"), (P("data"), P("data")), vma)
    x = put(mesh, normal(0, 8, 16), "data", "model")
    before, after = check(f, x)
    assert of_xla(before) >= 4 and of_xla(after) == 0
    kinds = ("psum", "all_gather", "psum_scatter", "all_to_all")
    assert all(after[f"jax_intranode_{kind}"] == 1 for kind in kinds)


def test_every_float8_is_exchanged() -> None:
    mesh = two_axes()
    dtypes = [dtype for dtype in operations.EXCHANGED if dtype.startswith("float8")]

    def body(xs: Any) -> Any:
        return [lax.all_to_all(x, "data", 0, 0, tiled=True) for x in xs]

    f = over_data(mesh, body, P("data"), P("data"))
    xs = [put(mesh, normal(0, 8, 16).astype(dtype), "data", "model") for dtype in dtypes]
    _, after = check(f, xs)
    assert of_xla(after) == 0 and after["jax_intranode_all_to_all"] == len(dtypes)


@pytest.mark.parametrize("vma", [True, False])
def test_experts_with_tensor_parallel_weights(vma: bool) -> None:
    """Each device of "data" has an expert, whose matmuls XLA partitions over "model"."""
    mesh = two_axes()

    def body(w: Any, x: Any) -> Any:
        hidden = jax.nn.gelu(x @ w["up"][0])
        return lax.psum(hidden @ w["down"][0], "data")

    f = over_data(mesh, body, ({"up": P("data"), "down": P("data")}, P()), P(), vma)
    w = {
        "up": put(mesh, normal(0, 2, 16, 32), "data", None, "model"),
        "down": put(mesh, normal(1, 2, 32, 16), "data", "model"),
    }
    x = put(mesh, normal(2, 8, 16))
    before, after = check(f, w, x)
    assert of_xla(before) == 2 and of_xla(after) == 0
    gradient = jax.grad(lambda w, x: (f(w, x) ** 2).sum(), argnums=(0, 1))
    before, after = check(gradient, w, x)
    assert of_xla(after) < of_xla(before)


def test_a_gather_before_a_matmul() -> None:
    """Both share a shard_map, whose operand has the shape that it has before the gather."""
    mesh = two_axes()

    def body(x: Any, w: Any) -> Any:
        return x @ lax.all_gather(w, "data", axis=0, tiled=True)

    f = over_data(mesh, body, (P(), P("data")), P(), vma=False)
    x = put(mesh, normal(0, 16, 16), "model")
    before, after = check(f, x, put(mesh, normal(1, 16, 8), "data"))
    assert of_xla(before) == 1 and of_xla(after) == 0


def test_beside_a_whole_shard_map() -> None:
    mesh = two_axes()
    whole = jax.shard_map(
        lambda x: lax.psum(x, "model"), mesh=mesh, in_specs=P("data", "model"), out_specs=P("data")
    )

    def f(x: Any, w: Any) -> Any:
        return whole(x) + x @ w

    x = put(mesh, normal(0, 8, 16), "data", "model")
    before, after = check(f, x, put(mesh, normal(1, 16, 16 // (N // 2)), "model"))
    assert of_xla(before) == 2 and of_xla(after) == 0


def test_a_dimension_that_is_sharded_over_both_is_left() -> None:
    mesh = two_axes()

    def body(x: Any) -> Any:
        return lax.all_gather(x, "data", axis=0, tiled=True)

    f = over_data(mesh, body, P("data"), P(), vma=False)
    x = put(mesh, normal(0, 16, 16), ("data", "model"))
    check(f, x)
    with jax_intranode.accelerate(auto=True):
        (call,) = [c for c in jax_intranode.explain(f)(x) if c.operation == "all_gather"]
    assert call.algorithm == "lax" and "Auto axes" in call.reason
