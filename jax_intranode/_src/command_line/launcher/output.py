"""What the ranks print: shown in lines with the rank's number in front, and written to files."""

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from jax_intranode._src import timeouts
from jax_intranode._src.command_line.launcher.own_files import open_own

# How many of a rank's last lines the report of a failure shows, and how much of a line.
_TAIL_LINES = 30
_TAIL_BYTES = 400
# How messages of this package begin.
_OURS = b"jax_intranode: "
_READ_BYTES = 1 << 16
_PIECE_BYTES = select.PIPE_BUF


class Screen:
    """This process's stdout or stderr.

    It may be closed, as after ``... | head``. Then the ranks go on, and nothing is shown. It may be
    a pipe that nobody reads for a while, as before ``less``: what does not fit waits here.

    Attributes:
        fd: the file descriptor.
    """

    def __init__(self, fd: int) -> None:
        """Writes to the file descriptor, without a buffer as long as it takes all."""
        self.fd = fd
        self._waiting = b""
        self._is_open = True

    def write(self, data: bytes) -> None:
        """Writes as much as it takes now, and keeps the rest."""
        if self._is_open:
            self._waiting += data
            self.is_full()

    def is_full(self) -> bool:
        """Writes as much as it takes now, and returns whether anything is left."""
        can_write = select.poll()
        can_write.register(self.fd, select.POLLOUT)
        # A write of so many bytes does not wait where one byte fits; Python would go on with a
        # write that waits after a signal.
        while self._waiting and can_write.poll(0):
            try:
                self._waiting = self._waiting[os.write(self.fd, self._waiting[:_PIECE_BYTES]) :]
            except BlockingIOError:  # another process has made it so
                break
            except OSError:
                self._is_open, self._waiting = False, b""
        return bool(self._waiting)


class RankOutput:
    """What a rank prints.

    Attributes:
        prefix: stands in front of its lines.
        tail: its last lines.
    """

    def __init__(
        self, rank: int, world_size: int, log: Path | None, say: Callable[[str], None]
    ) -> None:
        """Begins with nothing.

        Args:
            log: the file that gets everything as it is, or None.
            say: tells the user that the file cannot be written.

        Raises:
            OSError: see `open_own`.
        """
        self.prefix = b"[%*d] " % (len(str(world_size - 1)), rank)
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._say = say
        self._log: IO[bytes] | None = None if log is None else open_own(log)

    def write(self, data: bytes) -> None:
        if self._log is not None:
            try:
                self._log.write(data)
            except OSError as error:
                self._say(f"{self._log.name} is not written any more: {error.strerror}")
                self.close()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


class Stream:
    """The stdout or the stderr of a rank, line by line.

    Attributes:
        last: whose line was shown last, and where.
    """

    last: tuple[RankOutput, Screen] | None = None

    def __init__(self, pipe: IO[bytes], output: RankOutput, screen: Screen) -> None:
        """Begins with an empty line.

        Args:
            pipe: the end that this process reads.
            output: what the rank prints.
            screen: where it is shown.
        """
        self._pipe = pipe
        self._output = output
        self._screen = screen
        self._line = b""
        self._since = 0.0
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> bool:
        """Reads what there is, and returns whether there may be more later."""
        try:
            return self._read()
        except BlockingIOError:
            return True

    def finish(self) -> None:
        """Reads what is left when the rank has ended, and closes the pipe."""
        with contextlib.suppress(BlockingIOError):  # something outside of its group has the pipe
            while self._read():
                pass
        self._show_line()
        self._pipe.close()

    def show_old(self) -> None:
        """Shows a line that has not ended for a while."""
        if time.monotonic() - self._since > timeouts.LINE_S:
            self._show_line()

    def _read(self) -> bool:
        data = os.read(self._pipe.fileno(), _READ_BYTES)
        self._output.write(data)
        *lines, rest = (self._line + data).split(b"\n")
        if lines or not self._line:
            self._since = time.monotonic()
        self._line = rest
        self._show(lines)
        if len(self._line) > _READ_BYTES:
            self._show_line()
        return bool(data)

    def _show_line(self) -> None:
        if self._line:
            self._show([self._line])
            self._line = b""

    def _show(self, lines: Sequence[bytes]) -> None:
        texts, tail = [], self._output.tail
        for line in lines:
            # What a terminal would have at the end of a line that was written over.
            text = line.rstrip(b"\r").rpartition(b"\r")[2]
            # At its end a rank prints the message of a failure again.
            if not text.startswith(_OURS) or text[:_TAIL_BYTES] not in tail:
                tail.append(text[:_TAIL_BYTES])
                texts.append(text)
        Stream.last = (self._output, self._screen) if texts else Stream.last
        self._screen.write(b"".join(self._output.prefix + text + b"\n" for text in texts))
