"""Collective matmuls of global arrays: outside of shard_map, a call becomes a shard_map.

The shard_map is manual over all axes of the mesh that the call knows: those it communicates over,
`batch_axes`, and explicit axes, whose shardings are part of the operands' types. XLA would gather
the operands of a custom call over any other axis, so a call that leaves one falls back to jax.lax.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import call_frames, trace_state
from jax_intranode._src.ops import fallback

# The mesh axes over which each dimension of an array is divided.
Spec = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class GlobalCall:
    """A call on global arrays.

    Attributes:
        operation: the public function.
        axes: the mesh axes that it communicates over.
        batch_axes: the mesh axes over which the first dimension of x is divided besides.
        mesh: the mesh for shard_map; None for that of ``jax.set_mesh``.
        sizes: the size of each mesh axis.
        explicit: the explicit axes of the mesh.
        manual: the axes that the shard_map binds.
        reason: why lax runs the call; None if it may be accelerated.
    """

    operation: str
    axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    mesh: Any
    sizes: Mapping[str, int]
    explicit: frozenset[str]
    manual: frozenset[str]
    reason: str | None

    def rows(self, x: Any) -> list[tuple[str, ...]]:
        """The mesh axes that divide each dimension of x but the last, without `axes`."""
        spec = [
            tuple(axis for axis in entry if axis not in self.axes) for entry in self._typed(x)[:-1]
        ]
        placed = {axis for entry in spec for axis in entry}
        spec[0] += tuple(axis for axis in self.batch_axes if axis not in placed)
        return spec

    def check_divisible(self, name: str, shape: Sequence[int], spec: Spec) -> None:
        """Raises ValueError if a dimension is not a multiple of the number of its parts."""
        for dimension, (length, axes) in enumerate(zip(shape, spec, strict=True)):
            parts = math.prod(self.sizes[axis] for axis in axes)
            if length % parts:
                raise ValueError(
                    f"{self.operation}: dimension {dimension} of {name}, of shape {tuple(shape)}, "
                    f"is divided over the mesh axes {reasons.names(axes)}; its length must be a "
                    f"multiple of {parts}"
                )

    def run(
        self,
        body: Callable[..., Any],
        operands: Sequence[tuple[str, Any, Spec]],
        out_specs: Sequence[Spec],
        check_vma: bool = True,
    ) -> list[Any]:
        """Runs a function of the ranks' shards, with name, array and spec of each operand.

        Raises:
            ValueError: an operand can't be divided, or its type says that it is sharded over `axes`
                in another way.
        """
        for name, operand, spec in operands:
            self.check_divisible(name, operand.shape, spec)
        mapped = jax.shard_map(
            call_frames.as_called_here(body),
            mesh=self.mesh,
            in_specs=tuple(_partition_spec(spec) for _, _, spec in operands),
            out_specs=[_partition_spec(spec) for spec in out_specs],
            axis_names=set(self.manual),
            check_vma=check_vma,
        )
        return list(mapped(*(self._placed(*operand) for operand in operands)))

    def _typed(self, x: Any) -> list[tuple[str, ...]]:
        """The explicit axes over which the type of x says that each dimension is divided."""
        entries = [_axes(entry) for entry in jax.typeof(x).sharding.spec]
        entries += [()] * (x.ndim - len(entries))
        return [tuple(axis for axis in entry if axis in self.explicit) for entry in entries]

    def _placed(self, name: str, x: Any, spec: Spec) -> Any:
        """The operand with the explicit part of the sharding that shard_map requires."""
        typed = self._typed(x)
        for dimension, (has, needs) in enumerate(zip(typed, spec, strict=True)):
            wrong = [axis for axis in has if axis in self.axes and axis not in needs]
            if wrong:
                raise ValueError(
                    f"{self.operation}: dimension {dimension} of {name}, of type "
                    f"{jax.typeof(x)}, is sharded over {reasons.names(wrong)}; this call needs the "
                    f"sharding {_partition_spec(spec)}. Place {name} with jax.sharding.reshard, or "
                    "pass the arguments that fit its sharding"
                )
        wanted = [tuple(axis for axis in entry if axis in self.explicit) for entry in spec]
        if typed == wanted:
            return x
        place: Any = _partition_spec(wanted)
        if self.mesh is not None:
            place = NamedSharding(self.mesh, place)
        return jax.sharding.reshard(x, place)


def find(operation: str, axis_name: Any, batch_axes: Any, mesh: Any) -> GlobalCall | None:
    """The call on global arrays, if it is one; None where its axes are bound already.

    Raises:
        TypeError: `mesh` is not a mesh.
        ValueError: `mesh` or `batch_axes` is given where an axis is bound, `mesh` differs from that
            in context, or an axis is named twice.
        NameError: an axis is neither bound nor an axis of the mesh.
    """
    axes, batch_axes = _axes(axis_name), _axes(batch_axes)
    bound = [axis for axis in axes if trace_state.axis_is_bound(axis)]
    if bound and (batch_axes or mesh is not None):
        given = "batch_axes" if batch_axes else "mesh"
        raise ValueError(
            f"{operation}: axis {bound[0]!r} is bound here, by shard_map or vmap, and {given} is "
            f"given; {given} is for arrays outside of shard_map, so leave it out"
        )
    if bound or not axes:
        return None
    mesh, found = _mesh(operation, mesh)
    types = {} if found is None else dict(zip(found.axis_names, found.axis_types, strict=True))
    for argument, names in (("axis_name", axes), ("batch_axes", batch_axes)):
        for axis in names:
            if types.get(axis, AxisType.Manual) is AxisType.Manual:
                raise NameError(_unbound(operation, argument, axis, types))
    names = (*axes, *batch_axes)
    twice = [axis for k, axis in enumerate(names) if axis in names[:k]]
    if twice:
        raise ValueError(
            f"{operation}: axis {twice[0]!r} is named twice, in axis_name {axis_name!r} and "
            f"batch_axes {batch_axes!r}; name each axis once"
        )
    assert found is not None  # or the axes would not be found
    of_vmap = trace_state.axes_of_explicit_vmap()
    explicit = frozenset(
        axis for axis, kind in types.items() if kind is AxisType.Explicit and axis not in of_vmap
    )
    of_size_one = {axis for axis in types if found.shape[axis] == 1 and axis not in of_vmap}
    outer = {axis for axis, kind in types.items() if kind is AxisType.Manual}
    manual = (explicit | of_size_one | set(names)) - outer
    left = [axis for axis in types if axis not in manual | outer | of_vmap]
    reason = None
    if of_vmap:
        reason = reasons.AXES_OF_VMAP.of(axes=reasons.names(sorted(of_vmap)))
    elif left:
        reason = reasons.AXES_NOT_NAMED.of(axes=reasons.names(left))
    return GlobalCall(
        operation, axes, batch_axes, mesh, dict(found.shape), explicit, frozenset(manual), reason
    )


def _mesh(operation: str, mesh: Any) -> tuple[Any, Any]:
    """The mesh to pass to shard_map, and the mesh whose axes are found; None if there is none."""
    context = jax.sharding.get_abstract_mesh()
    if mesh is None:
        if not context.empty:
            return None, context
        mesh = trace_state.mesh_of_with()
        return mesh, mesh
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        raise TypeError(f"{operation}: mesh is {mesh!r}; pass a jax.sharding.Mesh")
    if not context.empty and mesh.abstract_mesh != context:
        raise ValueError(
            f"{operation}: mesh is {mesh}, and the mesh in context is {context}; leave mesh out, "
            "or pass the one in context"
        )
    return mesh, mesh


def _unbound(operation: str, argument: str, axis: Any, types: Mapping[str, AxisType]) -> str:
    """The message for an axis that does not exist."""
    bound = sorted(map(str, fallback.bound_axes())) or "none"
    free = [name for name, kind in types.items() if kind is not AxisType.Manual]
    if argument == "batch_axes":
        return (
            f"{operation}: batch_axes has {axis!r}; the axes of the mesh that no shard_map has "
            f"bound are {free}: name some of these"
        )
    return (
        f"unbound axis name: {axis}. jax_intranode.{operation} acts on axes that jax.shard_map "
        "binds or, on global arrays, on axes of the mesh in context. Bound here: "
        f"{bound}; axes of the mesh in context: {free or 'none'}. Call it inside jax.shard_map, "
        "under jax.set_mesh(mesh), or with mesh=mesh"
    )


def _axes(names: Any) -> tuple[Any, ...]:
    """The names of axes, given as one name, several names or None."""
    if names is None:
        return ()
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def _partition_spec(spec: Spec) -> P:
    """The spec as JAX's type."""
    entries: list[Any] = [
        None if not entry else entry[0] if len(entry) == 1 else entry for entry in spec
    ]
    return P(*entries)
