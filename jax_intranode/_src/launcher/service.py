"""JAX's coordination service in this process, and ports for it."""

import contextlib
import random
import socket
from collections.abc import Iterator

from jax_intranode._src import compat


@contextlib.contextmanager
def coordination_service(world_size: int) -> Iterator[str]:
    """Runs JAX's coordination service in this process, and gives its address.

    JAX starts it in rank 0. There it would end with this rank, and JAX ends every process that
    loses it, so nobody could say what happened.

    Args:
        world_size: the number of processes that will connect.
    """
    with socket.socket() as reserved:
        # The port is ours from here on. The service shares it, and only the service listens.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        service = compat.start_coordination_service(address, world_size)
    try:
        yield address
    finally:
        service.shutdown()


def free_port() -> int:
    """Returns a TCP port that nobody on this node listened on a moment ago.

    It is outside of the range from which the system takes ports for connections: such a port may be
    taken before the caller's child listens on it.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
