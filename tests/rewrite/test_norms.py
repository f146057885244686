"""Which sums, residual adds and norms become one operation."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import norm_oracle
import numpy as np
import pytest
from cases import check, line, put, sharded
from devices import need_devices
from jax import lax
from jax.sharding import PartitionSpec as P
from test_rewriting import rewritten
from tiers import full

import jax_intranode
from jax_intranode._src.ops import collective
from jax_intranode._src.ops.primitive import BY_PRIMITIVE
from jax_intranode._src.selection import config

HIDDEN = 24
pytestmark = pytest.mark.usefixtures("norms_are_fused")


# Norms in the forms in which models spell them. Each gets h, a weight and a bias.


def rms_llama(h: Any, w: Any, b: Any) -> Any:
    x = h.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)
    return w * x.astype(h.dtype)


def rms_gemma(h: Any, w: Any, b: Any) -> Any:
    x = h.astype(jnp.float32)
    variance = jnp.mean(x**2, axis=-1, keepdims=True)
    return (x * lax.rsqrt(variance + 1e-5) * (1 + w.astype(jnp.float32))).astype(h.dtype)


def rms_flax(h: Any, w: Any, b: Any) -> Any:
    """flax.linen.RMSNorm: statistics in float32, the weight reshaped and multiplied first."""
    x = jnp.asarray(h, jnp.float32)
    variance = jnp.mean(lax.square(x), (-1,))
    variance = jnp.expand_dims(variance, (-1,))
    mul = lax.rsqrt(variance + 1e-5) * w.reshape(*[1] * (h.ndim - 1), -1)
    return jnp.asarray(h * mul, h.dtype)


def rms_equinox(h: Any, w: Any, b: Any) -> Any:
    """equinox.nn.RMSNorm: of a single row, under vmap."""

    def one(x: Any) -> Any:
        inverse = lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2) + 1e-5)
        return (x.astype(jnp.float32) * inverse * w + b).astype(h.dtype)

    for _ in range(h.ndim - 1):
        one = jax.vmap(one)
    return one(h)


@jax.jit  # a norm in a call, too
def rms_by_division(h: Any, w: Any, b: Any) -> Any:
    squares = jnp.sum(h.astype(jnp.float32) ** 2, -1, keepdims=True)
    return (h / jnp.sqrt(squares / HIDDEN + 1e-5) * w + b).astype(h.dtype)


def layer_by_variance(h: Any, w: Any, b: Any) -> Any:
    x = h.astype(jnp.float32)
    mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return ((x - mean) / jnp.sqrt(variance + 1e-5) * w + b).astype(h.dtype)


def layer_flax(h: Any, w: Any, b: Any) -> Any:
    """flax.linen.LayerNorm: the variance as a difference of means."""
    x = jnp.asarray(h, jnp.float32)
    mean, squares = jnp.mean(x, -1), jnp.mean(lax.square(x), -1)
    variance = jnp.maximum(0.0, squares - lax.square(mean))
    mean, variance = jnp.expand_dims(mean, -1), jnp.expand_dims(variance, -1)
    mul = lax.rsqrt(variance + 1e-5) * w.reshape(*[1] * (h.ndim - 1), -1)
    return jnp.asarray((h - mean) * mul + b.reshape(*[1] * (h.ndim - 1), -1), h.dtype)


# Each form, with the norm that it is, whether it has a bias, and the weight's offset.
FORMS: dict[Callable[..., Any], tuple[str, bool, float]] = {
    rms_llama: ("rms_norm", False, 0.0),
    rms_gemma: ("rms_norm", False, 1.0),
    rms_flax: ("rms_norm", False, 0.0),
    rms_equinox: ("rms_norm", True, 0.0),
    rms_by_division: ("rms_norm", True, 0.0),
    layer_by_variance: ("layer_norm", True, 0.0),
    layer_flax: ("layer_norm", True, 0.0),
}


def normal(dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def operations(f: Any, *arguments: Any) -> list[str]:
    """Our operations in a rewritten body, in order."""
    _, after, _ = rewritten(f, *arguments)
    found = [BY_PRIMITIVE.get(e.primitive) for e in after.eqns]
    return [primitive.operation for primitive in found if primitive is not None]


def check_oracle(
    body: Any, specs: Any, out: Any, arrays: Any, wanted: str, check_vma: bool = False, **of: Any
) -> None:
    """A body becomes one operation, which has the bits of the oracle."""
    f = sharded(body, line(), specs, out, check_vma)
    placed = [put(line(), s, v) for s, v in zip(specs, arrays, strict=True)]
    assert operations(f, *placed) == [wanted]
    with jax_intranode.accelerate():
        results = jax.jit(f)(*placed)
    x, residual, w, *_ = arrays
    norm = wanted.partition("_residual_")[2]
    oracle = norm_oracle.residual_norm(list(x), residual, w, norm=norm, eps=np.float32(1e-5), **of)
    for result, want in zip(results, oracle, strict=True):
        check(result, want)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("dtype", "rank", "check_vma"),
    [
        ("bfloat16", 2, True),
        full("float32", 3, False),
        full("float16", 3, True),
    ],
)
def test_a_norm_in_any_form(form: Any, dtype: str, rank: int, check_vma: bool) -> None:
    need_devices(2)
    norm, has_bias, offset = FORMS[form]
    shape = (*[3] * (rank - 1), HIDDEN)
    x, residual = normal(dtype, len(jax.devices()), *shape), normal(dtype, *shape)
    w, b = normal(dtype, HIDDEN), normal(dtype, HIDDEN) * 2

    def body(x: Any, residual: Any, w: Any, b: Any) -> Any:
        h = residual + lax.psum(x[0], "x")
        return form(h, w, b) * 1, h

    of = {"bias": b if has_bias else None, "weight_offset": offset}
    specs = (P("x"), P(), P(), P())
    check_oracle(body, specs, P(), (x, residual, w, b), f"psum_residual_{norm}", check_vma, **of)


def test_a_scattered_norm() -> None:
    n, rows = len(jax.devices()), P(None, "x")

    def body(x: Any, residual: Any, w: Any) -> Any:
        h = lax.psum_scatter(x[0], "x", scatter_dimension=1, tiled=True) + residual
        return rms_llama(h, w, None), h

    x, residual = normal("float32", n, 2, n, HIDDEN), normal("float32", 2, n, HIDDEN)
    w = normal("float32", HIDDEN)
    check_oracle(
        body, (P("x"), rows, P()), rows, (x, residual, w), "psum_scatter_residual_rms_norm"
    )


def of_body(body: Any, *arguments: Any) -> list[str]:
    """Our operations in a body of arguments that are the same on all ranks but for the first."""
    specs = (P("x"), *[P()] * (len(arguments) - 1))
    f = sharded(body, line(), specs, P(), check_vma=True)
    with jax_intranode.accelerate():
        jax.jit(f).lower(*arguments)  # it fails if something is used before it is computed
    return operations(f, *arguments)


X, R, W = (
    jnp.asarray(normal("bfloat16", *shape))
    for shape in ((len(jax.devices()), 3, HIDDEN), (3, HIDDEN), (HIDDEN,))
)


@pytest.mark.parametrize("hidden", [49, 4097])
def test_a_length_whose_reciprocal_is_rounded(hidden: int) -> None:
    x, r, w = (jnp.ones(shape) for shape in ((len(X), 2, hidden), (2, hidden), (hidden,)))
    body = lambda x, r, w: layer_by_variance(lax.psum(x[0], "x") + r, w, w)  # noqa: E731
    assert of_body(body, x, r, w) == ["psum_residual_layer_norm"]


def test_parameters_that_are_made_later() -> None:
    """What makes them is moved before the operation."""

    def body(x: Any, r: Any, ws: Any) -> Any:
        h = lax.psum(x[0], "x") + r
        used = h.sum()
        return rms_llama(h, jnp.tanh(ws[1]), None), used

    assert of_body(body, X, R, jnp.stack([W, W])) == ["psum_residual_rms_norm"]


def mean_of(h: Any, power: int = 2, axis: int = -1) -> Any:
    return jnp.mean(h.astype(jnp.float32) ** power, axis, keepdims=True)


def factor(h: Any) -> Any:
    return (mean_of(h) + 1e-5) ** -0.5


def scaled(h: Any, w: Any, mean: Any, power: float = -0.5) -> Any:
    return (h * (mean + 1e-5) ** power * w).astype(h.dtype)


# Of a sum and a residual, h, and a weight.
OF_H: dict[str, Callable[[Any, Any], Any]] = {
    "statistic_is_used": lambda h, w: ((h * (f := factor(h)) * w).astype(h.dtype), f),
    "weight_needs_h": lambda h, w: rms_llama(h, w * h[0], None),
    "barrier": lambda h, w: rms_llama(lax.optimization_barrier(h), w, None),
    "other_axis": lambda h, w: scaled(h, w, mean_of(h, axis=0)),
    "cubes": lambda h, w: scaled(h, w, mean_of(h, 3)),
    "wrong_power": lambda h, w: scaled(h, w, mean_of(h), -0.25),
    "wrong_count": lambda h, w: scaled(h, w, mean_of(h) * (HIDDEN / (HIDDEN - 1))),
    "sum_of_two": lambda h, w: (h * factor(h) * w + h).astype(h.dtype),
    "other_variance": lambda h, w: scaled(h, w, jnp.var(h.astype("float32"), -1, keepdims=True)),
    "weight_twice": lambda h, w: (h * factor(h) * w * w).astype(h.dtype),
    "clipped": lambda h, w: scaled(h, w, jnp.maximum(mean_of(h), 0.5)),
}
# Of the sum, the residual and a weight.
NO_NORMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum_is_used": lambda total, r, w: (rms_llama(total + r, w, None), total),
    "no_residual": lambda total, r, w: rms_llama(total, w, None),
    "residual_is_broadcast": lambda total, r, w: rms_llama(total + r[:1], w, None),
    **{name: lambda total, r, w, f=f: f(total + r, w) for name, f in OF_H.items()},
}


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_not_a_norm_stays(name: str) -> None:
    found = of_body(lambda x, r, w: NO_NORMS[name](lax.psum(x[0], "x"), r, w), X, R, W)
    assert "psum_residual_rms_norm" not in found, found


def on_two_gpus(step: Any, specs: Any, shapes: Any, **setting: Any) -> list[str]:
    """Our operations in a step of bfloat16, as they are chosen for two GPUs."""
    need_devices(2)
    chosen = dataclasses.replace(config.get(), **setting)
    facts = {"hardware": "hopper", "mode": "multi", "tuned": None}
    operands = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    with (
        mock.patch.object(config, "get", lambda: chosen),
        mock.patch.object(collective, "facts_of", lambda mesh: facts),
    ):
        return operations(sharded(step, line(2), specs, P(), check_vma=True), *operands)


@pytest.mark.parametrize(
    ("setting", "rows", "is_fused"), [("auto", 64, True), ("auto", 65, False), ("never", 1, False)]
)
def test_decoding_takes_what_was_measured_on_gpus(setting: str, rows: int, is_fused: bool) -> None:
    """test_residual_norm.py has the sizes."""

    def step(h: Any, w: Any, up: Any, down: Any) -> Any:
        for _ in range(2):
            h = h + lax.psum(jax.nn.silu(rms_llama(h, w, None) @ up) @ down, "x")
        return rms_llama(h, w, None)

    shapes = (rows, 8192), (8192,), (8192, 512), (512, 8192)
    found = on_two_gpus(step, (P(), P(), P(None, "x"), P("x")), shapes, fuse_norms=setting)
    assert found.count("psum_residual_rms_norm") == (2 if is_fused else 0), found


@pytest.mark.parametrize(
    ("k", "wanted"), [(32768, "matmul_all_reduce"), (32776, "psum_residual_rms_norm")]
)
def test_a_matmul_of_few_rows_takes_its_sum_before_a_norm_does(k: int, wanted: str) -> None:
    """It gains more. A matrix of 64 MB takes the kernel, the next larger one does not."""

    def step(h: Any, w: Any, x: Any, down: Any) -> Any:
        return rms_llama(h + lax.psum(x @ down, "x"), w, None)

    shapes = (1, 1024), (1024,), (1, 2 * k), (2 * k, 1024)
    assert on_two_gpus(step, (P(), P(), P(None, "x"), P("x")), shapes) == [wanted]
