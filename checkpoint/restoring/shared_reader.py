"""Reads an item together with the other processes of a restore: what several need, one of them
reads from the store, and passes it on.

A block is read when the first asks for it, the first reader itself or another process, and a read
waits for the store alone. So processes can wait for each other in no circle. A process that is
asked for a block which it still reads says so. What is held for others is bounded: the block that
was read first is dropped first, and who asks for it later goes to the store. Every byte is checked
by who receives it; what a peer sent damaged is read from the store.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import Corrupt
from ..format.item_report import FileReport
from ..format.record import ItemRecord
from ..memory.budget import USE, HeldBytes
from ..storage.base import Storage
from ..storage.threads import Latch, start_thread
from .reader import ItemReader, RangeRead
from .sharing import (
    Blocks,
    Demand,
    RestorePeers,
    SharedBlock,
    StillReading,
    plan_sharing,
    runs_of,
)

_log = logging.getLogger(__name__)
PENDING_S = 0.5  # until who asks for a block hears that it is still being read
MEASURED_BYTES = 8 << 20  # fewer tell nothing about a store's speed


class _Held:
    """A block that is read, or is being read, for so many users."""

    def __init__(self, users: int) -> None:
        self.ended = Latch()
        self.data: memoryview | None = None
        self.error: Exception | None = None
        self._users = users
        self._given_bytes = 0

    def bring(self, read: Callable[[], memoryview]) -> None:
        """Reads it; what the store raises is kept for all that wait for it."""
        try:
            self.data = read()
        except Exception as error:
            self.error = error

    def result(self) -> memoryview | None:
        """Returns what was read, once it has ended. Raises what the store raised."""
        if self.error is not None:
            raise self.error
        return self.data

    def given(self, nbytes: int) -> bool:
        """Takes notice that a user has so many bytes; says whether all have all."""
        assert self.data is not None
        self._given_bytes += nbytes
        return self._given_bytes >= self._users * self.data.nbytes


class HeldBlocks:
    """The blocks that this process reads for itself and others: each once. Thread-safe.

    `read` brings a block from the store.
    """

    def __init__(self, read: Callable[[int], memoryview], limit_bytes: int) -> None:
        self._read = read
        self._limit_bytes = limit_bytes
        # Its memory is counted as this process's until the last wave's blocks have died.
        self._memory = HeldBytes(USE)
        self._held: collections.OrderedDict[int, _Held] = collections.OrderedDict()
        self._dropped: set[int] = set()
        self._lock = threading.Lock()

    def get(self, block: int, users: int) -> memoryview | None:
        """Returns a block, which is read if nobody has asked for it before; None where it was
        dropped. Raises what the store raises, and StillReading after PENDING_S.
        """
        held, is_first = self._find(block, users)
        if held is None:
            return None
        if is_first:
            start_thread(self._bring, block, held)
        if not held.ended.wait(PENDING_S):
            raise StillReading(f"block {block} is being read")
        return held.result()

    def _find(self, block: int, users: int) -> tuple[_Held | None, bool]:
        """Returns a block, and whether the caller is to bring it; None where it was dropped."""
        with self._lock:
            held = self._held.get(block)
            if held is not None:
                return held, False
            if block in self._dropped:
                return None, False
            held = _Held(users)
            self._held[block] = held
            return held, True

    def _bring(self, block: int, held: _Held) -> None:
        try:
            held.bring(lambda: self._read(block))
        finally:
            with self._lock:
                if held.data is None:
                    self._held.pop(block, None)
                else:
                    self._memory.add(held.data.nbytes)
                    self._make_room(block)
            held.ended.set()

    def _make_room(self, newest: int) -> None:
        for block, held in list(self._held.items()):
            if self._memory.nbytes <= self._limit_bytes:
                return
            if block != newest and held.data is not None:
                self._drop(block)

    def given(self, block: int, nbytes: int) -> None:
        """Takes notice that so many bytes of a block have reached one that needs them."""
        with self._lock:
            held = self._held.get(block)
            if held is not None and held.data is not None and held.given(nbytes):
                self._drop(block)

    def _drop(self, block: int) -> None:
        held = self._held.pop(block)
        assert held.data is not None
        self._memory.drop(held.data.nbytes)
        self._dropped.add(block)


class _Asking(threading.local):
    """Whether this thread may ask peers now, and which have given it bytes."""

    def __init__(self) -> None:
        # A header is no one's block: only `_read` asks peers.
        self.is_allowed = False
        self.givers: set[int] = set()

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Lets the thread ask peers."""
        self.is_allowed = True
        self.givers = set()
        try:
            yield
        finally:
            self.is_allowed = False


class SharedReader(ItemReader):
    """Reads one item of one step, as ItemReader does, together with the other processes.

    Each `fill` is a wave: all processes tell what they need before. `finish` is called after the
    last one. One thread restores; the part server's threads call `block`.
    """

    def __init__(
        self, storage: Storage, step_dir: str, item: ItemRecord, peers: RestorePeers
    ) -> None:
        super().__init__(storage, step_dir, item)
        self._peers = peers
        self._name = item.name
        self._blocks = Blocks([file.size for file in item.files], peers.count)
        self._numbers = {file.name: number for number, file in enumerate(item.files)}
        self._wave = 0
        self._standstills = 0  # before this wave
        self._changed = threading.Condition()
        self._plan: dict[int, SharedBlock] = {}
        self._held = self._no_blocks()
        self._asking = _Asking()
        self._counts = collections.Counter[str]()
        self._store_s = 0.0  # of all threads
        peers.serve(self._name, self)

    def _no_blocks(self) -> HeldBlocks:
        return HeldBlocks(self._read_block, self._peers.hold_bytes)

    # --- waves

    def _before_reading(self, work: list[RangeRead]) -> None:
        needed = self._needed(work)
        self._meet(Demand(runs_of(needed), bytes_per_s=self._speed()), needed)
        work.sort(key=self._turn)

    def _needed(self, work: Sequence[RangeRead]) -> set[int]:
        """Returns the blocks that this process needs, but those of which it needs little."""
        nbytes = collections.Counter[int]()
        for each in work:
            for block in self._blocks.within(each.file, each.start, each.stop):
                _, first, last = self._blocks.place(block)
                nbytes[block] += min(last, each.stop) - max(first, each.start)
        # The reader of a block reads all of it.
        return {block for block, count in nbytes.items() if 2 * count >= self._blocks.size(block)}

    def _speed(self) -> float:
        """Returns how fast a read of the store brings bytes; 0.0 while too few were read."""
        with self._changed:
            if self._counts["store_bytes"] < MEASURED_BYTES:
                return 0.0  # a header is more latency than speed
            return self._counts["store_bytes"] / self._store_s

    def _turn(self, work: RangeRead) -> tuple[int, int, int]:
        """The key to sort by. This process reads for others first, as much as it can hold; then it
        asks one rank after the other, and each process begins with another rank.
        """
        blocks = self._blocks.within(work.file, work.start, work.stop)
        shared = self._plan.get(blocks[0]) if blocks else None
        if shared is None:
            return len(self._plan), 0, blocks.start
        held = max(1, self._peers.hold_bytes // (2 * self._blocks.block_bytes))
        distance = (shared.readers[0] - self._peers.index) % self._peers.count
        return shared.turn // held, distance, blocks[0]

    def _meet(self, demand: Demand, needed: Container[int] = ()) -> bool:
        """Begins the next wave with all processes; returns whether all are done."""
        told = self._peers.meet(demand)
        plan = plan_sharing(told, self._blocks, self._peers.worth_bytes)
        with self._changed:
            # What this process needs little of, it reads itself.
            self._plan = {block: shared for block, shared in plan.items() if block in needed}
            self._held = self._no_blocks()
            self._wave += 1
            self._standstills = self._peers.trust.standstills()
            self._changed.notify_all()
        return all(each.is_done for each in told)

    def finish(self) -> None:
        """Serves the others until all have what they need. Every process calls it, once."""
        while not self._meet(Demand(is_done=True)):
            pass
        self._peers.serve(self._name, None)
        self._peers.note(self.counts)

    @property
    def counts(self) -> dict[str, int]:
        """Bytes from the store and from peers, and what went wrong with these."""
        with self._changed:
            return dict(self._counts)

    def _count(self, **amounts: int) -> None:
        with self._changed:
            self._counts.update(amounts)

    # --- for others

    def block(self, wave: int, block: int, offset: int, size: int) -> memoryview | None:
        """Returns bytes of a block that others need too: see BlockSource."""
        with self._changed:
            # Another process may hear of a wave before this one.
            if not self._changed.wait_for(lambda: self._wave >= wave, PENDING_S):
                raise StillReading(f"wave {wave} has not begun here")
            if self._wave > wave:
                return None
            shared = self._plan.get(block)
            held = self._held
        if shared is None or self._peers.index not in shared.readers:
            return None
        data = held.get(block, shared.users)
        if data is None:
            return None
        part = data[offset : offset + size]
        held.given(block, part.nbytes)
        return part

    def _read_block(self, block: int) -> memoryview:
        number, start, stop = self._blocks.place(block)
        memory: Any = np.empty(stop - start, np.uint8)
        data = memoryview(memory)
        file = self._item.files[number]
        return data[: self._from_store(file, start, [data])]

    def _from_store(self, file: FileReport, offset: int, buffers: Sequence[memoryview]) -> int:
        clock = self._peers.trust.clock
        began_s = clock()
        got = super()._try_read(file, offset, buffers)
        took_s = clock() - began_s
        self._peers.trust.note_store_read(got, took_s)
        with self._changed:
            self._store_s += took_s
            self._counts["store_bytes"] += got
        return got

    # --- for this process

    def _read(self, work: RangeRead) -> None:
        try:
            with self._asking.allowed():
                work.read()
        except Corrupt as error:
            givers = self._asking.givers
            if not givers:
                raise
            _log.warning("what another process has passed on is read from the store: %s", error)
            work.read()
            self._count(peer_damaged=1)  # by a peer: the store has it whole
            for rank in givers:
                self._note_dropped(rank, self._peers.trust.note_damage(rank), "sent damaged bytes")

    def _try_read(self, file: FileReport, offset: int, buffers: Sequence[memoryview]) -> int:
        wanted = sum(buffer.nbytes for buffer in buffers)
        stop = min(offset + wanted, file.size)
        touched = self._blocks.within(self._numbers[file.name], offset, stop)
        if not self._asking.is_allowed or not any(block in self._plan for block in touched):
            return self._from_store(file, offset, buffers)
        got = 0
        for block in touched:
            _, first, last = self._blocks.place(block)
            begin = max(first, offset)
            end = min(last, stop)
            pieces = _cut(buffers, begin - offset, end - offset)
            found = self._part_of(file, block, begin, begin - first, pieces)
            got += found
            if found < end - begin:
                break
        return got

    def _part_of(
        self, file: FileReport, block: int, at: int, offset: int, pieces: list[memoryview]
    ) -> int:
        """Fills the pieces with a block's bytes from `offset` on, which lie `at` in the file."""
        shared = self._plan.get(block)
        for rank in () if shared is None else self._in_turn(shared):
            assert shared is not None
            if rank == self._peers.index:
                got = self._from_own_read(block, shared, offset, pieces)
            else:
                got = self._from_peer(rank, block, offset, pieces)
            if got is not None:
                return got
        return self._from_store(file, at, pieces)

    def _in_turn(self, shared: SharedBlock) -> Sequence[int]:
        """Returns the readers of a block in the order in which they are asked."""
        if self._peers.trust.standstills() == self._standstills:
            return shared.readers
        # What this process was to read, the others have had from who stands in.
        return sorted(shared.readers, key=lambda rank: rank == self._peers.index)

    def _from_own_read(
        self, block: int, shared: SharedBlock, offset: int, pieces: list[memoryview]
    ) -> int | None:
        """Fills the pieces from what this process reads for all; None where that was dropped, or
        takes so long that another one may have it sooner.
        """
        trust = self._peers.trust
        trust.note_asked()
        began_s = trust.clock()
        while True:
            try:
                data = self._held.get(block, shared.users)
                break
            except StillReading:
                if trust.leaves(self._peers.index, self._blocks.size(block), began_s):
                    self._count(own_left=1)
                    return None
        if data is None:
            return None
        trust.note_came(self._peers.index)
        got = _copy(data[offset:], pieces)
        self._held.given(block, got)
        return got

    def _from_peer(
        self, rank: int, block: int, offset: int, pieces: list[memoryview]
    ) -> int | None:
        """Fills the pieces from another process; None where it is slow, dead or dropped them."""
        trust = self._peers.trust
        wanted = sum(piece.nbytes for piece in pieces)
        name = f"{self._name}/{self._wave}/{block}"
        trust.note_asked()
        began_s = trust.clock()
        while trust.may_ask(rank):
            asked_s = trust.clock()
            standstills = trust.standstills()
            try:
                got = self._peers.read(rank, name, offset, pieces, trust.answer_limit_s(wanted))
            except FileNotFoundError:
                self._count(peer_dropped=1)
                return None
            except OSError as error:
                if trust.standstills() != standstills:
                    continue  # this process was away, and may not have heard the answer
                self._failed(rank, str(error))
                return None
            if got == wanted:
                trust.note_bytes(rank, wanted, trust.clock() - asked_s)
                self._asking.givers.add(rank)
                self._count(peer_bytes=wanted)
                return got
            if got is not None:
                self._failed(rank, f"it sent {got} bytes of {wanted}")
                return None
            if trust.leaves(rank, self._blocks.size(block), began_s):
                self._failed(rank, "its read of the store takes too long")
                return None
        return None

    def _failed(self, rank: int, why: str) -> None:
        self._count(peer_failed=1)
        self._note_dropped(rank, self._peers.trust.note_failure(rank), why)

    def _note_dropped(self, rank: int, is_dropped: bool, why: str) -> None:
        if is_dropped:
            _log.warning("this process asks rank %d for no more blocks: %s", rank, why)


def shared_reader(
    storage: Storage, step_dir: str, item: ItemRecord, peers: RestorePeers | None
) -> SharedReader | None:
    """Returns the reader that shares an item with peers. None, alike on all processes, where there
    are none, or where it can spare the store too little.
    """
    if peers is None:
        return None
    spared = sum(file.size for file in item.files) * (peers.count - 1)
    return SharedReader(storage, step_dir, item, peers) if spared >= peers.worth_bytes else None


def _cut(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Returns the pieces of buffers, as if they were one, from `start` to `stop`."""
    pieces = []
    at = 0
    for buffer in buffers:
        raw = buffer.cast("B") if buffer.nbytes else buffer
        piece = raw[max(0, start - at) : max(0, stop - at)]
        if piece.nbytes:
            pieces.append(piece)
        at += raw.nbytes
    return pieces


def _copy(data: memoryview, pieces: Sequence[memoryview]) -> int:
    """Fills the pieces from data; returns how many bytes there were."""
    at = 0
    for piece in pieces:
        found = data[at : at + piece.nbytes]
        piece[: found.nbytes] = found
        at += found.nbytes
    return at
