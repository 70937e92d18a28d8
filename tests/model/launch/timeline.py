"""Virtual time: what happens later, in order, and numbers drawn from a seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable


class Timeline:
    """Runs calls at their times. Nothing waits: the time goes to the next call."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self._lots = random.Random(f"latencies {seed}")
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def draw(self, least: float, most: float) -> float:
        """Returns a number between the two."""
        return self._lots.uniform(least, most)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Has `call` run after so many seconds."""
        at_s = self.now + max(0.0, delay_s)
        heapq.heappush(self._calls, (at_s, next(self._numbers), call))

    @property
    def is_empty(self) -> bool:
        """Whether nothing happens any more."""
        return not self._calls

    def goes_on_until(self, until_s: float) -> bool:
        """Goes to the next call and runs it, or to `until_s` where none comes before it.

        Returns whether a call was run.
        """
        if not self._calls or self._calls[0][0] > until_s:
            self.now = max(self.now, until_s)
            return False
        at_s, _, call = heapq.heappop(self._calls)
        self.now = at_s
        call()
        return True
