"""How the benchmark checks and times collective matmuls."""

import re
from typing import Any

import numpy as np
import pytest
from bench_settings import matmul_settings, mesh_of_two

import jax_intranode
from jax_intranode._src.command_line.bench import matmuls as measure_matmul
from jax_intranode._src.command_line.bench import oracle as matmul_oracle
from jax_intranode._src.command_line.bench.operations import MATMULS, Shape

pytestmark = pytest.mark.one_version


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
