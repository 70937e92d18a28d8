"""What a process reports of the files that it wrote of one item, and how such files are named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

SAVE_ID = re.compile(r"[0-9a-f]{8}(?:[0-9a-f]{8})?")  # a writer's id, then the number of its save
FILE_NAME = re.compile(
    rf"([0-9]{{5,10}})-([0-9]{{5,10}}|j)-({SAVE_ID.pattern})\.(safetensors|json|bin)"
)
Run: TypeAlias = tuple[int, int, int]  # (first, step, count): see record.chunk_runs


def pack_name(process: int, pack: int, writer_id: str) -> str:
    return f"{process:05d}-{pack:05d}-{writer_id}.safetensors"


def json_name(process: int, writer_id: str) -> str:
    return f"{process:05d}-j-{writer_id}.json"


def bin_name(process: int, number: int, writer_id: str) -> str:
    return f"{process:05d}-{number:05d}-{writer_id}.bin"


def is_file_of(name: str, process: int, save_id: str) -> bool:
    """Says whether a file in an item's folder is one that a process writes in a save."""
    match = FILE_NAME.fullmatch(name)
    return match is not None and int(match[1]) == process and match[3] == save_id


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file of a step: its name, its size, the bytes of its header and their CRC32C.

    The name is relative to the item's folder. A file without a header (`head` is 0) is checksummed
    whole.
    """

    name: str
    size: int
    head: int
    crc: int


@dataclass(frozen=True)
class ItemReport:
    """The report of one process on what it has written of one item, durably.

    `plan` is the plan's hash ("" for a JSON item). `local` are the CRCs, as this process sees them,
    of the host-local arrays and then of the Python values, each in leaf order. `values` are the
    Python values themselves, encoded; from the other ranks those kept per process. `where` says
    which of the files has each chunk of this process, in the plan's order, as runs (None: as
    planned, a file a pack). `names` are the files' own, of an item of files (None: it is none),
    which with `per_process` each process keeps for itself.
    """

    process: int
    plan: str
    files: tuple[FileReport, ...]
    local: tuple[int, ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    where: tuple[Run, ...] | None = None
    names: tuple[str, ...] | None = None
    per_process: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes: JSON types only, to be put into a larger message."""
        body = {
            "process": self.process,
            "plan": self.plan,
            "files": [[file.name, file.size, file.head, file.crc] for file in self.files],
            "local": list(self.local),
            "values": [*map(list, self.values)],
        }
        if self.where is not None:
            body["where"] = [*map(list, self.where)]
        if self.names is not None:
            body["names"] = list(self.names)
            body["per_process"] = self.per_process
        return body

    @classmethod
    def from_json(cls, data: Any) -> ItemReport:
        """Returns the report; raises ValueError when `data` is not one."""
        try:
            return cls(
                int(data["process"]),
                str(data["plan"]),
                tuple(
                    FileReport(str(name), int(size), int(head), int(crc))
                    for name, size, head, crc in data["files"]
                ),
                tuple(map(int, data["local"])),
                values=tuple((str(kind), str(text)) for kind, text in data["values"]),
                where=_parse_runs(data["where"]) if "where" in data else None,
                names=tuple(map(str, data["names"])) if "names" in data else None,
                per_process=bool(data.get("per_process")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no report of an item: {error!r}") from error


def _parse_runs(runs: Any) -> tuple[Run, ...]:
    return tuple((int(first), int(step), int(count)) for first, step, count in runs)
