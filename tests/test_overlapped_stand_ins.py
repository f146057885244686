"""What is lowered where collective matmuls overlap; collectives and dots stand in."""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import collective_matmuls as matmuls
import jax
import jax.numpy as jnp
import pytest
from cases import line
from collective_matmuls import N, float32_products, over_x, values, with_gradients  # noqa: F401
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode import all_gather_matmul, explain, matmul_all_reduce, matmul_reduce_scatter
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.ops import overlapped_call
from jax_intranode._src.ops.collective import (
    AllGatherParams,
    PsumScatterParams,
    all_gather_p,
    psum_scatter_p,
)
from jax_intranode._src.selection.overlap.plan import Plan

pytestmark = pytest.mark.one_version


def compute(
    site: Any, axes: Any, request: overlapped_call.Request, size: int, operands: Sequence[Any]
) -> list[Any]:
    """What an overlapped operation does."""
    assert not request.gathered
    sizes, terms = request.sizes, len(request.sizes.ks)
    operands = request.operands(*operands)
    xs, ws, cts = operands[:terms], operands[terms : 2 * terms], operands[2 * terms :]
    if request.transposed:
        assert {w.shape for w in ws} == {(sizes.ns[0], k) for k in sizes.ks}
        ws = [w.T for w in ws]
    assert [x.shape[-1] for x in xs] == list(sizes.ks)
    assert [ct.shape[-1] for ct in cts] == list(sizes.ns[: len(cts)])
    rows = tuple(range(xs[0].ndim - 1))
    if sizes.operation == "all_gather_matmul":
        assert xs[0].size == sizes.outer * sizes.rows * sizes.ks[0]
        gathers = AllGatherParams(axes, request.axis, True, size)
        (whole,) = all_gather_p.bind_at(site, xs[0], params=gathers)
        return [whole @ ws[0], *(jnp.tensordot(ct, whole, (rows, rows)) for ct in cts)]
    assert xs[0].size == sizes.outer * sizes.rows * size * sizes.ks[0]
    total = sum(x @ w for x, w in zip(xs, ws, strict=True))
    scatters = PsumScatterParams(axes, request.axis, True, size)
    (part,) = psum_scatter_p.bind_at(site, total, params=scatters)
    return [part, *(jnp.tensordot(cts[0], x, (rows, rows)) for x in xs[: request.wgrads])]


def standing_in(plan: Plan, of_both: list[Any] | None = None) -> Any:
    """On CPUs nothing is overlapped. Dots and our collectives stand in for what is.

    With a list, only requests for both gradients are granted, and go into it.
    """

    def find(
        site: Any, axes: Any, request: overlapped_call.Request | str
    ) -> overlapped_call.Overlapped | str:
        if isinstance(request, str):
            return request
        if of_both is not None:
            if not request.wgrads:
                return "one gradient alone"
            of_both.append(request)
        groups = partition_lib.partition(site.mesh, tuple(axes))

        class StandIn(overlapped_call.Overlapped):
            def __call__(self, *operands: Any) -> list[Any]:
                return compute(site, axes, request, groups.group_size, operands)

        return StandIn(groups, request, plan)

    return mock.patch.object(overlapped_call, "find", find)


# An overlapped all-reduce.


@pytest.fixture
def overlapping() -> Iterator[None]:
    with standing_in(Plan()):
        yield


@matmuls.BOTH
@pytest.mark.parametrize("leading", [(2 * N,), (3, N), (N // 2, 6)])
def test_overlapped_sum(overlapping: None, leading: tuple[int, ...], check_vma: bool) -> None:
    """It, its tangents and batches are a reduce-scatter and an all-gather of all rows."""

    def program(lib: Any) -> Any:
        by_columns = P(*[None] * len(leading), "x")

        def body(x: Any, w: Any) -> Any:
            return lib.matmul_all_reduce(x, w, "x")

        f = over_x(body, (by_columns, P("x")), P(), check_vma)

        def both(x: Any, w: Any) -> Any:
            tangents = jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w)))
            batch = jax.vmap(f, (0, None))(jnp.stack([x, -x]), w)
            return with_gradients(f, (0, 1))(x, w), tangents, batch

        return both

    args = values((*leading, 2 * N), (2 * N, 3))
    matmuls.like_lax(program, *args)
    # 1 forward, 2 with tangents, 1 for the batch. Backward as without overlap.
    expected = {"psum_scatter": 4, "all_gather": 4} | ({} if check_vma else {"psum": 1})
    assert matmuls.collectives(program(jax_intranode), *args) == expected


def test_overlapped_gradient_of_column_parallel_matmul(overlapping: None) -> None:
    """The gradient of an x that all ranks have is one sum for all matrices; overlapped, too."""
    x, *ws = values((3, 2 * N, 6), (6, 4 * N), (6, 2 * N))

    def ours(x: Any, ws: Any) -> Any:
        return jax_intranode.column_parallel_matmul(x, ws, "x")

    gradient = with_gradients(ours, (0, 1))
    with jax.set_mesh(line(N)):
        found = jax.jit(gradient)(x, ws)
        assert matmuls.collectives(gradient, x, ws) == {"psum_scatter": 1, "all_gather": 1}
    matmuls.same(found, with_gradients(lambda x, ws: [x @ w for w in ws], (0, 1))(x, ws))


def test_explain_of_an_overlapped_sum(overlapping: None) -> None:
    def body(x: Any, w: Any) -> Any:
        return matmul_all_reduce(x, w, "x"), matmul_all_reduce(x[1:], w, "x")

    x, w = values((2 * N, 5), (5, 3))
    total, gathered, odd = explain(over_x(body, (P(), P())))(x, w)
    assert (total.operation, total.algorithm) == ("matmul_all_reduce", "matmul_reduce_scatter")
    assert total.reason.startswith("overlapped") and total.nbytes == 2 * N * 3 * 4
    assert (gathered.operation, gathered.algorithm) == ("all_gather", "all_gather")
    assert gathered.shapes == ((2, 3),) and gathered.source == total.source
    assert (odd.operation, odd.algorithm) == ("matmul_all_reduce", "one_shot")
    why = f"psum after the matmul, not overlapped ({2 * N - 1} rows, no multiple of {N} ranks); "
    assert odd.reason.startswith(why)


# Both gradients as one call.


@pytest.fixture
def both_in_one_call() -> Iterator[list[overlapped_call.Request]]:
    """Yields the requests that were granted."""
    granted: list[overlapped_call.Request] = []
    with standing_in(Plan(tile_columns=128, wgrad=True), granted):
        yield granted


@matmuls.BOTH
@pytest.mark.parametrize("leading", [(), (3,)])
def test_both_gradients_in_one_call(
    both_in_one_call: list[overlapped_call.Request], leading: tuple[int, ...], check_vma: bool
) -> None:
    axis = len(leading)
    none = [None] * axis

    def program(lib: Any) -> Any:
        def body(x: Any, w: Any, u: Any, v: Any) -> Any:
            # The first matrix is no argument: terms with weight gradients are moved before it.
            a, b, c = lib.all_gather_matmul(x, [jnp.ones((5, 4)), w, u], "x", gather_axis=axis)
            y = jnp.tanh(a[..., :3] * b + c[..., :3])
            return lib.matmul_reduce_scatter(y, v, "x", scatter_dimension=axis)

        columns = P(None, "x")
        f = over_x(body, (P(*none, "x"), columns, columns, P("x")), P(*none, "x"), check_vma)
        return with_gradients(f, (0, 1, 2, 3))

    args = values((*leading, 2 * N, 5), (5, 3 * N), (5, 7 * N), (3 * N, 6))
    matmuls.like_lax(program, *args)
    assert matmuls.collectives(program(jax_intranode), *args) == {
        "all_gather": 2,
        "psum_scatter": 2,
    }
    of_scatter, of_gather = both_in_one_call[-2:]
    for request in (of_scatter, of_gather):
        sizes = request.sizes
        assert (request.axis, sizes.outer, sizes.rows) == (axis, 3 if leading else 1, 2)
    found = [(r.sizes.ks, r.sizes.ns, r.wgrads) for r in (of_scatter, of_gather)]
    assert found == [((6,), (3,), 1), ((3, 7, 4), (5,), 2)]


def test_gradients_that_are_not_one_call(both_in_one_call: list[overlapped_call.Request]) -> None:
    """A reduce-scatter along the last dimension, and one gradient alone."""

    def scatters(x: Any, w: Any) -> Any:
        return matmul_reduce_scatter(x, w, "x", scatter_dimension=1)

    def products(x: Any, w: Any, v: Any) -> Any:
        return matmul_reduce_scatter(all_gather_matmul(x, w, "x"), v, "x")

    columns = P(None, "x")
    args = values((2 * N, 5), (5, 3 * N), (3 * N, 5))
    calls = [*explain(with_gradients(over_x(scatters, P(), columns), (0, 1)))(*args[:2])]
    f = over_x(products, (P("x"), columns, P("x")))
    for argnum in range(3):
        calls += explain(with_gradients(f, (argnum,)))(*args)
    assert not both_in_one_call
    assert not any(call.reason.startswith("overlapped") for call in calls)
