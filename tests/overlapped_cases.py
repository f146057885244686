"""What cases of overlapped collective matmuls share: plans, compilation, and poisoned rings."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import cases
import jax
import numpy as np
import pytest
from cases import Case, check_like, line, put, sharded
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models import OF_LAX

import jax_intranode
from jax_intranode._src.group import agreed
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.jax_private.distributed import key_value_client
from jax_intranode._src.native import definitions, extension
from jax_intranode._src.selection import config
from jax_intranode._src.selection.overlap import choice
from jax_intranode._src.selection.overlap.plan import Plan

CASES: dict[str, Case] = {}
case = functools.partial(cases.case, into=CASES)

# The plans that the cases force.
PLANS = {
    "whole": Plan(),
    "pieces": Plan(first_pieces=3, last_pieces=2),
    "most_pieces": Plan(first_pieces=16, last_pieces=16),
    "fused": Plan(tile_columns=192, parts=3),
    "fused_224": Plan(tile_columns=224, band_pairs=3),  # all-gathers only
    "fused_256": Plan(tile_columns=256, band_pairs=1),
    "fused_128": Plan(tile_columns=128, band_pairs=2),
    "direct": Plan(tile_columns=192, parts=2, direct=True),
    "direct_256": Plan(tile_columns=256, direct=True),
    "direct_128": Plan(tile_columns=128, direct=True),
    "wgrad": Plan(
        tile_columns=256,
        parts=2,
        rounds=2,
        wgrad=True,
        row_pairs_before_wgrad=1,
        wgrad_tiles_last=4,
    ),
}
ALL = tuple(PLANS)
# For gradients only: without weight gradients these plans are like those above.
WGRAD = {
    "wgrad_1_round": Plan(tile_columns=256, wgrad=True),
    "wgrad_3_rounds": Plan(
        tile_columns=256,
        band_pairs=2,
        rounds=3,
        wgrad=True,
        row_pairs_before_wgrad=2,
        wgrad_tiles_last=100,
    ),
}
PLANS |= WGRAD


def on_gpus() -> bool:
    return jax.devices()[0].platform == "gpu"


def zeros_and_ones(seed: int, *shape: int) -> np.ndarray:
    """Zeros and few ones: matmuls with K up to 1000 are exact in bfloat16."""
    return (np.random.default_rng(seed).random(shape) < 0.2).astype(np.float32)


def overlapped(f: Any, args: Sequence[Any], plan: str = "pieces", **options: Any) -> Any:
    """Compiles a program. On GPUs all of its collective matmuls must be overlapped."""
    if not on_gpus() and plan not in ("whole", "pieces", "fused"):
        pytest.skip(f"needs GPUs; on CPUs {plan} is like the other plans")
    with choice.forced(PLANS[plan]):
        program = jax.jit(f, **options)
        calls = [c for c in jax_intranode.explain(program)(*args) if "matmul" in c.operation]
        assert calls
        if on_gpus():
            taken = [c for c in calls if plan != "fused_224" or c.operation == "all_gather_matmul"]
            assert taken, calls
            assert all(c.reason.startswith("overlapped") for c in taken), calls
        return program.lower(*args).compile()


def both_gradients(f: Any, args: Sequence[Any], plan: str, calls: int) -> Any:
    """Compiles a program in which, on GPUs, `calls` calls compute weight gradients if forced to."""
    if on_gpus():
        with choice.forced(PLANS[plan]):
            found = [call.reason for call in jax_intranode.explain(f)(*args)]
        taken = [reason for reason in found if reason.startswith("overlapped")]
        with_wgrads = sum("with weight gradients" in reason for reason in taken)
        assert with_wgrads == (calls if PLANS[plan].wgrad else 0), found
    return overlapped(f, args, plan)


def settle(mesh: Mesh) -> None:
    """Waits until the devices of all processes are idle."""
    program = jax.jit(sharded(lambda v: lax.psum(v, "x"), mesh, P("x"), P()))
    jax.block_until_ready(program(put(mesh, P("x"), np.zeros(mesh.size, np.float32))))
    wait_for_all("settle")


def wait_for_all(name: str) -> None:
    """Waits for all processes."""
    if (client := key_value_client()) is not None and jax.process_count() > 1:
        client.wait_at_barrier(name, 60_000)


def poison(mesh: Mesh) -> None:
    """Fills the rings of this process with NaN. No operation may be in flight."""
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    module = extension.module(rendezvous.platform)
    if rendezvous.ring_bytes == 0:
        return
    offset = definitions.ring_data_offset(rendezvous.ring_bytes)
    start = config.get().slab_bytes(rendezvous.platform) + offset
    for device_id, addresses in rendezvous.addresses.items():
        module.fill(
            agreed.native_ordinal(rendezvous.devices[device_id]),
            addresses[device_id] + start,
            0xFF,
            rendezvous.ring_bytes - offset,
        )


def check_in_poisoned_rings(
    program: Callable[..., Any],
    shapes: Sequence[Sequence[int]],
    plan: str,
    times: int,
    dtype: str = "bfloat16",
    compiled: Callable[..., Any] = overlapped,
) -> None:
    """Results are exactly lax's, also when the rings were full of NaN before.

    The program is a function of a library and of a rank's operands, which have these shapes.
    """
    mesh = line()

    def of(lib: Any) -> Any:
        def body(*args: Any) -> Any:
            return [v[None] for v in program(lib, *(arg[0] for arg in args))]

        return sharded(body, mesh, P("x"), P("x"))

    values = (zeros_and_ones(k, mesh.size, *shape) for k, shape in enumerate(shapes))
    arrays = [put(mesh, P("x"), v.astype(dtype)) for v in values]
    theirs = jax.jit(of(OF_LAX))(*arrays)
    ours = compiled(of(jax_intranode), arrays, plan)
    for _ in range(times):
        settle(mesh)
        poison(mesh)
        settle(mesh)
        check_like(ours(*arrays), theirs, 0)
