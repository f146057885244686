"""What a user is told when jax.lax runs a call: the log, and notes on errors."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import line, sharded
from devices import need_devices
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode import all_gather_matmul, matmul_reduce_scatter, psum
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
        return [r.getMessage() for r in caplog.records[before:] if r.name == "jax_intranode"]

    return lowered


def test_fallback_while_tracing_is_logged_once_a_call_site(lines: Any) -> None:
    def body(v: Any) -> Any:
        return psum(v, "x")

    (found,) = lines(body, jnp.complex64)
    assert found.startswith(f"psum at {__file__}:{body.__code__.co_firstlineno + 1} (body) falls")
    assert "dtype complex64" in found
    assert not lines(lambda v: body(v), jnp.complex64)
    (other,) = lines(lambda v: body(v), jnp.int16)
    assert "dtype int16" in other
    assert len(lines(lambda v: psum(v, "x") + psum(v * 2, "x"), jnp.complex64)) == 1  # one line


def test_fallback_while_lowering_is_logged_once_a_call_site(lines: Any) -> None:
    def body(v: Any) -> Any:
        return psum(v, "x")

    (found,) = lines(body, jnp.float32, 64 << 20)
    assert found.startswith(f"psum at {__file__}:{body.__code__.co_firstlineno + 1} (body) falls")
    assert "faster than lax" in found
    assert not lines(lambda v: body(v), jnp.float32, 64 << 20)


def test_what_is_accelerated_is_not_logged(lines: Any) -> None:
    def body(v: Any) -> Any:
        y = all_gather_matmul(v, v.T, "x")
        return psum(v, "x") + matmul_reduce_scatter(y, y.T[:, :4], "x")

    assert not lines(body, jnp.float32)
