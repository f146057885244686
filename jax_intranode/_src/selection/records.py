"""Records that travel as JSON: `dataclasses.asdict` makes it, and `from_json` reads it."""

import collections.abc
import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

Record = TypeVar("Record")


def from_json(kind: type[Record], fields: Mapping[str, Any]) -> Record:
    """The record of this dataclass from which `fields` were made.

    Raises:
        LookupError, TypeError, ValueError: they were not.
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], fields[name]) for name in names})


def _value(hint: Any, value: Any) -> Any:
    """A value of this type; JSON has lists for tuples, and texts for the keys of a mapping."""
    of, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value)
    if of is collections.abc.Mapping:
        return {arguments[0](key): _value(arguments[1], v) for key, v in value.items()}
    if of is tuple and arguments[-1] is ...:
        return tuple(_value(arguments[0], v) for v in value)
    if of is tuple:
        return tuple(_value(a, v) for a, v in zip(arguments, value, strict=True))
    return value
