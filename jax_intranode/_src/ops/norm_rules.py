"""The primitives of a sum over ranks with a residual and a norm: all share the rules here."""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jax_intranode._src.ops import collective
from jax_intranode._src.ops.collective import PsumParams, PsumScatterParams, psum_p, psum_scatter_p
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Decision, Operation, OpPrimitive, nbytes, own_equations
from jax_intranode._src.selection import config, select, table


@dataclass(frozen=True)
class NormParams(collective.Params):
    """Parameters of the primitives.

    Their operands are x, the residual, the weight and, if there is one, the bias. Their results are
    the normalized rows and the new residual.

    Attributes:
        norm: "rms_norm" or "layer_norm".
        eps: added to the mean of the squares.
        weight_offset: added to the weight.
        dimension: the dimension of x that is divided among the ranks; None for a psum.
        world_size: number of ranks.
        invariant: as in `PsumParams`.
    """

    norm: str
    eps: float
    weight_offset: float
    dimension: int | None
    world_size: int
    invariant: bool

    @property
    def primitive(self) -> OpPrimitive:
        """The primitive that has these parameters."""
        return PRIMITIVES[self.norm, self.dimension is not None]

    @own_equations()
    def by_lax(self, xs: Sequence[Any]) -> list[Any]:
        """The same from ``jax.lax``'s sum, equal but for rounding."""
        x, residual, weight, *bias = xs
        if self.dimension is None:
            total = lax.psum(x, self.axes)
        else:
            total = lax.psum_scatter(x, self.axes, scatter_dimension=self.dimension, tiled=True)
        h = total + residual
        normalized, _ = _normalized(h, self)
        y = normalized * _scale(weight, self, normalized.dtype)
        for b in bias:
            y += b.astype(y.dtype)
        return [y.astype(x.dtype), h]


PRIMITIVES = {
    (norm, scatters): OpPrimitive(f"{'psum_scatter' if scatters else 'psum'}_residual_{norm}")
    for norm in ("rms_norm", "layer_norm")
    for scatters in (False, True)
}


# The formula. It computes in float32 (float64 for float64).


def _normalized(h: Any, params: NormParams) -> tuple[Any, Any]:
    """The rows before they are scaled, and the factor 1 / sqrt(v + eps) of each row."""
    h = h.astype(jnp.promote_types(h.dtype, jnp.float32))
    if params.norm == "layer_norm":
        h = h - h.mean(-1, keepdims=True)
    factor = 1 / jnp.sqrt((h * h).mean(-1, keepdims=True) + params.eps)
    return h * factor, factor


def _scale(weight: Any, params: NormParams, dtype: Any) -> Any:
    weight = weight.astype(dtype)
    return weight + params.weight_offset if params.weight_offset != 0 else weight


# Abstract evaluation.


def _abstract_eval(x: Any, residual: Any, weight: Any, *bias: Any, params: NormParams) -> list[Any]:
    del x, weight, bias  # _varying has made the residual's type that of the results
    return [residual, residual]


# Selection.


def _select(site: LoweringSite, avals: Sequence[Any], params: NormParams) -> select.Selection:
    reason = site.reason_for_lax()
    if reason is not None:
        return select.Selection("lax", reason)
    assert site.mesh is not None  # or there would be a reason
    operation, rows = params.primitive.operation, math.prod(avals[1].shape[:-1])
    dtype, hidden = avals[0].dtype.name, avals[0].shape[-1]

    def selected_by(*, topology: str, **facts: Any) -> select.Selection:
        return select.select_norm(operation, rows=rows, hidden=hidden, dtype=dtype, **facts)

    return collective.selector(site.mesh, params.axes)(
        select.static_reason(
            operation, dtype, params.world_size, is_empty=rows == 0, hidden=hidden
        ),
        selected_by,
    )


def is_faster(site: LoweringSite, x: Any, params: NormParams) -> bool:
    """Whether a norm is faster than a sum and what XLA makes of the rest, for x of this type.

    A row of the table says so, or JAX_INTRANODE_FUSE_NORMS.
    """
    wanted = config.get().fuse_norms
    if wanted != "auto" or site.mesh is None:
        return wanted == "always"
    return table.fuses_norm(
        params.primitive.operation,
        nbytes=nbytes(x) // (1 if params.dimension is None else params.world_size),
        dtype=x.dtype.name,
        hidden=x.shape[-1],
        world_size=params.world_size,
        **collective.facts_of(site.mesh),
    )


def _decide(site: LoweringSite, avals: Sequence[Any], params: NormParams) -> Decision:
    primitive, dimension, part = params.primitive, params.dimension, avals[1]
    selected = _select(site, avals, params)

    def lower(ctx: Any, *operands: Any) -> list[Any]:
        if selected.algorithm == "lax":
            return collective.lower_to_lax(ctx, primitive, operands, params, selected)
        (x, *others), (of_x, *of_others) = operands, avals
        if dimension is not None:

            def divide(v: Any) -> Any:
                """Stacks the ranks' parts, as the custom call expects them."""
                return collective.stack_parts(v, dimension, params.world_size)

            stacked = of_x.update(shape=(params.world_size, *part.shape))
            (x,) = collective.arranged(ctx, divide, x, of_x, stacked)
            of_x = stacked
        return collective.lower_to_call(
            ctx.replace(avals_in=[of_x, *of_others]),
            primitive,
            [x, *others],
            site.mesh,
            params.axes,
            selected,
            communicated=[of_x],
            attributes={
                "eps": np.float32(params.eps),
                "weight_offset": np.float32(params.weight_offset),
            },
        )

    return Decision(
        lower,
        lambda: [Operation(primitive.operation, list(avals), nbytes(avals[0]), selected)],
    )


# Differentiation.


def _sum_of_tangent(dx: Any, params: NormParams) -> Any:
    if params.dimension is None:
        summed = PsumParams(params.axes, invariant=params.invariant)
        return psum_p.bind(dx, params=summed)[0]
    scattered = PsumScatterParams(params.axes, params.dimension, True, params.world_size)
    return psum_scatter_p.bind(dx, params=scattered)[0]


def _jvp(
    bind: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], params: NormParams
) -> tuple[list[Any], list[Any]]:
    """The tangents, as functions of the new residual and the operands' tangents.

    With n = (h - m) * f, the normalized rows: dn = f * (d - n * mean(n * d)), where d is dh without
    its mean if the norm is LayerNorm.
    """
    normed, new_residual = bind(*primals, params=params)
    dx, dresidual, dweight, *dbias = [None if type(t) is ad.Zero else t for t in tangents]
    weight = primals[2]
    n, factor = _normalized(new_residual, params)
    dh = None if dx is None else _sum_of_tangent(dx, params)
    if dresidual is not None:
        dh = dresidual if dh is None else dh + dresidual
    terms = []
    if dh is not None:
        d = dh.astype(n.dtype)
        if params.norm == "layer_norm":
            d = d - d.mean(-1, keepdims=True)
        dn = factor * (d - n * (n * d).mean(-1, keepdims=True))
        terms.append(dn * _scale(weight, params, n.dtype))
    if dweight is not None:
        terms.append(n * dweight.astype(n.dtype))
    for db in dbias:
        if db is not None:
            terms.append(jnp.broadcast_to(db.astype(n.dtype), n.shape))
    dnormed = functools.reduce(jnp.add, terms).astype(normed.dtype) if terms else None
    return [normed, new_residual], [
        ad.Zero(jax.typeof(v).to_tangent_aval()) if t is None else t
        for v, t in ((normed, dnormed), (new_residual, dh))
    ]


def _transpose(cotangents: Sequence[Any], *operands: Any, params: NormParams) -> list[Any]:
    raise NotImplementedError(
        f"{params.primitive.operation} is not linear, so it has no transpose; differentiate it"
    )


# Batching: rows are independent, so the batch is one more dimension of them.


def _batch(
    name: Hashable, size: int, operands: Sequence[Any], dims: Sequence[Any], params: NormParams
) -> tuple[list[Any], list[Any]]:
    primitive = params.primitive
    if name in params.axes:
        return collective.batch_over_hidden_axis(primitive, name, size, operands, dims, params, 0)
    if any(d is not None for d in dims[2:]):
        # Each element has its own parameters: one operation after another.
        moved = [
            v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(operands, dims, strict=True)
        ]

        def one(index: Any) -> list[Any]:
            chosen = [v if d is None else v[index] for v, d in zip(moved, dims, strict=True)]
            return primitive.bind(*chosen, params=params)

        return lax.map(one, jnp.arange(size)), [0, 0]
    x, residual = (
        jnp.broadcast_to(v, (size, *v.shape)) if d is None else jnp.moveaxis(v, d, 0)
        for v, d in zip(operands[:2], dims[:2], strict=True)
    )
    if params.dimension is not None:
        params = replace(params, dimension=params.dimension + 1)
    return primitive.bind(x, residual, *operands[2:], params=params), [0, 0]


# Registration.

for _primitive in PRIMITIVES.values():
    _primitive.register(
        abstract_eval=_abstract_eval,
        decide=_decide,
        jvp=_jvp,
        transpose=_transpose,
        batch=_batch,
    )
