"""How the benchmark checks and times collective matmuls."""

import re
from typing import Any

import numpy as np
import pytest
from bench_settings import matmul_settings, mesh_of_two
from tiers import full

import jax_intranode
from jax_intranode._src.command_line.bench import matmuls as measure_matmul
from jax_intranode._src.command_line.bench import oracle as matmul_oracle
from jax_intranode._src.command_line.bench.operations import MATMULS, Shape

pytestmark = pytest.mark.one_version


@pytest.mark.parametrize(
    ("name", "backward", "algorithms"),
    [
        ("all_gather_matmul", True, ("reduce_scatter",)),
        full("matmul_reduce_scatter", False, ("reduce_scatter",)),
    ],
)
def test_matmul_is_checked_and_timed(
    name: str, backward: bool, algorithms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that is busy may take longer for a chain of nothing than for one of matmuls.
    overhead_s = measure_matmul.overhead_s
    monkeypatch.setattr(measure_matmul, "overhead_s", lambda *of: min(overhead_s(*of), 0.0))
    # The platform "gpu", because only GPUs have a bound.
    settings = matmul_settings(name, backward, platform="gpu")
    row, fallback = measure_matmul.measure(settings, mesh_of_two(), "float32", Shape(16, 16, 24))
    assert fallback is None and row["algorithm"] in algorithms and row["reason"]
    assert row["wrong"] == row["lax_wrong"] == 0
    assert row["error"] is not None and row["lax_error"] is not None
    assert 0 < row["error"] < 1e-6 and 0 < row["lax_error"] < 1e-6
    # The transfer of at most 768 elements takes far less time than a matmul.
    assert row["bound_us"] == row["alone_time_us"] > 0
    assert row["share"] == pytest.approx(row["bound_us"] / row["time_us"])
    assert row["lax_share"] == pytest.approx(row["bound_us"] / row["lax_time_us"])
    assert row["ratio"] == pytest.approx(row["lax_time_us"] / row["time_us"])
    products = 4 if backward else 2
    assert row["tflops"] == pytest.approx(products * 16 * 16 * 24 / row["time_us"] / 1e6)
    assert (
        row["time_p99_us"] >= row["time_us"] > 0 and row["chain"] == 2 and row["handler_calls"] > 0
    )


def test_wrong_matmul_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = jax_intranode.all_gather_matmul

    def wrong(x: Any, w: Any, axis: str, return_gathered: bool = False) -> Any:
        product, whole = right(x, w, axis, return_gathered=True)
        product = product.at[3, 5].add(100)
        return (product, whole.at[0, 0].add(1)) if return_gathered else product

    monkeypatch.setattr(jax_intranode, "all_gather_matmul", wrong)
    settings = matmul_settings("all_gather_matmul", False, chain=1)
    row, _ = measure_matmul.measure(settings, mesh_of_two(), "bfloat16", Shape(32, 16, 24))
    # On each of 2 devices one element is wrong in the product, in the product next to the gathered
    # x, and in the gathered x; and the first one again if it is in the sample.
    assert row["wrong"] in (6, 8)
    assert row["lax_wrong"] == 0


@pytest.mark.parametrize("backward", [False, True])
def test_calls_of_a_matmul_chain_remain(backward: bool) -> None:
    """XLA keeps all calls of a chain, in a row, on an operand that is changed in place."""
    mesh, matmul = mesh_of_two(), MATMULS["all_gather_matmul"]
    data = matmul_oracle.make(matmul, Shape(32, 16, 24), np.dtype(np.float32), mesh)
    call = measure_matmul._call(mesh, matmul.lax, backward, data)
    chain = measure_matmul.chain(mesh, call, 3)
    text = chain.program.lower(chain.moving, *chain.fixed).compile().as_text()
    assert len(re.findall(r" dot\(", text)) == 3 * (2 if backward else 1)
    collective = "reduce-scatter" if backward else "all-gather"
    assert len(re.findall(rf" {collective}\(", text)) == 3
    rows, columns = call.moving.shape
    assert not re.findall(rf"f32\[{rows // 2},{columns}\]\S* copy\(", text)
    before = np.asarray(call.moving)
    after = np.asarray(chain.run())
    changed = np.argwhere(before != after).tolist()
    assert changed == [[0, 0], [rows // 2, 0]]
