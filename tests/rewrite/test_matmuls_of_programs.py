"""Rewritten matmuls in gradients and control flow, and the custom calls of programs for GPUs."""

import functools
import re
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from cases import line, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from lowered import compare_lowered
from models import OF_LAX, gated_mlp
from rewritten_matmuls import (  # noqa: F401
    AG,
    COLUMNS,
    IS_OVERLAPPED,
    ROWS,
    RS,
    XW,
    F,
    H,
    N,
    T,
    V,
    W,
    X,
    check_values,
    gather,
    normal,
    overlapped,
)
from test_rewriting import names, rewritten
from tiers import full

import jax_intranode
from jax_intranode._src.jax_private import hlo
from jax_intranode._src.rewrite import gathers
from jax_intranode._src.rewrite.collectives import Body

# Gradients, control flow, donation.


def layer(x: Any, w: Any, u: Any, v: Any) -> Any:
    return x + gated_mlp(lax, x, w, u, v, act=jnp.tanh)


def loss(*args: Any) -> Any:
    return jnp.sin(layer(*args)).sum()


LAYER = (X, W, jnp.cos(W), V)
LAYER_SPECS = (ROWS, COLUMNS, COLUMNS, ROWS)


@pytest.mark.parametrize(
    ("wrap", "check_vma"),
    [
        pytest.param(wrap, check, marks=[pytest.mark.full] * (not check and wrap != "scan"))
        for wrap in ("plain", "checkpoint", "jit", "scan", "vmap")
        for check in (True, False)
    ],
)
def test_gradients(wrap: str, check_vma: bool) -> None:
    def local(*args: Any) -> Any:
        x, *weights = args
        if wrap == "scan":
            body = jax.checkpoint(lambda c, _: (layer(c, *weights), None))
            return jnp.sin(lax.scan(body, x, None, length=2)[0]).sum()
        if wrap == "vmap":
            return jnp.sin(jax.vmap(lambda x: layer(x, *weights))(jnp.stack([x, -x]))).sum()
        wraps = {"plain": lambda f: f, "checkpoint": jax.checkpoint, "jit": jax.jit}
        return wraps[wrap](loss)(*args)

    f = sharded(
        jax.value_and_grad(lambda *args: local(*args), (0, 1, 2, 3)),
        line(),
        LAYER_SPECS,
        (P(), LAYER_SPECS),
        False,
    )
    if check_vma:
        total = sharded(lambda *args: lax.psum(local(*args), "x"), line(), LAYER_SPECS, P(), True)
        f = jax.value_and_grad(total, (0, 1, 2, 3))
        check_values(f, *LAYER)
        return
    _, after, _ = rewritten(f, *LAYER)
    found = [name for name in names(after) if "matmul" in name]
    assert set(names(after)) == set(found)
    wanted = ["all_gather_matmul", RS, f"gradients_of_{RS}", f"gradients_of_{AG}"]
    again = {"checkpoint": [AG, RS], "scan": [AG]}  # what is computed again
    wanted[2:2] = again.get(wrap, [])
    assert found == [f"intranode_{name}" for name in wanted]
    check_values(f, *LAYER)


def test_a_gathered_array_of_many_products_and_sums() -> None:
    """What is looked at grows like the program."""
    looked_at = 0
    whole = gathers._Gather._fused

    def counted(self: Any, group: Any, wgrad: Any) -> Any:
        nonlocal looked_at
        looked_at += len(group)
        return whole(self, group, wgrad)

    def of(count: int) -> int:
        def body(x: Any, w: Any) -> Any:
            g = lax.all_gather(x, "x", tiled=True)
            return sum(lax.psum_scatter(g @ (w * i), "x", tiled=True) for i in range(count))

        before = looked_at
        f = sharded(body, line(), (P("x"), P()), P("x"), False)
        rewritten(f, normal(N * T, F), normal(F, H))
        return looked_at - before

    with mock.patch.object(gathers._Gather, "_fused", counted):
        assert of(800) <= 3 * of(400)


def test_a_large_unrolled_program() -> None:
    """Long chains neither overflow the stack nor take long."""

    def body(x: Any, w: Any) -> Any:
        v = gather(x)
        for _ in range(600):
            v = v.T.reshape(v.shape[0], -1)
        total = v @ w
        for _ in range(600):
            total = total + jnp.sin(total)
        return lax.psum(total, "x")

    rewritten(sharded(body, line(), XW, COLUMNS, False), X, W)


# The same custom calls as programs that are written with our functions.


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return compare_lowered()


@pytest.mark.parametrize(
    ("size", "check_vma"),
    [("narrow", True), ("large", False), full("narrow", False), full("large", True)],
)
@pytest.mark.parametrize(
    "program",
    [
        *("products", "list_of_matrices", "gathered", "all_reduce", "batch_of_rows"),
        *("remat", "layers", "block"),
    ],
)
def test_calls_of_programs_for_gpus(
    tool: ModuleType, program: str, size: str, check_vma: bool
) -> None:
    """For "narrow" sizes one kernel computes both gradients, for "large" ones it does not."""
    of = tool.PROGRAMS[program]
    mesh = tool.mesh_of("gpu", {"x": 2})
    lengths = tool.sizes("gpu", size, 2)
    args = [jax.ShapeDtypeStruct(tuple(lengths[n] for n in s), jnp.bfloat16) for s in of.shapes]

    def calls(lib: Any) -> Any:
        f = jax.shard_map(
            functools.partial(of.body, lib),
            mesh=mesh,
            in_specs=of.specs,
            out_specs=of.out,
            check_vma=check_vma,
        )

        def gradient(*args: Any) -> Any:
            return jax.value_and_grad(
                lambda *args: jnp.sin(f(*args).astype(jnp.float32)).sum(), range(len(args))
            )(*args)

        lowered = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        attributes = re.findall(r"mhlo\.backend_config = (\{.*?\}), operand_layouts", lowered)
        return hlo.in_lowered(lowered), sorted(a for a in attributes if "transposed" in a)

    with (
        mock.patch.object(Body, "is_overlapped", IS_OVERLAPPED),
        jax.default_matmul_precision(None),
        tool.without_rendezvous(),
    ):
        by_hand, matmuls = calls(jax_intranode)
        with jax_intranode.accelerate():
            rewritten, found = calls(OF_LAX)
    assert found == matmuls and found
    # JAX's own sum for a gradient is replaced, too.
    of_sums = ("jax_intranode_psum", "all-reduce")
    assert sum(rewritten[k] for k in of_sums) == sum(by_hand[k] for k in of_sums)
    for name in of_sums:
        rewritten.pop(name, None)
        by_hand.pop(name, None)
    assert rewritten == by_hand
