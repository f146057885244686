"""The benchmark's programs compute what they should, with our collectives and with lax's.

Without communication they compute the same types, and their HLO has no collective.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from bench_programs import definitions
from cases import line
from devices import need_devices
from jax import lax
from tiers import quick

import jax_intranode

pytestmark = pytest.mark.one_version

AUTO = [name for name in definitions.PROGRAMS if name.startswith("auto_")]
PROGRAMS = {name: build for name, build in definitions.PROGRAMS.items() if name not in AUTO}
LLAMAS = ("decode_8b_1", "decode_8b_16", "decode_70b_1", "decode_70b_16")

# The least number of our calls in each program on CPU devices, where the calls are small.
OUR_CALLS = {
    "decode_scanned": {"psum": 1},
    "decode_unrolled": {"psum": 8},  # 4 layers x 2 tokens
    # 2 layers, each two forward and two backward, and some of the gradients.
    "train_step": {"psum": 8 + 1},
    "train_step_sequence_parallel": {"psum_scatter": 8, "all_gather": 8, "psum": 1},
    "mlp_block": {"psum_scatter": 2, "all_gather": 2},  # forward and backward
    "halo": {"ppermute": 4},  # in the body of a loop
    "mixture_of_experts": {"moe_dispatch": 1, "moe_combine": 1},
    **{f"dispatch_{tokens}": {"moe_dispatch": 20} for tokens in (128, 4096)},
    **{
        f"dispatch_and_combine_{tokens}": {"moe_dispatch": 20, "moe_combine": 20}
        for tokens in (128, 4096)
    },
    "transformer": {"psum_scatter": 8, "all_gather": 8, "psum": 1},
    **{name: {"psum_residual_rms_norm": 4, "all_gather": 1} for name in LLAMAS},
}
NORMS = tuple(name for name in PROGRAMS if name.startswith("norms_"))
OUR_CALLS |= {name: {"psum_residual_rms_norm": 1} for name in NORMS}

# The largest distance of two right results, which are rounded to bfloat16 many times.
TOLERANCE = 0.05


def all_devices() -> int:
    """The largest number of devices that exists and that the programs take."""
    return max(n for n in (1, 2, 4, 8) if n <= len(jax.devices()))


@functools.cache
def built(name: str, lib: Any, world: int) -> tuple[Callable[..., Any], Any]:
    return PROGRAMS[name](lib, line(world))


def distance(some: Any, others: Any, start: Any) -> float:
    """The distance of two results, relative to their distance from the arguments.

    The largest over the arrays, by their norms. Arguments that are handed on are left out.
    """

    def norm(a: Any, b: Any) -> float:
        return float(np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)))

    leaves = zip(*map(jax.tree.leaves, (some, others, start)), strict=True)
    return max(norm(a, b) / max(norm(a, s), 1e-30) for a, b, s in leaves if a is not s)


def calls(function: Callable[..., Any], arguments: Any, operation: str) -> int:
    return function.lower(*arguments).as_text().count(f"@jax_intranode_{operation}(")


def described(arguments: Any) -> Any:
    return jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), arguments)


QUICK = ("halo", "mixture_of_experts", "mlp_block", "decode_scanned", "norms_6", "decode_8b_1")
MOSTLY_FULL = pytest.mark.parametrize("name", quick(PROGRAMS, QUICK))


@MOSTLY_FULL
def test_both_libraries_agree(name: str) -> None:
    need_devices(2)
    ours, arguments = built(name, jax_intranode, all_devices())
    theirs, _ = built(name, lax, all_devices())
    if jax.devices()[0].platform == "cpu":
        for operation, least in OUR_CALLS[name].items():
            assert calls(ours, arguments, operation) >= least
            assert calls(theirs, arguments, operation) == 0
    result = ours(*arguments)
    # Chains of norms end near the arguments, and round hundreds of times.
    tolerance = 4 * TOLERANCE if name in NORMS else TOLERANCE
    assert distance(result, theirs(*arguments), arguments) < tolerance
    assert described(result) == described(arguments)


# Without communication.

COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-\w+)"
    r"(-start)?\("
)


def collectives_in(function: Any, arguments: Any) -> int:
    return len(COLLECTIVE.findall(function.lower(*arguments).compile().as_text()))


@pytest.mark.parametrize("name", quick(PROGRAMS, ("mlp_block", "decode_scanned")))
def test_without_communication(name: str) -> None:
    need_devices(2)
    ours, arguments = PROGRAMS[name](lax, line(2))
    assert collectives_in(ours, arguments) > 0
    found = definitions.without_communication(name, line(2))
    assert found is not None and found[1] == 1
    (step, arguments), _ = found
    assert collectives_in(step, arguments) == 0
    result = step(*arguments)
    assert described(result) == described(arguments)
    assert all(np.isfinite(np.float64(leaf)).all() for leaf in jax.tree.leaves(result))
