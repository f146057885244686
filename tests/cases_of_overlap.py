"""Cases of overlapped collective matmuls, for GPUs in either process mode.

On CPUs the collective and the matmul run one after the other.
"""

import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import overlapped_cases
import pytest
from cases import check, check_like, line, put, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from models import OF_LAX
from overlapped_cases import ALL, case, check_in_poisoned_rings, on_gpus, overlapped, zeros_and_ones
from overlapped_cases import CASES as CASES

import jax_intranode
from jax_intranode._src.native import extension

AXES = (0, ()), (0, (3,)), (1, (2,)), (2, (2, 3))


@case(rows=(1, 127, 129, 256), plan=ALL)
def overlapped_exact(rows: int, plan: str) -> None:
    """Every axis, with and without batches; matrices of unequal width; rings full of NaN before."""
    n = len(jax.devices())
    for axis, batch in AXES:
        shape = (*batch[:axis], rows, *batch[axis:], 64)
        long = (*batch[:axis], rows * n, *batch[axis:], 64)

        def program(lib: Any, x: Any, y: Any, *ws: Any, axis: int = axis) -> Any:
            products, whole = lib.all_gather_matmul(
                x, list(ws), "x", gather_axis=axis, return_gathered=True
            )
            (alone,) = lib.all_gather_matmul(x, [ws[0]], "x", gather_axis=axis)
            part = lib.matmul_reduce_scatter(y, ws[1], "x", scatter_dimension=axis)
            return *products, whole, alone, part, lib.matmul_all_reduce(y, ws[2], "x")

        check_in_poisoned_rings(program, [shape, long, (64, 8), (64, 136), (64, 264)], plan, 2)


@case(plan=tuple(plan for plan in ALL if plan != "fused_224"))
def overlapped_sums_of_several(plan: str) -> None:
    """Terms of unequal K, which the fused kernel sums without copying them."""
    n = len(jax.devices())
    widths = (8, 136, 264, 72)
    for axis, batch in ((0, ()), (1, (3,))):
        rows, whole = ((*batch, length, 200) for length in (129, 129 * n))

        def program(lib: Any, *args: Any, axis: int = axis, rows: Any = rows) -> Any:
            ws, cts = args[:4], args[4:]

            def gather(x: Any) -> Any:
                return lib.all_gather_matmul(x, list(ws), "x", gather_axis=axis)

            x = lax.pcast(jnp.zeros(rows, ws[0].dtype), "x", to="varying")
            return jax.linear_transpose(gather, x)(list(cts))

        shapes = *((200, width) for width in widths), *((*whole[:-1], width) for width in widths)
        check_in_poisoned_rings(program, shapes, plan, 2)


@case(plan=("fused", "fused_224", "fused_256", "fused_128", "direct", "direct_256", "direct_128"))
def overlapped_many_tiles(plan: str) -> None:
    """More tiles than one wave, an odd number of row tiles; K of one stage and of two."""

    def program(lib: Any, x: Any, y: Any, w: Any) -> Any:
        product, whole = lib.all_gather_matmul(x, w, "x", return_gathered=True)
        return product, whole, lib.matmul_reduce_scatter(y, w, "x")

    for rows, k, width in ((1032, 72, 4104), (1024, 8, 4096)):
        shapes = (rows, k), (rows * len(jax.devices()), k), (k, width)
        check_in_poisoned_rings(program, shapes, plan, 4)


@case(dtype=("bfloat16", "float16"), plan=("pieces", "fused", "fused_256", "direct_128"))
def overlapped_sums_in_rank_order(dtype: str, plan: str) -> None:
    """Products whose sum depends on the order are added in rank order."""
    mesh = line()
    n = mesh.size
    rng = np.random.default_rng(5)
    # For each element one rank has a large product and another rank its negative. The others have
    # products so small that adding them in float32 changes nothing while the sum is large.
    terms = np.full((n, 64, 264), 2.0**-14, np.float32)
    terms[0], terms[1] = 2.0**15, -(2.0**15)
    w = rng.permuted(terms, axis=0)
    chosen = rng.integers(64, size=256 * n)
    x = np.broadcast_to(np.eye(64, dtype=np.float32)[chosen], (n, 256 * n, 64))

    def f(x: Any, w: Any) -> Any:
        return jax_intranode.matmul_reduce_scatter(x[0], w[0], "x")[None]

    arrays = [put(mesh, P("x"), v.astype(dtype)) for v in (x, w)]
    want = functools.reduce(np.add, w[:, chosen])
    check(
        overlapped(sharded(f, mesh, P("x"), P("x")), arrays, plan)(*arrays),
        want.reshape(n, 256, 264).astype(dtype),
    )


@case(rows=(1, 127, 129, 384), plan=("fused", "fused_224", "wgrad", *overlapped_cases.WGRAD))
def overlapped_both_gradients(rows: int, plan: str) -> None:
    """Every axis, with and without batches; matrices of unequal width; rings full of NaN before."""
    n = len(jax.devices())
    dtype = "float16" if rows == 129 else "bfloat16"
    k, widths = 520, (8, 136, 264)  # three rounds, or column tiles, of both gradients
    for axis, batch in AXES:
        shape = (*batch[:axis], rows, *batch[axis:])
        long = (*batch[:axis], rows * n, *batch[axis:])

        def program(lib: Any, x: Any, y: Any, ct: Any, *others: Any, axis: int = axis) -> Any:
            cts, ws = list(others[:3]), others[3:]

            def gather(x: Any, *ws: Any) -> Any:
                return lib.all_gather_matmul(x, list(ws), "x", gather_axis=axis)

            def scatter(y: Any, v: Any) -> Any:
                return lib.matmul_reduce_scatter(y, v, "x", scatter_dimension=axis)

            # The first matrix is frozen. Matrices with a gradient come first.
            of_some = jax.vjp(lambda *args: gather(args[0], ws[0], *args[1:]), x, *ws[1:])
            of_scatter = jax.vjp(scatter, y, ws[2])[1](ct)
            return *jax.vjp(gather, x, *ws)[1](cts), *of_some[1](cts), *of_scatter

        shapes = (*shape, k), (*long, k), (*shape, 264)
        shapes += (*((*long, width) for width in widths), *((k, width) for width in widths))
        compiled = functools.partial(overlapped_cases.both_gradients, calls=3)
        check_in_poisoned_rings(program, shapes, plan, 1 if batch else 3, dtype, compiled)


def small_gradients(lib: Any, x: Any, w: Any) -> Any:
    """Gradients of both operations as the next x and w. Values are so small that sums are exact."""
    y, pull_back = jax.vjp(lambda x, w: lib.all_gather_matmul(x, w, "x"), x, w)
    by_x, by_w = pull_back(y % 3)
    z, pull_back = jax.vjp(lambda y, w: lib.matmul_reduce_scatter(y, w, "x"), y % 2, w)
    by_y, by_v = pull_back(z % 3)
    return (by_x + by_y[: x.shape[0]]) % 3, ((by_w + by_v) % 5 == 1).astype(w.dtype)


@case(plan=("wgrad", *overlapped_cases.WGRAD))
def overlapped_gradients_with_delays(plan: str) -> None:
    """Each rank in turn is late. Every gradient feeds the next step."""
    compiled = overlapped_cases.both_gradients
    check_with_delays(small_gradients, lambda f, args: compiled(f, args, plan, 2))


def check_with_delays(step: Any, compiled: Any) -> None:
    """Checks a chain of steps from x, w to x, w against lax's, while each rank in turn is late."""
    mesh = line()
    n = mesh.size
    x, w = zeros_and_ones(5, n, 130, 64), zeros_and_ones(6, n, 64, 64)

    def program(lib: Any) -> Any:
        def f(x: Any, w: Any) -> Any:
            rank = lax.axis_index("x")

            def late_step(carry: Any, k: Any) -> Any:
                x, w = carry
                results = step(lib, x + late(rank, k, n).astype(x.dtype), w)
                return results, results

            return [v[None] for v in lax.scan(late_step, (x[0], w[0]), jnp.arange(4 * n))[1]]

        return sharded(f, mesh, P("x"), P("x"))

    arrays = [put(mesh, P("x"), v.astype(jnp.bfloat16)) for v in (x, w)]
    theirs = jax.jit(program(OF_LAX))(*arrays)
    mine = compiled(program(jax_intranode), arrays)
    for _ in range(3):
        check_like(mine(*arrays), theirs, 0)


def late(rank: Any, step: Any, n: int) -> Any:
    """Returns zero after wasting time on one rank, another one at each step."""
    loops = jnp.where(rank == step % n, 300 * (1 + step * 7 % 11), 0)
    return 0 * lax.fori_loop(0, loops, lambda i, s: jnp.sin(s + i), jnp.float32(0.5))


@case(plan=ALL)
def overlapped_chain_with_delays(plan: str) -> None:
    """Each rank in turn is late. Every call feeds the next one, with NCCL and psum in between."""

    def step(lib: Any, x: Any, w: Any) -> Any:
        h = lib.all_gather_matmul(x, w, "x")
        h = h + lib.psum(x[:1], "x") + lax.psum(x[-1:], "x")
        return lib.matmul_reduce_scatter(h % 3, w, "x") % 5, w

    check_with_delays(step, lambda f, args: overlapped(f, args, plan))


@case(plan=("pieces", "fused", "direct"))
def overlapped_without_dependence(plan: str) -> None:
    """Operations that may run in any order, over the groups of each axis and of both."""
    devices = len(jax.devices())
    mesh = cases.make_mesh((2, devices // 2), ("a", "x")) if devices >= 4 else line()
    x, w = zeros_and_ones(7, 32 * devices, 64), zeros_and_ones(8, 64, 64)
    over: list[Any] = ["x", *(["a", ("a", "x")] if devices >= 4 else [])]

    def program(lib: Any) -> Any:
        def f(x: Any, w: Any) -> Any:
            gathered = [lib.all_gather_matmul(x + k, w, axes) for k, axes in enumerate(over)]
            sums = [lib.matmul_reduce_scatter(x - k, w, axes) for k, axes in enumerate(over)]
            totals = [lib.matmul_all_reduce(k - x, w, axes) for k, axes in enumerate(over)]
            return [v.sum(0, keepdims=True) for v in (*gathered, *sums, *totals)]

        return sharded(f, mesh, (P(mesh.axis_names), P()), P(mesh.axis_names))

    arrays = [put(mesh, P(mesh.axis_names), x.astype(jnp.bfloat16))]
    arrays.append(put(mesh, P(), w.astype(jnp.bfloat16)))
    theirs = jax.jit(program(OF_LAX))(*arrays)
    mine = overlapped(program(jax_intranode), arrays, plan)
    for _ in range(4):
        check_like(mine(*arrays), theirs, 0)


@case(plan=("pieces", "fused", "fused_224", "wgrad"))
def overlapped_replayed(plan: str) -> None:
    """Replays from CUDA graphs; where addresses change, that process alone captures again."""
    mesh = line()
    n = mesh.size
    first = mesh.devices.flat[0]
    wgrad = overlapped_cases.PLANS[plan].wgrad
    x, w = zeros_and_ones(9, n, 64, 64), zeros_and_ones(10, n, 64, 64)

    def program(lib: Any) -> Any:
        def f(x: Any, w: Any) -> Any:
            v, u = x[0], w[0]
            for _ in range(4):
                if wgrad:
                    v, u = small_gradients(lib, v, u)
                else:
                    h = lib.all_gather_matmul(v, u, "x") % 3
                    v = lib.matmul_reduce_scatter(h, u, "x") % 3
            return (v + u)[None]

        return sharded(f, mesh, P("x"), P("x"))

    arrays = [put(mesh, P("x"), v.astype(jnp.bfloat16)) for v in (x, w)]
    theirs = jax.jit(program(OF_LAX))(*arrays)
    mine = overlapped_cases.both_gradients(program(jax_intranode), arrays, plan, 8)
    calls = 16 if wgrad else 8
    counts = []
    for _ in range(12):
        check_like(mine(*arrays), theirs, 0)
        counts.append(extension.handler_calls())
    if on_gpus():
        assert counts[-1] == counts[-4], f"handlers are still called: {counts}"
    before = jax_intranode.usage_counter()
    kept = []
    for k in range(9):
        result = mine(*arrays)
        check_like(result, theirs, 0)
        if first.process_index == jax.process_index():
            kept.append(jax.device_put(np.ones(1000 * k + 1, np.float32), first))
            kept.append(result if k % 3 == 1 else None)
    local = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
    if on_gpus():
        assert jax_intranode.usage_counter() - before == 9 * calls * local


@case()
def overlapped_large_offsets() -> None:
    """Arrays of more than 2 GiB and of 2^31 elements. Only GPUs have the memory."""
    if not on_gpus():
        pytest.skip("needs GPUs; arrays of 4 GiB are too large for this test on CPUs")
    mesh = line()
    n = mesh.size
    rows, k = (1 << 31) // 4096 // n + 8, 4096

    def f(w: Any) -> Any:
        rank = lax.axis_index("x")
        row = (rank * rows + jnp.arange(rows)) % 251
        x = jnp.zeros((rows, k), jnp.bfloat16).at[:, 0].set(row.astype(jnp.bfloat16))
        y, whole = jax_intranode.all_gather_matmul(x, w, "x", return_gathered=True)
        want = (jnp.arange(n * rows) % 251).astype(jnp.bfloat16)
        wrong = (y != want[:, None]).sum() + (whole[:, 0] != want).sum()
        wrong = wrong + (whole[:, 1:] != 0).sum()
        # [n * rows, 8] @ [8, 4096], of which each rank keeps its rows.
        part = jax_intranode.matmul_reduce_scatter(y, w.T, "x")
        back = n * jnp.where(jnp.arange(k) % k == 0, 8, 0) * row[:, None]
        return wrong[None], (part.astype(jnp.float32) != back.astype(jnp.bfloat16)).sum()[None]

    w = np.zeros((k, 8), np.float32)
    w[0] = 1
    arrays = [put(mesh, P(), w.astype(jnp.bfloat16))]
    program = overlapped(sharded(f, mesh, P(), P("x")), arrays, "whole")
    for counts in program(*arrays):
        check(counts, np.zeros(n, np.int32))
