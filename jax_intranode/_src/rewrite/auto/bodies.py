"""The shard_maps of groups of operations, judged by what runs of them, and lowered."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.mlir import ir

from jax_intranode._src import reasons
from jax_intranode._src.health import call_sites
from jax_intranode._src.jax_private import jaxpr_walk, trace_state
from jax_intranode._src.jax_private.mlir_text import source_of
from jax_intranode._src.ops import collective_matmul, norm_rules
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.rewrite.auto.groups import Group
from jax_intranode._src.rewrite.auto.modules import (
    as_bytecode,
    functions_of,
    inline_calls,
    operations,
    use_mesh,
    walk,
)
from jax_intranode._src.rewrite.auto.plans import partition_spec
from jax_intranode._src.rewrite.auto.program import Program
from jax_intranode._src.rewrite.jaxprs import rewrite_shard_map

_NORMS = frozenset(each.plain for each in norm_rules.PRIMITIVES.values())
# Matmuls that overlap with all of their collectives.
_OVERLAPPED = frozenset(
    each.plain
    for each in (
        collective_matmul.all_gather_matmul_p,
        collective_matmul.matmul_reduce_scatter_p,
        collective_matmul.gradients_of_all_gather_matmul_p,
        collective_matmul.gradients_of_matmul_reduce_scatter_p,
    )
)


@dataclass(frozen=True)
class Judged:
    """A shard_map that was traced.

    Attributes:
        jaxpr: the jaxpr that it is the only equation of.
        traced: JAX's record.
        left: why lax would run a collective of it; None if all are ours.
        has_norm: whether it has a sum with a norm as one operation.
        overlaps: whether overlapped matmuls have all of its collectives.
    """

    jaxpr: Any
    traced: Any
    left: str | None
    has_norm: bool
    overlaps: bool = False


def _as_placed(group: Group, function: Callable[[], Any]) -> Any:
    """Calls a function, as in the body of a loop where operands may be copied."""
    return trace_state.body_of_loop(function) if group.copies() else function()


class Bodies:
    """The shard_maps of one program. Groups that are alike share one."""

    def __init__(self, name: str, program: Program, site: LoweringSite):
        """Begins with none.

        Args:
            name: the program's; call sites have it.
            program: the program.
            site: the program's mesh, all of whose axes are manual in a shard_map.
        """
        self._name = name
        self._program = program
        self._site = site
        self._judgements: dict[Any, Judged] = {}
        self._lowered: dict[Any, Any] = {}
        self._modules: list[Any] = []  # which have the operations

    def judged(self, group: Group) -> Judged:
        """What this package would run of the shard_map of a group."""
        key = group.key(), group.copies()
        if key not in self._judgements:
            self._judgements[key] = _as_placed(group, partial(self._judge, group))
        return self._judgements[key]

    def _judge(self, group: Group) -> Judged:
        inputs, _ = group.inputs()
        body = group.body()
        # Call sites have the name of the program that they are in, which is that of what is jitted.
        body.__name__ = body.__qualname__ = self._name
        mapped = jax.shard_map(
            body,
            mesh=self._program.mesh,
            in_specs=tuple(partition_spec(one.spec) for one in inputs),
            out_specs=[partition_spec(m.plan.result) for m in group.members for _ in m.outputs()],
            check_vma=False,
        )
        traced = jax.jit(mapped).trace(*[one.aval for one in inputs])
        jaxpr = jaxpr_walk.without_dead_code(traced.jaxpr)
        (equation,) = jaxpr.eqns
        rewritten, record = rewrite_shard_map(self._site, equation.params)
        primitives = [e.primitive for e in jaxpr_walk.equations(rewritten)]
        has_norm = any(primitive in _NORMS for primitive in primitives)
        overlapped = sum(primitive in _OVERLAPPED for primitive in primitives)
        left = [reason for _, reason in record.decisions.values() if reason is not None]
        if left:
            return Judged(jaxpr, traced, max(left, key=reasons.is_missed), False)
        nothing = None if record.decisions else reasons.NO_COLLECTIVE
        overlaps = 0 < overlapped == len(record.decisions)
        return Judged(jaxpr, traced, nothing, has_norm, overlaps)

    def lowered(self, group: Group) -> tuple[Any, int] | None:
        """The MLIR operation of the shard_map of a group, and how many operations of ours it has.

        None if it is not all ours.
        """
        judged = self.judged(group)
        if judged.left is not None:
            return None
        key = group.key(), group.copies()
        if key not in self._lowered:
            source = source_of(group.members[0].candidate.operation)
            with call_sites.at(source):
                lowered = _as_placed(group, judged.traced.lower).compiler_ir()
            self._lowered[key] = self._imported(lowered)
        return self._lowered[key]

    def _imported(self, lowered: Any) -> tuple[Any, int] | None:
        """The shard_map of a lowered module, with the mesh of the program."""
        with lowered.context:
            text = as_bytecode(lowered)
        module = ir.Module.parse(text)
        functions = functions_of(module)
        main = functions["main"]
        inline_calls(main, functions)
        for mesh in [o for o in operations(module.body) if o.name == "sdy.mesh"]:
            # All are over the same axes. Some differ in which of them are manual.
            use_mesh(self._program.mesh_name, mesh, module)
        regions = [o for o in walk(main) if o.name == "sdy.manual_computation"]
        if len(regions) != 1:
            return None
        calls = sum(
            ir.StringAttr(o.attributes["call_target_name"]).value.startswith("jax_intranode_")
            for o in walk(regions[0])
            if o.name == "stablehlo.custom_call"
        )
        if not calls or any(o.name == "func.call" for o in walk(regions[0])):
            return None
        self._modules.append(module)
        return regions[0], calls
