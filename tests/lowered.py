"""Counts collectives in lowered programs, and lowers programs for GPUs that are not there."""

import functools
import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType


def compare_lowered() -> ModuleType:
    """tools/compare_lowered.py, which has GPUs that are not there."""
    path = Path(__file__).parent.parent / "tools" / "compare_lowered.py"
    spec = importlib.util.spec_from_file_location("compare_lowered", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_lowered"] = module  # dataclasses look the module up
    spec.loader.exec_module(module)
    return module


def in_lowered(text: str) -> Counter[str]:
    """Counts the collectives in StableHLO, those of a function once for each call of it."""
    functions = {
        found[1]: text[found.start() : following]
        for found, following in (
            (found, text.find("func.func", found.end()))
            for found in re.finditer(r'func\.func \w+ @("[^"]+"|[\w.]+)\(', text)
        )
    }

    @functools.cache
    def count(name: str) -> Counter[str]:
        body = functions[name]
        found = Counter(re.findall(r"custom_call @(jax_intranode_\w+)", body))
        found += Counter(
            re.findall(r'"?stablehlo\.(all_reduce|reduce_scatter|all_gather)"?\(', body)
        )
        for callee in re.findall(r'\bcall @("[^"]+"|[\w.]+)\(', body):
            found += count(callee)
        return found

    return count("main")
