"""Reads whose tries race: the bytes are those of the try that ends first (see hedges)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from .hedges import LOOK_S, Hedges
from .retries import is_throttled
from .threads import ByteBudget

READ_BYTES = 192 << 20  # of the buffers of all tries of one store
SPARE_BYTES = 32 << 20  # of these, which only second tries use


class HedgedReads:
    """Runs the tries of a store's reads, in one event loop."""

    def __init__(self, hedges: Hedges, room: ByteBudget) -> None:
        self.hedges = hedges
        self._room = room

    async def read(self, make: Callable[[], Awaitable[Any]], nbytes: int) -> Any:
        """Returns the bytes of the first try that has them.

        What a try raises counts only when no other is on its way. Tries that lost are cancelled.
        """
        self.hedges.note_read()
        began_s = self.hedges.clock()
        tries = {_begun(make): began_s}
        probes = set[asyncio.Task[Any]]()
        taker = object()
        try:
            while True:
                ended, _ = await asyncio.wait(
                    tries, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for each in ended:
                    asked_s = tries.pop(each)
                    if each.exception() is None:
                        size = len(each.result())
                        self.hedges.note_end(size, self.hedges.clock() - asked_s)
                        if each in probes:
                            self.hedges.note_overtaking(size, asked_s)
                        return each.result()
                    self._note_error(each.exception())
                    if not tries:
                        return each.result()
                asked_s = max(tries.values())
                if not self.hedges.is_slow(nbytes, asked_s):
                    continue
                is_probe = self.hedges.may_probe(nbytes, began_s)
                may_ask = self.hedges.may_hedge() or self.hedges.is_overtaken(nbytes, asked_s)
                if (is_probe or may_ask) and self._room.try_take(taker, nbytes):
                    self.hedges.note_hedge()
                    again = _begun(make)
                    tries[again] = self.hedges.clock()
                    if is_probe:
                        self.hedges.note_probe()
                        probes.add(again)
        finally:
            for each in tries:
                each.cancel()
            self._room.give(taker)

    def _note_error(self, error: BaseException | None) -> None:
        self.hedges.note_answer()
        if error is not None and is_throttled(error):
            self.hedges.note_throttled()


def _begun(make: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
    return asyncio.create_task(awaited(make))


async def awaited(make: Callable[[], Awaitable[Any]]) -> Any:
    """Returns what an awaitable, made here in the loop, returns."""
    return await make()
