"""Where the files of one item go, and the writing of items that are JSON or files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO, TypeAlias

from crc32c import crc32c

from ..format.item_report import FileReport, ItemReport, bin_name, json_name
from ..format.own_files import StagedFiles, is_folder_name
from ..format.pack_header import PREFIX_BYTES
from ..storage.base import Part, Storage, SyncsFoldersOnce
from ..storage.counting import count_parts
from ..storage.path import join
from ..storage.threads import run_side_by_side

# Is told the bytes of each piece that is out.
Progress: TypeAlias = Callable[[int], None]
PIECE_BYTES = 4 * PREFIX_BYTES  # checksummed and written while it is in the cache


@dataclass(frozen=True)
class ItemTarget:
    """Where the files of one item of a save go.

    `step_dir` is relative to the store's root ("" for the root itself). `begun` gets the name of
    each file, relative to it, before the file is there.
    """

    storage: Storage
    step_dir: str
    item: str
    save_id: str
    begun: list[str] = field(default_factory=list)

    @property
    def folder(self) -> str:
        return join(self.step_dir, self.item)

    def path(self, name: str) -> str:
        """Returns the name in the store of one of the item's files."""
        return join(self.folder, name)

    def begin(self, name: str) -> str:
        """Notes that one of the item's files is begun; returns its name in the store."""
        self.begun.append(f"{self.item}/{name}")
        return self.path(name)

    @contextlib.contextmanager
    def synced_once(self) -> Iterator[ItemTarget]:
        """Yields itself. Files that are written meanwhile are durable once the context has ended,
        where the store can sync their folder for all of them at once.
        """
        storage = self.storage
        if isinstance(storage, SyncsFoldersOnce):
            with storage.synced_once(self.folder):
                yield self
        else:
            yield self

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        """Writes one of the item's files, durably: see `synced_once`."""
        self.storage.write(self.begin(name), size, parts)


def write_json(target: ItemTarget, process: int, data: bytes) -> ItemReport:
    """Writes JSON as `<item>/<process>-j-<save id>.json`, durably, and reports it."""
    name = json_name(process, target.save_id)
    target.write(name, len(data), [(0, [memoryview(data)])])
    report = report_json(process, data)
    return replace(report, files=(FileReport(name, len(data), 0, report.local[0]),))


def report_json(process: int, data: bytes) -> ItemReport:
    """Reports JSON that another process writes: by its CRC the processes' values are compared."""
    return ItemReport(process, "", (), (crc32c(data),))


def write_files(
    target: ItemTarget, process: int, staged: StagedFiles, progress: Progress
) -> ItemReport:
    """Writes files from a scratch folder, durably, and reports them with their own names.

    In the store they are `<item>/<process>-<number>-<save id>.bin`.
    """

    def write(numbered: tuple[int, str]) -> FileReport:
        number, own = numbered
        name = bin_name(process, number, target.save_id)
        if is_folder_name(own):
            target.write(name, 0, ())
            return FileReport(name, 0, 0, 0)
        with open(staged.folder / own, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            parts = _FileParts(file)
            target.write(name, size, count_parts(parts, progress))
        return FileReport(name, size, 0, parts.crc)

    reports = run_side_by_side(write, list(enumerate(staged.names)), target.storage.max_concurrency)
    prefix = f"{process:05d}/" if staged.per_process else ""
    return ItemReport(
        process,
        "",
        tuple(reports),
        names=tuple(f"{prefix}{own}" for own in staged.names),
        per_process=staged.per_process,
    )


class _FileParts:
    """The parts of a file, once; `crc` is the checksum of those that were read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = 0

    def __iter__(self) -> Iterator[Part]:
        offset = 0
        while data := self._file.read(PIECE_BYTES):
            self.crc = crc32c(data, self.crc)
            yield offset, [memoryview(data)]
            offset += len(data)
