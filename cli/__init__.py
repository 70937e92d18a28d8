"""The `holdfast` command."""

import io
import sys
from collections.abc import Sequence

from .interrupts import end_at_interrupts

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command with `arguments` (default: those of this process), and ends the process."""
    end_at_interrupts()
    # After that: they import for a while.
    from holdfast.coordination.vitals import fill_standard_streams

    from .entry import main as group

    fill_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack a letter of a name
        sys.stdout.reconfigure(errors="backslashreplace")
    group(arguments)
