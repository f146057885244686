"""JAX's coordination service in this process, for the processes of this user alone."""

import contextlib
import errno
import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jax_intranode._src.jax_private import distributed
from jax_intranode._src.selection.quoting import shown

_log = logging.getLogger("jax_intranode")


@contextlib.contextmanager
def coordination_service(world_size: int) -> Iterator[str]:
    """Runs JAX's coordination service in this process, and gives its address.

    JAX starts it in rank 0. There it would end with this rank, and JAX ends every process that
    loses it, so nobody could say what happened.

    The service asks nobody who he is. So it listens on a Unix socket in a directory that only this
    user can enter.
    """
    directory = _private_directory()
    try:
        address = f"unix:{directory}/service"
        service = distributed.start_coordination_service(address, world_size)
        try:
            yield address
        finally:
            service.shutdown()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _private_directory() -> str:
    """A new directory that only this user can enter, if possible where nobody can replace it."""
    places: dict[str, Path | None] = {}
    refused = []
    for place in map(os.path.realpath, (tempfile.gettempdir(), "/tmp", "/dev/shm")):
        is_plain = all(c.isascii() and (c.isalnum() or c in "/._-") for c in place)
        if not is_plain:  # gRPC reads the address as a URI
            refused.append(f"{shown(place)}: not of letters and digits")
        elif os.path.isdir(place):
            places[place] = _replaceable(Path(place))
    for place, folder in sorted(places.items(), key=lambda item: item[1] is not None):
        try:
            directory = _new_directory(place)
        except OSError as error:
            refused.append(f"{place}: {error.strerror or error}")
            continue
        if folder is not None:
            _log.warning(
                "Another user may rename what is in %s, and so put a coordination service of his "
                "in the place of this job's. Set TMPDIR to a directory that only you can write.",
                folder,
            )
        return directory
    raise RuntimeError(
        "there is no directory for the socket of JAX's coordination service: set TMPDIR to one "
        f"that can be written, with a short name of letters and digits ({'; '.join(refused)})."
    )


def _replaceable(place: Path) -> Path | None:
    """A directory on the way, in which another user may rename what is not his; or None."""
    # Who has the root directory has all programs. In a container it may be another user than 0.
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    for folder in (place, *place.parents):
        status = folder.stat()
        others_write = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in trusted or others_write:
            return folder
    return None


def _new_directory(place: str) -> str:
    """A new directory of this user alone, after a trial with a socket.

    Not all file systems have sockets, and their paths are short.
    """
    directory = tempfile.mkdtemp(prefix="jax_intranode_", dir=place)
    try:
        status = os.stat(directory)
        if status.st_uid != os.geteuid() or status.st_mode & 0o777 != 0o700:
            raise PermissionError(errno.EPERM, "its files are not of their user alone")
        with socket.socket(socket.AF_UNIX) as trial:
            trial.bind(f"{directory}/service")
        os.unlink(f"{directory}/service")
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory
