"""Programs of tools/auto_corpus.py: collectives, shardings, aliases and results stay as they were.

The programs are made of random parts: matmuls, norms, scan, while, cond, vmap, remat, nested
functions and constraints; many are gradients, gradients of gradients, or steps that donate.
"""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from devices import need_devices

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import auto_corpus


@pytest.fixture(autouse=True)
def any_size() -> Iterator[None]:
    need_devices(8)
    log = logging.getLogger("jax_intranode")
    handlers = log.handlers
    with auto_corpus.all_sizes():
        yield
    log.handlers = handlers
    jax.clear_caches()  # programs were rewritten under other conditions


def compare(build: Any, shape: int) -> None:
    meshes = auto_corpus.meshes_of(jax.devices()[:8])
    auto_corpus.compare(build, meshes[shape % len(meshes)], jax.default_backend() == "cpu")


OTHERWISE = pytest.mark.xfail(
    raises=auto_corpus.Different,
    reason="an array that no constraint decides is sharded otherwise than XLA chooses",
)


# 6 is a gradient of a gradient with remat and scan.
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(
            seed,
            marks=[OTHERWISE] * (seed in (14, 28, 29)) + [pytest.mark.full] * (seed != 6),
        )
        for seed in range(40)
    ],
)
def test_made_programs(seed: int) -> None:
    compare(auto_corpus.made_program(seed), seed)


# 59: XLA sums an array whole, and gives one operation a part of it and another one another part.
@pytest.mark.parametrize("seed", [*range(20), 59])
def test_einsums(seed: int) -> None:
    compare(auto_corpus.random_einsum(seed), 0 if seed % 5 == 0 else 1)
