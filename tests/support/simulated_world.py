"""Virtual time, one random generator, a network that misbehaves, and a trace of what happened: what
a simulation takes place in.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Faults:
    """How badly the world behaves. Rates of messages are probabilities; crashes and pauses are
    expected counts in one run.
    """

    delay_s: float = 0.05
    loss: float = 0.02
    duplication: float = 0.03
    breaks: float = 2.0
    client_crashes: float = 1.0
    client_pauses: float = 0.5
    service_crashes: float = 1.0


class Violation(AssertionError):
    """Says that an invariant does not hold, with the seed and the last events."""


class World:
    """One heap of events in virtual time. The same seed gives the same run, to the last event."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.seed = seed
        self.faults = faults
        self.random = random.Random(seed)
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.trace: list[str] = []
        self.happened: Counter[str] = Counter()
        self.hash = hashlib.sha256()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Runs `action` after a delay."""
        self.at_time(self.now + delay_s, action)

    def at_time(self, when: float, action: Callable[[], None]) -> None:
        """Runs `action` at a time."""
        heapq.heappush(self._events, (when, next(self._order), action))

    def step(self) -> bool:
        """Lets the next event happen; False where there is none."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True

    def note(self, what: str, about: object = "") -> None:
        """Adds a line to the trace, and to its hash."""
        self.happened[what] += 1
        line = f"{self.now:.6f} {what} {about}"
        self.hash.update(line.encode())
        self.trace.append(line)
        if len(self.trace) > 400:
            del self.trace[:200]

    def fail(self, what: str) -> NoReturn:
        """Raises a Violation."""
        raise Violation(f"seed {self.seed}: {what}\n" + "\n".join(self.trace[-40:]))

    def delay_s(self) -> float:
        """Draws how long a message takes."""
        return self.random.expovariate(1 / self.faults.delay_s)

    def send(self, deliver: Callable[[], None], *, twice: bool) -> None:
        """Delivers a message once, never, or (where it may) twice; each after a delay of its
        own.
        """
        if self.random.random() < self.faults.loss:
            return
        self.at(self.delay_s(), deliver)
        if twice and self.random.random() < self.faults.duplication:
            self.at(self.delay_s() * 3, deliver)
