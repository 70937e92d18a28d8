"""What the commands share: exit codes, errors as sentences, JSON output, progress bars."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from holdfast.coordination import HoldfastError

EXIT_DIFFERENT = 1  # `diff` has found differences
EXIT_USAGE = 2  # click's own
EXIT_NOTHING = 3  # there is no such checkpoint, step or item
EXIT_DAMAGED = 4  # bytes are not what was written
EXIT_FAILED = 5  # anything else: refused, not permitted, no space
SHOW_AFTER_S = 1.0

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


class Failure(click.ClickException):
    """Ends a command with a sentence on stderr and an exit code."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code: int = code  # type: ignore[misc]


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Turns errors into sentences and exit codes: no traceback reaches a user."""
    from holdfast.checkpoint import Corrupt, HostileCheckpoint, StepGone, StepNotFound

    try:
        yield
    except (StepNotFound, StepGone) as error:
        raise Failure(str(error), EXIT_NOTHING) from error
    except (Corrupt, HostileCheckpoint) as error:
        raise Failure(str(error), EXIT_DAMAGED) from error
    except (HoldfastError, ValueError) as error:
        raise Failure(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise Failure(f"{where}{error.strerror or error}") from error


def print_json(value: Any) -> None:
    """Prints one JSON value on stdout."""
    click.echo(json.dumps(value, indent=2, default=str))


def console() -> Console:
    """Returns where tables go."""
    return Console(soft_wrap=True, highlight=False)


@contextlib.contextmanager
def progress_bar(what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes bytes done; a bar appears on stderr once it has lasted a second, on a terminal only."""
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=total_bytes)

    def advance(done_bytes: int) -> None:
        bar.advance(task, done_bytes)
        if not bar.live.is_started and bar.console.is_terminal and time.monotonic() - began > SHOW_AFTER_S:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


def shown_time(seconds: float | None) -> str:
    """Returns a time as people read it, in their own zone."""
    import datetime

    return "" if not seconds else datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


__all__ = [
    "EXIT_DAMAGED",
    "EXIT_DIFFERENT",
    "EXIT_FAILED",
    "EXIT_NOTHING",
    "EXIT_USAGE",
    "Failure",
    "console",
    "json_option",
    "print_json",
    "progress_bar",
    "sentences",
    "shown_time",
]
