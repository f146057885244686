"""Counts of what was lowered and what fell back. `stats` reports them.

They are written while programs are traced and lowered, never while a program runs.
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


def lowered(operation: str, algorithm: str, nbytes: int) -> None:
    """Counts an operation of ours in a program, which gathers or sums `nbytes` on a device."""
    with _lock:
        _lowered[operation, algorithm] += 1
        _nbytes[operation, algorithm] += nbytes


def fell_back(operation: str, reason: str) -> None:
    """Counts a call that jax.lax runs."""
    with _lock:
        _fallbacks[operation, reason] += 1


Counts = tuple[Counter[tuple[str, str]], Counter[tuple[str, str]], Counter[tuple[str, str]]]


def take(reset: bool) -> Counts:
    """The counts: operations and bytes of what was lowered, and fallbacks; they may begin anew."""
    with _lock:
        all_counts = (_lowered, _nbytes, _fallbacks)
        taken = (Counter(_lowered), Counter(_nbytes), Counter(_fallbacks))
        if reset:
            for count in all_counts:
                count.clear()
        return taken
