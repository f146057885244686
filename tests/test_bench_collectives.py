"""How the benchmark checks and times collectives."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bench_settings import BFLOAT16, mesh_of_two, settings_of
from jax.sharding import PartitionSpec

import jax_intranode
from jax_intranode._src.command_line.bench import collectives, graph, oracle, timing
from jax_intranode._src.command_line.bench.operations import OPERATIONS
from jax_intranode._src.native import definitions, extension
from jax_intranode._src.selection import select

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
    assert oracle.expected_sum([np.array([value], dtype) for value in values])[0] == wanted


def test_oracle_of_each_operation() -> None:
    shards = [oracle.random_shard(rank, 64, BFLOAT16) for rank in range(4)]
    total = oracle.expected_sum(shards)[0]
    for name, wanted in {
        "psum": total,
        "psum_scatter": total,
        "pmean": total / ml_dtypes.bfloat16(4),
        "all_gather": np.concatenate(shards),
        "all_to_all": np.concatenate(
            [np.concatenate([np.split(s, 4)[rank] for s in shards]) for rank in range(4)]
        ),
    }.items():
        # Of an all-gather, too, 64 bytes are those of a rank's operand.
        right = oracle.Collective(OPERATIONS[name], 4, 64, BFLOAT16)
        assert right.expected.dtype == BFLOAT16
        assert np.array_equal(right.expected, wanted)
        assert (right.tolerance is None) == (name in ("all_gather", "all_to_all"))
    assert oracle.Collective(OPERATIONS["psum"], 4, 64, np.dtype(np.int8)).tolerance is None


def test_count_wrong_compares_bits() -> None:
    expected = np.array([1.0, 0.0, np.nan, 2.0], np.float32)
    assert oracle.count_wrong(expected.copy(), expected, None) == 0
    got = np.array([np.nextafter(np.float32(1), np.float32(2)), -0.0, -np.nan, 2.0], np.float32)
    assert oracle.count_wrong(got, expected, None) == 2


def test_count_wrong_on_devices_compares_each_devices_part() -> None:
    mesh = mesh_of_two()
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    result = jax.device_put(np.arange(4, dtype=np.int32), sharding)
    for name, expected, wrong in (("psum_scatter", [0, 1, 2, 9], 1), ("psum", [0, 1], 2)):
        right = oracle.Collective(OPERATIONS[name], 2, 16, np.dtype(np.int32))
        right.expected = np.array(expected, np.int32)
        assert right.count_wrong(result, None) == wrong


# Timing.


@pytest.mark.parametrize("name", OPERATIONS)
def test_links_of_a_chain_fit(name: str) -> None:
    """A chain of one call returns its result, brought to the operand's size and scaled."""
    mesh = mesh_of_two()
    operation = OPERATIONS[name]
    link = collectives.link(lambda xs: operation.call(jax_intranode, xs))
    operands = [jnp.arange(16, dtype=jnp.float32)]
    (got,) = timing.Chain(mesh, link, operands, (jnp.full(2, 0.5, jnp.float32),), 1, 1).run()
    first, second = np.arange(8), np.arange(8, 16)
    total = first + second
    wanted = {
        "psum": [total, total],
        "pmean": [total / 2, total / 2],
        "psum_scatter": [np.tile(total[:4], 2), np.tile(total[4:], 2)],
        "all_gather": [first, first],
        "all_to_all": np.stack([first.reshape(2, 4), second.reshape(2, 4)], axis=1),
        "psum_scatter+all_gather": [total, total],
    }[name]
    assert np.array_equal(got, 0.5 * np.ravel(wanted))


def test_order_of_turns() -> None:
    calls: list[str] = []
    runs = [lambda name=name: calls.append(name) for name in "abc"]
    seconds, handler_calls = timing.take_turns(runs, mesh_of_two(), settings_of("psum"))
    assert handler_calls == 0
    assert [len(times) for times in seconds] == [3, 3, 3]
    # All run once to compile. Then there are one warm-up and three repetitions. The first function
    # changes, and the direction alternates.
    assert "".join(calls) == "abc" + "bac" + "abc" + "acb" + "cab"


# In a graph.


class FakeGraphs:
    """A replacement for the CUDA module. The device of rank r takes 1 + r microseconds."""

    def __init__(self, n: int) -> None:
        self._barrier = threading.Barrier(n, timeout=20)
        self._data: dict[int, np.ndarray] = {}

    def time_in_graph(
        self,
        device_ids: list[int],
        group_size: int,
        ordinal: int,
        algorithm: int,
        segments: int,
        blocks: int,
        threads: int,
        data: bytes,
        dtype: str,
        calls: int,
        repetitions: int,
    ) -> tuple[list[float], bytes]:
        assert dtype == "float32" and segments == 1 and blocks > 0 and threads > 0 and calls > 1
        rank = [d.local_hardware_id for d in jax.devices()][:group_size].index(ordinal)
        self._data[rank] = np.frombuffer(data, dtype)
        self._barrier.wait()  # all devices of the group at once
        parts = [self._data[r] for r in range(group_size)]
        name = definitions.ALGORITHMS[algorithm]
        if name == "all_to_all":
            total = np.concatenate([np.split(part, group_size)[rank] for part in parts])
        elif name == "all_gather":
            total = np.concatenate(parts)
        else:
            total = oracle.expected_sum(parts)[0]
        if name == "reduce_scatter":
            total = np.split(total, group_size)[rank]
        self._barrier.wait()  # before the data of the next call come
        return [1000.0] + [1.0 + rank] * (repetitions - 1), total.tobytes()


@pytest.mark.parametrize(
    ("name", "algorithms", "us"),
    [
        ("psum", ["two_shot"], 2),
        ("psum_scatter", ["reduce_scatter"], 2),
        ("all_gather", ["all_gather"], 2),
        ("all_to_all", ["all_to_all"], 2),
        ("psum_scatter+all_gather", ["reduce_scatter", "all_gather"], 4),
    ],
)
def test_in_a_graph(
    name: str, algorithms: list[str], us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_of_two()
    fake = FakeGraphs(2)
    module = extension.module  # threads that watch CPU devices go on to use theirs
    monkeypatch.setattr(
        extension, "module", lambda platform: fake if platform == "gpu" else module(platform)
    )
    operation, settings = OPERATIONS[name], settings_of(name, platform="gpu")
    selected = [select.Selection(algorithm, "", 1, 32) for algorithm in algorithms]
    assert graph.can_measure(settings, operation, selected)
    shards = {rank: oracle.random_shard(rank, 256, np.dtype(np.float32)) for rank in range(2)}
    right = oracle.Collective(operation, 2, 256, np.dtype(np.float32))
    # The slower device's time without the warm-up, summed over the steps.
    times, wrong = graph.measure(settings, right, mesh, selected, shards, name)
    assert (times, wrong) == (timing.Times(us, us), 0)
    right.expected = right.expected + np.float32(1)
    _, wrong = graph.measure(settings, right, mesh, selected, shards, name)
    has_part = operation.exchanges or operation.result_is_part
    assert wrong == (1 if has_part else 2) * len(right.expected)
