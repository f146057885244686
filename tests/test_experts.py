"""A mixture of experts with expert parallelism: the calls and shapes of MaxText's sparse layer.

Each rank has the experts' weights of its own. Tokens are sorted by expert, sent to the ranks of
their experts by a ragged_all_to_all, sorted there, multiplied by ragged_dot, and sent back.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_mesh, sharded
from devices import need_devices
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import full

import jax_intranode

TOKENS, HIDDEN, WIDE, TOP = 12, 8, 16, 2  # tokens of a rank
EXPERTS = 8


def tables_of(sizes: Any, shard: Any, n: int, is_batch_sharded: bool) -> tuple[Any, ...]:
    """The tables of a rank; `sizes`: how many tokens go from each rank to each, or come from it."""
    if is_batch_sharded:
        starts = jnp.cumsum(sizes[shard]) - sizes[shard]
        places = (jnp.cumsum(sizes, axis=0) - sizes)[shard]
        return starts, sizes[shard], places, sizes[:, shard]
    # All ranks have the same tokens, and each sends its results to all.
    place = (jnp.cumsum(sizes) - sizes)[shard]
    return jnp.zeros(n, jnp.int32), jnp.repeat(sizes[shard], n), jnp.repeat(place, n), sizes


def experts(x: Any, sizes: Any, weights: Any) -> Any:
    up, down = weights
    hidden = jax.nn.silu(lax.ragged_dot(x, up, sizes))
    return lax.ragged_dot(hidden, down, sizes)


def routed(x: Any, router: Any) -> tuple[Any, Any, Any]:
    """The weights of the experts of each token, the order of the tokens by expert, and counts."""
    weights, chosen = lax.top_k(jax.nn.softmax(x @ router), TOP)
    order = jnp.argsort(chosen.reshape(-1))
    return weights, order, jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)


def combined(rows: Any, order: Any, weights: Any) -> Any:
    back = rows[jnp.argsort(order)].reshape(-1, TOP, rows.shape[-1])
    return (back * weights[..., None]).sum(axis=1)


def layer(library: Any, n: int, is_batch_sharded: bool) -> Callable[..., Any]:
    """The layer of a rank: its tokens (or those of all), the router, and its experts' weights."""
    local = EXPERTS // n

    def body(x: Any, router: Any, *expert_weights: Any) -> Any:
        shard = lax.axis_index("expert")
        weights, order, counts = routed(x, router)
        rows = x[order // TOP]
        to_shards = counts.reshape(n, local).sum(axis=1)
        if not is_batch_sharded:
            # Each rank takes the tokens of its experts from its own copy.
            begin = (jnp.cumsum(to_shards) - to_shards)[shard]
            mine = jnp.roll(rows, -begin, axis=0)
            local_counts = lax.dynamic_slice(counts, (shard * local,), (local,))
            done = experts(mine, local_counts, expert_weights)
            tables = tables_of(to_shards, shard, n, False)
            rows = library.ragged_all_to_all(
                done, jnp.zeros_like(rows), *tables, axis_name="expert"
            )
            return combined(rows, order, weights)
        sizes = lax.all_gather(to_shards, "expert")
        buffer = jnp.zeros((n * len(rows), HIDDEN), x.dtype)  # if all go to one rank
        tables = tables_of(sizes, shard, n, True)
        came = library.ragged_all_to_all(rows, buffer, *tables, axis_name="expert")
        # Of each rank, the tokens for each expert of this one: sorted by expert.
        of_experts = lax.all_gather(counts, "expert").reshape(n, n, local)[:, shard]
        expert_of_row = jnp.repeat(
            jnp.tile(jnp.arange(local), n), of_experts.reshape(-1), total_repeat_length=len(came)
        )
        total = of_experts.sum()
        expert_of_row = jnp.where(jnp.arange(len(came)) < total, expert_of_row, local)
        by_expert = jnp.argsort(expert_of_row)
        done = experts(came[by_expert], of_experts.sum(axis=0), expert_weights)
        done = jnp.where(jnp.arange(len(done))[:, None] < total, done, 0)
        sorted_back = done[jnp.argsort(by_expert)]
        rows = library.ragged_all_to_all(
            sorted_back, jnp.zeros_like(rows), *tables_of(sizes.T, shard, n, True),
            axis_name="expert",
        )  # fmt: skip
        return combined(rows, order, weights)

    return body


def dense(x: Any, router: Any, up: Any, down: Any) -> Any:
    weights, chosen = lax.top_k(jax.nn.softmax(x @ router), TOP)
    of_all = jnp.einsum("teh,ehd->ted", jax.nn.silu(jnp.einsum("td,edh->teh", x, up)), down)
    return (jnp.take_along_axis(of_all, chosen[..., None], 1) * weights[..., None]).sum(axis=1)


@pytest.mark.parametrize("is_batch_sharded", [True, False])
@pytest.mark.parametrize("library", [jax_intranode, lax], ids=["edited", "unedited"])
@pytest.mark.parametrize("n", [2, full(4)])
def test_loss_and_gradients_are_those_of_the_dense_layer(
    n: int, library: Any, is_batch_sharded: bool
) -> None:
    need_devices(n)
    keys = jax.random.split(jax.random.key(n), 4)
    shapes = (
        *((TOKENS * n, HIDDEN), (HIDDEN, EXPERTS)),
        *((EXPERTS, HIDDEN, WIDE), (EXPERTS, WIDE, HIDDEN)),
    )
    args = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    args[1] = args[1].at[:, 0].add(2)  # some experts get more tokens than others
    mesh = make_mesh((n,), ("expert",))
    tokens = P("expert") if is_batch_sharded else P()
    body = layer(library, n, is_batch_sharded)
    f = sharded(body, mesh, (tokens, P(), P("expert"), P("expert")), tokens, check_vma=False)

    def loss(f: Any, *args: Any) -> Any:
        return (f(*args) ** 2).mean()

    wanted = jax.value_and_grad(lambda *v: loss(dense, *v), (0, 1, 2, 3))(*args)
    with jax_intranode.accelerate():
        g = jax.jit(jax.value_and_grad(lambda *v: loss(f, *v), (0, 1, 2, 3)))
        found = g(*args)
        text = g.lower(*args).as_text()
    assert "@jax_intranode_ragged_all_to_all" in text and "@ragged_all_to_all" not in text
    # lax's gradient of slices that overlap has the last of their gradients, not the sum.
    all_equal = library is jax_intranode or is_batch_sharded
    compared = [jax.tree.leaves(v) if all_equal else [v[0]] for v in (wanted, found)]
    for w, v in zip(*compared, strict=True):
        np.testing.assert_allclose(v, w, rtol=2e-4, atol=1e-6)
