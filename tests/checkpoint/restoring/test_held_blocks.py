"""The blocks that a process of a shared restore holds for others: within its bound, those that are
being read too.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

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
