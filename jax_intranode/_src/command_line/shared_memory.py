"""POSIX shared memory, through which the processes of CPU devices communicate: /dev/shm."""

import os
import tempfile
from pathlib import Path

DIRECTORY = Path("/dev/shm")


def free_bytes() -> int:
    """Bytes that are free. Raises OSError if the directory is not there."""
    stats = os.statvfs(DIRECTORY)
    return stats.f_bavail * stats.f_frsize


def problem() -> str | None:
    """Why processes cannot share memory; None if they can."""
    try:
        free = free_bytes()
        with tempfile.TemporaryFile(dir=DIRECTORY):
            pass
    except OSError as error:
        return f"{DIRECTORY} cannot be written: {error.strerror}"
    return f"{DIRECTORY} is full" if free == 0 else None
