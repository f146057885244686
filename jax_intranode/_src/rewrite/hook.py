"""What runs when JAX lowers a program."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from jax_intranode._src.jax_private import jaxpr_walk, lowering_context, trace_state
from jax_intranode._src.ops.lowering_site import LoweringSite, device_ids
from jax_intranode._src.rewrite import mode
from jax_intranode._src.rewrite.explicit import rewrite_program
from jax_intranode._src.rewrite.jaxprs import has_collectives, rewrite_shard_map

_log = logging.getLogger("jax_intranode")


class _Totals(threading.local):
    """The collectives of the program that this thread lowers, and the program's name."""

    program = ""
    taken = 0
    left = 0


_totals = _Totals()


def lower_program(jaxpr: Any, platforms: tuple[str, ...], lower: Callable[[Any], Any]) -> Any:
    """Lowers a program: `lower` gets the jaxpr as it is to be lowered.

    Under ``jax.set_mesh`` the jaxpr of a shard_map without ``mesh=`` names no devices, so JAX would
    reuse its lowering, which holds device ids, for a mesh with other devices. Hence the devices are
    part of the cache's key while such a program is lowered.
    """
    if not mode.enabled.value:
        return lower(jaxpr)
    # Lowering one program may compile another, for instance to compute a constant.
    around = _totals.program, _totals.taken, _totals.left
    _totals.taken = _totals.left = 0
    try:
        jaxpr = rewrite_program(jaxpr, platforms)
        mesh = trace_state.set_mesh()
        on = mode.enabled.value
        key = (on, device_ids(mesh)) if mesh is not None and _over_set_mesh(jaxpr) else on
        with mode.enabled(key):
            lowered = lower(jaxpr)
        if _totals.taken + _totals.left and on != mode.PART:
            _log.info(
                "Lowered %s: %d collectives of jax.lax replaced, %d left.",
                _totals.program,
                _totals.taken,
                _totals.left,
            )
        return lowered
    finally:
        _totals.program, _totals.taken, _totals.left = around


def rewrite_body(ctx: Any, params: dict[str, Any]) -> Any:
    """The jaxpr of a shard_map's body as it is to be lowered.

    It raises as `Body.refuse_if_strict`.
    """
    jaxpr = jaxpr_walk.body_of_shard_map(params)
    if not mode.enabled.value or not has_collectives(jaxpr):
        return jaxpr
    mesh, manual = jaxpr_walk.mesh_of_shard_map(params)
    site = LoweringSite(
        mesh,
        manual,
        lowering_context.lowering_platforms(ctx),
        lowering_context.lowering_for_export(ctx),
    )
    if mode.is_auto() and site.auto_axes() and not site.for_export:
        return jaxpr  # once it is known how its arrays are sharded over the other axes: see auto/
    rewritten, body = rewrite_shard_map(site, params)
    body.refuse_if_strict("Collectives of jax.lax")
    if mode.enabled.value != mode.PART:
        body.log("is left to jax.lax")
    _totals.program = lowering_context.lowering_program_name(ctx)
    _totals.taken += body.taken()
    _totals.left += body.left()
    return rewritten


def _over_set_mesh(jaxpr: Any) -> bool:
    """Whether a jaxpr has a shard_map with collectives that names no devices."""
    return any(
        jaxpr_walk.shard_map_of(equation) is not None
        and not isinstance(equation.params["mesh"], jax.sharding.Mesh)
        and has_collectives(jaxpr_walk.body_of_shard_map(equation.params))
        for equation in jaxpr_walk.equations(jaxpr)
    )
