"""What a user is told when jax.lax runs a call: the log, and notes on errors."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import line, sharded
from devices import need_devices
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import full

import jax_intranode
from jax_intranode import all_gather_matmul, matmul_reduce_scatter, psum
from jax_intranode._src import reasons
from jax_intranode._src.ops import fallback

N = len(jax.devices())


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lowers a body and returns the lines it has logged."""
    need_devices(2)
    monkeypatch.setattr(fallback, "_logged", set())

    def lowered(body: Callable[..., Any], dtype: Any, columns: int = 4) -> list[str]:
        f = sharded(body, line(), P("x"), P("x"))
        jax_intranode.initialize(line())  # which logs a line of its own
        before = len(caplog.records)
        with caplog.at_level(logging.INFO, "jax_intranode"):
            jax.jit(f).lower(jax.ShapeDtypeStruct((N, columns), dtype))
        return [r.getMessage() for r in caplog.records[before:] if "jax_intranode" in r.name]

    return lowered


@pytest.mark.parametrize(
    ("dtype", "columns", "reason"),
    # Seen while tracing, and while lowering.
    [("complex64", 4, "dtype complex64"), ("float32", 64 << 20, "faster than lax")],
)
def test_fallback_is_logged_once_a_call_site(
    dtype: str, columns: int, reason: str, lines: Any
) -> None:
    def body(v: Any) -> Any:
        return psum(v, "x")

    (found,) = lines(body, dtype, columns)
    assert found.startswith(f"psum at {__file__}:{body.__code__.co_firstlineno + 1} (body) falls")
    assert reason in found
    assert not lines(lambda v: body(v), dtype, columns)
    (other,) = lines(lambda v: body(v), jnp.int16)
    assert "dtype int16" in other
    assert len(lines(lambda v: psum(v, "x") + psum(v * 2, "x"), dtype, columns)) == 1  # one line


def test_what_is_accelerated_is_not_logged(lines: Any) -> None:
    def body(v: Any) -> Any:
        y = all_gather_matmul(v, v.T, "x")
        return psum(v, "x") + matmul_reduce_scatter(y, y.T[:, :4], "x")

    assert not lines(body, jnp.float32)


def test_what_install_leaves_is_logged_once_a_call_site(
    lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def body(v: Any) -> Any:
        return jax.lax.psum(v, "x")

    def product(v: Any) -> Any:
        return jnp.dot(v, v.T, out_sharding=P())

    with jax_intranode.accelerate():
        found = lines(body, jnp.complex64)
        where = f"{__file__}:{body.__code__.co_firstlineno + 1} (body)"
        assert found[0].startswith(f"psum at {where} is left to jax.lax: dtype complex64")
        assert found[1] == "Lowered jit_body: 0 collectives of jax.lax replaced, 1 left."
        assert len(lines(lambda v: body(v), jnp.complex64)) == 1  # the totals
        mesh = jax.make_mesh((N,), ("x",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh), caplog.at_level(logging.INFO, "jax_intranode"):
            x = jax.device_put(jnp.ones((4, N), jnp.complex64), P(None, "x"))
            jax.jit(product).lower(x)
    where = f"{__file__}:{product.__code__.co_firstlineno + 1} (product)"
    last = caplog.records[-1].getMessage()
    assert last.startswith(f"dot_general at {where} is left to XLA: a dtype, such as complex64"), (
        last
    )


def values_and_algorithms() -> dict[tuple[int, str], Any]:
    """Those of functions whose rules are our own, with gradients."""
    x, w = (jnp.arange(8.0 * N * N).reshape(s) % 7 for s in ((2 * N, 4 * N), (4 * N, 2 * N)))
    wide, two, scale = jnp.ones((N * N, 16)), jnp.ones((2, 16)), jnp.ones(16)
    norm = {"axis_name": "x", "eps": 1e-6}

    def scattered(x: Any, r: Any, g: Any) -> Any:
        of: Any = {"scatter_dimension": 0, **norm}
        return jax_intranode.psum_scatter_residual_rms_norm(x, r, g, **of)[0]

    def normed(x: Any, r: Any, g: Any) -> Any:
        return jax_intranode.psum_residual_rms_norm(x, r, g, **norm)[0]

    def ragged(x: Any, output: Any, axis_name: str) -> Any:
        none, one = jnp.zeros(N, jnp.int32), jnp.ones(N, jnp.int32)
        tables = none, one, jnp.full(N, jax.lax.axis_index(axis_name)), one  # row 0, to all
        return jax_intranode.ragged_all_to_all(x, output, *tables, axis_name=axis_name)

    whole, rows, columns = P(), P("x"), P(None, "x")
    calls: list[tuple[Any, Any, Any, Any]] = [
        (all_gather_matmul, (rows, columns), columns, (x, w)),
        (all_gather_matmul, (rows, whole), rows, (x, w)),
        (matmul_reduce_scatter, (columns, rows), rows, (x, w)),
        (jax_intranode.matmul_all_reduce, (columns, rows), whole, (x, w)),
        (jax_intranode.column_parallel_matmul, (whole, columns), columns, (x, w)),
        (normed, (rows, whole, whole), whole, (wide[: 2 * N], two, scale)),
        (scattered, (rows, rows, whole), rows, (wide, wide[:N], scale)),
        (ragged, (rows, rows), rows, (wide, wide)),
    ]
    found = {}
    for number, (function, in_specs, out_specs, operands) in enumerate(calls):
        body = function if in_specs[2:] else functools.partial(function, axis_name="x")
        mapped = jax.shard_map(body, mesh=line(), in_specs=in_specs, out_specs=out_specs)

        def loss(*operands: Any, mapped: Any = mapped) -> Any:
            return (mapped(*operands) ** 2).sum()

        f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        report = jax_intranode.explain(f)(*operands)
        result = jax.tree.map(lambda v: v.tobytes(), jax.device_get(f(*operands)))
        found[number, function.__name__] = result, [(c.operation, c.algorithm) for c in report.own]
    return found


SETTINGS: dict[str, Callable[[], Any]] = {
    "size one": lambda: jax.remove_size_one_mesh_axis_from_type(True),
    "auto_pcast": lambda: jax.auto_pcast(False),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
}
usual_values_and_algorithms = functools.cache(values_and_algorithms)


@pytest.mark.parametrize("names", [[*SETTINGS], *(full([name]) for name in SETTINGS)], ids=str)
def test_settings_of_jax_do_not_turn_our_functions_off(names: list[str]) -> None:
    need_devices(2)
    usual = usual_values_and_algorithms()
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(SETTINGS[name]())
        assert values_and_algorithms() == usual
    algorithms = [algorithm for _, of_call in usual.values() for _, algorithm in of_call]
    assert len(algorithms) >= len(usual) and "lax" not in algorithms


def test_a_reason_keeps_its_cause() -> None:
    filled = reasons.TOO_MANY_RANKS.of(ranks=9, most=8)
    assert filled == "a group of 9 ranks; at most 8 are supported"
    assert reasons.cause_of(filled) == reasons.UNSUPPORTED
    assert reasons.cause_of("of another process") == reasons.REFUSED
