"""The matmuls of a jaxpr, and which equation makes and uses each variable."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.extend.core import Var

from jax_intranode._src.jax_private import equation_kinds, jaxpr_walk, lax_collectives
from jax_intranode._src.rewrite import sums, views
from jax_intranode._src.rewrite.views import Factor, Factors

# Longer chains of reshapes, transpositions and casts are not looked through.
MOST_LAYOUTS = 32


@dataclass(frozen=True)
class View:
    """A variable as a view of another one.

    Attributes:
        source: the variable that it is made from.
        dims: its dimensions, as factors of the source's.
        dtypes: the dtypes to which the source is converted, in order.
        path: the positions of the equations between the two.
    """

    source: Any
    dims: tuple[Factors, ...]
    dtypes: tuple[Any, ...] = ()
    path: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tail:
    """The only equations that use the result of a matmul, if they transpose and cast it.

    Attributes:
        result: the last variable.
        permutation: its dimensions, as dimensions of the matmul's result.
        path: the positions of the equations.
        transposed: whether one of them transposes.
    """

    result: Any
    permutation: tuple[int, ...]
    path: tuple[int, ...]
    transposed: bool


@dataclass(frozen=True)
class Matmul:
    """A dot_general without batch dimensions, other than those of size 1.

    Attributes:
        position: the position of its equation.
        equation: its equation.
        of: what it multiplies.
    """

    position: int
    equation: Any
    of: equation_kinds.DotGeneral

    def contracted(self, side: int) -> list[int]:
        """The contracted dimensions of the first (0) or second (1) operand, pairwise."""
        return [pair[side] for pair in self.of.contracting]

    def free(self, side: int) -> list[int]:
        """The dimensions of an operand that the result has, too."""
        return _free(self.of, side, self.equation.invars[side].aval.ndim)

    def result_dims(self, rows: int) -> list[Factors]:
        """The result's dimensions as factors of a matrix.

        The matrix has the free dimensions of operand `rows` as rows, and those of the other operand
        as columns.
        """
        return _result_dims(self.of, rows, *(v.aval.shape for v in self.equation.invars))

    def precision(self, rows: int) -> Any:
        """Its precision, if operand `rows` came first."""
        precision = self.of.precision
        return precision[::-1] if rows and isinstance(precision, tuple) else precision


@functools.lru_cache(views.KNOWN)
def _free(of: equation_kinds.DotGeneral, side: int, ndim: int) -> list[int]:
    inner = {pair[side] for pair in (*of.contracting, *of.batch)}
    return [i for i in range(ndim) if i not in inner]


@functools.lru_cache(views.KNOWN)
def _result_dims(of: equation_kinds.DotGeneral, rows: int, *shapes: Any) -> list[Factors]:
    found: list[Factors] = [()] * len(of.batch)
    for side, shape in enumerate(shapes):
        free = _free(of, side, len(shape))
        stride = math.prod(shape[i] for i in free)
        for i in free:
            stride //= shape[i]
            found.append((Factor(int(side != rows), stride, shape[i]),) * (shape[i] > 1))
    return found


class Dataflow:
    """Where the variables of a jaxpr are made and used.

    Attributes:
        equations: the equations, which have positions from 0 on.
        uses: for each position the variables that its equation uses.
        made_at: the position at which each variable is made; the jaxpr's arguments are not there.
        used_at: the positions at which each variable is used, once for each use. That of the
            jaxpr's results is the number of equations.
    """

    def __init__(
        self, equations: Sequence[Any], results: Sequence[Any], computed: Collection[Var] = ()
    ):
        """Walks the equations, of a jaxpr with these results and `computed_arguments`."""
        self.equations = equations
        self._computed = computed
        self.uses = [variables(equation.invars) for equation in equations]
        self.made_at: dict[Var, int] = {}
        self.used_at: dict[Var, list[int]] = defaultdict(list)
        for position, equation in enumerate(equations):
            for v in self.uses[position]:
                self.used_at[v].append(position)
            for v in equation.outvars:
                self.made_at[v] = position
        for v in variables(results):
            self.used_at[v].append(len(equations))
        self._views: dict[Var, View] = {}

    def maker(self, v: Any) -> Any:
        """The equation that makes a variable; None for arguments and literals."""
        position = self.made_at.get(v) if isinstance(v, Var) else None
        return None if position is None else self.equations[position]

    def is_computed(self, v: Any) -> bool:
        """Whether the program computes a variable, so that it may not be in memory yet."""
        while (equation := self.maker(v)) is not None and _is_same_memory(equation):
            v = equation.invars[0]
        return equation is not None or v in self._computed

    def only_user(self, v: Var) -> int | None:
        """The position of the equation that is the only one to use a variable, once."""
        users = self.used_at[v]
        return users[0] if len(users) == 1 and users[0] < len(self.equations) else None

    @cached_property
    def stretches(self) -> list[int]:
        """For each position the number of its stretch: nothing is moved from one to another.

        They end at fences and at effects.
        """
        found, number = [], 0
        for equation in self.equations:
            ends = equation_kinds.is_fence(equation) or equation_kinds.has_effects(equation)
            number += ends
            found.append(number)
            number += ends
        return found

    @cached_property
    def is_heavy(self) -> list[bool]:
        """For each position whether its equation takes long: a matmul, a loop or a collective."""
        return [
            lax_collectives.lax_collective(equation) is not None or sums.is_heavy(equation)
            for equation in self.equations
        ]

    @cached_property
    def matmuls(self) -> dict[int, Matmul]:
        """The matmuls by position."""
        found = {}
        for position, equation in enumerate(self.equations):
            of = equation_kinds.dot_general(equation)
            if of is None or equation_kinds.is_placed(equation):
                continue
            first, second = (v.aval.shape for v in equation.invars)
            of_one = not of.batch or all(first[i] == 1 for i, _ in of.batch)
            arrays = all([isinstance(v, Var) for v in equation.invars])
            if of_one and arrays and 0 not in first and 0 not in second:
                found[position] = Matmul(position, equation, of)
        return found

    @cached_property
    def matmuls_of(self) -> dict[Var, list[tuple[Matmul, int, View]]]:
        """The matmuls that multiply a variable or a `view` of it; as which operand and view."""
        found = defaultdict(list)
        for matmul, side in itertools.product(self.matmuls.values(), (0, 1)):
            operand = matmul.equation.invars[side]
            found[operand].append((matmul, side, itself(operand)))
            view = self.view(operand)
            if view.path:
                found[view.source].append((matmul, side, view))
        return found

    def view(self, v: Var) -> View:
        """The variable as a view of another one, through reshapes and transpositions."""
        found = self._views.get(v)
        if found is None:
            found = self._views[v] = self._view(v, cast=False, depth=0)
        return found

    def cast_view(self, v: Var) -> View:
        """The same, through casts, too."""
        return self._view(v, cast=True, depth=0)

    def _view(self, v: Var, cast: bool, depth: int) -> View:
        equation = self.maker(v)
        if equation is not None and is_layout(equation, cast) and depth < MOST_LAYOUTS:
            (operand,) = equation.invars
            # XLA makes a transposition part of the matmul before it.
            follows = equation_kinds.permutation(equation) is not None and self._multiplies(operand)
            if isinstance(operand, Var) and not follows:
                inner = self._view(operand, cast, depth + 1)
                dims = dims_after(equation, inner.dims)
                if dims is not None:
                    dtypes = inner.dtypes
                    if equation_kinds.changes_dtype(equation):
                        dtypes = (*dtypes, equation.outvars[0].aval.dtype)
                    return View(inner.source, dims, dtypes, (*inner.path, self.made_at[v]))
        return itself(v)

    def _multiplies(self, v: Any) -> bool:
        return self.made_at.get(v) in self.matmuls if isinstance(v, Var) else False

    def tail(self, matmul: Matmul) -> Tail:
        """What becomes of a matmul's result."""
        (result,) = matmul.equation.outvars
        permutation = tuple(range(result.aval.ndim))
        path: list[int] = []
        transposed = cast = False
        while True:
            position = self.only_user(result)
            if position is None:
                break
            equation = self.equations[position]
            order = equation_kinds.permutation(equation)
            if equation_kinds.is_placed(equation):
                break
            if order is not None:
                permutation = tuple(permutation[i] for i in order)
                transposed = True
            elif not cast and rounds_once(equation):
                cast = True
            else:
                break
            path.append(position)
            (result,) = equation.outvars
        return Tail(result, permutation, tuple(path), transposed)


def _is_same_memory(equation: Any) -> bool:
    """Whether the result of an equation has the elements of its operand, in their order."""
    return bool(
        equation_kinds.only_reshapes(equation) or equation_kinds.only_changes_type(equation)
    )


def computed_arguments(jaxpr: Any) -> set[Var]:
    """The arguments of the jaxprs inside of a jaxpr that it computes, for one of their calls."""
    computed: set[Var] = set()
    walked: dict[int, int] = {}  # how many of the arguments were known to be computed

    def walk(jaxpr: Any) -> None:
        made = computed.intersection(jaxpr.invars)
        if walked.get(id(jaxpr)) == len(made):
            return
        walked[id(jaxpr)] = len(made)
        for equation in jaxpr.eqns:
            for inner in jaxpr_walk.inner_jaxprs(equation, None):
                arguments = inner.jaxpr.invars
                operands = equation.invars[len(equation.invars) - len(arguments) :]
                pairs = zip(arguments, operands, strict=False)
                computed.update(a for a, v in pairs if isinstance(v, Var) and v in made)
                walk(inner.jaxpr)
            if not _is_same_memory(equation) or not made.isdisjoint(variables(equation.invars)):
                made.update(equation.outvars)

    walk(jaxpr_walk.open_jaxpr(jaxpr))
    return computed


def itself(v: Any) -> View:
    """The variable as a view of itself."""
    return View(v, views.whole(v.aval.shape))


def variables(atoms: Sequence[Any]) -> list[Var]:
    """Those that are no literals."""
    return [v for v in atoms if isinstance(v, Var)]


def is_layout(equation: Any, cast: bool) -> bool:
    """Whether an equation only reshapes or transposes, or if `cast` changes the type."""
    return not equation_kinds.is_placed(equation) and (
        equation_kinds.permutation(equation) is not None
        or equation_kinds.only_reshapes(equation)
        or (
            cast
            and (
                equation_kinds.changes_dtype(equation) or equation_kinds.only_changes_type(equation)
            )
        )
    )


def dims_after(equation: Any, dims: tuple[Factors, ...]) -> tuple[Factors, ...] | None:
    """The dimensions after an equation that `is_layout`, from those before it."""
    permutation = equation_kinds.permutation(equation)
    if permutation is not None:
        return tuple(dims[i] for i in permutation)
    if equation_kinds.only_reshapes(equation):
        return views.reshaped(dims, equation.outvars[0].aval.shape)
    return dims


def rounds_once(equation: Any) -> bool:
    """Whether an equation rounds floats to a shorter dtype.

    Rounding a matmul's result so is the same as a matmul that has that dtype.
    """
    if not equation_kinds.changes_dtype(equation):
        return False
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return before == "float32" and after in ("bfloat16", "float16")
