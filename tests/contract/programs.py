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
from contract.rows import (
    ACCELERATED,
    AS_LAX,
    DIFFERS,
    LAX,
    PROGRAMS,
    TYPES,
    each,
    each_raised,
    inside,
    line,
    on_line,
    operations,
    raised,
    row,
    run,
    shmap,
    small,
    types_inside,
    under_both,
)

# Tracing.


def mapped(lib: Any, check: bool, mesh: Any = None) -> Any:
    return shmap(lambda v: each(lib, v), mesh, P("x"), P("x"), check)


@row("`eval_shape`", TYPES)
def eval_shape(lib: Any) -> Any:
    def under(check: bool) -> Any:
        f = shmap(lambda v: lib.psum({"a": v, "b": v > 1, "c": v[:0]}, "x"), check_vma=check)
        shape = jax.ShapeDtypeStruct((8, 3), jnp.bfloat16)
        shapes = jax.eval_shape(mapped(lib, check), shape), jax.eval_shape(f, shape)
        return jax.tree.map(lambda s: (s, s.weak_type, str(s.sharding)), shapes)

    return under_both(under)


@row("`make_jaxpr`: types and effects of the program", TYPES)
def make_jaxpr(lib: Any) -> Any:
    def under(check: bool) -> Any:
        f = shmap(lambda v: lib.psum({"a": v, "b": v.sum()}, "x"), check_vma=check)
        found = []
        for g in (f, mapped(lib, check)):
            jaxpr, shapes = jax.make_jaxpr(g, return_shape=True)(small(8, 3))
            types = [str(aval) for aval in jaxpr.out_avals]
            found.append((types, str(jaxpr.effects), jax.tree.map(str, shapes)))
        vmapped = jax.make_jaxpr(jax.vmap(lambda v: lib.psum(v, "i"), axis_name="i"))(small(4, 3))
        return found, str(vmapped)

    return under_both(under)


@row("`make_jaxpr` inside shard_map: effects", TYPES)
def make_jaxpr_inside(lib: Any) -> Any:
    def effects(v: Any) -> list[str]:
        trees = v, {"a": v, "b": v > 1}, {"a": v, "b": v * 2}
        pairs = [(f, t) for f in (lib.psum, lib.pmean) for t in trees]
        # ppermute of lax has no effect.
        pairs += [(f, trees[2]) for name, f in operations(lib).items() if name != "ppermute"]
        return [str(jax.make_jaxpr(lambda t, f=f: f(t, "x"))(tree).effects) for f, tree in pairs]

    return types_inside(effects, small(8, 3))


@row("`jax.sharding.no_collectives`, where jax has it", AS_LAX)
def forbidden_collectives(lib: Any) -> Any:
    # Not in jax 0.10.2.
    forbid = getattr(jax.sharding, "no_collectives", lambda axes: contextlib.nullcontext())

    def under(check: bool) -> Any:
        def forbidden(f: Any) -> Any:
            with forbid({"x"}):
                body = lambda v: f(v, "x")  # noqa: E731
                return run(shmap(body, out_specs=P("x"), check_vma=check), small(8, 3))

        return each_raised(lib, forbidden)

    return under_both(under)


@row("`closure_convert` and `named_call` around it", ACCELERATED)
def wrapped(lib: Any) -> Any:
    def body(v: Any) -> Any:
        f, consts = jax.closure_convert(lambda u: each(lib, u * v), v)
        return f(v, *consts), jax.named_call(lambda u: each(lib, u), name="named")(v)

    return inside(body, small(8, 3))


# Lowering and compiling.


@row("AOT `lower().compile()` from shapes; its layouts, shardings and trees", ACCELERATED)
def ahead_of_time(lib: Any) -> Any:
    def under(check: bool) -> Any:
        shape = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(line(), P("x")))

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
        wrong = raised(lambda: program(jnp.zeros((16, 3))))
        return program(on_line(small(8, 3))), told, wrong

    return under_both(under)


def names_of_lax(text: str) -> list[bool]:
    """Which collectives of lax are in a lowered program."""
    return [name in text for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")]


@row("lowering for another platform, and for several", LAX)
def other_platforms(lib: Any) -> Any:
    def under(check: bool) -> Any:
        traced = jax.jit(mapped(lib, check)).trace(small(8, 3))
        alone = traced.lower(lowering_platforms=("tpu",)).as_text()
        several = traced.lower(lowering_platforms=("cpu", "cuda", "tpu")).as_text()
        assert "@jax_intranode" not in alone + several
        return names_of_lax(alone), names_of_lax(several)

    return under_both(under)


@row("lowering for an `AbstractMesh`, without devices", LAX)
def abstract_mesh(lib: Any) -> Any:
    mesh = AbstractMesh((2,), ("x",))
    shape = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(mesh, P("x")))

    def under(check: bool) -> Any:
        traced = jax.jit(mapped(lib, check, mesh)).trace(shape)
        texts = [traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")]
        assert "@jax_intranode" not in "".join(texts)
        return [*map(names_of_lax, texts)]

    return under_both(under)


@row("`jax.export`: exported for one platform and for several, and called", LAX)
def export(lib: Any) -> Any:
    def under(check: bool) -> Any:
        value = on_line(small(8, 3))
        found = []
        for platforms in ({}, {"platforms": ("cpu", "cuda", "tpu")}):
            program = jax.export.export(jax.jit(mapped(lib, check)), **platforms)(value)
            module = program.mlir_module()
            assert "@jax_intranode" not in module
            found.append((names_of_lax(module), str(program.out_avals), run(program.call, value)))
        return found

    return under_both(under)


@row("`jax.export`: serialized, called, and differentiated", LAX)
def export_serialized(lib: Any) -> Any:
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")

    def under(check: bool) -> Any:
        f = shmap(lambda v: lib.psum((v * v, v.sum()), "x"), check_vma=check)
        value = on_line(small(4, 3))
        program = jax.export.export(jax.jit(f), platforms=("cpu", "cuda", "tpu"))(value)
        again = jax.export.deserialize(program.serialize(vjp_order=1))
        gradient = run(jax.grad(lambda v: again.call(v)[0].sum()), value)
        return str(again.out_avals), run(again.call, value), gradient

    return under_both(under)


@row("`jax.export` with symbolic shapes", LAX)
def export_symbolic(lib: Any) -> Any:
    mesh = line()
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(shmap(lambda v: lib.psum({"a": v * v, "b": v}, "x"), mesh))
    shape = jax.ShapeDtypeStruct((4, n), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    program = jax.export.export(f)(shape)
    value = jax.device_put(small(4, 3), NamedSharding(mesh, P("x")))
    return str(program.out_avals), run(program.call, value)


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


@row("the persistent compilation cache: a second process hits it and works", AS_LAX)
def persistent_cache(lib: Any) -> Any:
    first, second = two_processes(lib)
    ours = lib is jax_intranode
    assert first["ours"] is second["ours"] is ours
    return [
        (report["values"], report["hits"] > 0, report["misses"] > 0) for report in (first, second)
    ]


@row("`serialize_executable`: a second process loads a program and runs it", DIFFERS)
def serialized_executable(lib: Any) -> Any:
    first, second = two_processes(lib)
    return first["serialized"], second.get("loaded")


@row("`serialize_executable`: the same, after `jax_intranode.initialize`", AS_LAX)
def serialized_executable_after_initialize(lib: Any) -> Any:
    first, second = two_processes(lib)
    return first["serialized"], second.get("loaded after initialize")
