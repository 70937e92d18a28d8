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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from crc32c import crc32c

from ..errors import Corrupt
from ..format.item_report import FileReport
from ..format.record import ItemRecord
from ..memory.budget import USE, HeldBytes
from ..storage.base import Storage
from ..storage.threads import LOOK_S, ByteBudget, Latch, do_beside
from .reader import Allocate, ItemReader, RangeRead, ReadRequest
from .sharing import (
    Blocks,
    Demand,
    RestorePeers,
    SharedBlock,
    StillReading,
    plan_equally,
    plan_sharing,
    runs_of,
    servers_in_turn,
)

_log = logging.getLogger(__name__)
MEETING_S = 1.0  # for who comes late to a wave
PENDING_S = 0.5  # until who asks for a block hears that it is still being read
SILENT_S = 2 * PENDING_S  # until who asks may take it that nothing will be heard
MOST_ASKED = 4  # for a header at a time
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
            for block, held in list(self._held.items()):
                if held.data is not None:
                    self._drop(block)

    def get(self, block: int, users: int) -> memoryview | None:
        """Returns a block, which is read if nobody has asked for it before; None where it was
        dropped. Raises what the store raises, and StillReading after PENDING_S.
        """
        held, is_first = self._find(block, users)
        if held is None:
            return None
        if is_first:
            do_beside(self._bring, block, held)
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
        nbytes = self._size_of(block)
        while (latch := self._room.take(held, nbytes)) is not None:
            if not self._drop_oldest():
                latch.wait(LOOK_S)
        with self._lock:
            self._memory.add(nbytes)
        try:
            if not self._is_closed:
                held.bring(lambda: self._read(block))
        finally:
            with self._lock:
                if held.data is None or self._is_closed:
                    self._held.pop(block, None)
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
            if held is not None and held.data is not None and held.given(nbytes):
                self._drop(block)

    def _drop(self, block: int) -> None:
        held = self._held.pop(block)
        self._give(held, self._size_of(block))
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


class _Waits:
    """For which ranks the reads of a wave wait. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._ranks = collections.Counter[int]()

    def begin(self, reads: int) -> None:
        """Begins a wave of so many reads."""
        with self._lock:
            self._open = reads

    def note_end(self) -> None:
        """Takes notice that a read has ended."""
        with self._lock:
            self._open -= 1

    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """Has this thread's read wait for a rank."""
        with self._lock:
            self._ranks[rank] += 1
        try:
            yield
        finally:
            with self._lock:
                self._ranks[rank] -= 1

    def are_all_on(self, rank: int) -> bool:
        """Says whether every read that has not ended waits for a rank."""
        with self._lock:
            return self._ranks[rank] >= self._open


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
        self._known: list[Demand] = []
        self._is_worth = True  # as far as all demands have come
        self._standstills = 0  # before this wave
        self._lock = threading.Lock()
        self._plan: dict[int, SharedBlock] = {}
        self._held = HeldBlocks(self._read_block, self._blocks.size, peers.hold_bytes)
        self._asking = _Asking()
        self._waits = _Waits()
        self._counts = collections.Counter[str]()
        self._store_s = 0.0  # of all threads
        peers.serve(self._name, self)

    # --- waves

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader."""
        self._known = self._peers.join()  # before headers, which a peer may have
        super().fill(reads, allocate)

    def _before_reading(self, work: list[RangeRead]) -> None:
        needed = self._needed(work)
        plan = self._plan_for(needed)
        with self._lock:
            # What this process needs little of, it reads itself.
            self._plan = {block: shared for block, shared in plan.items() if block in needed}
        self._standstills = self._peers.trust.standstills()
        self._waits.begin(len(work))
        work.sort(key=self._turn)

    def _plan_for(self, needed: set[int]) -> dict[int, SharedBlock]:
        """Returns the plan of the next wave, in which this process needs some blocks."""
        demand = Demand(runs_of(needed), bytes_per_s=self._speed())
        told = self._peers.meet(demand, MEETING_S)
        if told is not None:
            plan = plan_sharing(told, self._blocks, self._peers.worth_bytes)
            self._is_worth = bool(plan)
            return plan
        self._count(meetings_left=1)
        return plan_equally(self._known, needed) if self._is_worth else {}

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
        with self._lock:
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

    def finish(self) -> None:
        """Serves the others until all have what they need. Every process calls it, once."""
        self._known = self._peers.join()
        are_done = False
        while not are_done:
            told = self._peers.meet(Demand(is_done=True))
            assert told is not None
            are_done = all(each.is_done for each in told)
        self._peers.serve(self._name, None)
        self.close()
        self._peers.note(self.counts)

    @property
    def counts(self) -> dict[str, int]:
        """Bytes from the store and from peers, and what went wrong with these."""
        with self._lock:
            return dict(self._counts)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)

    # --- for others

    def block(self, block: int, offset: int, size: int) -> memoryview | None:
        """Returns bytes of a block that others need too: see BlockSource."""
        if block >= self._blocks.count:
            return None
        with self._lock:
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
        return data[: self._from_store(file, start, [data])]

    def _from_store(self, file: FileReport, offset: int, buffers: Sequence[memoryview]) -> int:
        clock = self._peers.trust.clock
        began_s = clock()
        got = super()._try_read(file, offset, buffers)
        took_s = clock() - began_s
        self._peers.trust.note_store_read(got, took_s)
        with self._lock:
            self._store_s += took_s
            self._counts["store_bytes"] += got
        return got

    # --- for this process

    def read_checked(self, file: FileReport, size: int) -> bytes:
        """Returns a header: from another process, where the store does not bring it."""
        own = _Held(users=1)
        do_beside(self._bring_header, own, file, size)
        trust = self._peers.trust
        began_s = trust.clock()
        while not own.ended.wait(PENDING_S):
            if trust.leaves(self._peers.index, size, began_s):
                found = self._header_of_peers(file, size)
                if found is not None:
                    return found
        data = own.result()
        assert data is not None
        return bytes(data)

    def _bring_header(self, own: _Held, file: FileReport, size: int) -> None:
        own.bring(lambda: memoryview(ItemReader.read_checked(self, file, size)))
        own.ended.set()

    def _header_of_peers(self, file: FileReport, size: int) -> bytes | None:
        """Returns a header as other processes have it; None where they do not."""
        data = memoryview(bytearray(size))
        with self._asking.allowed():
            for block in self._blocks.within(self._numbers[file.name], 0, size):
                _, start, stop = self._blocks.place(block)
                if not self._from_any_peer(block, data[start:stop]):
                    return None
        if crc32c(data) == file.crc:
            return bytes(data)
        self._note_damaged()
        return None

    def _from_any_peer(self, block: int, piece: memoryview) -> bool:
        """Fills a piece with the first bytes of a block that any other process has."""
        ranks = servers_in_turn(self._known, block)
        others = [rank for rank in ranks if rank != self._peers.index]
        asked = list(filter(self._peers.trust.may_ask, others))[:MOST_ASKED]
        return any(self._from_peer(rank, block, 0, [piece]) is not None for rank in asked)

    def _read(self, work: RangeRead) -> None:
        try:
            self._read_shared(work)
        finally:
            self._waits.note_end()

    def _read_shared(self, work: RangeRead) -> None:
        try:
            with self._asking.allowed():
                work.read()
        except Corrupt as error:
            if not self._asking.givers:
                raise
            _log.warning("what another process has passed on is read from the store: %s", error)
            work.read()
            self._note_damaged()  # by a peer: the store has it whole

    def _leaves(self, rank: int, block: int, began_s: float) -> bool:
        """Says whether to wait for a rank's block no more."""
        is_last = self._waits.are_all_on(rank)
        nbytes = self._blocks.size(block)
        return self._peers.trust.leaves(rank, nbytes, began_s, is_last=is_last)

    def _leaves_silent(self, rank: int, block: int, began_s: float, asked_s: float) -> bool:
        """Says whether to wait no more for a rank that was asked at `asked_s`, and is silent."""
        silent_s = self._peers.trust.clock() - asked_s
        return silent_s >= SILENT_S and self._leaves(rank, block, began_s)

    def _note_damaged(self) -> None:
        """Takes notice that those who gave this thread bytes gave it damaged ones."""
        self._count(peer_damaged=1)
        for rank in self._asking.givers:
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
            with self._waits.on(rank):
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
                if self._leaves(self._peers.index, block, began_s):
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
        name = f"{self._name}/{block}"
        trust.note_asked()
        began_s = trust.clock()
        while trust.may_ask(rank):
            asked_s = trust.clock()
            standstills = trust.standstills()
            try:
                got = self._peers.read(
                    rank,
                    name,
                    offset,
                    pieces,
                    timeout_s=trust.answer_limit_s(wanted),
                    is_left=partial(self._leaves_silent, rank, block, began_s, asked_s),
                )
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
            if self._leaves(rank, block, began_s):
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
