"""Calls that wait, and their deadlines in a heap that forgets those that are over."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any, Protocol

_SLACK = 1_000


class Owner(Protocol):
    """Knows how to answer a wait whose time is over."""

    def time_out(self, wait: Wait, now: float) -> None: ...


class Timed(Protocol):
    """Whatever can run out of time, unless it is over before."""

    done: bool

    def expire(self, now: float) -> None: ...


@dataclass(slots=True)
class Wait:
    """A call that waits for the others to come, to fail, or to go."""

    call: Any
    task_id: int
    since: float
    owner: Owner
    incarnation: int = 0
    done: bool = False

    def expire(self, now: float) -> None:
        """Ends the wait: its time is over."""
        self.owner.time_out(self, now)


class Timers:
    """Calls `expire` on each entry whose time has come and that is not done."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timed]] = []
        self._count = 0
        self._sweep_at = _SLACK

    def add(self, when: float, timed: Timed) -> None:
        """Remembers `timed` until `when`; infinity is never."""
        if when == math.inf:
            return
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, timed))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _SLACK

    def next_due(self) -> float:
        """Returns when the next entry is due, infinity if none is."""
        while self._heap and self._heap[0][2].done:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def expire(self, now: float) -> None:
        """Expires all that is due."""
        while self._heap and self._heap[0][0] <= now:
            timed = heapq.heappop(self._heap)[2]
            if not timed.done:
                timed.expire(now)
