"""The saves of a manager that failed, and that no process raises: misses."""

from __future__ import annotations

from ..options import Options
from .save_protocol import SaveResult


class Misses:
    """Counts the misses in a row, of which `max_missed_saves` are let pass. For the saving thread.

    In a group the primary's count decides.
    """

    def __init__(self, options: Options) -> None:
        self._most = options.max_missed_saves if options.on_save_error == "warn" else 0
        self._in_a_row = 0

    def next(self, *, may_miss: bool) -> int:
        """Returns the number that a save has among the misses in a row; 0 where it has to raise."""
        return self._in_a_row + 1 if may_miss and self._in_a_row < self._most else 0

    def note(self, result: SaveResult) -> bool:
        """Notes how a save ended; returns whether the count has changed."""
        before = self._in_a_row
        # An error that is raised leaves the count: until a save succeeds, all others raise too.
        self._in_a_row = result.missed if result.missed or result.error is None else before
        return self._in_a_row != before

    @property
    def text(self) -> str:
        """How many there are, as part of a message."""
        return f"missed {self._in_a_row} in a row, of at most {self._most}"
