"""Collective matmuls of global arrays, outside of shard_map: results and shardings of x @ w."""

import contextlib
import logging
import math
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_mesh, random
from collective_matmuls import collectives, float32_products, same, with_gradients  # noqa: F401
from devices import need_devices
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full

from jax_intranode import (
    all_gather_matmul,
    column_parallel_matmul,
    explain,
    matmul_all_reduce,
    matmul_reduce_scatter,
    row_parallel_matmul,
)
from jax_intranode._src.ops import fallback

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def line(kind: AxisType = AUTO) -> Mesh:
    """A mesh with the axis "model" only."""
    size = min(4, len(jax.devices()))
    return make_mesh((size,), ("model",)).update(axis_types=(kind,))


def grid(*kinds: AxisType) -> Mesh:
    """A mesh with the axes "data" and "model"."""
    need_devices(4)
    return make_mesh((2, 2), ("data", "model")).update(axis_types=kinds or (AUTO, AUTO))


def values(mesh: Mesh, *shapes_and_specs: Any, dtype: str = "float32") -> list[jax.Array]:
    return [
        jax.device_put(random(dtype, shape, seed), NamedSharding(mesh, spec))
        for seed, (shape, spec) in enumerate(shapes_and_specs)
    ]


def product(x: Any, w: Any) -> Any:
    return [x @ v for v in w] if isinstance(w, (list, tuple)) else x @ w


# Specs of x and of results whose sequence is divided, whose features are, and that are whole.
BY_SEQUENCE, BY_FEATURES, WHOLE = (None, "model", None), (None, None, "model"), (None, None, None)
W_BY_COLUMNS, W_BY_ROWS = (None, "model"), ("model", None)


def over_model(function: Any, **of: Any) -> Any:
    return lambda x, w, **more: function(x, w, "model", **of, **more)


gathering = over_model(all_gather_matmul, gather_axis=1)
scattering = over_model(matmul_reduce_scatter, scatter_dimension=1)
columns, rows = over_model(column_parallel_matmul), over_model(row_parallel_matmul)
columns_of_sequence = over_model(column_parallel_matmul, gather_axis=1)
rows_to_sequence = over_model(row_parallel_matmul, scatter_dimension=-2)
# Each function, the specs of x, w and the result on a line and on a grid with x's rows over "data".
CALLS: dict[str, tuple[Any, Any, Any, Any]] = {
    "all_gather_matmul": (gathering, BY_SEQUENCE, W_BY_COLUMNS, BY_FEATURES),
    "matmul_reduce_scatter": (scattering, BY_FEATURES, W_BY_ROWS, BY_SEQUENCE),
    "matmul_all_reduce": (over_model(matmul_all_reduce), BY_FEATURES, W_BY_ROWS, WHOLE),
    "column": (columns, WHOLE, W_BY_COLUMNS, BY_FEATURES),
    "column, sequence": (columns_of_sequence, BY_SEQUENCE, W_BY_COLUMNS, BY_FEATURES),
    "row": (rows, BY_FEATURES, W_BY_ROWS, WHOLE),
    "row, sequence": (rows_to_sequence, BY_FEATURES, W_BY_ROWS, BY_SEQUENCE),
}
EVERY = pytest.mark.parametrize("name", CALLS)


# Values, gradients and shardings.

ONE = (min(4, len(jax.devices())),)
# The lengths of "model", or of "data" and "model"; their types; how the mesh is given; the dtype.
MESHES = [
    (ONE, (AUTO,), "set_mesh", "float32"),
    (ONE, (EXPLICIT,), "set_mesh", "float32"),
    full(ONE, (AUTO,), "set_mesh", "bfloat16"),
    full(ONE, (AUTO,), "with", "float32"),
    full(ONE, (AUTO,), "argument", "float32"),
    (ONE, (EXPLICIT,), "with", "float32"),
    full(ONE, (EXPLICIT,), "argument", "float32"),
    full((2, 2), (AUTO, AUTO), "set_mesh", "float32"),
    ((2, 2), (EXPLICIT, EXPLICIT), "set_mesh", "float32"),
    ((2, 2), (EXPLICIT, AUTO), "set_mesh", "float32"),
    full((1, 2), (AUTO, AUTO), "set_mesh", "float32"),  # an axis of one device needs no name
    ((2, 1), (AUTO, AUTO), "set_mesh", "float32"),  # a group of one device sends nothing
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of `with mesh:`
@EVERY
@pytest.mark.parametrize(("shape", "kinds", "context", "dtype"), MESHES)
def test_as_the_product_of_global_arrays(
    name: str, shape: tuple[int, ...], kinds: tuple[AxisType, ...], context: str, dtype: str
) -> None:
    """On a mesh of data and model no operand is gathered over data: the shard_map is all manual."""
    need_devices(math.prod(shape))
    f, of_x, of_w, of_y = CALLS[name]
    mesh = make_mesh(shape, ("data", "model")[-len(shape) :]).update(axis_types=kinds)
    rows = "data" if "data" in mesh.shape else None
    of: dict[str, Any] = {"mesh": mesh} if context == "argument" else {}
    if mesh.shape.get("data", 1) > 1 and kinds[0] is AUTO:
        of["batch_axes"] = "data"
    with jax.set_mesh(mesh) if context == "set_mesh" else contextlib.ExitStack() as entered:
        if context == "with":
            entered.enter_context(mesh)
        specs = P(rows, *of_x[1:]), P(*of_w)
        x, w = values(mesh, ((4, 8, 12), specs[0]), ((12, 16), specs[1]), dtype=dtype)

        def call(x: Any, w: Any) -> Any:
            return f(x, w, **of)

        program = with_gradients(call)
        y, gradients = jax.jit(program)(x, w)
        eager, calls = call(x, w), explain(program)(x, w)
    expected = with_gradients(product)(np.asarray(x), np.asarray(w))
    tolerance = 2e-5 if dtype == "float32" else 0.03
    same((y, gradients), expected, tolerance)
    same(eager, expected[0], tolerance)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(rows, *of_y[1:])), 3)
    if not rows:
        for gradient, operand in zip(gradients, (x, w), strict=True):
            assert gradient.sharding.is_equivalent_to(operand.sharding, operand.ndim)
    ours = {c.algorithm != "lax" and c.group_size for c in calls if c.axes == ("model",)}
    assert ours == ({mesh.shape["model"]} if mesh.shape["model"] > 1 else {False}), calls
    # The gradient of w, which is the same for all of the batch, is JAX's sum.
    over_data = {c.algorithm for c in calls if c.axes == ("data",)}
    assert over_data == ({"lax"} if mesh.shape.get("data", 1) > 1 else set()), calls


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_operands_that_are_sharded_in_another_way(kind: AxisType) -> None:
    """Weights that are divided over data (FSDP), or not at all, are resharded."""
    mesh = grid(kind, kind)
    of = {} if kind is EXPLICIT else {"batch_axes": "data"}
    with jax.set_mesh(mesh):
        x, w, v = values(
            mesh, ((4, 8, 12), P("data")), ((12, 16), P("data", "model")), ((16, 12), P())
        )

        def block(x: Any, w: Any, v: Any) -> Any:
            return row_parallel_matmul(
                column_parallel_matmul(x, w, "model", **of), v, "model", **of
            )

        z, gradients = jax.jit(with_gradients(block))(x, w, v)
    expected = with_gradients(lambda x, w, v: x @ w @ v)(*map(np.asarray, (x, w, v)))
    same((z, gradients), expected)
    assert gradients[1].sharding.is_equivalent_to(w.sharding, 2) or kind is AUTO


# What runs.


def test_a_layer_has_no_collective_of_xla() -> None:
    """Forward and backward pass of a layer: two sums, or two gathers and two scatters; all ours."""
    mesh = line()
    with jax.set_mesh(mesh):
        x, w, v = values(
            mesh, ((2, 8, 12), P()), ((12, 16), P(None, "model")), ((16, 12), P("model", None))
        )

        def layer(x: Any, w: Any, v: Any, sequence_axis: Any) -> Any:
            y = column_parallel_matmul(x, w, "model", gather_axis=sequence_axis)
            return row_parallel_matmul(jnp.tanh(y), v, "model", scatter_dimension=sequence_axis)

        for sequence_axis, expected in (
            (None, {"psum": 2}),
            (1, {"all_gather": 2, "psum_scatter": 2}),
        ):
            program = with_gradients(lambda x, w, v, k=sequence_axis: layer(x, w, v, k))
            assert collectives(program, x, w, v) == expected
            placed = jax.device_put(
                x, NamedSharding(mesh, P(None, "model" if sequence_axis else None))
            )
            compiled = jax.jit(program).lower(placed, w, v).compile().as_text()
            assert not re.search(r"(all-reduce|all-gather|reduce-scatter|all-to-all)\(", compiled)


def test_a_mesh_axis_that_is_not_named_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    mesh = grid()
    reason = "a partly manual mesh: neither axis_name nor batch_axes has 'data'"
    with jax.set_mesh(mesh):
        for name in ("all_gather_matmul", "row"):
            f, of_x, of_w, _ = CALLS[name]
            x, w = values(mesh, ((4, 8, 12), P("data", *of_x[1:])), ((12, 16), P(*of_w)))
            with (
                caplog.at_level(logging.INFO, "jax_intranode"),
                mock.patch.object(fallback, "_logged", set()),  # they have one call site
            ):
                ours = jax.jit(with_gradients(f))(x, w)
            same(ours, with_gradients(product)(np.asarray(x), np.asarray(w)))
            calls = explain(with_gradients(f))(x, w)
            assert calls and {(call.algorithm, call.reason) for call in calls} == {("lax", reason)}
            assert f"falls back to jax.lax: {reason}" in caplog.text, name
            caplog.clear()


# Where it is called.


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map_over_another_axis(check_vma: bool) -> None:
    """The axis that is not bound yet is that of global arrays. Nested shard_maps fall back."""
    mesh = grid()
    x, w = values(mesh, ((4, 8, 12), P("data", "model")), ((12, 16), P(None, "model")))

    @jax.shard_map(
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=check_vma,
    )
    def over_data(x: Any, w: Any) -> Any:
        return column_parallel_matmul(x, w, "model", gather_axis=1)

    # With check_vma=True JAX can't transpose a shard_map in a shard_map that keeps residuals.
    of = (lambda f: f) if check_vma else with_gradients
    same(jax.jit(of(over_data))(x, w), of(product)(*map(np.asarray, (x, w))))
    (call,) = explain(over_data)(x, w)
    assert call.algorithm == "lax" and call.reason


# Transformations.


@EVERY
@pytest.mark.parametrize(
    "dims",
    [(0, 2), *(full(d) for d in ((0, None), (3, None), (None, 0)))],
    ids=str,
)
def test_vmap(name: str, dims: Any) -> None:
    f = CALLS[name][0]
    mesh = line()
    shapes = [[2, 8, 12], [12, 16]]
    for shape, d in zip(shapes, dims, strict=True):
        if d is not None:
            shape.insert(d, 3)
    x, w = (random("float32", shape, k) for k, shape in enumerate(shapes))
    with jax.set_mesh(mesh):
        ours = jax.jit(with_gradients(jax.vmap(f, dims)))(x, w)
    same(ours, jax.jit(with_gradients(jax.vmap(product, dims)))(x, w), 1e-4)


# JAX can't lower a psum_scatter in a shard_map that leaves explicit axes.
@pytest.mark.parametrize("name", ["matmul_all_reduce", "column", "row"])
def test_vmap_over_a_divided_batch(name: str) -> None:
    """Explicit axes tell that the batch is divided. shard_map can't bind its axis, so lax runs."""
    f, of_x, of_w, of_y = CALLS[name]
    mesh = grid(EXPLICIT, EXPLICIT)
    with jax.set_mesh(mesh):
        x, w = values(mesh, ((4, 2, 8, 12), P("data", *of_x)), ((12, 16), P(*of_w)))
        mapped = with_gradients(jax.vmap(f, (0, None)))
        y, gradients = jax.jit(mapped)(x, w)
        calls = explain(mapped)(x, w)
    same((y, gradients), with_gradients(product)(np.asarray(x), np.asarray(w)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", *of_y)), 4)
    reason = "a vmap whose batch is divided over the mesh axes 'data'"
    assert calls and {(call.algorithm, call.reason) for call in calls} == {("lax", reason)}


def test_explicit_sharding_that_does_not_fit() -> None:
    """JAX itself would refuse it, or communicate without being asked."""
    mesh = line(EXPLICIT)
    with jax.set_mesh(mesh):
        x, w = values(mesh, ((8, 12), P("model")), ((12, 16), P("model", None)))
        with pytest.raises(ValueError, match=r"dimension 0 of x, .* is sharded over 'model'"):
            column_parallel_matmul(x, jax.sharding.reshard(w, P(None, "model")), "model")
        with pytest.raises(ValueError, match=r"of w, .* needs the sharding .*jax.sharding.reshard"):
            column_parallel_matmul(x, w, "model", gather_axis=0)
