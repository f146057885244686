"""The context of a lowering rule, and what a rule returns.

0.10.2 and later: JAX passes the module context to lowering rules, but its fields are private.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.mlir.dialects import stablehlo
from jaxlib.version import __version__ as jaxlib_version


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule runs for."""
    return tuple(ctx.module_context.platforms)


def lowering_mesh(ctx: Any) -> tuple[Any, frozenset[str]] | None:
    """The mesh and the manual axes that a lowering rule runs under; None outside of shard_map."""
    axis_context = ctx.module_context.axis_context
    of_program = getattr(axis_context, "mesh", None)
    if not isinstance(of_program, jax.sharding.Mesh):
        return None
    return of_program, frozenset(axis_context.manual_axes)


def lowering_for_export(ctx: Any) -> bool:
    """Whether a lowering rule runs under ``jax.export``."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def lowering_for_call() -> bool:
    """Whether the program that is lowered is called, and not only asked for by ``lower``.

    0.10.2 to 0.12: the function below calls a program. Where it has another name, this is False.
    """
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "_pjit_call_impl_python":
        frame = frame.f_back
    return frame.f_back is not None


def lowering_program_name(ctx: Any) -> str:
    """The name of the program that is lowered."""
    return str(ctx.module_context.module.operation.attributes["sym_name"].value)


def called_once(results: Sequence[Any]) -> list[Any]:
    """The results of a lowered custom call for GPUs, arranged so that XLA runs the call once. 0.11.

    Where a scan stacks a result for the backward pass, XLA lets a copy of the call write it in
    place. With jaxlib 0.11 other uses of the result keep the original call, which then runs too
    (fixed by openxla/xla#45799). XLA does not look through an optimization barrier: with one the
    stacked result is copied.
    """
    if not jaxlib_version.startswith("0.11."):
        return list(results)
    return [stablehlo.OptimizationBarrierOp([v]).results[0] for v in results]


def device_platform(device: Any) -> str:
    """The platform that programs for a device are lowered for, as in `lowering_platforms`.

    0.10.2 and later: ``Device.platform`` is "gpu" for CUDA and for other GPUs.
    """
    return str(getattr(device.client, "_raw_platform", device.client.platform))
