"""What MLIR's bindings tell only as text: dtypes, locations, and a whole module."""

import re
from typing import Any

from jax.extend.mlir import ir

from jax_intranode._src.operations import EXCHANGED


def _spelled(dtype: str) -> str:
    """How MLIR spells a dtype."""
    if dtype.startswith("float8_"):
        return f"f8{dtype.removeprefix('float8_').upper()}"
    named = {"bool": "i1", "bfloat16": "bf16"}
    return named.get(dtype) or dtype.replace("float", "f").replace("int", "i")


# By their names in MLIR. Not complex ones: MLIR's bindings can't read their constants, for instance
# the number at which a sum begins.
_DTYPES = {_spelled(dtype): dtype for dtype in EXCHANGED if not dtype.startswith("complex")}
# The innermost frame of a location, which JAX has made of the user's frames only.
_FRAME = re.compile(r'(?:"([^"]*)"\()?"([^"]+)":(\d+):')
# Constants; and the address of a function of JAX's custom_partitioning, which a call of it has.
_OF_A_PROCESS = re.compile(r'dense<[^>]*>|backend_config = "\d+"')


def dtype_of(array: ir.RankedTensorType) -> str | None:
    """The dtype of an array's type; None if this package doesn't know it."""
    return _DTYPES.get(str(array.element_type))


def source_of(operation: Any) -> str:
    """The user's line that an operation comes from, as file:line (function), or "unknown"."""
    found = _FRAME.search(str(operation.location))
    if found is None:
        return "unknown"
    function = (found[1] or "").rpartition("<locals>.")[2]
    return f"{found[2]}:{found[3]}" + (f" ({function})" if function else "")


def same_in_all_processes(module: Any) -> str:
    """The text of a module, without what differs between the processes that lower it."""
    text = str(module.operation.get_asm(large_elements_limit=4))
    return _OF_A_PROCESS.sub("", text)
