"""The overlap model on H200s: which collective matmuls are overlapped, and by which plan.

test_overlap_profiles.py compares the plans of all shapes of the benchmark. Here is what they follow
from.
"""

import dataclasses
import re

import pytest

from jax_intranode._src.native import definitions
from jax_intranode._src.selection.overlap import choice
from jax_intranode._src.selection.overlap.plan import Plan, describe_fields, parse
from jax_intranode._src.selection.overlap.profiles import H200, Profile
from jax_intranode._src.selection.overlap.sizes import Sizes

pytestmark = pytest.mark.one_version

RING = 512 << 20


def plan(
    operation: str,
    m: int,
    k: int | tuple[int, ...],
    n: int | tuple[int, ...],
    *,
    world: int = 4,
    dtype: str = "bfloat16",
    profile: Profile | str = H200,
    ring: int = RING,
    outer: int = 1,
    wgrads: int = 0,
) -> Plan | str:
    sizes = Sizes(
        operation,
        outer=outer,
        rows=m // outer // world,
        ks=k if isinstance(k, tuple) else (k,),
        ns=n if isinstance(n, tuple) else (n,),
        world_size=world,
    )
    return choice.choose(sizes, dtype=dtype, profile=profile, ring_bytes=ring, wgrads=wgrads)


GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


def test_sums_that_do_not_fit_the_ring_come_in_rounds() -> None:
    """If the link takes about as long as the matmul. `parts` are those of one round."""
    for world, pairs, parts in ((2, 8, 1), (4, 8, 94), (8, 2, 114)):
        whole = plan(SCATTER, 32768, 1024, 16384, world=world, ring=1 << 30)
        assert isinstance(whole, Plan) and whole.rounds == 1
        kernel = plan(SCATTER, 32768, 1024, 16384, world=world)
        assert kernel == Plan(
            tile_columns=whole.tile_columns, band_pairs=pairs, parts=parts, rounds=2
        )
        assert "2 rounds" in str(kernel)
        sizes = Sizes(SCATTER, 1, 32768 // world, (1024,), (16384,), world)
        assert sizes.fit_fused(kernel, RING) and sizes.scratch_bytes(kernel) < RING
        assert plan(SCATTER, 32768, 4096, 16384, world=world) == Plan()
    # A round does whole column tiles. As many bytes would fit 11 rounds.
    uneven = plan(SCATTER, 131072, 512, 29696)
    assert isinstance(uneven, Plan) and uneven.rounds == 12
    # Not in rounds that are too short.
    assert not getattr(plan(SCATTER, 32768, 1024, 16384, ring=128 << 20), "tile_columns", 0)
    # If the column tiles cannot be split evenly, the first rounds have more.
    assert Sizes(SCATTER, 1, 128, (8,), (1000,), 2).ring_bytes(128, 3) == 2 * 128 * 384


FEW_BYTES = "bytes from peers; overlapping is faster from 12000000 bytes on"


@pytest.mark.parametrize(
    ("operation", "m", "k", "n", "options", "says"),
    [
        (GATHER, 512, 4096, 7168, {}, FEW_BYTES),
        (SCATTER, 1024, 3584, 4096, {}, "bytes from peers"),
        (GATHER, 8192, 8190, 1024, {}, "multiples of 8"),
        (SCATTER, 8192, 1024, 8188, {}, "multiples of 8"),
        (GATHER, 0, 8192, 1024, {}, "no elements"),
        (SCATTER, 8192, 0, 1024, {}, "no elements"),
        # Both gradients as one call.
        (SCATTER, 8192, 1024, 8192, {"wgrads": 1, "world": 2}, "with these as matmuls after it"),
        (GATHER, 8192, 8192, 2048, {"wgrads": 1}, "with these as matmuls after it"),
        (SCATTER, 32768, 1024, 16384, {"wgrads": 1}, "anything but one launch of the kernel"),
        (GATHER, 32768, 16384, 8192, {"wgrads": 1}, "anything but one launch of the kernel"),
        (GATHER, 512, 4096, 1024, {"wgrads": 1}, "bytes from peers"),
        (SCATTER, 32768, 512, 16256, {"wgrads": 1, "world": 2}, "wider tiles do not fit"),
    ],
)
def test_what_is_not_overlapped(
    operation: str, m: int, k: int, n: int, options: dict[str, int], says: str
) -> None:
    reason = plan(operation, m, k, n, **options)
    assert isinstance(reason, str) and says in reason


def test_fields_are_those_of_the_native_plan() -> None:
    assert tuple(field.name for field in dataclasses.fields(Plan)) == definitions.PLAN_FIELDS


def test_kernel_takes_what_fits_the_ring() -> None:
    assert plan(SCATTER, 8192, 3584, 8192, world=2, ring=64 << 20) == Plan()
    assert plan(SCATTER, 8192, 3584, 8192, world=2, ring=70 << 20) == Plan(
        tile_columns=192, direct=True
    )
    # The fused kernel takes at most four matrices.
    assert plan(GATHER, 8192, 2048, 2560, world=2) == Plan(tile_columns=256, band_pairs=6)
    assert isinstance(plan(GATHER, 8192, 2048, (512,) * 5, world=2), str)
    with choice.forced(Plan(tile_columns=256)):
        assert isinstance(plan(SCATTER, 8192, 3584, 8192, ring=64 << 20), str)
        assert plan(SCATTER, 8192, 3584, 8192) == Plan(tile_columns=256)


def test_sums_of_several_products() -> None:
    """The fused kernel sums several terms. The pipeline needs them joined by a copy."""
    for world in (2, 4, 8):
        for k in (1024, 3584):
            kernel = plan(SCATTER, 8192, 4 * k, 8192, world=world)
            assert isinstance(kernel, Plan)
            assert kernel.tile_columns
            assert plan(SCATTER, 8192, (k, 3 * k), 8192, world=world) == kernel
    five = definitions.MAX_MATRICES + 1
    assert plan(SCATTER, 8192, (1024,) * five, 8192) == plan(
        SCATTER, 8192, 1024 * five, 8192, ring=RING // 8
    )
    for k in (2560, 5376):
        reason = plan(SCATTER, 8192, (k,) * five, 4096)
        assert isinstance(reason, str)
        assert "joining the operands of the sum takes" in reason
    # Each term takes whole stages.
    assert Sizes(SCATTER, 1, 8, (8, 72, 64), (8,), 2).stages == 4
    assert Sizes(GATHER, 1, 8, (64,), (100, 100, 300), 2).column_tiles(128) == 5


def test_forced() -> None:
    with choice.forced(Plan(first_pieces=5, last_pieces=6)):
        assert plan(GATHER, 512, 64, 64) == Plan(first_pieces=5, last_pieces=6)
        assert plan(GATHER, 512, 64, 64, profile="not measured") == Plan(
            first_pieces=5, last_pieces=6
        )
        assert isinstance(plan(GATHER, 512, 63, 64), str)
    assert isinstance(plan(GATHER, 512, 64, 64), str)
    for forced in (
        Plan(),
        Plan(tile_columns=256),
        Plan(wgrad=True),
        Plan(tile_columns=192, wgrad=True),
    ):
        with choice.forced(forced):
            assert (
                plan(GATHER, 512, 64, 64, wgrads=1)
                == "not forced with weight gradients and tiles of 256 columns"
            )
    with choice.forced(
        both := Plan(tile_columns=256, wgrad=True, row_pairs_before_wgrad=1, wgrad_tiles_last=2)
    ):
        assert plan(GATHER, 512, 64, 64, wgrads=1) == both
        assert plan(GATHER, 512, 64, 64) == Plan(tile_columns=256)
        assert plan(SCATTER, 512, 64, 64, wgrads=1) == Plan(tile_columns=256, wgrad=True)


def test_plans_are_read_and_refused_by_name() -> None:
    assert parse("tile_columns=192,direct=1") == Plan(tile_columns=192, direct=True)
    assert parse("last_pieces=2, first_pieces=3") == Plan(first_pieces=3, last_pieces=2)
    names = ", ".join(definitions.PLAN_FIELDS)
    for text, says in (
        ("", f"'' is not NAME=INTEGER; the names are {names}"),
        ("rounds", "'rounds' is not NAME=INTEGER"),
        ("rounds=-1", "'rounds=-1' is not NAME=INTEGER"),
        ("rounds=1,rounds=2", "rounds is given twice"),
        ("round=1", f"a plan has no 'round'; it has {names}"),
        ("rounds=0", "rounds=0: it takes integers from 1 on"),
        ("wgrad=2", "wgrad=2: it takes integers from 0 to 1"),
        ("first_pieces=17", "first_pieces=17: it takes integers from 1 to 16"),
        ("tile_columns=200", "tile_columns=200: it takes 0 (the pipeline) or one of 128, 192"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            parse(text)
    for name in definitions.PLAN_FIELDS:
        assert f"{name}=" in describe_fields()
