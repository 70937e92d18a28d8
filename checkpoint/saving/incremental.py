"""What an incremental save knows of the one before: which chunks have changed, which files live.

Every step stays whole by itself. A chunk that has not changed since the last committed step is in a
file of that step, which gets a second name (a hard link) in the new one; what changed is written.
In a bucket, which has no second names, the store copies the file by itself.
Nothing refers to another step, so deletions, sweeps and crashes need not know of incremental saves.
An old file is linked only while at least half of its bytes live, so that a step takes at most twice
its size.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax

from holdfast.coordination.distribution import install_command

from ..format.item_report import FileReport, pack_name
from ..storage.base import CopiesFiles, Storage
from .item_files import PIECE_BYTES, ItemTarget
from .plan import Plan

_log = logging.getLogger(__name__)
MAX_LINKS = 8  # old files of a pack
HEAD_BYTES = PIECE_BYTES
# numbers for the files of a pack, at most MAX_LINKS + 1: links by their age, then the new file
NAMES = 16


def load_digest() -> ModuleType:
    """Returns xxhash. Raises ImportError that says what to install."""
    try:
        import xxhash
    except ImportError as error:
        raise ImportError(
            f"Options(incremental=True) needs xxhash: {install_command('incremental')}"
        ) from error
    return xxhash


class ChunkDigest(NamedTuple):
    """The digests of a chunk's first HEAD_BYTES and of all its bytes."""

    head: bytes
    whole: bytes


class RunningDigest:
    """The digest of a chunk that comes in pieces, the first of HEAD_BYTES or more."""

    def __init__(self) -> None:
        # By the CRCs of the format one changed chunk in four billion would be taken for unchanged.
        self._hash = load_digest().xxh3_128()
        self.head = b""

    def add(self, piece: memoryview) -> None:
        """Adds the next piece."""
        if not self.head:
            self._hash.update(piece[:HEAD_BYTES])
            self.head = self._hash.digest()
            piece = piece[HEAD_BYTES:]
        self._hash.update(piece)

    def result(self) -> ChunkDigest:
        """Returns the digest of all that was added."""
        return ChunkDigest(self.head, self._hash.digest())


def is_unchanged(data: memoryview, old: ChunkDigest) -> bool:
    """Says whether a chunk's bytes are those of a digest."""
    running = RunningDigest()
    running.add(data[:HEAD_BYTES])
    # Most chunks that have changed differ in their heads. These are hashed as a whole only once,
    # as they are written.
    if running.head != old.head:
        return False
    running.add(data[HEAD_BYTES:])
    return running.result() == old


@dataclass(frozen=True)
class WrittenFile:
    """A file of a save: its name in the store, its report, and the bytes of its first chunks.

    `nbytes` counts all chunks that the file was written with, also those that no step needs now.
    """

    name: str
    report: FileReport
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkFate:
    """What became of one chunk: the index of its file among the pack's files, and its checksums."""

    file: int
    crc: int
    digest: ChunkDigest | None = None  # None: the save is not incremental


@dataclass(frozen=True)
class WrittenPack:
    """What became of one planned pack: its files, from oldest to newest, and its chunks in order.

    `linked_bytes` are those of chunks in old files, `written_bytes` those of the new file.
    """

    files: tuple[WrittenFile, ...]
    chunks: tuple[ChunkFate, ...]
    linked_bytes: int = 0
    written_bytes: int = 0


def choose_links(old: WrittenPack, unchanged: Sequence[bool], sizes: Sequence[int]) -> list[int]:
    """Returns which files of a pack get a second name, from oldest to newest.

    `unchanged` and `sizes` (bytes) are of the pack's chunks.
    """
    living = [0] * len(old.files)
    for fate, same, size in zip(old.chunks, unchanged, sizes, strict=True):
        if same:
            living[fate.file] += size
    # A file that is half dead would keep a step at more than twice its size.
    worth = [
        file
        for file, known in enumerate(old.files)
        if living[file] and 2 * living[file] >= known.nbytes
    ]
    return sorted(heapq.nlargest(MAX_LINKS, worth, key=living.__getitem__))


def can_link(storage: Storage) -> bool:
    """Says whether a store can do what `link_file` asks of it."""
    if storage.posix is not None:
        return storage.posix.can_link
    return isinstance(storage, CopiesFiles) and storage.can_copy


def link_file(target: ItemTarget, known: WrittenFile, name: str) -> bool:
    """Gives a file of the last save a second name, in a bucket a copy; says whether it could."""
    storage = target.storage
    path = target.begin(name)
    try:
        if storage.posix is not None:
            storage.posix.link(known.name, path, known.report.size)
        else:
            assert isinstance(storage, CopiesFiles)
            storage.copy(known.name, path)
    except OSError as error:
        # Deleted meanwhile, too many links, or a quota's border: the chunks are written instead.
        _log.debug("%s is not linked as %s: %s", known.name, path, error)
        # It may have been linked all the same. No record would name it, and no sweep looks for it.
        with contextlib.suppress(OSError):
            storage.delete([path])
        return False
    return True


Arrays: TypeAlias = Mapping[int, "weakref.ref[Any]"]  # by leaf


class SavedItem(NamedTuple):
    """What a save wrote of an item: its packs, and the leaves of that plan that never change."""

    plan_hash: str = ""
    packs: Mapping[int, WrittenPack] = MappingProxyType({})
    arrays: Arrays = MappingProxyType({})

    def unmoved(self, leaves: Sequence[Any]) -> set[int]:
        """Returns which leaves of that plan are the very arrays that were saved."""
        return {index for index, array in self.arrays.items() if array() is leaves[index]}


def never_changes(leaf: Any) -> bool:
    """Says whether a leaf that is the same object always has the same values."""
    # An array on the CPU may be a view of memory that numpy changes.
    return isinstance(leaf, jax.Array) and all(
        device.platform != "cpu" for device in leaf.devices()
    )


def references(leaves: Sequence[Any]) -> Arrays:
    """Returns weak references to the leaves that never change."""
    # Weak: the history must not keep a state of the training in the device's memory.
    return {index: weakref.ref(leaf) for index, leaf in enumerate(leaves) if never_changes(leaf)}


class Unmoved(NamedTuple):
    """What need be neither copied from the device nor hashed.

    `files` have been linked: by pack, as indices of its history; they have `chunks` (pack, place in
    it). `arrays` are this save's leaves.
    """

    files: Mapping[int, set[int]] = MappingProxyType({})
    chunks: Collection[tuple[int, int]] = frozenset()
    arrays: Arrays = MappingProxyType({})


def link_unmoved(
    history: SaveHistory, plan: Plan, leaves: Sequence[Any], target: ItemTarget
) -> Unmoved:
    """Links, in the caller's thread, the files that leaves of the last save keep alive.

    A file that cannot be linked is left out. In a bucket none is linked here: it is copied while
    its bytes are held.
    """
    if history.is_doubted:
        history.forget()
    if target.storage.posix is None:
        return Unmoved()
    files = {}
    chunks = set()
    saved = history.of(target.item, plan)
    unmoved = saved.unmoved(leaves)
    for pack, old in saved.packs.items() if unmoved else ():
        own = plan.own[pack]
        same = [chunk.leaf in unmoved for chunk in own]
        # Linked before the snapshot: it leaves out their chunks, so that later there would be no
        # bytes to write instead.
        linked = {
            file
            for file in choose_links(old, same, [chunk.nbytes for chunk in own])
            if link_file(target, old.files[file], link_name(plan, pack, file, target.save_id))
        }
        files[pack] = linked
        for place, fate in enumerate(old.chunks):
            if same[place] and fate.file in linked:
                chunks.add((pack, place))
    return Unmoved(files, chunks, references(leaves))


def link_name(plan: Plan, pack: int, file: int, save_id: str) -> str:
    """Returns the name of a file of a pack's history in a new save."""
    # Tools that load all files of a folder in the order of their names meet the newest last.
    return pack_name(plan.process, pack * NAMES + file, save_id)


@dataclass
class SaveHistory:
    """The files of the last committed save of this process, by item and pack.

    For one thread at a time, but for `doubt`. It is forgotten after any failure, any deletion and
    what a restore found damaged: the next save writes everything.
    """

    full_every: int | None = None
    _saved: dict[str, SavedItem] = field(default_factory=dict)
    _begun: dict[str, SavedItem] = field(default_factory=dict)
    _linked: bool = False
    _since_full: float = math.inf
    is_doubted: bool = False

    @property
    def is_known(self) -> bool:
        """Whether there is a committed save whose files may be linked."""
        return bool(self._saved)

    def of(self, item: str, plan: Plan) -> SavedItem:
        """Returns what is known of an item.

        Nothing where the plan is another one, or a full save is due.
        """
        saved = self._saved.get(item, SavedItem())
        due = self.full_every is not None and self._since_full + 1 >= self.full_every
        return SavedItem() if due or saved.plan_hash != plan.hash else saved

    def begin(
        self,
        item: str,
        plan: Plan,
        packs: Mapping[int, WrittenPack],
        arrays: Arrays,
        *,
        linked: bool,
    ) -> None:
        """Notes what a save wrote of an item, and whether any of it was linked, until its end."""
        self._begun[item] = SavedItem(plan.hash, packs, arrays)
        self._linked |= linked

    def end(self, *, committed: bool) -> bool:
        """Takes the save's files for the last committed ones, or forgets all; says whether the save
        has linked some.
        """
        linked = self._linked
        if not committed:
            # The files of a save that failed are deleted, now or by a sweep: nothing to link to.
            self.forget()
            return linked
        # A save that linked nothing is a full one.
        self._since_full = self._since_full + 1 if linked else 0
        self._saved = self._begun
        self._begun = {}
        self._linked = False
        return linked

    def doubt(self) -> None:
        """Has the next save forget all. One in flight goes on: it lacks what it linked."""
        self.is_doubted = True

    def forget(self) -> None:
        """Forgets all: the next save writes everything."""
        self.is_doubted = False
        self._saved = {}
        self._begun = {}
        self._linked = False
        self._since_full = math.inf
