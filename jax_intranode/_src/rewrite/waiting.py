"""What equations need, and their order: some wait for an operation that runs later.

Anything that has `invars` and `outvars` is an equation.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any

from jax.extend.core import Literal

_NONE: frozenset[Any] = frozenset()


class Waiting:
    """Emits equations in their order, but for those that need an operation that has not run yet.

    Attributes:
        emitted: the equations so far.
    """

    def __init__(self) -> None:
        self.emitted: list[Any] = []
        # The operations that a variable waits for, and what waits, in order.
        self._waits: dict[Any, frozenset[Any]] = {}
        self._equations: list[tuple[Any, frozenset[Any]]] = []
        self._have_run: set[Any] = set()

    def expect(self, results: Iterable[Any], operation: Hashable) -> None:
        """These variables are made by an operation that runs later."""
        self._waits.update(dict.fromkeys(results, frozenset([operation])))

    def needed(self, equation: Any) -> frozenset[Any]:
        """The operations that an equation has to wait for."""
        waits = self._waits
        found = [waits[v] for v in equation.invars if not isinstance(v, Literal) and v in waits]
        return _NONE.union(*found) - self._have_run if found else _NONE

    def emit(self, equation: Any) -> None:
        """Emits an equation, or lets it wait."""
        needed = self.needed(equation)
        if needed:
            self._equations.append((equation, needed))
            self._waits.update(dict.fromkeys(equation.outvars, needed))
        else:
            self.emitted.append(equation)

    def run(self, operations: Iterable[Hashable], equations: Iterable[Any]) -> None:
        """Emits the equations of operations, and then what has waited for them."""
        self.emitted += equations
        self._have_run.update(operations)
        waiting, self._equations = self._equations, []
        for equation, needed in waiting:
            if needed <= self._have_run:
                self.emitted.append(equation)
            else:
                self._equations.append((equation, needed))


class Merging(Waiting):
    """The same, of operations that join open groups. A group runs as one operation when it ends.

    It ends before an operation that needs it joins another one. So the members of a group do not
    need each other, and no two groups can wait for each other.

    Attributes:
        opened: the open groups, by what their members have in common, in the order of opening.
    """

    def __init__(self, run: Callable[[Any], Iterable[Any]]):
        """`run` makes the equations of a group."""
        super().__init__()
        self.opened: dict[Any, Any] = {}
        self._run = run

    def join(
        self, key: Any, equation: Any, fits: Callable[[Any], bool], new: Callable[[], Any]
    ) -> Any:
        """The group of this key for an equation: the open one if it `fits`, or else a new one."""
        self.end(self.needed(equation))
        if key in self.opened and not fits(self.opened[key]):
            self.end([self.opened[key]])
        group = self.opened.setdefault(key, new())
        self.expect(equation.outvars, group)
        return group

    def end(self, groups: Collection[Any]) -> None:
        """Ends groups in the order of opening, which all processes have; that of a set differs."""
        for key, group in [each for each in self.opened.items() if each[1] in groups]:
            if self.opened.pop(key, None) is not None:
                self.run([group], self._run(group))


class Needs:
    """What the variables of a program need, as sets of bits: bit 0 is that of all heavy equations.

    Attributes:
        of: what each variable needs; those that need nothing are not there.
        heavy: the positions of the heavy equations, and what their results need.
        by_heavy: what is needed by any of them.
    """

    def __init__(self, equations: Iterable[Any], bits: Mapping[int, int], heavy: Collection[int]):
        """Walks the equations; `bits` and `heavy` have positions."""
        self.of: dict[Any, int] = {}
        self.heavy: list[tuple[int, int]] = []
        self.by_heavy = 0
        for position, equation in enumerate(equations):
            needed = own = bits.get(position, 0)
            for v in equation.invars:
                if not isinstance(v, Literal):
                    needed |= self.of.get(v, 0)
            if position in heavy:
                self.by_heavy |= needed & ~own
                needed |= 1
                self.heavy.append((position, needed))
            if needed:
                self.of.update(dict.fromkeys(equation.outvars, needed))
