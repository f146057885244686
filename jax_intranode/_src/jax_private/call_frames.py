"""Where a call stands in the user's program.

0.10.2 and later: ``jax.named_scope`` can't be read back, and JAX shows the frames of an equation in
messages only.
"""

from collections.abc import Callable
from typing import Any

from jax._src import source_info_util

# File, line and function.
Frame = tuple[str, int, str]


def scopes_of(equation: Any) -> tuple[str, ...]:
    """The named scopes and transformations that an equation was traced in, outermost first.

    They start anew in each nested jaxpr.
    """
    return tuple(entry.name for entry in equation.source_info.name_stack.stack)


def frames_of(equation: Any) -> list[Frame]:
    """The frames outside of JAX that traced an equation, innermost first."""
    return _frames(equation.source_info.traceback)


def frames_here() -> list[Frame]:
    """The frames outside of JAX that called this function, innermost first.

    In a lowering rule: the frames that traced the equation that is lowered.
    """
    return _frames(source_info_util.current().traceback)


def as_called_here(body: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose equations will have the frames that call this function here.

    0.10.2 and later: JAX starts the frames of a shard_map's equations anew at its body. For a body
    of this package the user's frames would be lost.
    """
    traceback = source_info_util.current().traceback

    def called_there(*args: Any) -> Any:
        with source_info_util.user_context(traceback):
            return body(*args)

    return called_there


def _frames(traceback: Any) -> list[Frame]:
    frames = source_info_util.user_frames(traceback)
    return [(f.file_name, f.start_line, f.function_name) for f in frames]
