"""A progress bar for saves, for people at a terminal."""

from __future__ import annotations

import threading

from ._options import Progress


class ProgressBar:
    """Shows the save in flight as a rich progress bar: `Options(progress=ProgressBar())`. Thread-safe.

    A bar appears with a save's first bytes and goes with its last; where there is no terminal, nothing is shown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: object | None = None

    def __call__(self, seen: Progress) -> None:
        """Draws the bar anew."""
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Rich

        with self._lock:
            if self._bar is None:
                columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
                bar = Rich(*columns, console=Console(stderr=True), transient=True)
                if not bar.console.is_terminal:
                    return
                bar.add_task(f"{seen.phase} step {seen.step}", total=seen.total_bytes)
                bar.start()
                self._bar = bar
            bar = self._bar  # type: ignore[assignment]
            bar.update(bar.task_ids[0], completed=seen.done_bytes)
            if seen.done_bytes >= seen.total_bytes:
                bar.stop()
                self._bar = None


__all__ = ["ProgressBar"]
