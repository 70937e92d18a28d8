"""checkpoint.json: built by the primary, parsed and validated by every reader; and the reports that it is built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._plan import Plan


@dataclass(frozen=True)
class FileReport:
    """One file of a step: its name relative to the item's folder, its size, the bytes of its header (0: it has none) and their CRC32C.

    A file without a header is checksummed whole.
    """

    name: str
    size: int
    head: int
    crc: int


@dataclass(frozen=True)
class ItemReport:
    """What one process has written of one item, durably.

    `plan` is the plan's hash ("" for a JSON item). `local` are the CRCs of the host-local leaves as this process sees them, in leaf
    order. `values` are the Python values of the tree, encoded; from rank 0 alone.
    """

    process: int
    plan: str
    files: tuple[FileReport, ...]
    local: tuple[int, ...] = ()
    values: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes: JSON types only, to be put into a larger message."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, data: Any) -> ItemReport:
        """Returns the report; raises ValueError when `data` is not one."""
        raise NotImplementedError

    def to_bytes(self) -> bytes:
        """Returns compact UTF-8 JSON of `to_json`: about 100 bytes and 60 more a file, for the one gather of a save."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, data: bytes) -> ItemReport:
        raise NotImplementedError


@dataclass(frozen=True)
class ItemRecord:
    """One item of a step: kind "tree" or "json", and its files (names relative to the step's folder)."""

    name: str
    kind: str
    files: tuple[FileReport, ...]


@dataclass(frozen=True)
class Record:
    """A parsed, validated record. `path` is where it was read, for messages. Times are Unix seconds. `writer` is the writer's id."""

    path: str
    step: int
    writer: str
    processes: int
    started_s: float
    finished_s: float
    items: Mapping[str, ItemRecord]
    metrics: Mapping[str, Any]
    metadata: Any
    versions: Mapping[str, str]

    def file_names(self) -> list[str]:
        """Returns every file that the record names, relative to the step's folder."""
        raise NotImplementedError


def check_reports(item: str, plan: Plan, reports: Sequence[ItemReport]) -> None:
    """Raises SaveFailed when the processes' reports (in rank order) do not describe one plan and one value of each host-local leaf.

    Its message names the leaf and the processes that differ; `process` is the first of them.
    """
    raise NotImplementedError


def build_record(
    step: int,
    items: Mapping[str, tuple[Plan | None, Sequence[ItemReport]]],
    *,
    writer: str,
    processes: int,
    started_s: float,
    finished_s: float,
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
) -> bytes:
    """Returns the bytes of checkpoint.json. A JSON item has no plan. `metrics` and `metadata` are of JSON types (TypeError otherwise)."""
    raise NotImplementedError


def parse_record(data: bytes, path: str) -> Record:
    """Parses and validates a record; raises Corrupt (checksum, syntax) or HostileCheckpoint (names, bounds), naming `path`."""
    raise NotImplementedError
