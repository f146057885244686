"""Names that were replaced: they work, with a DeprecationWarning, until the next minor version."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")


def argument(old: str, new: str) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Decorates a function whose keyword argument `new` had the name `old`.

    Raises:
        TypeError: a call of the function has both.
    """

    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        name = function.__name__

        @functools.wraps(function)
        def renamed(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{name}: {old} is the old name of {new}; pass {new} only")
                _warn(f"{name}: the argument {old} is now called {new}; rename it")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renamed

    return decorate


def function(old: str, new: Callable[Params, Result]) -> Callable[Params, Result]:
    """The function `new`, under the name `old` that it had."""

    @functools.wraps(new)
    def renamed(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        _warn(f"jax_intranode.{old} is now called jax_intranode.{new.__name__}; rename it")
        return new(*args, **kwargs)

    renamed.__name__ = renamed.__qualname__ = old
    renamed.__doc__ = f"The old name of `{new.__name__}`, with a DeprecationWarning."
    return renamed


def _warn(message: str) -> None:
    # Of the frames: this function, `renamed`, the caller.
    warnings.warn(message, DeprecationWarning, stacklevel=3)
