"""Counts the collectives in the texts of programs: StableHLO, as lowered, and HLO, as compiled.

XLA merges operations of several arrays and splits them again, so arrays are counted where one
operation may take several.
"""

import functools
import re
from collections import Counter

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
