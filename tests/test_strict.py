"""JAX_INTRANODE_STRICT=1: which fallbacks are errors, and what the errors say."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, make_mesh, sharded
from devices import need_devices
from jax import export, lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.group import agreed
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.selection import config, select

N = len(jax.devices())
X = jax.ShapeDtypeStruct((N, 4 * N), jnp.float32)  # float32[1, 4 N] on each device
WHOLE = [list(range(N))]


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    need_devices(2)
    with configured():
        yield
    jax_intranode.uninstall()


def configured(**values: Any) -> Any:
    changed = dataclasses.replace(config.get(), **{"strict": True, **values})
    return mock.patch.object(config, "get", lambda: changed)


def over_x(body: Callable[..., Any], check_vma: bool = False) -> Any:
    """A function of one array, of which each device has a shard."""
    return sharded(body, line(), P("x"), P("x"), check_vma)


def lower(body: Callable[..., Any]) -> Any:
    return jax.jit(over_x(body)).lower(X)


def partly_manual(body: Callable[..., Any]) -> Any:
    need_devices(4)
    mesh = make_mesh((2, N // 2), ("auto", "x"))
    return jax.shard_map(
        body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
    )


# Calls of this package.

REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dtype": (lambda v: jax_intranode.psum(v > 0, "x"), "psum at .*: dtype bool; supported"),
    "groups": (
        lambda v: jax_intranode.pmean(v, "x", axis_index_groups=WHOLE),
        "psum at .*: axis_index_groups",
    ),
    "all_gather_groups": (
        lambda v: jax_intranode.all_gather(v, "x", axis_index_groups=WHOLE),
        "all_gather at .*: axis_index_groups",
    ),
    "psum_scatter_dtype": (
        lambda v: jax_intranode.psum_scatter(v > 0, "x", scatter_dimension=1, tiled=True),
        "psum_scatter at .*: dtype bool",
    ),
    "constant": (lambda v: jax_intranode.all_gather(np.ones(3), "x"), "a constant"),
    "axis_of_vmap": (
        lambda v: jax.vmap(lambda u: jax_intranode.psum(u, "i"), axis_name="i")(v),
        "axis 'i' is not one that shard_map has bound",
    ),
    "hidden_axis": (
        lambda v: jax.vmap(lambda u: jax_intranode.psum(u, "x"), axis_name="x")(v),
        "vmap hides that one",
    ),
    "matmul_dtype": (
        lambda v: jax_intranode.matmul_all_reduce(
            v.astype(jnp.complex64), v.T.astype(jnp.complex64), "x"
        ),
        "matmul_all_reduce at .*: dtype complex64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fallback_is_an_error(name: str) -> None:
    """`explain` has the same reason."""
    body, reason = REFUSED[name]
    with pytest.raises(RuntimeError, match=reason):
        lower(body)
    with configured(strict=False):
        calls = jax_intranode.explain(over_x(body))(X)
    assert any(
        c.algorithm == "lax" and re.search(reason.split(" at .*: ")[-1], c.reason) for c in calls
    )


def test_error_says_what_where_why_and_what_to_do() -> None:
    def body(v: Any) -> Any:
        return jax_intranode.psum(v.astype(jnp.complex64), "x")

    with pytest.raises(RuntimeError) as raised:
        lower(body)
    source = f"{__file__}:{body.__code__.co_firstlineno + 1} (body)"
    assert str(raised.value) == (
        f"jax_intranode.psum at {source} falls back to jax.lax: "
        f"{select.unsupported_dtype('psum', 'complex64')}. JAX_INTRANODE_STRICT=1 makes this an "
        "error. Fix the cause, call the function of jax.lax instead, or unset the variable."
    )


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "psum": lambda v: jax_intranode.psum(v, "x"),
    "all_gather": lambda v: jax_intranode.all_gather(v, "x", tiled=True),
    "psum_scatter": lambda v: jax_intranode.psum_scatter(v, "x", tiled=True),
    "all_to_all": lambda v: jax_intranode.all_to_all(v, "x", 0, 0, tiled=True),
    "all_gather_matmul": lambda v: jax_intranode.all_gather_matmul(v, v.T, "x"),
    "matmul_reduce_scatter": lambda v: jax_intranode.matmul_reduce_scatter(v, v.T, "x"),
    "matmul_all_reduce": lambda v: jax_intranode.matmul_all_reduce(v, v.T, "x"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_partly_manual_mesh(name: str) -> None:
    f = jax.jit(partly_manual(OPERATIONS[name]))
    argument = jax.ShapeDtypeStruct((N * N // 2, 4), jnp.float32)
    where = rf"{__file__}:\d+ \(<lambda>\) falls back to jax.lax: a partly manual mesh"
    with pytest.raises(RuntimeError, match=where):
        f.lower(argument)
    with configured(disable=True):
        f.lower(argument)
    with configured(strict=False):
        (call,) = jax_intranode.explain(f)(argument)
    assert call.reason.endswith("a partly manual mesh: shard_map has not bound 'auto'")


@pytest.mark.parametrize("name", OPERATIONS)
def test_refused_rendezvous(name: str) -> None:
    refused = agreed.Rendezvous({}, "cpu", "single", reason="no peer access")
    argument = jax.ShapeDtypeStruct((N * N, 4), jnp.float32)
    with (
        mock.patch.object(rendezvous_lib, "rendezvous_of", lambda devices: refused),
        pytest.raises(RuntimeError, match=r"falls back to jax.lax: no peer access\. JAX_INTRA"),
    ):
        jax.jit(over_x(OPERATIONS[name])).lower(argument)


def test_export() -> None:
    f = jax.jit(over_x(OPERATIONS["psum"]))
    with pytest.raises(RuntimeError, match=r"lowered by jax\.export"):
        export.export(f)(X)


def test_gradient_that_falls_back() -> None:
    def body(v: Any) -> Any:
        return jax_intranode.all_gather(v, "x").sum()

    f = partly_manual(lambda v: body(v)[None])
    line_of_call = rf"psum_scatter at {__file__}:{body.__code__.co_firstlineno + 1} \(body\)"
    with pytest.raises(RuntimeError, match=line_of_call):
        jax.jit(jax.grad(lambda v: f(v).sum())).lower(jnp.ones((N, 4)))


ALLOWED: dict[str, Callable[[Any], Any]] = {
    **OPERATIONS,
    "too_large": lambda v: jax_intranode.psum(jnp.tile(v, (1, 1 << 20)), "x"),
    "matmul_too_large": lambda v: jax_intranode.matmul_all_reduce(
        jnp.tile(v.T, (1 << 10, 1)), jnp.tile(v, (1, 1 << 5)), "x"
    ),
    "empty": lambda v: jax_intranode.psum(v[:, :0], "x"),
    "size_of_axis": lambda v: v * jax_intranode.psum(1, "x"),
    "constant": lambda v: v + jax_intranode.psum(np.ones(4 * N), "x"),
    "size_of_axis_of_vmap": lambda v: jax.vmap(
        lambda u: u * jax_intranode.psum(1, "i"), axis_name="i"
    )(v),
    "no_axes": lambda v: jax_intranode.psum(v, ()),
    "lax": lambda v: lax.psum(v > 0, "x") + lax.pmax(v, "x"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_no_error(name: str) -> None:
    jax.jit(over_x(ALLOWED[name])).lower(jax.ShapeDtypeStruct((N * N, 4 * N), jnp.float32))


@pytest.mark.parametrize("values", [{"disable": True}, {"algorithm": "lax"}])
def test_other_variables_that_ask_for_lax_win(values: dict[str, Any]) -> None:
    with configured(**values):
        lower(lambda v: jax_intranode.psum(v > 0, "x") + jax_intranode.psum(v, "x"))


# Collectives of jax.lax.


def placed(v: Any) -> Any:
    with set_xla_metadata(_scheduling_group_id="1"):
        return lax.psum(v, "x")


def solved(v: Any) -> Any:
    return lax.custom_linear_solve(
        lambda u: 2 * u, v, lambda _, b: lax.psum(b, "x") / (2 * N), lambda _, b: b / 2
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (placed, r"psum at .*\(placed\): under compute_on or set_xla_metadata"),
        (solved, r"psum at .*: inside custom_linear_solve, where nothing is rewritten"),
    ],
)
def test_missed_collective_is_an_error(body: Any, reason: str) -> None:
    lower(body)
    with jax_intranode.accelerate(), pytest.raises(RuntimeError, match=reason):
        lower(body)


def test_error_lists_all_missed_collectives() -> None:
    def body(v: Any) -> Any:
        a = lax.all_gather(v, "x", tiled=True)
        return a[: v.shape[0]] + lax.pmax(v, "x") + lax.psum(v, "x")

    first = body.__code__.co_firstlineno
    f = jax.jit(partly_manual(body))
    argument = jax.ShapeDtypeStruct((N, 4), jnp.float32)
    jax_intranode.install()
    with pytest.raises(RuntimeError) as raised:
        f.lower(argument)
    reason = "a partly manual mesh: shard_map has not bound 'auto'"
    assert str(raised.value).splitlines() == [
        "Collectives of jax.lax were not replaced:",
        f"  all_gather at {__file__}:{first + 1} (body): {reason}",
        f"  pmax at {__file__}:{first + 2} (body): {reason}",
        f"  psum at {__file__}:{first + 2} (body): {reason}",
        "JAX_INTRANODE_STRICT=1 makes this an error. Fix the causes, compile this program "
        "without install() and accelerate(), or unset the variable.",
    ]
    jax_intranode.uninstall()
    f.lower(argument)


def test_refused_rendezvous_of_a_rewritten_program() -> None:
    refused = agreed.Rendezvous({}, "cpu", "single", reason="no peer access")
    with (
        mock.patch.object(rendezvous_lib, "rendezvous_of", lambda devices: refused),
        jax_intranode.accelerate(),
        pytest.raises(RuntimeError, match="no peer access"),
    ):
        lower(lambda v: lax.psum(v, "x"))


NOT_MISSED: dict[str, Callable[[Any], Any]] = {
    "replaced": lambda v: lax.psum(v, "x"),
    "too_large": lambda v: lax.psum(jnp.tile(v, (1, 1 << 20)), "x"),
    "dtype": lambda v: lax.psum(v.astype(jnp.complex64), "x"),
    "groups": lambda v: lax.psum(v, "x", axis_index_groups=WHOLE),
    "empty": lambda v: lax.psum(v[:, :0], "x"),
    "negative_ranks": lambda v: lax.ppermute(v, "x", [(0, -1)]),
    "not_measured": lambda v: lax.pmax(v, "x") + lax.ppermute(v, "x", [(0, 1)]),
    "axis_of_vmap": lambda v: jax.vmap(lambda u: lax.psum(u, "i"), axis_name="i")(v),
}


@pytest.mark.parametrize("name", NOT_MISSED)
def test_what_selection_leaves_is_no_error(name: str) -> None:
    with jax_intranode.accelerate():
        lower(NOT_MISSED[name])
