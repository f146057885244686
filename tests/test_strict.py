"""What jax.lax runs: the reason in `explain`, and what JAX_INTRANODE_STRICT=1 makes an error."""

import contextlib
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

import jax_intranode as jin
from jax_intranode._src.group import agreed
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.selection import config

N = len(jax.devices())
X = jax.ShapeDtypeStruct((N, 4 * N), jnp.float32)  # float32[1, 4 N] on each device
WHOLE = [list(range(N))]


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    need_devices(2)
    yield
    jin.uninstall()


def strict(**values: Any) -> Any:
    changed = dataclasses.replace(config.get(), **{"strict": True, **values})
    return mock.patch.object(config, "get", lambda: changed)


def over_x(body: Callable[..., Any]) -> Any:
    """A function of one array, of which each device has a shard."""
    return jax.jit(sharded(body, line(), P("x"), P("x")))


def partly_manual(body: Callable[..., Any]) -> Any:
    need_devices(4)
    mesh = make_mesh((2, N // 2), ("auto", "x"))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
    )
    return jax.jit(mapped)


def over_i(body: Callable[..., Any], name: str = "i") -> Callable[..., Any]:
    return jax.vmap(body, axis_name=name)


def large_matmul(v: Any) -> Any:
    x, w = jnp.tile(v.T, (1 << 12, 1)), jnp.tile(v, (1, 1 << 7))
    return jin.matmul_all_reduce(x, w, "x")


def placed(v: Any) -> Any:
    with set_xla_metadata(_scheduling_group_id="1"):
        return lax.psum(v, "x")


def solved(v: Any) -> Any:
    return lax.custom_linear_solve(
        lambda u: 2 * u, v, lambda _, b: lax.psum(b, "x") / (2 * N), lambda _, b: b / 2
    )


def error(reason: str) -> Any:
    """An error of this file, of a call or of a collective of jax.lax, with a remedy."""
    where = rf"\w+ at {__file__}:\d+ \(\S+\)( falls back to jax\.lax)?"
    remedy = (
        r"JAX_INTRANODE_STRICT=1 makes this an error\. Fix the causes?, .*, or unset the variable"
    )
    why = re.escape(reason)
    return pytest.raises(RuntimeError, match=rf"{where}: .*{why}.*(\. |\n){remedy}\.$")


# A function of a device's array, the reason why jax.lax runs collectives of it, if it runs any, and
# whether this is an error. First programs as they are, and then those that are rewritten.
Row = tuple[Callable[[Any], Any], str | None, bool]
# fmt: off
AS_WRITTEN: dict[str, Row] = {
    "dtype": (lambda v: jin.psum(v > 0, "x"), "dtype bool; supported", True),
    "groups": (
        lambda v: jin.pmean(v, "x", axis_index_groups=WHOLE), "axis_index_groups", True),
    "constant": (lambda v: jin.all_gather(np.ones(3), "x"), "a constant", True),
    "axis_of_vmap": (
        over_i(lambda u: jin.psum(u, "i")), "axis 'i' is not one that shard_map has bound", True),
    "hidden_axis": (over_i(lambda u: jin.psum(u, "x"), "x"), "vmap hides that one", True),
    "dtype_of_matmul": (
        lambda v: jin.matmul_all_reduce(v.astype("complex64"), v.T.astype("complex64"), "x"),
        "dtype complex64", True),
    "too_large": (lambda v: jin.psum(jnp.tile(v, (1, 1 << 20)), "x"), "faster than lax", False),
    "matmul_too_large": (large_matmul, "faster than lax", False),
    "empty": (lambda v: jin.psum(v[:, :0], "x"), "psum of no elements", False),
    "no_axes": (lambda v: jin.psum(v, ()), None, False),
    # Nothing is sent.
    "size_of_axis": (lambda v: v * jin.psum(1, "x"), None, False),
    "size_of_axis_of_vmap": (over_i(lambda u: u * jin.psum(1, "i")), None, False),
    "constant_sum": (lambda v: v + jin.psum(np.ones(4 * N), "x"), None, False),
    "lax": (lambda v: lax.psum(v > 0, "x") + lax.pmax(v, "x"), "left to lax; jax_intran", False),
}
REWRITTEN: dict[str, Row] = {
    "placed": (placed, "under compute_on or set_xla_metadata", True),
    "solved": (solved, "inside custom_linear_solve, where nothing is rewritten", True),
    "too_large": (lambda v: lax.psum(jnp.tile(v, (1, 1 << 20)), "x"), "faster than lax", False),
    "dtype": (lambda v: lax.psum(v.astype(jnp.complex64), "x"), "dtype complex64; supp", False),
    "groups": (
        lambda v: lax.psum(v, "x", axis_index_groups=WHOLE), "axis_index_groups", False),
    "empty": (lambda v: lax.psum(v[:, :0], "x"), "psum of no elements", False),
    "negative_ranks": (lambda v: lax.ppermute(v, "x", [(0, -1)]), "perm has the dest", False),
    "axis_of_vmap": (over_i(lambda u: lax.psum(u, "i")), None, False),
}
# fmt: on


@pytest.mark.parametrize(
    ("rewritten", "name"),
    [*((False, name) for name in AS_WRITTEN), *((True, name) for name in REWRITTEN)],
)
def test_reason(rewritten: bool, name: str) -> None:
    body, reason, refused = (REWRITTEN if rewritten else AS_WRITTEN)[name]
    with jin.accelerate() if rewritten else contextlib.nullcontext():
        left = [call.reason for call in jin.explain(over_x(body))(X) if call.algorithm == "lax"]
        assert all(str(reason) in text for text in left) and bool(left) == (reason is not None)
        with strict(), error(str(reason)) if refused else contextlib.nullcontext():
            over_x(body).lower(X)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "psum": lambda v: jin.psum(v, "x"),
    "all_gather": lambda v: jin.all_gather(v, "x", tiled=True),
    "psum_scatter": lambda v: jin.psum_scatter(v, "x", tiled=True),
    "all_to_all": lambda v: jin.all_to_all(v, "x", 0, 0, tiled=True),
    "all_gather_matmul": lambda v: jin.all_gather_matmul(v, v.T, "x"),
    "matmul_reduce_scatter": lambda v: jin.matmul_reduce_scatter(v, v.T, "x"),
    "matmul_all_reduce": lambda v: jin.matmul_all_reduce(v, v.T, "x"),
    "psum_of_lax": lambda v: lax.psum(v, "x"),  # which is replaced
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_where_an_operation_is_refused(name: str) -> None:
    """On a partly manual mesh, by an export and after a rendezvous that was refused."""
    body = OPERATIONS[name]
    argument = jax.ShapeDtypeStruct((N * N, 4 * N), jnp.float32)
    no_rendezvous = agreed.Rendezvous({}, "cpu", "single", reason="no peer access")
    partly = "a partly manual mesh: shard_map has not bound 'auto'"

    with jin.accelerate():
        (call,) = jin.explain(partly_manual(body))(argument)
        assert (call.algorithm, call.reason[-len(partly) :]) == ("lax", partly)
        with strict():
            over_x(body).lower(argument)
            with error(partly):
                partly_manual(body).lower(argument)
            with error("lowered by jax.export"):
                export.export(over_x(body))(argument)
            with (
                mock.patch.object(rendezvous_lib, "rendezvous_of", lambda _: no_rendezvous),
                error("no peer access"),
            ):
                over_x(body).lower(argument)
        with strict(disable=True):
            partly_manual(body).lower(argument)


@pytest.mark.parametrize("values", [{"disable": True}, {"algorithm": "lax"}])
def test_other_variables_that_ask_for_lax_win(values: dict[str, Any]) -> None:
    with strict(**values):
        over_x(lambda v: jin.psum(v > 0, "x") + jin.psum(v, "x")).lower(X)


# What the errors say.


def test_the_error_of_a_gradient_names_the_line_of_the_call() -> None:
    def body(v: Any) -> Any:
        return jin.all_gather(v, "x").sum()

    f = partly_manual(lambda v: body(v)[None])
    call = rf"psum_scatter at {__file__}:{body.__code__.co_firstlineno + 1} \(body\)"
    with strict(), pytest.raises(RuntimeError, match=call):
        jax.jit(jax.grad(lambda v: f(v).sum())).lower(jnp.ones((N, 4)))


def test_error_lists_all_collectives_that_were_not_replaced() -> None:
    def body(v: Any) -> Any:
        a = lax.all_gather(v, "x", tiled=True)
        return a[: v.shape[0]] + lax.pmax(v, "x") + lax.psum(v, "x")

    with jin.accelerate(), strict(), pytest.raises(RuntimeError) as raised:
        partly_manual(body).lower(jax.ShapeDtypeStruct((N, 4), jnp.float32))
    first, reason = body.__code__.co_firstlineno, "a partly manual mesh: shard_map has not bound"
    assert str(raised.value).splitlines() == [
        "Collectives of jax.lax were not replaced:",
        f"  all_gather at {__file__}:{first + 1} (body): {reason} 'auto'",
        f"  pmax at {__file__}:{first + 2} (body): {reason} 'auto'",
        f"  psum at {__file__}:{first + 2} (body): {reason} 'auto'",
        "JAX_INTRANODE_STRICT=1 makes this an error. Fix the causes, compile this program "
        "without install() and accelerate(), or unset the variable.",
    ]
