"""The other libraries that the benchmark measures."""

import importlib.machinery
import io
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from bench_peers import nccl_tests, pallas, pallas_rank, pytorch
from bench_peers import registry as peers
from bench_settings import matmul_settings, mesh_of_two, settings_of

from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.functions import SINGLE_PROCESS
from jax_intranode._src.command_line.launcher.progress import ProgressLine
from jax_intranode._src.group import nvml

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
    for name, platform, lines in (
        (
            "psum",
            "gpu",
            "# torch not measured: torch is not installed\n"
            "# pallas not measured: it has no psum\n"
            "# nccl-tests not measured: all_reduce_perf is not on PATH\n",
        ),
        (
            "psum_scatter+all_gather",
            "gpu",
            "# torch not measured: torch is not installed\n"
            "# pallas not measured: it has no psum_scatter+all_gather\n"
            "# nccl-tests not measured: it has no psum_scatter+all_gather\n",
        ),
        (
            "psum",
            "cpu",
            "# torch not measured: measured on GPUs only\n"
            "# pallas not measured: measured on GPUs only\n"
            "# nccl-tests not measured: measured on GPUs only\n",
        ),
    ):
        assert measure_peers(settings_of(name, platform=platform)) == {"versions": [], "rows": []}
        assert capsys.readouterr().err == lines


def test_torch_makes_as_many_calls_as_our_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = []

    def run_ranks(commands: list[list[str]], log_dir: Path, **_: Any) -> None:
        instructions.append(json.loads(commands[0][-1]))
        rows = {"version": "torch", "rows": [], "failed": []}
        Path(instructions[-1]["output"]).write_text(json.dumps(rows))

    torch = types.ModuleType("torch")
    torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(pytorch, "run_ranks", run_ranks)
    for settings in (
        matmul_settings("all_gather_matmul", False, platform="gpu", dtypes=["bfloat16", "int8"]),
        matmul_settings("all_gather_matmul", False, platform="gpu", chain=None, settle_ms=2),
        settings_of("psum", platform="gpu", settle_ms=2),
    ):
        assert measure_peers(settings)["versions"] == ["torch"]
    assert [run["measurements"] for run in instructions] == [
        [["bfloat16", [32, 16, 24], 4, 0]],
        [["float32", [32, 16, 24], 128, 2]],
        [["float32", 256, 1, 0], ["float32", 1024, 1, 0]],
    ]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtypes": ["float32"]}, "it takes only bfloat16, float16"),
        ({"backward": True}, "it has no gradients"),
        ({"devices": 4}, "it runs on all GPUs that JAX sees, 2, and --devices is 4; set CUDA_VIS"),
        ({}, "its kernel is for Hopper GPUs, and this is cpu"),
    ],
)
def test_pallas_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(nvml, "visible_gpus", lambda: 2)
    monkeypatch.setattr(pallas, "run_function", lambda _, of, *args, **__: refused(of))
    fields = {"backward": False, "dtypes": ["bfloat16"], **changes, "platform": "gpu"}
    settings = matmul_settings("all_gather_matmul", **fields)
    assert peers.measure(["pallas"], settings, 20, ProgressLine(io.StringIO(), 1))["rows"] == []
    assert capsys.readouterr().err.startswith(f"# pallas not measured: {reason}")


def refused(fields: dict[str, Any]) -> dict[str, Any]:
    """What the process of the Pallas peer returns on CPUs."""
    return pallas_rank.measure(None, **fields)  # type: ignore[arg-type]


def test_pallas_is_checked_and_timed() -> None:
    """With a stand-in for its kernel, of which one configuration does not fit."""
    settings = matmul_settings("all_gather_matmul", False, dtypes=["bfloat16"])

    def kernel(x: Any, w: Any, *, axis_name: str, dtype: Any, config: float) -> Any:
        if config == 0:
            raise ValueError("exceeds available shared memory")
        whole = jax.lax.all_gather(x, axis_name, tiled=True)
        return (config * (whole @ w)).astype(dtype)

    def row(*configs: float) -> Any:
        asked = [{"config": config} for config in configs]
        (shape,) = [shape for _, shape in settings.matmuls()]
        return pallas_rank.measure_shape(mesh_of_two(), settings, "bfloat16", shape, kernel, asked)

    right = row(0, 1)
    assert right["wrong"] == 0 and right["time_us"] > 0
    assert (right["m"], right["k"], right["n"]) == (32, 16, 24)
    assert row(1.5)["wrong"] > 0
    assert row(0) is None


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
    table = [line.split() for line in peers.table_of(found, [ours]).splitlines()]
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
