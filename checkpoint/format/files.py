"""The files and folders of a step: their names, what a process reports of those that it wrote, and
which steps a root has.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, Corrupt, HostileCheckpoint
from ..storage.base import Storage
from ..storage.path import join
from ..storage.threads import run_side_by_side
from ..storage.tombstone import RECORD_NAME, TOMBSTONE


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


def count_value_bytes(value: Any) -> int:
    """Returns how many bytes a Python value takes in a record, type and all; of a short one the
    most that it may take.
    """
    if isinstance(value, str | bytes):
        return 6 * len(value) + 20 if len(value) < 1000 else len(json.dumps(encode_value(value)))
    return value.bit_length() // 4 + 20 if isinstance(value, int) else 100


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


LOOKS = 64  # at a root whose steps change meanwhile
_STEP_FOLDER = re.compile(r"0|[1-9][0-9]{0,17}")
_STEP_PREFIX = re.compile(r"[A-Za-z0-9_.-]{0,63}[A-Za-z_.-]|")  # that does not end in a digit
_STEP_FORMAT = re.compile(r"([^{}]*)\{(?::(?:0(\d+))?d)?\}")
STEP_NAMES = ".holdfast/steps.json"


def step_of(name: str) -> int | None:
    """Returns the step that a folder of this name holds; None for a name that is not a step's."""
    return int(name) if _STEP_FOLDER.fullmatch(name) else None


@dataclass(frozen=True)
class StepNames:
    """How a root calls the folders of its steps: a prefix, and the number with zeros before it up
    to `width` digits.
    """

    prefix: str = ""
    width: int = 1

    def name_of(self, step: int) -> str:
        return f"{self.prefix}{step:0{self.width}d}"

    def step_of(self, name: str) -> int | None:
        """Returns the step that a folder of this name holds; None for a name that is not a
        step's.
        """
        step = step_of(name.removeprefix(self.prefix).lstrip("0") or "0")
        return step if step is not None and self.name_of(step) == name else None

    def to_bytes(self) -> bytes:
        """Returns what stands in STEP_NAMES."""
        return json.dumps({"prefix": self.prefix, "width": self.width}).encode()

    def check(self) -> StepNames:
        """Returns itself. Raises ValueError for what no reader takes."""
        if (
            not _STEP_PREFIX.fullmatch(self.prefix)
            or self.prefix.startswith(".")
            or not 1 <= self.width <= 18
        ):
            raise ValueError(f"prefix {self.prefix!r}, width {self.width!r}")
        return self


PLAIN_NAMES = StepNames()


def parse_step_format(text: str) -> StepNames:
    """Returns the names that a format like "checkpoint_{:08d}" gives. Raises ValueError for one
    that is not of this form.
    """
    match = _STEP_FORMAT.fullmatch(text)
    try:
        if match is not None:
            return StepNames(match[1], int(match[2] or 1)).check()
    except ValueError:
        pass
    raise ValueError(
        f'step_format={text!r}: expected a name of at most 64 letters, digits, "_", "-" and ".",'
        ' which does not begin with "." or end in a digit, and then {:d}, or {:08d} for at'
        ' least 8 digits (at most 18): "checkpoint_{:08d}"'
    )


def read_step_names(storage: Storage) -> StepNames:
    """Returns how a root calls the folders of its steps, a fact that stands in STEP_NAMES; without
    it they are plain numbers.

    Raises HostileCheckpoint where that file is not one that holdfast writes.
    """
    try:
        found = json.loads(storage.fetch(STEP_NAMES, 1 << 16))
        prefix = found["prefix"]
        width = found["width"]
        if type(width) is not int:
            raise ValueError(f"width {width!r}")
        return StepNames(prefix, width).check()
    except (FileNotFoundError, NotADirectoryError):
        return PLAIN_NAMES
    except Corrupt:
        if not _is_listed(
            storage, STEP_NAMES
        ):  # it is not the file that is no file, but a folder above it
            return PLAIN_NAMES
        raise
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        path = join(storage.root, STEP_NAMES)
        message = (
            f"{path}: this does not say how the folders of steps are called: {error!r}; expected a"
            " prefix and a width of 1 to 18"
        )
        raise HostileCheckpoint(message, path=path, file=path) from error


def other_step(step: int, folder: str) -> int | None:
    """Returns the step that a folder is called after, if that is another than `step`; 0 fits
    everywhere, as one-shot saves have it.
    """
    number = step_of(folder.rstrip("/").rpartition("/")[2])
    return number if number != step and step else None


def _is_listed(storage: Storage, name: str) -> bool:
    try:
        return any(entry.name == name for entry in storage.list(name.rpartition("/")[0]))
    except OSError:
        return False


def step_folders(storage: Storage, names: StepNames | None = None) -> dict[int, str]:
    """Returns all folders that are named as the root's steps are, by their numbers, which ascend;
    `names` where they are known already.
    """
    folders = [entry.name[:-1] for entry in storage.list("") if entry.name.endswith("/")]
    names = names or read_step_names(storage)
    return dict(
        sorted((step, name) for name in folders if (step := names.step_of(name)) is not None)
    )


def has_record(storage: Storage, folder: str) -> bool:
    """Returns whether the checkpoint in a folder is there: whether its record is, readable or not.
    One small read.
    """
    head = bytearray(len(TOMBSTONE))
    try:
        storage.read(join(folder, RECORD_NAME), 0, [memoryview(head)])
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except (CheckpointError, OSError):  # whoever opens the step is told what is wrong with it
        return True
    return head != TOMBSTONE


def list_steps(storage: Storage, names: StepNames | None = None) -> list[int]:
    """Returns the steps of a root, ascending; a folder without a record is no step. `names` as for
    `step_folders`.

    Beside a writer that keeps one step, all may be deleted between the two looks, each for a newer
    one: then it looks again.
    """
    folders: dict[int, str] = {}
    for _ in range(LOOKS):
        before, folders = folders, step_folders(storage, names)
        there = run_side_by_side(
            lambda folder: has_record(storage, folder),
            list(folders.values()),
            storage.max_concurrency,
        )
        steps = [step for step, is_there in zip(folders, there, strict=True) if is_there]
        if steps or folders == before:
            return steps
    return []
