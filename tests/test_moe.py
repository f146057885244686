"""moe_dispatch and moe_combine: dropped rows, odd operands, and where lax runs them.

cases_of_experts.py compares their results with NumPy's, for random routings; the contract has
gradients and transformations.
"""

import functools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import expert_routings
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, put, sharded
from devices import need_devices
from jax import export
from jax.sharding import PartitionSpec as P
from models import dense_experts as dense
from models import experts

import jax_intranode
from jax_intranode._src.ops import fallback

pytestmark = pytest.mark.one_version

N, TOKENS, HIDDEN, TOP, EXPERTS = 2, 6, 8, 3, 4


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    need_devices(N)
    yield


def operands(seed: int = 0, dtype: str = "float32") -> tuple[Any, Any, Any, Any]:
    """Tokens, experts, weights, and what the experts multiply by; of all ranks."""
    rng = np.random.default_rng(seed)
    x, weights = expert_routings.operands(rng, N, TOKENS, HIDDEN, TOP, dtype)
    ids = expert_routings.routing(rng, N, TOKENS, TOP, EXPERTS, "some none")
    factors = rng.uniform(0.5, 2, (EXPERTS, HIDDEN)).astype(x.dtype)
    x, ids, weights = (jnp.asarray(v.reshape(-1, v.shape[-1])) for v in (x, ids, weights))
    return x, ids, weights, jnp.asarray(factors)


def layer(capacity: int | None = None) -> Any:
    """(x, ids, weights, factors) of a rank -> the results."""
    return functools.partial(experts, jax_intranode, capacity=capacity)


def program(body: Any) -> Callable[..., Any]:
    return sharded(body, line(N), P("x"), P("x"), True)


def gradients(f: Any, x: Any, ids: Any, weights: Any, factors: Any) -> Any:
    def loss(x: Any, w: Any, v: Any) -> Any:
        return (f(x, ids, w, v) * jnp.arange(HIDDEN)).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, weights, factors)


def assert_close(found: Any, wanted: Any) -> None:
    for v, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(v, w, rtol=2e-5, atol=2e-5)


def test_gradients_of_dropped_rows_are_zero() -> None:
    x, ids, weights, factors = operands(3)
    of_ranks = [np.asarray(v).reshape(N, TOKENS, -1) for v in (x, ids)]
    wanted = expert_routings.expected(*of_ranks, EXPERTS, 5)
    kept = np.zeros(ids.shape, bool)
    for of_rank in wanted.rows:
        for source, token, choice in of_rank:
            kept[source * TOKENS + token, choice] = True
    assert wanted.dropped.sum() == (ids >= 0).sum() - kept.sum() > 0
    args = x, np.where(kept, ids, -1), weights, factors
    found = gradients(program(layer(5)), x, ids, weights, factors)
    assert_close(found, gradients(dense, *args))


def test_backward_has_one_exchange_for_outputs_and_weights() -> None:
    found = jax_intranode.explain(functools.partial(gradients, program(layer())))(*operands())
    names = [call.operation for call in found if call.algorithm != "lax"]
    # Forward, and then the gradients of the combine and of the dispatch.
    assert names.count("moe_dispatch") == names.count("moe_combine") == 2


def test_state_is_a_value() -> None:
    """It leaves the shard_map, and another one takes it, with rows of another length and dtype."""
    x, ids, weights, _ = operands(4)

    def dispatch(x: Any, ids: Any, weights: Any) -> Any:
        rows, _, state = jax_intranode.moe_dispatch(x, ids, weights, "x", num_experts=EXPERTS)
        return rows, state

    rows, state = jax.jit(program(dispatch))(x, ids, weights)
    assert (state.axes, state.num_experts, state.tokens) == (("x",), EXPERTS, TOKENS)
    wide = jnp.concatenate([rows, rows], 1).astype(jnp.bfloat16)
    y = jax.jit(program(jax_intranode.moe_combine))(wide, state)
    assert y.shape == (N * TOKENS, 2 * HIDDEN) and y.dtype == jnp.bfloat16
    wanted = (jnp.where(ids < 0, 0, weights).sum(1)[:, None]) * x
    np.testing.assert_allclose(y[:, :HIDDEN].astype(np.float32), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(0, 8, 3), (6, 0, 3), (6, 8, 0)])
def test_arrays_without_elements(shape: tuple[int, int, int]) -> None:
    tokens, hidden, k = shape
    of_rank = expert_routings.layer(lambda rows: rows, EXPERTS, 5)

    def body(one: Any, *xs: Any) -> Any:  # XLA fails if a program uses no operand
        received, sizes, _, y = of_rank(*xs)
        return received + one, sizes, y

    arrays = (N * tokens, hidden), (N * tokens, k), (N * tokens, k)
    x, ids, weights = map(jnp.ones, arrays)
    run, xs = jax.jit(program(body)), (jnp.ones(N), x, ids.astype(int), weights)
    # XLA:GPU may crash where such an array is sent.
    sent = re.findall(r'"stablehlo.all_.*', run.lower(*xs).as_text())
    assert not any(re.search(r"tensor<(\d+x)*0x", line) for line in sent)
    received, sizes, y = run(*xs)
    assert received.shape == (N * 5, hidden) and y.shape == (N * tokens, hidden)
    assert not np.any(y) or k > 0
    assert sizes.sum() == (5 if 0 not in (tokens, k) else 0)
    f = program(layer(5))
    factors = jnp.ones((EXPERTS, hidden))
    found = jax.jit(jax.grad(lambda *v: f(v[0], xs[2], *v[1:]).sum(), (0, 1, 2)))(
        x, weights, factors
    )
    assert not any(map(np.any, found))


@pytest.mark.parametrize(
    ("dtype", "none"),
    [
        *((dtype, EXPERTS + 1) for dtype in ("uint8", "int8", "int16")),
        *(("int64", 2**32 + 1), ("int64", 1 - 2**32), ("uint64", 2**63)),
    ],
)
def test_ids_of_any_kind(dtype: str, none: int) -> None:
    """An id that no expert has is none, whatever its lowest 32 bits are."""
    x, ids, weights, factors = operands(13)
    wanted = dense(x, ids, weights, factors)
    with jax.enable_x64(True):
        ids = jnp.where(ids < 0, jnp.asarray(none, dtype), ids.astype(dtype))
        assert_close(jax.jit(program(layer()))(x, ids, weights, factors), wanted)


@pytest.mark.parametrize("tokens", [TOKENS, 600])  # by one kernel, and by three operations
def test_vmap_of_tokens_alone(tokens: int) -> None:
    """Who goes where is found once, and belongs to no element of the batch."""
    rng = np.random.default_rng(16)
    x, weights = expert_routings.operands(rng, N, 3 * tokens, HIDDEN, TOP, "float32")
    x, weights = x.reshape(N, tokens, 3, HIDDEN), weights[:, :tokens]
    ids = expert_routings.routing(rng, N, tokens, TOP, EXPERTS, "some none")

    def body(x: Any, ids: Any, weights: Any) -> Any:
        def of_element(x: Any) -> Any:
            rows, sizes, state = jax_intranode.moe_dispatch(
                x, ids[0], weights[0], "x", num_experts=EXPERTS, capacity=tokens
            )
            return rows, (sizes, state.dropped)

        out = jax.vmap(of_element, in_axes=1, out_axes=(0, None))(x[0])
        return jax.tree.map(lambda v: v[None], out)

    f = program(body)
    names = [call.operation for call in jax_intranode.explain(f)(x, ids, weights)]
    assert names.count("moe_dispatch") == 3 and names.count("all_gather") == (tokens == 600)
    rows, (sizes, dropped) = jax.jit(f)(x, ids, weights)
    for element in range(3):
        wanted = expert_routings.expected(x[:, :, element], ids, EXPERTS, tokens)
        np.testing.assert_array_equal(rows[:, element], wanted.received)
        np.testing.assert_array_equal(sizes, wanted.sizes)
        np.testing.assert_array_equal(dropped, wanted.dropped)


def test_rows_that_nobody_reads_do_not_cross() -> None:
    """A backward pass that finds the layout again, for one, does not send the tokens again."""

    def sizes(x: Any, ids: Any, weights: Any) -> Any:
        return jax_intranode.moe_dispatch(x, ids, weights, "x", num_experts=EXPERTS)[1]

    shapes = (N * 600, HIDDEN), (N * 600, TOP), (N * 600, TOP)
    x, ids, weights = map(jnp.ones, shapes)
    calls = jax_intranode.explain(program(sizes))(x, ids.astype(int), weights)
    assert [call.operation for call in calls] == ["all_gather"]


@pytest.mark.parametrize("tokens", [TOKENS, 600])
def test_scopes(tokens: int) -> None:
    shapes = (N * tokens, HIDDEN), (N * tokens, TOP), (N * tokens, TOP)
    x, ids, weights = map(jnp.ones, shapes)
    f = jax.jit(program(expert_routings.layer(lambda rows: rows, EXPERTS, tokens)))
    text = f.lower(x, ids.astype(int), weights).compile().as_text()
    scopes = {"moe_dispatch", "moe_combine"}
    if tokens == 600:
        scopes |= {"all_gather", "moe_layout"}
    assert set(re.findall(r"/jax_intranode\.(\w+)", text)) == scopes


# Where lax runs them.


def test_export_falls_back() -> None:
    args = operands(8)
    f = jax.jit(program(layer()))
    platform = jax.devices()[0].platform
    exported = export.export(f, platforms=["cuda" if platform == "gpu" else platform])(*args)
    assert "custom_call @jax_intranode" not in exported.mlir_module()
    placed = [put(line(N), P("x"), np.asarray(v)) for v in args]
    assert_close(jax.jit(exported.call)(*placed), dense(*args))


def test_one_rank() -> None:
    args = operands(9)
    f = jax.jit(sharded(layer(), line(1), P("x"), P("x")))
    assert_close(f(*args), dense(*args))


@pytest.mark.parametrize("kind", expert_routings.KINDS)
@pytest.mark.parametrize("capacity", [None, 7])
def test_random_routings_by_lax(kind: str, capacity: int | None) -> None:
    rng = np.random.default_rng(14)
    x, weights = expert_routings.operands(rng, N, TOKENS, HIDDEN, TOP, "float32")
    ids = expert_routings.routing(rng, N, TOKENS, TOP, EXPERTS, kind)
    body = expert_routings.layer(lambda rows: rows * 0.5, EXPERTS, capacity)
    received, sizes, dropped, y = jax.jit(jax.vmap(body, axis_name="x"))(x, ids, weights)
    rows = capacity or N * TOKENS * min(TOP, EXPERTS // N)
    wanted = expert_routings.expected(x, ids, EXPERTS, rows)
    np.testing.assert_array_equal(received, wanted.received)
    np.testing.assert_array_equal(sizes, wanted.sizes)
    np.testing.assert_array_equal(dropped, wanted.dropped)
    assert_close(y, wanted.combined(wanted.received * 0.5, weights))


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn"])
def test_other_dtypes_fall_back(dtype: str) -> None:
    with jax.enable_x64(True):
        args = operands(11)
        x = jnp.asarray(args[0]).astype(dtype)

        def body(*xs: Any) -> Any:
            return expert_routings.layer(lambda rows: rows, EXPERTS, None)(*xs)[3]

        f = program(body)
        calls = jax_intranode.explain(f)(x, *args[1:3])
        exchanges = "moe_dispatch", "moe_combine"
        of_experts = [call for call in calls if call.operation in exchanges]
        assert len(of_experts) == 2
        assert all(call.algorithm == "lax" and dtype in call.reason for call in of_experts)
        wanted = jnp.where(args[1] < 0, 0, args[2]).sum(1)[:, None] * x.astype(np.float32)
        found = jax.jit(f)(x, *args[1:3]).astype(np.float32)
        np.testing.assert_allclose(found, wanted, rtol=0.1, atol=0.2)


def test_room_for_all_is_logged(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_logged", set())
    with caplog.at_level(logging.INFO, "jax_intranode.fallbacks"):
        for capacity in (None, 7):
            jax.jit(program(layer(capacity))).lower(*operands(12))
    (found,) = [r.getMessage() for r in caplog.records if "moe_dispatch" in r.getMessage()]
    rows = N * TOKENS * min(TOP, EXPERTS // N)
    has = rf"has {rows} rows for what it receives, {rows * HIDDEN * 4} bytes: capacity=None has"
    assert re.search(rf"models.py:\d+ .* {has} room for all tokens", found)
