"""Every use of private JAX, each with the versions that need it. Nothing else imports jax._src.

Seen with jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

from typing import Any

import jax
from jax._src import dispatch, distributed
from jax.extend.core import Primitive


def lower_with_devices(primitive: Primitive) -> None:
    """Has programs with this primitive lowered anew for each order of devices.

    0.10.2 and later: else a lowering that holds device ids is reused, under ``jax.set_mesh``, for
    a mesh whose devices come in another order. There is no public way to ask for it.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def key_value_client() -> Any | None:
    """The client of JAX's key-value store; None when jax.distributed is not initialised.

    0.10.2 and later: ``jax.distributed`` has no public store.
    """
    return distributed.global_state.client


def lowering_mesh(ctx: Any) -> tuple[Any, frozenset[str]] | None:
    """The mesh and the manual axes that a lowering rule runs under; None outside shard_map.

    0.10.2 and later: the module context is handed to lowering rules, its fields are private.
    """
    axis_context = ctx.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh):
        return None
    return mesh, frozenset(axis_context.manual_axes)


def lowering_for_export(ctx: Any) -> bool:
    """Whether a lowering rule runs under ``jax.export``. 0.10.2 and later, as above."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def lowering_program_name(ctx: Any) -> str:
    """The name of the program that is being lowered. 0.10.2 and later, as above."""
    return str(ctx.module_context.module.operation.attributes["sym_name"])
