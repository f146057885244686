"""Reads the collectives in the texts of programs: StableHLO, as lowered, and HLO, as compiled.

XLA merges operations of several arrays and splits them again, so arrays are counted where one
operation may take several.
"""

import functools
import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

# XLA's names of the collectives. All-to-alls of one array may have many operands: count one.
OF_MANY_ARRAYS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
_OF_ONE_ARRAY = ("all-to-all", "ragged-all-to-all", "collective-broadcast")
KINDS = (*OF_MANY_ARRAYS, *_OF_ONE_ARRAY)

_KIND = "|".join(KINDS)
_IN_HLO = re.compile(rf" ({_KIND})(?:-start)?\(([^()]*)")
_CALL_IN_HLO = re.compile(r'custom_call_target="(jax_intranode_\w+)"')
_IN_STABLEHLO = re.compile(
    rf'"?stablehlo\.({_KIND.replace("-", "_")})"?\(([^()]*)\)'
    r"|custom_call @(ragged_all_to_all|jax_intranode_\w+)\("
)
_FUNCTION = re.compile(r'func\.func (?:\w+ )?@("[^"]+"|[\w.$-]+)\(')
_CALL = re.compile(r'\bcall @("[^"]+"|[\w.$-]+)\(')
# The attribute "plan" of a custom call, and one of its fields, as a lowered module shows them.
_PLAN = re.compile(r"\bplan = \{([^{}]*)\}")
_PLAN_FIELD = re.compile(r"(\w+) = (\d+|true|false)\b")
_COLLECTIVE = re.compile(
    rf"= (\(.*?\)|\S+) ({_KIND})(-start)?\(([^()]*).*?"
    r"(?:(?:replica_groups|source_target_pairs)=(\{\}|\{\{[\d,{}]*\}\}|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\([^ ]*\))? \{[^}]*\}))"
)
# Where operations come from: tables of files, functions, places in files, and frames.
_TABLE = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", re.MULTILINE
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_IOTA = re.compile(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?")
_MESH = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\((\[[\d,]*\](?:T\([\d,]*\))?)\))? \{([^}]*)\}"
)
_SIZE = re.compile(r"'([^']*)'=(\d+)")
_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


def through_hlo(module: bytes) -> bytes:
    """A StableHLO module after the conversion to HLO, which simplifies it, and back. 0.10.2."""
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    computation = _jax.mlir.mlir_module_to_xla_computation(module, False, False)
    return bytes(_jax.mlir.hlo_to_stablehlo(computation.as_serialized_hlo_module_proto()))


def in_compiled(text: str) -> Counter[str]:
    """Counts the collectives of an HLO module, and the custom calls of this package."""
    found = Counter(_CALL_IN_HLO.findall(text))
    for kind, operands in _IN_HLO.findall(text):
        found[kind] += _arrays(kind, operands)
    return found


def in_lowered(text: str) -> Counter[str]:
    """Counts the collectives of a StableHLO module, those of a function once for each call of it.

    They have the names that they have in HLO.
    """
    starts = [*_FUNCTION.finditer(text)]
    ends = [*(found.start() for found in starts[1:]), len(text)]
    functions = {found[1]: text[found.end() : end] for found, end in zip(starts, ends, strict=True)}

    @functools.cache
    def count(function: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for operation, operands, call in _IN_STABLEHLO.findall(functions[function]):
            if call.startswith("jax_intranode_"):
                found[call] += 1
            else:
                kind = (operation or call).replace("_", "-")
                found[kind] += _arrays(kind, operands)
        for callee in _CALL.findall(functions[function]):
            found += count(callee)
        return found

    return count("main")


def _arrays(kind: str, operands: str) -> int:
    return max(1, operands.count("%")) if kind in OF_MANY_ARRAYS else 1


def plans_in(text: str) -> list[dict[str, int]]:
    """The plans of the overlapped matmuls of a StableHLO module."""
    return [
        {name: int({"true": 1, "false": 0}.get(value, value)) for name, value in fields}
        for fields in map(_PLAN_FIELD.findall, _PLAN.findall(text))
    ]


# What the collectives of a compiled program make, and among which devices.


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
    counted = in_compiled(text)
    for match in _COLLECTIVE.finditer(text):
        types, kind, start, given, attribute = match.groups()
        groups = groups_of_text(attribute, devices)
        if groups is None:
            return None
        arrays = [(dtype, tuple(_numbers(shape))) for dtype, shape in _ARRAY.findall(types)]
        count = given.count("%")
        if start and len(arrays) > count:  # the operands, the results, and perhaps other values
            arrays = arrays[count : 2 * count]
        if kind not in OF_MANY_ARRAYS:
            arrays = arrays[:1]
        found += [Leaf(kind, frozenset(groups), *array) for array in arrays]
    if sum(counted[kind] for kind in KINDS) != len(found):
        return None
    return found


@dataclass(frozen=True)
class Source:
    """What a collective of a compiled program is for, as XLA says.

    Attributes:
        kind: XLA's name of the collective.
        arrays: the dtypes and shapes that it makes on a device.
        of: the operation of JAX that it belongs to, or the argument; "" if XLA does not say.
        source: file:line (function) of the operation; "unknown" if XLA does not say.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    of: str
    source: str


def sources_of(text: str) -> list[Source]:
    """The collectives of a compiled program, an entry for each operation of XLA."""
    tables: dict[str, dict[str, str]] = {}
    for name, rows in _TABLE.findall(text):
        tables[name] = dict(row.split(" ", 1) for row in rows.splitlines())

    def field(table: str, row: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\d+)", tables.get(table, {}).get(row, ""))
        return found[1] if found else ""

    found = []
    for line in text.splitlines():
        match = re.search(rf"= (\(.*?\)|\S+) ({_KIND})(?:-start)?\(", line)
        if match is None:
            continue
        of = re.search(r'op_name="([^"]*)"', line)
        frame = re.search(r"stack_frame_id=(\d+)", line)
        place = field("StackFrames", frame[1], "file_location_id") if frame else ""
        file, function = (
            tables.get(table, {}).get(field("FileLocations", place, name), '""')[1:-1]
            for table, name in (
                ("FileNames", "file_name_id"),
                ("FunctionNames", "function_name_id"),
            )
        )
        source = f"{file}:{field('FileLocations', place, 'line')}" if file else "unknown"
        if function:
            source += f" ({function.rpartition('<locals>.')[2]})"
        arrays = ((_dtype(name), tuple(_numbers(n))) for name, n in _ARRAY.findall(match[1]))
        found.append(
            Source(match[2], tuple(arrays), of[1].rpartition("/")[2] if of else "", source)
        )
    return found


def _dtype(name: str) -> str:
    """NumPy's name of one of XLA's dtypes."""
    kinds = {"f": "float", "s": "int", "u": "uint", "c": "complex"}
    found = re.fullmatch(r"([fsuc])(\d+)", name)
    if found:
        return kinds[found[1]] + found[2]
    return {"pred": "bool", "bf16": "bfloat16"}.get(name, name)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


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
