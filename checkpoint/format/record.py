"""checkpoint.json, the record of a step: parsed and validated by every reader.

A record is one JSON object. Its last member, `"crc32c"`, covers all bytes before its comma. Where
each chunk of a leaf lies is written as runs (first file, step, count) over the chunks of its grid,
and runs that several leaves share are written once (the member "cells").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..arrays.dtypes import Dtype, dtype_named
from ..arrays.sharding import parse_sharding
from ..errors import CheckpointError, Corrupt, HostileCheckpoint, StepNotFound
from ..storage.base import Readable
from ..storage.path import join
from ..storage.sure_read import read_surely
from ..storage.tombstone import RECORD_NAME, is_sealed
from .grid import Grid, Ints, Shape
from .item_report import FILE_NAME, SAVE_ID, FileReport
from .limits import HEADER_LIMIT_BYTES, ITEM_NAME, MALFORMED, RECORD_LIMIT_BYTES
from .own_files import is_folder_name, is_own_name
from .static_data import parse_static_data
from .step_folders import other_step
from .tree import check_description, paused_gc
from .values import decode_value

FORMAT = "holdfast/1"
MAX_CHUNKS = 1 << 24  # in the table of an item
MIN_ENTRY_BYTES = 50  # of a chunk in the header of its pack
_MAX_RANK = 64
_MAX_BYTES = 1 << 60
_VALUE_KINDS = ("bool", "int", "float", "complex", "str", "bytes")
_ARRAY_KINDS = ("array", "key", "numpy", "scalar")


@dataclass(slots=True, eq=False)
class LeafRecord:
    """One leaf of an item: a Python value, or an array with its grid.

    `files` is, for each chunk, the index of the file that holds it. Leaves with equal grids or
    files share them. `per_process`: the value is a tuple of every process's, and the array
    [processes, ...]. `restoring.per_process` makes one process's leaf of it; `refusal` says why
    where that process has no copy. `weak`: the array was of a weak type. An "unreadable" one is of
    a dtype `impl` of another layout's that numpy lacks: its bytes, with the refusal.
    """

    path: str
    kind: str
    dtype: str = ""
    shape: Shape = ()
    impl: str = ""
    sharding: Any = None
    grid: Grid | None = None
    files: Ints | None = None
    value: Any = None
    per_process: bool = False
    refusal: str = ""
    weak: bool = False

    @property
    def numpy_dtype(self) -> Dtype:
        """The dtype of an array; a record is only parsed if it is one of the list."""
        dtype = dtype_named(self.dtype)
        assert dtype is not None
        return dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.numpy_dtype.itemsize if self.dtype else 0


@dataclass(frozen=True)
class ItemRecord:
    """One item of a step: kind "tree", "json" or "files", and its files.

    The files' names are relative to the step's folder. `names` are those that the owner of an item
    of files gave them, with `/` between parts; here a name is never a path. With `per_process` the
    first part is the number of their process, of five digits. `statics` are the static data of
    nodes, by the nodes' paths (see `static_data`).
    """

    name: str
    kind: str
    files: tuple[FileReport, ...]
    tree: Any = None
    leaves: tuple[LeafRecord, ...] = ()
    names: tuple[str, ...] = ()
    per_process: bool = False
    statics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A parsed, validated record.

    `path` is where it was read, for messages. Times are Unix seconds. `opening` counts the openings
    of the root for writing, up to the one that saved this, where the writer counted them.
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


def read_record(storage: Readable, step_dir: str) -> Record:
    """Reads `<step_dir>/checkpoint.json`.

    Raises StepNotFound where there is none, Corrupt or HostileCheckpoint where it is damaged. A
    record that was copied into the folder of another step is Corrupt: a restore of that step must
    not return the numbers of this one.
    """
    return parse_fetched(fetch_record(storage, step_dir), storage, step_dir)


def parse_fetched(data: bytes, storage: Readable, step_dir: str) -> Record:
    """Parses a record that was read from `step_dir`; raises as `read_record`."""
    path = join(storage.root, step_dir, RECORD_NAME)
    with paused_gc():
        record = parse_record(data, path)
    number = other_step(record.step, storage, step_dir)
    if number is not None:
        raise Corrupt(
            f"{path}: this is the record of step {record.step}, in the folder of step {number};"
            f" call the folder as step {record.step} again, or by a name that is no step's",
            path=path,
            file=path,
            step=number,
        )
    return record


class SeenRecord:
    """The record that was shown last: who restores that step next need not parse it again.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._data = b""
        self._record: Record | None = None

    def show(self, storage: Readable, step_dir: str) -> Record:
        """Reads a record, for one who may change its metadata; raises as `read_record`."""
        data = fetch_record(storage, step_dir)
        self._record = parse_fetched(data, storage, step_dir)
        self._data = data
        return self._record

    def read(self, storage: Readable, step_dir: str) -> Record:
        """Reads a record, for one who reads its items alone; raises as `read_record`."""
        data = fetch_record(storage, step_dir)
        seen = self._record
        path = join(storage.root, step_dir, RECORD_NAME)
        if seen is not None and seen.path == path and self._data == data:
            return seen
        return parse_fetched(data, storage, step_dir)


def fetch_record(storage: Readable, step_dir: str) -> bytes:
    """Returns the bytes of a record, unchecked; raises as `read_record` where there are none."""
    name = join(step_dir, RECORD_NAME)
    path = join(storage.root, name)
    try:
        return read_surely(storage, name, lambda: storage.fetch(name, RECORD_LIMIT_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StepNotFound(
            f"there is no checkpoint at {join(storage.root, step_dir)}: {path} is missing",
            path=path,
        ) from error
    except IsADirectoryError as error:
        raise Corrupt.at(path, "the record is a folder") from error
    except OverflowError as error:
        raise HostileCheckpoint.at(path, str(error)) from error


def check_record(data: bytes, path: str) -> None:
    """Parses a record before its commit as readers will; raises HostileCheckpoint or Corrupt."""
    check_record_size(data, path)
    with paused_gc():
        parse_record(data, path)


def check_record_size(data: bytes, path: str) -> None:
    """Raises HostileCheckpoint for a record that is longer than readers take."""
    if len(data) > RECORD_LIMIT_BYTES:
        raise HostileCheckpoint(
            f"{path}: its record would have {len(data):,} bytes, and readers take at most"
            f" {RECORD_LIMIT_BYTES:,}; save fewer leaves, or shorter names, values and metadata",
            path=path,
        )


def chunk_runs(where: Ints) -> list[list[int]]:
    """Returns [first, step, count] of each stretch where file indices rise by one step."""
    if not len(where):
        return []
    runs = []
    at = 0
    steps = np.diff(where)
    ends = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps)).tolist()
    for end in ends:
        runs.append([int(where[at]), int(steps[at]) if at < len(steps) else 0, end - at + 1])
        at = end + 1
    return runs


def expand_runs(table: Any, files: int, limit: int = MAX_CHUNKS) -> list[Ints]:
    """Returns the file of each chunk, for each entry of a table of `chunk_runs`.

    Raises ValueError where there is no such file, or more chunks than `limit`.
    """
    counts = [whole(count) for runs in table for _, _, count in runs]
    if sum(counts) > limit or 0 in counts:
        raise ValueError(f"the runs of chunks do not add up to at most {limit}")
    expanded = []
    for runs in table:
        where = np.concatenate(
            [
                whole(first) + int(step) * np.arange(count, dtype=np.int64)
                for first, step, count in runs
            ]
        )
        if where.min() < 0 or where.max() >= files:
            raise ValueError("a chunk lies in a file that is not there")
        expanded.append(where)
    return expanded


def parse_record(data: bytes, path: str) -> Record:
    """Parses and validates a record.

    Raises Corrupt (checksum) or HostileCheckpoint (syntax, names, bounds), naming `path`, and
    CheckpointError where there is no memory for it.
    """
    if not is_sealed(data):
        raise Corrupt.at(
            path,
            "the record's checksum does not fit its bytes; the file was damaged after it was"
            " written",
        )
    try:
        return _parse(json.loads(data), path)
    except MALFORMED as error:
        raise HostileCheckpoint.at(
            path, f"this is not a record that holdfast writes: {error!r}"
        ) from error
    except MemoryError as error:
        raise CheckpointError(
            f"{path}: there is no memory for this record of {len(data):,} bytes; read it on a"
            " machine that has more, or where more is free",
            path=path,
        ) from error


def _parse(data: dict[str, Any], path: str) -> Record:
    if data["format"] != FORMAT:
        raise HostileCheckpoint.at(
            path,
            f"the format is {data['format']!r}, this version reads {FORMAT!r}; read it with the"
            " version that wrote it",
        )
    return Record(
        path=path,
        step=whole(data["step"]),
        writer_id=_parse_save_id(data["writer"], path),
        processes=whole(data["processes"]),
        started_s=float(data["started_s"]),
        finished_s=float(data["finished_s"]),
        items={name: _parse_item(name, item, path) for name, item in data["items"].items()},
        metrics={name: _parse_metric(value) for name, value in data["metrics"].items()},
        metadata=data["metadata"],
        versions=dict(data["versions"]),
        opening=whole(data["opening"]) if "opening" in data else None,
    )


def _parse_save_id(save_id: Any, path: str) -> str:
    """Checks the id of the save, which becomes a part of names in `.holdfast/`."""
    if type(save_id) is not str or not SAVE_ID.fullmatch(save_id):
        raise HostileCheckpoint.at(
            path, f"{save_id!r:.100} is no id of a save: expected 8 or 16 hexadecimal digits"
        )
    return save_id


def _parse_metric(value: Any) -> Any:
    """Returns a metric; those that JSON has no number for ("nan") are strings in a record."""
    return float(value) if isinstance(value, str) else value


def whole(value: Any, limit: int = _MAX_BYTES) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{value!r} is not a whole number up to {limit}")
    return value


def _parse_item(name: str, data: dict[str, Any], path: str) -> ItemRecord:
    if not ITEM_NAME.fullmatch(name):
        raise HostileCheckpoint.at(path, f"{name!r} is not a name for an item")
    files = _parse_files(name, data["files"], path)
    match data["kind"]:
        case "json":
            return ItemRecord(name, "json", files)
        case "files":
            names = _parse_own_names(data["names"], files)
            per_process = _is_per_process(data)
            return ItemRecord(name, "files", files, names=names, per_process=per_process)
        case "tree":
            return _parse_tree(name, data, files, path)
    raise ValueError(f"no item of kind {data['kind']!r}")


def _parse_tree(
    name: str, data: dict[str, Any], files: tuple[FileReport, ...], path: str
) -> ItemRecord:
    leaves = _parse_leaves(data, files)
    check_description(data["tree"], len(leaves), path)
    statics = {node: parse_static_data(form) for node, form in data.get("statics", {}).items()}
    return ItemRecord(name, "tree", files, data["tree"], leaves, statics=statics)


def _parse_leaves(data: dict[str, Any], files: Sequence[FileReport]) -> tuple[LeafRecord, ...]:
    # A short record could claim chunks without end: files bound them, by the room in their headers.
    room = sum(min(file.head, HEADER_LIMIT_BYTES) for file in files) // MIN_ENTRY_BYTES
    parser = _LeafParser(
        expand_runs(data["cells"], len(files), min(room, MAX_CHUNKS)),
        [parse_sharding(description) for description in data["shardings"]],
    )
    values = iter(data["values"])
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
    return leaves


def _parse_own_names(names: list[Any], files: Sequence[FileReport]) -> tuple[str, ...]:
    for name in names:
        if not is_own_name(name):
            raise ValueError(f"{name!r} is no name for a file")
    if len(set(names)) != len(names) or len(names) != len(files):
        raise ValueError(f"{len(files)} files have the names {names[:4]}")
    for name, file in zip(names, files, strict=True):
        if is_folder_name(name) and (file.size or file.crc):
            raise ValueError(f"{name!r} is an empty folder, and has {file.size} bytes")
    return tuple(names)


def _parse_files(item: str, entries: Any, path: str) -> tuple[FileReport, ...]:
    files = tuple(_parse_file(item, entry, path) for entry in entries)
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file is named twice")
    return files


def _parse_file(item: str, entry: Any, path: str) -> FileReport:
    """Checks a file's name, here and nowhere else.

    The file lies in its item's folder, and its name is one that a writer makes.
    """
    name, size, head, crc = entry
    folder, _, base = name.partition("/")
    if folder != item or not FILE_NAME.fullmatch(base):
        raise HostileCheckpoint.at(path, f"{name!r} is not a name of a file in this step")
    return FileReport(name, whole(size), whole(head, whole(size)), whole(crc, 0xFFFFFFFF))


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
    decoded = tuple(decode_value(kind, text) for text in texts)
    value = decoded if per_process else decoded[0]
    return LeafRecord(path, kind, value=value, per_process=per_process)


def _is_per_process(data: Any) -> bool:
    per_process = data.get("per_process", False)
    if type(per_process) is not bool:
        raise ValueError(f"a leaf, or an item of files, is kept per process: {per_process!r}")
    return per_process


def _is_weak(data: Any) -> bool:
    weak = data.get("weak", False)
    if type(weak) is not bool or (weak and data["kind"] != "array"):
        raise ValueError(f"a leaf of kind {data['kind']!r} is weak: {weak!r}")
    return weak


class _Layout(NamedTuple):
    """What leaves of one dtype, shape, grid and run of files share."""

    shape: Shape
    grid: Grid
    files: Ints


@dataclass(frozen=True)
class _LeafParser:
    """Parses the arrays of an item; what they share is checked once."""

    chunk_files: list[Ints]
    shardings: list[Any]
    layouts: dict[tuple[Any, ...], _Layout] = field(default_factory=dict)

    def parse(self, data: dict[str, Any]) -> LeafRecord:
        path = data["path"]
        kind = data["kind"]
        if type(path) is not str or kind not in _ARRAY_KINDS:
            raise ValueError(f"leaf {path!r} is of kind {kind!r}")
        layout = self._layout_of(data)
        sharding = self.shardings[whole(data["sharding"])]
        if sharding is not None and len(sharding.get("spec", ())) > len(layout.shape):
            raise ValueError(f"leaf {path!r} has {len(layout.shape)} axes, its sharding more")
        per_process = _is_per_process(data)
        if per_process and not layout.shape:
            raise ValueError(f"leaf {path!r} is kept per process, and has no axis for them")
        return LeafRecord(
            path,
            kind,
            data["dtype"],
            layout.shape,
            impl=str(data.get("impl", "")),
            sharding=sharding,
            grid=layout.grid,
            files=layout.files,
            per_process=per_process,
            weak=_is_weak(data),
        )

    def _layout_of(self, data: dict[str, Any]) -> _Layout:
        shard_shape, chunk_shape = data["grid"]
        key = (data["dtype"], *data["shape"], *shard_shape, *chunk_shape, data["cells"])
        layout = self.layouts.get(key)
        if layout is None:
            layout = self.layouts[key] = self._parse_layout(data)
        return layout

    def _parse_layout(self, data: dict[str, Any]) -> _Layout:
        dtype = dtype_named(data["dtype"])
        shape = tuple(map(whole, data["shape"]))
        if (
            dtype is None
            or len(shape) > _MAX_RANK
            or math.prod(shape) * dtype.itemsize > _MAX_BYTES
        ):
            raise ValueError(f"an array has dtype {data['dtype']!r} and shape {shape}")
        grid = _parse_grid(shape, data["grid"], dtype.itemsize)
        files = self.chunk_files[whole(data["cells"])]
        if grid.num_chunks != len(files):
            raise ValueError(
                f"a grid has {grid.num_chunks} chunks, and the record lists {len(files)}"
            )
        return _Layout(shape, grid, files)


def _parse_grid(shape: Shape, sizes: Any, itemsize: int) -> Grid:
    shard_shape, chunk_shape = (tuple(map(whole, each)) for each in sizes)
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
