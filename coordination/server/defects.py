"""What a service meets that is wrong with itself: whoever called is answered, the log and the
status say so, and all others are served as before.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence

from ..core.events import EventLog
from ..core.status import Code, Status, clip
from ..names import DEFECT

log = logging.getLogger("holdfast.coordination")

_MOST_BYTES = 500  # of one sentence
_MOST_KEPT = 16  # places, each with the first error that was met there


class Defects:
    """The defects that were met, each place once, oldest first."""

    def __init__(self, events: EventLog, clock: Callable[[], float]) -> None:
        self._events = events
        self._clock = clock
        self._known: dict[object, str] = {}

    @property
    def sentences(self) -> Sequence[str]:
        """What was met where."""
        return tuple(self._known.values())

    def note(self, where: str, error: Exception) -> Status:
        """Takes note of an error that was raised in serving `where`; returns what its caller is
        answered.
        """
        text = " ".join(str(error).split())
        what = clip(f"{type(error).__name__}: {text}", _MOST_BYTES)
        sentence = f"{DEFECT} in {where}: {what}; its log has the traceback: please report it"
        frames = traceback.extract_tb(error.__traceback__)
        place = (where, type(error), frames[-1].filename, frames[-1].lineno)
        # What polls meets it each time: the first traceback says all.
        if place not in self._known and len(self._known) < _MOST_KEPT:
            self._known[place] = sentence
            self._events.note("coordinator", sentence, self._clock())
            log.error("%s", sentence, exc_info=error)
        return Status(Code.INTERNAL, sentence)
