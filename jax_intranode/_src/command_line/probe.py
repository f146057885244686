"""The tests of `doctor` in processes of their own: memory of peers, and operations."""

import random
import time
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.command_line.launcher.all_ranks import Rank
from jax_intranode._src.group import topology
from jax_intranode._src.jax_private import distributed
from jax_intranode._src.native import extension

_BYTES = 1 << 16
_WORD = 0x600DCAFE
_ELEMENTS = 256  # of float32 on each device: the size at which every table has a row
# Of the check under load: its time, calls of the program at once, steps of the program, elements
# of float32 on each device, and rows of the matrix that is multiplied meanwhile.
_LOAD_S, _CALLS, _STEPS = 2.0, 5, 20
_SIZES, _ROWS = (840, 840 * 16), 256


def peers(rank: Rank) -> list[str]:
    """Writes from each GPU into each other one, and reads it there; returns what failed.

    On a hybrid cube mesh only linked GPUs must reach each other.
    """
    module: Any = extension.module("gpu")
    gpus = range(rank.devices.size)
    memory = [module.allocate(gpu, _BYTES, False) for gpu in gpus]
    links = topology.link_matrix(topology.read_links([module.pci_bus_id(gpu) for gpu in gpus]))
    is_cube_mesh = topology.relays(links) is not None
    failures = []
    for number, (writer, owner) in enumerate(permutations(gpus, 2)):
        if is_cube_mesh and not links[writer][owner]:
            continue
        try:
            module.enable_peer_access(writer, owner)
            address = memory[owner].address + 4 * number
            module.write_word(writer, address, _WORD + number)
            found = module.read_word(owner, address)
            if found != _WORD + number:
                failures.append(f"GPU {writer} wrote {_WORD + number} to GPU {owner}, read {found}")
        except RuntimeError as error:
            failures.append(f"GPU {writer} to GPU {owner}: {error}")
    return failures


def memory_of_a_process(rank: Rank) -> list[str]:
    """Rank 0 allocates memory, rank 1 writes into it, and rank 0 reads; returns what failed."""
    module: Any = extension.module(rank.devices.platform)
    device = rank.number if rank.devices.platform == "gpu" else 0
    store: Any = distributed.key_value_client()
    if rank.number == 0:
        memory = module.allocate(device, _BYTES, True)
        try:
            store.key_value_set("doctor/handle", memory.handle().hex())
            all_ranks.values("doctor/written", 0)
        finally:
            memory.unlink()
        found = module.read_word(device, memory.address)
        return [] if found == _WORD else [f"a process wrote {_WORD}, and the owner reads {found}"]
    handle = bytes.fromhex(store.blocking_key_value_get("doctor/handle", 60_000))
    memory = module.open(device, handle, _BYTES)
    module.write_word(device, memory.address, _WORD)
    all_ranks.values("doctor/written", 0)
    return []


def operations(rank: Rank) -> dict[str, Any]:
    """Runs a psum and an all-gather; returns what ran the psum, why, and whether both are right."""
    mesh = rank.mesh()

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax_intranode.psum(x, "x"), jax_intranode.all_gather(x, "x", tiled=True)

    program = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=(P(), P(None)), check_vma=False)
    )
    whole = np.arange(2 * _ELEMENTS, dtype=np.float32)
    sharding = NamedSharding(mesh, P("x"))
    x = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    right = True
    for _ in range(10):
        total, gathered = (np.asarray(y.addressable_data(0)) for y in program(x))
        right &= np.array_equal(total, whole[:_ELEMENTS] + whole[_ELEMENTS:])
        right &= np.array_equal(gathered, whole)
    psum = jax_intranode.explain(program)(x).own[0]
    return {
        "right": right,
        "algorithm": psum.algorithm,
        "reason": psum.reason,
        "operations": jax_intranode.usage_counter(),
    }


def values_under_load(rank: Rank) -> dict[str, int]:
    """Compares every result of collectives while matmuls run and ranks come late.

    Operands are small integers, which have one sum in any order. They depend on rank, step and
    call, so that an old value is a wrong one.

    Returns:
        The numbers of wrong results ("wrong") and of all results ("elements") on all ranks.
    """
    mesh, size = rank.mesh(), rank.devices.size

    def step(k: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        call, w, wrong = state
        for elements in _SIZES:
            numbers = jnp.arange(size * elements).reshape(size, elements) * 7919
            xs = ((numbers + call * 37 + k) % 1013).astype(jnp.float32)  # of all ranks
            me = lax.axis_index("x")
            total = xs.sum(0)
            pairs = (
                (jax_intranode.psum(xs[me], "x"), total),
                (
                    jax_intranode.psum_scatter(xs[me], "x", tiled=True),
                    total.reshape(size, -1)[me],
                ),
                (jax_intranode.all_gather(xs[me], "x"), xs),
                (
                    jax_intranode.all_to_all(xs[me], "x", 0, 0, tiled=True),
                    xs.reshape(size, size, -1)[:, me].reshape(-1),
                ),
            )
            wrong += sum(jnp.sum(ours != right) for ours, right in pairs)
            w = jnp.tanh(w @ w)
        return call, w, wrong

    def f(call: Any, w: Any) -> tuple[Any, Any]:
        _, w, wrong = lax.fori_loop(0, _STEPS, step, (call, w, jnp.int32(0)))
        return wrong[None], w

    specs: Any = {"in_specs": (P(), P()), "out_specs": (P("x"), P())}
    program = jax.jit(jax.shard_map(f, mesh=mesh, check_vma=False, **specs))
    w = np.eye(_ROWS, dtype=np.float32)
    end, calls, wrong = time.monotonic() + _LOAD_S, 0, 0
    while not all_ranks.values(f"doctor/{calls}/over", time.monotonic() > end)[0]:
        found = []
        for _ in range(_CALLS):
            time.sleep(random.uniform(0, 0.005))
            calls += 1
            found.append(program(np.int32(calls), w)[0])
        wrong += sum(int(shard.data[0]) for of in found for shard in of.addressable_shards)
    elements = sum(2 * n + n // size + n * size for n in _SIZES)
    return {
        "wrong": all_ranks.total("doctor/wrong", wrong),
        "elements": calls * _STEPS * size * elements,
    }
