"""Dispatch and combine of random routings: the bits of NumPy's, in the order that is promised."""

from typing import Any

import expert_routings
import jax
import numpy as np
from cases import case, check, group, put, sharded
from jax.sharding import PartitionSpec as P

import jax_intranode

# Tokens, hidden, k, experts of a rank, capacity, dtype. Rows of the second have no whole packet,
# those of the last fill more windows than an epoch buffer has, and a rank has more experts than a
# dispatch by one kernel takes. It is the one whose layout drops rows.
SHAPES: tuple[tuple[int, int, int, int, int | None, str], ...] = (
    (9, 16, 3, 2, None, "float32"),
    (7, 5, 2, 1, 6, "bfloat16"),
    (33, 24, 4, 8, 40, "float16"),
    (1, 8, 8, 3, 2, "float32"),
    (90, 2048, 2, 255, 100, "bfloat16"),
)
ROUTINGS = 36  # of each shape


def compiled(f: Any, *args: Any) -> Any:
    """The program, compiled; lax may only gather who goes where."""
    program = jax.jit(f).lower(*args).compile()
    text = program.as_text()
    assert "jax_intranode_moe_dispatch" in text and "jax_intranode_moe_combine" in text
    assert "all-to-all(" not in text
    return program


@case(world=(2, 3, 4, 5, 6, 7, 8), shape=(0, 1, 2, 3, 4))
def experts_of_random_routings(world: int, shape: int) -> None:
    mesh = group(world)
    tokens, hidden, k, local, capacity, dtype = SHAPES[shape]
    experts = local * world
    rng = np.random.default_rng([world, shape])
    run: Any = None
    for number in range(ROUTINGS if shape < 4 else 4):
        kind = expert_routings.KINDS[number % len(expert_routings.KINDS)]
        ids = expert_routings.routing(rng, world, tokens, k, experts, kind)
        x, weights = expert_routings.operands(rng, world, tokens, hidden, k, dtype)
        args = [put(mesh, P("x"), v) for v in (x, ids, weights)]
        run = run or compiled(expert_routings.program(world, experts, capacity, mesh), *args)
        rows = capacity or world * tokens * min(k, local)
        wanted = expert_routings.expected(x, ids, experts, rows)
        received, sizes, dropped, y = run(*args)
        check(sizes, wanted.sizes)
        check(dropped, wanted.dropped)
        check(received, wanted.received)
        check(y, wanted.combined(wanted.received * np.array(0.5, wanted.received.dtype), weights))


@case(world=(2, 3, 4, 8))
def experts_in_a_loop(world: int) -> None:
    """One program, replayed, whose routings are data of each step, with a psum between them.

    Epochs go on with those of other operations, for which windows are empty.
    """
    mesh = group(world)
    rng = np.random.default_rng(world)
    tokens, k, experts, capacity = 12, 2, 2 * world, 10
    kinds = expert_routings.KINDS * 8
    ids = [expert_routings.routing(rng, world, tokens, k, experts, kind) for kind in kinds]
    x, weights = expert_routings.operands(rng, world, tokens, 64, k, "bfloat16")
    of_rank = expert_routings.layer(lambda rows: rows * 0.5, experts, capacity)

    def body(x: Any, ids: Any, weights: Any) -> Any:
        def step(v: Any, of_step: Any) -> Any:
            total = jax_intranode.psum(v[:1], "x")
            return x[0] + 0 * total, of_rank(v, of_step, weights[0])[3]

        return jax.lax.scan(step, x[0], ids[0])[1][None]

    args = [put(mesh, P("x"), v) for v in (x, np.stack(ids, 1), weights)]
    f = compiled(sharded(body, mesh, P("x"), P("x")), *args)
    found = [expert_routings.expected(x, of_step, experts, capacity) for of_step in ids]
    halves = [e.received * np.array(0.5, e.received.dtype) for e in found]
    wanted = [e.combined(half, weights) for e, half in zip(found, halves, strict=True)]
    for _ in range(2):
        check(f(*args), np.stack(wanted, 1))
