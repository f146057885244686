"""The selection, a pure function, over its whole table."""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
from tiers import quick

from jax_intranode._src.native import definitions
from jax_intranode._src.operations import RECORDS
from jax_intranode._src.selection import config, generations, select, table

pytestmark = pytest.mark.one_version

WORLDS = range(2, 9)
# Hardware and process mode: whether one process has all devices.
SETUPS = tuple(itertools.product(("cpu", "hopper"), ("single", "multi")))
ORDER = {
    "psum": ("one_shot", "two_shot", "lax"),
    "psum_scatter": ("reduce_scatter", "lax"),
    "all_gather": ("all_gather", "lax"),
    "all_to_all": ("all_to_all", "lax"),
}
OPERATIONS = tuple(ORDER)
ELEMENT_BYTES = {
    "bfloat16": 2,
    **{d: np.dtype(d).itemsize for d in definitions.DTYPES if d != "bfloat16"},
}
BARE = ("float32", "bfloat16", "float16")
# Packets and the size of an element decide: these are one dtype of each kind.
KINDS = ("float32", "bfloat16", "int8")
EVERY_DTYPE = pytest.mark.parametrize("dtype", quick(definitions.DTYPES, KINDS))

# xla_ffi/kernels/group.h and rendezvous.py.
_HEADER_BYTES, _PROBE_BYTES, _REGIONS = 64 << 10, 64 << 10, 8


def epoch_buffer_bytes(hardware: str) -> int:
    """The size of an epoch buffer in a slab of the default size."""
    slab = config.Config().slab_bytes("cpu" if hardware == "cpu" else "gpu")
    return ((slab - _PROBE_BYTES) // _REGIONS - _HEADER_BYTES) // 2 // 4096 * 4096


def choose(
    setup: tuple[str, str],
    world: int,
    nbytes: int,
    dtype: str,
    operation: str = "psum",
    **more: object,
) -> select.Selection:
    hardware, mode = setup
    arguments = {
        "nbytes": nbytes, "dtype": dtype, "world_size": world, "hardware": hardware, "mode": mode,
        "epoch_buffer_bytes": epoch_buffer_bytes(hardware), **more,
    }  # fmt: skip
    return select.select(operation, **arguments)


def needed(algorithm: str, nbytes: int, dtype: str, world: int, segments: int = 1) -> int:
    """Bytes of an epoch buffer: a slot of whole packets for each other rank (xla_ffi/kernels)."""
    packet = 16 if dtype in BARE else 32
    packs = (nbytes + 15) // 16
    if segments > 1:
        multiple = world if algorithm == "two_shot" else 1
        packs = -(-packs // (segments * multiple)) * multiple
    if algorithm != "two_shot":
        return min(segments, 2) * (world - 1) * packs * packet  # two segments share an epoch
    return 2 * (world - 1) * max(1, (packs + world - 1) // world) * packet


@functools.cache
def sizes(dtype: str) -> list[int]:
    """Sizes of whole elements: small ones, those at the edges of the table, and beyond it."""
    element = ELEMENT_BYTES[dtype]
    edges = {row.nbytes for rows in table.TABLE.values() for row in rows}
    near = {e + k for e in edges for k in (-16, -1, 0, 1, 16)}
    every = {1, 15, 16, 17, 31, 32, 33, 100, 1000} | {1 << k for k in range(27)} | near
    return sorted({max(1, n // element) * element for n in every})


@pytest.mark.parametrize("operation", OPERATIONS)
@EVERY_DTYPE
@pytest.mark.parametrize("setup", SETUPS, ids="-".join)
def test_every_selection_fits_and_is_sensible(
    setup: tuple[str, str], dtype: str, operation: str
) -> None:
    most, order = epoch_buffer_bytes(setup[0]), ORDER[operation]
    for world in WORLDS:
        stages = []
        for nbytes in sizes(dtype):
            chosen = choose(setup, world, nbytes, dtype, operation)
            context = (world, nbytes, chosen)
            assert chosen.reason, context
            # Messages in segments are larger than those in one epoch.
            in_segments = chosen.segments > 1
            stages.append(len(order) - 1.5 if in_segments else order.index(chosen.algorithm))
            if chosen.algorithm == "lax":
                assert (chosen.blocks, chosen.threads) == (0, 0), context
                # Sizes stop where lax is faster, not where the slab is too small.
                assert "JAX_INTRANODE_SLAB_MIB" not in chosen.reason, context
                continue
            assert needed(chosen.algorithm, nbytes, dtype, world, chosen.segments) <= most, context
            packs = -(-nbytes // 16)
            work = -(-packs // world) if chosen.algorithm == "two_shot" else packs
            assert 1 <= chosen.blocks <= 256, context  # kMaxBlocks
            assert 1 <= chosen.threads <= 1024, context
            assert chosen.threads == 1 or chosen.threads % 32 == 0, context
            # Each block has work.
            assert (chosen.blocks - 1) * chosen.threads < work, context
            assert str(nbytes) in chosen.reason and dtype in chosen.reason, context
        # Algorithms follow each other as sizes grow.
        assert stages == sorted(stages), (world, list(zip(sizes(dtype), stages, strict=True)))
        assert stages[0] == 0 and order[stages[-1]] == "lax", world


def test_the_limit_that_a_reason_names_is_the_limit() -> None:
    for setup, world, dtype in itertools.product(SETUPS, WORLDS, definitions.DTYPES):
        for operation in OPERATIONS:
            reason = choose(setup, world, 1 << 30, dtype, operation).reason
            # Groups of 3 use the rows of 4.
            exchanged = dtype in BARE and world <= (4 if setup[1] == "multi" else 2)
            measured = operation != "all_to_all" or setup[0] == "cpu" or exchanged
            assert (
                "are faster than lax (measured" if measured else "kernels (not measured)"
            ) in reason
            limit = int(reason.split("up to ")[1].split()[0])
            assert choose(setup, world, limit, dtype, operation).algorithm != "lax"
            element = ELEMENT_BYTES[dtype]
            assert choose(setup, world, limit + element, dtype, operation).algorithm == "lax"


def test_a_buffer_that_is_a_byte_too_small() -> None:
    def chosen(epoch_buffer_bytes: int, dtype: str, **more: object) -> select.Selection:
        return choose(
            ("cpu", "multi"), 4, 1000, dtype, epoch_buffer_bytes=epoch_buffer_bytes, **more
        )

    for algorithm, dtype in itertools.product(RECORDS["psum"].in_order, ("float32", "int8")):
        exact = needed(algorithm, 1000, dtype, 4)
        assert chosen(exact, dtype, algorithm=algorithm).algorithm == algorithm
        cut = chosen(exact - 1, dtype, algorithm=algorithm)
        # Two segments of one-shot share an epoch, so they need as much as one.
        assert (cut.algorithm, cut.segments) == (algorithm, 2 if algorithm == "two_shot" else 4)
    exact = needed("one_shot", 1000, "float32", 4)
    refused = chosen(exact - 1, "float32")
    assert refused.algorithm == "lax"
    assert str(exact) in refused.reason and "JAX_INTRANODE_SLAB_MIB" in refused.reason


def of_experts(operation: str, **changes: Any) -> select.Selection:
    facts = {
        "nbytes": 1 << 20, "dtype": "bfloat16", "world_size": 8, "hardware": "hopper",
        "epoch_buffer_bytes": 32 << 20, **changes,
    }  # fmt: skip
    return select.select_experts(operation, **facts)


@pytest.mark.parametrize("operation", ["moe_dispatch", "moe_combine"])
def test_experts_fall_back_where_the_slab_has_no_room(operation: str) -> None:
    """Room is for notices, and for two windows of a place (xla_ffi/kernels/experts.h)."""
    for (hardware, mode), world, nbytes in itertools.product(SETUPS, WORLDS, range(0, 9000, 8)):
        of = {"world_size": world, "hardware": hardware, "mode": mode, "epoch_buffer_bytes": nbytes}
        chosen = of_experts(operation, **of)
        if chosen.algorithm == "lax":
            assert nbytes < 64 * world
            assert "JAX_INTRANODE_SLAB_MIB" in chosen.reason and f"{nbytes} bytes" in chosen.reason
        else:
            assert (world - 1) * (32 * chosen.blocks + 2 * 16) <= nbytes


@pytest.mark.parametrize("operation", ["moe_dispatch", "moe_combine"])
def test_blocks_of_experts_are_resident(operation: str) -> None:
    """Two blocks and the one that checks fit on each SM. test_kernel_registers.py has the rest."""
    for generation, blocks in (("hopper", 256), ("ampere", 215), ("blackwell", 256)):
        for nbytes, wanted in ((100 << 20, blocks), (256 * 16 * 7, 7), (1, 1)):
            chosen = of_experts(operation, nbytes=nbytes, hardware=generation)
            assert (chosen.blocks, chosen.threads) == (wanted, 256)
            assert chosen.blocks + 1 <= 2 * generations.of_hardware(generation).sms


def test_a_dispatch_of_few_tokens_is_routed() -> None:
    """It needs room for the ids of each block, the weights and all tokens."""

    def algorithm(ids: int, experts: int, room: int, world: int = 3) -> str:
        of = {"nbytes": 16384, "world_size": world, "epoch_buffer_bytes": room}
        return of_experts("moe_dispatch", ids=ids, experts=experts, **of).algorithm

    needed = 2 * (4 * 32 + 4 * 32 + 16384)  # of 32 ids, 4 blocks, 2 peers
    routed = "routed_dispatch"
    assert algorithm(32, 254, needed) == routed
    assert algorithm(32, 254, needed - 1) == algorithm(32, 255, needed) == "dispatch"
    assert algorithm(0, 0, needed) == "dispatch"
    for world, most in ((2, 1024), (4, 1024), (8, 512)):
        assert algorithm(most, 8, 1 << 20, world) == routed
        assert algorithm(most + 1, 8, 1 << 20, world) == "dispatch"
    # Large blocks if they fill the 132 SMs.
    for nbytes, grid in ((16384, (4, 256)), (1081343, (256, 256)), (1081344, (131, 512))):
        chosen = of_experts("moe_dispatch", ids=32, experts=8, world_size=3, nbytes=nbytes)
        assert (chosen.algorithm, chosen.blocks, chosen.threads) == (routed, *grid)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("setup", SETUPS, ids="-".join)
def test_segments_fit_and_are_no_more_than_needed(setup: tuple[str, str], operation: str) -> None:
    most = epoch_buffer_bytes(setup[0])
    large = [n for n in sizes("float32") if n > 64 << 20] + [100_000_004, 5 << 30]
    for world, dtype, segment in itertools.product(
        WORLDS, ("bfloat16", "int8"), (1 << 14, 4 << 20)
    ):
        for nbytes in large:
            chosen = choose(setup, world, nbytes, dtype, operation, segment_bytes=segment)
            context = (world, nbytes, dtype, chosen)
            algorithm = "one_shot" if (operation, world) == ("psum", 2) else ORDER[operation][-2]
            assert chosen.algorithm == algorithm, context
            assert "JAX_INTRANODE_SEGMENT_KIB" in chosen.reason, context
            assert f"in {chosen.segments} segments" in chosen.reason, context
            fits = [
                nbytes <= n * segment and needed(chosen.algorithm, nbytes, dtype, world, n) <= most
                for n in (chosen.segments // 2, chosen.segments)
            ]
            assert fits == [False, True], context
            packs = -(-nbytes // 16 // chosen.segments)
            work = -(-packs // world) if chosen.algorithm == "two_shot" else packs
            assert 1 <= chosen.blocks <= 256 and (chosen.blocks - 1) * chosen.threads <= work, (
                context
            )


def test_digest_changes_with_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("hopper", "multi", "psum", "bare", 8)
    first, *rest = table.TABLE[key]
    fields: dict[str, Any] = dict.fromkeys(("nbytes", "threads", "blocks", "segment_bytes"), 1)
    fields |= {"algorithm": "two_shot", "measured": False}
    assert {field.name for field in dataclasses.fields(first)} == fields.keys()
    changed = [{key: (dataclasses.replace(first, **{k: v}), *rest)} for k, v in fields.items()]
    digests = set()
    for change in ({}, {}, {key: rest}, {(*key[:-1], 3): rest}, *changed):
        monkeypatch.setattr(table, "TABLE", table.TABLE | change)
        digests.add(select.digest())
        monkeypatch.undo()
    assert len(digests) == 3 + len(changed)


def test_a_group_takes_the_rows_of_the_next_larger_one() -> None:
    for (*where, world), rows in table.TABLE.items():
        of_smaller = [size for *at, size in table.TABLE if at == where and size < world]
        for size in range(max(of_smaller, default=1) + 1, world + 1):
            assert table.rows(*where, size) == rows
