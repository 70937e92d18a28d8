"""What each process tells of the item that it has written, for the one gather of a save; and the primary's check of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import SaveFailed
from ._plan import Plan


class PlansDiffer(SaveFailed):
    """Says that the processes planned different saves of an item; see _explaining.py. It does not leave this room."""

    item: str = ""


def pack_name(process: int, pack: int, writer_id: str) -> str:
    return f"{process:05d}-{pack:05d}-{writer_id}.safetensors"


def json_name(process: int, writer_id: str) -> str:
    return f"{process:05d}-j-{writer_id}.json"


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

    `plan` is the plan's hash ("" for a JSON item). `local` are the CRCs, as this process sees them, of the host-local arrays and then of
    the Python values, each in leaf order. `values` are the Python values themselves, encoded; from the other ranks those kept per process.
    """

    process: int
    plan: str
    files: tuple[FileReport, ...]
    local: tuple[int, ...] = ()
    values: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes: JSON types only, to be put into a larger message."""
        files = [[file.name, file.size, file.head, file.crc] for file in self.files]
        return {"process": self.process, "plan": self.plan, "files": files, "local": list(self.local), "values": [*map(list, self.values)]}

    @classmethod
    def from_json(cls, data: Any) -> ItemReport:
        """Returns the report; raises ValueError when `data` is not one."""
        try:
            files = tuple(FileReport(str(name), int(size), int(head), int(crc)) for name, size, head, crc in data["files"])
            values = tuple((str(kind), str(text)) for kind, text in data["values"])
            return cls(int(data["process"]), str(data["plan"]), files, tuple(map(int, data["local"])), values)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no report of an item: {error!r}") from error

    def to_bytes(self) -> bytes:
        """Returns compact UTF-8 JSON of `to_json`: about 100 bytes and 60 more a file, for the one gather of a save."""
        return json.dumps(self.to_json(), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ItemReport:
        return cls.from_json(json.loads(data))


def encode_value(value: Any) -> tuple[str, str]:
    """Returns a Python value as (type, text), exactly."""
    match value:
        case bool():
            return "bool", "true" if value else "false"
        case int():
            return "int", hex(value)
        case float():
            return "float", value.hex()
        case complex():
            return "complex", f"{value.real.hex()} {value.imag.hex()}"
        case bytes():
            return "bytes", base64.b64encode(value).decode()
    return "str", value


def decode_value(kind: str, text: str) -> Any:
    """Returns the value that `encode_value` encoded; raises ValueError for anything else."""
    match kind:
        case "bool" if text in ("true", "false"):
            return text == "true"
        case "int":
            return int(text, 16)
        case "float":
            return float.fromhex(text)
        case "complex":
            real, imaginary = text.split(" ")
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case "bytes":
            return base64.b64decode(text, validate=True)
        case "str":
            return text
    raise ValueError(f"no value of kind {kind!r}")


def check_reports(item: str, plan: Plan, reports: Sequence[ItemReport]) -> None:
    """Raises SaveFailed when the processes' reports (in rank order) do not tell of one plan (PlansDiffer) and one value of each local leaf.

    Its message names the leaf and the processes that differ; `process` is the first of them.
    """
    others = [report.process for report in reports if report.plan != plan.hash]
    if others:
        message = (
            f"item {item!r}: processes {others} planned another save than process {plan.process}: "
            "their trees differ in structure, shapes, dtypes or shardings; save the same tree everywhere"
        )
        raise PlansDiffer(message, process=others[0], item=item)
    names = [leaf.path for leaf in plan.leaves if not leaf.is_value and leaf.layout is None]
    names += [leaf.path for leaf in plan.leaves if leaf.is_value]
    for position, name in enumerate(names if plan.process_count > 1 else []):
        others = [report.process for report in reports if report.local[position] != reports[0].local[position]]
        if others:
            message = (
                f"item {item!r}: the leaf {name!r} is local to each process and differs on processes {others} from process 0; "
                "make it equal, or keep it per process: Options(per_process=...)"
            )
            raise SaveFailed(message, process=others[0], leaf=name)


__all__ = ["FileReport", "ItemReport", "PlansDiffer", "check_reports", "decode_value", "encode_value", "json_name", "pack_name"]
