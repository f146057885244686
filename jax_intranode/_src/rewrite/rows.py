"""Which function of the rows of h an array is: the algebra by which `norms` recognizes a norm.

A program may spell a norm in many ways: x * rsqrt(v), x / sqrt(v), the mean of squares by mean or
by sum, the variance as the mean of (x - m)**2 or as the difference of two means, a weight or
1 + weight, with casts and calls in between. In all of them each array is a product of powers of a
few factors, and a sum is one of those that make another factor.

Roundings and casts are ignored.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jax_intranode._src.jax_private import equation_kinds

# Casts between these are ignored. A norm rounds once, wherever the program rounds.
FLOATS = ("float64", "float32", "bfloat16", "float16")

# Factors: the rows and what is left without their mean; of each row, its mean, the mean of its
# squares and its variance. Further ones are ("root", SQUARES or VARIANCE, eps), which is one of
# these plus eps, and ("parameter", variable, what is added to it).
_H, _CENTERED, _MEAN, _SQUARES, _VARIANCE = "h", "centered", "mean", "squares", "variance"
_MEANS: dict[Any, str] = {(_H, 1.0): _MEAN, (_H, 2.0): _SQUARES, (_CENTERED, 2.0): _VARIANCE}
_DIFFERENCES: dict[Any, str] = {
    (((_H, 1.0),), ((_MEAN, 1.0),)): _CENTERED,
    (((_SQUARES, 1.0),), ((_MEAN, 2.0),)): _VARIANCE,
}
_NORMS = {(_H, _SQUARES): "rms_norm", (_CENTERED, _VARIANCE): "layer_norm"}


# A parameter that is made in more steps is read from the middle on, as if it were given there.
MOST_STEPS = 32


class _Unknown(Exception):
    """The array is not described in this way."""


# For each dimension of an array, the dimension of h that it lies along; None if the array does not
# change along it.
Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Rows:
    """An array, as a function of h and of parameters: coefficient * factors ** powers + bias.

    Attributes:
        dims: how it lies in h; empty for a scalar.
        coefficient: a number.
        powers: the factors with their powers.
        bias: the variable of a parameter; None if there is none.
    """

    dims: Dims
    coefficient: float
    powers: frozenset[tuple[Any, float]] = frozenset()
    bias: Any = None

    @property
    def is_number(self) -> bool:
        """Whether all elements are one number, whatever h is."""
        return not self.powers and self.bias is None

    @property
    def number(self) -> float:
        """This number."""
        if not self.is_number:
            raise _Unknown
        return self.coefficient


def own(shape: tuple[int, ...]) -> Rows:
    """h itself, of this shape."""
    dims = tuple(i if n > 1 else None for i, n in enumerate(shape))
    return Rows(dims, 1.0, frozenset([(_H, 1.0)]))


def parameter(variable: Any, shape: tuple[int, ...]) -> Rows:
    """A parameter [hidden], for an h of this shape."""
    return Rows(own(shape).dims[-1:], 1.0, frozenset([(("parameter", variable, 0.0), 1.0)]))


# Arithmetic.


def _close(a: float, b: float) -> bool:
    """Whether two numbers are equal but for roundings to float32."""
    return math.isclose(a, b, rel_tol=2e-6)


def _dims(x: Rows, y: Rows) -> Dims:
    """How what is computed from both, element by element, lies in h."""
    if not x.dims or not y.dims:
        return x.dims or y.dims
    if any(None not in pair and pair[0] != pair[1] for pair in zip(x.dims, y.dims, strict=True)):
        raise _Unknown
    return tuple(b if a is None else a for a, b in zip(x.dims, y.dims, strict=True))


def _multiplied(x: Rows, y: Rows) -> Rows:
    if x.bias is not None or y.bias is not None:
        raise _Unknown
    powers = dict(x.powers)
    for factor, power in y.powers:
        powers[factor] = powers.get(factor, 0.0) + power
    left = frozenset((factor, power) for factor, power in powers.items() if power)
    if powers and not left:  # x / x is not 1 everywhere
        raise _Unknown
    return Rows(_dims(x, y), x.coefficient * y.coefficient, left)


def _power(x: Rows, power: float) -> Rows:
    positive = x.coefficient > 0 and all(
        factor in (_SQUARES, _VARIANCE) or factor[0] == "root" for factor, _ in x.powers
    )
    if x.bias is not None or power == 0 or not (positive or power == int(power)):
        raise _Unknown
    powers = frozenset((factor, p * power) for factor, p in x.powers)
    return Rows(x.dims, x.coefficient**power, powers)


def _added(x: Rows, y: Rows) -> Rows:
    if x.is_number:
        x, y = y, x
    dims = _dims(x, y)
    if y.is_number:
        return replace(_plus_number(x, y.number), dims=dims)
    if y.bias is None and x.bias is None:
        if _close(x.coefficient, -y.coefficient):
            x, y = (x, y) if x.coefficient > 0 else (y, x)
            factor = _DIFFERENCES.get((tuple(x.powers), tuple(y.powers)))
            if factor is not None:
                return Rows(dims, x.coefficient, frozenset([(factor, 1.0)]))
        for value, bias in ((x, y), (y, x)):
            if bias.coefficient == 1 and len(bias.powers) == 1:
                ((factor, power),) = bias.powers
                if factor[0] == "parameter" and factor[2] == 0 and power == 1:
                    return replace(value, dims=dims, bias=factor[1])
    raise _Unknown


def _plus_number(x: Rows, number: float) -> Rows:
    if x.is_number:
        return replace(x, coefficient=x.coefficient + number)
    if number == 0:
        return x
    if x.bias is not None or len(x.powers) != 1:
        raise _Unknown
    ((factor, power),) = x.powers
    if factor in (_SQUARES, _VARIANCE) and power == 1 and x.coefficient > 0:
        factor = ("root", factor, number / x.coefficient)
    elif factor[0] == "parameter" and power == 1 and x.coefficient == 1:
        factor = ("parameter", factor[1], factor[2] + number)
    else:
        raise _Unknown
    return replace(x, powers=frozenset([(factor, 1.0)]))


def _largest(x: Rows, y: Rows) -> Rows:
    """Of 0 and a variance, which is not negative but for a rounding."""
    for a, b in ((x, y), (y, x)):
        if (
            a.is_number
            and a.coefficient == 0
            and b.powers == {(_VARIANCE, 1.0)}
            and b.coefficient > 0
        ):
            return b
    raise _Unknown


# Of the results from the operands, whatever the equation's parameters are.
_ARITHMETIC: dict[str, Callable[..., Rows]] = {
    **dict.fromkeys(("copy", "copy_p", "pvary", "pcast", "name"), lambda x: x),
    **dict.fromkeys(("add", "add_any"), _added),
    "sub": lambda x, y: _added(x, _multiplied(Rows((), -1.0), y)),
    "neg": lambda x: _multiplied(Rows((), -1.0), x),
    "mul": _multiplied,
    "div": lambda x, y: _multiplied(x, _power(y, -1.0)),
    "pow": lambda x, y: _power(x, y.number),
    "square": lambda x: _power(x, 2.0),
    "sqrt": lambda x: _power(x, 0.5),
    "rsqrt": lambda x: _power(x, -0.5),
    "max": _largest,
    "gt": lambda x, y: Rows((), float(x.number > y.number)),
    "select_n": lambda which, *cases: cases[int(which.number)],
}


# Equations.


class Reader:
    """Reads equations of a jaxpr as functions of rows of h, which has this shape."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape

    def read(self, equation: Any, value: Callable[[Any], Rows | None]) -> list[Rows | None]:
        """The results of an equation, from a function that describes its operands."""
        unknown: list[Rows | None] = [None] * len(equation.outvars)
        if equation_kinds.is_placed(equation) or equation_kinds.has_effects(equation):
            return unknown
        operands = [self._operand(v, value) for v in equation.invars]
        called = equation_kinds.called_jaxpr(equation)
        if called is not None:
            return self._call(called, operands)
        if len(unknown) != 1:
            return unknown
        params = equation.params
        how = next((params[n] for n in ("axes", "broadcast_dimensions", "y") if n in params), None)
        of = equation.primitive.name, operands, equation.invars[0].aval, equation.outvars[0].aval
        return [self.result(*of, how)]

    def _operand(self, v: Any, value: Callable[[Any], Rows | None]) -> Rows | None:
        if not isinstance(v, Literal):
            return value(v)
        number = np.asarray(v.val)
        is_real = number.ndim == 0 and not np.iscomplexobj(number)
        return Rows((), float(number)) if is_real else None

    def _call(self, jaxpr: Any, operands: list[Rows | None]) -> list[Rows | None]:
        if len(jaxpr.eqns) > 100 or jaxpr.constvars:
            return [None] * len(jaxpr.outvars)
        known: dict[Any, Rows | None] = dict(zip(jaxpr.invars, operands, strict=True))
        for equation in jaxpr.eqns:
            known.update(zip(equation.outvars, self.read(equation, known.get), strict=True))
        return [self._operand(v, known.get) for v in jaxpr.outvars]

    def result(
        self, name: str, operands: Sequence[Rows | None], before: Any, after: Any, how: Any
    ) -> Rows | None:
        """The result of an operation of jax.lax; None if it is not known.

        Args:
            name: the operation.
            operands: what they are.
            before: the type of the first operand.
            after: the type of the result.
            how: the dimensions that it sums, or along which it broadcasts; or an exponent.
        """
        known = [v for v in operands if v is not None]
        if len(known) < len(operands):
            return None
        try:
            return self._result(name, known, before, after, how)
        # Any numbers may stand in a program, for instance a division by 0 or a power of nan.
        except (_Unknown, ArithmeticError, LookupError, ValueError):
            return None

    def _result(self, name: str, operands: list[Rows], before: Any, after: Any, how: Any) -> Rows:
        x = operands[0]
        if name in _ARITHMETIC:
            return _ARITHMETIC[name](*operands)
        if name == "convert_element_type" and after.dtype.name in FLOATS:
            return x
        if name == "integer_pow":
            return _power(x, float(how))
        if name == "reduce_sum":
            return self._sum_of_rows(x, before.shape, how)
        if name not in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims"):
            raise _Unknown
        if x.is_number:
            return replace(x, dims=(None,) * after.ndim)
        if name != "broadcast_in_dim":
            return replace(x, dims=_reshaped(x.dims, before.shape, after.shape))
        placed = dict(zip(how, x.dims, strict=True))
        return replace(x, dims=tuple(map(placed.get, range(after.ndim))))

    def _sum_of_rows(self, x: Rows, shape: tuple[int, ...], axes: Any) -> Rows:
        (axis,), hidden = axes, self.shape[-1]
        if x.bias is not None or x.dims[axis] != len(self.shape) - 1 or shape[axis] != hidden:
            raise _Unknown
        along = {(f, p) for f, p in x.powers if f in (_H, _CENTERED) or f[0] == "parameter"}
        (power,) = along if len(along) == 1 else [None]
        dims = (*x.dims[:axis], *x.dims[axis + 1 :])
        rest = Rows(dims, x.coefficient * hidden, x.powers - along)
        return _multiplied(rest, Rows(dims, 1.0, frozenset([(_MEANS[power], 1.0)])))


def _reshaped(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    """The dimensions after a reshape that only adds and drops dimensions of length 1."""
    if [n for n in before if n > 1] != [n for n in after if n > 1]:
        raise _Unknown
    longer = (dim for dim, n in zip(dims, before, strict=True) if n > 1)
    return tuple(next(longer) if n > 1 else None for n in after)


# Norms.


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


def norm_of(rows: Rows, h: Rows) -> Norm | None:
    """The norm that an array is; None if it is none.

    A norm is h * (squares + eps) ** -0.5 * (weight + offset) + bias. LayerNorm has what is left
    without the mean in the place of h, and the variance.
    """
    powers = {factor if isinstance(factor, str) else factor[0]: p for factor, p in rows.powers}
    factors = {factor[0]: factor for factor, _ in rows.powers if not isinstance(factor, str)}
    values = next((f for f, _ in rows.powers if f in (_H, _CENTERED)), _H)
    if rows.dims != h.dims or len(rows.powers) != 3:
        return None
    if powers != {values: 1.0, "root": -0.5, "parameter": 1.0}:
        return None
    _, of_root, eps = factors["root"]
    _, weight, offset = factors["parameter"]
    kind = _NORMS.get((values, of_root))
    if kind is None or not 0 <= eps < math.inf or not _close(rows.coefficient, 1.0):
        return None
    return Norm(kind, eps, weight, offset, rows.bias)
