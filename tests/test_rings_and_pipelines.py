"""Ring attention and a GPipe schedule give what one device computes, and so do their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, sharded, shift
from devices import need_devices
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import full

import jax_intranode

WORLDS = [full(2), 4]


def our_calls(f: Callable[..., Any], *args: Any) -> set[tuple[str, str]]:
    """The operations of a program, and what runs each."""
    return {(call.operation, call.algorithm) for call in jax_intranode.explain(f)(*args)}


def check_close(ours: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


# Ring attention: the keys and values travel around the ring.


def ring_attention(q: Any, k: Any, v: Any, n: int) -> Any:
    top = jnp.full((*q.shape[:-1], 1), -jnp.inf)
    total, out = jnp.zeros_like(top), jnp.zeros_like(q)
    for _ in range(n):
        scores = q @ k.T
        new_top = lax.stop_gradient(jnp.maximum(top, scores.max(-1, keepdims=True)))
        weights, keep = jnp.exp(scores - new_top), jnp.exp(top - new_top)
        total = total * keep + weights.sum(-1, keepdims=True)
        out, top = out * keep + weights @ v, new_top
        k, v = jax_intranode.ppermute((k, v), "x", shift(n))
    return out / total


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T) @ v


@jax.default_matmul_precision("highest")
@pytest.mark.parametrize("check_vma", [True, full(False)])
@pytest.mark.parametrize("n", WORLDS)
def test_ring_attention(n: int, check_vma: bool) -> None:
    need_devices(n)
    qkv = [normal(4 * n, 8, seed=k) for k in range(3)]

    def body(*blocks: Any) -> Any:
        return ring_attention(*blocks, n)

    f = sharded(body, line(n), P("x"), P("x"), check_vma)

    def loss(g: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *xs: (g(*xs) ** 2).sum(), argnums=(0, 1, 2)))

    assert our_calls(loss(f), *qkv) == {("ppermute", "permute")}
    check_close(loss(f)(*qkv), loss(attention)(*qkv))


# GPipe: in each step every stage computes a microbatch and sends the result to the next stage.


def stage(weights: Any, v: Any) -> Any:
    return jnp.tanh(v @ weights)


def pipelined(weights: Any, batches: Any, n: int) -> Any:
    """The results of the last stage; zeros on the others."""
    rank, count = lax.axis_index("x"), len(batches)
    following = [(r, r + 1) for r in range(n - 1)]

    def step(carry: Any, k: Any) -> Any:
        first = batches[jnp.minimum(k, count - 1)]
        result = stage(weights[0], jnp.where(rank == 0, first, carry))
        return jax_intranode.ppermute(result, "x", following), result

    start = 0 * batches[0] @ weights[0]  # varies over the axis
    _, results = lax.scan(step, start, jnp.arange(count + n - 1))
    return jnp.where(rank == n - 1, results[n - 1 :], 0)


@jax.default_matmul_precision("highest")
@pytest.mark.parametrize("remat", [full(False), True])
@pytest.mark.parametrize("n", WORLDS)
def test_a_pipeline(n: int, remat: bool) -> None:
    need_devices(n)
    weights, batches = normal(n, 8, 8), normal(5, 4, 8, seed=1)

    def body(weights: Any, batches: Any) -> Any:
        of = jax.checkpoint(pipelined, static_argnums=2) if remat else pipelined
        return jax_intranode.psum(of(weights, batches, n), "x")

    f = sharded(body, line(n), (P("x"), P()), P(), True)

    def on_one_device(weights: Any, batches: Any) -> Any:
        for of_stage in weights:
            batches = stage(of_stage, batches)
        return batches

    def loss(g: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda w, b: (g(w, b) ** 2).sum(), argnums=(0, 1)))

    calls = our_calls(loss(f), weights, batches)
    assert ("ppermute", "permute") in calls and ("ppermute", "lax") not in calls
    check_close(loss(f)(weights, batches), loss(on_one_device)(weights, batches))
