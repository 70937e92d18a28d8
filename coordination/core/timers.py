"""Calls that wait, and a heap of deadlines that forgets the calls that are over. Pure."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any, Protocol

_SLACK = 1_000


class Timer(Protocol):
    """Whatever can run out of time, unless it is done before."""

    @property
    def done(self) -> bool: ...

    def expire(self, now: float) -> None: ...


@dataclass(slots=True)
class Wait:
    """A call that waits for the other tasks. `owner.time_out(wait, now)` answers it when its time
    is over.
    """

    call: Any
    task_id: int
    since: float
    owner: Any
    incarnation: int = 0
    done: bool = False

    def end(self) -> None:
        """Notes that the call has been answered, or dropped: its timer does nothing any more."""
        self.done = True

    def expire(self, now: float) -> None:
        """Ends the wait: its time is over."""
        self.owner.time_out(self, now)


class Timers:
    """Calls `expire` on each timer whose time has come and that is not done."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._sweep_at = _SLACK

    def add(self, when: float, timer: Timer) -> None:
        """Keeps `timer` until `when`; infinity is never."""
        if when == math.inf:
            return
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, timer))
        # Most waits end long before their time, so a heap that has grown is mostly waits that are
        # over. It is swept when it has doubled: a constant cost for each timer.
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _SLACK

    def next_due(self) -> float:
        """Returns when the next timer is due, infinity if none is."""
        while self._heap and self._heap[0][2].done:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def expire(self, now: float) -> None:
        """Expires all that is due."""
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            if not timer.done:
                timer.expire(now)
