"""Why jax.lax runs a call, as far as it is known while the call is traced.

Lowering knows more: see `lowering_site.LoweringSite` and `select.select`.
"""

import logging
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.core import ShapedArray

from jax_intranode._src import reasons
from jax_intranode._src.health import call_sites, counts
from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.selection import config, select

logger = logging.getLogger(config.FALLBACKS)


def bound_axes() -> frozenset[Any]:
    """The mesh axes that shard_map has bound here."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


# Each function returns a reason; None where a call may be accelerated.


def reason_of_axes(axes: tuple[Hashable, ...], axis_index_groups: Any = None) -> str | None:
    """Why lax runs a collective over these axes."""
    if not axes:
        return reasons.NO_AXES
    if len(set(axes)) < len(axes):
        return reasons.AXIS_TWICE.of(axes=reasons.names(axes))
    for axis in axes:
        if axis not in bound_axes():
            is_of_vmap = not isinstance(axis, str) or trace_state.axis_is_bound(axis)
            reason = reasons.AXIS_NOT_BOUND if is_of_vmap else reasons.AXIS_UNBOUND
            return reason.of(axes=reasons.names([axis]))
    if axis_index_groups is not None:
        return reasons.INDEX_GROUPS
    if not trace_state.forbidden_axes().isdisjoint(axes):
        return reasons.NO_COLLECTIVES  # lax raises the error
    if len(trace_state.axes_in_types(axes)) < len(axes):
        return reasons.AXIS_OF_ONE_DEVICE
    return None


def reason_of_hidden_axis(name: Hashable) -> str:
    """Why lax runs a collective over an axis of vmap that has the name of a mesh axis."""
    return reasons.AXIS_HIDDEN.of(axes=reasons.names([name]))


def reason_of_array(operation: str, x: Any, axes: tuple[Hashable, ...]) -> str | None:
    """Why lax runs a collective of this operand."""
    reason = reason_of_operands([x], [x], axes)
    return reason or select.unsupported_dtype(operation, x.dtype.name)


def reason_of_operands(
    operands: Sequence[Any], communicated: Sequence[Any], axes: tuple[Hashable, ...]
) -> str | None:
    """Why lax runs a call of these operands.

    `communicated` are those from which the gathered or summed array is computed. lax has rules of
    its own for constants, and refuses references.
    """
    if not any(isinstance(v, jax.core.Tracer) for v in communicated):
        return reasons.CONSTANT
    if not all(isinstance(jax.typeof(v), ShapedArray) for v in operands):
        return reasons.NOT_AN_ARRAY
    types = [jax.typeof(v).manual_axis_type for v in operands]
    if any(t.unreduced or t.reduced for t in types):
        return reasons.UNREDUCED
    # Under check_vma=True an operand varies over all of the axes or over none; lax refuses others.
    over = set[Any]().union(*(jax.typeof(v).manual_axis_type.varying for v in communicated))
    least = 0 if trace_state.casts_operands() else -1
    if least < len(over.intersection(axes)) < len(axes):
        return reasons.VARIES_PARTLY.of(axes=reasons.names(axes))
    return None


# Falling back.


@contextmanager
def to_lax(operation: str, reason: str, logged: bool = True, sends: bool = True) -> Iterator[None]:
    """The context in which lax's function is called in place of ours.

    It records the reason in the jaxpr (see `scope`) and, if `logged`, in the log: otherwise lax is
    only asked. It adds to lax's errors which function was called, and for an unbound axis how an
    axis is bound. `sends` says whether there is anything to send.

    Raises:
        RuntimeError: JAX_INTRANODE_STRICT=1, and something is sent. An error of lax comes first.
    """
    if logged:
        log(operation, reason)
    try:
        with scope(operation, reason):
            yield
    except (NameError, AssertionError, TypeError, ValueError, IndexError) as error:
        hint = (
            f"jax_intranode.{operation} acts on the axes that jax.shard_map (or jax.vmap or "
            f"jax.pmap) binds; bound here: {sorted(map(str, bound_axes())) or 'none'}. Name "
            "some of these, or call it inside a jax.shard_map over a mesh with the axis."
        )
        if isinstance(error, NameError):
            error.add_note(hint)
        # Then lax's error says nothing of the axis.
        elif reasons.UNBOUND_AXIS in reason and trace_state.check_vma():
            raise NameError(f"unbound axis name: {reason}. {hint}") from error
        # lax takes numbers and arrays that are constants; then its message says what is wrong.
        elif isinstance(error, TypeError) or reason != reasons.CONSTANT:
            error.add_note(
                f"jax_intranode.{operation} takes arrays, or pytrees of arrays. jax.lax got this "
                f"call, and refused it: {reason}."
            )
        raise
    if logged and sends:
        refuse_if_strict(operation, reason)


def scope(operation: str, reason: str) -> Any:
    """The named scope by which `explain` finds lax's equations and the reason for them."""
    return jax.named_scope(f"jax_intranode.{operation}[lax: {reason}]")


def parse_scope(name: str) -> tuple[str, str] | None:
    """The operation and the reason of a `scope`; None for any other scope."""
    match = re.fullmatch(r"jax_intranode\.(\w+)\[lax: (.*)\]", name, re.DOTALL)
    return None if match is None else (match[1], match[2])


def refuse_if_strict(operation: str, reason: str) -> None:
    """Raises RuntimeError, the error of a fallback, if JAX_INTRANODE_STRICT=1."""
    if config.get().is_strict:
        raise RuntimeError(
            f"jax_intranode.{operation} at {call_sites.caller()} falls back to jax.lax: {reason}. "
            "JAX_INTRANODE_STRICT=1 makes this an error. Fix the cause, call the function of "
            "jax.lax instead, or unset the variable."
        )


def refuse_missed(what: str, missed: Sequence[tuple[str, str, str]], switches: str) -> None:
    """Raises RuntimeError if JAX_INTRANODE_STRICT=1 and something was left that might be faster.

    Args:
        what: such things.
        missed: the operation, the call site and the reason of each that was left.
        switches: by what the program is rewritten.
    """
    if missed and config.get().is_strict:
        raise RuntimeError(
            f"{what} were not replaced:\n"
            + "\n".join(f"  {operation} at {site}: {reason}" for operation, site, reason in missed)
            + "\nJAX_INTRANODE_STRICT=1 makes this an error. Fix the causes, compile this program "
            f"without {switches}, or unset the variable."
        )


_logged: set[tuple[str, str, str, str]] = set()


def log(operation: str, reason: str) -> None:
    """Counts a fallback, and logs it once for each call site and reason."""
    counts.fell_back(operation, reason)
    if logger.isEnabledFor(logging.INFO):
        log_once(operation, call_sites.caller(), "falls back to jax.lax", reason)


def log_once(operation: str, where: str, what: str, reason: str) -> None:
    """Logs what becomes of an operation, once."""
    line = (operation, where, what, reason)
    if line not in _logged:
        _logged.add(line)
        logger.info("%s at %s %s: %s.", *line)
