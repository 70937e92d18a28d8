"""What an incremental save knows of the one before: which chunks have changed, and which files are
worth a second name.

Every step stays whole by itself: a chunk that has not changed since the last committed step is in a
file of that step, which gets a second name (a hard link) in the new one; what changed is written.
Nothing refers to another step, so deletions, sweeps and crashes know nothing of it. An old file is
linked only while at least half of its bytes live, so that a step takes at most twice its size.

Chunks are compared by 128 bits of xxh3 with their own predecessors: with the CRCs of the format one
update in four billion would be lost.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax

from holdfast.coordination.distribution import install_command

from ..format.item_report import FileReport, pack_name
from ..storage.base import PosixFolder, Storage
from ..storage.path import join
from .plan import Plan

MAX_LINKS = 8  # old files of a pack
HEAD_BYTES = 1 << 20  # as the pieces in which chunks are written
# for the files of a pack, at most MAX_LINKS + 1: links by their age, and then what was written
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
    """The digests of a chunk's first HEAD_BYTES and of all: most of what has changed is seen to
    have by the first, and hashed as it is written.
    """

    head: bytes
    whole: bytes


class RunningDigest:
    """The digest of a chunk that comes in pieces, the first of HEAD_BYTES."""

    def __init__(self) -> None:
        self._hash = load_digest().xxh3_128()
        self.head = b""

    def add(self, piece: memoryview) -> None:
        """Adds the next piece."""
        self._hash.update(piece)
        self.head = self.head or self._hash.digest()

    def result(self) -> ChunkDigest:
        """Returns the digest of all that was added."""
        return ChunkDigest(self.head, self._hash.digest())


def digest_chunk(data: memoryview, old: ChunkDigest | None = None) -> ChunkDigest | None:
    """Returns the digest of a chunk's bytes; None where its head says already that they are not
    those of `old`.
    """
    running = RunningDigest()
    running.add(data[:HEAD_BYTES])
    if old is not None and running.head != old.head:
        return None
    if data.nbytes > HEAD_BYTES:
        running.add(data[HEAD_BYTES:])
    return running.result()


@dataclass(frozen=True)
class WrittenFile:
    """A file of the last committed step: its name in the store, its report, and the bytes of all
    chunks that it was written with.
    """

    name: str
    report: FileReport
    nbytes: int


@dataclass(frozen=True)
class PackHistory:
    """Where the chunks of one planned pack are, in the pack's order: files from oldest to newest,
    and which of them has each chunk.
    """

    files: tuple[WrittenFile, ...]
    where: tuple[int, ...]
    digests: tuple[ChunkDigest, ...]
    crcs: tuple[int, ...]


def choose_links(
    history: PackHistory, unchanged: Sequence[bool], sizes: Sequence[int]
) -> list[int]:
    """Returns which files of a pack get a second name, from oldest to newest: half alive at least,
    and those with the most living bytes.

    `unchanged` and `sizes` (bytes) are of the pack's chunks.
    """
    living = [0] * len(history.files)
    for file, same, size in zip(history.where, unchanged, sizes, strict=True):
        living[file] += size if same else 0
    worth = [
        file
        for file, known in enumerate(history.files)
        if living[file] and 2 * living[file] >= known.nbytes
    ]
    return sorted(sorted(worth, key=lambda file: -living[file])[:MAX_LINKS])


Arrays: TypeAlias = Mapping[int, "weakref.ref[Any]"]  # by leaf


class _SavedItem(NamedTuple):
    plan_hash: str
    packs: Mapping[int, PackHistory]
    arrays: Arrays


def never_changes(leaf: Any) -> bool:
    """Says whether a leaf that is the same object has the same values; one on the CPU may be a view
    of what numpy changes.
    """
    return isinstance(leaf, jax.Array) and all(
        device.platform != "cpu" for device in leaf.devices()
    )


def references(leaves: Sequence[Any]) -> Arrays:
    """Returns weak references to the leaves that never change."""
    return {index: weakref.ref(leaf) for index, leaf in enumerate(leaves) if never_changes(leaf)}


class Unmoved(NamedTuple):
    """What need be neither copied from the device nor hashed.

    `files` have been linked: by pack, as indices of its history; they have `chunks` (pack, place in
    it). `arrays` are this save's leaves.
    """

    files: Mapping[int, set[int]]
    chunks: set[tuple[int, int]]
    arrays: Arrays


def link_unmoved(
    history: SaveHistory,
    plan: Plan,
    leaves: Sequence[Any],
    storage: PosixFolder,
    folder: str,
    item: str,
    save_id: str,
) -> Unmoved:
    """Links, in the caller's thread, the files that leaves of the last save keep alive. A file that
    cannot be linked is left out.
    """
    unmoved, files, found = (
        history.unmoved(item, leaves),
        dict[int, set[int]](),
        set[tuple[int, int]](),
    )
    for pack, old in history.of(item, plan).items() if unmoved else ():
        chunks = plan.own[pack]
        same = [chunk.leaf in unmoved for chunk in chunks]
        for file in choose_links(old, same, [chunk.nbytes for chunk in chunks]):
            known = old.files[file]
            with contextlib.suppress(OSError):
                storage.link(
                    known.name,
                    join(folder, item, link_name(plan, pack, file, save_id)),
                    known.report.size,
                )
                files.setdefault(pack, set()).add(file)
                found |= {
                    (pack, place)
                    for place, is_same in enumerate(same)
                    if is_same and old.where[place] == file
                }
    return Unmoved(files, found, references(leaves))


def unlink(
    unmoved: Unmoved, plan: Plan, storage: Storage, folder: str, item: str, save_id: str
) -> None:
    """Deletes what `link_unmoved` linked for a save that does not begin; what cannot be deleted is
    left to a sweep.
    """
    with contextlib.suppress(OSError):
        names = [
            link_name(plan, pack, file, save_id)
            for pack, files in unmoved.files.items()
            for file in files
        ]
        storage.delete(
            [*(join(folder, item, name) for name in names), f"{join(folder, item)}/", f"{folder}/"]
            if names
            else []
        )


def link_name(plan: Plan, pack: int, file: int, save_id: str) -> str:
    """Returns the name of a file of a pack's history in a new save: whoever loads files in the
    order of names meets the newest last.
    """
    return pack_name(plan.process, pack * NAMES + file, save_id)


@dataclass
class SaveHistory:
    """The files of the last committed save of this process, by item and pack. For one thread at a
    time.

    It is forgotten after any failure and any deletion: then everything is written.
    """

    full_every: int | None = None
    _saved: dict[str, _SavedItem] = field(default_factory=dict)
    _begun: dict[str, _SavedItem] = field(default_factory=dict)
    _linked: bool = False
    _since_full: float = math.inf

    @property
    def is_known(self) -> bool:
        """Whether there is a committed save whose files may be linked."""
        return bool(self._saved)

    def of(self, item: str, plan: Plan) -> Mapping[int, PackHistory]:
        """Returns what is known of an item's packs: nothing where the plan is another one, or a
        full save is due.
        """
        saved = self._saved.get(item)
        due = self.full_every is not None and self._since_full + 1 >= self.full_every
        return saved.packs if saved is not None and saved.plan_hash == plan.hash and not due else {}

    def unmoved(self, item: str, leaves: Sequence[Any]) -> set[int]:
        """Returns the leaves that are the very objects of the last committed save: jax.Arrays,
        whose values cannot change.
        """
        saved = self._saved.get(item)
        return (
            set()
            if saved is None
            else {index for index, array in saved.arrays.items() if array() is leaves[index]}
        )

    def begin(
        self,
        item: str,
        plan: Plan,
        packs: Mapping[int, PackHistory],
        arrays: Arrays,
        *,
        linked: bool,
    ) -> None:
        """Notes what a save wrote of an item, and whether any of it was linked, until it is known
        how the save ended.
        """
        self._begun[item] = _SavedItem(plan.hash, packs, arrays)
        self._linked = self._linked or linked

    def settle(self, *, committed: bool) -> None:
        """Takes the save's files for the last committed ones, or forgets all."""
        if not committed:
            self.forget()
            return
        self._since_full = self._since_full + 1 if self._linked else 0
        self._saved = self._begun
        self._begun = {}
        self._linked = False

    def forget(self) -> None:
        """Forgets all: the next save writes everything."""
        self._saved = {}
        self._begun = {}
        self._linked = False
        self._since_full = math.inf
