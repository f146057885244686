"""Every use of private JAX, each with the versions that need it. Nothing else imports jax._src.

Seen with jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

from typing import Any

import jax
from jax._src import config, dispatch, distributed
from jax._src.interpreters import partial_eval
from jax.extend.core import Primitive


def lower_with_devices(primitive: Primitive) -> None:
    """Has programs with this primitive lowered anew for each order of devices.

    0.10.2 and later: else a lowering that holds device ids is reused, under ``jax.set_mesh``, for
    a mesh whose devices come in another order. There is no public way to ask for it.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def drop_unused_results(primitive: Primitive) -> None:
    """Has unused results dropped, with their operands, from a primitive that maps n to n arrays.

    0.10.2 and later; 0.12 hands rules one more argument. ``jax.interpreters`` has no way to ask
    for it.
    """

    def rule(used: list[bool], *arguments: Any) -> tuple[list[bool], Any]:
        equation = arguments[-1]
        if not any(used):
            return used, None
        keep = [i for i, u in enumerate(used) if u]
        return used, equation.replace(
            invars=[equation.invars[i] for i in keep], outvars=[equation.outvars[i] for i in keep]
        )

    partial_eval.dce_rules[primitive] = rule


def check_vma() -> bool:
    """Whether this is traced under ``shard_map(..., check_vma=True)``. 0.10.2 and later.

    The public way, to ask what ``lax.axis_index`` varies over, leaves an equation behind.
    """
    return bool(config._check_vma.value)


def types_are_usual() -> bool:
    """Whether settings are at their defaults that change which axes a type names.

    0.10.2 and later: with others, ``lax.psum`` alone knows what is right.
    """
    return bool(config.auto_pcast.value) and not config.remove_size_one_mesh_axis_from_type.value


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
