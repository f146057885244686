"""The benchmark: options, oracles, timing, peers, plots, and a small run of each operation."""

import argparse
import dataclasses
import importlib.machinery
import io
import json
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from devices import need_devices
from jax.sharding import PartitionSpec

import jax_intranode
from jax_intranode._src import limits, native, select
from jax_intranode._src.bench import command, record, timing
from jax_intranode._src.bench import options as bench_options
from jax_intranode._src.bench.collectives import chains, graph, measure, oracle
from jax_intranode._src.bench.collectives import report as collectives_report
from jax_intranode._src.bench.collectives.operations import OPERATIONS
from jax_intranode._src.bench.matmuls import measure as measure_matmul
from jax_intranode._src.bench.matmuls import oracle as matmul_oracle
from jax_intranode._src.bench.matmuls import report as matmul_report
from jax_intranode._src.bench.matmuls import shapes as matmul_shapes
from jax_intranode._src.bench.matmuls.operations import MATMULS, flops
from jax_intranode._src.bench.peers import nccl_tests, pytorch
from jax_intranode._src.bench.peers import registry as peers
from jax_intranode._src.bench.plots import collectives as collectives_plot
from jax_intranode._src.bench.plots import command as plot
from jax_intranode._src.bench.plots import matmuls as matmul_plot
from jax_intranode._src.bench.programs import definitions as programs
from jax_intranode._src.bench.programs import measure as measure_program
from jax_intranode._src.bench.programs import report as program_report
from jax_intranode._src.bench.progress import ProgressLine, following
from jax_intranode._src.bench.settings import MODES, SINGLE_PROCESS, Settings, Shape, from_json

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def settings_of(name: str, **changes: Any) -> Settings:
    """Returns the settings of a tiny run on two CPU devices of this process."""
    usual: dict[str, Any] = {
        "name": name,
        "sizes": [1024, 4096],
        "leaves": 1,
        "dtypes": ["float32"],
        "iterations": 3,
        "warmup_iterations": 1,
        "chain": 2,
        "mode": SINGLE_PROCESS,
        "devices": 2,
        "platform": "cpu",
    }
    return Settings(**{**usual, **changes})


def mesh_of_two() -> jax.sharding.Mesh:
    need_devices(2)
    return jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )


def parse(options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_options.add_arguments(parser)
    return parser.parse_args(options.split())


# Options and settings.


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("512", 512), ("4K", 4 << 10), ("4k", 4 << 10), ("1M", 1 << 20), ("2G", 2 << 30)],
)
def test_parse_size(text: str, expected: int) -> None:
    assert bench_options.parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1.5K", "1KB", "4 K"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        bench_options.parse_size(text)


def test_sizes_include_both_ends() -> None:
    assert bench_options.sizes_between(1024, 16384, 4) == [1024, 4096, 16384]
    assert bench_options.sizes_between(1024, 16383, 4) == [1024, 4096]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("psum -d int4", "'int4' is none of bfloat16"),
        ("psum -n 0", "0 is below 1"),
        ("psum --chain 0", "0 is below 1"),
        ("psum --algorithm ring", "invalid choice: 'ring'"),
        ("psum --peers torch,mpi", "'mpi' is none of torch, nccl-tests, all"),
        ("psum --latency-hiding maybe", "invalid choice: 'maybe'"),
        ("all_gather_matmul --shapes 1,2", "'1,2' is not M,K,N: three positive integers"),
        (
            "all_gather_matmul --plan 1,2,3",
            "'1' is not NAME=INTEGER; the names are first_pieces, last_pieces, tile_columns",
        ),
        (
            "all_gather_matmul --plan tile_columns=192,direct=2",
            "direct=2: it takes integers from 0 to 1",
        ),
        ("all_gather_matmul --plan wgrad=2", "wgrad=2: it takes integers from 0 to 1"),
        ("all_gather_matmul --plan rounds=0", "rounds=0: it takes integers from 1 on"),
        ("all_gather_matmul --plan columns=192", "a plan has no 'columns'; it has first_pieces"),
        ("all_gather_matmul --shapes 1,2,3;1,0,3", "'1,0,3' is not M,K,N"),
        ("all_gather_matmul --preset llama", "'llama' is none of reference, llama-8b"),
        ("ppermute", "invalid choice: 'ppermute'"),
    ],
)
def test_options_refused(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("pmean -d float32,int32", "pmean of int32 is a float"),
        ("psum_scatter --leaves 2", "psum_scatter is measured with one array"),
        ("all_gather --leaves 2", "all_gather is measured with one array"),
        ("psum -b 1 -e 1", "sizes 1 holds a whole number of elements of bfloat16 for each of 2"),
        (
            "psum -b 16K -e 1K",
            "--minbytes 16K is above --maxbytes 1K: choose a smaller -b or a larger -e",
        ),
        ("psum -b 1M", "--minbytes 1M is above --maxbytes 64K (the default): choose"),
        ("psum --json /no/such/place.json", "/no/such/place.json: no such directory"),
        ("psum --plot /no/such/place.png", "/no/such/place.png: no such directory"),
        (
            "psum --shapes 1,2,3",
            "--shapes, --preset, --backward and --plan are for all_gather_matmul",
        ),
        ("psum --backward", "--shapes, --preset, --backward and --plan are for all_gather_matmul"),
        (
            "psum --plan last_pieces=1",
            "--shapes, --preset, --backward and --plan are for all_gather_matmul",
        ),
        ("psum --settle 100", "--settle is for collective matmuls and programs, not for psum"),
        ("matmul_all_reduce --leaves 2", "matmul_all_reduce is measured with one x and one w"),
        ("matmul_all_reduce -d int8", "of int8: choose from bfloat16, float16, float32"),
        ("all_gather_matmul --shapes 7,8,9", "7 x 8 x 9: M is 7; it must be a multiple of the 2"),
        (
            "matmul_all_reduce --devices 3 --preset llama-8b",
            "preset llama-8b: 3 devices can't share 4096 columns evenly; choose --devices",
        ),
        ("stand_in --peers all", "--peers and --plot are for operations"),
        ("stand_in --plot all.png", "--peers and --plot are for operations"),
    ],
)
def test_options_that_contradict_each_other(
    options: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(programs.PROGRAMS, "stand_in", stand_in)
    assert command.run(parse(f"{options} --platform cpu")) == 2
    assert message in capsys.readouterr().err


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for gpus, options, message in (
        (0, "psum", "no NVIDIA GPU here (by NVML and CUDA_VISIBLE_DEVICES): choose --platform cpu"),
        (2, "psum --devices 4", "has 2 visible GPUs, not 4: choose --devices 2 or less"),
        (0, "all_gather_matmul --preset llama-8b", "no NVIDIA GPU here"),
    ):
        monkeypatch.setattr(command, "_gpus_and_driver", lambda gpus=gpus: (gpus, None))
        assert command.run(parse(f"{options} --platform gpu")) == 2
        assert message in capsys.readouterr().err


def test_bad_variable_is_refused_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_INTRANODE_ALGORITHM", "twoshot")
    assert command.run(parse("psum --platform cpu")) == 2
    written = capsys.readouterr()
    assert len(written.err.splitlines()) == 1
    assert "JAX_INTRANODE_ALGORITHM='twoshot': use one of auto, one_shot" in written.err


def test_command_in_the_json_file() -> None:
    argv = ["/x/__main__.py", "bench", "psum", "--json", "/a/b.json", "-n", "3", "--plot=p.png"]
    assert record.command_line(argv) == "python -m jax_intranode bench psum -n 3"
    argv = ["/x/__main__.py", "bench", "all_gather_matmul", "--shapes", "1,2,3;4,5,6"]
    assert record.command_line(argv).endswith("--shapes '1,2,3;4,5,6'")


@pytest.mark.parametrize(
    ("options", "platform", "settle_ms"),
    [
        ("all_gather_matmul", "gpu", 150),
        ("mlp_block", "gpu", 150),
        ("all_gather_matmul --settle 0", "gpu", 0),
        ("all_gather_matmul", "cpu", 0),
        ("psum", "gpu", 0),
    ],
)
def test_default_settling_time(options: str, platform: str, settle_ms: int) -> None:
    settings = bench_options._settings_of_mode(parse(options), SINGLE_PROCESS, platform, 2, [])
    assert settings.settle_ms == settle_ms


def test_options_that_reach_the_ranks_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    assert bench_options.environment(parse("psum")) == {}
    assert bench_options.environment(parse("psum --algorithm two_shot --latency-hiding on")) == {
        "JAX_INTRANODE_ALGORITHM": "two_shot",
        "XLA_FLAGS": "--xla_a=1 --xla_gpu_enable_latency_hiding_scheduler=true",
    }
    monkeypatch.delenv("XLA_FLAGS")
    assert bench_options.environment(parse("psum --latency-hiding off")) == {
        "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"
    }


def test_settings_as_json_and_their_measurements() -> None:
    settings = settings_of("psum", sizes=[6, 8, 15, 1024], dtypes=["bfloat16", "float64"])
    assert from_json(settings.to_json()) == settings
    # Two devices can share an even number of elements only.
    assert settings.measurements() == [("bfloat16", 4), ("bfloat16", 512), ("float64", 128)]


@pytest.mark.parametrize(
    ("count", "leaves", "multiple"),
    [(1000, 1, 1), (1000, 7, 1), (7, 7, 1), (300, 300, 1), (1000, 7, 4)],
)
def test_cuts_into_leaves(count: int, leaves: int, multiple: int) -> None:
    at = measure.cuts(count, leaves, multiple)
    sizes = [len(leaf) for leaf in np.split(np.zeros(count), at)]
    assert len(sizes) == leaves
    assert sum(sizes) == count
    assert all(size % multiple == 0 for size in sizes)


def test_sizes_and_bandwidths_are_those_of_nccl_tests() -> None:
    counts = {
        name: (operation.operand_count(12, 4), operation.result_count(12, 4))
        for name, operation in OPERATIONS.items()
    }
    assert counts == {
        "psum": (12, 12),
        "pmean": (12, 12),
        "psum_scatter": (12, 3),
        "all_gather": (3, 12),
        "psum_scatter+all_gather": (12, 12),
    }
    factors = {name: operation.bus_factor(4) for name, operation in OPERATIONS.items()}
    assert factors == {
        "psum": 1.5,
        "pmean": 1.5,
        "psum_scatter": 0.75,
        "all_gather": 0.75,
        "psum_scatter+all_gather": 1.5,
    }


# Shapes of collective matmuls.


def test_shapes_of_the_command_line() -> None:
    assert matmul_shapes.parse("8192,4096,1792") == [Shape(8192, 4096, 1792)]
    assert matmul_shapes.parse("1,2,3; 4,5,6;1,2,3") == [Shape(1, 2, 3), Shape(4, 5, 6)]
    arguments = parse("all_gather_matmul --shapes 8,2,3 --preset tiny,ddlb")
    assert bench_options._shapes(arguments, "gpu", 4) == [
        *((8, 2, 3), (64, 32, 48), (256, 64, 32), (32768, 16384, 8192)),
    ]


def test_presets_of_shapes() -> None:
    gather, scatter, add = MATMULS
    assert bench_options._shapes(parse(gather), "gpu", 4)[0] == (32768, 16384, 8192)
    assert bench_options._shapes(parse(gather), "cpu", 2) == [(32, 32, 48), (128, 64, 32)]
    presets = matmul_shapes.of_presets
    assert [len(presets(["reference"], name, 4)) for name in MATMULS] == [7, 4, 4]
    assert presets(["ddlb"], scatter, 4) == [(32768, 4096, 8192)]
    # Query, key and value together, gate and up together; then the attention's output, down.
    assert presets(["llama-70b"], gather, 4) == [(8192, 8192, 2560), (8192, 8192, 14336)]
    assert presets(["llama-70b"], add, 4) == [(8192, 2048, 8192), (8192, 7168, 8192)]
    assert len(presets(["sweep"], scatter, 8)) == 24
    assert len(presets(["llama-8b", "sweep"], scatter, 8)) == 24  # each shape once
    with pytest.raises(ValueError, match="M is 6; it must be a multiple of the 4 devices"):
        matmul_shapes.check(scatter, [Shape(6, 1, 1)], 4)
    matmul_shapes.check(add, [Shape(6, 1, 1)], 4)


def test_rows_bytes_and_operations_of_collective_matmuls() -> None:
    shape = Shape(m=8, k=3, n=5)
    received = [matmul.received_bytes(shape, 4, 2) for matmul in MATMULS.values()]
    assert received == [0.75 * 8 * 3 * 2, 0.75 * 8 * 5 * 2, 1.5 * 8 * 5 * 2]
    rows = [(m.x_rows(shape, 4), m.result_rows(shape, 4)) for m in MATMULS.values()]
    assert rows == [(2, 8), (8, 2), (8, 8)]
    assert (flops(shape, False), flops(shape, True)) == (240, 480)


# The oracle.


def _sum(values: list[object], dtype: object) -> np.ndarray:
    """Returns the oracle's sum of one element per rank."""
    return oracle.expected_sum([np.array([value], dtype) for value in values])[0]


def test_oracle_rounds_once() -> None:
    # bfloat16 has 8 significant bits: 256 + 1 would round to 256 if each addition rounded.
    assert _sum([256, 1, 1], ml_dtypes.bfloat16) == 258
    assert _sum([2048, 1, 1], np.float16) == 2050


def test_oracle_adds_in_rank_order() -> None:
    assert _sum([1e8, 1, -1e8], np.float32) == 0
    assert _sum([1e8, -1e8, 1], np.float32) == 1


def test_oracle_accumulates_float64_and_integers_in_their_own_type() -> None:
    assert _sum([1.0, 2.0**-40], np.float64) == 1.0 + 2.0**-40
    assert _sum([100, 100], np.int8) == -56
    assert _sum([2**63 - 1, 1], np.int64) == -(2**63)


def test_oracle_keeps_signed_zeros_and_subnormals() -> None:
    assert np.signbit(_sum([-0.0, -0.0], np.float32))
    assert _sum([1e-45, 1e-45], np.float32) > 0


def test_oracle_returns_the_sum_of_magnitudes() -> None:
    _, magnitude = oracle.expected_sum([np.array([value], np.float32) for value in (-1, 2, -3)])
    assert magnitude == 6


def test_oracle_of_each_operation() -> None:
    shards = [oracle.random_shard(rank, 64, BFLOAT16) for rank in range(4)]
    total = oracle.expected_sum(shards)[0]
    for name, wanted in {
        "psum": total,
        "psum_scatter": total,
        "pmean": total / ml_dtypes.bfloat16(4),
        "all_gather": np.concatenate(shards),
    }.items():
        expected, tolerance = oracle.expected_result(OPERATIONS[name], 4, 64, BFLOAT16)
        assert expected.dtype == BFLOAT16
        assert np.array_equal(expected, wanted)
        assert (tolerance is None) == (name == "all_gather")
    integers = oracle.expected_result(OPERATIONS["psum"], 4, 64, np.dtype(np.int8))
    assert integers[1] is None


def test_every_rank_can_make_every_ranks_data() -> None:
    for dtype in (BFLOAT16, np.dtype(np.float64), np.dtype(np.int8)):
        first = oracle.random_shard(1, 4096, dtype)
        assert first.dtype == dtype
        assert first.nbytes == 4096
        assert np.array_equal(first, oracle.random_shard(1, 4096, dtype))
        assert not np.array_equal(first, oracle.random_shard(0, 4096, dtype))
    # Integers span the whole range, so that sums wrap.
    assert {first.min(), first.max()} == {-128, 127}


def test_exact_result_and_error() -> None:
    operation = OPERATIONS["psum"]
    shards = [oracle.random_shard(rank, 64, BFLOAT16).astype(np.float64) for rank in range(3)]
    exact = oracle.exact_result(operation, 3, 64, BFLOAT16)
    assert exact is not None and np.array_equal(exact, shards[0] + shards[1] + shards[2])
    assert oracle.exact_result(operation, 3, 64, np.dtype(np.int32)) is None
    assert oracle.exact_result(OPERATIONS["all_gather"], 3, 64, BFLOAT16) is None
    off = jnp.asarray(exact * 1.5, jnp.float32)
    assert oracle.error_on_devices(off, operation, exact) == pytest.approx(0.5, rel=1e-5)
    assert oracle.error_on_devices(off, operation, None) is None


def test_count_wrong_compares_bits() -> None:
    expected = np.array([1.0, 0.0, np.nan, 2.0], np.float32)
    assert oracle.count_wrong(expected.copy(), expected, None) == 0
    got = np.array([np.nextafter(np.float32(1), np.float32(2)), -0.0, -np.nan, 2.0], np.float32)
    assert oracle.count_wrong(got, expected, None) == 2


def test_count_wrong_with_a_tolerance() -> None:
    expected = np.array([1.0, 1.0, 1.0], np.float32)
    got = np.array([1.05, 1.2, np.nan], np.float32)
    assert oracle.count_wrong(got, expected, np.full(3, 0.1)) == 2


def test_count_wrong_on_devices_compares_each_devices_part() -> None:
    mesh = mesh_of_two()
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    result = jax.device_put(np.arange(4, dtype=np.int32), sharding)
    scatter, psum = OPERATIONS["psum_scatter"], OPERATIONS["psum"]
    expected = np.array([0, 1, 2, 9], np.int32)
    assert oracle.count_wrong_on_devices(result, scatter, expected, None) == 1
    assert oracle.count_wrong_on_devices(result, psum, np.array([0, 1], np.int32), None) == 2


# Timing.


def test_statistics() -> None:
    times = timing.statistics([float(us) for us in range(101)])
    assert (times.p50, times.p99) == (50, 99)
    assert timing.statistics([1.0, 2.0, 9.0]).p99 == pytest.approx(9, rel=0.02)
    assert timing.Times(1, 2) + timing.Times(10, 20) == timing.Times(11, 22)


@pytest.mark.parametrize("name", OPERATIONS)
def test_links_of_a_chain_fit(name: str) -> None:
    """A chain of one call returns its result, brought to the operand's size and scaled."""
    mesh = mesh_of_two()
    operation = OPERATIONS[name]
    chain = chains._chain(mesh, lambda xs: operation.call(jax_intranode, xs), 1)
    (got,) = chain([jnp.arange(16, dtype=jnp.float32)], jnp.full(2, 0.5, jnp.float32))
    first, second = np.arange(8), np.arange(8, 16)
    total = first + second
    wanted = {
        "psum": [total, total],
        "pmean": [total / 2, total / 2],
        "psum_scatter": [np.tile(total[:4], 2), np.tile(total[4:], 2)],
        "all_gather": [first, first],
        "psum_scatter+all_gather": [total, total],
    }[name]
    assert np.array_equal(got, 0.5 * np.concatenate(wanted))


def test_order_of_turns() -> None:
    calls: list[str] = []
    runs = [lambda name=name: calls.append(name) for name in "abc"]
    seconds, handler_calls = timing.take_turns(runs, mesh_of_two(), settings_of("psum"))
    assert handler_calls == 0
    assert [len(times) for times in seconds] == [3, 3, 3]
    # All run once to compile. Then there are one warm-up and three repetitions. The first function
    # changes, and the direction alternates.
    assert "".join(calls) == "abc" + "bac" + "abc" + "acb" + "cab"


def test_turns_after_untimed_calls() -> None:
    calls: list[str] = []
    runs = [lambda name=name: calls.append(name) for name in "ab"]
    settings = settings_of("psum", iterations=2, warmup_iterations=0)
    seconds, _ = timing.take_turns(runs, mesh_of_two(), settings, untimed=2)
    assert [len(times) for times in seconds] == [2, 2]
    assert "".join(calls) == "ab" + "aaabbb" + "aaabbb"


# Collective matmuls.


def matmul_settings(name: str, backward: bool, **changes: Any) -> Settings:
    return settings_of(
        name, shapes=[[32, 16, 24]], backward=backward, iterations=2, warmup_iterations=0, **changes
    )


@pytest.mark.parametrize(
    ("name", "backward", "algorithms"),
    [
        ("all_gather_matmul", True, ("reduce_scatter",)),
        ("matmul_reduce_scatter", False, ("reduce_scatter",)),
        ("matmul_all_reduce", True, select.PSUM_ALGORITHMS),
    ],
)
def test_matmul_is_checked_and_timed(
    name: str, backward: bool, algorithms: tuple[str, ...]
) -> None:
    # The platform "gpu", because only GPUs have a bound.
    settings = matmul_settings(name, backward, platform="gpu")
    row, fallback = measure_matmul.measure(settings, mesh_of_two(), "float32", Shape(16, 16, 24))
    assert fallback is None and row.algorithm in algorithms and row.reason
    assert row.wrong == row.lax_wrong == 0
    assert row.error is not None and row.lax_error is not None
    assert 0 < row.error < 1e-6 and 0 < row.lax_error < 1e-6
    # The transfer of at most 768 elements takes far less time than a matmul.
    assert row.bound_us == row.alone_time_us > 0
    assert row.share == pytest.approx(row.bound_us / row.time_us)
    assert row.lax_share == pytest.approx(row.bound_us / row.lax_time_us)
    assert row.ratio == pytest.approx(row.lax_time_us / row.time_us)
    products = 4 if backward else 2
    assert row.tflops == pytest.approx(products * 16 * 16 * 24 / row.time_us / 1e6)
    assert row.time_p99_us >= row.time_us > 0 and row.chain == 2 and row.handler_calls > 0


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
    assert row.wrong in (6, 8)
    assert row.lax_wrong == 0


@pytest.mark.parametrize(
    ("name", "backward"),
    [("all_gather_matmul", True), ("matmul_reduce_scatter", False), ("matmul_all_reduce", True)],
)
def test_sample_of_a_matmul(name: str, backward: bool) -> None:
    """lax's results are right. Scaled results, and results with swapped rows, are wrong."""
    mesh, matmul = mesh_of_two(), MATMULS[name]
    data = matmul_oracle.make(matmul, Shape(32, 16, 24), BFLOAT16, mesh)
    results = measure_matmul._call(mesh, matmul.lax, backward, data).results(mesh)
    sample = matmul_oracle.Sample(mesh, matmul, backward, data)
    wrong, error = sample.compare(results)
    assert wrong == 0 and 0 < error < 2.0**-8
    of_devices = 2 * 8 * results[0].shape[1]  # 8 rows of each, and all columns
    for bad in (1.5 * results[0], jnp.flipud(results[0])):
        changed = [jax.device_put(bad, results[0].sharding), *results[1:]]
        wrong, error = sample.compare(changed)
        assert 0.5 * of_devices < wrong <= of_devices and error > 0.4
        unlike = matmul_oracle.count_unlike(mesh, changed, results, matmul.results(backward))
        assert 0.5 * bad.size < unlike <= bad.size


def test_plans_in_a_lowered_module() -> None:
    call = (
        "stablehlo.custom_call @jax_intranode_collective_matmul(%0, %1) {mhlo.backend_config = "
        "{gathered = 0 : i32, plan = {direct = true, tile_columns = 192 : i32, wgrad = false}}}"
    )
    plan = {"direct": 1, "tile_columns": 192, "wgrad": 0}
    assert measure_matmul.plans_in(f"{call}\n{call}\n") == [plan, plan]
    assert measure_matmul.plans_in("func.func @main() {}") == []


@pytest.mark.parametrize("backward", [False, True])
def test_calls_of_a_matmul_chain_remain(backward: bool) -> None:
    """XLA keeps all calls of a chain, in a row, on an operand that is changed in place."""
    mesh, matmul = mesh_of_two(), MATMULS["all_gather_matmul"]
    data = matmul_oracle.make(matmul, Shape(32, 16, 24), np.dtype(np.float32), mesh)
    call = measure_matmul._call(mesh, matmul.lax, backward, data)
    chain = measure_matmul._Chain(mesh, call, 3)
    text = chain._program.lower(chain._moving, *chain._fixed).compile().as_text()
    assert len(re.findall(r" dot\(", text)) == 3 * (2 if backward else 1)
    collective = "reduce-scatter" if backward else "all-gather"
    assert len(re.findall(rf" {collective}\(", text)) == 3
    rows, columns = call.moving.shape
    assert not re.findall(rf"f32\[{rows // 2},{columns}\]\S* copy\(", text)
    before = np.asarray(call.moving)
    after = np.asarray(chain.run())
    changed = np.argwhere(before != after).tolist()
    assert changed == [[0, 0], [rows // 2, 0]]


def test_length_of_a_matmul_chain() -> None:
    settings = matmul_settings("all_gather_matmul", False, platform="gpu", chain=None)
    shapes = (
        ((32768, 16384, 8192), "bfloat16"),
        ((8192, 8192, 7168), "bfloat16"),
        ((8192, 8192, 7168), "float32"),
        ((512, 4096, 768), "bfloat16"),
    )
    lengths = [measure_matmul.chain_length(settings, name, Shape(*s)) for s, name in shapes]
    in_a_row = [measure_matmul.calls_in_a_row(settings, name, Shape(*s)) for s, name in shapes]
    assert lengths == [2, 14, 7, 64]
    assert in_a_row == [4, 28, 14, 128]
    # Repetitions of 52, 40, 40 and 1.28 ms. The last ones consist of calls of 10 us.
    settle = dataclasses.replace(settings, settle_ms=100)
    assert [
        measure_matmul.repetitions_to_settle(settle, name, Shape(*s)) for s, name in shapes
    ] == [2, 3, 3, 79]
    assert measure_matmul.repetitions_to_settle(settings, "bfloat16", Shape(512, 4096, 768)) == 0


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
        blocks: int,
        threads: int,
        data: bytes,
        dtype: str,
        calls: int,
        repetitions: int,
    ) -> tuple[list[float], bytes]:
        assert dtype == "float32" and blocks > 0 and threads > 0 and calls > 1
        rank = [d.local_hardware_id for d in jax.devices()][:group_size].index(ordinal)
        self._data[rank] = np.frombuffer(data, dtype)
        self._barrier.wait()  # all devices of the group at once
        parts = [self._data[r] for r in range(group_size)]
        name = limits.ALGORITHMS[algorithm]
        total = np.concatenate(parts) if name == "all_gather" else oracle.expected_sum(parts)[0]
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
        ("psum_scatter+all_gather", ["reduce_scatter", "all_gather"], 4),
    ],
)
def test_in_a_graph(
    name: str, algorithms: list[str], us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_of_two()
    fake = FakeGraphs(2)
    monkeypatch.setattr(native, "module", lambda platform: fake)
    operation, settings = OPERATIONS[name], settings_of(name, platform="gpu")
    selected = [select.Selection(algorithm, "", 1, 32) for algorithm in algorithms]
    assert graph.can_measure(settings, operation, selected)
    shards = {rank: oracle.random_shard(rank, 256, np.dtype(np.float32)) for rank in range(2)}
    expected, _ = oracle.expected_result(operation, 2, 256, np.dtype(np.float32))
    # The slower device's time without the warm-up, summed over the steps.
    times, wrong = graph.measure(settings, operation, mesh, selected, shards, expected, name)
    assert (times, wrong) == (timing.Times(us, us), 0)
    expected = expected + np.float32(1)
    _, wrong = graph.measure(settings, operation, mesh, selected, shards, expected, name)
    assert wrong == 2 * operation.result_count(len(expected), 2)


def test_calls_that_are_not_measured_in_a_graph() -> None:
    ours, lax = select.Selection("one_shot", "", 1, 1), select.Selection("lax", "")
    on_gpus = settings_of("psum", platform="gpu")
    psum, pmean = OPERATIONS["psum"], OPERATIONS["pmean"]
    assert graph.can_measure(on_gpus, psum, [ours])
    assert not graph.can_measure(on_gpus, psum, [lax])
    assert not graph.can_measure(on_gpus, psum, [ours, lax])
    assert not graph.can_measure(on_gpus, pmean, [ours])
    assert not graph.can_measure(settings_of("psum"), psum, [ours])
    assert not graph.can_measure(settings_of("psum", platform="gpu", leaves=2), psum, [ours])


# Progress.


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal() -> None:
    terminal = Terminal()
    line = ProgressLine(terminal, total=12)
    line.show()
    assert terminal.getvalue() == ""  # nothing has begun
    line.begin("single-process, bfloat16, 1024 bytes")
    line.show()
    line.begin("single-process, bfloat16, 4096 bytes")
    line.show()
    line.clear()
    assert terminal.getvalue() == (
        "\r\x1b[Ksingle-process, bfloat16, 1024 bytes: 1 of 12, 0:00"
        "\r\x1b[Ksingle-process, bfloat16, 4096 bytes: 2 of 12, 0:00"
        "\r\x1b[K"
    )


def test_progress_is_not_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    line = ProgressLine(terminal, total=1)
    line.begin("x" * 100)
    line.show()
    assert terminal.getvalue() == "\r\x1b[K" + "x" * 19


def test_no_progress_line_without_a_terminal() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, total=1)
    line.begin("psum")
    line.show()
    line.clear()
    assert stream.getvalue() == ""


def test_following_shows_rows_and_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    log, begun = tmp_path / "log", tmp_path / "begun"
    with following(log, begun, ProgressLine(terminal, total=2)):
        log.write_text("a row\n")
        begun.write_text("first\nsecond\n")
    assert capsys.readouterr().out == "a row\n"
    assert "second: 2 of 2, 0:00" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


# Peers.

NCCL_TESTS = """\
# nccl-tests version 2.17.1 nccl-headers=22809 nccl-library=22809
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 4 minBytes 1024 maxBytes 16384 step: 4(factor) warmup iters: 5 iters: 20 graph: 20
#
# Using devices
#  Rank  0 Group  0 Pid   4242 on     node device  0 [0000:19:00] NVIDIA H200
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           512  bfloat16     sum      -1    11.25    0.09    0.14      0    10.98    0.09    0.14      0
        4096          2048  bfloat16     sum      -1    11.40    0.36    0.54      3    11.10    0.37    0.55      0
       16384          8192  bfloat16    none      -1   1.2e+03    0.01    0.02    N/A    11.87    1.38    2.07    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.907
#
"""  # noqa: E501


def test_parse_nccl_tests() -> None:
    rows = nccl_tests.parse(NCCL_TESTS)
    assert [(row["size"], row["time_us"], row["wrong"]) for row in rows] == [
        (1024, 11.25, 0),
        (4096, 11.4, 3),
        (16384, 1200.0, None),
    ]
    assert nccl_tests.version_of(NCCL_TESTS) == "nccl-tests 2.17.1 (NCCL 22809)"
    assert nccl_tests.version_of("# nThread 1") == "nccl-tests"


def measure_peers(settings: Settings) -> dict[str, Any]:
    return peers.measure(list(peers.PEERS), settings, 20, ProgressLine(io.StringIO(), 1))


def test_unavailable_peers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "torch", None)
    for settings, lines in {
        settings_of("psum", platform="gpu").to_json(): (
            "# torch not measured: torch is not installed\n"
            "# nccl-tests not measured: all_reduce_perf is not on PATH\n"
        ),
        settings_of("psum_scatter+all_gather", platform="gpu").to_json(): (
            "# torch not measured: torch is not installed\n"
            "# nccl-tests not measured: it has no psum_scatter+all_gather\n"
        ),
        settings_of("psum").to_json(): (
            "# torch not measured: measured on GPUs only\n"
            "# nccl-tests not measured: measured on GPUs only\n"
        ),
    }.items():
        assert measure_peers(from_json(settings)) == {"versions": [], "rows": []}
        assert capsys.readouterr().err == lines


def test_torch_makes_as_many_calls_as_our_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def run_ranks(commands: list[list[str]], timeout_s: float, log_dir: Path) -> None:
        told.append(json.loads(commands[0][-1]))
        rows = {"version": "torch", "rows": [], "failed": []}
        Path(told[-1]["output"]).write_text(json.dumps(rows))

    torch = types.ModuleType("torch")
    torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(pytorch.launcher, "run_ranks", run_ranks)
    for settings in (
        matmul_settings("all_gather_matmul", False, platform="gpu", dtypes=["bfloat16", "int8"]),
        matmul_settings("all_gather_matmul", False, platform="gpu", chain=None, settle_ms=2),
        settings_of("psum", platform="gpu", settle_ms=2),
    ):
        assert measure_peers(settings)["versions"] == ["torch"]
    assert [run["measurements"] for run in told] == [
        [["bfloat16", [32, 16, 24], 4, 0]],
        [["float32", [32, 16, 24], 128, 2]],
        [["float32", 256, 1, 0], ["float32", 1024, 1, 0]],
    ]


def put_program(directory: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a shell script first on PATH."""
    program = directory / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_nccl_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table").write_text(NCCL_TESTS)
    put_program(
        tmp_path,
        "all_reduce_perf",
        f'echo "$@" > {tmp_path}/arguments; cat {tmp_path}/table',
        monkeypatch,
    )
    monkeypatch.setitem(sys.modules, "torch", None)
    settings = settings_of("psum", platform="gpu", dtypes=["bfloat16", "int16"])
    found = measure_peers(settings)
    assert found["versions"] == ["nccl-tests 2.17.1 (NCCL 22809)"]
    # Only the requested sizes.
    assert [(row["size"], row["dtype"], row["library"]) for row in found["rows"]] == [
        (1024, "bfloat16", "nccl-tests"),
        (4096, "bfloat16", "nccl-tests"),
    ]
    assert (tmp_path / "arguments").read_text() == (
        "-g 2 -b 1024 -e 4096 -f 4 -d bfloat16 -n 3 -w 1 -G 20 -c 1\n"
    )
    assert "# nccl-tests does not know int16" in capsys.readouterr().err

    ours = {"dtype": "bfloat16", "size": 1024, "mode": SINGLE_PROCESS, "graph_time_us": 2.5}
    table = [line.split() for line in collectives_report.format_peers(found, [ours]).splitlines()]
    assert table[1][-3:] == ["ours,", "single-process", "nccl-tests"]
    assert table[2] == ["1024", "bfloat16", "|", "2.50", "11.25"]
    assert table[3] == ["4096", "bfloat16", "|", "-", "11.40"]
    assert table[4][-1] == "3"


def test_peer_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_program(tmp_path, "all_reduce_perf", "echo no device; exit 3", monkeypatch)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert measure_peers(settings_of("psum", platform="gpu"))["rows"] == []
    error = capsys.readouterr().err
    assert "# nccl-tests not measured: it failed" in error
    assert "no device" in error


# Plots.


def result_of(jax_version: str, algorithms: tuple[str, ...]) -> dict[str, Any]:
    """Returns the contents of the JSON file of a run on GPUs."""
    rows = [
        {
            "size": 1024 << 2 * i,
            "dtype": "bfloat16",
            "mode": mode,
            "algorithm": algorithm,
            "graph_time_us": None if algorithm == "lax" else 2.0 + i,
            "time_us": 3.0 + i if i else 0.0,
            "lax_time_us": 9.0 + i,
        }
        for mode in MODES
        for i, algorithm in enumerate(algorithms)
    ]
    peer = {"library": "torch nccl", "dtype": "bfloat16", "size": 1024, "time_us": 9.0}
    header = {
        "operation": "psum",
        "devices": 4,
        "device": "NVIDIA H200",
        "platform": "gpu",
        "jax": jax_version,
        "jaxlib": jax_version,
        "jax_intranode": "0.1.0",
        "nccl": None,
        "date": "2026-11-21T10:00:00+00:00",
    }
    peers_found = {"versions": ["torch 2.9 (NCCL 2.28)"], "rows": [peer]}
    return {"version": record.VERSION, "header": header, "rows": rows, "peers": peers_found}


def test_lines_of_a_plot() -> None:
    result = result_of("0.11.2", ("one_shot", "one_shot", "two_shot", "lax"))
    lines = list(collectives_plot.lines([result]))
    assert [line.label for line in lines] == [
        "ours from JAX, process-per-device",
        "ours in a graph, process-per-device",
        "lax from JAX, process-per-device",
        "ours from JAX, single-process",
        "ours in a graph, single-process",
        "lax from JAX, single-process",
        "torch nccl in a graph",
    ]
    # A logarithmic axis can't show a time of 0.
    assert lines[0].points[0] == (4096, 4.0, 2.5, "one_shot")
    assert [point.algorithm for point in lines[0].points] == ["one_shot", "two_shot", "lax"]
    assert [point.size for point in lines[1].points] == [1024, 4096, 16384]
    assert lines[6].points == [(1024, 9.0, 1.0, None)]
    both = list(collectives_plot.lines([result, result_of("0.12", ("one_shot",))]))
    assert both[0].label == "jax 0.11.2: ours from JAX, process-per-device"
    assert both[-1].label == "jax 0.12: torch nccl in a graph"


def test_axis_of_ratios_is_logarithmic_where_one_is_large() -> None:
    result = result_of("0.12", ("one_shot", "one_shot"))
    assert not collectives_plot.is_logarithmic(list(collectives_plot.lines([result])))
    result["rows"][1]["lax_time_us"] = 192 * result["rows"][1]["time_us"]
    assert collectives_plot.is_logarithmic(list(collectives_plot.lines([result])))


def draw(files: list[Path], output: Path) -> int:
    parser = argparse.ArgumentParser()
    plot.add_arguments(parser)
    return plot.run(parser.parse_args([*map(str, files), "-o", str(output)]))


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for file, version in zip(files, ("0.11.2", "0.12"), strict=True):
        file.write_text(json.dumps(result_of(version, ("one_shot", "two_shot", "lax"))))
    code = draw(files, tmp_path / "plot.png")
    if plot.why_not() is None:
        assert code == 0
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    else:
        assert code == 2
        assert "pip install 'jax_intranode[plot]'" in capsys.readouterr().err


def matmul_result(backward: bool, on_gpus: bool, library: str) -> dict[str, Any]:
    """Returns the contents of the JSON file of a collective matmul."""
    names = matmul_report.MatmulRow.__dataclass_fields__
    rows = [
        {
            **dict.fromkeys(names, 0),
            **{"operation": "all_gather_matmul", "backward": backward, "dtype": "bfloat16"},
            **{"m": m, "k": 4096, "n": 1792, "mode": mode, "algorithm": "all_gather"},
            **{"time_us": 400.0, "lax_time_us": 500.0, "ratio": 1.25},
            **{"alone_time_us": 200.0, "bound_us": 300.0 if on_gpus else None},
        }
        for mode in MODES
        for m in (8192, 4096)
    ]
    peer = {"library": library, "dtype": "bfloat16", "m": 8192, "k": 4096, "n": 1792}
    result = result_of("0.12", ())
    result["header"] |= {"operation": "all_gather_matmul", "backward": backward}
    result["peers"]["rows"] = [{**peer, "time_us": 600.0, "time_p99_us": 600.0, "wrong": 2}]
    return {**result, "rows": rows}


def test_lanes_of_a_plot() -> None:
    on_gpus, elsewhere = (matmul_result(False, there, "torch fused") for there in (True, False))
    lanes = matmul_plot.lanes([on_gpus])
    # Both modes of a shape are neighbours.
    assert [(lane.shape.split()[0], lane.mode) for lane in lanes] == [
        (m, mode) for m in ("8192", "4096") for mode in MODES
    ]
    assert lanes[0].shares == {"ours": 0.75, "lax": 0.6, "torch fused": 0.5}
    assert lanes[2].shares == {"ours": 0.75, "lax": 0.6}
    assert lanes[0].text.startswith("1.25 ")
    # Without a bound, shares are those of the matmul alone.
    assert matmul_plot.lanes([elsewhere])[2].shares == {"ours": 0.5, "lax": 0.4}
    both = matmul_plot.lanes([on_gpus, matmul_result(True, True, "torch nccl")])
    assert both[-1].shape.startswith("all_gather_matmul backward, jax 0.12: 4096 ")


def test_plot_of_matmuls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if plot.why_not() is not None:
        pytest.skip("matplotlib is not installed")
    files = [tmp_path / "forward.json", tmp_path / "backward.json", tmp_path / "psum.json"]
    for file, result in zip(
        files,
        (
            matmul_result(False, True, "torch fused"),
            matmul_result(True, False, "another"),
            result_of("0.12", ("one_shot",)),
        ),
        strict=True,
    ):
        file.write_text(json.dumps(result))
    assert draw(files[:2], tmp_path / "plot.png") == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert draw(files[1:], tmp_path / "plot.png") == 2
    assert "can't be drawn in one plot" in capsys.readouterr().err


def test_table_of_the_peers_of_matmuls() -> None:
    result = matmul_result(False, True, "torch fused")
    table = matmul_report.format_peers(result["peers"], result["rows"]).splitlines()
    columns = [word.strip() for word in table[1].split("  ") if word.strip()]
    assert columns[-2:] == ["ours, single-process", "torch fused"]
    cells = ["0.400", "(0.75)", "0.400", "(0.75)"]
    assert table[2].split() == ["8192", "4096", "1792", "bfloat16", "|", *cells, "0.600", "(0.50)"]
    assert table[3].split() == ["4096", "4096", "1792", "bfloat16", "|", *cells, "-"]
    assert table[4].endswith(": 2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "is no JSON file of"),
        ("[]", "is no JSON file of"),
        ('{"version": 1}', "has layout 1, not 2"),
        ('{"version": 2, "rows": [{"program": "mlp"}], "peers": {"rows": []}}', "no rows"),
    ],
)
def test_plot_of_other_files(
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plot, "why_not", lambda: None)
    file = tmp_path / "rows.json"
    file.write_text(text)
    assert draw([file], tmp_path / "plot.png") == 2
    assert message in capsys.readouterr().err


def test_missing_matplotlib_is_reported_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.run(parse(f"psum --platform cpu --plot {tmp_path}/plot.png")) == 2
    written = capsys.readouterr()
    assert "pip install 'jax_intranode[plot]'" in written.err
    assert written.out == ""


# Whole programs.


def stand_in(library: Any, mesh: jax.sharding.Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program with two arguments. Only lax's version has an error."""
    error = 1e-3 if library is jax.lax else 0.0

    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return library.psum(x, "x") / 2 + error, y

    spec = PartitionSpec("x")
    program = jax.shard_map(
        step, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False
    )
    return jax.jit(program), (jnp.ones(8), jnp.zeros(8))


def test_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(programs.PROGRAMS, "stand_in", stand_in)
    row = measure_program.measure(settings_of("stand_in"), mesh_of_two())
    assert row.difference == pytest.approx(1e-3, rel=0.01)
    assert row.ratio == pytest.approx(row.lax_time_us / row.time_us)
    assert row.time_p99_us >= row.time_us > 0
    cells = str(row).split()
    assert cells[0] == "stand_in"
    assert cells[-1] == "1.0e-03"


def test_program_of_one_argument() -> None:
    chained = measure_program._Chained(lambda x: x + 1, (jnp.zeros(2),))
    assert np.array_equal(chained.run(3)[0], [3, 3])


def test_difference_of_infinite_values() -> None:
    good, bad = jnp.ones(2), jnp.array([1, jnp.inf])
    assert measure_program._difference(good, good) == 0
    assert np.isnan(measure_program._difference(bad, good))
    assert np.isnan(measure_program._difference(good, bad))


# Runs.

QUICK_PROGRAMS = ("decode_scanned", "mlp_block")  # the full tier also runs the larger ones


def run_bench(options: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jax_intranode", "bench", *options.split()],
        env=os.environ,
        cwd=directory,  # not where the source tree would be imported
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "leaves", "dtype"),
    [
        ("psum", 1, "bfloat16"),
        ("psum_scatter+all_gather", 3, "float32"),
        pytest.param("pmean", 1, "float16", marks=pytest.mark.full),
        ("psum_scatter", 1, "int32"),
        pytest.param("all_gather", 1, "int16", marks=pytest.mark.full),
    ],
)
def test_both_modes_on_the_cpu(name: str, leaves: int, dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = run_bench(
        f"{name} -b 1K -e 4K -d {dtype} --leaves {leaves} --platform cpu --devices 2 -n 2 -w 1 "
        f"--chain 2 -T 240 --peers all --json {file}",
        tmp_path,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "# wrong elements: 0 OK" in result.stdout
    assert "# torch not measured" in result.stderr
    assert "\r" not in result.stderr
    written = json.loads(file.read_text())
    assert list(written) == ["version", "header", "rows", "peers"]
    assert written["version"] == 2
    assert written["peers"] == {"versions": [], "rows": []}
    header = written["header"]
    assert {header[key] for key in ("operation", "mode")} == {name, "both"}
    assert (header["devices"], header["leaves"], header["chain"]) == (2, leaves, 2)
    assert (header["iterations"], header["warmup_iterations"]) == (2, 1)
    assert header["command"].startswith(f"python -m jax_intranode bench {name} -b 1K -e 4K -d ")
    assert "--json" not in header["command"]
    assert header["jax_intranode"] == jax_intranode.__version__
    rows = written["rows"]
    assert [(row["mode"], row["size"]) for row in rows] == [
        (mode, size) for mode in MODES for size in (1024, 4096)
    ]
    algorithms = {
        "psum_scatter+all_gather": ("push",),
        "psum_scatter": ("reduce_scatter",),
        "all_gather": ("all_gather",),
    }.get(name, select.PSUM_ALGORITHMS)
    eps = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
    factor = 0.5 if name in ("psum_scatter", "all_gather") else 1.0
    for row in rows:
        assert list(row) == list(collectives_report.Row.__dataclass_fields__)
        assert row["count"] * np.dtype(jnp.dtype(dtype)).itemsize == row["size"]
        assert row["dtype"] == dtype
        # In one process the larger size falls back to jax.lax.
        assert row["algorithm"] in algorithms or (row["mode"], row["size"]) == (MODES[1], 4096)
        assert row["operations"] == (6 if leaves == 3 else 1)
        assert row["wrong"] == row["lax_wrong"] == 0
        if dtype in eps and name != "all_gather":
            # The error is 0 where float32 represents the sums exactly.
            assert 0 <= row["error"] < eps[dtype] / 2 and 0 <= row["lax_error"] < eps[dtype]
        else:
            assert row["error"] is row["lax_error"] is None
        assert row["graph_time_us"] is row["graph_time_p99_us"] is row["graph_wrong"] is None
        assert row["time_p99_us"] >= row["time_us"] >= 0
        assert row["lax_time_p99_us"] >= row["lax_time_us"] >= 0
        if row["algbw"] is not None:
            assert row["busbw"] == pytest.approx(factor * row["algbw"])
            assert row["ratio"] == pytest.approx(row["lax_time_us"] / row["time_us"])


@pytest.mark.parametrize(
    ("name", "options", "algorithms"),
    [
        ("all_gather_matmul", "--shapes 32,16,24 --mode both", ("all_gather",)),
        ("matmul_reduce_scatter", "--shapes 32,16,24 --backward -d float16", ("all_gather",)),
        pytest.param(
            "matmul_all_reduce", "--settle 1", select.PSUM_ALGORITHMS, marks=pytest.mark.full
        ),
    ],
)
def test_matmuls_on_the_cpu(
    name: str, options: str, algorithms: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    result = run_bench(
        f"{name} --mode {MODES[0]} {options} --platform cpu --devices 2 -n 1 -w 0 --chain 1 "
        f"-T 240 --peers all --json {file}",
        tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "# wrong elements: 0 OK" in result.stdout
    assert "# torch not measured" in result.stderr
    written = json.loads(file.read_text())
    backward = "--backward" in options
    assert written["version"] == 2
    assert written["header"]["operation"] == name and written["header"]["backward"] is backward
    settles = "--settle" in options
    assert written["header"]["settle_ms"] == (1 if settles else 0)
    assert (", each after 1 ms of untimed calls;" in result.stdout) is settles
    rows = written["rows"]
    modes = MODES if "both" in options else MODES[:1]
    shapes = [[32, 16, 24]] if "--shapes" in options else [[32, 32, 48], [128, 64, 32]]
    assert [(row["mode"], [row[key] for key in "mkn"]) for row in rows] == [
        (mode, shape) for mode in modes for shape in shapes
    ]
    for row in rows:
        assert list(row) == list(matmul_report.MatmulRow.__dataclass_fields__)
        assert row["operation"] == name and row["backward"] is backward
        assert row["algorithm"] in algorithms
        assert row["wrong"] == row["lax_wrong"] == 0
        assert 0 < row["error"] < 2.0**-7 and 0 < row["lax_error"] < 2.0**-7
        assert row["bound_us"] is row["share"] is row["lax_share"] is None


def test_algorithm_reaches_the_ranks(tmp_path: Path) -> None:
    result = run_bench(
        "psum -b 1K -e 1K --platform cpu --mode single-process --devices 2 -n 1 -w 0 --chain 1 "
        f"--algorithm lax --latency-hiding off --json {tmp_path}/rows.json",
        tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "# fell back to jax.lax: JAX_INTRANODE_ALGORITHM=lax" in result.stdout
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["algorithm"] for row in written["rows"]] == ["lax"]
    assert written["header"]["algorithm"] == "lax"
    assert "latency_hiding_scheduler=false" in written["header"]["xla_flags"]


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_PROGRAMS else pytest.param(name, marks=pytest.mark.full)
        for name in programs.PROGRAMS
    ],
)
def test_whole_programs_on_the_cpu(name: str, tmp_path: Path) -> None:
    result = run_bench(
        f"{name} --platform cpu --mode single-process --devices 2 -n 1 -w 0 --chain 1 "
        f"--json {tmp_path}/rows.json",
        tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert list(row) == list(program_report.ProgramRow.__dataclass_fields__)
    assert row["program"] == name and row["handler_calls"] > 0
    assert row["difference"] < 0.1


def test_ranks_end_with_the_benchmark(tmp_path: Path) -> None:
    command = "-m jax_intranode bench psum --platform cpu --mode single-process -n 100000"
    bench = subprocess.Popen(
        [sys.executable, *command.split()], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert bench.stdout is not None
    assert bench.stdout.readline().startswith("# psum")  # a rank has started
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
    bench.terminate()
    assert bench.wait(timeout=60) == 128 + 15
    bench.stdout.close()
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)
