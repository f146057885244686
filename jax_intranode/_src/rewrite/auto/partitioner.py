"""Which collectives XLA's partitioner adds for an operation: it is compiled alone.

XLA's rules depend on sizes and have no interface. So each different operation is compiled with the
shardings that it has in the program, once per process.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jax_intranode._src.jax_private import hlo, trace_state
from jax_intranode._src.rewrite.auto.plans import Collective, Spec, partition_spec

# Nothing of the compiled operation runs, so it need not be fast. Triton takes 0.6 s for a matmul.
_OPTIONS = {
    "gpu": {
        "xla_gpu_autotune_level": 0,
        "xla_gpu_shard_autotuning": False,
        "xla_gpu_enable_triton_gemm": False,
    }
}

_COLLECTIVE = re.compile(
    rf"= (\(.*?\)|\S+) ({'|'.join(hlo.KINDS)})(-start)?\(([^()]*).*?"
    r"(?:(?:replica_groups|source_target_pairs)=(\{\}|\{\{[\d,{}]*\}\}|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\([^ ]*\))? \{[^}]*\}))"
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_IOTA = re.compile(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?")
_MESH = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\((\[[\d,]*\](?:T\([\d,]*\))?)\))? \{([^}]*)\}"
)
_SIZE = re.compile(r"'([^']*)'=(\d+)")
_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")

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
    jitted = jax.jit(
        local,
        in_shardings=tuple(NamedSharding(mesh, partition_spec(of)) for of in operands),
        out_shardings=NamedSharding(mesh, partition_spec(result)),
    )
    platform = mesh.devices.flat[0].platform
    try:
        with trace_state.without_mesh():
            lowered = jitted.lower(*avals)
            text = lowered.compile(_OPTIONS.get(platform)).as_text() or ""
    except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
        return f"XLA does not compile it alone: {str(error).splitlines()[0][:100]}"
    # The devices of this program are numbered in the order of its mesh.
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    leaves = leaves_of(text, mesh.size)
    if leaves is None:
        return "XLA adds a collective that is not understood"
    found = []
    for leaf in leaves:
        axes = axes_of_groups(leaf.groups, mesh.axis_names, positions)
        if axes is None:
            return f"XLA adds {leaf.kind} among {sorted(map(sorted, leaf.groups))}"
        found.append((leaf.kind, axes, int(np.prod(leaf.shape, dtype=np.int64))))
    return tuple(found)


@dataclass(frozen=True)
class Leaf:
    """An array that a collective of a compiled program makes.

    Attributes:
        kind: XLA's name of the collective.
        groups: its groups, by the positions of devices.
        dtype: XLA's name of the dtype.
        shape: the shape.
    """

    kind: str
    groups: frozenset[frozenset[int]]
    dtype: str
    shape: tuple[int, ...]


def leaves_of(text: str, devices: int) -> list[Leaf] | None:
    """The arrays of all collectives of a compiled program; None if one is not understood.

    Args:
        text: the program's HLO.
        devices: how many devices it is for.
    """
    found = []
    counted = hlo.in_compiled(text)
    for match in _COLLECTIVE.finditer(text):
        types, kind, start, given, attribute = match.groups()
        groups = groups_of_text(attribute, devices)
        if groups is None:
            return None
        arrays = [(dtype, tuple(_numbers(shape))) for dtype, shape in _ARRAY.findall(types)]
        count = given.count("%")
        if start and len(arrays) > count:  # the operands, the results, and perhaps other values
            arrays = arrays[count : 2 * count]
        if kind not in hlo.OF_MANY_ARRAYS:
            arrays = arrays[:1]
        found += [Leaf(kind, frozenset(groups), *array) for array in arrays]
    if sum(counted[kind] for kind in hlo.KINDS) != len(found):
        return None
    return found


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


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


def groups_of_text(text: str, count: int) -> set[frozenset[int]] | None:
    """The groups of the attribute replica_groups; of a permutation, who sends to whom."""
    if text == "{}":
        return {frozenset(range(count))}
    if text.startswith("{{"):
        return {frozenset(_numbers(group)) for group in text[2:-2].split("},{")}
    if iota := _IOTA.fullmatch(text):
        ids = _iota(iota[2], iota[3])
        return {frozenset(map(int, group)) for group in ids.reshape(_numbers(iota[1]))}
    if mesh := _MESH.fullmatch(text):
        sizes = {name: int(size) for name, size in _SIZE.findall(mesh[1])}
        # Of each chosen part of an axis: the parts before it, and those up to its end.
        chosen = [(name, int(pre or 1), int(of or 0)) for name, pre, of in _PART.findall(mesh[3])]
        chosen = [(name, pre, pre * of or sizes[name]) for name, pre, of in chosen]
        shape: list[int] = []
        along: list[int] = []
        for name, size in sizes.items():
            own = [part[1:] for part in chosen if part[0] == name]
            for start, end in itertools.pairwise(sorted({1, size, *itertools.chain(*own)})):
                if (start, end) in own:
                    along.append(len(shape))
                shape.append(end // start)
        ids = np.arange(count)
        if mesh[2]:
            order = re.fullmatch(r"\[([\d,]*)\](?:T\(([\d,]*)\))?", mesh[2])
            assert order is not None  # as in _MESH
            ids = _iota(order[1], order[2])
        if ids.size != math.prod(shape):
            return None
        moved = np.moveaxis(ids.reshape(shape), along, range(-len(along), 0))
        size = math.prod(shape[i] for i in along)
        return {frozenset(map(int, group)) for group in moved.reshape(-1, size)}
    return None


def _iota(dimensions: str, order: str | None) -> Any:
    shape = _numbers(dimensions)
    ids = np.arange(int(np.prod(shape))).reshape(shape)
    return (ids.transpose(_numbers(order)) if order else ids).reshape(-1)
