"""checkpoint.json, the record of a step: parsed and validated by every reader.

A record is one JSON object. Its last member, `"crc32c"`, covers all bytes before its comma. Where
each chunk of a leaf lies is written as runs (first file, step, count) over the chunks of its grid,
and runs that several leaves share are written once (the member "cells").
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Corrupt, HostileCheckpoint, StepNotFound
from ..storage.base import Storage
from ..storage.path import join
from ..storage.tombstone import RECORD_NAME, body_of, sealed
from .dtypes import dtype_named
from .grid import Grid, Ints
from .item_report import FileReport
from .limits import HEADER_LIMIT_BYTES, ITEM_NAME, RECORD_LIMIT_BYTES
from .own_files import is_own_name
from .sharding import parse_sharding
from .step_folders import other_step
from .tree import check_description, paused_gc
from .values import decode_value

FORMAT = "holdfast/1"
MAX_CHUNKS = 1 << 24  # in the table of an item
MIN_ENTRY_BYTES = 50  # of a chunk in the header of its pack
_MAX_RANK = 64
_MAX_BYTES = 1 << 60
_FILE_NAME = re.compile(r"(\d{5,})-(\d{5,}|j)-([0-9A-Za-z_-]{1,64})\.(safetensors|json|bin)")
_VALUE_KINDS = ("bool", "int", "float", "complex", "str", "bytes")
_ARRAY_KINDS = ("array", "key", "numpy", "scalar")


@dataclass(slots=True, eq=False)
class LeafRecord:
    """One leaf of an item: a Python value, or an array with its grid and, for each chunk, the index
    of the file that holds it.

    Grids and lists of files are shared by the leaves that have equal ones. `per_process`: the value
    is a tuple of every process's, and the array [processes, ...]. `restoring.per_process` makes one
    process's leaf of it; `refusal` says why where that process has no copy.
    """

    path: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    impl: str = ""
    sharding: Any = None
    grid: Grid | None = None
    files: Ints | None = None
    value: Any = None
    per_process: bool = False
    refusal: str = ""

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of an array; a record is only parsed if it is one of the list."""
        dtype = dtype_named(self.dtype)
        assert dtype is not None
        return dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.numpy_dtype.itemsize if self.dtype else 0


@dataclass(frozen=True)
class ItemRecord:
    """One item of a step: kind "tree", "json" or "files", and its files (names relative to the
    step's folder).

    `names` are what the files of an item of files are called by their owner, with `/` between
    parts; a name is never a path here. With `per_process` their first part is the process, of five
    digits, whose they are.
    """

    name: str
    kind: str
    files: tuple[FileReport, ...]
    tree: Any = None
    leaves: tuple[LeafRecord, ...] = ()
    names: tuple[str, ...] = ()
    per_process: bool = False


@dataclass(frozen=True)
class Record:
    """A parsed, validated record. `path` is where it was read, for messages. Times are Unix
    seconds.

    `opening` counts the openings of the root for writing, up to the one that saved this, where the
    writer counted them.
    """

    path: str
    step: int
    writer_id: str
    processes: int
    started_s: float
    finished_s: float
    items: Mapping[str, ItemRecord]
    metrics: Mapping[str, Any]
    metadata: Any
    versions: Mapping[str, str]
    opening: int | None = None

    def file_names(self) -> list[str]:
        """Returns every file that the record names, relative to the step's folder."""
        return [file.name for item in self.items.values() for file in item.files]


def read_record(storage: Storage, step_dir: str) -> Record:
    """Reads `<step_dir>/checkpoint.json`; raises StepNotFound where there is none, Corrupt or
    HostileCheckpoint where it is damaged.

    A record that was copied into the folder of another step is Corrupt: who asks for that step is
    not to get this one's numbers.
    """
    return parse_fetched(fetch_record(storage, step_dir), storage, step_dir)


def parse_fetched(data: bytes, storage: Storage, step_dir: str) -> Record:
    """Parses a record that was read from `step_dir`; raises as `read_record`."""
    path = join(storage.root, step_dir, RECORD_NAME)
    with paused_gc():
        record = parse_record(data, path)
    number = other_step(record.step, join(storage.root, step_dir))
    if number is not None:
        message = (
            f"{path}: this is the record of step {record.step}, in the folder of step {number};"
            f" call the folder {record.step} again"
        )
        raise Corrupt(
            f"{message}, or by a name that is no number", path=path, file=path, step=number
        )
    return record


def fetch_record(storage: Storage, step_dir: str) -> bytes:
    """Returns the bytes of a record, unchecked; raises as `read_record` where there are none."""
    path = join(storage.root, step_dir, RECORD_NAME)
    try:
        return storage.fetch(join(step_dir, RECORD_NAME), RECORD_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StepNotFound(
            f"there is no checkpoint at {join(storage.root, step_dir)}: {path} is missing",
            path=path,
        ) from error
    except IsADirectoryError as error:
        raise Corrupt(f"{path}: the record is a folder", path=path, file=path) from error
    except OverflowError as error:
        raise HostileCheckpoint(f"{path}: {error}", path=path, file=path) from error


def check_record(data: bytes, path: str) -> None:
    """Reads a record that is about to be committed as every reader will. Raises HostileCheckpoint,
    Corrupt.
    """
    check_record_size(data, path)
    with paused_gc():
        parse_record(data, path)


def check_record_size(data: bytes, path: str) -> None:
    """Raises HostileCheckpoint for a record that is longer than readers take."""
    if len(data) > RECORD_LIMIT_BYTES:
        message = (
            f"{path}: its record would have {len(data):,} bytes, and readers take at most"
            f" {RECORD_LIMIT_BYTES:,}"
        )
        raise HostileCheckpoint(
            f"{message}; save fewer leaves, or shorter names, values and metadata", path=path
        )


def find_item(record: Record, item: str) -> ItemRecord:
    if item not in record.items:
        message = f"{record.path}: there is no item {item!r}; it has {sorted(record.items)}"
        raise StepNotFound(message, path=record.path, step=record.step)
    return record.items[item]


def chunk_runs(where: Ints) -> list[list[int]]:
    """Returns [first, step, count] of each stretch in which the file indices of chunks rise by one
    step.
    """
    runs = []
    at = 0
    steps = np.diff(where)
    ends = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps)).tolist()
    for end in ends:
        if end < at:
            continue
        runs.append([int(where[at]), int(steps[at]) if at < len(steps) else 0, end - at + 1])
        at = end + 1
    if at < len(where):
        runs.append([int(where[at]), 0, len(where) - at])
    return runs


def expand_runs(table: Any, files: int, limit: int = MAX_CHUNKS) -> list[Ints]:
    """Returns the file of each chunk, for each entry of a table of `chunk_runs`.

    Raises ValueError where there is no such file, or more chunks than `limit`.
    """
    if sum(whole(count) for runs in table for _, _, count in runs) > limit or any(
        count < 1 for runs in table for _, _, count in runs
    ):
        raise ValueError(f"the runs of chunks do not add up to at most {limit}")
    expanded = []
    for runs in table:
        found = np.concatenate(
            [
                whole(first) + int(step) * np.arange(count, dtype=np.int64)
                for first, step, count in runs
            ]
        )
        if found.min() < 0 or found.max() >= files:
            raise ValueError("a chunk lies in a file that is not there")
        expanded.append(found)
    return expanded


def is_sealed(data: bytes) -> bool:
    """Says whether a record is as it was written, by its checksum."""
    return data == sealed(body_of(data))


def parse_record(data: bytes, path: str) -> Record:
    """Parses and validates a record; raises Corrupt (checksum, syntax) or HostileCheckpoint (names,
    bounds), naming `path`.
    """
    if not is_sealed(data):
        raise Corrupt(
            f"{path}: the record's checksum does not fit its bytes; the file was damaged after it"
            " was written",
            path=path,
            file=path,
        )
    try:
        return _parse(json.loads(data), path)
    except (HostileCheckpoint, Corrupt):
        raise
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        OverflowError,
        RecursionError,
        MemoryError,
    ) as error:
        raise HostileCheckpoint(
            f"{path}: this is not a record that holdfast writes: {error!r}", path=path, file=path
        ) from error


def _parse(data: dict[str, Any], path: str) -> Record:
    if data["format"] != FORMAT:
        message = (
            f"{path}: the format is {data['format']!r}, this version reads {FORMAT!r}; read it with"
            " the version that wrote it"
        )
        raise HostileCheckpoint(message, path=path, file=path)
    items = {name: _parse_item(name, item, path) for name, item in data["items"].items()}
    return Record(
        path=path,
        step=whole(data["step"]),
        writer_id=str(data["writer"]),
        processes=whole(data["processes"]),
        started_s=float(data["started_s"]),
        finished_s=float(data["finished_s"]),
        items=items,
        metrics={
            name: float(value) if isinstance(value, str) else value
            for name, value in data["metrics"].items()
        },
        metadata=data["metadata"],
        versions=dict(data["versions"]),
        opening=whole(data["opening"]) if "opening" in data else None,
    )


def whole(value: Any, limit: int = _MAX_BYTES) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{value!r} is not a whole number up to {limit}")
    return value


def _parse_item(name: str, data: dict[str, Any], path: str) -> ItemRecord:
    if not ITEM_NAME.fullmatch(name):
        raise HostileCheckpoint(f"{path}: {name!r} is not a name for an item", path=path, file=path)
    files = tuple(_parse_file(name, *entry, path=path) for entry in data["files"])
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file is named twice")
    if data["kind"] == "json":
        return ItemRecord(name, "json", files)
    if data["kind"] == "files":
        return ItemRecord(
            name,
            "files",
            files,
            names=_parse_own_names(data["names"], len(files)),
            per_process=_is_per_process(data),
        )
    if data["kind"] != "tree":
        raise ValueError(f"no item of kind {data['kind']!r}")
    values = iter(data["values"])
    room = sum(min(file.head, HEADER_LIMIT_BYTES) for file in files) // MIN_ENTRY_BYTES
    parser = _LeafParser(
        expand_runs(data["cells"], len(files), min(room, MAX_CHUNKS)), data["shardings"]
    )
    leaves = tuple(
        _parse_value(leaf, values) if leaf["kind"] in _VALUE_KINDS else parser.parse(leaf)
        for leaf in data["leaves"]
    )
    claimed = sum(len(leaf.files) for leaf in leaves if leaf.files is not None)
    if claimed > room:
        raise ValueError(
            f"the leaves have {claimed} chunks, and the headers of the files have room for {room}"
        )
    if next(values, None) is not None or len({leaf.path for leaf in leaves}) != len(leaves):
        raise ValueError("leaves and values do not belong together")
    check_description(data["tree"], len(leaves), path)
    return ItemRecord(name, "tree", files, data["tree"], leaves)


def _parse_own_names(names: list[Any], count: int) -> tuple[str, ...]:
    for name in names:
        if not is_own_name(name):
            raise ValueError(f"{name!r} is no name for a file")
    if len(set(names)) != len(names) or len(names) != count:
        raise ValueError(f"{count} files have the names {names[:4]}")
    return tuple(names)


def _parse_file(item: str, name: str, size: Any, head: Any, crc: Any, *, path: str) -> FileReport:
    """Checks a file's name, here and nowhere else: it lies in its item's folder and is one that a
    writer makes.
    """
    folder, _, base = name.partition("/")
    if folder != item or not _FILE_NAME.fullmatch(base):
        raise HostileCheckpoint(
            f"{path}: {name!r} is not a name of a file in this step", path=path, file=path
        )
    return FileReport(name, whole(size), whole(head, whole(size)), whole(crc, 0xFFFFFFFF))


def is_file_of(name: str, process: int, save_id: str) -> bool:
    """Says whether a file in an item's folder is one that a process writes in a save."""
    match = _FILE_NAME.fullmatch(name)
    return match is not None and int(match[1]) == process and match[3] == save_id


def _parse_value(data: dict[str, Any], values: Iterator[Any]) -> LeafRecord:
    path = data["path"]
    kind = data["kind"]
    value_kind, text = next(values, ("", ""))
    if type(path) is not str or value_kind != kind:
        raise ValueError(f"leaf {path!r} is of kind {kind}, its value of {value_kind}")
    per_process = _is_per_process(data)
    texts = text if per_process and type(text) is list else [text]
    if not texts or not all(type(text) is str for text in texts):
        raise ValueError(f"leaf {path!r} has the value {text!r}")
    found = tuple(decode_value(kind, text) for text in texts)
    return LeafRecord(path, kind, value=found if per_process else found[0], per_process=per_process)


def _is_per_process(data: Any) -> bool:
    found = data.get("per_process", False)
    if type(found) is not bool:
        raise ValueError(f"a leaf, or an item of files, is kept per process: {found!r}")
    return found


class _LeafParser:
    """Parses the arrays of an item; what they share is checked once."""

    def __init__(self, chunk_files: list[Ints], shardings: list[Any]) -> None:
        self._chunk_files, self._shardings = (
            chunk_files,
            [parse_sharding(description) for description in shardings],
        )
        self._known: dict[tuple[Any, ...], tuple[tuple[int, ...], Grid, Ints]] = {}

    def parse(self, data: dict[str, Any]) -> LeafRecord:
        path, kind, (shard_shape, chunk_shape) = data["path"], data["kind"], data["grid"]
        if type(path) is not str or kind not in _ARRAY_KINDS:
            raise ValueError(f"leaf {path!r} is of kind {kind!r}")
        key = (data["dtype"], *data["shape"], *shard_shape, *chunk_shape, data["cells"])
        if key not in self._known:
            self._known[key] = self._check(
                data["dtype"], data["shape"], shard_shape, chunk_shape, data["cells"]
            )
        shape, grid, files = self._known[key]
        impl, sharding = str(data.get("impl", "")), self._shardings[whole(data["sharding"])]
        per_process = "per_process" in data and _is_per_process(data)
        if per_process and not shape:
            raise ValueError(f"leaf {path!r} is kept per process, and has no axis for them")
        return LeafRecord(
            path, kind, data["dtype"], shape, impl, sharding, grid, files, per_process=per_process
        )

    def _check(
        self, name: str, sizes: Any, shard_shape: Any, chunk_shape: Any, run: Any
    ) -> tuple[tuple[int, ...], Grid, Ints]:
        dtype, shape = dtype_named(name), tuple(map(whole, sizes))
        if (
            dtype is None
            or len(shape) > _MAX_RANK
            or math.prod(shape) * dtype.itemsize > _MAX_BYTES
        ):
            raise ValueError(f"an array has dtype {name!r} and shape {shape}")
        grid, files = (
            _parse_grid(shape, shard_shape, chunk_shape, dtype.itemsize),
            self._chunk_files[whole(run)],
        )
        if grid.num_chunks != len(files):
            raise ValueError(
                f"a grid has {grid.num_chunks} chunks, and the record lists {len(files)}"
            )
        return shape, grid, files


def _parse_grid(shape: tuple[int, ...], shard_sizes: Any, chunk_sizes: Any, itemsize: int) -> Grid:
    shard_shape, chunk_shape = tuple(map(whole, shard_sizes)), tuple(map(whole, chunk_sizes))
    if len(shard_shape) != len(shape) or len(chunk_shape) != len(shape):
        raise ValueError("a grid has another rank than its shape")
    if not math.prod(shape):
        if shard_shape != shape or chunk_shape != shape:
            raise ValueError("an array without elements has a grid")
    elif any(
        not 1 <= chunk <= shard or size % shard
        for size, shard, chunk in zip(shape, shard_shape, chunk_shape, strict=True)
    ):
        raise ValueError(f"the grid {shard_shape}, {chunk_shape} does not fit the shape {shape}")
    return Grid(shape, shard_shape, chunk_shape, itemsize)
