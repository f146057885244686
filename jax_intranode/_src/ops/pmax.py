"""pmax and pmin: the largest and the smallest of all ranks' elements, on every rank."""

from collections.abc import Sequence

from jax import lax

from jax_intranode._src.ops import all_reduce
from jax_intranode._src.ops.annotations import AxisNames, PyTree
from jax_intranode._src.ops.collective import pmax_p, pmin_p


def pmax(
    x: PyTree,
    axis_name: AxisNames,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> PyTree:
    """The maximum over one or more mapped axes; takes the place of ``jax.lax.pmax``.

    It runs as `psum` does, by the same algorithms, and falls back for the same reasons; between 2
    GPUs arrays above 4 MiB fall back, too.

    The result is ``jax.lax.max`` folded over the ranks: NaN if any rank has a NaN, and 0.0 if some
    ranks have 0.0 and the others -0.0, on every platform. (That of ``jax.lax.pmax`` depends on the
    backend: some drop a NaN, or keep the zero of one rank.)

    It has no derivative, like ``jax.lax.pmax``.

    Args:
        x: an array or a pytree of arrays of any shape. Accelerated dtypes: those of ``psum``.
        axis_name: the name of a mapped axis, or several names.
        axis_index_groups: as in ``jax.lax.pmax``; not accelerated.

    Returns:
        The maxima, with the shapes and dtypes of `x`.

    Raises:
        NameError: an axis is not bound, as in ``jax.lax.pmax``.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def largest(x):
        ...     return jax_intranode.pmax(x, "model")
        >>> largest(jnp.array([1.0, 2.0]))
        Array([2.], dtype=float32)
    """
    return all_reduce.of_tree(pmax_p, x, axis_name, axis_index_groups, lax.pmax, True)


def pmin(
    x: PyTree,
    axis_name: AxisNames,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> PyTree:
    """The minimum over one or more mapped axes; takes the place of ``jax.lax.pmin``.

    Arguments, results and errors are those of `pmax`. A NaN of any rank makes a NaN, and -0.0 is
    less than 0.0.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def smallest(x):
        ...     return jax_intranode.pmin(x, "model")
        >>> smallest(jnp.array([1.0, 2.0]))
        Array([1.], dtype=float32)
    """
    return all_reduce.of_tree(pmin_p, x, axis_name, axis_index_groups, lax.pmin, True)


all_reduce.register(pmax_p)
all_reduce.register(pmin_p)
