"""Bytes that are taken while something holds them, of a bound that all who take share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ..memory.levels import UNLIMITED_BYTES
from .threads import LOOK_S, Latch

ASKED_BYTES = 1 << 20  # who takes so much asks what the host has left


class ByteBudget:
    """At most `total_bytes`, of which `spare_bytes` are only for `try_take`, and half of what
    `free_bytes` says that the host has left. Thread-safe.

    Ctrl-C leaves neither a lock held nor bytes taken: who takes is noted in one operation, and a
    bare lock is held by a `with` alone (see Latch).
    """

    def __init__(
        self,
        total_bytes: int,
        spare_bytes: int = 0,
        free_bytes: Callable[[], int] = lambda: UNLIMITED_BYTES,
    ) -> None:
        self._total_bytes = total_bytes
        self._spare_bytes = spare_bytes
        self._free_bytes = free_bytes
        self._taken: dict[object, int] = {}  # by who has taken them
        self._waiting: list[Latch] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, nbytes: int, most_bytes: int = 0) -> Iterator[int]:
        """Takes bytes, once they are free, and of what is free then `most_bytes` at most; yields
        how many. More than there are at all wait for all of them.
        """
        taker = object()
        limit = self._limit_bytes(nbytes)
        wanted = min(nbytes, limit)
        try:
            while (latch := self._take(taker, wanted, min(most_bytes, limit), limit)) is not None:
                latch.wait(LOOK_S)
            yield self._taken[taker]
        finally:
            self.give(taker)

    def _limit_bytes(self, nbytes: int) -> int:
        limit = self._total_bytes - self._spare_bytes
        if nbytes < ASKED_BYTES:
            return limit
        free = self._free_bytes() // 2
        with self._lock:
            return min(limit, max(ASKED_BYTES, sum(self._taken.values()) + free))

    def _take(self, taker: object, wanted: int, most: int, limit: int) -> Latch | None:
        """Takes bytes, or returns what is set once others have given some."""
        with self._lock:
            left = limit - sum(self._taken.values())
            if wanted <= left:
                self._taken[taker] = max(wanted, min(most, left))
                return None
            latch = Latch()
            self._waiting.append(latch)
            return latch

    def take(self, taker: object, nbytes: int) -> Latch | None:
        """Takes bytes for `taker`, if they are free; else returns what is set once others have
        given some. More than there are at all are all of them.
        """
        limit = self._total_bytes - self._spare_bytes
        return self._take(taker, min(nbytes, limit), 0, limit)

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits for bytes."""
        return bool(self._waiting)

    def try_take(self, taker: object, nbytes: int) -> bool:
        """Takes bytes, besides what `taker` has, if they are free; says whether they were."""
        with self._lock:
            if sum(self._taken.values()) + nbytes > self._total_bytes:
                return False
            self._taken[taker] = self._taken.get(taker, 0) + nbytes
            return True

    def give(self, taker: object) -> None:
        """Gives back what one has taken."""
        with self._lock:
            self._taken.pop(taker, None)
            waiting = self._waiting
            self._waiting = []
        for latch in waiting:
            latch.set()
