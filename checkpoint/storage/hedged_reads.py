"""Reads whose tries race: the bytes are those of the try that ends first (see hedges)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from .hedges import LOOK_S, Hedges
from .retries import is_throttled
from .threads import ByteBudget

READ_BYTES = 192 << 20  # of the buffers of all tries of one store
SPARE_BYTES = 32 << 20  # of these, which only second tries use

# Begins a try of a request, in the loop.
Begin: TypeAlias = Callable[[], Awaitable[Any]]


class HedgedReads:
    """Runs the tries of a store's reads, in one event loop."""

    def __init__(self, hedges: Hedges, room: ByteBudget) -> None:
        self.hedges = hedges
        self._room = room

    async def read(self, make: Begin, nbytes: int) -> Any:
        """Returns the bytes of the first try that has them.

        What a try raises counts only when no other is on its way. Tries that lost are cancelled.
        """
        hedges = self.hedges
        hedges.note_read()
        began_s = hedges.clock()
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
                    error = each.exception()
                    if error is None:
                        size = len(each.result())
                        hedges.note_end(size, hedges.clock() - asked_s)
                        if each in probes:
                            hedges.note_overtaking(size, asked_s)
                        return each.result()
                    hedges.note_answer()
                    if is_throttled(error):
                        hedges.note_throttled()
                    if not tries:
                        return each.result()
                asked_s = max(tries.values())
                if not hedges.is_slow(nbytes, asked_s):
                    continue
                is_probe = hedges.may_probe(nbytes, began_s)
                may_ask = hedges.may_hedge() or hedges.is_overtaken(nbytes, asked_s)
                if (is_probe or may_ask) and self._room.try_take(taker, nbytes):
                    hedges.note_hedge()
                    again = _begun(make)
                    tries[again] = hedges.clock()
                    if is_probe:
                        hedges.note_probe()
                        probes.add(again)
        finally:
            for each in tries:
                each.cancel()
            self._room.give(taker)


def _begun(make: Begin) -> asyncio.Task[Any]:
    return asyncio.create_task(awaited(make))


async def awaited(make: Begin) -> Any:
    """Returns what an awaitable, made here in the loop, returns."""
    return await make()
