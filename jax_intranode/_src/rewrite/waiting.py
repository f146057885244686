"""The order of rewritten equations: some wait for the result of an operation that runs later."""

from collections.abc import Hashable, Iterable
from typing import Any

from jax.extend.core import Var

_NONE: frozenset[Hashable] = frozenset()


class Waiting:
    """Emits equations in their order, but for those that need an operation that has not run yet.

    Attributes:
        emitted: the equations so far.
    """

    def __init__(self) -> None:
        self.emitted: list[Any] = []
        # The operations that a variable waits for, by their keys, and what waits, in order.
        self._waits: dict[Any, frozenset[Hashable]] = {}
        self._equations: list[tuple[Any, frozenset[Hashable]]] = []

    def expect(self, results: Iterable[Any], key: Hashable) -> None:
        """These variables are made by an operation that runs later."""
        self._waits.update(dict.fromkeys(results, frozenset([key])))

    def needed(self, equation: Any) -> frozenset[Any]:
        """The keys of the operations that an equation has to wait for."""
        waits = self._waits
        found = [waits[v] for v in equation.invars if isinstance(v, Var) and v in waits]
        return _NONE.union(*found) if found else _NONE

    def emit(self, equation: Any) -> None:
        """Emits an equation, or lets it wait."""
        needed = self.needed(equation)
        if needed:
            self._equations.append((equation, needed))
            self._waits.update(dict.fromkeys(equation.outvars, needed))
        else:
            self.emitted.append(equation)

    def run(self, keys: Iterable[Hashable], equations: Iterable[Any]) -> None:
        """Emits the equations of operations, and then what has waited for them."""
        done = frozenset(keys)
        if not done:
            return
        self.emitted += equations
        waiting, self._equations = self._equations, []
        for equation, needed in waiting:
            if needed <= done:
                self.emitted.append(equation)
            else:
                self._equations.append((equation, needed - done))
        self._waits = {v: left for v, needed in self._waits.items() if (left := needed - done)}
