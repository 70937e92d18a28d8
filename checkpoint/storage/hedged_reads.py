"""Reads whose tries race: the bytes are those of the try that ends first (see hedges)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from ..memory.levels import UNLIMITED_BYTES
from .hedges import LOOK_S, Hedges
from .retries import is_throttled

READ_BYTES = 192 << 20  # of the buffers of all tries of one store
SPARE_BYTES = 32 << 20  # of these, which only second tries use
ASKED_BYTES = 1 << 20  # a read of so much asks what the host has left


class Room:
    """Bytes that reads take while they hold a buffer: at most `total_bytes`, and half of what
    `free_bytes` says that the host has left. Thread-safe.
    """

    def __init__(
        self,
        total_bytes: int = READ_BYTES,
        spare_bytes: int = SPARE_BYTES,
        free_bytes: Callable[[], int] = lambda: UNLIMITED_BYTES,
    ) -> None:
        self._free_bytes = free_bytes
        self._total_bytes = total_bytes
        self._spare_bytes = spare_bytes
        self._taken_bytes = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Takes bytes for a first try, once they are free. One larger than all waits for all."""
        most = self._total_bytes - self._spare_bytes
        if nbytes >= ASKED_BYTES:
            most = min(most, max(ASKED_BYTES, self._taken_bytes + self._free_bytes() // 2))
        nbytes = min(nbytes, most)
        with self._changed:
            self._changed.wait_for(lambda: self._taken_bytes + nbytes <= most)
            self._taken_bytes += nbytes
        try:
            yield
        finally:
            self.give(nbytes)

    def try_take(self, nbytes: int) -> bool:
        """Takes bytes for a second try, if they are free; says whether they were."""
        with self._changed:
            if self._taken_bytes + nbytes > self._total_bytes:
                return False
            self._taken_bytes += nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Gives bytes back."""
        with self._changed:
            self._taken_bytes -= nbytes
            self._changed.notify_all()


class HedgedReads:
    """Runs the tries of a store's reads, in one event loop."""

    def __init__(self, hedges: Hedges, room: Room) -> None:
        self.hedges = hedges
        self._room = room

    async def read(self, make: Callable[[], Awaitable[Any]], nbytes: int) -> Any:
        """Returns the bytes of the first try that has them.

        What a try raises counts only when no other is on its way. Tries that lost are cancelled.
        """
        self.hedges.note_read()
        tries = {_begun(make): self.hedges.clock()}
        spare_bytes = 0
        try:
            while True:
                ended, _ = await asyncio.wait(
                    tries, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for each in ended:
                    asked_s = tries.pop(each)
                    if each.exception() is None:
                        self.hedges.note_end(len(each.result()), self.hedges.clock() - asked_s)
                        return each.result()
                    self._note_error(each.exception())
                    if not tries:
                        return each.result()
                if self._takes_spare(nbytes, max(tries.values())):
                    spare_bytes += nbytes
                    self.hedges.note_hedge()
                    tries[_begun(make)] = self.hedges.clock()
        finally:
            for each in tries:
                each.cancel()
            self._room.give(spare_bytes)

    def _note_error(self, error: BaseException | None) -> None:
        if error is not None and is_throttled(error):
            self.hedges.note_throttled()

    def _takes_spare(self, nbytes: int, asked_s: float) -> bool:
        """Says whether a read gets one more try, whose bytes are then taken."""
        if not self.hedges.is_slow(nbytes, asked_s) or not self.hedges.may_hedge():
            return False
        return self._room.try_take(nbytes)


def _begun(make: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
    return asyncio.create_task(_awaited(make))


async def _awaited(make: Callable[[], Awaitable[Any]]) -> Any:
    return await make()
