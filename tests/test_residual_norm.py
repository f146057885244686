"""psum_residual_rms_norm and its relatives: selection, fallbacks, and gradients."""

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, sharded
from cases_of_norms import EPS, normal
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src import reasons
from jax_intranode._src.native import definitions
from jax_intranode._src.selection import select, table

pytestmark = pytest.mark.one_version


def program(f: Any, *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> tuple[Any, list[Any]]:
    """A psum form over all devices, jitted, and the types of its arguments."""
    n = len(jax.devices())
    mapped = sharded(
        lambda x, *others: f(x[0], *others), line(), (P("x"), *[P()] * (len(shapes) - 1)), P()
    )
    avals = [jax.ShapeDtypeStruct(s, dtype) for s in ((n, *shapes[0]), *shapes[1:])]
    return jax.jit(mapped), avals


def rms(x: Any, residual: Any, weight: Any, **options: Any) -> Any:
    return jax_intranode.psum_residual_rms_norm(x, residual, weight, "x", **{"eps": EPS, **options})


@pytest.mark.parametrize(
    ("hidden", "dtype", "reason"),
    [
        (definitions.MAX_HIDDEN + 1, "float32", "rows of 16385 elements"),
        (8, "float64", "dtype float64"),
    ],
)
def test_what_the_kernels_do_not_take_falls_back(hidden: int, dtype: str, reason: str) -> None:
    with cases.x64(dtype), jax.numpy_rank_promotion("raise"):
        f, avals = program(rms, (2, hidden), (2, hidden), (hidden,), dtype=dtype)
        assert "all-reduce" in f.lower(*avals).compile().as_text()
        (call,) = jax_intranode.explain(f)(*avals)
        assert call.algorithm == "lax" and reason in call.reason
        x, residual, weight = (normal(dtype, a.shape, k) for k, a in enumerate(avals))
        got, h = f(x, residual, weight)
    exact = x.astype(np.float64).sum(0) + residual
    want = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPS) * weight
    tolerance = 1e-4 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(h, exact, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_only_what_is_differentiated_is_sent() -> None:
    """The gradient of the weight needs no collective, that of x one psum (check_vma=False)."""

    def loss(argument: int) -> Any:
        def body(*arguments: Any) -> Any:
            def total(v: Any) -> Any:
                chosen = list(arguments)
                chosen[argument] = v
                return jnp.sum(rms(*chosen)[0])

            return jax.grad(total)(arguments[argument])

        return program(body, (2, 64), (2, 64), (64,))

    for argument, sums in ((0, 1), (2, 0)):
        f, avals = loss(argument)
        text = f.lower(*avals).as_text()
        assert text.count("@jax_intranode_psum(") == sums


# Selection.


def chosen(rows: int, hidden: int, **facts: Any) -> select.Selection:
    return select.select_norm(
        **{
            "operation": "psum_residual_rms_norm", "rows": rows, "hidden": hidden,
            "dtype": "bfloat16", "world_size": 2, "hardware": "hopper", "mode": "single",
            "epoch_buffer_bytes": 24 << 20, **facts,
        }
    )  # fmt: skip


def test_selection() -> None:
    assert chosen(1, 8192).algorithm == "one_shot_rms_norm"
    assert (chosen(1, 8192).blocks, chosen(1, 8192).threads) == (1, 512)
    assert chosen(4096, 8192).algorithm == "two_shot_rms_norm"
    # More than the rows that were measured, but one-shot is the fastest psum.
    assert chosen(65, 8192, mode="multi").algorithm == "one_shot_rms_norm"
    assert "in 3 operations" in chosen(4096, 8192).reason
    assert chosen(1, 8192, algorithm="two_shot").algorithm == "two_shot_rms_norm"
    assert chosen(1, 8192, algorithm="lax").algorithm == "lax"
    assert chosen(1, 8192, world_size=1).algorithm == "lax"
    assert chosen(0, 8192).algorithm == "lax"
    no_room = chosen(1, 16384, epoch_buffer_bytes=1 << 10)
    assert no_room.algorithm == "lax" and no_room.cause == reasons.REFUSED
    # One-shot needs less for one row.
    assert chosen(1, 1024, epoch_buffer_bytes=2048, algorithm="two_shot").algorithm == (
        "one_shot_rms_norm"
    )


TUNED = table.Tuned(
    {("multi", "psum_residual_rms_norm", "bare", 8): (table.Row(8192, "x", 1, 1),)}, ""
)


@pytest.mark.parametrize(
    ("rows", "hidden", "changed", "fuses"),
    [
        *((rows, 8192, {}, True) for rows in (1, 16, 64)),
        *((rows, hidden, {}, False) for rows, hidden in ((65, 8192), (1, 4095), (1, 8193))),
        (1, 4096, {"dtype": "float32"}, False),
        (1, 4096, {"mode": "single"}, False),
        (1, 4096, {"world_size": 4}, False),
        (1, 4096, {"hardware": "cpu"}, False),
        (2, 2048, {"tuned": TUNED}, True),
        (2, 2049, {"tuned": TUNED}, False),
    ],
)
def test_norms_that_unedited_programs_fuse(
    rows: int, hidden: int, changed: dict[str, Any], fuses: bool
) -> None:
    facts = {"dtype": "bfloat16", "world_size": 2, "hardware": "hopper", "mode": "multi"} | changed
    nbytes = rows * hidden * np.dtype(facts["dtype"]).itemsize
    of: Any = {"nbytes": nbytes, "hidden": hidden, **facts}
    assert table.fuses_norm("psum_residual_rms_norm", **of) is fuses
