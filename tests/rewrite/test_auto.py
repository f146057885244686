"""Plain jit programs over Auto axes, to which XLA's partitioner adds collectives."""

import dataclasses
import functools
import logging
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from auto_programs import (
    N,
    check,
    collectives,
    constrained,
    normal,
    not_installed,
    of_xla,
    put,
    two_axes,
)
from jax import lax
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full

import jax_intranode
from jax_intranode._src.health import call_sites
from jax_intranode._src.jax_private import hlo, lowering_hooks
from jax_intranode._src.ops import fallback
from jax_intranode._src.rewrite import sums
from jax_intranode._src.rewrite.auto import (
    bodies,
    groups,
    modules,
    overlap,
    partitioner,
    plans,
    rewriting,
    simplified,
)
from jax_intranode._src.rewrite.collectives import Body
from jax_intranode._src.selection import config, table

__all__ = ["not_installed"]


def mlp(p: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def weights(mesh: Mesh, up: Any, down: Any) -> Any:
    return {
        "up": put(mesh, normal(0, 16, 32), *up),
        "down": put(mesh, normal(1, 32, 16), *down),
    }


TENSOR_PARALLEL = (None, "model"), ("model", None)


def tensor_parallel() -> tuple[Any, jax.Array]:
    """Weights and operand of `mlp`, which needs a sum."""
    mesh = two_axes()
    return weights(mesh, *TENSOR_PARALLEL), put(mesh, normal(2, 8, 16), "data")


def fully_sharded(mesh: Mesh) -> tuple[Any, jax.Array]:
    """Those of an `mlp` that gathers its weights."""
    p = weights(mesh, ("model", None), ("model", None))
    return p, put(mesh, normal(2, 64, 16), ("data", "model"))


def test_tensor_parallel() -> None:
    p, x = tensor_parallel()
    before, after = check(mlp, p, x)
    assert before == {"all-reduce": 1} and after == {"jax_intranode_psum": 1}
    place = call_sites.place_of_site("jit_mlp psum float32[4,16]")
    assert f"{__file__}:{mlp.__code__.co_firstlineno + 1} (mlp)" in str(place)
    gradient = jax.grad(lambda p, x: (mlp(p, x) ** 2).sum(), argnums=(0, 1))
    before, after = check(gradient, p, x)
    assert of_xla(before) >= 3 and of_xla(after) == 0


def test_sequence_parallel() -> None:
    mesh = two_axes()
    p, x = weights(mesh, *TENSOR_PARALLEL), put(mesh, normal(2, 2, 8, 16), "data", "model")

    def block(p: Any, x: Any) -> Any:
        whole = constrained(mesh, x, "data", None, None)
        return x + constrained(mesh, mlp(p, whole), "data", "model", None)

    before, after = check(block, p, x)
    assert of_xla(before) == 2 and of_xla(after) == 0
    assert after["jax_intranode_all_gather"] == after["jax_intranode_psum_scatter"] == 1
    _, after = check(jax.grad(lambda p, x: (block(p, x) ** 2).mean()), p, x)
    assert of_xla(after) == 0


def test_a_gather_before_a_product_of_arrays() -> None:
    """Propagation gives the product, which a constraint wants whole, the constraint's sharding."""
    mesh = two_axes()
    p, x = weights(mesh, *TENSOR_PARALLEL), put(mesh, normal(2, 2, 8, 16), "data", "model")
    scale = put(mesh, normal(3, 16))

    def block(p: Any, x: Any, scale: Any) -> Any:
        whole = constrained(mesh, jnp.sin(x) * scale, "data", None, None)
        return x + constrained(mesh, mlp(p, whole), "data", "model", None)

    before, after = check(block, p, x, scale)
    assert of_xla(before) == 2 and of_xla(after) == 0
    assert after["jax_intranode_all_gather"] == 1


def gated_step(batch: int = 2) -> tuple[Any, ...]:
    """The gradients of a sequence-parallel layer behind a norm's weight, and their arguments."""
    mesh = two_axes()
    before = put(mesh, normal(5, 16, 16))
    x = put(mesh, normal(2, batch, 8, 16), "data", "model")
    p = weights(mesh, *TENSOR_PARALLEL) | {"gate": put(mesh, normal(4, 16, 32), None, "model")}
    scale = put(mesh, normal(3, 16))

    def loss(p: Any, x: Any, scale: Any) -> Any:
        whole = constrained(mesh, jnp.sin(x @ before) * scale, "data", None, None)
        gated = constrained(mesh, whole @ p["gate"], "data", None, "model")
        hidden = jnp.sin(whole @ p["up"]) * gated
        return ((x + constrained(mesh, hidden @ p["down"], "data", "model", None)) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1, 2)), p, x, scale


@pytest.mark.parametrize("batch", [2, 8])
def test_gathers_and_sums_next_to_matmuls(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather behind a norm's weight, a large sum of which all take a part, and shared ones."""
    monkeypatch.setattr(rewriting, "moves_on_cpus", True)
    monkeypatch.setattr(sums, "OVERLAPPED_BYTES", 0)
    f, *args = gated_step(batch)
    before, after = check(f, *args)
    assert of_xla(before) > 4 and of_xla(after) == 0
    # Forward for both matmuls and backward for the input and the weight gradient.
    assert after["jax_intranode_all_gather"] == 2
    # Forward, and backward of the sum of two products.
    assert after["jax_intranode_psum_scatter"] == 2
    with jax_intranode.accelerate(auto=True):
        calls = jax_intranode.explain(f)(*args)
    sent = [c.shapes for c in calls if c.operation in ("all_gather", "psum_scatter")]
    n = batch // 2
    assert sorted(sent) == [((n, 8 // (N // 2), 16),)] * 2 + [((n, 8, 16),)] * 2


def test_moves_that_xla_would_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that XLA would shard otherwise after moves is rewritten without them."""
    f, *args = gated_step()
    _, wanted = check(f, *args)
    jax.clear_caches()
    keeps = rewriting.Program.keeps_shardings
    kept: list[bool] = []

    def only_without_moves(self: Any) -> bool:
        kept.append(keeps(self) and bool(kept))
        return kept[-1]

    monkeypatch.setattr(rewriting, "moves_on_cpus", True)
    monkeypatch.setattr(rewriting.Program, "keeps_shardings", only_without_moves)
    _, after = check(f, *args)
    assert kept == [False, True] and after == wanted


@pytest.mark.parametrize("remat", [False, True])
def test_rows_behind_large_sums_are_divided(remat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor-parallel stack sends what a sequence-parallel one sends, where sums are large."""
    mesh = two_axes()
    p = weights(mesh, *TENSOR_PARALLEL) | {"scale": put(mesh, normal(3, 16))}
    p["gate"] = put(mesh, normal(4, 16, 32), None, "model")
    x = put(mesh, normal(2, 2, 8, 16), "data")

    def layer(p: Any, x: Any) -> Any:
        normed = x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (1 + p["scale"])
        hidden = jnp.tanh(normed @ p["up"]) * (normed @ p["gate"])
        return x + constrained(mesh, hidden @ p["down"], "data", None, None)

    layer = jax.checkpoint(layer) if remat else layer
    gradient = jax.grad(lambda p, x: (layer(p, layer(p, x)) ** 2).mean(), argnums=(0, 1))
    monkeypatch.setattr(rewriting, "moves_on_cpus", True)
    _, small = check(gradient, p, x)
    assert small["jax_intranode_psum_scatter"] == 0
    jax.clear_caches()
    monkeypatch.setattr(sums, "OVERLAPPED_BYTES", 0)
    _, large = check(gradient, p, x)
    assert of_xla(large) == 0
    # Two layers, forward and backward. The first layer has all of x.
    assert large["jax_intranode_psum_scatter"] == 4
    assert large["jax_intranode_all_gather"] == 4 + remat


@pytest.mark.parametrize("batch", ["data", None])
def test_rows_whose_sums_xla_does_not_scatter(
    batch: Any, as_on_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 2 x 2 devices XLA permutes instead where the sum is replicated over the major axis."""
    as_on_gpus(0)
    monkeypatch.setattr(Body, "is_overlapped", lambda *_, **__: True)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    p, x = weights(mesh, *TENSOR_PARALLEL), put(mesh, normal(3, 8, 8, 16), batch)

    def f(p: Any, x: Any) -> Any:
        for _ in range(2):
            y = jnp.sin(x)
            x = x + (jnp.tanh(y @ p["up"]) * (y @ p["up"] ** 2) * (y @ p["up"] ** 3)) @ p["down"]
        return x

    _, after = check(f, p, x)
    assert after["jax_intranode_psum_scatter"] == (2 if batch else 0)


@pytest.mark.parametrize("whole", [1, 2])
def test_rows_that_are_needed_whole(whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are divided if that sends no more than the sum."""
    p, x = tensor_parallel()
    monkeypatch.setattr(rewriting, "moves_on_cpus", True)
    monkeypatch.setattr(sums, "OVERLAPPED_BYTES", 0)

    def f(p: Any, x: Any) -> Any:
        y = mlp(p, x)
        return [jnp.sort(of(y), axis=0) for of in (jnp.sin, jnp.cos)[:whole]]

    _, after = check(f, p, x)
    assert after["jax_intranode_psum_scatter"] == (whole == 1)


def test_a_bias_that_is_computed_with_again(caplog: pytest.LogCaptureFixture) -> None:
    """XLA takes a program that reshapes one of several results of a barrier."""
    mesh = two_axes()
    p = weights(mesh, *TENSOR_PARALLEL) | {"bias": put(mesh, normal(3, 32), "model")}
    x = put(mesh, normal(2, 2, 8, 16))

    def layer(p: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]

    gradient = jax.grad(lambda p, x: (jax.checkpoint(layer)(p, x) ** 2).sum(), argnums=(0, 1))
    _, after = check(gradient, p, x)
    assert after["jax_intranode_psum"] > 0 and "refuses" not in caplog.text


@pytest.mark.parametrize("other", [False, True])
def test_a_sum_that_is_needed_whole(other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum is not scattered if an operation needs all of it, or two need different parts."""
    mesh = two_axes()
    p, x = tensor_parallel()

    def f(p: Any, x: Any) -> Any:
        y = constrained(mesh, mlp(p, x), "data", None)
        part = jnp.sin(constrained(mesh, y, ("data", "model"), None))
        return part, constrained(mesh, y, "data", "model") if other else y.T @ y

    _, wanted = check(f, p, x)
    jax.clear_caches()
    monkeypatch.setattr(rewriting, "moves_on_cpus", True)
    _, after = check(f, p, x)
    assert after == wanted and after["jax_intranode_psum_scatter"] == 0


@pytest.mark.parametrize("several", [False, True])
def test_sums_whose_parts_are_taken(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both large sums in a product are scattered; not a small one that is taken over both axes."""
    monkeypatch.setattr(rewriting, "moves_on_cpus", True)
    monkeypatch.setattr(sums, "OVERLAPPED_BYTES", 0 if several else 1 << 20)
    mesh = two_axes()
    p, x = tensor_parallel()
    z = put(mesh, normal(6, 8, 16), EVERY)

    def f(p: Any, z: Any, x: Any) -> Any:
        product = mlp(p, x) * mlp(p, x + 1) if several else mlp(p, x)
        return z * constrained(mesh, product, "data" if several else None, None)

    _, after = check(f, p, z, x if several else put(mesh, x))
    assert after == ({"jax_intranode_psum_scatter": 2} if several else {"jax_intranode_psum": 1})


def test_one_line_of_log(caplog: pytest.LogCaptureFixture) -> None:
    """The shard_maps that become parts of a program have no lines of their own."""
    caplog.set_level(logging.INFO, "jax_intranode")
    p, x = tensor_parallel()
    with jax_intranode.accelerate(auto=True):
        jax.jit(lambda p, x: jnp.sin(mlp(p, x)) + mlp(p, x * 2)).lower(p, x)
    (line,) = [r.getMessage() for r in caplog.records if "Lowered" in r.getMessage()]
    assert "XLA's partitioner" in line


def test_fsdp_gathers_weights() -> None:
    before, after = check(mlp, *fully_sharded(two_axes()))
    assert before == {"all-gather": 2} and after == {"jax_intranode_all_gather": 2}


EVERY = "data", "model"
# Of an MLP: how x and both weights are sharded, and what XLA needs for its gradients.
TWO_AXES = {
    "FSDP over all devices": ((EVERY,), (EVERY,), (EVERY,)),
    "FSDP over one axis of two": ((EVERY,), ("data",), ("data",)),
    "FSDP and tensor parallel": (("data",), EVERY, EVERY[::-1]),
    "FSDP and a divided sequence": (EVERY, EVERY, EVERY[::-1]),
    "a divided sequence": (EVERY, (None, "model"), ("model",)),
}


@pytest.mark.parametrize("how", TWO_AXES)
def test_gradients_over_two_axes(how: str) -> None:
    """Sums over several axes, of which some scatter; arrays that are gathered along both."""
    mesh = two_axes()
    of_x, up, down = TWO_AXES[how]
    p, x = weights(mesh, up, down), put(mesh, normal(2, 8, 16, 16), *of_x)

    def loss(p: Any, x: Any) -> Any:
        return (constrained(mesh, mlp(p, x), *of_x) ** 2).mean()

    def step(p: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - g, p, jax.grad(loss)(p, x))

    before, after = check(step, p, x)
    assert of_xla(before) >= 4 and of_xla(after) == 0


def test_scan_remat_and_donation() -> None:
    mesh = two_axes()
    p = {
        "up": put(mesh, normal(0, 3, 16, 32), None, "data", "model"),
        "down": put(mesh, normal(1, 3, 32, 16), None, "model", "data"),
    }
    x = put(mesh, normal(2, 8, 16), "data")

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        return x + mlp(w, x), None

    def step(p: Any, x: Any) -> Any:
        gradients = jax.grad(lambda p: (lax.scan(layer, x, p)[0] ** 2).mean())(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients)

    before, after = check(step, p, x)
    assert of_xla(after) < of_xla(before)
    donating = jax.jit(step, donate_argnums=0)

    def aliases() -> list[str]:
        return re.findall(r"input_output_alias=.*?\) }", donating.lower(p, x).compile().as_text())

    wanted = aliases()
    with jax_intranode.accelerate(auto=True):
        assert wanted and aliases() == wanted
        updated = donating(p, x)
    assert p["up"].is_deleted() and updated["up"].sharding.mesh == mesh


def test_cond_vmap_and_functions() -> None:
    mesh = two_axes()
    p, x = weights(mesh, *TENSOR_PARALLEL), put(mesh, normal(2, 4, 8, 16), None, "data")
    inner = jax.jit(mlp)

    def f(p: Any, x: Any) -> Any:
        y = jax.vmap(lambda row: inner(p, row))(x)
        return lax.cond(y.sum() > 0, lambda y: inner(p, y), lambda y: y, inner(p, y))

    before, after = check(f, p, x)
    assert of_xla(after) < of_xla(before)


def test_a_branch_with_sums_of_two_arrays(caplog: pytest.LogCaptureFixture) -> None:
    """Both share a shard_map. HLO has its results, and the operands of the branch, in tuples."""
    mesh = two_axes()

    def f(x: Any) -> Any:
        columns = x.sum(0)
        return lax.cond(
            columns[0] > -100, lambda: columns.sum() + x.sum(1).max(), lambda: columns.sum()
        )

    before, after = check(f, put(mesh, normal(0, 8, 16), "data", "model"))
    assert of_xla(after) < of_xla(before) and after["jax_intranode_psum"]
    assert not [r for r in caplog.records if r.levelname == "WARNING"]  # nothing has failed


@pytest.mark.parametrize(
    ("case", "gathers"), [("together", 1), ("large", 3), ("types", 2), ("needed", 2), ("axes", 2)]
)
def test_small_gathers_are_one(case: str, gathers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers of vectors, and of small matrices along rows, that do not need each other."""
    mesh = two_axes()
    over = "data" if case == "axes" else "model"
    x, y, z = (
        put(mesh, normal(3, *n), a) for n, a in (((16,), "model"), ((8, 4), "model"), ((32,), over))
    )
    if case == "large":
        monkeypatch.setattr(groups, "VECTOR_BYTES", 127)

    def whole(v: Any, axis: str = "model") -> Any:
        return constrained(mesh, constrained(mesh, jnp.sin(v), axis))

    def f(x: Any, y: Any, z: Any) -> Any:
        x = whole(x)
        z = z.astype(jnp.bfloat16) if case == "types" else z * x[3] if case == "needed" else z
        return x, whole(y), whole(z, over)

    before, after = check(f, x, y, z)
    assert before["all-gather"] >= 3 and after["all-gather"] == 0
    assert after["jax_intranode_all_gather"] == gathers


def test_gathers_that_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has a row for two of the three gathers as one, not for all."""
    of_table = table.rows_and_source

    def rows_and_source(*of: Any) -> Any:
        rows, source = of_table(*of)
        return rows and (dataclasses.replace(rows[-1], nbytes=256, measured=True),), source

    monkeypatch.setattr(table, "rows_and_source", rows_and_source)
    mesh = two_axes()
    vectors = [put(mesh, normal(i, 16 * N), "model") for i in range(3)]  # 128 bytes of each device

    def f(*of: Any) -> Any:
        return [constrained(mesh, constrained(mesh, jnp.sin(v), "model")) for v in of]

    before, after = check(f, *vectors)
    assert before["all-gather"] == 3 and after["all-gather"] == 0
    assert after["jax_intranode_all_gather"] == 2


def test_sums_are_merged_up_to_a_barrier() -> None:
    mesh = two_axes()
    x, w = put(mesh, normal(0, 8, 16), None, "model"), put(mesh, normal(1, 16, 4), "model")

    def f(x: Any, w: Any, fence: bool) -> Any:
        first = x @ w
        if fence:
            x = lax.optimization_barrier(x)
        return first, jnp.sin(x) @ w

    for fence, count in ((False, 1), (True, 2)):
        _, after = check(functools.partial(f, fence=fence), x, w)
        assert of_xla(after) == 0 and after["jax_intranode_psum"] == count


def test_a_sum_that_does_not_begin_at_zero() -> None:
    x = put(two_axes(), normal(0, 8, 16), None, "model")
    check(lambda x: lax.reduce(x, np.float32(3), lax.add, (1,)), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_maxima_and_minima(dtype: str) -> None:
    mesh = two_axes()
    x = put(mesh, (100 * np.abs(normal(0, 8, 16))).astype(dtype), "data", "model")

    def f(x: Any) -> Any:
        return x.max(1), (x // 2).max(1), x.min((0, 1)), x.max(0)

    before, after = check(f, x)
    # Those over one axis that are ready together are one operation.
    assert before["all-reduce"] >= 4 and of_xla(after) == 0
    assert after["jax_intranode_pmax"] == 2 and after["jax_intranode_pmin"] in (1, 2)
    _, after = check(lambda x: lax.reduce(x, np.array(3, dtype), lax.max, (1,)), x)
    assert after["jax_intranode_pmax"] == 0  # it begins at another number


@pytest.mark.parametrize("bounded", [False, True])
def test_softmax_over_a_sharded_vocabulary(bounded: bool) -> None:
    """The maximum and the sum, of logits that are a product; also in a partly manual shard_map."""
    mesh = two_axes()
    p = {"w": put(mesh, normal(0, 16, 32), None, "model")}
    x = put(mesh, normal(1, 8, 16), "data")

    def loss(p: Any, x: Any) -> Any:
        return jax.nn.log_softmax(x @ p["w"])

    def manual(p: Any, x: Any) -> Any:
        return lax.pmax(jax.nn.softmax(x @ p["w"]), "data")

    if bounded:
        axes = {"axis_names": {"data"}, "check_vma": False}
        f = jax.shard_map(manual, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), **axes)
        _, after = check(f, p, x)
        assert after["jax_intranode_pmax"] == 2 and after["jax_intranode_psum"] == 1
    else:
        before, after = check(loss, p, x)
        assert before == {"all-reduce": 2}
        assert after == {"jax_intranode_pmax": 1, "jax_intranode_psum": 1}
    jax_intranode.install(auto=True)
    (left,) = jax_intranode.explain(lambda p, x: ((x @ p["w"]) > 0).any(1))(p, x)
    assert left.reason == "a reduction that is no sum, maximum or minimum"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_the_index_of_a_maximum(dtype: str) -> None:
    """Of equal elements it is the lowest one, of several NaN the first; all may be infinite."""
    mesh = two_axes()
    x = np.abs(normal(0, 8, 16)).round(1) * 10
    if dtype in ("float32", "bfloat16"):
        x[0, [3, 15]], x[1], x[2, 15] = np.nan, -np.inf, np.nan
    x[3], x[4] = 0, 2
    x = put(mesh, x.astype(dtype), "data", "model")

    def f(x: Any) -> Any:
        chosen = lax.argmax(x, 1, np.uint32)
        return (
            chosen,
            jnp.argmin(x, 0),
            jax.vmap(jnp.argmax)(x + x),
            jnp.argmin(x, 1, keepdims=True),
        )

    before, after = check(f, x)
    assert before["all-gather"] >= 6 and of_xla(after) <= of_xla(before) - 6
    assert after["jax_intranode_pmax"] >= 1 and after["jax_intranode_pmin"] >= 1
    check(jnp.argmax, x)

    def of_others(x: Any) -> Any:  # the smallest of the indices begins at 5
        index = lax.broadcasted_iota(np.int32, x.shape, 1) + 7
        inits = np.array(-np.inf if dtype[-3:] != "nt8" and dtype != "int32" else 0, dtype)
        return lax.reduce((x, index), (inits, np.int32(5)), larger, (1,))[1]

    check(of_others, x)


def larger(one: Any, other: Any) -> Any:
    (x, i), (y, j) = one, other
    first = (x > y) | (x != x)
    return jnp.where(first, x, y), jnp.where(first | ((x == y) & (i < j)), i, j)


def test_a_reduction_of_two_that_is_no_argmax() -> None:
    """Of equal elements the highest index; and the sum of both."""

    def last(one: Any, other: Any) -> Any:
        (x, i), (y, j) = one, other
        return jnp.where(x > y, x, y), jnp.where((x > y) | ((x == y) & (i > j)), i, j)

    def both(one: Any, other: Any) -> Any:
        return one[0] + other[0], one[1] + other[1]

    x = put(two_axes(), normal(0, 8, 16).round(1), "data", "model")
    index = lax.broadcasted_iota(np.int32, x.shape, 1)
    for function, start in ((last, -np.inf), (both, 0.0)):
        reduced = functools.partial(lax.reduce, computation=function, dimensions=(1,))
        inits = np.float32(start), np.int32(0)
        _, after = check(lambda x, r=reduced, inits=inits: r((x, index), inits), x)
        assert not after["jax_intranode_pmin"]


WORDS = np.array([0, 63, 64, 99, -1, -64, -65, 31], np.int32)


@pytest.mark.parametrize("mode", ["clip", "fill", "drop", "promise_in_bounds"])
@pytest.mark.parametrize("order", [None, range(N)[::-1]])
def test_lookups_in_a_sharded_table(mode: str, order: Any) -> None:
    """Rows that a device does not have are 0, and added up; it keeps the gradients of its own."""
    mesh = two_axes(order)
    words = put(mesh, WORDS % 64 if mode == "promise_in_bounds" else WORDS, "data")
    tables = put(mesh, normal(0, 64, 8), "model"), put(mesh, normal(1, 8, 64), None, "model")

    def f(tables: Any, words: Any) -> Any:
        rows, columns = tables
        square = jnp.stack([words, words[::-1]], 1)
        options = {"mode": mode, "fill_value": 3.0} if mode == "fill" else {"mode": mode}
        of_rows = rows.at[square].get(**options)
        return of_rows.sum(1), columns.at[:, words].get(**options)

    def loss(tables: Any, words: Any) -> Any:
        return sum((each**2).sum() for each in f(tables, words))

    before, after = check(f, tables, words)
    assert before["all-reduce"] >= 2 and of_xla(after) <= of_xla(before) - 2
    assert after["jax_intranode_psum"] >= 1
    before, after = check(jax.grad(loss), tables, words)
    assert of_xla(after) <= of_xla(before) - 4


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "bool"])
def test_lookups_of_other_types(dtype: str) -> None:
    mesh = two_axes()
    table = put(mesh, (10 * normal(0, 64, 8)).astype(dtype), "model")
    small = put(mesh, (WORDS % 64).astype(np.uint8), "data")

    def f(table: Any, words: Any) -> Any:
        return table[words]

    _, after = check(f, table, small)
    assert after["jax_intranode_psum"] == (dtype != "bool")


def test_tied_embeddings_in_a_loop() -> None:
    """A lookup, logits and the next word; the table's gradient; and counts that begin at others."""
    mesh = two_axes()
    table, words = put(mesh, normal(0, 64, 16), "model"), put(mesh, WORDS % 64, "data")

    def decode(table: Any, words: Any) -> Any:
        def step(words: Any, _: Any) -> Any:
            words = jnp.argmax(table[words] @ table.T, -1).astype(np.int32)
            return words, words

        return lax.scan(step, words, None, length=3)

    _, after = check(decode, table, words)
    assert of_xla(after) == 0
    assert after == {f"jax_intranode_{name}": 1 for name in ("psum", "pmax", "pmin")}

    def loss(table: Any, words: Any) -> Any:
        logits = jax.nn.log_softmax(jax.checkpoint(lambda t: t[words] @ t.T)(table))
        return -jnp.take_along_axis(logits, words[:, None], 1).mean()

    _, after = check(jax.value_and_grad(loss), table, words)
    assert of_xla(after) == 0
    check(lambda table, words: table.at[words].add(1.0), table, words)
    check(lambda table, words: table.at[words].set(1.0), table, words)


def largest(x: Any, table: Any) -> Any:
    return table[lax.top_k(x, 3)[1]] @ table.T


def error_function(x: Any, table: Any) -> Any:
    return lax.erf(x @ table.T) @ table


@pytest.mark.parametrize("f", [largest, error_function])
def test_shardings_pass_operations_that_stablehlo_lacks(f: Any) -> None:
    mesh = two_axes()
    width = 32 if f is largest else 16
    x, table = put(mesh, normal(0, 8, width), "data"), put(mesh, normal(1, 32, 16), "model")
    before, after = check(f, x, table)
    assert after["jax_intranode_psum"] == before["all-reduce"] == 1


def test_a_key_of_random_numbers() -> None:
    """JAX says that it is replicated by a mesh of its own, without axes."""
    p, x = tensor_parallel()

    def dropped(key: Any, p: Any, x: Any) -> Any:
        return mlp(p, x * jax.random.bernoulli(key, 0.9, x.shape))

    _, after = check(dropped, jax.random.key(0), p, x)
    assert of_xla(after) == 0 and after["jax_intranode_psum"] == 1


def test_devices_in_another_order() -> None:
    order = [2, 0, 3, 1, *range(4, N)]
    for mesh in (two_axes(), two_axes(order)):
        check(mlp, *fully_sharded(mesh))


def test_off_and_nothing_to_take_change_no_text() -> None:
    p, x = tensor_parallel()
    before = jax.jit(mlp).lower(p, x).as_text()
    with jax_intranode.accelerate():
        assert jax.jit(mlp).lower(p, x).as_text() == before

    def local(p: Any, x: Any) -> Any:
        return x @ p["up"]

    before = jax.jit(local).lower(p, x).as_text()
    with jax_intranode.accelerate(auto=True):
        assert jax.jit(local).lower(p, x).as_text() == before


def test_install_with_and_without_auto() -> None:
    p, x = tensor_parallel()
    f = jax.jit(mlp)

    def ours() -> bool:
        return "jax_intranode" in f.lower(p, x).as_text()

    jax_intranode.install()
    assert not ours()
    jax_intranode.install(auto=True)
    assert ours()
    with jax_intranode.accelerate():
        assert ours()
    jax_intranode.install()
    assert not ours()
    with jax_intranode.accelerate():
        with jax_intranode.accelerate(auto=True):
            assert ours()
        assert not ours()
    jax_intranode.uninstall()
    assert not ours()


def test_explain_says_what_became_of_each() -> None:
    p, x = tensor_parallel()

    def f(p: Any, x: Any) -> Any:
        return mlp(p, x), x.prod(0)

    jax_intranode.install(auto=True)
    report = jax_intranode.explain(f)(p, x)
    assert {call.origin for call in report} == {"XLA's partitioner"}
    ours, left = report
    assert (ours.operation, ours.axes, ours.algorithm != "lax") == ("psum", ("model",), True)
    assert "test_auto.py" in ours.source
    no_sum = "a reduction that is no sum, maximum or minimum"
    assert (left.operation, left.reason) == ("reduce", no_sum)
    report = jax_intranode.explain(f, compiled=True)(p, x)
    assert report.compiled == {"all-reduce": 1, "jax_intranode_psum": 1}
    assert report.added == {"all-reduce": 1}  # the product


def resharded_in_a_loop(mesh: Mesh, keep: bool) -> tuple[Any, tuple[Any, jax.Array]]:
    """A program that XLA would shard in another way after the replacements, unless it says how."""
    p, x = weights(mesh, (), ("model",)), put(mesh, normal(2, 8, 16))

    def loss(p: Any, y: Any) -> Any:
        def layer(y: Any, _: Any) -> Any:
            hidden = jnp.tanh(y @ p["up"])
            hidden = constrained(mesh, hidden) if keep else hidden
            return hidden @ p["down"] + y, None

        return (lax.scan(layer, y, None, length=2)[0] ** 2).mean()

    return jax.grad(loss), (p, x)


def test_what_is_left_has_a_line_of_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "_logged", set())
    caplog.set_level(logging.INFO, "jax_intranode")
    mesh = two_axes(range(4))
    p, x = weights(mesh, *TENSOR_PARALLEL), put(mesh, normal(2, 8, 16), "data")

    def lines(f: Any, *args: Any) -> list[str]:
        caplog.clear()
        with jax_intranode.accelerate(auto=True):
            jax.jit(f).lower(*args)
        return [r.getMessage() for r in caplog.records]

    loss, args = resharded_in_a_loop(mesh, keep=False)
    (line,) = [line for line in lines(loss, *args) if "left to XLA" in line]
    assert line.startswith("jit_loss is left to XLA: with the replacements XLA would shard")
    assert "with_sharding_constraint" in line
    loss, args = resharded_in_a_loop(mesh, keep=True)  # as the line says
    assert not [line for line in lines(loss, *args) if "jit_loss is left" in line]

    def prints(p: Any, x: Any) -> Any:
        jax.debug.print("{}", x[0, 0])
        return mlp(p, x)

    assert "jit_prints is left to XLA: a callback to Python." in lines(prints, p, x)
    monkeypatch.setattr(lowering_hooks, "uses_shardy", lambda: False)
    found = lines(lambda p, x: mlp(p, x) + 1, p, x)
    assert "is left to XLA: jax_use_shardy_partitioner is False." in found[0]
    monkeypatch.undo()
    monkeypatch.setattr(fallback, "_logged", set())

    def product(x: Any) -> Any:
        return x.prod(0)

    where = f"{__file__}:{product.__code__.co_firstlineno + 1} (product)"
    assert lines(product, x) == [  # nothing says that nothing else is left
        "Lowered jit_product: of 1 matmuls, reductions and reshardings to which XLA's partitioner "
        "would add collectives, 0 became 0 operations of this package. XLA may communicate for "
        "others, too: explain(f, compiled=True) lists what is left.",
        f"reduce at {where} is left to XLA: a reduction that is no sum, maximum or minimum.",
    ]


@pytest.mark.parametrize(
    "why",
    ["a callback", "several meshes", "own function", "symbolic shapes", "constants", "shardy"],
)
def test_explain_says_why_a_program_is_left_as_a_whole(why: str) -> None:
    mesh = two_axes()
    other = Mesh(mesh.devices, ("x", "y"), axis_types=mesh.axis_types)
    p, x = weights(mesh, *TENSOR_PARALLEL), put(mesh, normal(2, 8, 16), "data")

    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 16"), x.dtype)
    of_any_shape = jax.export.export(jax.jit(jax.nn.relu))(rows)
    table = np.arange(33 << 20, dtype=np.uint8)

    def f(p: Any, x: Any) -> Any:
        y = mlp(p, x)
        if why == "symbolic shapes":
            y = of_any_shape.call(y)
        if why == "constants":
            y += jnp.asarray(table)[:1]
        if why == "a callback":
            jax.debug.print("{}", y[0, 0])
        if why == "own function":
            y = lax.composite(jax.nn.relu, "tests.relu")(lax.approx_max_k(y, 2)[0])
        return constrained(other, y, "x") if why == "several meshes" else y

    jax.config.update("jax_use_shardy_partitioner", why != "shardy")
    try:
        with jax_intranode.accelerate(auto=True):
            report = jax_intranode.explain(f)(p, x)
            compiled = jax.jit(f).lower(p, x).compile()
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert set(collectives(compiled)) == {"all-reduce"}
    assert why in (report.left or "") and why in str(report)


def test_a_program_that_xla_refuses_is_compiled_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p, x = tensor_parallel()
    from jax._src import compiler  # noqa: TID251 - stands in for XLA

    compile_ = compiler.compile_or_get_cached

    def refuse(backend: Any, computation: Any, *args: Any, **kwargs: Any) -> Any:
        if "jax_intranode_psum" in str(computation):
            raise jax.errors.JaxRuntimeError("INTERNAL: refused")
        return compile_(backend, computation, *args, **kwargs)

    monkeypatch.setattr(compiler, "compile_or_get_cached", refuse)
    f = jax.jit(mlp)
    with jax_intranode.accelerate(auto=True):
        compiled = f.lower(p, x).compile()
        assert collectives(compiled) == {"all-reduce": 1}
        np.testing.assert_allclose(f(p, x), mlp(p, x), rtol=1e-4, atol=1e-5)
        assert "jax_intranode" not in f.lower(p, x).as_text()
    assert "INTERNAL: refused" in caplog.text


def test_an_error_of_the_users_own_is_not_laid_to_this_package(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, x = tensor_parallel()
    with jax_intranode.accelerate(auto=True):
        lowered = jax.jit(mlp).lower(p, x)
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_of_tests"):
            lowered.compile({"xla_of_tests": True})
    assert "refuses" not in caplog.text


def test_an_exception_leaves_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(groups, "replace", mock.Mock(side_effect=KeyError("not expected")))
    p, x = tensor_parallel()
    before, after = check(mlp, p, x)
    assert before == after
    assert sum("not expected" in record.message for record in caplog.records) == 1


def test_a_peer_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = jax_intranode.CommunicationError("process 1 is gone")
    monkeypatch.setattr(groups, "replace", mock.Mock(side_effect=gone))
    p, x = tensor_parallel()
    with pytest.raises(jax_intranode.CommunicationError), jax_intranode.accelerate(auto=True):
        jax.jit(mlp).lower(p, x)


def test_a_jaxlib_without_propagation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What needs it is left to XLA, or an error where it is asked for; jax.lax is replaced."""
    from jax_intranode._src.rewrite import switch

    monkeypatch.setattr(switch, "PIPELINE", "builtin.module(sdy-no-such-pass)")
    with pytest.raises(RuntimeError, match=r"leave out auto=True"):
        jax_intranode.install(auto=True)
    assert not switch.mode.enabled.value
    mesh = Mesh(np.array(jax.devices()), ("x",))
    total = jax.shard_map(lambda v: lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    with jax_intranode.accelerate():
        assert "jax_intranode_psum" in jax.jit(total).lower(jnp.ones((mesh.size, 4))).as_text()
    assert "Programs over Explicit axes are left to XLA" in caplog.text


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the bytes from which on collectives are left that XLA can overlap."""
    monkeypatch.setattr(rewriting._Rewriting, "_on_gpus", lambda _: True)
    return lambda nbytes: monkeypatch.setattr(overlap.sums, "OVERLAPPED_BYTES", nbytes)


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_of_a_sharded_product(as_on_gpus: Any, parts: int) -> None:
    """Where XLA permutes as often as it would sum, all is left to it on GPUs."""
    as_on_gpus(1 << 30)
    mesh = two_axes()
    wide = put(mesh, normal(0, 16, 16 * parts), None, "model")
    down = put(mesh, normal(1, 16, 16), "model", None)

    def f(wide: Any, down: Any, x: Any) -> Any:
        first, *others = jnp.split(x @ wide, parts, axis=-1)
        return sum(others, jnp.tanh(first)) @ down

    before, after = check(f, wide, down, put(mesh, normal(2, 8, 16), "data"))
    assert (before == after) == (parts == 3)


@pytest.mark.parametrize(("batch", "users"), [(1, 2), (1, 1), (2, 2)])
def test_dimensions_of_one_element(as_on_gpus: Any, batch: int, users: int) -> None:
    """XLA removes them on GPUs, so dots that it partitions may share what they send."""
    as_on_gpus(1 << 30)
    mesh = two_axes()
    p, x = weights(mesh, *TENSOR_PARALLEL), put(mesh, normal(2, batch, 8, 16), None, "data")
    others = [put(mesh, normal(3 + i, 16, 16)) for i in range(users)]

    def f(p: Any, x: Any, others: Any) -> Any:
        y = x + mlp(p, x)
        return [constrained(mesh, y @ w, None, "model", "data") for w in others]

    before, after = check(f, p, x, others)
    assert of_xla(before) > 1
    assert ("jax_intranode_psum" in after) == ((batch, users) != (1, 2)), after


def test_what_xla_can_overlap_is_left(as_on_gpus: Any) -> None:
    """A gather that can run next to a matmul before its use; not sums that all matmuls need."""
    as_on_gpus(0)
    p, x = fully_sharded(two_axes())
    before, after = check(lambda p, x: jnp.tanh(p["up"] @ p["down"]) * 2, p, x)
    assert of_xla(before) == of_xla(after) + 1
    _, after = check(lambda p, x: mlp(p, mlp(p, x)), *tensor_parallel())
    assert of_xla(after) == 0


def test_matmuls_that_overlap_are_not_left(
    as_on_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA could run their collectives next to other matmuls, too. If none overlaps, none moves.

    Gathers of parameters are left.
    """
    as_on_gpus(0)
    f, *args = gated_step()
    _, found = check(f, *args)
    jax.clear_caches()
    judged = bodies.Bodies.judged

    def as_overlapped(self: Any, group: Any) -> Any:
        found = judged(self, group)
        return dataclasses.replace(found, overlaps=found.left is None)

    with monkeypatch.context() as patch:
        patch.setattr(bodies.Bodies, "judged", as_overlapped)
        _, after = check(f, *args)
        _, of_parameters = check(mlp, *fully_sharded(two_axes()))
    assert of_xla(of_parameters) == 2
    assert after["jax_intranode_psum_scatter"] == after["jax_intranode_all_gather"] == 2
    assert after["all-gather"] == after["reduce-scatter"] == 0
    jax.clear_caches()
    monkeypatch.setattr(rewriting.moved, "move", lambda _: 0)
    monkeypatch.setattr(rewriting.moved, "share", lambda *_: False)
    _, after = check(f, *args)
    assert after == found and of_xla(after) > 1


def test_a_program_is_converted_to_hlo_once(as_on_gpus: Any) -> None:
    """Not again without the moves, where no matmul overlaps, nor to be propagated again."""
    as_on_gpus(0)
    f, *args = gated_step()
    with (
        jax_intranode.accelerate(auto=True),
        mock.patch.object(hlo, "through_hlo", wraps=hlo.through_hlo) as converted,
    ):
        jax.jit(f).lower(*args)
    assert converted.call_count == 1


@pytest.mark.parametrize(("most", "left"), [(3 << 10, 2), (4 << 10, 0)])
def test_gathers_that_xla_combines_are_judged_as_one(most: int, left: int, as_on_gpus: Any) -> None:
    """Those of parameters, of which only the second can run next to a matmul."""
    as_on_gpus(most)
    before, after = check(mlp, *fully_sharded(two_axes()))
    assert (of_xla(before), of_xla(after)) == (2, left)


@pytest.mark.parametrize("left", [2, 0])
def test_sums_of_gradients_are_judged_as_one(left: int, as_on_gpus: Any) -> None:
    """XLA combines them, also the last one, which has no matmul behind it.

    The sums of tensor parallelism, which each matmul needs, are ours at every size.
    """
    p, x = tensor_parallel()
    nbytes = sum(w.addressable_shards[0].data.nbytes for w in p.values())
    as_on_gpus(nbytes - 1 if left else nbytes)
    f = jax.grad(lambda p, x: jnp.sin(mlp(p, x)).sum())
    before, after = check(f, p, x)
    assert of_xla(before) == 3 and of_xla(after) == left
    with jax_intranode.accelerate(auto=True):
        calls = jax_intranode.explain(f)(p, x)
    reasons = [call.reason for call in calls if call.algorithm == "lax"]
    assert len(reasons) == left and all("combines" in reason for reason in reasons)


def test_strict_names_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rewriting.agreement, "reason_for_no_auto", lambda *_: "a process has not agreed"
    )
    strict = dataclasses.replace(config.get(), strict=True)
    monkeypatch.setattr(config, "get", lambda: strict)
    p, x = tensor_parallel()
    with (
        jax_intranode.accelerate(auto=True),
        pytest.raises(RuntimeError, match=r"dot_general at .*test_auto.py.*has not agreed"),
    ):
        jax.jit(mlp).lower(p, x)
    with jax_intranode.accelerate(auto=True):
        (call,) = jax_intranode.explain(mlp)(p, x)
    assert (call.algorithm, call.reason) == ("lax", "a process has not agreed")


def test_nothing_is_replaced_under_export() -> None:
    p, x = tensor_parallel()
    with jax_intranode.accelerate(auto=True):
        exported = jax.export.export(jax.jit(mlp))(p, x)
    assert "jax_intranode" not in exported.mlir_module()


def test_dtypes_that_are_left(caplog: pytest.LogCaptureFixture) -> None:
    mesh = two_axes()
    w = put(mesh, normal(0, 16, 8).astype(np.complex64), "model")
    x = put(mesh, normal(1, 8, 16).astype(np.complex64), None, "model")
    before, after = check(jnp.dot, x, w)
    assert before == after
    jax_intranode.install(auto=True)
    for f in (jnp.dot, lambda x, w: x.sum(1), lambda x, w: x.mean(1)):
        (left,) = jax_intranode.explain(f)(x, w)
        assert "complex64" in left.reason
    jax_intranode.uninstall()
    y = put(mesh, normal(0, 8, 16), None, "model")
    _, after = check(lambda x, y: (x.sum(1), y.sum(1)), x, y)
    assert of_xla(after) == after["jax_intranode_psum"] == 1
    assert not [r for r in caplog.records if r.levelname == "WARNING"]  # nothing has failed


def test_dtypes_that_are_not_enabled_any_more(caplog: pytest.LogCaptureFixture) -> None:
    mesh = two_axes()
    with jax.enable_x64(True):
        x = put(mesh, normal(0, 8, 16).astype(np.float64), None, "model")
        traced = jax.jit(lambda x: x.sum(1)).trace(x)
    with jax_intranode.accelerate(auto=True):
        compiled = traced.lower().compile()
    assert set(collectives(compiled)) == {"all-reduce"}
    assert not [r for r in caplog.records if r.levelname == "WARNING"]  # nothing has failed


def test_products_of_booleans() -> None:
    """Their sum is True or False, and lax.psum counts."""
    mesh = two_axes()
    x, w = (put(mesh, normal(i, 16, 16) > 0.2, *s) for i, s in enumerate(TENSOR_PARALLEL))
    for f in (lambda x, w: (x @ w).sum(1), lambda x, w: jnp.where(x @ w, x, w)):
        before, after = check(f, x, w)
        assert before == after


def test_a_gathered_array_that_is_reduced_otherwise() -> None:
    mesh = two_axes()
    x = put(mesh, normal(0, 8, 16), None, "model")
    _, after = check(lambda x: constrained(mesh, x) - constrained(mesh, x).max(0), x)
    assert of_xla(after) == 0 and after["jax_intranode_all_gather"] == 1


def twice_reshaped(x: Any) -> Any:
    return x.reshape(1, -1).reshape(-1)


def test_results_whose_users_xla_removes() -> None:
    """XLA gave the shardings of such users to what makes the results, and refused the program."""
    mesh = two_axes()
    x, y = put(mesh, normal(0, 16, 32), "data"), put(mesh, normal(1, 16, 64), "data", "model")

    def f(x: Any, y: Any, a: Any, b: Any) -> Any:
        sums = twice_reshaped(x.sum(0)), twice_reshaped(y.sum(0)) * 1.0
        return [0.9 * m + g * g for m, g in zip((a, b), sums, strict=True)]

    before, after = check(f, x, y, put(mesh, normal(2, 32)), put(mesh, normal(3, 64)))
    assert of_xla(before) == 2 and of_xla(after) == 0


def test_a_loop_whose_result_is_sliced_whole() -> None:
    """It ended the process with a segmentation fault."""
    p, x = tensor_parallel()

    def f(p: Any, x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            x, total = carry
            return (x + mlp(p, x), total + x[None]), None

        x, total = lax.scan(body, (x, jnp.zeros((1, *x.shape))), None, length=3)[0]
        return lax.slice(total, (0, 0, 0), total.shape).reshape(x.shape) * 1.0 + mlp(p, x)

    _, after = check(jax.jacrev(lambda p, x: f(p, x).sum()), p, x)
    assert of_xla(after) == 0


@pytest.mark.parametrize(
    "specs",
    [
        (("model",), ("model",), ()),
        ((EVERY,), EVERY, (None, EVERY)),
        (EVERY, (None, "model"), (None, "model")),
        ((None, "model"), ("model",), EVERY),
        (("model",), (EVERY,), (None, "data")),
    ],
)
def test_shardings_are_those_that_xla_chooses(
    specs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where several are possible, XLA's choice depends on how it has simplified the program."""
    mesh = two_axes(range(4))
    p, y = weights(mesh, *specs[:2]), put(mesh, normal(2, 8, 16), *specs[2])

    def loss(p: Any, y: Any) -> Any:
        def layer(y: Any, _: Any) -> Any:
            return jnp.tanh(y @ p["up"]) @ p["down"] + y, None

        return (lax.scan(layer, y, None, length=2)[0] ** 2).mean()

    wanted = jax.jit(jax.grad(loss)).lower(p, y).compile()
    monkeypatch.setattr(rewriting, "propagated_only", True)
    with jax_intranode.accelerate(auto=True):
        found = jax.jit(jax.grad(loss)).lower(p, y).compile()
    assert not [r for r in caplog.records if r.levelname == "WARNING"]  # nothing has failed
    assert collectives(found) == collectives(wanted)
    for name in ("up", "down"):
        chosen = found.output_shardings[name], wanted.output_shardings[name]
        assert chosen[0].is_equivalent_to(chosen[1], 2)


@pytest.mark.parametrize(
    "branch, wanted",
    [(lambda x: x @ x, "if"), (lambda x: x.T, "if"), (lambda x: jnp.tanh(x) - x.sum(0), "case")],
)
def test_branches_for_gpus(branch: Any, wanted: str) -> None:
    """XLA makes selects of cheap branches, through which Shardy propagates as through a "case"."""

    def f(x: Any) -> Any:
        return lax.cond(x[0, 0] > 0, branch, lambda x: x * 2, x)

    module = jax.jit(f).lower(normal(0, 8, 8)).compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        new = simplified.simplified(module, for_gpus=True)
        names = {o.name for o in modules.walk(new.operation)}
        assert new.operation.verify()
    assert names & {"stablehlo.if", "stablehlo.case"} == {f"stablehlo.{wanted}"}


@pytest.mark.parametrize(
    "spec, times, for_gpus, swaps",
    [
        ("ai,ib->ba", 1, True, True),
        ("aij,bji->ba", 1, True, True),
        ("ai,ib->ab", 1, True, False),
        ("ai,ib->ba", 2, True, False),  # the product itself is needed, too
        ("aci,ib->bac", 1, True, False),
        ("ai,ib->ba", 1, False, False),
    ],
)
def test_transposed_products(spec: str, times: int, for_gpus: bool, swaps: bool) -> None:
    """For GPUs XLA multiplies in the other order, and Shardy prefers the first operand."""
    terms, result = spec.split("->")
    sizes = dict(zip("abcij", (2, 3, 4, 5, 6), strict=True))
    shapes = [[sizes[c] for c in term] for term in terms.split(",")]
    plain = "".join(c for c in terms if c in result)

    def f(x: Any, w: Any) -> Any:
        y = jnp.einsum(f"{terms}->{plain}", x, w)
        order = [plain.index(c) for c in result]
        return [y.transpose(order), y * 2][:times]

    module = jax.jit(f).lower(*(normal(i, *shape) for i, shape in enumerate(shapes))).compiler_ir()
    with module.context, ir.Location.unknown():
        new = simplified.simplified(module, for_gpus=for_gpus)
        assert new.operation.verify()
        (dot,) = [o for o in modules.walk(new.operation) if o.name.startswith("stablehlo.dot")]
        first = list(ir.RankedTensorType(dot.operands[0].type).shape)
        transposes = [o for o in modules.walk(new.operation) if o.name == "stablehlo.transpose"]
    assert (first == shapes[1]) == swaps
    assert len(transposes) == (result != plain and not swaps)


def test_a_broadcast_of_a_sharded_array() -> None:
    """XLA exchanged parts of the broadcast, and would have gathered the array once it was ours."""
    mesh = two_axes()

    def f(x: Any, w: Any) -> Any:
        return jax.vmap(lambda column: (column * w).sum(), in_axes=1)(x)

    x = put(mesh, normal(0, 16, 16), "data", "model")
    before, after = check(f, x, put(mesh, normal(1, 16, 16), "model"))
    assert before["all-reduce"] == 1 and after["all-reduce"] == 0


def test_attention_of_a_divided_sequence() -> None:
    """XLA ignores shardings of operations; without constraints it chose others for two dots."""
    mesh = two_axes(range(4))

    def loss(w: Any, x: Any) -> Any:
        qkv = jnp.einsum("bsd,cde->cbse", x, w).reshape(3, *x.shape[:2], 4, -1)
        mixed = jax.nn.dot_product_attention(*qkv).reshape(x.shape)
        return (constrained(mesh, mixed, *EVERY) ** 2).mean()

    w = put(mesh, normal(0, 3, 16, 16), None, None, "model")
    before, after = check(jax.grad(loss), w, put(mesh, normal(1, 8, 4, 16), *EVERY))
    assert of_xla(after) < of_xla(before)


def rms_norm(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def layer_norm(x: Any, scale: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + scale) + scale


@pytest.mark.parametrize(
    ("norm", "is_divided"),
    [(rms_norm, True), (layer_norm, False), full(rms_norm, False), full(layer_norm, True)],
)
def test_a_norm_behind_a_sum(norm: Any, is_divided: bool, norms_are_fused: None) -> None:
    """Layers whose sums are followed by a residual and a norm; the sequence may be divided."""
    mesh = two_axes()
    between = ("data", "model") if is_divided else ("data", None)
    layers = [weights(mesh, *TENSOR_PARALLEL) | {"scale": put(mesh, normal(3, 16))} for _ in "ab"]

    def f(layers: Any, x: Any) -> Any:
        for w in layers:
            x = x + constrained(mesh, mlp(w, norm(x, w["scale"])), *between, None)
        return norm(x, layers[0]["scale"]), x

    x = put(mesh, normal(2, 2, 8, 16), *between)
    before, after = check(f, layers, x)
    kind = "psum_scatter" if is_divided else "psum"
    assert of_xla(before) >= 2 and of_xla(after) == 0
    assert after[f"jax_intranode_{kind}_residual_{norm.__name__}"] == 2
    with jax_intranode.accelerate(auto=True):
        calls = [c.operation for c in jax_intranode.explain(f)(layers, x)]
    assert calls.count(f"{kind}_residual_{norm.__name__}") == 2
    # Here the backward pass needs what the norm computes, so it stays as it is.
    _, after = check(jax.grad(lambda w, x: (f(w, x)[0] ** 2).sum()), layers, x)
    assert of_xla(after) == 0


# The parts.


def test_operations_alone_without_such_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JAX whose topologies cannot be read as expected: the mesh's own devices are taken."""
    monkeypatch.setattr(partitioner, "_SLOW_KERNELS", {"cpu"})
    of = partitioner.topologies.TopologyDescription
    unexpected = mock.Mock(side_effect=TypeError("unexpected arguments"))
    for name in ("serialize", "deserialize"):
        monkeypatch.setattr(of, name, unexpected, raising=False)
    ((target, _),) = partitioner._targets.__wrapped__(two_axes())
    assert target == two_axes() and unexpected.call_count == 1


@pytest.mark.parametrize("loads", [False, True])
def test_operations_alone_without_kernels(loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that load nothing show the same collectives; if they can't, those of the mesh do."""
    monkeypatch.setattr(partitioner, "_SLOW_KERNELS", {"cpu"})
    monkeypatch.setattr(partitioner, "_known", {})
    monkeypatch.setattr(partitioner, "_targets", functools.cache(partitioner._targets.__wrapped__))
    if loads:
        these = SimpleNamespace(devices=jax.devices())
        of = partitioner.topologies.TopologyDescription
        monkeypatch.setattr(of, "deserialize", lambda _: these, raising=False)
    before, after = check(mlp, *tensor_parallel())
    assert of_xla(before) > 0 and of_xla(after) == 0
    targets = [target for target, _ in partitioner._targets(two_axes())]
    assert targets[-1] == two_axes()
    if jax.__version_info__ >= (0, 12):
        assert len(targets) == 2 and (targets[0] == targets[1]) == loads


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,1},{2,3}}", {"model"}),
        ("{{0,2},{1,3}}", {"data"}),
        ("{{0,3},{1,2}}", None),
        ("{}", {"data", "model"}),
        ("[2,2]<=[4]", {"model"}),
        ("[2,2]<=[2,2]T(1,0)", {"data"}),
        ("[1,4]<=[4]", {"data", "model"}),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_1'}", {"model"}),
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}", {"model"}),
        ("mesh['a'=4] {'a':(1)2}", {"data"}),
        ("mesh['a'=4] {'a':(2)2}", {"model"}),
        ("mesh['a'=4,'b'=1] {'a':(2)2,'b','a':(1)2}", {"data", "model"}),
        ("mesh['a'=8] {'a'}", None),
    ],
)
def test_groups_of_hlo(text: str, axes: set[str] | None) -> None:
    groups = hlo.groups_of_text(text, 4)
    found = groups and partitioner.axes_of_groups(
        frozenset(groups), ("data", "model"), np.arange(4).reshape(2, 2)
    )
    assert found == (None if axes is None else frozenset(axes))


def test_plans_of_a_dot() -> None:
    labels = plans.Labels(((0, 1), (1, 2)), (0, 2))
    m, none = ("m",), ()
    summed = plans.plans(labels, ((none, m), (m, none)), (none, none))
    found = [plan for plan in summed if not plan.gathers]
    assert [plan.sums for plan in found] == [(plans.Sum(m),)]
    scattered = list(plans.plans(labels, ((none, m), (m, none)), (none, m)))
    assert (plans.Sum(m, 1),) in [plan.sums for plan in scattered]
    sizes = {"m": 4}
    for count, fits in ((64, True), (32, False)):
        one = [("all-reduce", frozenset("m"), count)]
        fitting = plans.as_found(found[0], one, ((8, 8), (8, 8)), (8, 8), sizes)
        assert (fitting is not None) is fits


@pytest.mark.parametrize("what", ["argument", "difference", "choice"])
def test_results_that_are_gathered(what: str) -> None:
    """XLA reshards results for out_shardings, and operands of select."""
    mesh = two_axes()
    whole, part = put(mesh, normal(0, 8, 4)), put(mesh, normal(1, 8, 4), ("data", "model"))

    def f(m: Any, g: Any) -> Any:
        if what == "argument":
            return g * 1.5
        return m + (g - m) * 0.1 if what == "difference" else jnp.where(m > 0, g * 2, m)

    jitted = jax.jit(f, out_shardings=NamedSharding(mesh, P()))
    wanted = jitted(whole, part)
    with jax_intranode.accelerate(auto=True):
        compiled = jitted.lower(whole, part).compile()
        found = jitted(whole, part)
    assert not of_xla(collectives(compiled))
    assert collectives(compiled)["jax_intranode_all_gather"] == 1
    np.testing.assert_array_equal(wanted, found)


def test_what_is_left_is_told_whole() -> None:
    """Maxima in a table, and a cumulative sum: XLA's collectives are rows with their lines."""
    mesh = two_axes()

    def f(table: Any, words: Any, w: Any) -> Any:
        rows = table.at[words].max(3.0)
        return jnp.cumsum(rows @ w, axis=0)

    table, w = put(mesh, normal(0, 16, 8), "model"), put(mesh, normal(1, 8, 8), "data")
    words = put(mesh, np.arange(8, dtype=np.int32), "data")
    with jax_intranode.accelerate(auto=True):
        report = jax_intranode.explain(f, compiled=True)(table, words, w)
        compiled = collectives(jax.jit(f).lower(table, words, w).compile())
    assert report.compiled == compiled and of_xla(compiled)
    left = [call for call in report if call.algorithm == "lax"]
    line = f"{__file__}:{f.__code__.co_firstlineno + 1} (f)"
    assert line in [call.source for call in left]
    assert any("scatter" in call.reason for call in left if call.source == line)
