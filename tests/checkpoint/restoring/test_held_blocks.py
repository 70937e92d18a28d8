"""The blocks that a process of a shared restore holds for others: within its bound, those that are
being read too.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.checkpoint.memory.budget import USE
from holdfast.checkpoint.restoring.restore_peers import StillReading
from holdfast.checkpoint.restoring.shared_reader import HeldBlocks

BLOCK_BYTES = 100


class Store:
    """A store whose reads end when they are let go; it knows how many were going on at most."""

    def __init__(self) -> None:
        self.lets_go = threading.Event()
        self._lock = threading.Lock()
        self._reading = 0
        self.most = 0
        self.reads: list[int] = []

    def read(self, block: int) -> memoryview:
        with self._lock:
            self._reading += 1
            self.most = max(self.most, self._reading)
            self.reads.append(block)
        assert self.lets_go.wait(60)
        with self._lock:
            self._reading -= 1
        return memoryview(bytes(BLOCK_BYTES))


def ask(blocks: HeldBlocks, block: int) -> memoryview | None:
    while True:
        try:
            return blocks.get(block, users=9)
        except StillReading:
            pass


@pytest.mark.parametrize("limit_blocks", [0.5, 1, 3])
def test_blocks_that_are_being_read_count(limit_blocks: float) -> None:
    """Twenty are asked for at once: no more are read than may be held, and all come."""
    store = Store()
    blocks = HeldBlocks(store.read, lambda block: BLOCK_BYTES, int(limit_blocks * BLOCK_BYTES))
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(ask, blocks, block) for block in range(20)]
        with pytest.raises(StillReading):
            blocks.get(0, users=9)
        assert store.most == max(1, int(limit_blocks))
        store.lets_go.set()
        for each in asked:
            each.result(30)
    assert store.most == max(1, int(limit_blocks))
    assert sorted(store.reads) == list(range(20))
    blocks.close()


def test_a_block_that_has_room_stays_for_the_others() -> None:
    store = Store()
    store.lets_go.set()
    blocks = HeldBlocks(store.read, lambda block: BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert ask(blocks, 0) is not None
    assert ask(blocks, 1) is not None
    assert blocks.get(0, users=9) is not None
    assert ask(blocks, 2) is not None
    assert blocks.get(0, users=9) is None  # the oldest gave way, and its asker goes to the store
    assert store.reads == [0, 1, 2]


class LockBeforeAnEnd:
    """A lock of blocks that are closed just before it is taken for the third time."""

    def __init__(self, blocks: HeldBlocks) -> None:
        self._blocks = blocks
        self._real = blocks._lock
        self._taken = 0

    def __enter__(self) -> None:
        self._taken += 1
        if self._taken == 3:
            self._blocks._lock = self._real
            self._blocks.close()
        self._real.acquire()

    def __exit__(self, *raised: object) -> None:
        self._real.release()


def test_a_block_that_comes_as_the_restore_ends_is_given_back_once() -> None:
    """Otherwise this process would seem to hold less than it does."""
    blocks = HeldBlocks(lambda block: memoryview(b"xyz"), lambda block: 3, 100)
    held_bytes = USE.held_bytes
    blocks._lock = LockBeforeAnEnd(blocks)  # type: ignore[assignment]
    assert blocks.get(0, users=1) == b"xyz"
    assert USE.held_bytes == held_bytes
