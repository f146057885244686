"""Counts of what was lowered, what fell back, and what waited long. `stats` reports them.

They are written while programs are traced and lowered, and by the thread that follows the monitor;
never while a program runs.
"""

import threading
from collections import Counter

# Guards what follows.
_lock = threading.Lock()
# By (operation, algorithm).
_lowered: Counter[tuple[str, str]] = Counter()
_nbytes: Counter[tuple[str, str]] = Counter()
# By (operation, reason).
_fallbacks: Counter[tuple[str, str]] = Counter()
_waits: Counter[str] = Counter()


def lowered(operation: str, algorithm: str, nbytes: int) -> None:
    """Counts an operation of ours in a program.

    Args:
        operation: its name.
        algorithm: what runs it.
        nbytes: bytes of the array that a device gathers or sums.
    """
    with _lock:
        _lowered[operation, algorithm] += 1
        _nbytes[operation, algorithm] += nbytes


def fell_back(operation: str, reason: str) -> None:
    """Counts a call that jax.lax runs."""
    with _lock:
        _fallbacks[operation, reason] += 1


def waited(message: str) -> None:
    """Counts a wait that has lasted longer than JAX_INTRANODE_REPORT_AFTER_S."""
    with _lock:
        _waits[message] += 1


Counts = tuple[
    Counter[tuple[str, str]], Counter[tuple[str, str]], Counter[tuple[str, str]], Counter[str]
]


def take(reset: bool) -> Counts:
    """The counts: operations and bytes of what was lowered, fallbacks, waits.

    Args:
        reset: whether they begin anew.
    """
    with _lock:
        all_counts = (_lowered, _nbytes, _fallbacks, _waits)
        taken = (Counter(_lowered), Counter(_nbytes), Counter(_fallbacks), Counter(_waits))
        if reset:
            for count in all_counts:
                count.clear()
        return taken
