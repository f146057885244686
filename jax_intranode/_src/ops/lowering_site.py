"""Where a call is lowered: its mesh, its platforms, and why they make it fall back to jax.lax."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import lowering_context, trace_state


def device_ids(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """The global ids of a mesh's devices, in its order."""
    return tuple(device.id for device in mesh.devices.flat)


@dataclass(frozen=True)
class LoweringSite:
    """Everything but the call itself that decides what the call runs as.

    Attributes:
        mesh: the mesh of the surrounding shard_map; None if there is none, or if its devices are
            not known.
        manual: the mesh's manual axes.
        platforms: the platforms that the program is lowered for, in JAX's names.
        for_export: whether ``jax.export`` lowers the program.
        traced_over: the ids of the devices that the call was traced over, if they were known.
    """

    mesh: jax.sharding.Mesh | None
    manual: frozenset[str]
    platforms: tuple[str, ...]
    for_export: bool = False
    traced_over: tuple[int, ...] | None = None

    @classmethod
    def of(cls, ctx: Any, traced_over: tuple[int, ...] | None) -> "LoweringSite":
        """The site of a lowering rule's context, for a call that was traced over these devices."""
        mesh, manual = lowering_context.lowering_mesh(ctx) or (None, frozenset())
        return cls(
            mesh,
            manual,
            lowering_context.lowering_platforms(ctx),
            lowering_context.lowering_for_export(ctx),
            traced_over,
        )

    def traced_here(self) -> "LoweringSite":
        """The site for calls that are traced over its own devices."""
        over = None if self.mesh is None else device_ids(self.mesh)
        return dataclasses.replace(self, traced_over=over)

    def auto_axes(self) -> list[str]:
        """The axes that XLA partitions here, if the mesh is known."""
        shape = {} if self.mesh is None else self.mesh.shape
        return [name for name, size in shape.items() if size > 1 and name not in self.manual]

    def reason_for_lax(self) -> str | None:
        """Why lax runs all calls here; None if they may be accelerated."""
        mesh = self.mesh
        if mesh is None:
            return reasons.NO_MESH
        if self.for_export:
            return reasons.EXPORT
        if len(self.platforms) > 1:
            return reasons.PLATFORMS.of(platforms=", ".join(self.platforms))
        if self.traced_over is None:
            if trace_state.set_mesh() is not None:
                return reasons.WITHOUT_SET_MESH
        elif self.traced_over != device_ids(mesh):
            return reasons.OTHER_DEVICES
        platform = {"cpu": "cpu", "cuda": "gpu"}.get(self.platforms[0])
        if platform is None:
            return reasons.PLATFORM.of(platform=self.platforms[0])
        # XLA would gather the operand of a custom call over the axes that it partitions itself.
        if auto := self.auto_axes():
            return reasons.AXES_LEFT_TO_XLA.of(axes=reasons.names(auto))
        if mesh.devices.flat[0].platform != platform:
            return reasons.OTHER_PLATFORM.of(platform=self.platforms[0])
        return None
