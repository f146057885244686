"""Rows of the contract: tracing, lowering, compiling, exporting, and other processes."""

import contextlib
import functools
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import python

import jax_intranode
from contract import rows
from contract.rows import PROGRAMS, How, each, each_raised, on_line, row, run, shmap, small

# Tracing.


def mapped(lib: Any, check: bool, mesh: Any = None) -> Any:
    return shmap(lambda v: each(lib, v), mesh, P("x"), P("x"), check)


@row("`eval_shape` and `make_jaxpr`, outside and inside shard_map: types and effects", How.TYPES)
def types_of_programs(lib: Any) -> Any:
    def outside(check: bool) -> Any:
        f = shmap(lambda v: lib.psum({"a": v, "b": v.sum()}, "x"), check_vma=check)
        shape, found = jax.ShapeDtypeStruct((8, 3), jnp.bfloat16), []
        for g in (f, mapped(lib, check)):
            found.append(
                jax.tree.map(lambda s: (s, s.weak_type, str(s.sharding)), jax.eval_shape(g, shape))
            )
            jaxpr, shapes = jax.make_jaxpr(g, return_shape=True)(small(8, 3))
            types = [str(aval) for aval in jaxpr.out_avals]
            found.append((types, str(jaxpr.effects), jax.tree.map(str, shapes)))
        vmapped = jax.make_jaxpr(jax.vmap(lambda v: lib.psum(v, "i"), axis_name="i"))(small(4, 3))
        return found, str(vmapped)

    def effects(v: Any) -> list[str]:
        trees = v, {"a": v, "b": v > 1}, {"a": v, "b": v * 2}
        pairs = [(f, t) for f in (lib.psum, lib.pmean) for t in trees]
        # ppermute of lax has no effect.
        pairs += [(f, trees[2]) for name, f in rows.operations(lib).items() if name != "ppermute"]
        return [str(jax.make_jaxpr(lambda t, f=f: f(t, "x"))(tree).effects) for f, tree in pairs]

    return rows.under_both(outside), rows.types_inside(effects, small(8, 3))


@row("`jax.sharding.no_collectives`, where jax has it", How.AS_LAX)
def forbidden_collectives(lib: Any, check: bool) -> Any:
    # Not in jax 0.10.2.
    forbid = getattr(jax.sharding, "no_collectives", lambda axes: contextlib.nullcontext())

    def forbidden(f: Any) -> Any:
        with forbid({"x"}):
            body = lambda v: f(v, "x")  # noqa: E731
            return run(shmap(body, out_specs=P("x"), check_vma=check), small(8, 3))

    return each_raised(lib, forbidden)


# Lowering and compiling.


@row("AOT `lower().compile()` from shapes; its layouts, shardings and trees", How.ACCELERATED)
def ahead_of_time(lib: Any, check: bool) -> Any:
    shape = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(rows.line(), P("x")))

    def body(v: Any) -> Any:
        return each(lib, v), lib.psum({"a": v, "b": v.sum()}, "x")

    f = jax.jit(shmap(body, None, P("x"), (P("x"), P()), check))
    lowered = f.lower(shape)
    program = lowered.compile()
    PROGRAMS.append(program.as_text())
    told = (
        str(lowered.out_info),
        str(lowered.in_tree),
        str(program.out_tree),
        str(program.input_shardings),
        str(program.output_shardings),
        str(program.output_formats),
    )
    wrong = rows.raised(lambda: program(jnp.zeros((16, 3))))
    return program(on_line(small(8, 3))), told, wrong


def names_of_lax(text: str) -> list[bool]:
    """Which collectives of lax are in a lowered program."""
    return [name in text for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")]


@row("lowering for another platform, for several, and for an `AbstractMesh`", How.LAX)
def other_platforms(lib: Any, check: bool) -> Any:
    mesh = AbstractMesh((2,), ("x",))
    shape = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    here = jax.jit(mapped(lib, check)).trace(small(8, 3))
    abstract = jax.jit(mapped(lib, check, mesh)).trace(shape)
    texts = [
        traced.lower(lowering_platforms=platforms).as_text()
        for traced, platforms in (
            (here, ("tpu",)),
            (here, ("cpu", "cuda", "tpu")),
            *((abstract, (platform,)) for platform in ("cpu", "cuda", "tpu")),
        )
    ]
    assert "@jax_intranode" not in "".join(texts)
    return [*map(names_of_lax, texts)]


@row("`jax.export` for one platform, several, symbolic shapes; serialized, differentiated", How.LAX)
def export(lib: Any, check: bool) -> Any:
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    (n,) = jax.export.symbolic_shape("n")
    value = on_line(small(8, 3))
    symbolic = jax.ShapeDtypeStruct((8, n), jnp.float32, sharding=value.sharding)
    f = jax.jit(shmap(lambda v: lib.psum((v * v, v.sum()), "x"), check_vma=check))
    every = jax.jit(mapped(lib, check))
    several = {"platforms": ("cpu", "cuda", "tpu")}
    found = []
    for g, of, platforms in ((every, value, {}), (every, value, several), (f, symbolic, {})):
        program = jax.export.export(g, **platforms)(of)
        module = program.mlir_module()
        assert "@jax_intranode" not in module
        found.append((names_of_lax(module), str(program.out_avals), run(program.call, value)))
    again = jax.export.deserialize(jax.export.export(f, **several)(value).serialize(vjp_order=1))
    gradient = run(jax.grad(lambda v: again.call(v)[0].sum()), value)
    return found, str(again.out_avals), run(again.call, value), gradient


# Other processes.


@functools.cache
def two_processes(lib: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reports of two processes that run one after the other and share a cache."""
    name = "ours" if lib is jax_intranode else "lax"
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            second = Path(__file__).with_name("second_process.py")
            done = python(second, name, folder, stderr=subprocess.PIPE, timeout_s=200)
            assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
            reports.append(json.loads(done.stdout.splitlines()[-1]))
    return reports[0], reports[1]


@row(
    "a second process hits the persistent compilation cache; it loads a program of "
    "`serialize_executable` after `jax_intranode.initialize`",
    How.AS_LAX,
)
def persistent_cache(lib: Any) -> Any:
    first, second = two_processes(lib)
    assert first["ours"] is second["ours"] is (lib is jax_intranode)
    found = [(of["values"], of["hits"] > 0, of["misses"] > 0) for of in (first, second)]
    return found, first["serialized"], second.get("loaded after initialize")


@row("`serialize_executable`: a second process loads a program and runs it", How.DIFFERS)
def serialized_executable(lib: Any) -> Any:
    first, second = two_processes(lib)
    return first["serialized"], second.get("loaded")
