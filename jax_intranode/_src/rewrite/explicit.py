"""Matmuls of plain jit programs under a mesh with Explicit axes, where the jaxpr has all shardings.

XLA's partitioner adds the communication of such a matmul after lowering. Here it becomes a
shard_map whose body communicates by jax.lax, with the shardings that the matmul has. The body is
then rewritten like any other. A matmul whose communication this package would not replace stays as
it is.

- The contracted dimensions are sharded: the products are summed (and scattered, if the result is
  sharded in their place).
- A row or column dimension is sharded and that of the result is not: the operand is gathered.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_intranode._src.jax_private import (
    call_frames,
    equation_kinds,
    jaxpr_edit,
    trace_state,
)
from jax_intranode._src.ops.lowering_site import LoweringSite, device_ids
from jax_intranode._src.rewrite.auto.plans import Plan, Spec, dot_labels, partition_spec, plans
from jax_intranode._src.rewrite.jaxprs import rewrite_shard_map

# What became of a program on some devices. It must live as long as the program, because JAX's cache
# of lowerings does not keep its keys alive.
_rewritten: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def rewrite_program(jaxpr: Any, platforms: tuple[str, ...]) -> Any:
    """A program's jaxpr, closed, with its matmuls over sharded arrays rewritten, if any are.

    It raises as `Body.refuse_if_strict`.
    """
    mesh = trace_state.set_mesh()
    if mesh is None or not _all_explicit(mesh):
        return jaxpr
    known = _rewritten.setdefault(jaxpr, {})
    key = device_ids(mesh), platforms
    if key not in known:
        site = LoweringSite(mesh, frozenset(mesh.axis_names), platforms)
        rewritten = _Program(site).rewrite(jaxpr)
        # The program itself would keep its own entry alive.
        known[key] = None if rewritten is jaxpr else rewritten
    return jaxpr if known[key] is None else known[key]


def _all_explicit(mesh: jax.sharding.Mesh) -> bool:
    """Whether all axes are Explicit. Our kernels need all axes of a mesh in their shard_map."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return all(kind is AxisType.Explicit or mesh.shape[name] == 1 for name, kind in kinds)


class _Program(jaxpr_edit.JaxprRewriter):
    """Rewrites the jaxprs of one program."""

    def __init__(self, site: LoweringSite):
        super().__init__()
        self._site = site

    def rewritten(self, equations: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """The new equations of a jaxpr."""
        return list(map(self._equation, equations))

    def _equation(self, equation: Any) -> Any:
        if equation.primitive.name != "dot_general" or equation_kinds.is_placed(equation):
            return jaxpr_edit.replaced_inside(equation, self.rewrite)
        left, right, result = (_spec(v.aval) for v in (*equation.invars, *equation.outvars))
        if left is None or right is None or result is None:
            return equation
        if equation.outvars[0].aval.dtype == np.bool_:  # lax.psum would count
            return equation
        plan = plan_of(equation.params["dimension_numbers"], (left, right), result)
        return equation if plan is None else self._as_shard_map(equation, plan)

    def _as_shard_map(self, equation: Any, plan: Plan) -> Any:
        how = {k: v for k, v in equation.params.items() if k != "out_sharding"}

        def body(*operands: Any) -> Any:
            whole = list(operands)
            for of in plan.gathers:
                whole[of.operand] = lax.all_gather(
                    whole[of.operand], of.axes, axis=of.dimension, tiled=True
                )
            return plan.summed(lax.dot_general(*whole, **how), "psum")

        sharded = jax.shard_map(
            call_frames.as_called_by(equation, body),
            in_specs=tuple(map(partition_spec, plan.operands)),
            out_specs=partition_spec(plan.result),
            check_vma=False,
        )
        assert self._site.mesh is not None
        with trace_state.under_mesh(self._site.mesh):
            traced = jaxpr_edit.trace(lambda *operands: [sharded(*operands)], _avals(equation))
        if traced is None or len(traced.eqns) != 1:
            return equation
        (new,) = traced.eqns
        _, record = rewrite_shard_map(self._site, new.params)
        if not record.taken():
            # What is taken is seen again when the shard_map is lowered; what is not, only here.
            record.refuse_if_strict("Collectives that XLA's partitioner adds to matmuls")
            record.log("XLA")
            return equation
        return new.replace(
            invars=equation.invars,
            outvars=equation.outvars,
            source_info=equation.source_info,
            ctx=equation.ctx,
        )


def _avals(equation: Any) -> list[Any]:
    return [v.aval for v in equation.invars]


def _spec(aval: Any) -> Spec | None:
    """The axes of each dimension; None if the sharding is of another kind."""
    sharding = aval.sharding
    spec = sharding.spec
    if sharding.mesh.empty or getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None
    entries = [*spec, *[None] * (aval.ndim - len(spec))]
    if any(entry is P.UNCONSTRAINED for entry in entries):
        return None
    return tuple(
        () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for entry in entries
    )


def plan_of(dimension_numbers: Any, operands: tuple[Spec, Spec], result: Spec) -> Plan | None:
    """How a dot_general communicates, if one gather or one sum is the only way; None otherwise."""
    contracting, batch = dimension_numbers
    labels = dot_labels(contracting, batch, [len(spec) for spec in operands])
    found = [p for p in plans(labels, operands, result) if len(p.gathers) + len(p.sums) == 1]
    return found[0] if len(found) == 1 and found[0].operands == operands else None
