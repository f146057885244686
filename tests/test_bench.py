"""The benchmark: its sizes, its oracle, its check, and a small run in each mode."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jax_intranode._src import bench


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("512", 512), ("4K", 4 << 10), ("4k", 4 << 10), ("1M", 1 << 20), ("2G", 2 << 30)],
)
def test_parse_size(text: str, expected: int) -> None:
    assert bench.parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1.5K", "1KB", "4 K"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        bench.parse_size(text)


def test_sizes_include_both_ends() -> None:
    assert bench.sizes_between(1024, 16384, 4) == [1024, 4096, 16384]
    assert bench.sizes_between(1024, 16383, 4) == [1024, 4096]


@pytest.mark.parametrize(("count", "leaves"), [(1000, 1), (1000, 7), (7, 7), (300, 300)])
def test_cuts_make_as_many_leaves(count: int, leaves: int) -> None:
    sizes = [len(leaf) for leaf in np.split(np.zeros(count), bench._cuts(count, leaves))]
    assert len(sizes) == leaves
    assert sum(sizes) == count


def _oracle(values: list[object], dtype: object) -> np.ndarray:
    """Returns the oracle's sum of one element per rank."""
    return bench.oracle([np.array([value], dtype) for value in values])[0]


def test_oracle_rounds_once() -> None:
    # bfloat16 has 8 significant bits: 256 + 1 rounds back to 256 if it is rounded at each step.
    assert _oracle([256, 1, 1], ml_dtypes.bfloat16) == 258
    assert _oracle([2048, 1, 1], np.float16) == 2050


def test_oracle_adds_in_rank_order() -> None:
    assert _oracle([1e8, 1, -1e8], np.float32) == 0
    assert _oracle([1e8, -1e8, 1], np.float32) == 1


def test_oracle_accumulates_float64_and_integers_in_their_own_type() -> None:
    assert _oracle([1.0, 2.0**-40], np.float64) == 1.0 + 2.0**-40
    assert _oracle([100, 100], np.int8) == -56
    assert _oracle([2**63 - 1, 1], np.int64) == -(2**63)


def test_oracle_keeps_signed_zeros_and_subnormals() -> None:
    assert np.signbit(_oracle([-0.0, -0.0], np.float32))
    assert _oracle([1e-45, 1e-45], np.float32) > 0


def test_oracle_returns_the_sum_of_magnitudes() -> None:
    _, magnitude = bench.oracle([np.array([value], np.float32) for value in (-1, 2, -3)])
    assert magnitude == 6


def test_every_rank_can_make_every_ranks_data() -> None:
    for dtype in (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float64), np.dtype(np.int8)):
        first = bench.random_shard(1, 4096, dtype)
        assert first.dtype == dtype
        assert first.nbytes == 4096
        assert np.array_equal(first, bench.random_shard(1, 4096, dtype))
        assert not np.array_equal(first, bench.random_shard(0, 4096, dtype))
    # The whole range, so that sums wrap.
    assert {first.min(), first.max()} == {-128, 127}


def test_count_wrong_compares_bits() -> None:
    expected = np.array([1.0, 0.0, np.nan, 2.0], np.float32)
    assert bench.count_wrong(expected.copy(), expected, None) == 0
    got = np.array([np.nextafter(np.float32(1), np.float32(2)), -0.0, -np.nan, 2.0], np.float32)
    assert bench.count_wrong(got, expected, None) == 2


def test_count_wrong_with_a_tolerance() -> None:
    expected = np.array([1.0, 1.0, 1.0], np.float32)
    got = np.array([1.05, 1.2, np.nan], np.float32)
    assert bench.count_wrong(got, expected, np.full(3, 0.1)) == 2
    assert bench.count_wrong(np.array([3]), np.array([4]), np.array([10.0])) == 1


@pytest.mark.parametrize("leaves", [1, 7])
def test_both_modes_on_the_cpu(tmp_path: Path, leaves: int) -> None:
    file = tmp_path / "rows.json"
    options = (
        f"-b 1K -e 4K -d bfloat16 --leaves {leaves} --platform cpu --devices 2 -n 2 -w 1 -T 240 "
        "--json"
    )
    result = subprocess.run(
        [sys.executable, "-m", "jax_intranode", "bench", "psum", *options.split(), str(file)],
        env=os.environ,
        cwd=tmp_path,  # not where the source tree would be imported
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "# wrong elements: 0 OK" in result.stdout
    written = json.loads(file.read_text())
    assert written["version"] == 1
    assert written["header"]["devices"] == 2
    assert written["header"]["leaves"] == leaves
    rows = written["rows"]
    assert [(row["mode"], row["size"]) for row in rows] == [
        ("process-per-device", 1024),
        ("process-per-device", 4096),
        ("single-process", 1024),
        ("single-process", 4096),
    ]
    for row in rows:
        assert row["count"] * 2 == row["size"]
        assert row["dtype"] == "bfloat16"
        assert row["algorithm"] in ("one_shot", "two_shot", "lax")
        assert row["operations"] == 1
        assert row["wrong"] == row["lax_wrong"] == 0
        assert row["time_us"] >= 0
        if row["algbw"] is not None:
            # For two devices the factor 2(n-1)/n is 1.
            assert row["busbw"] == pytest.approx(row["algbw"])
            assert row["ratio"] == pytest.approx(row["lax_time_us"] / row["time_us"])
