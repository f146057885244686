"""The text of the errors that XLA raises."""

import contextlib
from collections.abc import Callable

import jax


def show_in_runtime_errors(shown: Callable[[str], str | None]) -> None:
    """Makes the text of a ``JaxRuntimeError`` begin with ours, whoever prints it.

    `shown` turns XLA's text into ours, or into None if XLA's stays alone.

    0.10.2 to 0.12: the class is made by Python's C API, and its ``__str__`` can be replaced. Where
    that is refused, XLA's text stays as it is.
    """
    error = jax.errors.JaxRuntimeError
    if getattr(error.__str__, "of_jax_intranode", False):
        return
    of_xla = error.__str__

    def text_of(self: BaseException) -> str:
        text = of_xla(self)
        ours = shown(text)
        return text if ours is None else f"{ours}\n\nXLA reported: {text}"

    text_of.of_jax_intranode = True  # type: ignore[attr-defined]
    with contextlib.suppress(TypeError, AttributeError):
        error.__str__ = text_of
