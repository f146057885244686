"""What tests of rewritten matmuls share: arrays, comparison, and the rewritten program as text."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import pytest
from cases import line, sharded
from devices import need_devices
from jax import lax
from jax.sharding import PartitionSpec as P
from test_rewriting import check_values, rewritten

from jax_intranode._src.ops.primitive import BY_PRIMITIVE
from jax_intranode._src.rewrite.collectives import Body

N = len(jax.devices())
T, F, H = 2, 8, 16  # rows and columns of a rank's x, columns of a rank's w


@pytest.fixture(autouse=True)
def overlapped() -> Iterator[None]:
    need_devices(2)
    with (
        mock.patch.object(Body, "is_overlapped", lambda *_, **__: True),
        jax.default_matmul_precision("highest"),
    ):
        yield


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def golden(jaxpr: Any) -> list[str]:
    """A line for each equation; ours with what matters of their parameters."""
    found = []
    for equation in jaxpr.eqns:
        own = BY_PRIMITIVE.get(equation.primitive)
        name = str(equation.primitive.name)
        if own is not None:
            params = equation.params["params"]
            matmul = getattr(params, "matmul", params)
            details = [f"{k}={getattr(matmul, k)}" for k in ("axis",) if hasattr(matmul, k)]
            details += [k for k in ("transposed", "gathered") if getattr(matmul, k, False)]
            details += [f"terms={matmul.terms}"] if getattr(matmul, "terms", 1) > 1 else []
            name = " ".join([own.operation, *details])
            types = [v.aval.str_short(short_dtypes=True) for v in equation.invars]
            name += f" ({', '.join(t.split('{')[0] for t in types)})"
        found.append(name)
    return found


def check_left(body: Callable[..., Any], args: Any, **how: Any) -> None:
    """No matmul joins a collective."""
    specs = how.pop("in_specs", (P("x"),) * len(args))
    f = sharded(body, line(), specs, how.pop("out_specs", P("x")), how.pop("check_vma", False))
    before, after, _ = rewritten(f, *args)
    assert not any("matmul" in name or "gradients" in name for name in golden(after)), after
    assert sum(e.primitive.name == "dot_general" for e in before.eqns) == sum(
        e.primitive.name == "dot_general" for e in after.eqns
    )
    check_values(f, *args)


def gather(v: Any, axis: int = 0, tiled: bool = True) -> Any:
    return lax.all_gather(v, "x", axis=axis, tiled=tiled)


def scatter(v: Any, axis: int = 0, tiled: bool = True) -> Any:
    return lax.psum_scatter(v, "x", scatter_dimension=axis, tiled=tiled)


ROWS, COLUMNS = P("x"), P(None, "x")
X, W = normal(T * N, F), normal(F, H * N, seed=1)
V = normal(H * N, F, seed=2)
XW = (ROWS, COLUMNS)
AG = "all_gather_matmul"
RS = "matmul_reduce_scatter"
X_SHARD, W_SHARD = f"f32[{T},{F}]", f"f32[{F},{H}]"
Y = normal(T * N, H * N)
HV = f"(f32[{T * N},{H}], f32[{H},{F}])"
IS_OVERLAPPED = Body.is_overlapped
