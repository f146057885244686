"""row_parallel_matmul: x, times a matrix whose rows are divided among the ranks."""

import jax
from jax.typing import ArrayLike, DTypeLike

from jax_intranode._src.ops import matmul_all_reduce, matmul_reduce_scatter
from jax_intranode._src.ops.annotations import AnyMesh, AxisNames
from jax_intranode._src.ops.matmul_arguments import MatmulCall


def row_parallel_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisNames,
    *,
    scatter_dimension: int | None = None,
    preferred_element_type: DTypeLike | None = None,
    batch_axes: AxisNames = (),
    mesh: AnyMesh | None = None,
) -> jax.Array:
    """Multiplies with a matrix whose rows are divided over mesh axes.

    ``x @ w`` on global arrays: the second matmul of a tensor-parallel layer, which takes what
    `column_parallel_matmul` returns. Call it under ``jax.jit`` or eagerly, with the mesh of
    ``jax.set_mesh`` in context or with `mesh`. The mesh axes may be Auto or Explicit. Inside
    ``jax.shard_map`` it takes and returns the ranks' shards.

    Without `scatter_dimension` all ranks get the whole product: this is `matmul_all_reduce`. With
    `scatter_dimension` the ranks divide that dimension of the product (sequence parallelism): this
    is `matmul_reduce_scatter`. Their documentation says how sums are rounded, what is overlapped,
    and how they differentiate: as ``x @ w`` does, in forward and reverse mode and to any order.

    XLA reshards global operands that are sharded in another way than below, for instance weights
    that are sharded over `batch_axes`, too. Only one case raises ValueError: with Explicit axes, an
    operand whose type has `axis_name` at another dimension.

    Args:
        x: an array [..., K] with 2 or more dimensions, of any dtype that can be multiplied. Its
            last dimension is divided over `axis_name`, so K is a multiple of the number of ranks.
        w: a matrix [K, N] with the dtype of x.
        axis_name: the name of a mesh axis, or several names, over which the rows of w are divided.
        scatter_dimension: the dimension of the product to divide over these axes, any but the last;
            None if all ranks shall have the whole product.
        preferred_element_type: the result's dtype, as in ``jnp.matmul``; that of x by default.
        batch_axes: on global arrays, the other mesh axes that divide dimension 0 of x (data
            parallelism), before `axis_name` does: a name or several. Explicit axes are known from
            the type of x. On a mesh with further Auto axes the call falls back to ``jax.lax``.
        mesh: on global arrays, the mesh, if there is none in context.

    Returns:
        An array [..., N]. Dimension `scatter_dimension`, if there is one, is divided over
        `axis_name`, and dimension 0 over `batch_axes`.

    Raises:
        TypeError: an operand is not an array, the dtypes differ, `preferred_element_type` is
            of a different kind, `scatter_dimension` is not an integer, or `mesh` is not a mesh.
        ValueError: the numbers of dimensions or the contracted dimensions do not fit, there is no
            such `scatter_dimension` or it is the last dimension, a dimension cannot be divided into
            its parts, an axis is named twice, the type of an operand says that it is
            sharded over `axis_name` in another way, or `batch_axes` or `mesh` is given inside
            shard_map.
        NameError: there is no such axis.

    Examples:
        The two matmuls of a layer:

        >>> x, w1, w2 = jnp.ones((4, 8)), jnp.ones((8, 6)), jnp.ones((6, 8))
        >>> with jax.set_mesh(mesh):
        ...     hidden = jax_intranode.column_parallel_matmul(x, w1, "model")
        ...     y = jax_intranode.row_parallel_matmul(jax.nn.relu(hidden), w2, "model")
        >>> bool(jnp.allclose(y, jax.nn.relu(x @ w1) @ w2))
        True
    """
    name = "row_parallel_matmul"
    call = MatmulCall(name, x, w, axis_name, preferred_element_type, batch_axes, mesh)
    if scatter_dimension in (-1, call.x.ndim - 1):
        raise ValueError(
            f"{name}: scatter_dimension is {scatter_dimension}, the last dimension of the product; "
            "divide another one, or call jax_intranode.matmul_reduce_scatter"
        )
    if scatter_dimension is None:
        return matmul_all_reduce.of_call(call)
    return matmul_reduce_scatter.of_call(call, scatter_dimension)
