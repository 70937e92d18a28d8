"""What this process may take of the host's memory: its part of what the processes of the job that
share a bound have left.

Each process asks anew before it takes more, and takes at most its part of what is free then. So the
parts of all add up to no more than was free, in whatever order they ask.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.coordination.mounts import boot_id

from .host import cgroup_numbers, look_at_memory
from .levels import UNLIMITED_BYTES, MemoryLevel
from .need import SeenLevel
from .pool import POOL

# Of what is free an eighth stays so: for the program's own next step, and for Python's objects.
SPARE_SHARE = 8
UNASKED_BYTES = 16 << 20


@dataclass(frozen=True)
class Sharers:
    """How many processes of the job share a bound, this one counted.

    `by_cgroup` has the cgroups by their folders, of those that are known. `is_whole_job`: all of
    the job are known to share every bound, so that each sees what the others see.
    """

    on_machine: int = 1
    by_cgroup: Mapping[str, int] = field(default_factory=dict)
    is_whole_job: bool = False

    def of(self, level: MemoryLevel) -> int:
        """Returns how many share a level."""
        return self.by_cgroup.get(level.folder, self.on_machine)


ALONE = Sharers()


# What this process has found out about itself.
_known = {"sharers": ALONE}


def current_sharers() -> Sharers:
    """Returns with whom this process shares its memory, as it has last found out."""
    return _known["sharers"]


def note_sharers(sharers: Sharers) -> None:
    """Notes with whom this process shares its memory."""
    _known["sharers"] = sharers


@dataclass(frozen=True)
class FreeMemory:
    """What a process may take now (`nbytes`), and the level that says so (None: nothing does)."""

    nbytes: int
    level: MemoryLevel | None = None


def divide(levels: Iterable[MemoryLevel], sharers: Sharers) -> FreeMemory:
    """Returns the smallest of a process's parts of what is free at each level. Pure."""
    parts = [
        FreeMemory((level.free_bytes - level.free_bytes // SPARE_SHARE) // sharers.of(level), level)
        for level in levels
    ]
    return min(parts, key=lambda part: part.nbytes, default=FreeMemory(UNLIMITED_BYTES))


class MemoryUse:
    """Counts the bytes that this process holds for saves and restores: `held_bytes` now, and
    `peak_bytes` at a time at most. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage may give within any of its calls
        self.held_bytes = 0
        self.peak_bytes = 0

    def count(self, nbytes: int) -> None:
        """Counts bytes that are held from now on; less than none are held no more."""
        with self._lock:
            self.held_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    @contextlib.contextmanager
    def account(self) -> Iterator[HeldBytes]:
        """Yields the account of one of its users, which holds nothing when it ends."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            held.drop(held.nbytes)


class HeldBytes:
    """What one user of memory holds, until it drops it or dies. For one thread."""

    def __init__(self, use: MemoryUse) -> None:
        self._use = use
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        """Counts bytes that it holds from now on."""
        self.nbytes += nbytes
        self._use.count(nbytes)

    def drop(self, nbytes: int) -> None:
        """Counts bytes that it holds no more."""
        self.add(-nbytes)

    def __del__(self) -> None:
        # A save that was interrupted leaves a snapshot that nobody releases.
        self.drop(self.nbytes)


USE = MemoryUse()
"""What all saves and restores of this process hold together."""


@dataclass(frozen=True)
class MemoryBudget:
    """What this process may take, asked anew each time.

    `bound_bytes` is the caller's own bound for what this process holds, which then is the only one.
    """

    sharers: Sharers = ALONE
    bound_bytes: int | None = None
    look: Callable[[], Sequence[MemoryLevel]] = look_at_memory

    def free(self) -> FreeMemory:
        """Returns what this process may take now, beside what it holds, and why no more: where
        nothing bounds it, UNLIMITED_BYTES.
        """
        if self.bound_bytes is not None:
            return FreeMemory(max(0, self.bound_bytes - USE.held_bytes))
        return divide(self._levels(), self.sharers)

    def _levels(self) -> Iterator[MemoryLevel]:
        """Yields the levels as they are: memory that is used again is not free, though the kernel
        says so until it looks for pages to take. The other processes are taken to use as much.
        """
        for level in self.look():
            used = min(level.lazy_bytes, self.sharers.of(level) * POOL.reused_bytes())
            yield replace(
                level,
                free_bytes=max(0, level.free_bytes - used),
                most_bytes=max(0, level.most_bytes - used),
            )

    def free_for(self, nbytes: int) -> FreeMemory:
        """Returns what `free` does, to take so many bytes; a little may be taken unasked, since to
        look costs about a millisecond.
        """
        if nbytes <= UNASKED_BYTES and self.bound_bytes is None:
            return FreeMemory(UNLIMITED_BYTES)
        return self.free()

    def has_room_for_each(self, nbytes: int) -> bool:
        """Says whether this process sees that each of the job may take so many bytes now."""
        return self.sharers.is_whole_job and nbytes <= divide(self._levels(), self.sharers).nbytes

    def seen_levels(self, nbytes: int) -> tuple[SeenLevel, ...]:
        """Returns what bounds this process now, as others may compare it with what they see; for
        who takes so many bytes.
        """
        if self.bound_bytes is not None or nbytes <= UNASKED_BYTES:
            return ()
        machine = boot_id()
        numbers = cgroup_numbers()
        return tuple(
            SeenLevel(
                f"{machine} {numbers.get(level.folder, level.folder)}",
                level.name,
                level.limit_bytes,
                level.most_bytes,
            )
            for level in self._levels()
        )


WHOLE_BUDGET = MemoryBudget()
"""That of a process which shares its machine with no other of its job."""


def free_host_bytes() -> int:
    """Returns what this process may take now, with those it has last found to share its memory."""
    return MemoryBudget(current_sharers()).free().nbytes
