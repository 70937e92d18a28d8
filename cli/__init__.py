"""The `holdfast` command."""

from collections.abc import Sequence

from .interrupts import end_at_interrupts

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command with `arguments` (default: those of this process), and ends the process."""
    end_at_interrupts()
    from .entry import main as group  # after that: it imports for a while

    group(arguments)
