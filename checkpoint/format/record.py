"""checkpoint.json: built by the primary of what all report, parsed and validated by every reader.

A record is one JSON object. Its last member, `"crc32c"`, covers all bytes before its comma. Where each chunk of a leaf lies is written as
runs (first file, step, count) over the cells of its grid, and runs that several leaves share are written once ("cells").
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
from .files import FileReport, decode_value
from .grid import Grid, Ints
from .limits import ITEM_NAME
from .sharding import parse_sharding
from .tree import check_description, paused_gc


def read_record(storage: Storage, step_dir: str) -> Record:
    """Reads `<step_dir>/checkpoint.json`; raises StepNotFound where there is none, Corrupt or HostileCheckpoint where it is damaged."""
    path = join(storage.root, step_dir, RECORD_NAME)
    try:
        data = storage.fetch(join(step_dir, RECORD_NAME), RECORD_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StepNotFound(f"there is no checkpoint at {join(storage.root, step_dir)}: {path} is missing", path=path) from error
    except IsADirectoryError as error:
        raise Corrupt(f"{path}: the record is a folder", path=path, file=path) from error
    except OverflowError as error:
        raise HostileCheckpoint(f"{path}: {error}", path=path, file=path) from error
    with paused_gc():
        return parse_record(data, path)


def find_item(record: Record, item: str) -> ItemRecord:
    if item not in record.items:
        message = f"{record.path}: there is no item {item!r}; it has {sorted(record.items)}"
        raise StepNotFound(message, path=record.path, step=record.step)
    return record.items[item]


FORMAT = "holdfast/1"

RECORD_LIMIT_BYTES = 256 << 20


_FILE_NAME = re.compile(r"(\d{5,})-(\d{5,}|j)-([0-9A-Za-z_-]{1,64})\.(safetensors|json)")

_VALUE_KINDS = ("bool", "int", "float", "complex", "str", "bytes")

_ARRAY_KINDS = ("array", "key", "numpy", "scalar")

_MAX_RANK = 64

_MAX_BYTES = 1 << 60

MAX_CELLS = 1 << 24


@dataclass(slots=True, eq=False)
class LeafRecord:
    """One leaf of an item: a Python value, or an array with its grid and, for each cell, the index of the file that holds it.

    Grids and lists of files are shared by the leaves that have equal ones. `per_process`: the value is a tuple of every process's, and the
    array [processes, ...]; but see _own.py, which makes one process's of it, and of one that it has no copy of a `refusal`.
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
    def nbytes(self) -> int:
        dtype = dtype_named(self.dtype)
        return math.prod(self.shape) * dtype.itemsize if dtype is not None else 0


@dataclass(frozen=True)
class ItemRecord:
    """One item of a step: kind "tree" or "json", and its files (names relative to the step's folder)."""

    name: str
    kind: str
    files: tuple[FileReport, ...]
    tree: Any = None
    leaves: tuple[LeafRecord, ...] = ()


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
        return [file.name for item in self.items.values() for file in item.files]


def cell_runs(where: Ints) -> list[list[int]]:
    """Returns [first, step, count] of each stretch in which file indices rise by one step."""
    runs, at = [], 0
    steps = np.diff(where)
    turns = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps)).tolist()
    for turn in turns:
        if turn < at:
            continue
        runs.append([int(where[at]), int(steps[at]) if at < len(steps) else 0, turn - at + 1])
        at = turn + 1
    if at < len(where):
        runs.append([int(where[at]), 0, len(where) - at])
    return runs


def expand_cells(table: Any, files: int) -> list[Ints]:
    """Returns the file of each cell, for each entry of the table; raises ValueError where one is not there."""
    if sum(count for runs in table for _, _, count in runs) > MAX_CELLS or any(count < 1 for runs in table for _, _, count in runs):
        raise ValueError(f"the runs of cells are not such as add up to at most {MAX_CELLS}")
    expanded = []
    for runs in table:
        found = np.concatenate([whole(first) + int(step) * np.arange(count, dtype=np.int64) for first, step, count in runs])
        if found.min() < 0 or found.max() >= files:
            raise ValueError("a cell lies in a file that is not there")
        expanded.append(found)
    return expanded


def parse_record(data: bytes, path: str) -> Record:
    """Parses and validates a record; raises Corrupt (checksum, syntax) or HostileCheckpoint (names, bounds), naming `path`."""
    if data != sealed(body_of(data)):
        raise Corrupt(
            f"{path}: the record's checksum does not fit its bytes; the file was damaged after it was written", path=path, file=path
        )
    try:
        return _parse(json.loads(data), path)
    except (HostileCheckpoint, Corrupt):
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        raise HostileCheckpoint(f"{path}: this is not a record that holdfast writes: {error!r}", path=path, file=path) from error


def _parse(data: dict[str, Any], path: str) -> Record:
    if data["format"] != FORMAT:
        message = f"{path}: the format is {data['format']!r}, this version reads {FORMAT!r}; read it with the version that wrote it"
        raise HostileCheckpoint(message, path=path, file=path)
    items = {name: _parse_item(name, item, path) for name, item in data["items"].items()}
    return Record(
        path=path,
        step=whole(data["step"]),
        writer=str(data["writer"]),
        processes=whole(data["processes"]),
        started_s=float(data["started_s"]),
        finished_s=float(data["finished_s"]),
        items=items,
        metrics=dict(data["metrics"]),
        metadata=data["metadata"],
        versions=dict(data["versions"]),
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
    if data["kind"] != "tree":
        raise ValueError(f"no item of kind {data['kind']!r}")
    values = iter(data["values"])
    parser = _LeafParser(expand_cells(data["cells"], len(files)), data["shardings"])
    leaves = tuple(_parse_value(leaf, values) if leaf["kind"] in _VALUE_KINDS else parser.parse(leaf) for leaf in data["leaves"])
    if next(values, None) is not None or len({leaf.path for leaf in leaves}) != len(leaves):
        raise ValueError("leaves and values do not belong together")
    check_description(data["tree"], len(leaves), path)
    return ItemRecord(name, "tree", files, data["tree"], leaves)


def _parse_file(item: str, name: str, size: Any, head: Any, crc: Any, *, path: str) -> FileReport:
    """Checks a file's name, here and nowhere else: it lies in its item's folder and is one that a writer makes."""
    folder, _, base = name.partition("/")
    if folder != item or not _FILE_NAME.fullmatch(base):
        raise HostileCheckpoint(f"{path}: {name!r} is not a name of a file in this step", path=path, file=path)
    return FileReport(name, whole(size), whole(head, whole(size)), whole(crc, 0xFFFFFFFF))


def _parse_value(data: dict[str, Any], values: Iterator[Any]) -> LeafRecord:
    path, kind = data["path"], data["kind"]
    stored, text = next(values, ("", ""))
    if type(path) is not str or stored != kind:
        raise ValueError(f"leaf {path!r} is of kind {kind}, its value of {stored}")
    own = _is_per_process(data)
    texts = text if own and type(text) is list else [text]
    if not texts or not all(type(text) is str for text in texts):
        raise ValueError(f"leaf {path!r} has the value {text!r}")
    found = tuple(decode_value(kind, text) for text in texts)
    return LeafRecord(path, kind, value=found if own else found[0], per_process=own)


def _is_per_process(data: Any) -> bool:
    found = data.get("per_process", False)
    if type(found) is not bool:
        raise ValueError(f"a leaf is kept per process: {found!r}")
    return found


class _LeafParser:
    """Parses the arrays of an item; what they share is checked once."""

    def __init__(self, cells: list[Ints], shardings: list[Any]) -> None:
        self._cells, self._shardings = cells, [parse_sharding(facts) for facts in shardings]
        self._known: dict[tuple[Any, ...], tuple[tuple[int, ...], Grid, Ints]] = {}

    def parse(self, data: dict[str, Any]) -> LeafRecord:
        path, kind, (part, sub) = data["path"], data["kind"], data["grid"]
        if type(path) is not str or kind not in _ARRAY_KINDS:
            raise ValueError(f"leaf {path!r} is of kind {kind!r}")
        key = (data["dtype"], *data["shape"], *part, *sub, data["cells"])
        if key not in self._known:
            self._known[key] = self._check(data["dtype"], data["shape"], part, sub, data["cells"])
        shape, grid, files = self._known[key]
        impl, sharding, own = str(data.get("impl", "")), self._shardings[whole(data["sharding"])], _is_per_process(data)
        if own and not shape:
            raise ValueError(f"leaf {path!r} is kept per process, and has no axis for them")
        return LeafRecord(path, kind, data["dtype"], shape, impl, sharding, grid, files, per_process=own)

    def _check(self, name: str, sizes: Any, part: Any, sub: Any, cells: Any) -> tuple[tuple[int, ...], Grid, Ints]:
        dtype, shape = dtype_named(name), tuple(map(whole, sizes))
        if dtype is None or len(shape) > _MAX_RANK or math.prod(shape) * dtype.itemsize > _MAX_BYTES:
            raise ValueError(f"an array has dtype {name!r} and shape {shape}")
        grid, files = _parse_grid(shape, part, sub, dtype.itemsize), self._cells[whole(cells)]
        if grid.num_chunks != len(files):
            raise ValueError(f"a grid has {grid.num_chunks} cells, and {len(files)} are told of")
        return shape, grid, files


def _parse_grid(shape: tuple[int, ...], part: Any, sub: Any, itemsize: int) -> Grid:
    part, sub = tuple(map(whole, part)), tuple(map(whole, sub))
    if len(part) != len(shape) or len(sub) != len(shape):
        raise ValueError("a grid has another rank than its shape")
    if not math.prod(shape):
        if part != shape or sub != shape:
            raise ValueError("an array without elements has a grid")
    elif any(not 1 <= small <= large or size % large for size, large, small in zip(shape, part, sub, strict=True)):
        raise ValueError(f"the grid {part}, {sub} does not fit the shape {shape}")
    return Grid(shape, part, sub, itemsize)
