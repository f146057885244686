"""Dispatch and combine of random routings: the bits of NumPy's, in the order that is promised."""

from typing import Any

import expert_routings
import jax
import numpy as np
import pytest
from cases import case, check, line, put
from jax.sharding import PartitionSpec as P

# Tokens, hidden, k, experts of a rank, capacity, dtype. Rows of the second have no whole packet,
# those of the last fill more windows than an epoch buffer has, and a rank has more experts than a
# dispatch by one kernel takes.
SHAPES: tuple[tuple[int, int, int, int, int | None, str], ...] = (
    (9, 16, 3, 2, None, "float32"),
    (7, 5, 2, 1, 6, "bfloat16"),
    (33, 24, 4, 8, 40, "float16"),
    (1, 8, 8, 3, 2, "float32"),
    (90, 2048, 2, 255, None, "bfloat16"),
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
    mesh = line(world)
    if 1 < jax.process_count() != world:
        pytest.skip("each number of processes runs the groups of its size")
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
