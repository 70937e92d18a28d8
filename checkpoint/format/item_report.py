"""What a process reports of the files that it wrote of one item, and how such files are named."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


def pack_name(process: int, pack: int, writer_id: str) -> str:
    return f"{process:05d}-{pack:05d}-{writer_id}.safetensors"


def json_name(process: int, writer_id: str) -> str:
    return f"{process:05d}-j-{writer_id}.json"


def bin_name(process: int, number: int, writer_id: str) -> str:
    return f"{process:05d}-{number:05d}-{writer_id}.bin"


@dataclass(frozen=True)
class FileReport:
    """One file of a step: its name relative to the item's folder, its size, the bytes of its header
    (0: it has none) and their CRC32C.

    A file without a header is checksummed whole.
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
    where: tuple[tuple[int, int, int], ...] | None = None
    names: tuple[str, ...] | None = None
    per_process: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes: JSON types only, to be put into a larger message."""
        files = [[file.name, file.size, file.head, file.crc] for file in self.files]
        body = {
            "process": self.process,
            "plan": self.plan,
            "files": files,
            "local": list(self.local),
            "values": [*map(list, self.values)],
        }
        body |= {} if self.where is None else {"where": [*map(list, self.where)]}
        return (
            body
            if self.names is None
            else body | {"names": list(self.names), "per_process": self.per_process}
        )

    @classmethod
    def from_json(cls, data: Any) -> ItemReport:
        """Returns the report; raises ValueError when `data` is not one."""
        try:
            files = tuple(
                FileReport(str(name), int(size), int(head), int(crc))
                for name, size, head, crc in data["files"]
            )
            values = tuple((str(kind), str(text)) for kind, text in data["values"])
            runs = data.get("where")
            where = (
                None
                if runs is None
                else tuple((int(first), int(step), int(count)) for first, step, count in runs)
            )
            return cls(
                int(data["process"]),
                str(data["plan"]),
                files,
                tuple(map(int, data["local"])),
                values,
                where,
                tuple(map(str, data["names"])) if "names" in data else None,
                bool(data.get("per_process")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no report of an item: {error!r}") from error

    def to_bytes(self) -> bytes:
        """Returns compact UTF-8 JSON of `to_json`: about 100 bytes and 60 more a file, for the one
        gather of a save.
        """
        return json.dumps(self.to_json(), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ItemReport:
        return cls.from_json(json.loads(data))
