"""Reads an item together with the other processes of a restore: what several need, one of them
reads from the store, and passes it on.

All tell each other once, before the item is read, which blocks they need. A block is read when the
first asks for it, the first reader itself or another process, and a read waits for the store alone.
So processes can wait for each other in no circle. A process that is
asked for a block which it still reads says so. What is held for others is bounded: the block that
was read first is dropped first, and who asks for it later goes to the store. Every byte is checked
by who receives it; what a peer sent damaged is read from the store.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..format.item_report import FileReport
from ..format.record import ItemRecord
from ..memory.budget import USE, HeldBytes
from ..storage.base import Buffers, Readable
from ..storage.object import fill
from ..storage.threads import LOOK_S, ByteBudget, Latch, do_beside
from .reader import ItemReader, RangePlan, ReadRequest, cut
from .restore_peers import RestorePeers, StillReading
from .sharing import Blocks, SharedBlock, plan_sharing, runs_of

HEADERS_S = 5.0  # who has them later reads alone
PENDING_S = 0.5  # until who asks for a block hears that it is still being read


@dataclass(eq=False)
class _Held:
    """A block that is read, or is being read, for so many users; or what the store raised."""

    users: int
    ended: Latch = field(default_factory=Latch)
    data: memoryview | None = None
    error: Exception | None = None
    given_bytes: int = 0

    def bring(self, read: Callable[[int], memoryview], block: int) -> None:
        """Reads it; what the store raises is kept for all that wait for it."""
        try:
            self.data = read(block)
        except Exception as error:
            self.error = error

    def is_given(self, nbytes: int) -> bool:
        """Takes notice that a user has so many bytes; says whether all have all."""
        self.given_bytes += nbytes
        return self.data is not None and self.given_bytes >= self.users * self.data.nbytes


class HeldBlocks:
    """The blocks that this process reads for itself and others: each once. Thread-safe.

    `read` brings a block from the store, of `size_of` bytes. Those that are being read count in
    `limit_bytes` too: where there is no room, the oldest that is there is dropped for the next.
    """

    def __init__(
        self, read: Callable[[int], memoryview], size_of: Callable[[int], int], limit_bytes: int
    ) -> None:
        self._read = read
        self._size_of = size_of
        self._room = ByteBudget(limit_bytes)
        self._memory = HeldBytes(USE)
        self._held: collections.OrderedDict[int, _Held] = collections.OrderedDict()
        self._dropped: set[int] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Drops every block, and what is still being read when it has come."""
        with self._lock:
            self._is_closed = True
        while self._drop_oldest():
            pass

    def get(self, block: int, users: int) -> memoryview | None:
        """Returns a block, which is read if nobody has asked for it before; None where it was
        dropped. Raises what the store raises, and StillReading after PENDING_S.
        """
        with self._lock:
            if block in self._dropped:
                return None
            held = self._held.get(block)
            is_first = held is None
            if held is None:
                held = _Held(users)
                self._held[block] = held
        if is_first:
            do_beside(self._bring, block, held)
        if not held.ended.wait(PENDING_S):
            raise StillReading(f"block {block} is being read")
        if held.error is not None:
            raise held.error
        return held.data

    def _bring(self, block: int, held: _Held) -> None:
        nbytes = self._size_of(block)
        while (latch := self._room.take(held, nbytes)) is not None:
            if not self._drop_oldest():
                latch.wait(LOOK_S)
        with self._lock:
            self._memory.add(nbytes)
        try:
            if not self._is_closed:
                held.bring(self._read, block)
        finally:
            with self._lock:
                # `close` may have dropped it just now.
                goes = held.data is None or self._is_closed
                if goes and self._held.pop(block, None) is not None:
                    self._give(held, nbytes)
            held.ended.set()
            if self._room.is_waited_for:
                self._drop_oldest()

    def _drop_oldest(self) -> bool:
        """Drops the block that was asked for first of those that are there, if there is one."""
        with self._lock:
            for block, held in self._held.items():
                if held.data is not None:
                    self._drop(block)
                    return True
        return False

    def _give(self, held: _Held, nbytes: int) -> None:
        self._memory.drop(nbytes)
        self._room.give(held)

    def given(self, block: int, nbytes: int) -> None:
        """Takes notice that so many bytes of a block have reached one that needs them."""
        with self._lock:
            held = self._held.get(block)
            if held is not None and held.is_given(nbytes):
                self._drop(block)

    def _drop(self, block: int) -> None:
        held = self._held.pop(block)
        self._give(held, self._size_of(block))
        self._dropped.add(block)


class _Asking(threading.local):
    """Which peers have given this thread bytes; None as long as it may ask none. A header is no
    one's block: only `_read` asks peers.
    """

    givers: set[int] | None = None

    def begin(self) -> None:
        """Lets the thread ask peers."""
        self.givers = set()

    def end(self) -> None:
        """Has the thread ask peers no more."""
        self.givers = None


class SharedReader(ItemReader):
    """Reads one item of one step, as ItemReader does, together with the other processes.

    `foresee` is called once, before the first `fill`, and `finish` after the last one, by every
    process. One thread restores; the part server's threads call `block`.
    """

    def __init__(
        self, storage: Readable, step_dir: str, item: ItemRecord, peers: RestorePeers
    ) -> None:
        super().__init__(storage, step_dir, item)
        self._peers = peers
        self._blocks = Blocks([file.size for file in item.files], peers.count)
        self._numbers = {file.name: number for number, file in enumerate(item.files)}
        self._plan: dict[int, SharedBlock] = {}
        self._held = HeldBlocks(self._read_block, self._blocks.size, peers.hold_bytes)
        self._asking = _Asking()
        peers.serve(item.name, self)

    # --- the plan

    def foresee(self, reads: Iterable[ReadRequest]) -> None:
        """Tells all what this process will read, and hears what they will."""
        needed = self._needed_in_time(reads)
        told = self._peers.meet(runs_of(needed))
        plan = plan_sharing(told, self._blocks, self._peers.worth_bytes)
        # What this process needs little of, it reads itself.
        self._plan = {block: shared for block, shared in plan.items() if block in needed}

    def _needed_in_time(self, reads: Iterable[ReadRequest]) -> set[int]:
        """Returns the blocks that this process needs; none where the store does not bring the
        headers, which say so: this process reads alone then, and holds up nobody.
        """
        found: list[set[int] | Exception] = []
        ended = Latch()

        def find() -> None:
            try:
                found.append(self._needed(reads))
            except Exception as error:
                found.append(error)
            ended.set()

        do_beside(find)
        if not ended.wait(HEADERS_S):
            return set()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _needed(self, reads: Iterable[ReadRequest]) -> set[int]:
        """Returns the blocks that this process needs, but those of which it needs little."""
        nbytes = collections.Counter[int]()
        for file, start, stop in self.ranges_of(reads):
            for block in self._blocks.within(file, start, stop):
                _, first, last = self._blocks.place(block)
                nbytes[block] += min(last, stop) - max(first, start)
        # The reader of a block reads all of it.
        return {block for block, count in nbytes.items() if 2 * count >= self._blocks.size(block)}

    def _before_reading(self, plans: list[RangePlan]) -> None:
        plans.sort(key=self._turn)

    def _turn(self, plan: RangePlan) -> tuple[int, int, int]:
        """The key to sort by. This process reads for others first, as much as it can hold; then it
        asks one rank after the other, and each process begins with another rank.
        """
        blocks = self._blocks.within(plan.file, plan.start, plan.stop)
        shared = self._plan.get(blocks[0]) if blocks else None
        if shared is None:
            return len(self._plan), 0, blocks.start
        held = max(1, self._peers.hold_bytes // (2 * self._blocks.block_bytes))
        distance = (shared.readers[0] - self._peers.index) % self._peers.count
        return shared.turn // held, distance, blocks[0]

    def finish(self) -> None:
        """Serves the others until all have what they need. Every process calls it, once."""
        self._peers.finish()
        self._peers.serve(self._item.name, None)
        self.close()

    # --- for others

    def block(self, block: int, offset: int, size: int) -> memoryview | None:
        """Returns bytes of a block that others need too: see BlockSource."""
        if block >= self._blocks.count:
            return None
        shared = self._plan.get(block)
        users = self._peers.count if shared is None else shared.users
        data = self._held.get(block, users)
        if data is None:
            return None
        part = data[offset : offset + size]
        self._held.given(block, part.nbytes)
        return part

    def close(self) -> None:
        """Drops what is held for others: see BlockSource."""
        self._held.close()

    def _read_block(self, block: int) -> memoryview:
        number, start, stop = self._blocks.place(block)
        memory: Any = np.empty(stop - start, np.uint8)
        data = memoryview(memory)
        file = self._item.files[number]
        began_s = time.monotonic()
        got = self._from_store(file, start, [data])
        self._peers.trust.note_store_read(time.monotonic() - began_s)
        return data[:got]

    def _from_store(self, file: FileReport, offset: int, buffers: Buffers) -> int:
        got, _ = super()._try_read(file, offset, buffers)
        self._peers.note(store_bytes=got)
        return got

    # --- for this process

    def _read(self, plan: RangePlan) -> None:
        self._asking.begin()
        try:
            super()._read(plan)
        finally:
            self._asking.end()

    def _distrust(self, file: FileReport) -> bool:
        """Has this thread read from the store what a peer has sent damaged."""
        if not self._asking.givers:
            return False
        self._peers.note(peer_damaged=1)
        for rank in self._asking.givers:
            self._peers.trust.note_damage(rank)
        self._asking.end()
        return True

    def _try_read(self, file: FileReport, offset: int, buffers: Buffers) -> tuple[int, int | None]:
        stop = min(offset + sum(buffer.nbytes for buffer in buffers), file.size)
        touched = self._blocks.within(self._numbers[file.name], offset, stop)
        if self._asking.givers is None or not any(block in self._plan for block in touched):
            return self._from_store(file, offset, buffers), None
        got = 0
        for block in touched:
            _, first, last = self._blocks.place(block)
            begin = max(first, offset)
            end = min(last, stop)
            pieces = cut(buffers, begin - offset, end - offset)
            found = self._part_of(file, block, begin, begin - first, pieces)
            got += found
            if found < end - begin:
                break
        return got, None

    def _part_of(
        self, file: FileReport, block: int, at: int, offset: int, pieces: list[memoryview]
    ) -> int:
        """Fills the pieces with a block's bytes from `offset` on, which lie `at` in the file."""
        shared = self._plan.get(block)
        if shared is not None:
            for rank in shared.readers:
                if rank == self._peers.index:
                    got = self._from_own_read(block, shared, offset, pieces)
                else:
                    got = self._from_peer(rank, block, offset, pieces)
                if got is not None:
                    return got
        return self._from_store(file, at, pieces)

    def _from_own_read(
        self, block: int, shared: SharedBlock, offset: int, pieces: list[memoryview]
    ) -> int | None:
        """Fills the pieces from what this process reads for all; None where that was dropped, or
        takes so long that another one may have it sooner.
        """
        for _ in self._waits():
            with contextlib.suppress(StillReading):
                data = self._held.get(block, shared.users)
                if data is None:
                    return None
                got = fill(pieces, data[offset:])
                self._held.given(block, got)
                return got
        self._peers.note(own_left=1)
        return None

    def _from_peer(
        self, rank: int, block: int, offset: int, pieces: list[memoryview]
    ) -> int | None:
        """Fills the pieces from another process; None where it is slow, dead or dropped them."""
        trust = self._peers.trust
        givers = self._asking.givers
        assert givers is not None
        wanted = sum(piece.nbytes for piece in pieces)
        for _ in self._waits():
            if not trust.may_ask(rank):
                return None
            try:
                got = self._peers.read(rank, f"{self._item.name}/{block}", offset, pieces)
            except FileNotFoundError:
                self._peers.note(peer_dropped=1)
                return None
            except OSError as error:
                self._failed(rank, str(error))
                return None
            if got == wanted:
                trust.note_bytes(rank)
                givers.add(rank)
                self._peers.note(peer_bytes=wanted)
                return got
            if got is not None:
                self._failed(rank, f"it sent {got} bytes of {wanted}")
                return None
        self._failed(rank, "its read of the store takes too long")
        return None

    def _waits(self) -> Iterator[int]:
        """Counts how often one that still reads is asked. Each is a wait of PENDING_S, however long
        this process was stopped in it.
        """
        number = 0
        while number * PENDING_S < self._peers.trust.patience_s:
            yield number
            number += 1

    def _failed(self, rank: int, why: str) -> None:
        self._peers.note(peer_failed=1)
        self._peers.trust.note_failure(rank, why)


def shared_reader(
    storage: Readable, step_dir: str, item: ItemRecord, peers: RestorePeers | None
) -> SharedReader | None:
    """Returns the reader that shares an item with peers. None, alike on all processes, where there
    are none, or where it can spare the store too little.
    """
    if peers is None:
        return None
    spared = sum(file.size for file in item.files) * (peers.count - 1)
    return SharedReader(storage, step_dir, item, peers) if spared >= peers.worth_bytes else None
