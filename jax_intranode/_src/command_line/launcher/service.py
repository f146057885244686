"""JAX's coordination service in this process, for the processes of this user alone."""

import contextlib
from collections.abc import Iterator

from jax_intranode._src.command_line.launcher.own_files import private_directory
from jax_intranode._src.jax_private import distributed


@contextlib.contextmanager
def coordination_service(world_size: int) -> Iterator[str]:
    """Runs JAX's coordination service in this process, and gives its address.

    JAX starts it in rank 0. There it would end with this rank, and JAX ends every process that
    loses it, so nobody could say what happened.

    The service asks nobody who he is. So it listens on a Unix socket in a directory that only this
    user can enter.
    """
    with private_directory() as directory:
        address = f"unix:{directory}/service"
        service = distributed.start_coordination_service(address, world_size)
        try:
            yield address
        finally:
            service.shutdown()
