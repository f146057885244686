"""How the benchmark checks and times collectives and collective matmuls."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bench_settings import mesh_of_two, settings_of
from jax.sharding import PartitionSpec

import jax_intranode
from jax_intranode._src import operations
from jax_intranode._src.command_line.bench import collectives, matmuls, oracle, timing
from jax_intranode._src.command_line.bench.operations import MATMULS, OPERATIONS, Shape

pytestmark = pytest.mark.one_version

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# The oracle.


@pytest.mark.parametrize(
    ("values", "dtype", "wanted"),
    [
        # It rounds once. bfloat16 has 8 significant bits: 256 + 1 would round to 256.
        ([256, 1, 1], ml_dtypes.bfloat16, 258),
        ([2048, 1, 1], np.float16, 2050),
        # It adds in rank order.
        ([1e8, 1, -1e8], np.float32, 0),
        ([1e8, -1e8, 1], np.float32, 1),
        # float64 and integers are accumulated in their own type.
        ([1.0, 2.0**-40], np.float64, 1.0 + 2.0**-40),
        ([100, 100], np.int8, -56),
        ([2**63 - 1, 1], np.int64, -(2**63)),
        ([1e-45, 1e-45], np.float32, 2 * np.float32(1e-45)),  # subnormal
    ],
)
def test_oracle_of_sums(values: list[Any], dtype: Any, wanted: Any) -> None:
    assert operations.total([np.array([value], dtype) for value in values]) == wanted


def test_oracle_of_each_operation() -> None:
    shards = [oracle.random_shard(rank, 64, BFLOAT16) for rank in range(4)]
    total = operations.total(shards)
    for name, wanted in {
        "psum": [total] * 4,
        "psum_scatter": np.split(total, 4),
        "pmean": [total / ml_dtypes.bfloat16(4)] * 4,
        "all_gather": [np.concatenate(shards)] * 4,
        "all_to_all": [np.concatenate([np.split(s, 4)[rank] for s in shards]) for rank in range(4)],
        "psum_scatter+all_gather": [total] * 4,
    }.items():
        # Of an all-gather, too, 64 bytes are those of a rank's operand.
        right = oracle.Collective(OPERATIONS[name], 4, 64, BFLOAT16)
        assert all(result.dtype == BFLOAT16 for result in right.expected)
        assert np.array_equal(right.expected, wanted)
        assert (right.tolerance is None) == (name in ("all_gather", "all_to_all"))
    assert oracle.Collective(OPERATIONS["psum"], 4, 64, np.dtype(np.int8)).tolerance is None


NAN, AFTER_1 = np.nan, np.nextafter(np.float32(1), np.float32(2))


@pytest.mark.parametrize(
    ("got", "expected", "tolerance", "wrong"),
    [
        ([1.0, 0.0, NAN, 2.0], [1.0, 0.0, NAN, 2.0], None, 0),
        ([AFTER_1, -0.0, -NAN, 2.0], [1.0, 0.0, NAN, 2.0], None, 2),  # by their bits
        ([1.05, 1.2, NAN], [1.0, 1.0, 1.0], np.full(3, 0.1), 2),
    ],
)
def test_count_wrong(got: Any, expected: Any, tolerance: Any, wrong: int) -> None:
    assert oracle.count_wrong(np.float32(got), np.float32(expected), tolerance) == wrong


def test_count_wrong_on_devices_compares_each_devices_part() -> None:
    mesh = mesh_of_two()
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    result = jax.device_put(np.arange(4, dtype=np.int32), sharding)
    for name, expected, wrong in (("psum_scatter", [[0, 1], [2, 9]], 1), ("psum", [[0, 1]] * 2, 2)):
        right = oracle.Collective(OPERATIONS[name], 2, 16, np.dtype(np.int32))
        right.expected = list(np.array(expected, np.int32))
        assert right.compare(result, None)[0] == wrong


# Timing.


@pytest.mark.parametrize("name", OPERATIONS)
def test_links_of_a_chain_fit(name: str) -> None:
    """A chain of one call returns its result, brought to the operand's size and scaled."""
    mesh = mesh_of_two()
    of_bench = OPERATIONS[name]
    ragged = of_bench.steps[0].ragged
    link = collectives.link(lambda xs: of_bench.call(jax_intranode, xs), ragged=ragged)
    operands = [jnp.arange(16, dtype=jnp.float32)]
    (got,) = timing.Chain(mesh, link, operands, (jnp.full(2, 0.5, jnp.float32),), 1, 1).run()
    first, second = np.arange(8), np.arange(8, 16)
    total, exchanged = first + second, np.stack([first.reshape(2, 4), second.reshape(2, 4)], axis=1)
    wanted = {
        "psum": [total, total],
        "pmean": [total / 2, total / 2],
        "psum_scatter": [np.tile(total[:4], 2), np.tile(total[4:], 2)],
        "all_gather": [first, first],
        "all_to_all": exchanged,
        "ragged_all_to_all": exchanged,
        "psum_scatter+all_gather": [total, total],
        "pmax": [second, second],
        "pmin": [first, first],
        "ppermute": [second, first],
    }[name]
    assert np.array_equal(got, 0.5 * np.ravel(wanted))


# Matmuls.


def test_wrong_matmul_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = jax_intranode.all_gather_matmul

    def wrong(x: Any, w: Any, axis: str, return_gathered: bool = False) -> Any:
        product, whole = right(x, w, axis, return_gathered=True)
        product = product.at[3, 5].add(100)
        return (product, whole.at[0, 0].add(1)) if return_gathered else product

    monkeypatch.setattr(jax_intranode, "all_gather_matmul", wrong)
    settings = settings_of("all_gather_matmul", iterations=2, warmup_iterations=0, chain=1)
    row, _ = matmuls.measure(settings, mesh_of_two(), "bfloat16", Shape(32, 16, 24))
    # On each of 2 devices one element is wrong in the product, in the product next to the gathered
    # x, and in the gathered x; and the first one again if it is in the sample.
    assert row["wrong"] in (6, 8)
    assert row["lax_wrong"] == 0


@pytest.mark.parametrize("backward", [False, True])
def test_calls_of_a_matmul_chain_remain(backward: bool) -> None:
    """XLA keeps all calls of a chain, in a row, on an operand that is changed in place."""
    mesh, matmul = mesh_of_two(), MATMULS["all_gather_matmul"]
    data = oracle.make(matmul, Shape(32, 16, 24), np.dtype(np.float32), mesh)
    call = matmuls._call(mesh, matmul.lax, backward, data)
    chain = matmuls.chain(mesh, call, 3)
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
