"""A tuning: what `python -m jax_intranode tune` has measured, in place of what is shipped.

A tuning is a JSON file. It has rows for the table of the collectives (table.py) and, for GPUs, the
profile of the overlap model (overlap/profiles.py). JAX_INTRANODE_TUNING names the file. All
processes need the same content: they compare its digest at the rendezvous.

A file that cannot be used raises when the package is imported. A file for another device than a
mesh has is only found at the rendezvous of that mesh, which then has a reason for ``jax.lax``.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_intranode._src.selection import config, records, table
from jax_intranode._src.selection.overlap.profiles import Profile
from jax_intranode._src.selection.quoting import shown
from jax_intranode._src.version import __version__

# The version of the file's layout.
FORMAT = 1
VARIABLE = "JAX_INTRANODE_TUNING"
_KIND = "jax_intranode tuning"
# `tune` writes some 100 kB.
_MOST_BYTES = 16 << 20
_AGAIN = "measure again with `python -m jax_intranode tune`"


@dataclass(frozen=True)
class Tuning:
    """What a file says.

    Attributes:
        path: the file.
        digest: identifies what decides: the device, the rows and the profile.
        platform: "cpu" or "gpu".
        device: the exact device kind.
        devices: how many of them the measured meshes had at most.
        versions: of jax, jaxlib and others at the measurement; for people.
        date: of the measurement, in ISO 8601.
        rows: by process mode, operation, packets and world size, as in `table.TABLE`. No rows:
            lax was faster at all sizes.
        profile: the constants of the GPU; None if they were not measured.
    """

    path: str
    digest: str
    platform: str
    device: str
    devices: int
    versions: Mapping[str, str | None]
    date: str
    rows: table.RowsByKey
    profile: Profile | None

    @property
    def name(self) -> str:
        """How reasons name it."""
        return f"{VARIABLE}={self.path}"

    def __str__(self) -> str:
        """Returns what it is, in a line."""
        what = f"{len(self.rows)} tables"
        if self.profile is not None:
            what += " and a profile"
        return (
            f"{self.path}: {what} of {self.devices} x {self.device}, measured {self.date} "
            f"(digest {self.digest})"
        )


def read(path: str) -> Tuning:
    """Reads a file; raises ValueError if it is unreadable, damaged, or of another version."""
    try:
        fields = json.loads(_content(path))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not JSON: {error}"
        raise ValueError(f"{VARIABLE}={path!r}: {why}.") from error
    if not isinstance(fields, dict) or fields.get("kind") != _KIND:
        raise ValueError(f"{VARIABLE}={path!r}: this is not a file of `tune`; {_AGAIN}.")
    for what, found, wanted in (
        ("layout", fields.get("format"), FORMAT),
        ("jax_intranode", fields.get("jax_intranode"), __version__),
    ):
        if found != wanted:
            raise ValueError(
                f"{VARIABLE}={path!r}: the file has {what} {shown(found)}, and this is {wanted}; "
                f"{_AGAIN}."
            )
    try:
        # First: what has the digest is what `write` wrote.
        if _digest(fields) != fields["digest"]:
            raise ValueError(f"its content has the digest {_digest(fields)}")
        return _parse(path, fields)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE}={path!r}: the file is damaged ({shown(error)}); {_AGAIN}."
        ) from error


def _content(path: str) -> bytes:
    """The bytes of a file. It may be anything, or what a FIFO or a device never ends to give."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise ValueError(f"use a regular file of at most {_MOST_BYTES >> 20} MiB")
        return file.read(_MOST_BYTES)


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Writes a file that `read` accepts.

    Args:
        path: the file.
        fields: "platform", "device", "devices", "versions", "date", "tables" and "profile", as the
            file has them, and more for people.
    """
    whole = {"kind": _KIND, "format": FORMAT, "jax_intranode": __version__, **fields}
    whole["digest"] = _digest(whole)
    path.write_text(json.dumps(whole, indent=1) + "\n")


def table_fields(
    mode: str, operation: str, packets: str, ranks: int, rows: tuple[table.Row, ...]
) -> dict[str, Any]:
    """Returns the rows of one key as the file has them."""
    return {
        "mode": mode,
        "operation": operation,
        "packets": packets,
        "ranks": ranks,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _digest(fields: Mapping[str, Any]) -> str:
    """Identifies what decides."""
    decides = [fields[name] for name in ("platform", "device", "devices", "tables", "profile")]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def _parse(path: str, fields: Mapping[str, Any]) -> Tuning:
    rows = {
        (of_one["mode"], of_one["operation"], of_one["packets"], of_one["ranks"]): tuple(
            records.from_json(table.Row, row) for row in of_one["rows"]
        )
        for of_one in fields["tables"]
    }
    profile = fields["profile"] and records.from_json(Profile, fields["profile"])
    return Tuning(
        path=path,
        rows=rows,
        profile=profile and dataclasses.replace(profile, tuned_by=f"{VARIABLE}={path}"),
        **{
            name: fields[name]
            for name in ("digest", "platform", "device", "devices", "versions", "date")
        },
    )


# What is in force.

# While `tune` tries a row, and while `bench` times what is shipped.
_tried: list[Tuning | None] = []


@functools.cache
def _named(path: str) -> Tuning:
    return read(path)


def current() -> Tuning | None:
    """The tuning that JAX_INTRANODE_TUNING names; None if it is not set.

    Raises ValueError if the file cannot be used.
    """
    if _tried:
        return _tried[-1]
    path = config.get().tuning
    return None if path is None else _named(path)


@contextlib.contextmanager
def using(tuning: Tuning | None) -> Iterator[None]:
    """Uses a tuning for what is lowered within; None: what is shipped. All ranks must do alike."""
    _tried.append(tuning)
    try:
        yield
    finally:
        _tried.pop()


def digest() -> str:
    """Identifies the tuning in force; "none" without one. Ranks with different ones differ."""
    tuning = current()
    return "none" if tuning is None else tuning.digest


def rows_for(kinds: Iterable[str]) -> table.Tuned | None:
    """The rows in force for devices of these kinds; None if the shipped ones hold."""
    tuning = _for(kinds)
    return None if tuning is None else table.Tuned(tuning.rows, tuning.name)


def profile_for(kinds: Iterable[str]) -> Profile | None:
    """The profile in force for GPUs of these kinds; None if the shipped ones hold."""
    tuning = _for(kinds)
    return None if tuning is None else tuning.profile


def _for(kinds: Iterable[str]) -> Tuning | None:
    tuning = current()
    return tuning if tuning is not None and set(kinds) == {tuning.device} else None


def refusal(kinds: Iterable[str]) -> str | None:
    """Why the tuning in force can't be used for devices of these kinds, or None."""
    tuning = current()
    others = [] if tuning is None else sorted(set(kinds) - {tuning.device})
    if tuning is None or not others:
        return None
    return (
        f"{tuning.name} was measured on {tuning.device}, and these devices are "
        f"{' and '.join(others)}; {_AGAIN} or unset it"
    )
