"""The waits that have lasted longer than JAX_INTRANODE_REPORT_AFTER_S. `stats` reports them."""

import threading

_lock = threading.Lock()
# In the order in which they were first reported.
_messages: dict[str, None] = {}


def waited(message: str) -> None:
    """Notes a long wait."""
    with _lock:
        _messages[message] = None


def take(reset: bool) -> tuple[str, ...]:
    """The messages of the waits.

    Args:
        reset: whether they begin anew.
    """
    with _lock:
        taken = tuple(_messages)
        if reset:
            _messages.clear()
        return taken
