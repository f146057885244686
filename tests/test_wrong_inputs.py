"""Wrong inputs: each message names what failed, the value, and what to do.

For each input there are texts that its message must have, in this order: the function or argument;
the value; the remedy. Those of commands are in test_command_line.py, those of variables in
test_config.py, those of peer buffers in multiprocess/test_own_kernels.py.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_mesh
from devices import need_devices
from jax.sharding import PartitionSpec as P

import jax_intranode as jin

# Where a call is made.


def mesh_of_two() -> jax.sharding.Mesh:
    need_devices(2)
    return make_mesh((2,), ("model",))


def inside(call: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """In a shard_map over two ranks with the axis "model": x and w are 4 x 4 on each rank."""

    def run() -> Any:
        mapped = jax.shard_map(
            call, mesh=mesh_of_two(), in_specs=(P("model"), P()), out_specs=P("model")
        )
        return jax.eval_shape(mapped, jnp.ones((8, 4)), jnp.ones((4, 4)))

    return run


def of_global_arrays(call: Callable[[], Any]) -> Callable[[], Any]:
    """Under a mesh of "data" and "model"; the call takes X and W."""

    def run() -> Any:
        need_devices(4)
        with jax.set_mesh(make_mesh((2, 2), ("data", "model"))):
            return jax.eval_shape(call)

    return run


def rms(x: Any, residual: Any, weight: Any, eps: Any = 1e-6, **options: Any) -> Any:
    return jin.psum_residual_rms_norm(x, residual, weight, "model", eps=eps, **options)[0]


def dispatch(x: Any, ids: Any = None, weights: Any = None, **options: Any) -> Any:
    ids = x.astype(int) if ids is None else ids
    weights = x if weights is None else weights
    return jin.moe_dispatch(x, ids, weights, "model", **{"num_experts": 4, **options})[0]


def ragged(x: Any, output: Any, lengths: Sequence[int] = (2, 2, 2, 2)) -> Any:
    tables = (jnp.zeros(length, jnp.int32) for length in lengths)
    return jin.ragged_all_to_all(x, output, *tables, axis_name="model")


X, W = np.ones((8, 12), np.float32), np.ones((12, 16), np.float32)
OF_MESH = {"batch_axes": "data"}
RANGE = (ValueError, IndexError)  # jax 0.10 raises IndexError
# A call, the exception, and texts of its message: what failed, the value, the remedy.
Refused = tuple[Callable[..., Any], Any, str]
# fmt: off
INSIDE: list[Refused] = [
    (lambda x, w: jin.psum(x, "modle"), NameError, "jax_intranode.psum|'modle'|Name some of these"),
    (lambda x, w: jin.psum("text", "model"), TypeError,
     "jax_intranode.psum|'text'|takes arrays, or pytrees of arrays"),
    (lambda x, w: jin.psum_scatter(x[:3], "model", tiled=True), ValueError,
     "jax_intranode.psum_scatter|(3, 4)|must be a multiple of 2"),
    (lambda x, w: jin.psum_scatter(x, "model"), ValueError,
     "jax_intranode.psum_scatter|(4, 4)|must be 2, or pass tiled=True"),
    (lambda x, w: jin.psum_scatter(x, "model", scatter_dimension=5), RANGE,
     "jax_intranode.psum_scatter|scatter_dimension is 5|must be from 0 to 1"),
    (lambda x, w: jin.psum_scatter(x, "model", scatter_dimension=1.5), TypeError,
     "psum_scatter|scatter_dimension is 1.5|pass an integer"),
    (lambda x, w: jin.all_gather(x, "model", axis=7, tiled=True), RANGE,
     "jax_intranode.all_gather|axis is 7|must be from -2 to 1"),
    (lambda x, w: jin.all_gather(x, "model", axis="rows"), TypeError,
     "all_gather|axis is 'rows'|pass an integer"),
    (lambda x, w: jin.all_to_all(x, "model", 3, 0, tiled=True), RANGE,
     "jax_intranode.all_to_all|split_axis is 3|must be from -2 to 1"),
    (lambda x, w: jin.all_to_all(x, "model", 0, "rows"), TypeError,
     "all_to_all|concat_axis is 'rows'|pass an integer"),
    (lambda x, w: jin.all_to_all(x, "model", 0, 0), ValueError,
     "jax_intranode.all_to_all|(4, 4)|must be 2, or pass tiled=True"),
    (lambda x, w: jin.all_gather_matmul(3.0, w, "model"), TypeError,
     "all_gather_matmul: |x is a float; pass an array"),
    (lambda x, w: jin.all_gather_matmul(x[0], w, "model"), ValueError,
     "x has the shape (4,); it need"),
    (lambda x, w: jin.matmul_all_reduce(x, w[None], "model"), ValueError,
     "w has the shape (1, 4, 4); pass a matrix of 2 dimensions"),
    (lambda x, w: jin.all_gather_matmul(x, [], "model"), ValueError,
     "w is an empty list; pass at "),
    (lambda x, w: jin.matmul_all_reduce(x, [w], "model"), TypeError,
     "matmul_all_reduce: |w is a list; pass an array"),
    (lambda x, w: jin.matmul_reduce_scatter(x, w[1:], "model"), ValueError,
     "matmul_reduce_scatter: |(3, 4); they must be"),
    (lambda x, w: jin.all_gather_matmul(x, [w, w[1:]], "model"), ValueError,
     "first of w[1], of shape"),
    (lambda x, w: jin.all_gather_matmul(x, w.astype("bfloat16"), "model"), TypeError,
     "x is float32, w is bfloat16; cast one"),
    (lambda x, w: jin.matmul_all_reduce(x, w, "model", preferred_element_type="int32"), TypeError,
     "preferred_element_type is int32, and the operands are float32; take"),
    (lambda x, w: jin.matmul_all_reduce(x, w, "model", preferred_element_type="foo"), TypeError,
     "preferred_element_type is 'foo'; pass a dtype"),
    (lambda x, w: jin.all_gather_matmul(x, w, "model", gather_axis=None), TypeError,
     "gather_axis is None; pass an integer"),
    (lambda x, w: jin.all_gather_matmul(x, w, "model", gather_axis=2), ValueError,
     "gather_axis is 2; with 2 dimensions it must be from -2 to 1"),
    (lambda x, w: jin.all_gather_matmul(x, w, "model", gather_axis=-1), ValueError,
     "gather_axis is -1, the last dimension of x, of shape (4, 4)|gather another one"),
    (lambda x, w: jin.matmul_reduce_scatter(x, w, "model", scatter_dimension=-3), ValueError,
     "scatter_dimension is -3; with 2 dimensions it must be from -2 to 1"),
    (lambda x, w: jin.matmul_reduce_scatter(x[:3], w, "model"), ValueError,
     "scatter_dimension 0 of the product has 3 elements; it must be a multiple of"),
    (lambda x, w: jin.column_parallel_matmul(x, w, "model", batch_axes="data"), ValueError,
     "'model' is bound here|batch_axes is given"),
    (lambda x, w: jin.column_parallel_matmul(x, w, "model", mesh=mesh_of_two()), ValueError,
     "'model' is bound here|mesh is given"),
    (lambda x, w: rms([1.0], w, w[0]), TypeError, "x is a list; pass an array"),
    (lambda x, w: rms(x.astype(int), w, w[0]), TypeError, "x has the dtype int32"),
    (lambda x, w: rms(x, w.astype("bfloat16"), w[0]), TypeError,
     "x is float32, residual is bfloat16"),
    (lambda x, w: rms(x, w[:1], w[0]), ValueError, "residual has the shape (1, 4)"),
    (lambda x, w: rms(x, w, w[0, :2]), ValueError, "weight has the shape (2,)"),
    (lambda x, w: rms(x, w, w[0], bias=w), ValueError, "bias has the shape (4, 4)"),
    (lambda x, w: rms(x, w, w[0], "small"), TypeError, "eps is 'small'; pass a number"),
    (lambda x, w: rms(x, w, w[0], -1.0), ValueError, "eps is -1.0; it must not be negative"),
    (lambda x, w: rms(x, w, w[0], float("nan")), ValueError, "pass a finite number"),
    (lambda x, w: rms(x[:, :0], w[:, :0], w[0, :0]), ValueError, "the last of them not empty"),
    (lambda x, w: rms(x[0, 0], w[0, 0], w[0]), ValueError, "needs 1 dimension"),
    (lambda x, w: rms(x, x, w[0]), ValueError, "residual varies over the axes"),
    (lambda x, w: rms(x, w, x[0]), ValueError, "weight varies over the axes"),
    (lambda x, w: dispatch(x, num_experts=5), ValueError, "moe_dispatch: num_experts is 5;|2"),
    (lambda x, w: dispatch(x, num_experts=2.5), TypeError, "moe_dispatch: num_experts is 2.5"),
    (lambda x, w: dispatch(x, capacity=0), ValueError, "moe_dispatch: capacity is 0"),
    (lambda x, w: dispatch(x, weights=x[:, :1]), ValueError, "moe_dispatch: | weights (4, 1)"),
    (lambda x, w: dispatch(x[0], w.astype(int), w), ValueError, "moe_dispatch: tokens has the sha"),
    (lambda x, w: dispatch(x, x), TypeError, "moe_dispatch: expert_ids has |float32"),
    (lambda x, w: dispatch(x.astype(int), weights=x), TypeError, "moe_dispatch: tokens has |int32"),
    (lambda x, w: ragged(x.astype("float16"), x), ValueError,
     "operand is float16, output is float32"),
    (lambda x, w: ragged(x[..., None], x), ValueError,
     "operand has the shape (4, 4, 1), output (4, 4)"),
    (lambda x, w: ragged(x, x, (1, 1, 1, 1)), ValueError, "1 updates for 2 ranks"),
    (lambda x, w: ragged(x, x, (2, 2, 2, 4)), ValueError, "different lengths: |recv_sizes 4"),
]
OF_GLOBAL_ARRAYS: list[Refused] = [
    (lambda: jin.column_parallel_matmul(X, W, "tensor"), NameError,
     "unbound axis name: tensor|column_parallel_matmul|context: ['data', 'model']"),
    (lambda: jin.row_parallel_matmul(X, W, "model", batch_axes="batch"), NameError,
     "row_parallel_matmul: batch_axes has 'batch'; |['data', 'model']"),
    (lambda: jin.matmul_all_reduce(X, W, "model", batch_axes=("data", "model")), ValueError,
     "matmul_all_reduce: axis 'model' is named twice"),
    (lambda: jin.matmul_all_reduce(X, W, "model", mesh=4), TypeError,
     "matmul_all_reduce: mesh is 4; pass a jax.sharding.Mesh"),
    (lambda: jin.matmul_all_reduce(X, W, "x", mesh=make_mesh((2,), ("x",))), ValueError,
     "matmul_all_reduce: mesh is |the mesh in context is |leave mesh out"),
    (lambda: jin.column_parallel_matmul(X, [W, W[:, :3]], "model"), ValueError,
     "dimension 1 of w[1], of shape (12, 3), is divided over the mesh axes 'model'; its"),
    (lambda: jin.row_parallel_matmul(X[:, :5], W[:5], "model"), ValueError,
     "row_parallel_matmul: dimension 1 of x, of shape (8, 5), is divided over | multiple of"),
    (lambda: jin.column_parallel_matmul(X[:5], W, "model", **OF_MESH), ValueError,
     "dimension 0 of x, of shape (5, 12), is divided over the mesh axes 'data'"),
    (lambda: jin.all_gather_matmul(X[:6], W, "model", **OF_MESH), ValueError,
     "dimension 0 of x, of shape (6, 12), is divided over the mesh axes 'data', 'model'"),
    (lambda: jin.matmul_reduce_scatter(X[:6], W, "model", **OF_MESH), ValueError,
     "dimension 0 of the product, of shape (6, 16), is divided |; its length | of 4"),
    (lambda: jin.column_parallel_matmul(X, W, "model", gather_axis=1), ValueError,
     "column_parallel_matmul: gather_axis is 1, the last dimension of x"),
    (lambda: jin.row_parallel_matmul(X, W, "model", scatter_dimension=-1), ValueError,
     "row_parallel_matmul: scatter_dimension is -1, the last dimension of the product"),
    (lambda: jin.row_parallel_matmul(X, W, "model", scatter_dimension=2), ValueError,
     "row_parallel_matmul: scatter_dimension is 2; with 2 dimensions it must be from -2 to 1"),
    (lambda: jin.column_parallel_matmul(X, W[1:], "model"), ValueError,
     "column_parallel_matmul: the last dimension of x, of shape (8, 12), is not the first"),
]
OUTSIDE: list[Refused] = [
    (lambda: jin.psum(X, "model"), NameError,
     "jax_intranode.psum|model|call it inside a jax.shard_map"),
    (lambda: jin.initialize((2,)), TypeError,
     "jax_intranode.initialize|(2,)|pass a jax.sharding.Mesh"),
    (lambda: jin.moe_combine(X, ()), TypeError, "moe_combine: state is a tuple"),
    (lambda: jin.moe_dispatch(X, X.astype(int), X, "x", num_experts=4), NameError,
     "unbound axis name"),
    # flax.nnx.jit, for example, has a trace that is not JAX's.
    (lambda: jin.explain(mock.Mock(spec=jax.stages.Wrapped, trace=lambda x: x))(X), TypeError,
     "Mock, whose trace has no jaxpr|pass a function of arrays"),
    (lambda: jin.explain(3), TypeError, "jax_intranode.explain|got 3|pass a function"),
    (lambda: jin.column_parallel_matmul(X, W, "model"), NameError,
     "column_parallel_matmul acts on | jax.set_mesh|axes of the mesh in context: none"),
]
# fmt: on
CALLS = {
    says.replace("|", " "): (where(call), error, says.split("|"))
    for where, calls in (
        (inside, INSIDE),
        (of_global_arrays, OF_GLOBAL_ARRAYS),
        (lambda f: f, OUTSIDE),
    )
    for call, error, says in calls
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    call, error, says = CALLS[name]
    with pytest.raises(error) as raised:
        call()
    message = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    for text in says:
        assert text in message, message
