"""The progress line: a line on a terminal that is overwritten in place. Elsewhere it is absent."""

import shutil
import time
from typing import TextIO

_CLEAR = "\r\x1b[K"


class ProgressLine:
    """Shows the current measurement, its number, the time since the start, and what may be left."""

    def __init__(self, stream: TextIO, total: int) -> None:
        """Starts the clock."""
        self._stream = stream if stream.isatty() else None
        self._total = total
        self._number = 0
        self._what = ""
        self.started = time.monotonic()
        self._first = 0.0  # when the first measurement began

    def begin(self, what: str) -> None:
        """Counts the next measurement, which begins now. `show` writes the line."""
        self._first = self._first or time.monotonic()
        self._number += 1
        self._what = what

    def text(self) -> str:
        """Returns the line; empty if there is nothing to show."""
        if not self._what:
            return ""
        passed = minutes(time.monotonic() - self.started)
        return f"{self._what}: {self._number} of {self._total}, {passed}{self._left()}"

    def _left(self) -> str:
        """The time that is left if each measurement takes as long as those before; or nothing."""
        done = self._number - 1
        if done == 0:
            return ""
        each = (time.monotonic() - self._first) / (done + 0.5)
        return f", about {minutes(each * (self._total - done - 0.5))} left"

    def show(self) -> None:
        """Writes the line again, with the current time."""
        if self._stream is not None and (text := self.text()):
            # A longer line would wrap and could not be overwritten.
            columns = shutil.get_terminal_size().columns
            self._stream.write(_CLEAR + text[: columns - 1])
            self._stream.flush()

    def clear(self) -> None:
        """Erases the line, before other output."""
        if self._stream is not None:
            self._stream.write(_CLEAR)
            self._stream.flush()


def minutes(seconds: float) -> str:
    """Returns a time as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
