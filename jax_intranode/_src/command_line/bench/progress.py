"""The progress line: a line on a terminal that is overwritten in place. Elsewhere it is absent."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_CLEAR = "\r\x1b[K"


class ProgressLine:
    """Shows the current measurement, its number, the time since the start, and what may be left."""

    def __init__(self, stream: TextIO, total: int) -> None:
        """Starts the clock.

        Args:
            stream: the stream for the line, if it is a terminal.
            total: the number of measurements.
        """
        self._stream = stream if stream.isatty() else None
        self._total = total
        self._number = 0
        self._what = ""
        self._started = time.monotonic()
        self._first: float | None = None  # when the first measurement began

    def begin(self, what: str) -> None:
        """Counts the next measurement, which begins now. `show` writes the line."""
        self._number += 1
        self._what = what
        if self._first is None:
            self._first = time.monotonic()

    def show(self) -> None:
        """Writes the line again, with the current time."""
        if self._stream is not None and self._what:
            text = (
                f"{self._what}: {self._number} of {self._total}, "
                f"{_minutes(time.monotonic() - self._started)}{self._left()}"
            )
            # A longer line would wrap and could not be overwritten.
            columns = shutil.get_terminal_size().columns
            self._stream.write(_CLEAR + text[: columns - 1])
            self._stream.flush()

    def _left(self) -> str:
        """The time that is left if each measurement takes as long as those before; or nothing."""
        done = self._number - 1
        if done == 0 or self._first is None:
            return ""
        each = (time.monotonic() - self._first) / (done + 0.5)
        return f", about {_minutes(each * (self._total - done - 0.5))} left"

    def clear(self) -> None:
        """Erases the line, before other output."""
        if self._stream is not None:
            self._stream.write(_CLEAR)
            self._stream.flush()


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


@contextlib.contextmanager
def following(log: Path | None, begun: Path, line: ProgressLine) -> Iterator[None]:
    """Shows the progress of the ranks until the end of the block.

    Args:
        log: a file that is copied to stdout while it grows, so that each row appears as soon as it
            is measured; None for no such file.
        begun: a file that gets a line when a measurement begins.
        line: the progress line.
    """
    finished = threading.Event()

    def follow() -> None:
        position, measurements = 0, 0
        last = False
        while not last:
            # Read once more after the end, because the last lines may have come during the wait.
            last = finished.wait(0.1)
            if log is not None and log.exists():
                with log.open(errors="replace") as file:
                    file.seek(position)
                    text = file.read()
                    position = file.tell()
                if text:
                    line.clear()
                    sys.stdout.write(text)
                    sys.stdout.flush()
            if begun.exists():
                lines = begun.read_text().splitlines()
                for what in lines[measurements:]:
                    line.begin(what)
                measurements = len(lines)
            line.show()
        line.clear()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        finished.set()
        follower.join()
