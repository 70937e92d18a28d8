"""Large answers to gRPC's clients go in turns."""

from __future__ import annotations

import asyncio

from holdfast.coordination.server.grpc_calls import LARGE_BYTES, LENT_S, Turn, Turns


class Clock:
    """A clock that a test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def _settled(*tasks: asyncio.Task[Turn]) -> list[bool]:
    """Lets all run that can; returns which have their turn."""
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


def test_what_fits_goes_and_the_rest_waits() -> None:
    """Two fit; a third waits for the first to end, one that goes away waits no longer."""

    async def check() -> None:
        turns = Turns(2 * LARGE_BYTES, Clock())
        tasks = [asyncio.create_task(turns.take(LARGE_BYTES)) for _ in range(4)]
        assert await _settled(*tasks) == [True, True, False, False]
        tasks[2].cancel()
        turns.give_back(tasks[0].result())
        assert await _settled(*tasks) == [True, True, True, True]
        assert tasks[2].cancelled() and turns.under_way_bytes == 2 * LARGE_BYTES
        turns.give_back(tasks[0].result())  # which is over
        assert turns.under_way_bytes == 2 * LARGE_BYTES

    asyncio.run(check())


def test_one_that_does_not_read_gives_its_turn_up() -> None:
    """After LENT_S, and not before; what it gives back later is counted once."""

    async def check() -> None:
        clock = Clock()
        turns = Turns(LARGE_BYTES, clock)
        stopped = await turns.take(LARGE_BYTES)
        other = asyncio.create_task(turns.take(LARGE_BYTES))
        clock.now = LENT_S - 0.1
        turns.tick()
        assert await _settled(other) == [False]
        clock.now = LENT_S
        turns.tick()
        assert await _settled(other) == [True]
        turns.give_back(stopped)
        assert turns.under_way_bytes == LARGE_BYTES
        turns.give_back(other.result())
        assert turns.under_way_bytes == 0

    asyncio.run(check())


def test_an_answer_larger_than_all_turns_goes_alone() -> None:
    """It waits until nothing large is under way."""

    async def check() -> None:
        turns = Turns(2 * LARGE_BYTES, Clock())
        first = await turns.take(LARGE_BYTES)
        second = asyncio.create_task(turns.take(9 * LARGE_BYTES))
        assert await _settled(second) == [False]
        turns.give_back(first)
        assert await _settled(second) == [True]

    asyncio.run(check())
