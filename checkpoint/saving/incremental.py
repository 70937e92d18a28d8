"""What an incremental save knows of the one before: which chunks have changed, and which files are worth a second name.

Every step stays whole by itself: a chunk that has not changed since the last committed step is in a file of that step, which gets a second
name (a hard link) in the new one; what changed is written. Nothing refers to another step, so deletions, sweeps and crashes know nothing
of it. An old file is linked only while at least half of its bytes live, so that a step takes at most twice its size.

Chunks are compared by 128 bits of xxh3 with their own predecessors: with the CRCs of the format one update in four billion would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from ..format.files import FileReport
from .plan import Plan

MAX_LINKS = 8  # old files of a pack
NAMES = 16  # of files of a pack: its links, from oldest to newest, and then what was written


def load_digest() -> ModuleType:
    """Returns xxhash. Raises ImportError that says what to install."""
    try:
        import xxhash
    except ImportError as error:
        raise ImportError("Options(incremental=True) needs xxhash: pip install 'holdfast[incremental]'") from error
    return xxhash


@dataclass(frozen=True)
class WrittenFile:
    """A file of the last committed step: its name in the store, its report, and the bytes of all chunks that it was written with."""

    name: str
    report: FileReport
    nbytes: int


@dataclass(frozen=True)
class PackHistory:
    """Where the chunks of one planned pack are, in the pack's order: files from oldest to newest, and which of them has each chunk."""

    files: tuple[WrittenFile, ...]
    where: tuple[int, ...]
    digests: tuple[bytes, ...]
    crcs: tuple[int, ...]


def choose_links(history: PackHistory, unchanged: Sequence[bool], sizes: Sequence[int]) -> list[int]:
    """Returns which files of a pack get a second name, from oldest to newest: half alive at least, and those with the most living bytes.

    `unchanged` and `sizes` (bytes) are of the pack's chunks.
    """
    living = [0] * len(history.files)
    for file, same, size in zip(history.where, unchanged, sizes, strict=True):
        living[file] += size if same else 0
    worth = [file for file, known in enumerate(history.files) if living[file] and 2 * living[file] >= known.nbytes]
    return sorted(sorted(worth, key=lambda file: -living[file])[:MAX_LINKS])


@dataclass
class SaveHistory:
    """The files of the last committed save of this process, by item and pack. For one thread at a time.

    It is forgotten after any failure and any deletion: then everything is written.
    """

    full_every: int | None = None
    _saved: dict[str, tuple[str, Mapping[int, PackHistory]]] = field(default_factory=dict)
    _begun: dict[str, tuple[str, Mapping[int, PackHistory]]] = field(default_factory=dict)
    _linked: bool = False
    _since_full: float = math.inf

    @property
    def is_known(self) -> bool:
        """Whether there is a committed save whose files may be linked."""
        return bool(self._saved)

    def of(self, item: str, plan: Plan) -> Mapping[int, PackHistory]:
        """Returns what is known of an item's packs: nothing where the plan is another one, or a full save is due."""
        plan_hash, packs = self._saved.get(item, ("", {}))
        due = self.full_every is not None and self._since_full + 1 >= self.full_every
        return packs if plan_hash == plan.hash and not due else {}

    def begin(self, item: str, plan: Plan, packs: Mapping[int, PackHistory], *, linked: bool) -> None:
        """Notes what a save wrote of an item, and whether any of it was linked, until it is known how the save ended."""
        self._begun[item] = plan.hash, packs
        self._linked = self._linked or linked

    def settle(self, *, committed: bool) -> None:
        """Takes the save's files for the last committed ones, or forgets all."""
        if not committed:
            self.forget()
            return
        self._since_full = self._since_full + 1 if self._linked else 0
        self._saved, self._begun, self._linked = self._begun, {}, False

    def forget(self) -> None:
        """Forgets all: the next save writes everything."""
        self._saved, self._begun, self._linked, self._since_full = {}, {}, False, math.inf
