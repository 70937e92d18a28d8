"""The lines of many processes as one stream: coloured prefixes on a terminal, else plain ones."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

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


class Output(Protocol):
    """Takes lines from any thread."""

    def line(self, process: int, text: str) -> None:
        """Shows one line of a process."""

    def say(self, text: str) -> None:
        """Shows one line of the launcher's own."""


class ConsoleOutput:
    """Prints lines with their process's number, and the launcher's own to stderr. Thread-safe."""

    def __init__(self, stdout: TextIO, stderr: TextIO, num_processes: int) -> None:
        self.console = Console(file=stdout, highlight=False, soft_wrap=True)
        self._stdout = stdout
        self._stderr = stderr
        self._width = len(str(max(0, num_processes - 1)))
        self._lock = threading.Lock()

    def line(self, process: int, text: str) -> None:
        prefix = f"[{process:>{self._width}}] "
        # A stdout that is closed, or whose reader is gone, must not end the job.
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self.console.is_terminal:
                number = Text(prefix, style=_COLOURS[process % len(_COLOURS)])
                self.console.print(number + Text.from_ansi(text))
            else:
                _write(self._stdout, f"{prefix}{text}\n")

    def say(self, text: str) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self.console.is_terminal:
                self.console.print(Text(f"holdfast: {text}", style="bold"))
            else:
                _write(self._stderr, f"holdfast: {text}\n")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:  # a terminal or pipe that is not UTF-8
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


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

    def handleError(self, record: logging.LogRecord) -> None:
        say = self._say
        self._say = None
        if say is not None:
            error = sys.exc_info()[1]
            say(f"{self.baseFilename} cannot be written: {error}; its lines are lost until it can")
