"""The lines of many processes as one stream: coloured prefixes on a terminal, else plain ones."""

from __future__ import annotations

import contextlib
import io
import logging
import logging.handlers
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TextIO, cast

from rich.console import Console
from rich.text import Text

from holdfast.coordination.deadline import Deadline
from holdfast.coordination.diagnosis.summary import printable

_COLOURS = (
    "cyan",
    "magenta",
    "green",
    "yellow",
    "blue",
    "bright_red",
    "bright_cyan",
    "bright_magenta",
    "bright_green",
    "bright_yellow",
)
_LOG_BYTES = 64 << 20
_OLD_LOGS = 3
_MOST_PENDING_BYTES = 1 << 20
_ROOM_S = 1.0  # a line waits so long for room
_LAST_WORDS_S = 10.0


class Output(Protocol):
    """Takes lines from any thread."""

    def line(self, process: int, text: str) -> None:
        """Shows one line of a process."""

    def say(self, text: str) -> None:
        """Shows one line of the launcher's own."""


class BackgroundStream(io.TextIOBase):
    """Writes to a stream's descriptor on a thread of its own: `write` never blocks.

    A terminal that is stopped (Ctrl-S), or a pipe that nobody reads, holds up that thread alone.
    What cannot be written because the reader is gone is lost. Thread-safe.
    """

    def __init__(self, stream: TextIO) -> None:
        # First: an object that is only half made is closed too, by its base class.
        self._changed = threading.Condition()
        self._over = False
        self._stream = stream
        self._descriptor = stream.fileno()
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        threading.Thread(target=self._run, name="holdfast-console", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return self._stream.encoding or "ascii"

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Queues text. What the encoding does not have is escaped."""
        data = text.encode(self.encoding, "backslashreplace")
        with self._changed:
            self._pending.append(data)
            self._pending_bytes += len(data)
            self._changed.notify_all()
        return len(text)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Returns whether less than a mebibyte waits to be written, at the latest after a time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._pending_bytes < _MOST_PENDING_BYTES, timeout_s
            )

    def drain(self, timeout_s: float) -> bool:
        """Returns whether all has been written, at the latest after a time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending_bytes, timeout_s)

    def close(self) -> None:
        """Ends the thread once it has written what waits. The stream stays open."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._over)
                if not self._pending:
                    return
                data = self._pending.popleft()
            with contextlib.suppress(OSError):
                self._write_all(data)
            with self._changed:
                self._pending_bytes -= len(data)
                self._changed.notify_all()

    def _write_all(self, data: bytes) -> None:
        # Past the stream's own buffer, whose lock a stalled thread would hold at exit.
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # a terminal that another program made non-blocking
                writable = select.poll()
                writable.register(self._descriptor, select.POLLOUT)
                writable.poll()


def _in_background(stream: TextIO, beside: TextIO | None = None) -> TextIO:
    """Returns a stream whose `write` does not block; `stream` itself where it is in memory.

    It is `beside` where both lead to one place: what is written to either keeps its order.
    """
    try:
        if beside is not None and os.path.sameopenfile(beside.fileno(), stream.fileno()):
            return beside
        return cast(TextIO, BackgroundStream(stream))
    except (OSError, ValueError):
        return stream


class ConsoleOutput:
    """Prints lines with their process's number, and the launcher's own to stderr. Thread-safe.

    Only `line` waits for a stream that nobody reads, for at most a second.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO, num_processes: int) -> None:
        self._stdout = _in_background(stdout)
        self._stderr = _in_background(stderr, self._stdout)
        self.console = Console(file=self._stdout, highlight=False, soft_wrap=True)
        self._width = len(str(max(0, num_processes - 1)))
        self._lock = threading.Lock()

    def line(self, process: int, text: str) -> None:
        prefix = f"[{process:>{self._width}}] "
        if isinstance(self._stdout, BackgroundStream):
            self._stdout.wait_for_room(_ROOM_S)
        # A stdout that is closed, or whose reader is gone, must not end the job.
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self.console.is_terminal:
                number = Text(prefix, style=_COLOURS[process % len(_COLOURS)])
                self.console.print(number + Text.from_ansi(text))
            else:
                self._stdout.write(f"{prefix}{text}\n")

    def say(self, text: str) -> None:
        text = printable(text, lines=True)  # it may quote a process
        with self._lock, contextlib.suppress(OSError, ValueError):
            # Elsewhere it may be a file, where people look for these lines.
            if self.console.is_terminal and self._stderr is self._stdout:
                self.console.print(Text(f"holdfast: {text}", style="bold"))
            else:
                self._stderr.write(f"holdfast: {text}\n")

    @property
    def stalled(self) -> bool:
        """Whether more waits to be written than is read."""
        stream = self._stdout
        return isinstance(stream, BackgroundStream) and not stream.wait_for_room(0)

    def close(self) -> None:
        """Waits until all is written, at most 10 s where nobody reads."""
        deadline = Deadline(_LAST_WORDS_S)
        for stream in (self._stdout, self._stderr):
            if isinstance(stream, BackgroundStream):
                stream.drain(deadline.remaining_s())
                stream.close()


@contextlib.contextmanager
def console_unless(output: Output | None, num_processes: int) -> Iterator[Output]:
    """Yields `output`; where it is None, the console, whose lines are written after the block."""
    if output is not None:
        yield output
        return
    console = ConsoleOutput(sys.stdout, sys.stderr, num_processes)
    with contextlib.closing(console):
        yield console


class LogFiles:
    """Writes what another output gets into files as well.

    Each process has a `process-3.log`, the launcher's own lines are in `launcher.log`, each with
    its time. A file is rotated at 64 MiB, and three old ones are kept. Later runs and attempts
    append. Where a file cannot be written (no space), that is said once, and the lines still go to
    the other output. Thread-safe.
    """

    def __init__(self, output: Output, folder: Path, *, max_bytes: int = _LOG_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._output = output
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: dict[str, _LogFile] = {}

    def line(self, process: int, text: str) -> None:
        self._write(f"process-{process}.log", text)
        self._output.line(process, text)

    def say(self, text: str) -> None:
        self._write("launcher.log", text)
        self._output.say(text)

    def _write(self, name: str, text: str) -> None:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = _LogFile(self._folder / name, self._max_bytes, self._output.say)
                self._files[name] = file
        # Outside the lock: a handler has one of its own, and a slow disk delays one file alone.
        file.handle(logging.makeLogRecord({"msg": text}))

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


class _LogFile(logging.handlers.RotatingFileHandler):
    def __init__(self, path: Path, max_bytes: int, say: Callable[[str], None]) -> None:
        super().__init__(
            path,
            maxBytes=max_bytes,
            backupCount=_OLD_LOGS,
            encoding="utf-8",
            errors="backslashreplace",
            delay=True,
        )
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._say: Callable[[str], None] | None = say

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # what could not be written before is tried once more
            self.handleError(logging.makeLogRecord({}))

    def handleError(self, record: logging.LogRecord) -> None:
        say = self._say
        self._say = None
        if say is not None:
            error = sys.exc_info()[1]
            say(f"{self.baseFilename} cannot be written: {error}; its lines are lost until it can")
