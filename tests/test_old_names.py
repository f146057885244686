"""Names that were replaced: they do the same, and warn in the line that uses them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import need_devices
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_intranode

X, W = np.arange(32.0, dtype=np.float32).reshape(4, 8), np.ones((8, 6), np.float32)

# The function, its old and its new argument.
ARGUMENTS = {
    "matmul_reduce_scatter": ("scatter_axis", "scatter_dimension"),
    "row_parallel_matmul": ("sequence_axis", "scatter_dimension"),
    "column_parallel_matmul": ("sequence_axis", "gather_axis"),
}
FUNCTIONS = {
    "reduce_scatter_residual_rms_norm": "psum_scatter_residual_rms_norm",
    "reduce_scatter_residual_layer_norm": "psum_scatter_residual_layer_norm",
}


@pytest.fixture
def mesh() -> Any:
    need_devices(2)
    return jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(mesh: Any, name: str) -> None:
    function = getattr(jax_intranode, name)
    old, new = ARGUMENTS[name]
    with pytest.warns(DeprecationWarning, match=f"{name}: the argument {old} .* {new}") as warned:
        result = function(X, W, "model", mesh=mesh, **{old: 0})
    assert [w.filename for w in warned] == [__file__]
    expected = function(X, W, "model", mesh=mesh, **{new: 0})
    np.testing.assert_array_equal(result, expected)
    assert result.sharding == expected.sharding
    with pytest.raises(TypeError, match=f"{old} is the old name of {new}"):
        function(X, W, "model", mesh=mesh, **{old: 0, new: 0})


@pytest.mark.parametrize("old", FUNCTIONS)
def test_functions(mesh: Any, old: str) -> None:
    new = FUNCTIONS[old]

    def results(function: Callable[..., Any]) -> Any:
        def normed(x: Any, residual: Any) -> Any:
            return function(x, residual, jnp.ones(8, x.dtype), "model", eps=1e-6)

        specs: dict[str, Any] = {"in_specs": (P(), P("model")), "out_specs": P("model")}
        return jax.jit(jax.shard_map(normed, mesh=mesh, check_vma=False, **specs))(X, X)

    with pytest.warns(
        DeprecationWarning, match=f"{old} is now called jax_intranode.{new}"
    ) as warned:
        ours = results(getattr(jax_intranode, old))
    assert [w.filename for w in warned] == [__file__]
    jax.tree.map(np.testing.assert_array_equal, ours, results(getattr(jax_intranode, new)))
