"""What the folders of hosts hold and what it adds up to: parts, which local steps are whole, and
which of them may come back. No I/O.

A part is what one process wrote in one local save: `part-<rank>.json` beside its packs, published
last. A copy on a peer is the same text. Nothing else says that a local step exists: it is whole if
every part of one save is complete somewhere and their reports fit together. Its record is built
from the parts when it is restored.

A branch is one stretch of saves of a root, of any kind, that goes on from one step. Its file in
the root is written before its first commit. A local step is dead if it lies above the base of any
later branch: that one went on without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..agreement.save_protocol import BranchStart
from ..errors import Corrupt, HostileCheckpoint
from ..format.item_report import ItemReport, is_file_of
from ..format.limits import ITEM_NAME, MALFORMED
from ..format.record import ItemRecord, whole
from ..restoring.reader import ItemReader
from ..saving.record_builder import TreeText
from ..steps.claims import writer_of
from ..steps.lineage import RUN_ID, Branch
from ..storage.base import Readable
from ..storage.tombstone import is_sealed, sealed_json

FORMAT = "holdfast-part/1"
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_FOLDER = re.compile(r"(\d{1,18})/(\d{1,18})-([0-9a-f]{16})")


class LocalKey(NamedTuple):
    """Names one local save of a run; parts of two saves never have one key."""

    step: int
    branch: int
    save_id: str
    processes: int

    @property
    def folder(self) -> str:
        """The folder of its parts, below that of the run."""
        return f"{self.branch}/{self.step}-{self.save_id}"

    def part_name(self, process: int) -> str:
        """Returns the name of a part, below the folder of the run."""
        return f"{self.folder}/part-{process:05d}.json"


@dataclass(frozen=True)
class StepHead:
    """What a record says besides the files: process 0's part has it."""

    trees: Mapping[str, TreeText]
    started_s: float
    finished_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Any = None


@dataclass(frozen=True)
class Part:
    """What one process wrote in one local save."""

    run: str
    key: LocalKey
    process: int
    items: Mapping[str, ItemReport]
    head: StepHead | None = None

    @property
    def name(self) -> str:
        """Its own, below the folder of the run."""
        return self.key.part_name(self.process)

    @property
    def files(self) -> dict[str, int]:
        """The files that belong to it, below the folder of the run, with their sizes."""
        return {
            f"{self.key.folder}/{item}/{file.name}": file.size
            for item, report in self.items.items()
            for file in report.files
        }

    def readers(
        self, storage: Readable, *, step_bytes: int = 0
    ) -> Iterator[tuple[ItemReader, ItemReport]]:
        """Yields the readers of its items, from a store that is the folder of the run, with what
        each is to read, in steps of so many bytes (0: what suits the store).
        """
        for name, report in self.items.items():
            item = ItemRecord(name, "files", report.files)
            folder = f"{self.key.folder}/{name}"
            yield ItemReader(storage, folder, item, step_bytes=step_bytes), report

    def to_bytes(self) -> bytes:
        """Returns the text of part-<rank>.json, which ends in its own checksum as a record does."""
        return sealed_json(
            {
                "format": FORMAT,
                "run": self.run,
                "key": self.key,
                "process": self.process,
                "head": None if self.head is None else asdict(self.head),
                "items": _items_of(self.items),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Part:
        """Parses a part. Raises Corrupt where its bytes are not what was written, HostileCheckpoint
        for what no process of ours writes.
        """
        if not is_sealed(data):
            raise Corrupt.at(
                path,
                "the part's checksum does not fit its bytes; it was damaged after it was written",
            )
        try:
            return _parse_part(json.loads(data))
        except MALFORMED as error:
            raise HostileCheckpoint.at(
                path, f"this is not a part that holdfast writes: {error!r}"
            ) from error

    def summary(self) -> PartSummary:
        """Returns what an inventory says of the part."""
        report = json.dumps(_items_of(self.items), separators=(",", ":"))
        return PartSummary(self.key, self.process, report)


class PartSummary(NamedTuple):
    """One part in an inventory. `report` is the text of its items."""

    key: LocalKey
    process: int
    report: str


def _items_of(items: Mapping[str, ItemReport]) -> dict[str, Any]:
    return {name: report.to_json() for name, report in items.items()}


def _parse_part(data: dict[str, Any]) -> Part:
    key = LocalKey(*data["key"])
    process = whole(data["process"])
    run = data["run"]
    for number in (key.step, key.branch, key.processes):
        whole(number)
    if (
        data["format"] != FORMAT
        or not RUN_ID.fullmatch(run)
        or not _SAVE_ID.fullmatch(key.save_id)
        or process >= key.processes
    ):
        raise ValueError(f"{data['format']!r}, run {run!r}, {key}, process {process}")
    items = {
        name: _parse_report(name, report, process, key.save_id)
        for name, report in data["items"].items()
    }
    head = data["head"]
    if (head is None) != (process != 0):
        raise ValueError(f"process {process} has the head {head!r:.100}")
    return Part(run, key, process, items, None if head is None else _parse_head(head))


def _parse_report(item: str, data: Any, process: int, save_id: str) -> ItemReport:
    report = ItemReport.from_json(data)
    for file in report.files:
        whole(file.crc, 0xFFFFFFFF)
        whole(file.head, whole(file.size))
        if not is_file_of(file.name, process, save_id):
            raise ValueError(f"{file.name!r} is no file of process {process}")
    if (
        not ITEM_NAME.fullmatch(item)
        or report.process != process
        or len({file.name for file in report.files}) != len(report.files)
    ):
        raise ValueError(f"item {item!r} of process {report.process}")
    return report


def _parse_head(data: dict[str, Any]) -> StepHead:
    trees = {
        str(name): TreeText(
            str(tree["plan"]),
            str(tree["text"]),
            whole(tree["files"]),
            tuple(tree["values"]),
            tuple(tree["names"]),
        )
        for name, tree in data["trees"].items()
    }
    return StepHead(
        trees,
        float(data["started_s"]),
        float(data["finished_s"]),
        dict(data["metrics"]),
        data["metadata"],
    )


def parse_folder(name: str) -> tuple[int, int, str] | None:
    """Returns branch, step and save id of a local save's folder, below that of the run; None for a
    name that is none.
    """
    match = _FOLDER.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), match[3])


# --- which may come back


def has_left(branch: BranchStart, key: LocalKey) -> bool:
    """Says whether a branch went on without a local step of an earlier one."""
    return branch.number > key.branch and branch.base < key.step


def why_dead(key: LocalKey, branches: Collection[Branch]) -> str:
    """Returns why a local step may not come back, or "". One of a branch that the root does not
    know may be of any branch.
    """
    own = next((branch for branch in branches if branch.number == key.branch), None)
    # An opening that cannot be read has no writer, and every id begins with nothing.
    if own is None or not own.writer or not key.save_id.startswith(own.writer):
        return f"branch {key.branch} of writer {writer_of(key.save_id)} is not known to the root"
    later = next((branch for branch in branches if has_left(branch.start, key)), None)
    if later is None:
        return ""
    base = f"step {later.base}" if later.base >= 0 else "no step"
    return f"branch {later.number} went on from {base}, without it"
