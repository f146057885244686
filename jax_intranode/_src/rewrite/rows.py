"""Which function of a row of h an array is: the algebra by which `norms` recognizes a norm.

A program may spell a norm in many ways: x * rsqrt(v), x / sqrt(v), the mean of squares by mean or
by sum, the variance as the mean of (x - m)**2 or as the difference of two means, a weight or
1 + weight, with casts and calls in between. All of these are the same sum of products, once they
are multiplied out.

An array is described by a sum of terms. A term is a product of powers of

- the row's own elements, h;
- parameters: arrays [hidden], by their variable;
- means of products of h over the row;
- sums of such terms with a power that does not multiply out, as in (v + eps) ** -0.5.

Roundings and casts are ignored.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jax_intranode._src.jax_private import equation_kinds

# A factor of a term, and its power. H, ("parameter", variable), ("mean", term), ("sum", terms).
H = ("h",)
Term = frozenset[tuple[Any, float]]
# Casts between these are ignored. A norm rounds once, wherever the program rounds.
FLOATS = ("float64", "float32", "bfloat16", "float16")

# The coefficient of each term.
Terms = dict[Term, float]

_ONE: Term = frozenset()
# Sums that have more terms are no norm.
_MOST_TERMS = 32


class _Unknown(Exception):
    """The array is not described in this way."""


@dataclass(frozen=True)
class Rows:
    """An array, as a function of h and of parameters.

    Attributes:
        terms: the sum.
        form: how its dimensions lie: "aligned" (as those of h; each has the length of h's or 1),
            "means" (those of h but for the last), "parameter" (the last of h, and fewer than h has
            before it, of length 1) or "constant".
    """

    terms: Terms
    form: str


def constant(value: float) -> Rows:
    """A number."""
    return Rows({_ONE: value} if value else {}, "constant")


def own() -> Rows:
    """h itself."""
    return Rows({frozenset([(H, 1.0)]): 1.0}, "aligned")


def parameter(variable: Any) -> Rows:
    """A parameter [hidden]."""
    return Rows({frozenset([(("parameter", variable), 1.0)]): 1.0}, "parameter")


# Arithmetic.


def _added(a: Terms, b: Terms, factor: float = 1.0) -> Terms:
    found = dict(a)
    for term, coefficient in b.items():
        found[term] = found.get(term, 0.0) + factor * coefficient
        # Cancelled, but for a rounding.
        if abs(found[term]) < 1e-12 * abs(coefficient):
            del found[term]
    return found


def _multiplied(a: Terms, b: Terms) -> Terms:
    if len(a) * len(b) > _MOST_TERMS:
        raise _Unknown
    found: Terms = {}
    for first, x in a.items():
        for second, y in b.items():
            powers = dict(first)
            for factor, power in second:
                powers[factor] = powers.get(factor, 0.0) + power
            term = frozenset((f, p) for f, p in powers.items() if p)
            found = _added(found, {term: x * y})
    return found


def _power(terms: Terms, power: float) -> Terms:
    if power == int(power) and 0 <= power <= 4:
        found: Terms = {_ONE: 1.0}
        for _ in range(int(power)):
            found = _multiplied(found, terms)
        return found
    if not terms or any(_varies(term) for term in terms):
        raise _Unknown
    if len(terms) == 1:
        ((term, coefficient),) = terms.items()
        positive = all(f[0] == "sum" or f == ("mean", _SQUARES) for f, _ in term)
        if coefficient <= 0 or not positive:
            raise _Unknown
        return {frozenset((f, p * power) for f, p in term): coefficient**power}
    # The coefficient of the mean of the squares is taken out, so that equal sums are equal.
    lead = terms.get(frozenset([(("mean", _SQUARES), 1.0)]), 0.0)
    if lead <= 0:
        raise _Unknown
    scaled = frozenset((term, coefficient / lead) for term, coefficient in terms.items())
    return {frozenset([(("sum", scaled), power)]): lead**power}


def _varies(term: Term) -> bool:
    """Whether a term is not the same along a row."""
    return any(factor == H or factor[0] == "parameter" for factor, _ in term)


_SQUARES: Term = frozenset([(H, 2.0)])


def _mean(terms: Terms) -> Terms:
    found: Terms = {}
    for term, coefficient in terms.items():
        along = frozenset((f, p) for f, p in term if f == H)
        if any(f[0] == "parameter" for f, _ in term):
            raise _Unknown
        mean: Term = frozenset([(("mean", along), 1.0)]) if along else _ONE
        found = _added(found, _multiplied({term - along: 1.0}, {mean: coefficient}))
    return found


# Equations.


class Reader:
    """Reads equations of a jaxpr as functions of rows of h.

    Args:
        shape: the shape of h.
    """

    def __init__(self, shape: tuple[int, ...]):
        """Nothing has been read."""
        self._shape = shape
        self._hidden = shape[-1]

    def read(self, equation: Any, value: Callable[[Any], Rows | None]) -> list[Rows | None]:
        """The results of an equation, from a function that describes its operands."""
        if equation_kinds.is_placed(equation) or equation_kinds.has_effects(equation):
            return [None] * len(equation.outvars)
        called = equation_kinds.called_jaxpr(equation)
        if called is not None:
            return self._call(called, [self._operand(v, value) for v in equation.invars])
        rule = _RULES.get(equation.primitive.name)
        if rule is None or len(equation.outvars) != 1:
            return [None] * len(equation.outvars)
        operands = [self._operand(v, value) for v in equation.invars]
        try:
            if any(v is None for v in operands):
                return [None]
            return [rule(self, equation, *operands)]
        # Any numbers may stand in a program, for instance a division by 0 or a power of nan.
        except (_Unknown, ArithmeticError, LookupError, ValueError):
            return [None]

    def _operand(self, v: Any, value: Callable[[Any], Rows | None]) -> Rows | None:
        if not isinstance(v, Literal):
            return value(v)
        number = np.asarray(v.val)
        is_real = number.ndim == 0 and not np.iscomplexobj(number)
        return constant(float(number)) if is_real else None

    def _call(self, jaxpr: Any, operands: list[Rows | None]) -> list[Rows | None]:
        if len(jaxpr.eqns) > 100 or jaxpr.constvars:
            return [None] * len(jaxpr.outvars)
        known: dict[Any, Rows | None] = dict(zip(jaxpr.invars, operands, strict=True))
        for equation in jaxpr.eqns:
            found = self.read(equation, known.get)
            known.update(zip(equation.outvars, found, strict=True))
        return [self._operand(v, known.get) for v in jaxpr.outvars]

    # How the dimensions of a result lie.

    def _form(self, equation: Any, *operands: Rows) -> str:
        forms = {v.form for v in operands} - {"constant"}
        if len(forms) > 1:
            raise _Unknown
        return forms.pop() if forms else "constant"

    def _is_aligned(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self._shape) and all(
            n in (1, of_h) for n, of_h in zip(shape, self._shape, strict=True)
        )

    # Rules of primitives.

    def _same(self, equation: Any, x: Rows) -> Rows:
        return x

    def _cast(self, equation: Any, x: Rows) -> Rows:
        if equation.outvars[0].aval.dtype.name in FLOATS:
            return x
        raise _Unknown

    def _add(self, equation: Any, x: Rows, y: Rows) -> Rows:
        return Rows(_added(x.terms, y.terms), self._form(equation, x, y))

    def _sub(self, equation: Any, x: Rows, y: Rows) -> Rows:
        return Rows(_added(x.terms, y.terms, -1.0), self._form(equation, x, y))

    def _neg(self, equation: Any, x: Rows) -> Rows:
        return Rows(_added({}, x.terms, -1.0), x.form)

    def _mul(self, equation: Any, x: Rows, y: Rows) -> Rows:
        return Rows(_multiplied(x.terms, y.terms), self._form(equation, x, y))

    def _div(self, equation: Any, x: Rows, y: Rows) -> Rows:
        if y.form == "constant":
            return Rows(_multiplied(x.terms, {_ONE: 1.0 / y.terms.get(_ONE, 0.0)}), x.form)
        return Rows(_multiplied(x.terms, _power(y.terms, -1.0)), self._form(equation, x, y))

    def _integer_pow(self, equation: Any, x: Rows) -> Rows:
        return Rows(_power(x.terms, float(equation.params["y"])), x.form)

    def _pow(self, equation: Any, x: Rows, y: Rows) -> Rows:
        if y.form != "constant":
            raise _Unknown
        return Rows(_power(x.terms, y.terms.get(_ONE, 0.0)), x.form)

    def _square(self, equation: Any, x: Rows) -> Rows:
        return Rows(_power(x.terms, 2.0), x.form)

    def _sqrt(self, equation: Any, x: Rows) -> Rows:
        return Rows(_power(x.terms, 0.5), x.form)

    def _rsqrt(self, equation: Any, x: Rows) -> Rows:
        return Rows(_power(x.terms, -0.5), x.form)

    def _max(self, equation: Any, x: Rows, y: Rows) -> Rows:
        """Of 0 and a variance, which is not negative but for a rounding."""
        for a, b in ((x, y), (y, x)):
            if a.form == "constant" and not a.terms and b.terms == VARIANCE:
                return b
        raise _Unknown

    def _greater(self, equation: Any, x: Rows, y: Rows) -> Rows:
        if x.form != "constant" or y.form != "constant":
            raise _Unknown
        return constant(float(x.terms.get(_ONE, 0.0) > y.terms.get(_ONE, 0.0)))

    def _select(self, equation: Any, which: Rows, *cases: Rows) -> Rows:
        if which.form != "constant":
            raise _Unknown
        return cases[int(which.terms.get(_ONE, 0.0))]

    def _reduce_sum(self, equation: Any, x: Rows) -> Rows:
        last = len(self._shape) - 1
        if (
            x.form != "aligned"
            or equation.params["axes"] != (last,)
            or equation.invars[0].aval.shape[-1] != self._hidden
        ):
            raise _Unknown
        return Rows(_multiplied(_mean(x.terms), {_ONE: float(self._hidden)}), "means")

    def _broadcast(self, equation: Any, x: Rows) -> Rows:
        if x.form == "constant":
            return x
        dims = tuple(equation.params["broadcast_dimensions"])
        shape = equation.outvars[0].aval.shape
        rank = len(self._shape)
        if x.form == "parameter":
            if dims[-1] != len(shape) - 1:
                raise _Unknown
            return self._of_parameter(x, shape)
        expected = tuple(range(rank if x.form == "aligned" else rank - 1))
        if dims != expected or not self._is_aligned(shape):
            raise _Unknown
        return Rows(x.terms, "aligned")

    def _of_parameter(self, x: Rows, shape: tuple[int, ...]) -> Rows:
        """A parameter with another shape, whose last dimension is the parameter's."""
        if self._is_aligned(shape):
            return Rows(x.terms, "aligned")
        is_row = shape[-1:] == (self._hidden,) and math.prod(shape) == self._hidden
        if is_row and len(shape) < len(self._shape):
            return x
        raise _Unknown

    def _reshape(self, equation: Any, x: Rows) -> Rows:
        if x.form == "constant":
            return x
        before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        means = self._shape[:-1]
        if before == after:
            return x
        if x.form == "means" and after == (*means, 1):
            return Rows(x.terms, "aligned")
        if x.form == "aligned" and before == (*means, 1) and after == means:
            return Rows(x.terms, "means")
        is_row = before[-1:] == (self._hidden,) and math.prod(before) == self._hidden
        if x.form != "means" and is_row and after[-1:] == (self._hidden,):
            return self._of_parameter(Rows(x.terms, "parameter"), after)
        raise _Unknown


_RULES: dict[str, Callable[..., Rows]] = {
    "convert_element_type": Reader._cast,
    "copy": Reader._same,
    "copy_p": Reader._same,
    "pvary": Reader._same,
    "pcast": Reader._same,
    "name": Reader._same,
    "add": Reader._add,
    "add_any": Reader._add,
    "sub": Reader._sub,
    "neg": Reader._neg,
    "mul": Reader._mul,
    "div": Reader._div,
    "integer_pow": Reader._integer_pow,
    "pow": Reader._pow,
    "square": Reader._square,
    "sqrt": Reader._sqrt,
    "rsqrt": Reader._rsqrt,
    "max": Reader._max,
    "gt": Reader._greater,
    "select_n": Reader._select,
    "reduce_sum": Reader._reduce_sum,
    "broadcast_in_dim": Reader._broadcast,
    "reshape": Reader._reshape,
    "squeeze": Reader._reshape,
    "expand_dims": Reader._reshape,
}


# Norms.


def _mean_of(power: float) -> Term:
    return frozenset([(("mean", frozenset([(H, power)])), 1.0)])


VARIANCE: Terms = {
    _mean_of(2.0): 1.0,
    frozenset([(("mean", frozenset([(H, 1.0)])), 2.0)]): -1.0,
}


@dataclass(frozen=True)
class Norm:
    """A norm of the rows of h.

    Attributes:
        kind: "rms_norm" or "layer_norm".
        eps: what is added to the mean of the squares.
        weight: the variable of the weight.
        weight_offset: what is added to it.
        bias: the variable of the bias; None if there is none.
    """

    kind: str
    eps: float
    weight: Any
    weight_offset: float
    bias: Any


def norm_of(rows: Rows) -> Norm | None:
    """The norm that an array is; None if it is none.

    A norm is h * f * (weight + offset) + bias, multiplied out, where f is a power of a sum.
    LayerNorm has h - mean(h) in the place of h.
    """
    if rows.form != "aligned":
        return None
    weights, biases, sums = set[Any](), set[Any](), set[Any]()
    for term in rows.terms:
        for factor, power in term:
            if factor[0] == "parameter":
                (biases if len(term) == 1 else weights).add(factor)
            elif factor[0] == "sum" and power == -0.5:
                sums.add(factor)
    if len(weights) != 1 or len(biases) > 1 or len(sums) != 1 or weights == biases:
        return None
    (weight,), (under,) = weights, sums
    variance = dict(under[1])
    eps = variance.pop(_ONE, 0.0)
    kinds = {"rms_norm": {_mean_of(2.0): 1.0}, "layer_norm": VARIANCE}
    kind = next((k for k, terms in kinds.items() if _close(variance, terms)), None)
    if kind is None or not 0 <= eps < math.inf:
        return None
    values: Terms = {frozenset([(H, 1.0)]): 1.0}
    if kind == "layer_norm":
        values = _added(values, {_mean_of(1.0): -1.0})
    offset = rows.terms.get(frozenset([(H, 1.0), (under, -0.5)]), 0.0)
    scale = _added({frozenset([(weight, 1.0)]): 1.0}, {_ONE: offset} if offset else {})
    expected = _multiplied(_multiplied(values, scale), {frozenset([(under, -0.5)]): 1.0})
    for bias in biases:
        expected = _added(expected, {frozenset([(bias, 1.0)]): 1.0})
    if not _close(rows.terms, expected):
        return None
    bias = next((b[1] for b in biases), None)
    return Norm(kind, eps, weight[1], offset, bias)


def _close(a: Terms, b: Terms) -> bool:
    """Whether two sums are equal but for roundings of numbers to float32."""
    return a.keys() == b.keys() and all(math.isclose(a[t], b[t], rel_tol=2e-6) for t in a)
