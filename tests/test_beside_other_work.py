"""What `overlap=True` and JAX_INTRANODE_ASYNC=1 lower to. No GPU is needed."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from cases import line, put, sharded
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from lowered import compare_lowered

import jax_intranode
from jax_intranode._src.group import communicator
from jax_intranode._src.jax_private import hlo, streams
from jax_intranode._src.selection import config, select

CALLS = {
    "psum": lambda x, **options: jax_intranode.psum(x, "x", **options),
    "pmean": lambda x, **options: jax_intranode.pmean(x, "x", **options),
    "psum_scatter": lambda x, **options: jax_intranode.psum_scatter(x, "x", **options, tiled=True),
    "all_gather": lambda x, **options: jax_intranode.all_gather(x, "x", **options, tiled=True),
    "all_to_all": lambda x, **options: jax_intranode.all_to_all(
        x, "x", 0, 1, **options, tiled=True
    ),
}
TRANSPOSED = {"psum_scatter": "all_gather", "all_gather": "psum_scatter"}
X = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)  # 2 MiB for each of two ranks


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return compare_lowered()


@pytest.fixture
def gpus(tool: ModuleType) -> Iterator[Mesh]:
    with (
        tool.without_rendezvous(),
        mock.patch.object(communicator, "beside", lambda rendezvous, partition: None),
    ):
        yield tool.mesh_of("gpu", {"x": 2})


def lowered(f: Any, mesh: Mesh, *args: Any) -> str:
    program = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )
    return program.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def on_the_stream(text: str) -> dict[str, int]:
    """How often each custom call is called on the stream for collectives."""
    found: dict[str, int] = {}
    for callee in re.findall(
        r'(?<!custom_)call @("[^"]+"|[\w.]+)\(.*_xla_stream_annotation = "collective"', text
    ):
        (body,) = re.findall(
            rf"func\.func private @{re.escape(callee)}\(.*?\n  \}}", text, re.DOTALL
        )
        (target,) = re.findall(r"custom_call @jax_intranode_(\w+)", body)
        found[target] = found.get(target, 0) + 1
    return found


@pytest.mark.parametrize("name", CALLS)
def test_calls_on_the_stream_for_collectives(gpus: Mesh, name: str) -> None:
    """With few blocks. So is the transpose."""
    operation = name.replace("pmean", "psum")
    call = functools.partial(CALLS[name], overlap=True)
    text = lowered(call, gpus, X)
    assert on_the_stream(text) == {f"{operation}_beside": 1}
    assert sum(hlo.in_lowered(text).values()) == 1
    (blocks,) = re.findall(r"blocks = (\d+)", text)
    assert int(blocks) == select.BLOCKS_BESIDE
    back = lowered(lambda x: jax.vjp(call, x)[1](call(x))[0], gpus, X)
    both = [operation, TRANSPOSED.get(operation, operation)]
    assert on_the_stream(back) == {f"{each}_beside": both.count(each) for each in both}
    in_line = lowered(CALLS[name], gpus, X)
    assert on_the_stream(in_line) == {} and hlo.in_lowered(in_line) == {
        f"jax_intranode_{operation}": 1
    }


def test_calls_in_loops_and_branches(gpus: Mesh) -> None:
    def f(x: Any) -> Any:
        def step(v: Any, _: Any) -> Any:
            return jax_intranode.psum(v, "x", overlap=True), None

        v, _ = lax.scan(step, x, None, length=3)
        return lax.cond(v[0, 0] > 0, lambda u: jax_intranode.psum(u, "x", overlap=True), jnp.sin, v)

    assert on_the_stream(lowered(f, gpus, X)) == {"psum_beside": 2}


def test_what_runs_in_line(gpus: Mesh) -> None:
    """What jax.lax runs, and what has no memory left. What the program has placed stays there."""
    psum = functools.partial(jax_intranode.psum, axis_name="x", overlap=True)
    large = jax.ShapeDtypeStruct((1 << 16, 1 << 10), jnp.float32)
    text = lowered(psum, gpus, large)
    assert hlo.in_lowered(text) == {"all-reduce": 1} and "_xla_stream_annotation" not in text
    text = lowered(streams.on_collective_stream(psum), gpus, X)
    assert on_the_stream(text) == {"psum_beside": 1} and text.count("call @compute_on") == 1
    with mock.patch.object(communicator, "beside", lambda *_: "the slab is full"):
        text = lowered(psum, gpus, X)
        assert on_the_stream(text) == {} and hlo.in_lowered(text) == {"jax_intranode_psum": 1}
        f = jax.shard_map(psum, mesh=gpus, in_specs=P("x"), out_specs=P(), check_vma=False)
        (call,) = jax_intranode.explain(f)(X)
    assert call.reason.endswith("in line: the slab is full")


@pytest.mark.skipif(jax.devices()[0].platform != "cpu", reason="is about CPU devices")
def test_nothing_changes_on_cpu_devices() -> None:
    mesh = line(2)
    x = put(mesh, P("x"), jnp.arange(64, dtype=jnp.float32).reshape(8, 8))
    for call in CALLS.values():
        texts = [
            jax.jit(sharded(functools.partial(call, **options), mesh, P("x"), P("x")))
            .lower(x)
            .as_text()
            for options in ({}, {"overlap": False}, {"overlap": True})
        ]
        assert "jax_intranode" in texts[0] and len(set(texts)) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unedited_programs(gpus: Mesh, asynchronous: bool) -> None:
    """Large collectives with matmuls after them; a small one, and one that the matmul needs."""

    def f(x: Any) -> Any:
        total = lax.psum(x, "x")
        gathered = lax.all_gather(x, "x", tiled=True)
        small = lax.psum(x[:8], "x")
        needed = lax.psum(jnp.sin(x), "x")
        product = needed @ x.T
        return (product.sum() + total + gathered[: x.shape[0]]).at[:8].add(small)

    settings = dataclasses.replace(config.get(), async_=asynchronous)
    with mock.patch.object(config, "get", lambda: settings), jax_intranode.accelerate():
        text = lowered(f, gpus, X)
    beside = {"psum_beside": 1, "all_gather_beside": 1}
    assert on_the_stream(text) == (beside if asynchronous else {})
    found = hlo.in_lowered(text)
    assert (found["all-reduce"], found["all-gather"]) == ((0, 0) if asynchronous else (1, 1))
