"""What `stats` reports: what was lowered, what fell back, and long waits.

It is written while programs are traced and lowered, and when a wait is reported: never by the calls
of a program that runs.
"""

from collections import Counter

from jax_intranode._src.native import threads

# Guards what follows.
_lock = threads.Lock()
# By (operation, algorithm).
_lowered: Counter[tuple[str, str]] = Counter()
_nbytes: Counter[tuple[str, str]] = Counter()
# By (operation, reason).
_fallbacks: Counter[tuple[str, str]] = Counter()
# The messages of waits, in the order in which they were first reported.
_waits: dict[str, None] = {}


def lowered(operation: str, algorithm: str, nbytes: int) -> None:
    """Counts an operation of ours in a program, which gathers or sums `nbytes` on a device."""
    with _lock:
        _lowered[operation, algorithm] += 1
        _nbytes[operation, algorithm] += nbytes


def fell_back(operation: str, reason: str) -> None:
    """Counts a call that jax.lax runs."""
    with _lock:
        _fallbacks[operation, reason] += 1


def waited(message: str) -> None:
    """Notes a wait that has lasted longer than JAX_INTRANODE_REPORT_AFTER_S."""
    with _lock:
        _waits[message] = None


Counts = Counter[tuple[str, str]]


def take(reset: bool) -> tuple[Counts, Counts, Counts, tuple[str, ...]]:
    """Operations and bytes of what was lowered, fallbacks, and waits; they may begin anew."""
    with _lock:
        taken = (Counter(_lowered), Counter(_nbytes), Counter(_fallbacks), tuple(_waits))
        if reset:
            for of_all in (_lowered, _nbytes, _fallbacks, _waits):
                of_all.clear()
        return taken
