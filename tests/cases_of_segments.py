"""Cases of operations in segments."""

import functools
import itertools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SEGMENTED, apply, case, compiled_of_ours, in_segments, line, segments_of, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.native import extension


@case(operation=SEGMENTED, dtype=cases.DTYPES)
def segments_of_every_dtype(operation: str, dtype: str) -> None:
    """Sizes around the bounds of segments, and a donated operand."""
    mesh = line()
    n = mesh.size
    item = np.dtype(dtype).itemsize
    counts = [k // item for k in (8, 256, 256 + item, 512, 1000, 2048 - item, 5000)]
    if operation in cases.DIVIDED:
        counts = [k * n for k in counts]
    parts = [cases.random(dtype, (n, count), count) for count in counts]

    def f(vs: Any) -> Any:
        return [apply(operation, v[0])[None] for v in vs]

    with cases.x64(dtype), in_segments(256):
        arrays = [cases.put(mesh, P("x"), part) for part in parts]
        program = compiled_of_ours(
            sharded(f, mesh, P("x"), P("x")), arrays, donate_argnums=0, keep_unused=True
        )
        assert sorted(segments_of(program.as_text())) == [1, 1, 2, 2, 4, 8, 32]
        results = program(arrays)
    for result, part in zip(results, parts, strict=True):
        cases.check(result, cases.reference(operation, part))


@case()
def trees_in_segments() -> None:
    """Trees are summed by one operation, whose segments begin in any of the arrays."""
    mesh = line()
    n = mesh.size
    counts = [*(int(k) for k in np.random.default_rng(7).integers(1, 300, 40)), 9000]
    parts = {
        dtype: [cases.random(dtype, (n, count), count) for count in counts]
        for dtype in ("float32", "bfloat16", "int8")
    }
    arrays = {
        dtype: [cases.put(mesh, P("x"), part) for part in of_dtype]
        for dtype, of_dtype in parts.items()
    }
    f = sharded(lambda tree: jax_intranode.psum(tree, "x"), mesh, P("x"), P("x"))
    with in_segments(1 << 12):
        program = compiled_of_ours(f, arrays)
        assert sorted(segments_of(program.as_text())) == [4, 8, 16]
        results = program(arrays)
    for dtype, of_dtype in parts.items():
        for result, part in zip(results[dtype], of_dtype, strict=True):
            cases.check(result, cases.reference("psum", part))


@case(mib=(16, 64, 256, 1024))
def large_messages_in_segments(mib: int) -> None:
    """Of 4 MiB, donated, first eagerly, then replayed. They are compared on the devices."""
    mesh = line()
    if mesh.devices.flat[0].platform != "gpu":
        pytest.skip("needs GPUs; on CPU devices it would take minutes")
    n, count = mesh.size, (mib << 20) // 2

    def operand(operation: str) -> Any:
        """Integers, so that sums are exact."""
        at = jnp.arange(count // n if operation == "all_gather" else count, dtype=jnp.uint32)
        at = at * jnp.uint32(2654435761) + lax.axis_index("x").astype(jnp.uint32) * 40503
        return ((at >> 16) % 17).astype("bfloat16") - 8

    def run(operation: str, v: Any) -> Any:
        few = [jax_intranode.psum(v[:k], "x") for k in range(1, 6)]  # XLA makes no smaller graphs
        if operation != "tree":
            return apply(operation, v), few
        bounds = [0, 5, count // 7, count // 3, count]
        arrays = [v[a:b] for a, b in itertools.pairwise(bounds)]
        return jnp.concatenate(jax_intranode.psum(arrays, "x")), few

    def wrong(operation: str, result: Any) -> Any:
        of_lax = "psum" if operation == "tree" else operation
        want = apply(of_lax, operand(operation), lib=lax)
        return (result != want).sum(dtype=jnp.int32)[None]

    for operation in (*SEGMENTED, "tree"):
        make = jax.jit(sharded(functools.partial(operand, operation), mesh, (), P("x")))
        with in_segments(4 << 20):
            f = sharded(functools.partial(run, operation), mesh, P("x"), P("x"))
            program = compiled_of_ours(f, make(), donate_argnums=0)
        segments = max(segments_of(program.as_text()))
        assert segments >= (mib if operation in (*cases.KEEPS_SHAPE, "tree") else mib // n) // 4
        compare = jax.jit(sharded(functools.partial(wrong, operation), mesh, P("x"), P("x")))
        handled = []
        for _ in range(4):
            before = extension.handler_calls()
            result, _ = program(make())
            handled.append(extension.handler_calls() - before)
            found = compare(result)
            assert int(np.asarray(found.addressable_shards[0].data)[0]) == 0, operation
            # The next call gets the same memory, so that XLA need not capture anew.
            del result, found
        assert handled[0] > 0 and 0 in handled, handled
