"""JAX's coordination service in this process, for the processes of this user alone."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jax_intranode._src import compat

# The longest path of a Unix socket that Linux takes.
_MOST_BYTES = 107


@contextlib.contextmanager
def coordination_service(world_size: int) -> Iterator[str]:
    """Runs JAX's coordination service in this process, and gives its address.

    JAX starts it in rank 0. There it would end with this rank, and JAX ends every process that
    loses it, so nobody could say what happened.

    The service asks nobody who he is. So it listens on a Unix socket in a directory that only this
    user can enter.

    Args:
        world_size: the number of processes that will connect.
    """
    directory = _private_directory()
    try:
        address = f"unix:{directory}/service"
        service = compat.start_coordination_service(address, world_size)
        try:
            yield address
        finally:
            service.shutdown()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _private_directory() -> Path:
    """A new directory with mode 0700, in a place whose path is short and plain enough."""
    for place in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        is_plain = all(c.isascii() and (c.isalnum() or c in "/._-") for c in place)
        if not is_plain or len(place) > _MOST_BYTES - 40:
            continue  # gRPC reads the address as a URI
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="jax_intranode_", dir=place))
    raise RuntimeError(
        "there is no directory for the socket of JAX's coordination service: set TMPDIR to one "
        f"that can be written, of letters and digits, with at most {_MOST_BYTES - 40} characters."
    )
