"""Processes of a simulated job, what one save of them sends, and the world that they live in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.checkpoint.agreement.save_protocol import SaveKey, SaveReport, SaveResult
from holdfast.checkpoint.saving.stager import Cancellation

TIMEOUT_S = 60.0
RESULT_WAIT_S = 30.0
BOUND_S = TIMEOUT_S + RESULT_WAIT_S + 20.0  # the waits of a save, and its calls of the store


class Violation(AssertionError):
    """Says which invariant does not hold."""


@dataclass
class Process:
    """One process of the job."""

    rank: int
    alive: bool = True
    counter: int = 0
    saving: Any = None
    key: SaveKey | None = None
    began: float = 0.0
    effects: int = 0
    unclear: bool = False
    wait: str = ""  # what it blocks in; an answer to anything else comes too late
    own: SaveReport | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)

    def begin(self, now: float) -> int:
        """Starts the next save, and returns its number."""
        self.counter += 1
        self.began = now
        self.effects = 0
        self.unclear = False
        self.own = None
        self.cancellation = Cancellation()
        return self.counter


@dataclass
class Round:
    """The messages of one save."""

    reports: dict[int, SaveReport] = field(default_factory=dict)
    result: SaveResult | None = None
    told: bool = False


class World(Protocol):
    """What a lane of saves asks of the simulation."""

    now: float
    rng: random.Random
    processes: list[Process]

    def at(self, delay_s: float, act: Callable[[], None]) -> None: ...

    def chance(self, share: float) -> bool: ...

    def log(self, line: str) -> None: ...
