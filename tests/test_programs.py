"""The benchmark's programs compute what they should, with our collectives and with lax's."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_programs import definitions
from cases import line
from devices import need_devices
from jax import lax

import jax_intranode

AUTO = [name for name in definitions.PROGRAMS if name.startswith("auto_")]
PROGRAMS = {name: build for name, build in definitions.PROGRAMS.items() if name not in AUTO}
TRAINING = ("train_step", "train_step_sequence_parallel", "transformer")
LLAMAS = ("decode_8b_1", "decode_8b_16", "decode_70b_1", "decode_70b_16")

# The least number of our calls in each program on CPU devices, where the calls are small.
OUR_CALLS = {
    "decode_scanned": {"psum": 1},
    "decode_unrolled": {"psum": 8},  # 4 layers x 2 tokens
    # 2 layers, each two forward and two backward, and some of the gradients.
    "train_step": {"psum": 8 + 1},
    "train_step_sequence_parallel": {"psum_scatter": 8, "all_gather": 8, "psum": 1},
    "mlp_block": {"psum_scatter": 2, "all_gather": 2},  # forward and backward
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


QUICK = ("train_step_sequence_parallel", "decode_scanned", "norms_6", "decode_8b_1")
MOSTLY_FULL = pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in PROGRAMS]
)


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


@pytest.mark.parametrize(
    "name", [n if n == AUTO[0] else pytest.param(n, marks=pytest.mark.full) for n in AUTO]
)
def test_auto_sharded_programs_agree(name: str) -> None:
    need_devices(2)
    step, arguments = definitions.PROGRAMS[name](jax_intranode, line(2))
    plain = step(*arguments)
    assert described(plain) == described(arguments)
    with jax_intranode.accelerate(auto=True):
        if jax.devices()[0].platform == "cpu":
            assert calls(step, arguments, "psum") >= 1
        assert distance(step(*arguments), plain, arguments) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) if name in TRAINING else name
        for name in PROGRAMS
        if name not in NORMS + LLAMAS  # what they return is normalized
    ],
)
def test_a_missing_rank_would_be_seen(name: str) -> None:
    need_devices(2)

    def but_the_last(x: jax.Array, axis: str) -> jax.Array:
        return jnp.where(lax.axis_index(axis) == lax.axis_size(axis) - 1, 0 * x, x)

    def psum(x: jax.Array, axis_name: str) -> jax.Array:
        return lax.psum(jax.tree.map(lambda v: but_the_last(v, axis_name), x), axis_name)

    def psum_scatter(x: jax.Array, axis_name: str, **how: Any) -> jax.Array:
        return lax.psum_scatter(but_the_last(x, axis_name), axis_name, **how)

    wrong = types.SimpleNamespace(
        psum=psum, psum_scatter=psum_scatter, all_gather=lax.all_gather, pmean=lax.pmean
    )
    right, arguments = built(name, lax, all_devices())
    missing, _ = PROGRAMS[name](wrong, line(all_devices()))
    assert distance(right(*arguments), missing(*arguments), arguments) > 4 * TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINING)
def test_tensor_parallel_is_what_one_device_does(name: str) -> None:
    need_devices(2)
    step, arguments = PROGRAMS[name](jax_intranode, line(2))
    alone, of_one = built("train_step", lax, 1)
    whole = jax.tree.map(
        lambda value, like: jax.device_put(np.asarray(value), like.sharding), arguments, of_one
    )
    assert distance(step(*arguments), alone(*whole), arguments) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINING)
def test_training_learns(name: str) -> None:
    need_devices(2)
    step, arguments = built(name, jax_intranode, all_devices())
    losses = []
    for _ in range(8):
        arguments = step(*arguments)
        losses.append(float(arguments[-1]))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_long_chains_stay_finite(name: str) -> None:
    need_devices(2)
    f, start = built(name, jax_intranode, all_devices())
    arguments = start
    for _ in range(100):
        arguments = jax.block_until_ready(f(*arguments))
    for leaf, same in zip(jax.tree.leaves(arguments), jax.tree.leaves(start), strict=True):
        if leaf is not same:
            assert np.abs(np.asarray(leaf, np.float32)).max() < 100  # false for NaN


def test_scanned_and_unrolled_decode_alike() -> None:
    need_devices(2)
    (scanned, some), (unrolled, others) = (
        built(name, lax, all_devices()) for name in ("decode_scanned", "decode_unrolled")
    )
    assert distance(scanned(*some)[0], unrolled(*others)[0], some[0]) < TOLERANCE


def test_other_meshes_are_refused() -> None:
    need_devices(3)
    with pytest.raises(ValueError, match=r"1, 2, 4 or 8 devices"):
        PROGRAMS["train_step"](lax, line(3))
