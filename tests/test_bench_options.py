"""The options of the benchmark, the settings that follow from them, and the progress line."""

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_settings import RunHere, parse, settings_of

from jax_intranode._src.command_line import machine
from jax_intranode._src.command_line.bench import collectives, record
from jax_intranode._src.command_line.bench import options as bench_options
from jax_intranode._src.command_line.bench import shapes as matmul_shapes
from jax_intranode._src.command_line.bench.operations import MATMULS
from jax_intranode._src.command_line.bench.settings import Shape
from jax_intranode._src.command_line.launcher.functions import Follower
from jax_intranode._src.command_line.launcher.progress import ProgressLine
from jax_intranode._src.command_line.options import WrongInput
from jax_intranode._src.group import nvml

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("psum -d int4", "'int4' is none of bfloat16"),
        ("all_gather_matmul --shapes 1,2", "'1,2' is not M,K,N: three positive integers"),
        (
            "all_gather_matmul --plan 1,2,3",
            "'1' is not NAME=INTEGER; the names are first_pieces, last_pieces, tile_columns",
        ),
        (
            "all_gather_matmul --plan tile_columns=192,direct=2",
            "direct=2: it takes integers from 0 to 1",
        ),
        ("all_gather_matmul --plan rounds=0", "rounds=0: it takes integers from 1 on"),
        ("all_gather_matmul --plan columns=192", "a plan has no 'columns'; it has first_pieces"),
        ("all_gather_matmul --shapes 1,2,3;1,0,3", "'1,0,3' is not M,K,N"),
        ("all_gather_matmul --preset llama", "'llama' is none of reference, llama-8b"),
        ("ppermute", "'ppermute' is none of psum, "),
        ("pmean -d float32,int32", "pmean of int32 is a float"),
        ("psum_scatter --leaves 2", "psum_scatter is measured with one array"),
        ("all_gather --leaves 2", "all_gather is measured with one array"),
        ("psum -b 1 -e 1", "sizes 1 holds a whole number of elements of bfloat16 for each of 2"),
        (
            "psum -b 16K -e 1K",
            "--minbytes 16K is above --maxbytes 1K: choose a smaller -b or a larger -e",
        ),
        ("psum -b 1M", "--minbytes 1M is above --maxbytes 64K (the default): choose"),
        (
            "psum --shapes 1,2,3",
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
        ("mlp_block --peers all", "--peers and --plot are for operations"),
        ("mlp_block --plot all.png", "--peers and --plot are for operations"),
    ],
)
def test_options_refused(options: str, message: str, run_here: RunHere) -> None:
    code, out, err = run_here(f"bench {options} --platform cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(gpus: int, asked: int | None, **how: Any) -> tuple[str, int]:
        monkeypatch.setattr(nvml, "visible_gpus", lambda: gpus)
        options = argparse.Namespace(platform="gpu", devices=asked)
        return machine.platform_and_devices(options, **how)

    assert devices(4, None) == ("gpu", 4) and devices(1, 3, fewest=2, shares=True) == ("gpu", 3)
    for gpus, asked, how, message in (
        (0, None, {}, r"no NVIDIA GPU here \(by NVML and CUDA_VISIBLE_DEVICES\): choose"),
        (2, 4, {"shares": True}, "has 2 visible GPUs, not 4: choose --devices 2 or less"),
        (1, None, {"fewest": 2}, "a group has 2 or more GPUs, and 1 are asked for"),
    ):
        with pytest.raises(WrongInput, match=message):
            devices(gpus, asked, **how)


def test_bad_variable_is_refused_once(monkeypatch: pytest.MonkeyPatch, run_here: RunHere) -> None:
    monkeypatch.setenv("JAX_INTRANODE_ALGORITHM", "twoshot")
    code, _, err = run_here("bench psum --platform cpu")
    assert code == 2 and err.count("\n") == 1
    assert "JAX_INTRANODE_ALGORITHM='twoshot': use one of auto, one_shot" in err


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
    settings = bench_options.settings(parse(options), platform, 2)[0]
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


def test_measurements() -> None:
    settings = settings_of("psum", sizes=[6, 8, 15, 1024], dtypes=["bfloat16", "float64"])
    # Two devices can share an even number of elements only.
    assert settings.measurements() == [("bfloat16", 4), ("bfloat16", 512), ("float64", 128)]


@pytest.mark.parametrize(
    ("count", "leaves", "multiple"),
    [(1000, 1, 1), (1000, 7, 1), (7, 7, 1), (300, 300, 1), (1000, 7, 4)],
)
def test_split_into_leaves(count: int, leaves: int, multiple: int) -> None:
    at = collectives.split_points(count, leaves, multiple)
    sizes = [len(leaf) for leaf in np.split(np.zeros(count), at)]
    assert len(sizes) == leaves
    assert sum(sizes) == count
    assert all(size % multiple == 0 for size in sizes)


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


# Progress.


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_says_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(
        "jax_intranode._src.command_line.launcher.progress.time.monotonic", lambda: now
    )
    terminal = Terminal()
    line = ProgressLine(terminal, total=11)
    now = 110  # starting the ranks takes 10 s
    line.begin("first")
    now = 170
    line.begin("second")
    line.show()  # one measurement took 60 s, and the second one is assumed to be half way
    assert terminal.getvalue().endswith("second: 2 of 11, 1:10, about 6:20 left")


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
    log, messages = tmp_path / "log", tmp_path / "messages"
    line = ProgressLine(terminal, total=2)
    follower = Follower(messages, line, log=log)
    follower.follow()
    log.write_text("a row\nhalf")
    messages.write_text('{"begun": "first"}\n{"begun": "second"}\n')
    follower.follow()
    follower.follow(ended=True)
    assert capsys.readouterr().out == "a row\n"
    assert "second: 2 of 2, 0:00, about 0:00 left" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
