"""The `holdfast` command."""

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
    group(arguments)
