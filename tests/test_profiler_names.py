"""The named scopes that profilers show, in the locations of the lowered program."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from devices import need_devices
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_intranode

TILED: dict[str, Any] = {"tiled": True}
# For each function, a call of it.
CALLS: dict[str, Callable[..., Any]] = {
    "psum": lambda x, w: jax_intranode.psum(x @ w, "m"),
    "pmean": lambda x, w: jax_intranode.pmean(x @ w, "m"),
    "psum_scatter": lambda x, w: jax_intranode.psum_scatter(x @ w, "m", **TILED),
    "all_gather": lambda x, w: jax_intranode.all_gather(x, "m", **TILED) @ w,
    "all_gather_matmul": lambda x, w: jax_intranode.all_gather_matmul(x, w, "m"),
    "matmul_reduce_scatter": lambda x, w: jax_intranode.matmul_reduce_scatter(x, w, "m"),
    "matmul_all_reduce": lambda x, w: jax_intranode.matmul_all_reduce(x, w, "m"),
}
# The scopes of gradients that are not the function's.
TRANSPOSED = {"psum_scatter": "all_gather", "all_gather": "psum_scatter"}


def calls_of(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """The name and the scopes of each of our custom calls in a lowered program."""
    need_devices(2)
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(P("m"), P()), out_specs=P("m"), check_vma=False
    )
    text = jax.jit(mapped).lower(jnp.ones((8, 8)), jnp.ones((8, 8))).as_text(debug_info=True)
    places = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", text, re.MULTILINE))
    found = re.findall(r"custom_call @(jax_intranode_\w+).*loc\((#loc\d+)\)", text)
    return [(name, places[place]) for name, place in found]


@pytest.mark.parametrize("name", CALLS)
def test_scopes(name: str) -> None:
    function, backward = CALLS[name], TRANSPOSED.get(name, name)
    assert all(f"jax_intranode.{name}" in place for _, place in calls_of(function))
    gradient = jax.grad(lambda x, w: (function(x, w) ** 2).sum())
    places = [place for _, place in calls_of(gradient)]
    assert len(places) == 2
    assert f"jvp(jax_intranode.{name})" in places[0]
    assert "transpose(" in places[1] and f"jax_intranode.{backward}" in places[1]


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather"])
def test_scopes_of_calls_of_lax(name: str) -> None:
    arguments = {} if name == "psum" else TILED
    function = getattr(jax.lax, name)
    with jax_intranode.accelerate():
        ((call, place),) = calls_of(lambda x, w: function(x @ w, "m", **arguments))
    assert call == f"jax_intranode_{name}"
    assert f"jax_intranode.{name}/" in place
