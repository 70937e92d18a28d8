"""What has happened to a job, the latest last: bounded, and numbered, so that a reader asks for
what it has not seen. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

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

    def __init__(self, most: int) -> None:
        self._events: deque[Event] = deque(maxlen=most)
        self._number = 0
        self.added: list[Event] = []  # that the journal has yet to write
        self.dropped: list[int] = []  # their numbers, that the journal has yet to delete

    def note(self, kind: str, text: str, now: float, task_id: int | None = None) -> None:
        """Notes an event."""
        self._number += 1
        last = self._events[-1] if self._events else None
        if (
            last is not None
            and kind in _MERGED
            and last.kind == kind
            and now - last.at < _TOGETHER_S
        ):
            self._drop(self._events.pop())
            count = last.processes + 1
            text = f"{count} processes {kind}"
            self._add(Event(self._number, now, kind, text, processes=count))
        else:
            self._add(Event(self._number, now, kind, text, task_id=task_id))

    def after(self, number: int) -> list[Event]:
        """Returns the events of a higher number, oldest first."""
        return [event for event in self._events if event.number > number]

    def load(self, events: Iterable[Event]) -> None:
        """Puts in what a journal holds."""
        self._events.extend(sorted(events, key=lambda event: event.number))
        self._number = max((event.number for event in self._events), default=0)

    def forget_changes(self) -> None:
        """Forgets what a journal would have to write."""
        self.added.clear()
        self.dropped.clear()

    def touch_all(self) -> None:
        """Has a journal that begins anew write all of them."""
        self.added = list(self._events)
        self.dropped.clear()

    def _add(self, event: Event) -> None:
        if len(self._events) == self._events.maxlen:
            self._drop(self._events.popleft())
        self._events.append(event)
        self.added.append(event)

    def _drop(self, event: Event) -> None:
        if event in self.added:
            self.added.remove(event)
        else:
            self.dropped.append(event.number)
