"""Decides which process reads which bytes from the store, and passes them on to which others.

The files of an item are divided into blocks of one size, numbered through all files. Each process
tells all, once, which blocks it needs. From what all have told, every process computes the same
plan: of each block that several need one of them is the first reader, and another one stands in for
it.

A peer answers with bytes, or that it still reads them. One that says nothing for SILENT_S has
failed. So has one that says for longer than this process's patience that it still reads: the store
may be as slow for all, so that is PATIENT_TIMES this process's own slowest read of late, and
PATIENCE_S at least. After FAILURES in a row a peer is asked no more, nor after it sent damaged
bytes DAMAGES times. Where no peer of the first MOST_UNREACHED can be reached, none is asked: a
firewall may lie between all hosts.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

import numpy as np

from ..format.grid import Ints

_log = logging.getLogger(__name__)
LEAST_BLOCK_BYTES = 1 << 20
MOST_BLOCK_BYTES = 16 << 20
BLOCKS_A_PROCESS = 8  # of each process's share, so that shares can be even
TOLD_BYTES = 4 << 20  # by all processes together: it goes to each of them
RUN_BYTES = 16  # of one run in a message, about
WORTH_BYTES = 64 << 20  # that "auto" spares the store at least
FAILURES = 2
DAMAGES = 2
MOST_UNREACHED = 3
SILENT_S = 2.0  # a host whose cores are busy answers late, and is not dead
PATIENCE_S = 5.0
PATIENT_TIMES = 4
KNOWN_READS = 16  # of this process's own: the last ones

Reading: TypeAlias = Literal["each", "once", "auto"]
Runs: TypeAlias = tuple[tuple[int, int], ...]  # of blocks: the first, and the one behind the last


class Blocks:
    """The numbers of the blocks of some files, by the files' sizes."""

    def __init__(self, sizes: Sequence[int], processes: int) -> None:
        wanted = sum(sizes) // (BLOCKS_A_PROCESS * processes)
        whole = 1 << max(0, wanted - 1).bit_length()
        self.block_bytes = min(max(whole, LEAST_BLOCK_BYTES), MOST_BLOCK_BYTES)
        self._sizes = sizes
        counts = [-(-size // self.block_bytes) for size in sizes]
        self._firsts = list(itertools.accumulate(counts, initial=0))

    def within(self, file: int, start: int, stop: int) -> range:
        """Returns the blocks that a stretch of a file touches."""
        first = self._firsts[file]
        return range(first + start // self.block_bytes, first + -(-stop // self.block_bytes))

    def place(self, block: int) -> tuple[int, int, int]:
        """Returns the file of a block, and where in the file it begins and ends."""
        file = bisect.bisect_right(self._firsts, block) - 1
        start = (block - self._firsts[file]) * self.block_bytes
        return file, start, min(start + self.block_bytes, self._sizes[file])

    @property
    def count(self) -> int:
        """How many there are."""
        return self._firsts[-1]

    def size(self, block: int) -> int:
        """Returns the bytes of a block."""
        _, start, stop = self.place(block)
        return stop - start


def runs_of(blocks: Iterable[int]) -> Runs:
    """Returns the runs of a set of blocks."""
    runs: list[tuple[int, int]] = []
    for block in sorted(set(blocks)):
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return tuple(runs)


@dataclass(frozen=True)
class Demand:
    """What one process tells all before an item is read: the blocks that it needs, and how it is
    reached. A process without an `address` reads for itself alone.
    """

    runs: Runs = ()
    address: str = ""
    secret: str = ""
    machine: str = ""

    def told(self, processes: int) -> Self:
        """Returns what all are told of it: no runs where these are too many."""
        is_short = RUN_BYTES * len(self.runs) <= max(1024, TOLD_BYTES // processes)
        return self if is_short else replace(self, runs=())


@dataclass(frozen=True)
class SharedBlock:
    """The ranks that read a block for those that need it: the first reader, and its stand-in.

    `users` is how many need it. It is the `turn`-th block that its first reader is to read.
    """

    readers: tuple[int, ...]
    users: int
    turn: int


def plan_sharing(
    demands: Sequence[Demand], blocks: Blocks, worth_bytes: int = 1
) -> dict[int, SharedBlock]:
    """Returns the readers of the blocks that several processes need.

    The least busy of those that need a block is its first reader. The plan is empty where it would
    spare the store less than `worth_bytes`.
    """
    busy_bytes = np.zeros(len(demands), np.int64)
    turns = collections.Counter[int]()
    plan: dict[int, SharedBlock] = {}
    spared = 0
    for number, group, users, servers in _shared_groups(demands):
        nbytes = sum(map(blocks.size, group))
        readers = _readers(servers, int(np.argmin(busy_bytes[servers])), number)
        reader = readers[0]
        busy_bytes[reader] += nbytes
        for block in group:
            plan[block] = SharedBlock(readers, users, turns[reader])
            turns[reader] += 1
        spared += nbytes * (users - 1)
    return plan if spared >= worth_bytes else {}


def _readers(servers: Ints, chosen: int, number: int) -> tuple[int, ...]:
    """Returns the chosen one of some ranks, and its stand-in: of the others each in turn."""
    other = chosen + 1 + number % max(1, len(servers) - 1)
    return tuple(dict.fromkeys((int(servers[chosen]), int(servers[other % len(servers)]))))


def _shared_groups(demands: Sequence[Demand]) -> Iterator[tuple[int, range, int, Ints]]:
    """Yields the groups of neighbours among the blocks that several need, each with its number in
    its stretch, how many need it, and the ranks of these that all others can reach.
    """
    can_serve = _servers(demands)
    for first, last, users in _segments(demands):
        servers = [rank for rank in users if rank in can_serve]
        if len(users) < 2 or not servers:
            continue
        ranks = np.array(servers)
        # Neighbours go to one reader, so that large items cost no step for each block.
        stride = max(1, (last - first) // (BLOCKS_A_PROCESS * len(servers)))
        for number, begin in enumerate(range(first, last, stride)):
            yield number, range(begin, min(begin + stride, last)), len(users), ranks


def _servers(demands: Sequence[Demand]) -> set[int]:
    """Returns the ranks that all others can reach."""
    one_machine = len({need.machine for need in demands}) == 1
    return {
        rank
        for rank, need in enumerate(demands)
        if need.address and (one_machine or not need.address.startswith(("127.", "[::1]")))
    }


def _segments(demands: Sequence[Demand]) -> Iterator[tuple[int, int, list[int]]]:
    """Yields the stretches of blocks that the same processes need, and these."""
    turning = collections.defaultdict[int, set[int]](set)  # who begins or ends to need, by where
    for rank, need in enumerate(demands):
        for cut in itertools.chain.from_iterable(need.runs):
            turning[cut].add(rank)
    users: set[int] = set()
    for first, last in itertools.pairwise(sorted(turning)):
        users ^= turning[first]
        yield first, last, sorted(users)


class PeerTrust:
    """Keeps what this process has seen of each rank, and of the store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store_reads_s = collections.deque[float](maxlen=KNOWN_READS)
        self._failures = collections.Counter[int]()  # in a row
        self._damages = collections.Counter[int]()
        self._reached: set[int] = set()
        self._dropped: set[int] = set()

    def may_ask(self, rank: int) -> bool:
        """Says whether a rank may be asked for a block."""
        with self._lock:
            dropped = len(self._dropped)
            if dropped >= MOST_UNREACHED and dropped > len(self._reached):
                return False
            return rank not in self._dropped

    @property
    def patience_s(self) -> float:
        """How long to wait for one that still reads. As long as this process has read nothing
        itself, nothing is known of the store.
        """
        with self._lock:
            slowest_s = max(self._store_reads_s, default=PATIENCE_S)
        return max(PATIENCE_S, PATIENT_TIMES * slowest_s)

    def note_store_read(self, took_s: float) -> None:
        """Takes the time of this process's own read of a block."""
        with self._lock:
            self._store_reads_s.append(took_s)

    def note_bytes(self, rank: int) -> None:
        """Takes notice of an answer with bytes."""
        with self._lock:
            self._reached.add(rank)
            self._failures[rank] = 0

    def note_failure(self, rank: int, why: str) -> None:
        """Takes notice that a rank gave no answer in time."""
        self._count(rank, self._failures, FAILURES, why)

    def note_damage(self, rank: int) -> None:
        """Takes notice of damaged bytes of a rank."""
        self._count(rank, self._damages, DAMAGES, "sent damaged bytes")

    def _count(self, rank: int, counts: collections.Counter[int], most: int, why: str) -> None:
        with self._lock:
            counts[rank] += 1
            if counts[rank] < most:
                return
            if rank not in self._dropped:
                _log.warning("this process asks rank %d for no more blocks: %s", rank, why)
            self._dropped.add(rank)
            self._reached.discard(rank)
