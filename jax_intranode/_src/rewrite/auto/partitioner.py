"""Which collectives XLA's partitioner adds for an operation: it is compiled alone.

XLA's rules depend on sizes and have no interface. So each different operation is compiled with the
shardings that it has in the program, once per process.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding

from jax_intranode._src import reasons
from jax_intranode._src.jax_private import hlo, trace_state
from jax_intranode._src.rewrite.auto.plans import Collective, Spec, partition_spec

# Nothing of the compiled operation runs, so it need not be fast. Triton takes 0.6 s for a matmul.
_OPTIONS: dict[str, Any] = {
    "cpu": {"xla_backend_optimization_level": 0},
    "gpu": {
        "xla_gpu_autotune_level": 0,
        "xla_gpu_shard_autotuning": False,
        "xla_gpu_enable_triton_gemm": False,
    },
}

# On these platforms XLA spends most of a compilation on kernels, which nobody runs here. It can
# stop before them if it compiles for the devices of a topology. These stand for those of the mesh.
_SLOW_KERNELS = {"gpu"}

_known: dict[Any, tuple[Collective, ...] | str] = {}


def collectives(
    key: Any,
    local: Callable[..., Any],
    avals: Sequence[Any],
    operands: Sequence[Spec],
    result: Spec,
    mesh: jax.sharding.Mesh,
) -> tuple[Collective, ...] | str:
    """The collectives of an operation, in order; or why they are not known.

    Args:
        key: identifies `local`.
        local: the operation.
        avals: the types of its operands.
        operands: how they are sharded.
        result: how the result is sharded.
        mesh: the mesh.
    """
    types = tuple((aval.shape, aval.dtype.name) for aval in avals)
    whole = key, types, tuple(operands), result, mesh
    if whole not in _known:
        _known[whole] = _compiled(local, avals, operands, result, mesh)
    return _known[whole]


def _compiled(
    local: Callable[..., Any],
    avals: Sequence[Any],
    operands: Sequence[Spec],
    result: Spec,
    mesh: jax.sharding.Mesh,
) -> tuple[Collective, ...] | str:
    for target, options in _targets(mesh):
        after = NamedSharding(target, partition_spec(result))
        jitted = jax.jit(
            # Or XLA could make another part of the result, and reshard it after the operation.
            lambda *arrays, after=after: lax.with_sharding_constraint(local(*arrays), after),
            in_shardings=tuple(NamedSharding(target, partition_spec(of)) for of in operands),
            out_shardings=after,
        )
        try:
            with trace_state.without_mesh():
                text = jitted.lower(*avals).compile(options).as_text() or ""
            break
        except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
            why = str(error).splitlines()[0][:100]
    else:
        return reasons.NOT_COMPILED_ALONE.of(error=why)
    # The devices of this program are numbered in the order of its mesh.
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    leaves = hlo.leaves_of(text, mesh.size)
    if leaves is None:
        return reasons.UNKNOWN_COLLECTIVE
    found = []
    for leaf in leaves:
        axes = axes_of_groups(leaf.groups, mesh.axis_names, positions)
        if axes is None:
            groups = sorted(map(sorted, leaf.groups))
            return reasons.UNKNOWN_GROUPS.of(kind=leaf.kind, groups=groups)
        found.append((leaf.kind, axes, int(np.prod(leaf.shape, dtype=np.int64))))
    return tuple(found)


@functools.lru_cache(64)
def _targets(mesh: jax.sharding.Mesh) -> list[tuple[jax.sharding.Mesh, dict[str, Any]]]:
    """The meshes that an operation may be compiled for, the best first, with XLA's options."""
    platform = mesh.devices.flat[0].platform
    options = _OPTIONS.get(platform, {})
    found = [(mesh, options)]
    if platform in _SLOW_KERNELS and not mesh.is_multi_process:  # tried with one process only
        # Before jax 0.12, and where it does not work.
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            topology = topologies.TopologyDescription([*mesh.devices.flat]).serialize()
            others = topologies.TopologyDescription.deserialize(topology).devices
            devices = np.array(others[: mesh.size], dtype=object).reshape(mesh.devices.shape)
            like = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
            found.insert(0, (like, options | {"xla_early_exit_with_layouts": True}))
    return found


def axes_of_groups(
    groups: frozenset[frozenset[int]], names: Sequence[str], positions: Any
) -> frozenset[str] | None:
    """The mesh axes along which the groups of an HLO collective lie; None if there are none.

    Args:
        groups: the groups.
        names: the names of the mesh's axes.
        positions: the device at each position of the mesh.
    """
    first = next(iter(groups))
    where = [np.argwhere(positions == device)[0] for device in first]
    axes = [i for i in range(positions.ndim) if len({int(place[i]) for place in where}) > 1]
    wanted = np.moveaxis(positions, axes, range(-len(axes), 0)).reshape(-1, len(first))
    if {frozenset(map(int, group)) for group in wanted} != groups:
        return None
    return frozenset(names[i] for i in axes)
