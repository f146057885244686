"""Matmuls of few rows: what takes their kernel, what it computes, and with which bits."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, random, sharded
from collective_matmuls import BOTH, N, collectives, over_x, same, with_gradients
from devices import need_devices, need_gpus
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode import column_parallel_matmul, explain, matmul_all_reduce
from jax_intranode._src import reasons
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.native import definitions
from jax_intranode._src.operations import total
from jax_intranode._src.ops import collective, few_rows, local_matmuls
from jax_intranode._src.ops.collective import PsumParams, psum_p
from jax_intranode._src.selection import generations, select, table

MOST = definitions.MOST_FEW_ROWS

# The selection.


def selected(rows: int = 1, k: int = 4096, n: int = 4096, **changes: Any) -> select.Selection:
    facts: dict[str, Any] = {
        "operation": "matmul_all_reduce",
        "dtype": "bfloat16",
        "world_size": 2,
        "hardware": "hopper",
        "epoch_buffer_bytes": 1 << 24,
    } | changes
    return select.select_few_rows(facts.pop("operation"), rows=rows, k=k, n=n, **facts)


def limit(k: int = 4096, n: int = 4096) -> int:
    return select.few_rows_limit("hopper", "matmul_all_reduce", 2, k, n)


def test_up_to_a_limit_all_numbers_of_rows_take_the_kernel() -> None:
    """The limit follows from the matrix and the group, so a row has one result."""
    assert 0 < limit() <= MOST
    for rows in range(1, limit() + 1):
        assert selected(rows).algorithm == "few_rows"
    assert f"of at most {limit()} for 4096 x 4096" in selected().reason
    more = selected(limit() + 1)
    assert more.algorithm == "lax" and more.cause == reasons.NOT_FASTER


def test_what_does_not_take_the_kernel() -> None:
    none = [selected(hardware=name) for name in ("ampere", "cpu")]
    none += [selected(k=4100), selected(n=4100), selected(k=1 << 20, n=1 << 20)]
    none += [selected(algorithm="lax"), selected(topology="hybrid_cube_mesh")]
    assert [found.algorithm for found in none] == ["lax"] * len(none)


def test_a_slot_for_every_rank_has_to_fit() -> None:
    """For the most rows: or a row would have other bits alone and among so many others."""
    enough = limit() * 2 * 2 * 4096
    for rows in (1, limit()):
        assert selected(rows, epoch_buffer_bytes=enough).algorithm == "few_rows"
        assert selected(rows, epoch_buffer_bytes=enough - 1).algorithm == "lax"
    column = {"operation": "column_parallel_matmul", "epoch_buffer_bytes": 0}
    assert selected(n=2048, **column).algorithm == "few_rows"  # nothing is sent


# Programs, where dots and our psum stand in for the kernel.


def any_rows(measured: bool = True) -> Any:
    """A table in which all matmuls of few rows take the kernel."""
    operations = ("matmul_all_reduce", "column_parallel_matmul")
    row = table.FewRows(1 << 40, MOST, measured)
    return {("hopper", name, world): (row,) for name in operations for world in range(2, 9)}


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Takes the kernel on CPU devices, too. The list gets the operation and rows of each call."""
    need_devices(2)
    monkeypatch.setattr(table, "FEW_ROWS", any_rows())
    taken: list[tuple[str, int]] = []

    class StandIn(few_rows.FewRows):
        def __call__(self, x: Any, w: Any) -> list[Any]:
            rows = x.size // x.shape[-1]
            taken.append((self.operation, rows))
            y = local_matmuls.dot(x, w, x.dtype, None, False)
            if not self.sums:
                return [y]
            if self.groups.group_size == 1:
                return [lax.psum(y, "x")]
            return psum_p.bind(y, params=PsumParams(("x",), False))

    facts = collective.facts_of
    monkeypatch.setattr(collective, "facts_of", lambda mesh: facts(mesh) | {"hardware": "hopper"})
    monkeypatch.setattr(few_rows, "FewRows", StandIn)
    return taken


def bf16(*shape: int, seed: int = 0) -> Any:
    return random("bfloat16", shape, seed)


@BOTH
def test_a_sum_and_its_derivatives(standing_in: list[tuple[str, int]], check_vma: bool) -> None:
    x, w = bf16(2, 3, 8 * N), bf16(8 * N, 16, seed=1)

    def program(multiply: Any) -> Any:
        f = over_x(multiply, (P(None, None, "x"), P("x")), P(), check_vma)

        def run(x: Any, w: Any) -> Any:
            tangents = jax.jvp(f, (x, w), (x, w))
            batch = jax.vmap(f, (0, None))(jnp.stack([x, -x]), w)
            return with_gradients(f, (0, 1))(x, w), tangents, batch

        return jax.jit(run)

    same(program(ours)(x, w), program(lax_s)(x, w), 0.02)
    # Forward and as a batch. The tangent has two terms, which is no matmul of few rows.
    assert set(standing_in) == {("matmul_all_reduce", 6), ("matmul_all_reduce", 12)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes(standing_in: list[tuple[str, int]], dtype: str) -> None:
    """What the kernel can't multiply stays a matmul and a psum."""
    body = partial(matmul_all_reduce, axis_name="x", preferred_element_type="float32")
    x, w = random(dtype, (2, 8), 0), random(dtype, (8, 16), 1)
    found = jax.jit(over_x(body, (P(), P()), P(), False))(x, w)
    assert found.dtype == "float32" and not standing_in


@BOTH
def test_columns_and_their_derivatives(standing_in: list[tuple[str, int]], check_vma: bool) -> None:
    """Where JAX sums the gradient of x itself, the kernel is taken, too."""
    x, w, v = bf16(3, 8), bf16(8, 16 * N, seed=1), bf16(8, 4 * N, seed=2)

    def program(multiply: Any) -> Any:
        f = over_x(multiply, (P(), P(None, "x"), P(None, "x")), P(None, "x"), check_vma)

        def run(*args: Any) -> Any:
            batch = jax.vmap(f, (0, None, None))(jnp.stack([x, -x]), *args[1:])
            return with_gradients(f, (0, 1, 2))(*args), batch

        return jax.jit(run)

    ours = program(lambda x, w, v: column_parallel_matmul(x, [w, v], "x"))
    same(ours(x, w, v), program(lambda x, w, v: [x @ w, x @ v])(x, w, v), 0.02)
    # v has 4 columns on each rank.
    assert set(standing_in) == {("column_parallel_matmul", rows) for rows in (3, 6)}


@pytest.mark.parametrize("measured", [True, False])
def test_unedited_programs_take_what_is_measured(
    standing_in: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    monkeypatch.setattr(table, "FEW_ROWS", any_rows(measured))

    def body(heads: Any, w: Any) -> Any:
        return lax.psum(heads.reshape(2, -1) @ w, "x")

    heads, w = bf16(2, 4 * N, 8), bf16(32 * N, 16, seed=1)
    f = over_x(body, (P(None, "x"), P("x")), P(), False)
    wanted = jax.jit(f)(heads, w)
    with jax_intranode.accelerate():
        same(jax.jit(f)(heads, w), wanted, 0.02)
    assert standing_in == ([("matmul_all_reduce", 2)] if measured else [])


def ours(x: Any, w: Any) -> Any:
    return matmul_all_reduce(x, w, "x")


def lax_s(x: Any, w: Any) -> Any:
    return lax.psum(x @ w, "x")


def whole(multiply: Callable[..., Any]) -> Callable[..., Any]:
    return over_x(multiply, (P(None, "x"), P("x")), P(), False)


def on_global_arrays(x: Any, w: Any) -> Any:
    return matmul_all_reduce(x, w, "x", mesh=line(N))


def placed(x: Any, w: Any) -> Any:
    """A matmul that XLA's partitioner divides, and sums."""

    def place(v: Any, spec: P) -> Any:
        return lax.with_sharding_constraint(v, NamedSharding(line(N), spec))

    return place(place(x, P(None, "x")) @ place(w, P("x")), P())


def in_scan(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """Layers of equal shapes, whose weights are stacked."""
    return lambda x, ws: lax.scan(lambda x, w: (multiply(x, w), None), x, ws)[0]


def columns_again(x: Any, w: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, x: column_parallel_matmul(x, w, "x"), x)


X, STACK = bf16(2, 8 * N), bf16(3, 8 * N, 16, seed=1) * 4


def of_stack(multiply: Callable[..., Any], matrix: Callable[..., Any]) -> Callable[..., Any]:
    def body(x: Any, ws: Any) -> Any:
        return multiply(x, matrix(ws))

    return over_x(body, (P(None, "x"), P(None, "x")), P(), False)


def dequantized(w: Any) -> Any:
    return w.astype("int8").astype("bfloat16") * 0.5


LAYERS = bf16(2, 8 * N), bf16(3, 8 * N, 8 * N, seed=1) / 8
# XLA would copy each layer's weights for the kernel.
IN_LOOPS = [
    *(over_x(in_scan(f), (P(), P()), P(), False) for f in (ours, lax_s, jax.checkpoint(ours))),
    over_x(in_scan(columns_again), (P(), P()), P(), False),
    *(in_scan(f) for f in (whole(ours), whole(lax_s), jax.jit(whole(lax_s)))),
    *(in_scan(f) for f in (on_global_arrays, placed)),
]
# XLA's matmul reads a slice or a shorter dtype itself. It would write w for the kernel.
OF_COMPUTED = [
    *(of_stack(f, lambda ws: ws[1]) for f in (ours, lax_s, jax.jit(lax_s))),
    *(of_stack(f, lambda ws: ws[0, :, :8]) for f in (ours, lax_s, jax.checkpoint(lax_s))),
    *(of_stack(f, lambda ws: dequantized(ws[0])) for f in (ours, lax_s)),
    of_stack(lambda x, w: lax.psum(jnp.einsum("bd,edf->bef", x, w), "x"), lambda ws: ws),
    of_stack(lambda x, w: lax.cond(True, lax_s, lax_s, x, w), lambda ws: ws[1]),
    lambda x, ws: whole(lax_s)(x, ws[1]),
    lambda x, ws: jax.jit(whole(lax_s))(x, dequantized(ws[1])),
    lambda x, ws: placed(x, ws[1]),
    lambda x, ws: placed(x, dequantized(ws[1])),
]
OF_ARGUMENT = [
    lambda x, w: whole(lax_s)(2 * x, w),
    jax.jit(whole(jax.checkpoint(jax.jit(lax_s)))),
    whole(lambda x, w: lax_s(x, w.reshape(8, 2, 8).reshape(8, 16))),
    whole(lambda x, w: ours(x, w.reshape(8, 2, 8).reshape(8, 16))),
    *(whole(lambda x, w, f=f: f(x, w[None][0])) for f in (ours, lax_s)),
    on_global_arrays,
    lambda x, w: placed(2 * x, w),
]


@pytest.mark.parametrize(
    ("program", "args", "takes"),
    [
        *((program, LAYERS, False) for program in IN_LOOPS),
        *((program, (X, STACK), False) for program in OF_COMPUTED),
        *((program, (X, STACK[0]), True) for program in OF_ARGUMENT),
    ],
)
def test_which_programs_take_the_kernel(
    standing_in: list[tuple[str, int]], program: Callable[..., Any], args: Any, takes: bool
) -> None:
    specs = (P(None, "x"), P("x")) if takes else (P(), P())
    args = [
        jax.device_put(v, NamedSharding(line(N), spec)) for v, spec in zip(args, specs, strict=True)
    ]
    wanted = jax.jit(program)(*args)
    with jax_intranode.accelerate(auto=True):
        same(jax.jit(program)(*args), wanted, 0.05)
        found = [(call.algorithm, call.operation) for call in explain(program)(*args)]
    if takes:
        assert found == [("few_rows", "matmul_all_reduce")]
    assert takes or "few_rows" not in dict(found)
    assert set(standing_in) == ({("matmul_all_reduce", 2)} if takes else set())


@pytest.mark.parametrize("operation", ["matmul_all_reduce", "column_parallel_matmul"])
def test_lowered_call(operation: str) -> None:
    """What XLA gets: one call, whose attributes are the same in all processes."""
    need_devices(2)
    mesh = line(N)

    def find(site: Any, operation: str, operands: Any, params: Any) -> few_rows.FewRows:
        groups = partition_lib.partition(mesh, params.axes)
        return few_rows.FewRows(operation, groups, select.Selection("few_rows", ""))

    def body(x: Any, w: Any) -> Any:
        return getattr(jax_intranode, operation)(x, w, "x")

    out = P() if operation == "matmul_all_reduce" else P(None, "x")
    f = sharded(body, mesh, (P(), P()), out, False)
    with mock.patch.object(few_rows, "find", find):
        lowered = jax.jit(f).lower(bf16(3, 8), bf16(8, 16))
        assert collectives(f, bf16(3, 8), bf16(8, 16)) == {"few_rows": 1}
    text = lowered.as_text()
    assert "dot_general" not in text and "@jax_intranode_few_rows" in text
    assert f"sums = {int(operation == 'matmul_all_reduce')} : i32" in text


# The kernel.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("k, n", [(1024, 4096), (4096, 3072), (1000, 1032), (72, 8)])
def test_values_on_gpus(k: int, n: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are those of float64, but for rounding; sums are those of products, to the bit.

    A row alone has the bits of the row in a batch.
    """
    need_gpus()
    need_devices(2)
    kind = jax.devices()[0].device_kind
    if generations.hardware_of("gpu", kind) != "hopper":
        pytest.skip(f"the kernel of few rows is for Hopper GPUs; this is {kind}")
    monkeypatch.setattr(table, "FEW_ROWS", any_rows())
    x, w = random(dtype, (MOST, k * N), 0), random(dtype, (k * N, n), 1)

    def run(operation: str, x: Any) -> np.ndarray:
        def body(x: Any, w: Any) -> Any:
            y = getattr(jax_intranode, operation)(x, w, "x")
            return y[None]

        f = over_x(body, (P(None, "x"), P("x")), P("x"), False)
        text = jax.jit(f).lower(x, w).as_text()
        assert "jax_intranode_few_rows" in text
        return np.asarray(jax.jit(f)(x, w))

    products = run("column_parallel_matmul", x)
    xs, ws = (np.asarray(v, np.float64) for v in (x, w))
    for rank, product in enumerate(products):
        columns = slice(rank * k, (rank + 1) * k)
        exact = xs[:, columns] @ ws[columns]
        bound = k * 2.0**-24 * (abs(xs[:, columns]) @ abs(ws[columns]))
        ulp = 2.0 ** (-8 if dtype == "bfloat16" else -11)
        error = abs(product.astype(np.float64) - exact)
        assert (error <= bound + (abs(exact) + bound) * ulp + 1e-7).all()
    wanted = total(products)
    for rows in (1, 2, 3, 8, 15, 16, 17, 32, 33, MOST):
        sums = run("matmul_all_reduce", x[:rows])
        for found in sums:
            np.testing.assert_array_equal(found.view("uint16"), wanted[:rows].view("uint16"))
    (alone, *_) = run("matmul_all_reduce", x[MOST - 1 :])
    np.testing.assert_array_equal(alone.view("uint16"), wanted[MOST - 1 :].view("uint16"))
