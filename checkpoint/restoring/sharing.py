"""Decides which process reads which bytes from the store, and passes them on to which others.

The files of an item are divided into blocks of one size, numbered through all files. Each process
tells all which blocks it needs. From what all have told, every process computes the same plan: of
each block that several need one of them is the first reader, and another one stands in for it.

A peer answers with bytes, or that it still reads them. One that gives no answer in time has failed:
after FAILURES in a row it is asked no more. A peer that still reads a block is alive, and the store
may be as slow for others. So one that is silent or still reads is left before that time only within
the budget of hedged reads (storage/hedges.py), or when it takes PATIENT_TIMES as long as a slow
read. Where a process waits for nothing else, a read is slow after SLOWEST_PEER_S. A peer that sent
damaged bytes DAMAGES times is asked no more. Where no peer of the first MOST_UNREACHED can be
reached, none is asked: a firewall may lie between all hosts.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self, TypeAlias

import numpy as np

from ..storage.hedges import FEWEST_PEERS, SLOWEST_PEER_S, Hedges

LEAST_BLOCK_BYTES = 1 << 20
MOST_BLOCK_BYTES = 16 << 20
BLOCKS_A_PROCESS = 8  # of each process's share, so that shares can be even
TOLD_BYTES = 4 << 20  # by all processes together: it goes to each of them
MOST_TIMES = 8.0  # that a process is taken to be faster or slower than the middle one
WORTH_BYTES = 64 << 20  # that "auto" spares the store at least
FAILURES = 2
DAMAGES = 2
MOST_UNREACHED = 3
PATIENT_TIMES = 4
LEAST_ANSWER_S = 2.0  # a host whose cores are busy answers late, and is not dead
LEAST_BYTES_PER_S = 16 << 20  # of an answer, while nothing is known of answers

Runs: TypeAlias = tuple[tuple[int, int], ...]  # of blocks: the first, and the one behind the last


class Blocks:
    """The numbers of the blocks of some files, by the files' sizes."""

    def __init__(self, sizes: Sequence[int], processes: int) -> None:
        wanted = sum(sizes) // (BLOCKS_A_PROCESS * processes)
        whole = 1 << max(0, wanted - 1).bit_length()
        self.block_bytes = min(max(whole, LEAST_BLOCK_BYTES), MOST_BLOCK_BYTES)
        self._sizes = list(sizes)
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
    """What one process tells all before a wave: the blocks that it needs, and how it is reached.

    A process without an `address` reads for itself alone. `bytes_per_s` is how fast it has read
    from the store (0: not known yet). `is_done` says that it needs nothing more of this item.
    """

    runs: Runs = ()
    address: str = ""
    secret: str = ""
    machine: str = ""
    bytes_per_s: float = 0.0
    is_done: bool = False

    def to_text(self, processes: int) -> str:
        """Returns JSON by name. Runs that are too many to be told to all are left out."""
        text = json.dumps(asdict(self), separators=(",", ":"))
        if len(text) > max(1024, TOLD_BYTES // processes):
            return json.dumps(asdict(self) | {"runs": ()}, separators=(",", ":"))
        return text

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Reads what `to_text` wrote."""
        body = json.loads(text)
        return cls(**body | {"runs": tuple((first, last) for first, last in body["runs"])})


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

    The least busy of those that need a block, measured in its own speed, is its first reader. The
    plan is empty where it would spare the store less than `worth_bytes`.
    """
    can_serve = _servers(demands)
    speeds = _speeds(demands)
    busy = np.zeros(len(demands))
    turns = collections.Counter[int]()
    plan: dict[int, SharedBlock] = {}
    spared = 0
    for first, last, users in _segments(demands):
        servers = [rank for rank in users if rank in can_serve]
        if len(users) < 2 or not servers:
            continue
        ranks = np.array(servers)
        # Neighbours go to one reader, so that large items cost no step for each block.
        stride = max(1, (last - first) // (BLOCKS_A_PROCESS * len(servers)))
        for number, begin in enumerate(range(first, last, stride)):
            group = range(begin, min(begin + stride, last))
            nbytes = sum(map(blocks.size, group))
            ends = busy[ranks] + nbytes / speeds[ranks]
            chosen = int(np.argmin(ends))
            busy[ranks[chosen]] = ends[chosen]
            other = chosen + 1 + number % max(1, len(servers) - 1)
            reader = servers[chosen]
            readers = tuple(dict.fromkeys((reader, servers[other % len(servers)])))
            for block in group:
                plan[block] = SharedBlock(readers, len(users), turns[reader])
                turns[reader] += 1
            spared += nbytes * (len(users) - 1)
    return plan if spared >= worth_bytes else {}


def servers_in_turn(known: Sequence[Demand], block: int) -> list[int]:
    """Returns the ranks that can serve, of which each is the first one for another block."""
    servers = sorted(_servers(known))
    first = block % max(1, len(servers))
    return servers[first:] + servers[:first]


def plan_equally(known: Sequence[Demand], blocks: Iterable[int]) -> dict[int, SharedBlock]:
    """Returns the readers of blocks of which nobody knows who else needs them, because a process
    tells nothing: those that can be reached, in turn.

    `known` says how each is reached. So the plan is alike for all, and needs no word of the silent
    one.
    """
    servers = servers_in_turn(known, 0)
    if not servers:
        return {}
    plan = {}
    for block in blocks:
        turn, first = divmod(block, len(servers))
        readers = tuple(dict.fromkeys((servers[first], servers[(first + 1) % len(servers)])))
        plan[block] = SharedBlock(readers, len(known), turn)
    return plan


def _servers(demands: Sequence[Demand]) -> set[int]:
    """Returns the ranks that all others can reach."""
    one_machine = len({need.machine for need in demands}) == 1
    return {
        rank
        for rank, need in enumerate(demands)
        if need.address and (one_machine or not need.address.startswith(("127.", "[::1]")))
    }


def _speeds(demands: Sequence[Demand]) -> np.ndarray[Any, Any]:
    """Returns the speed of each process; where it is not known, the middle one of the others."""
    speeds = np.array([need.bytes_per_s for need in demands], float)
    known = speeds[speeds > 0]
    middle = float(np.median(known)) if len(known) else 1.0
    speeds[speeds <= 0] = middle
    # One measurement says little: it moves a share, and does not give all to one process.
    clipped: np.ndarray[Any, Any] = np.clip(speeds, middle / MOST_TIMES, middle * MOST_TIMES)
    return clipped


def _segments(demands: Sequence[Demand]) -> Iterator[tuple[int, int, list[int]]]:
    """Yields the stretches of blocks that the same processes need, and these."""
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for rank, need in enumerate(demands):
        for first, last in need.runs:
            begins.setdefault(first, []).append(rank)
            ends.setdefault(last, []).append(rank)
    users: set[int] = set()
    cuts = sorted({*begins, *ends})
    for first, last in itertools.pairwise(cuts):
        users.difference_update(ends.get(first, ()))
        users.update(begins.get(first, ()))
        yield first, last, sorted(users)


class PeerTrust:
    """Keeps what this process has seen of each rank. Thread-safe.

    `clock` returns seconds, and `standstills` how often this process has stood still.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        standstills: Callable[[], int] = lambda: 0,
    ) -> None:
        self.clock = clock
        self.standstills = standstills
        self._lock = threading.Lock()
        self._answers = Hedges(clock)
        self._answered = 0
        self._store = Hedges(clock)
        self._failures = collections.Counter[int]()  # in a row
        self._damages = collections.Counter[int]()
        self._reached: set[int] = set()
        self._left: set[int] = set()  # without a block since
        self._dropped: set[int] = set()

    def may_ask(self, rank: int) -> bool:
        """Says whether a rank may be asked for a block."""
        with self._lock:
            dropped = len(self._dropped)
            if dropped >= MOST_UNREACHED and dropped > len(self._reached):
                return False
            return rank not in self._dropped

    def answer_limit_s(self, nbytes: int) -> float:
        """Returns how long an answer of so many bytes may take."""
        with self._lock:
            if self._answered < FEWEST_PEERS:
                # Who lives says at once that it lives.
                return LEAST_ANSWER_S + nbytes / LEAST_BYTES_PER_S
            return max(LEAST_ANSWER_S, self._answers.limit_s(nbytes))

    def note_asked(self) -> None:
        """Counts a block that is asked of a peer."""
        with self._lock:
            self._store.note_read()

    def note_bytes(self, rank: int, nbytes: int, took_s: float) -> None:
        """Takes notice of an answer with bytes."""
        with self._lock:
            self._answers.note_end(nbytes, took_s)
            self._answered += 1
            self._reached.add(rank)
            self._left.discard(rank)
            self._failures[rank] = 0

    def note_store_read(self, nbytes: int, took_s: float) -> None:
        """Takes the time of this process's own read of the store."""
        with self._lock:
            self._store.note_end(nbytes, took_s)

    def leaves(self, rank: int, nbytes: int, asked_s: float, *, is_last: bool = False) -> bool:
        """Says whether to leave a rank that reads a block of so many bytes since `asked_s`: this
        process too, where it reads for itself. `is_last`: there is nothing else to wait for.
        """
        with self._lock:
            waited_s = self.clock() - asked_s
            limit_s = self._store.limit_s(nbytes)
            # A rank that was left and has brought nothing since stands still with all its blocks.
            is_first = rank not in self._left
            if is_last or not is_first:
                # Reads that all began at once have waited for each other. The store is free now.
                limit_s = min(limit_s, SLOWEST_PEER_S)
            if waited_s < limit_s:
                return False
            is_patient = waited_s < PATIENT_TIMES * limit_s
            if is_first and is_patient and not self._store.may_hedge():
                return False
            self._left.add(rank)
            if is_first:  # the budget is for ranks: else one that stands still would spend it all
                self._store.note_hedge()
            return True

    def note_came(self, rank: int) -> None:
        """Takes notice that a rank has brought a block."""
        with self._lock:
            self._left.discard(rank)

    def note_failure(self, rank: int) -> bool:
        """Takes notice that a rank gave no answer, or was left; says whether it is dropped now."""
        with self._lock:
            self._failures[rank] += 1
            return self._failures[rank] >= FAILURES and self._drop(rank)

    def note_damage(self, rank: int) -> bool:
        """Takes notice of damaged bytes of a rank; says whether it is dropped now."""
        with self._lock:
            self._damages[rank] += 1
            return self._damages[rank] >= DAMAGES and self._drop(rank)

    def _drop(self, rank: int) -> bool:
        is_new = rank not in self._dropped
        self._dropped.add(rank)
        self._reached.discard(rank)
        return is_new


class RestorePeers(Protocol):
    """The processes of a restore, as a reader that shares its bytes asks them."""

    @property
    def count(self) -> int: ...

    @property
    def index(self) -> int: ...

    @property
    def worth_bytes(self) -> int:
        """What sharing has to spare the store at least."""

    @property
    def hold_bytes(self) -> int:
        """How much this process may hold for the others."""

    @property
    def trust(self) -> PeerTrust:
        """What this process has seen of the others."""

    def join(self) -> list[Demand]:
        """Returns how each process is reached, by rank. Blocks until all have called it, once."""

    def meet(self, demand: Demand, wait_s: float | None = None) -> list[Demand] | None:
        """Returns the demands of all processes, by rank, who call it in the same order.

        None where some are not there within `wait_s`, or not yet where others met before. Raises,
        on every process, the error of one that has failed.
        """

    def read(
        self,
        rank: int,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        *,
        timeout_s: float,
        is_left: Callable[[], bool],
    ) -> int | None:
        """Reads what another process serves; None: that process is still reading it.

        Raises OSError, FileNotFoundError where the other has dropped it. While nothing comes,
        `is_left` is asked whether to wait no more.
        """

    def serve(self, item: str, source: BlockSource | None) -> None:
        """Serves the others what a source of an item has, from now on; None: no more."""

    def note(self, counts: Mapping[str, int]) -> None:
        """Takes notice of what a reader has counted at its end."""


class StillReading(Exception):
    """Says that a block is not there yet, and is being read."""


class BlockSource(Protocol):
    """What serves blocks of an item."""

    def block(self, block: int, offset: int, size: int) -> memoryview | None:
        """Returns bytes of a block, None where this process does not have it (any more).

        Raises StillReading after a short while.
        """

    def close(self) -> None:
        """Drops every block."""
