"""Counts collectives in lowered programs."""

import functools
import re
from collections import Counter


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
