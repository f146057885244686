"""Partitions: how an operation over some axes of a mesh divides its devices into groups."""

import functools
import math
from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class Partition:
    """A partition of devices into groups of one size.

    Attributes:
        device_ids: the global ids of all groups' devices, group after group, each in rank order.
        group_size: number of ranks in a group.
        permutes: whether it is served by a region for permutes alone (xla_ffi/kernels/permute.h).
    """

    device_ids: tuple[int, ...]
    group_size: int
    permutes: bool = False

    def groups(self) -> list[tuple[int, ...]]:
        """The groups' device ids, in rank order."""
        n = self.group_size
        return [self.device_ids[i : i + n] for i in range(0, len(self.device_ids), n)]


@functools.lru_cache(maxsize=64)
def partition(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> Partition:
    """The groups of an operation over `axes` of a mesh; ranks in row-major order of `axes`."""
    ids = np.array([device.id for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    kept = [i for i, name in enumerate(mesh.axis_names) if name not in axes]
    order = kept + [mesh.axis_names.index(name) for name in axes]
    size = math.prod(mesh.shape[name] for name in axes)
    return Partition(tuple(ids.transpose(order).reshape(-1).tolist()), size)
