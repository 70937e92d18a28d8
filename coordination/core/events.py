"""What has happened to a job, the latest last: bounded, and numbered, so that a reader asks for
what it has not seen. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .status import EVENT, Changes

_TOGETHER_S = 1.0
_MERGED = frozenset({"joined", "left"})


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, at a time of the machine. `processes` counts those of an event that
    was the same for several.
    """

    number: int
    at: float
    kind: str
    text: str
    task_id: int | None = None
    processes: int = 1


class EventLog:
    """The last `most` events of a job. Thousands that join within a second are one event, of a new
    number.
    """

    def __init__(self, most: int, changes: Changes) -> None:
        self._most = most
        self._changes = changes
        self.kept: dict[int, Event] = {}  # by number, oldest first
        self._number = 0

    def note(self, kind: str, text: str, now: float, task_id: int | None = None) -> None:
        """Notes an event."""
        self._number += 1
        count = 1
        last = next(reversed(self.kept.values()), None)
        if (
            last is not None
            and kind in _MERGED
            and last.kind == kind
            and now - last.at < _TOGETHER_S
        ):
            self._drop(last.number)
            count = last.processes + 1
            text = f"{count} processes {kind}"
            task_id = None
        self._add(Event(self._number, now, kind, text, task_id=task_id, processes=count))

    def after(self, number: int) -> list[Event]:
        """Returns the events of a higher number, oldest first."""
        return [event for event in self.kept.values() if event.number > number]

    def load(self, events: Iterable[Event]) -> None:
        """Puts in what a journal holds."""
        for event in sorted(events, key=lambda event: event.number):
            self.kept[event.number] = event
            self._number = event.number

    def _add(self, event: Event) -> None:
        if len(self.kept) == self._most:
            self._drop(next(iter(self.kept)))
        self.kept[event.number] = event
        self._changes.mark(EVENT, event.number)

    def _drop(self, number: int) -> None:
        del self.kept[number]
        self._changes.mark(EVENT, number)
