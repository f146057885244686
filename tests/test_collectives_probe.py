"""The collectives' kernels alone on GPUs: tools/collectives_probe.cu."""

import os
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
FLAGS = ("-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a")


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if jax.devices()[0].platform != "gpu":
        pytest.skip("no GPU")
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on PATH")
    program = tmp_path_factory.mktemp("probe") / "collectives_probe"
    sources = [f"xla_ffi/cuda/{name}" for name in ("collectives.cu", "collectives.cc", "slab.cu")]
    options = (*FLAGS, "-DJIN_TYPE=BF16", "-DJIN_ELEMENT_TYPE=kBF16", "-o", str(program))
    compiled = subprocess.run(
        [nvcc, *options, "tools/collectives_probe.cu", *sources, "-ldl"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert compiled.returncode == 0, compiled.stderr
    return program


def run(probe: Path, ranks: int, what: str) -> str:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}  # all ranks are streams of one GPU
    command = ["timeout", "-s", "KILL", "120", str(probe), str(ranks), what]
    outcome = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    text = outcome.stdout + outcome.stderr
    assert outcome.returncode == 0, text
    return text


@pytest.mark.full
def test_another_operation_is_found_though_not_all_blocks_fit(probe: Path) -> None:
    """With 3 ranks one block of this kernel fills a multiprocessor."""
    run(probe, 3, "check-other")


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_kernels_in_segments(probe: Path, ranks: int) -> None:
    text = run(probe, ranks, "check")
    assert text == f"{ranks} ranks on one GPU: 288 operations, 0 wrong\n"
