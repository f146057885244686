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
import jax.numpy as jnp
import pytest
from devices import need_devices
from jax import lax
from jax.sharding import AxisType
from tiers import quick

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import auto_corpus

import jax_intranode
from jax_intranode._src.jax_private import hlo

pytestmark = pytest.mark.one_version


@pytest.fixture(autouse=True)
def any_size() -> Iterator[None]:
    need_devices(8)
    log = logging.getLogger("jax_intranode")
    handlers = log.handlers
    with auto_corpus.all_sizes():
        yield
    log.handlers = handlers
    jax.clear_caches()  # programs were rewritten under other conditions


def compare(build: Any, shape: int, kind: AxisType = AxisType.Auto) -> None:
    meshes = auto_corpus.meshes_of(jax.devices()[:8], kind)
    auto_corpus.compare(build, meshes[shape % len(meshes)], jax.default_backend() == "cpu")


# 6 is a gradient of a gradient with remat and scan; 22 donates, and has cond and vmap. In 14 and 29
# several shardings are possible: XLA's choice depends on the order of operations, and on what loops
# and functions use.
@pytest.mark.parametrize("seed", quick(range(40), (6, 22)))
def test_made_programs(seed: int) -> None:
    compare(auto_corpus.made_program(seed), seed)


# 59: XLA sums an array whole, and gives one operation a part of it and another one another part.
@pytest.mark.parametrize("seed", quick((*range(20), 59), (*range(0, 20, 2), 59)))
def test_einsums(seed: int) -> None:
    compare(auto_corpus.random_einsum(seed), 0 if seed % 5 == 0 else 1)


@pytest.mark.parametrize("seed", quick(range(20), range(4)))
def test_einsums_over_explicit_axes(seed: int) -> None:
    compare(auto_corpus.random_einsum(seed), 0 if seed % 5 == 0 else 1, AxisType.Explicit)


EVERY = auto_corpus.SEQUENCE


@pytest.mark.parametrize(
    "specs",
    [
        (("model",), ("model",), ()),
        ((EVERY,), EVERY, (None, EVERY)),
        (EVERY, (None, "model"), (None, "model")),
        ((None, "model"), ("model",), EVERY),
        (("model",), (EVERY,), (None, "data")),
    ],
)
def test_shardings_are_those_that_xla_chooses(specs: Any) -> None:
    """Where several are possible, XLA's choice depends on how it has simplified the program."""

    def build(mesh: Any) -> auto_corpus.Built:
        def loss(up: Any, down: Any, y: Any) -> Any:
            def layer(y: Any, _: Any) -> Any:
                return jnp.tanh(y @ up) @ down + y, None

            return (lax.scan(layer, y, None, length=2)[0] ** 2).mean()

        shapes = (16, 32), (32, 16), (8, 16)
        arguments = (auto_corpus.normal(i, n, *specs[i]) for i, n in enumerate(shapes))
        return jax.grad(loss, argnums=(0, 1)), tuple(arguments), 0

    auto_corpus.compare(build, auto_corpus.meshes_of(jax.devices()[:4])[1], runs=True)


# Those whose training step XLA still does a part of.
LEFT = ("dense, sequence parallel", "dense, FSDP", "while, cond and vmap", "experts, partly manual")


@pytest.mark.parametrize("name", quick(LEFT, LEFT[:1]))
def test_explain_lists_what_xla_still_does(name: str) -> None:
    mesh = auto_corpus.meshes_of(jax.devices()[:8])[1]
    f, arguments, donated = auto_corpus.PROGRAMS[name](mesh)
    with auto_corpus.accelerated(mesh):
        jitted = auto_corpus.jitted(f, donated)
        arguments = auto_corpus.placed(arguments, mesh, True)
        report = jax_intranode.explain(jitted, compiled=True)(*arguments)
        text = jitted.lower(*arguments).compile().as_text()
    assert report.compiled == hlo.in_compiled(text)
    sources = {source for call in report if call.algorithm == "lax" for source in call.sources}
    assert {found.source for found in hlo.sources_of(text)} <= sources


# As XLA prints collectives of GPUs; if asynchronous, operands, results, and what belongs to them.
@pytest.mark.parametrize(
    "text, shapes",
    [
        ("((f32[16,32]), f32[8,32]) reduce-scatter-start(%x), replica_groups={{0,1}}", [(8, 32)]),
        (
            "((f32[4], f32[2]), (f32[8], f32[4])) all-gather-start(%x, %y), "
            "replica_groups=[1,2]<=[2]",
            [(8,), (4,)],
        ),
        ("(f32[3], f32[4]) all-reduce-start(%x, %y), replica_groups={{0,1}}", [(3,), (4,)]),
        ("((f32[4]), f32[4]) all-reduce-start(%x), replica_groups={{0,1}}", [(4,)]),
        (
            "(f32[5], f32[5], u32[], u32[]) collective-permute-start(%x), "
            "source_target_pairs={{0,1}}",
            [(5,)],
        ),
        (
            "(f32[5], f32[4]) collective-permute(%x, %y), source_target_pairs={{0,1}}",
            [(5,), (4,)],
        ),
    ],
)
def test_collectives_of_gpus(text: str, shapes: list[tuple[int, ...]]) -> None:
    leaves = hlo.leaves_of(f"  %found = {text}, channel_id=1\n", 2)
    assert leaves is not None
    assert [leaf.shape for leaf in leaves] == shapes
