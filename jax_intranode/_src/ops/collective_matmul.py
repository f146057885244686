"""What the collective matmuls share: their arguments, their products, and their primitives' rules.

A product contracts the last dimension of x with a matrix w of shape [K, N], or of shape [N, K]
where `transposed` is set, as it is in derivatives: no matrix is transposed in memory.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad, mlir

from jax_intranode._src import compat, select
from jax_intranode._src.ops import collective, overlapped

# Arguments.


def axes_of(axis_name: Any) -> tuple[Hashable, ...]:
    """The names of the mapped axes."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def checked_operands(operation: str, x: Any, ws: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The operands as arrays.

    Raises:
        TypeError, ValueError: they can't be multiplied.
    """

    def checked(what: str, array: Any) -> Any:
        error = None
        if hasattr(array, "dtype") and hasattr(array, "shape"):
            try:
                return jnp.asarray(array)
            except TypeError as of_jax:
                error = of_jax
        raise TypeError(
            f"{operation}: {what} is a {type(array).__name__}; pass an array (w: an array or a "
            "list of arrays)"
        ) from error

    x, ws = checked("x", x), [checked(f"w[{k}]", w) for k, w in enumerate(ws)]
    if not ws:
        raise ValueError(f"{operation}: w is an empty list; pass at least one matrix")
    if x.ndim < 2:
        raise ValueError(
            f"{operation}: x has the shape {x.shape}; it needs 2 dimensions or more, the last of "
            "them contracted with w"
        )
    for k, w in enumerate(ws):
        if w.ndim != 2:
            raise ValueError(
                f"{operation}: w[{k}] has the shape {w.shape}; pass a matrix of 2 dimensions"
            )
        if w.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{operation}: the last dimension of x, of shape {x.shape}, is not the first of "
                f"w[{k}], of shape {w.shape}; they must be equal, as they are contracted"
            )
        if w.dtype != x.dtype:
            raise TypeError(
                f"{operation}: x is {x.dtype}, w[{k}] is {w.dtype}; cast one of them "
                "(preferred_element_type sets the result's dtype)"
            )
    return x, ws


def checked_dtype(operation: str, x: Any, preferred_element_type: Any) -> np.dtype[Any]:
    """The result's dtype.

    Raises:
        TypeError: it can't be the dtype of such a product.
    """
    if preferred_element_type is None:
        return np.dtype(x.dtype)
    try:
        # As an array of it: float64 is float32 unless jax_enable_x64 is set.
        preferred = jax.eval_shape(lambda: jnp.zeros((), preferred_element_type)).dtype
    except TypeError as error:
        raise TypeError(
            f"{operation}: preferred_element_type is {preferred_element_type!r}; pass a dtype"
        ) from error
    kinds = (jnp.floating, jnp.complexfloating, jnp.integer)
    if not any(jnp.issubdtype(x.dtype, k) and jnp.issubdtype(preferred, k) for k in kinds):
        raise TypeError(
            f"{operation}: preferred_element_type is {preferred}, and the operands are {x.dtype}; "
            "take a dtype of their kind, or cast the result"
        )
    return np.dtype(preferred)


def as_weak_as(operands: Sequence[Any], preferred_element_type: Any, result: Any) -> Any:
    """The result, of a weak type where that of `jax.lax` is one: of operands that all have one."""
    if preferred_element_type is None and all(jax.typeof(v).weak_type for v in operands):
        return compat.with_weak_type(result, True)
    return result


def checked_dimension(operation: str, name: str, dimension: Any, rank: int) -> int:
    """The dimension, counted from the first.

    Raises:
        TypeError: it is no integer.
        ValueError: there is no such dimension.
    """
    dimension = collective.checked_integer(operation, name, dimension)
    if not -rank <= dimension < rank:
        raise ValueError(
            f"{operation}: {name} is {dimension}; with {rank} dimensions it must be from {-rank} "
            f"to {rank - 1}"
        )
    return dimension % rank


def reason_for_lax(
    collective_operation: str,
    axes: tuple[Hashable, ...],
    operands: Sequence[Any],
    sent: Sequence[Any],
    dtype: np.dtype[Any],
) -> str | None:
    """Why lax does the collective, or None if it may be ours.

    Args:
        collective_operation: its name in `select`.
        axes: the axes.
        operands: x and the matrices.
        sent: those of them that what is gathered or summed is made of.
        dtype: the dtype of what is gathered or summed.
    """
    reason = collective.reason_for_lax(axes, None)
    if reason is not None:
        return reason
    if not any(isinstance(v, jax.core.Tracer) for v in sent):
        return "a constant"
    if not all(isinstance(jax.typeof(v), ShapedArray) for v in operands):
        return "not an array"
    if any(axis is not None for v in operands for axis in jax.typeof(v).sharding.spec):
        return "an operand sharded over explicit axes of the mesh"
    reason = collective.reason_for_lax_of_types(operands, sent, axes)
    return reason or select.unsupported_dtype(collective_operation, dtype.name)


def ranks(operation: str, axes: tuple[Hashable, ...]) -> int:
    """How many ranks the axes have; a NameError if they are not bound."""
    with collective.left_to_lax(operation, "an axis that is not bound"):
        return int(lax.psum(1, axes))


def varying_alike(operands: Sequence[Any], axes: tuple[Hashable, ...]) -> list[Any]:
    """The operands, cast to vary over the axes and over all that one of them varies over.

    The transpose of the cast sums: a replicated matrix gets the sum of all ranks' derivatives. So
    with weak types, if all have one: the primitives' derivatives have none, and are cast back.
    """
    over = set(axes).union(*(jax.typeof(v).manual_axis_type.varying for v in operands))
    if all(jax.typeof(v).weak_type for v in operands):
        operands = [compat.with_weak_type(v, False) for v in operands]
    return [collective.varying(v, sorted(over, key=str)) for v in operands]


# Products.


def dot(x: Any, w: Any, dtype: Any, precision: Any, transposed: bool) -> Any:
    """The product of x and a matrix, rounded once. The dtypes of the two may differ."""
    dimensions = (((x.ndim - 1,), (1 if transposed else 0,)), ((), ()))
    return _dot_general(x, w, dimensions, dtype, precision)


def dot_of_matrix(x: Any, y: Any, dtype: Any, precision: Any, transposed: bool) -> Any:
    """The derivative by a matrix: of x, and the derivative y by the product of the two."""
    rows = tuple(range(x.ndim - 1))
    first, second = (y, x) if transposed else (x, y)
    return _dot_general(first, second, ((rows, rows), ((), ())), dtype, precision)


def _dot_general(x: Any, y: Any, dimensions: Any, dtype: Any, precision: Any) -> Any:
    # XLA would round operands of different dtypes to the result's.
    wide = dtype if x.dtype == y.dtype else _widest(x.dtype, y.dtype, dtype)
    product = lax.dot_general(
        x, y, dimensions, precision=precision, preferred_element_type=np.dtype(wide)
    )
    return product.astype(dtype)


def _widest(*dtypes: Any) -> Any:
    """The narrowest dtype that has all values of these, whatever promotion JAX is told to do."""
    # Those of 8 bits and less, which JAX promotes to no other one, are all in bfloat16.
    known = [
        jnp.bfloat16
        if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize == 1
        else dtype
        for dtype in dtypes
    ]
    with jax.numpy_dtype_promotion("standard"):
        return reduce(jnp.promote_types, known)


def dot_shape(x: Any, w: Any, transposed: bool) -> tuple[int, ...]:
    """The shape of a product."""
    return (*x.shape[:-1], w.shape[0 if transposed else 1])


def split(operands: Sequence[Any], pairs: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The xs, the ws and the addend, if there is one, of a sum of products."""
    return (
        list(operands[:pairs]),
        list(operands[pairs : 2 * pairs]),
        list(operands[2 * pairs :]),
    )


def sum_of_dots(
    operands: Sequence[Any], pairs: int, dtype: Any, precision: Any, transposed: bool
) -> Any:
    """The sum of products and of an addend, accumulated in float32 at least, and rounded once."""
    xs, ws, addend = split(operands, pairs)
    if pairs == 1 and not addend:
        return dot(xs[0], ws[0], dtype, precision, transposed)
    short = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    wide = np.dtype(np.float32) if short else dtype
    terms = [dot(x, w, wide, precision, transposed) for x, w in zip(xs, ws, strict=True)]
    terms += [v.astype(wide) for v in addend]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.astype(dtype)


def sum_of_dots_aval(
    *operands: Any, pairs: int, dtype: Any, transposed: bool, **params: Any
) -> Any:
    """The type of `sum_of_dots`; takes all parameters of a primitive."""
    del params
    if pairs == 0:
        return operands[0].update(dtype=np.dtype(dtype), weak_type=False)
    x, w = operands[0], operands[pairs]
    shape = dot_shape(x, w, transposed)
    return x.update(shape=shape, dtype=np.dtype(dtype), weak_type=False)


# Primitives.

# A collective of one array.
Send = Callable[[Any], Any]

# From a primitive's parameters to a collective and those of its own.
CollectiveOf = Callable[..., tuple[collective.Collective, dict[str, Any]]]


def by_lax(operation: str, reason: str, send: Send) -> Send:
    """A collective of lax in place of ours, which says why."""

    def with_reason(v: Any) -> Any:
        with collective.left_to_lax(operation, reason):
            return send(v)

    return with_reason


class CollectiveMatmul(collective.Primitives):
    """A primitive that is a collective and products, overlapped or one after another.

    Overlapped it is one custom call, which an all_gather may follow. Else the collective is ours or
    lax's, as its own rules choose.
    """

    def __init__(
        self,
        operation: str,
        by_parts: Callable[..., list[Any]],
        sent: Callable[..., Any],
        collective_of: CollectiveOf,
        request: Callable[..., overlapped.Request | str],
        gather_of: CollectiveOf | None = None,
    ):
        """Creates the primitives.

        Args:
            operation: its name.
            by_parts: what it computes, from the collective (a function of one array), the operands
                and the parameters.
            sent: the type of what the collective gathers or sums, from the operands' types and the
                parameters.
            collective_of: the collective and its parameters, from the parameters.
            request: what may be overlapped, or why nothing can be, from the operands' types and
                the parameters.
            gather_of: of an operation that is overlapped as a matmul_reduce_scatter of all rows:
                what gathers them then, from the parameters. Ours or lax's, as its rules choose.
        """
        super().__init__(operation)
        self._request = request
        self.by_parts = by_parts
        self._sent = sent
        self._collective_of = collective_of
        self._gather_of = gather_of

    def define(
        self,
        abstract_eval: Callable[..., Any],
        jvp: Callable[..., Any],
        transpose: Callable[..., Any],
        batch: Callable[..., tuple[Any, Any]],
        needed: compat.Needed | None = None,
    ) -> None:
        """Registers the rules.

        Args:
            abstract_eval: from types to types.
            jvp: from a function that binds this primitive, the operands, their tangents and the
                parameters to the results and theirs.
            transpose: from cotangents, operands and parameters to the operands' cotangents.
            batch: from operands, their batch dimensions and parameters to the results and theirs,
                or to None for results by the collective and products of batches, and theirs.
            needed: as in `Primitives.register`.
        """
        self._batch_rule = batch

        def jvp_of(
            primitive: Any, primals: Any, tangents: Any, *, traced_over: Any, **params: Any
        ) -> Any:
            bind = partial(primitive.bind, traced_over=traced_over)
            return jvp(bind, primals, tangents, **params)

        self.register(abstract_eval, self._lower, jvp_of, transpose, self._batch, needed)

    def send(self, **params: Any) -> Send:
        """The collective by itself, bound for where this is traced."""
        own, its_params = self._collective_of(**params)
        return lambda v: own.bind(v, **its_params)[0]

    def described(
        self, place: collective.Place, avals: Sequence[Any], **params: Any
    ) -> list[collective.Description]:
        """What a call runs as, for `explain`; the processes of the mesh may meet."""
        traced_over = params.pop("traced_over")
        own, its_params = self._collective_of(**params)
        sent = self._sent(*avals, **params)
        alone = len(avals) == 1  # a collective, to which no product is left
        found = self._overlapped(place, avals, traced_over, params)
        rest: list[collective.Description] = []
        if not isinstance(found, str):
            selected = select.Selection(found.operation, found.reason)
            if self._gather_of is not None:
                gather, its_params = self._gather_of(**params)
                part = sent.update(shape=(found.request.rows, *found.request.ns))
                rest = gather.described(place, [part], traced_over=traced_over, **its_params)
        else:
            ((_, selected),) = own.operations(place, [sent], traced_over=traced_over, **its_params)
            if not alone:
                order = "before" if self.operation == "all_gather_matmul" else "after"
                reason = (
                    f"{own.operation} {order} the matmul, not overlapped ({found}); "
                    f"{selected.reason}"
                )
                selected = dataclasses.replace(selected, reason=reason)
        return [
            collective.Description(
                own.operation if alone else self.operation,
                list(avals),
                collective.nbytes(sent),
                selected,
            ),
            *rest,
        ]

    def _overlapped(
        self, place: collective.Place, avals: Sequence[Any], traced_over: Any, params: Any
    ) -> overlapped.Overlapped | str:
        request = self._request(*avals, **params)
        if isinstance(request, str):
            return request
        operation = self.operation if self._gather_of is None else "matmul_reduce_scatter"
        return overlapped.find(operation, place, traced_over, params["axes"], request)

    def _lower(self, ctx: Any, *operands: Any, traced_over: Any, **params: Any) -> Any:
        found = self._overlapped(collective.place_of(ctx), ctx.avals_in, traced_over, params)

        def sent_by(collective_of: CollectiveOf, v: Any) -> Any:
            own, its_params = collective_of(**params)
            return own.bind_as_traced(v, traced_over=traced_over, **its_params)[0]

        def compute(*operands: Any) -> list[Any]:
            if isinstance(found, str):
                return self.by_parts(partial(sent_by, self._collective_of), *operands, **params)
            results = found(*operands)
            if self._gather_of is not None:
                whole = sent_by(self._gather_of, results[0])
                results = [whole.reshape(ctx.avals_out[0].shape)]
            return results

        return mlir.lower_fun(compute)(ctx, *operands)

    def _batch(
        self,
        name: Hashable,
        size: int,
        operands: Sequence[Any],
        dims: Sequence[Any],
        /,  # a parameter of a primitive may be called "size" too
        **params: Any,
    ) -> tuple[Any, Any]:
        # A batch that is itself spread over mesh axes (spmd_axis_name) varies over them.
        operands = varying_alike(operands, ())
        if name not in params["axes"]:
            results, out_dims = self._batch_rule(operands, dims, **params)
            if results is not None:
                return results, out_dims
            # A product of batches is none of ours.
            by_parts = partial(self.by_parts, self.send(**params), **params)
            mapped = jax.vmap(by_parts, tuple(dims), out_dims, axis_size=size)
            return mapped(*operands), out_dims
        # The mapped axis has the name of a mesh axis, and so hides it.
        own, its_params = self._collective_of(**params)

        send = by_lax(
            self.operation,
            collective.reason_of_hidden(name),
            lambda v: own.by_lax([v], **its_params)[0],
        )
        by_parts = partial(self.by_parts, send, **params)
        mapped = jax.vmap(by_parts, tuple(dims), 0, axis_name=name, axis_size=size)
        results = mapped(*operands)
        return results, [0] * len(results)


# Rules of sums of products.


def jvp_of_sum(
    bind: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    pairs: int,
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    """The tangent of the collective of a sum of products: one collective of more products."""
    (result,) = bind(*primals, pairs=pairs, **params)
    xs, ws, _ = split(primals, pairs)
    dxs, dws, addend = (
        [t if type(t) is not ad.Zero else None for t in part] for part in split(tangents, pairs)
    )
    terms = [(dx, w) for dx, w in zip(dxs, ws, strict=True) if dx is not None]
    terms += [(x, dw) for x, dw in zip(xs, dws, strict=True) if dw is not None]
    operands = [x for x, _ in terms] + [w for _, w in terms] + [v for v in addend if v is not None]
    if not operands:
        return [result], [ad.Zero(jax.typeof(result).to_tangent_aval())]
    return [result], list(bind(*operands, pairs=len(terms), **params))


def transpose_of_sum(
    ct: Any, operands: Sequence[Any], pairs: int, precision: Any, transposed: bool
) -> list[Any]:
    """The cotangents of the operands of `sum_of_dots`; none for those that are not linear."""
    xs, ws, addend = split(operands, pairs)
    of_xs = [
        dot(ct, w, x.aval.dtype, precision, not transposed) if ad.is_undefined_primal(x) else None
        for x, w in zip(xs, ws, strict=True)
    ]
    of_ws = [
        dot_of_matrix(x, ct, w.aval.dtype, precision, transposed)
        if ad.is_undefined_primal(w)
        else None
        for x, w in zip(xs, ws, strict=True)
    ]
    of_addend = [ct.astype(v.aval.dtype) if ad.is_undefined_primal(v) else None for v in addend]
    return of_xs + of_ws + of_addend


def batches_first(operands: Sequence[Any], dims: Sequence[Any], pairs: int) -> list[Any] | None:
    """The operands of a sum of products with the batch as first dimension of the xs and the addend.

    None if the batch is not one more dimension of them: if one of them has none, or a matrix has.
    """
    xs, ws, addend = split(dims, pairs)
    if any(d is not None for d in ws) or None in (*xs, *addend):
        return None
    return [v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(operands, dims, strict=True)]
