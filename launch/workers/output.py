"""The lines of many processes as one stream: coloured prefixes on a terminal, plain ones elsewhere."""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta", "bright_green", "bright_yellow")


class Output(Protocol):
    """Takes lines from any thread."""

    def line(self, process: int, text: str) -> None:
        """Shows one line of a process."""

    def say(self, text: str) -> None:
        """Shows one line of the launcher's own."""


class ConsoleOutput:
    """Prints lines with their process's number, the launcher's own to stderr. Thread-safe; a closed stdout is ignored."""

    def __init__(self, stdout: TextIO, stderr: TextIO, num_processes: int) -> None:
        self.console = Console(file=stdout, highlight=False, soft_wrap=True)
        self._stdout, self._stderr = stdout, stderr
        self._width = len(str(max(0, num_processes - 1)))
        self._lock = threading.Lock()

    def line(self, process: int, text: str) -> None:
        prefix = f"[{process:>{self._width}}] "
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self.console.is_terminal:
                self.console.print(Text(prefix, style=_COLOURS[process % len(_COLOURS)]) + Text.from_ansi(text))
            else:
                self._stdout.write(f"{prefix}{text}\n")
                self._stdout.flush()

    def say(self, text: str) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self.console.is_terminal:
                self.console.print(Text(f"holdfast: {text}", style="bold"))
            else:
                self._stderr.write(f"holdfast: {text}\n")
                self._stderr.flush()
