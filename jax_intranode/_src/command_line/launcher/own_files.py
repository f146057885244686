"""Files and directories of this user alone, where other users may put theirs in the way."""

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
from typing import IO

from jax_intranode._src.selection.quoting import shown

_log = logging.getLogger("jax_intranode")

# In a user namespace the system gives this number for all users that the namespace does not have.
_UNMAPPED = Path("/proc/sys/kernel/overflowuid")
# Directories that the system makes, so that their owner is whoever has the root directory.
_OF_SYSTEM = [Path("/"), Path("/tmp"), Path("/dev"), Path("/dev/shm")]


def open_own(path: Path, *, append: bool = False) -> IO[bytes]:
    """Opens a new or own file to write to it, for this user alone, without a buffer.

    Raises:
        OSError: the file can't be opened, is a link, has hard links, or is of another user or kind.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags | (os.O_APPEND if append else 0), 0o600)
    file = os.fdopen(fd, "wb", buffering=0)
    status = os.fstat(fd)
    is_own = status.st_uid == os.geteuid() and status.st_nlink == 1
    if not is_own or not stat.S_ISREG(status.st_mode):
        file.close()
        why = "it is another user's, or no regular file, or has hard links"
        raise PermissionError(errno.EPERM, why, str(path))
    if not append:
        file.truncate()
    return file


def make_own_directory(path: Path) -> None:
    """Makes a directory, unless it is there.

    Raises:
        OSError: it can't be made, or it or a link on the way to it is another user's.
    """
    with contextlib.suppress(FileNotFoundError):
        path.stat()  # raises OSError if links lead in a circle
    followed = [path.absolute()]
    for one in followed:  # grows
        for part in (one, *one.parents):
            if part.is_symlink():
                _refuse_foreign(part)
                followed.append(part.parent / part.readlink())
    path.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(path.resolve())


def _refuse_foreign(path: Path) -> None:
    if _is_foreign(path):
        why = f"it belongs to another user, {path.lstat().st_uid}"
        raise PermissionError(errno.EPERM, why, str(path))


def _is_foreign(path: Path) -> bool:
    """Whether a file is another user's. Who has the root directory has all programs."""
    owner = path.lstat().st_uid
    if owner == (int(_UNMAPPED.read_text()) if _UNMAPPED.exists() else 65534):
        return owner != os.geteuid() and path not in _OF_SYSTEM
    # In a container the root directory may be of another user than 0.
    return owner not in (0, os.geteuid(), os.stat("/").st_uid)


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory that only this user can enter, if possible where nobody can replace it.

    A socket in it has an address that gRPC can read. At the end the directory is removed.
    """
    directory = _private_directory()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield Path(directory)
    finally:
        # Not by its name, which another directory may have by now. An empty one does no harm.
        shutil.rmtree(".", ignore_errors=True, dir_fd=fd)
        os.close(fd)
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _private_directory() -> str:
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
                "Another user may rename what is in %s, and so put files and a coordination "
                "service of his in the place of this job's. Set TMPDIR to a directory that only "
                "you can write.",
                folder,
            )
        return directory
    raise RuntimeError(
        "there is no directory for this job's files and the socket of JAX's coordination service: "
        "set TMPDIR to one that can be written, with a short name of letters and digits "
        f"({'; '.join(refused)})."
    )


def _replaceable(place: Path) -> Path | None:
    """A directory on the way, in which another user may rename what is not his; or None."""
    for folder in (place, *place.parents):
        mode = folder.stat().st_mode
        if _is_foreign(folder) or (mode & 0o022 and not mode & stat.S_ISVTX):
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
