"""checkpoint.json: built by the primary of what all report, parsed and validated by every reader.

A record is one JSON object. Its last member, `"crc32c"`, covers all bytes before its comma. Where each chunk of a leaf lies is written as
runs (first file, step, count) over the cells of its grid, and runs that several leaves share are written once ("cells").
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c

from ._dtypes import dtype_named
from ._errors import Corrupt, HostileCheckpoint
from ._plan import Grid, Ints, Plan
from ._reports import FileReport, ItemReport, decode_value
from ._tree import check_description

FORMAT = "holdfast/1"
_SEAL = b',"crc32c":"'
RECORD_LIMIT_BYTES = 256 << 20
ITEM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
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
    head = {
        "format": FORMAT,
        "step": step,
        "writer": writer,
        "processes": processes,
        "started_s": started_s,
        "finished_s": finished_s,
        "versions": _versions(),
        "metrics": dict(metrics or {}),
        "metadata": metadata,
    }
    bodies = [f"{json.dumps(name)}:{_item_text(name, plan, reports)}" for name, (plan, reports) in items.items()]
    body = f'{_dump(head)[:-1]},"items":{{{",".join(bodies)}}}'.encode()
    return sealed(body)


def sealed(body: bytes) -> bytes:
    """Returns a record's bytes: its JSON without the last brace, and the checksum of that as the last member."""
    return body + _SEAL + b'%08x"}\n' % crc32c(body)


def body_of(record: bytes) -> bytes:
    """Returns what `sealed` was given, b"" where there is no seal."""
    return record.rpartition(_SEAL)[0]


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _versions() -> dict[str, str]:
    names = ("holdfast", "jax", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _item_text(name: str, plan: Plan | None, reports: Sequence[ItemReport]) -> str:
    files = [[f"{name}/{file.name}", file.size, file.head, file.crc] for report in reports for file in report.files]
    if plan is None:
        return _dump({"kind": "json", "files": files})
    expected = len(plan.files)
    assert len(files) == expected, f"item {name}: {len(files)} files were reported, {expected} planned"
    if "record" not in plan.cache:
        plan.cache["record"] = _static_text(plan)
    return f'{plan.cache["record"]},"values":{_dump(_values(plan, reports))},"files":{_dump(files)}}}'


def _values(plan: Plan, reports: Sequence[ItemReport]) -> list[Any]:
    """Returns the Python values: [type, text], and of those kept per process [type, [text of each process]]."""
    values: list[Any] = []
    others = [iter(report.values) for report in reports[1:]]
    for leaf, (kind, text) in zip((leaf for leaf in plan.leaves if leaf.is_value), reports[0].values, strict=True):
        values.append([kind, [text, *(next(other)[1] for other in others)] if leaf.per_process else text])
    return values


def _static_text(plan: Plan) -> str:
    """Returns what a plan alone says of its item: the tree, the leaves, and where their cells are; a JSON object without its end."""
    files = np.array([rank << 32 | pack for rank, pack in plan.files], np.int64)
    cells: dict[bytes, int] = {}
    runs: list[list[list[int]]] = []
    shardings: dict[str, int] = {}
    leaves = []
    for leaf, array in zip(plan.leaves, plan.arrays, strict=True):
        facts: dict[str, Any] = {"path": leaf.path, "kind": leaf.kind}
        if array is not None:
            where = np.searchsorted(files, array.writers << 32 | array.packs)
            key = where.tobytes()
            if key not in cells:
                cells[key] = len(runs)
                runs.append(cell_runs(where))
            facts |= {"dtype": leaf.dtype, "shape": leaf.shape, "grid": [array.grid.part, array.grid.sub], "cells": cells[key]}
            facts |= {"sharding": shardings.setdefault(_dump(leaf.sharding), len(shardings))}
            facts |= {"impl": leaf.impl} if leaf.impl else {}
        facts |= {"per_process": True} if leaf.per_process else {}
        leaves.append(facts)
    tables = {"kind": "tree", "tree": plan.tree, "leaves": leaves, "cells": runs, "shardings": [json.loads(text) for text in shardings]}
    return _dump(tables)[:-1]


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


def _expand(table: Any, files: int) -> list[Ints]:
    """Returns the file of each cell, for each entry of the table; raises ValueError where one is not there."""
    if sum(count for runs in table for _, _, count in runs) > MAX_CELLS or any(count < 1 for runs in table for _, _, count in runs):
        raise ValueError(f"the runs of cells are not such as add up to at most {MAX_CELLS}")
    expanded = []
    for runs in table:
        found = np.concatenate([_whole(first) + int(step) * np.arange(count, dtype=np.int64) for first, step, count in runs])
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
        step=_whole(data["step"]),
        writer=str(data["writer"]),
        processes=_whole(data["processes"]),
        started_s=float(data["started_s"]),
        finished_s=float(data["finished_s"]),
        items=items,
        metrics=dict(data["metrics"]),
        metadata=data["metadata"],
        versions=dict(data["versions"]),
    )


def _whole(value: Any, limit: int = _MAX_BYTES) -> int:
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
    parser = _LeafParser(_expand(data["cells"], len(files)), data["shardings"])
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
    return FileReport(name, _whole(size), _whole(head, _whole(size)), _whole(crc, 0xFFFFFFFF))


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
        self._cells, self._shardings = cells, [_parse_sharding(facts) for facts in shardings]
        self._known: dict[tuple[Any, ...], tuple[tuple[int, ...], Grid, Ints]] = {}

    def parse(self, data: dict[str, Any]) -> LeafRecord:
        path, kind, (part, sub) = data["path"], data["kind"], data["grid"]
        if type(path) is not str or kind not in _ARRAY_KINDS:
            raise ValueError(f"leaf {path!r} is of kind {kind!r}")
        key = (data["dtype"], *data["shape"], *part, *sub, data["cells"])
        if key not in self._known:
            self._known[key] = self._check(data["dtype"], data["shape"], part, sub, data["cells"])
        shape, grid, files = self._known[key]
        impl, sharding, own = str(data.get("impl", "")), self._shardings[_whole(data["sharding"])], _is_per_process(data)
        if own and not shape:
            raise ValueError(f"leaf {path!r} is kept per process, and has no axis for them")
        return LeafRecord(path, kind, data["dtype"], shape, impl, sharding, grid, files, per_process=own)

    def _check(self, name: str, sizes: Any, part: Any, sub: Any, cells: Any) -> tuple[tuple[int, ...], Grid, Ints]:
        dtype, shape = dtype_named(name), tuple(map(_whole, sizes))
        if dtype is None or len(shape) > _MAX_RANK or math.prod(shape) * dtype.itemsize > _MAX_BYTES:
            raise ValueError(f"an array has dtype {name!r} and shape {shape}")
        grid, files = _parse_grid(shape, part, sub, dtype.itemsize), self._cells[_whole(cells)]
        if grid.cells != len(files):
            raise ValueError(f"a grid has {grid.cells} cells, and {len(files)} are told of")
        return shape, grid, files


def _parse_sharding(facts: Any) -> Any:
    """Returns a sharding if it is one that we write; it is only shown, and used by SAVED."""
    if facts is None or (isinstance(facts, dict) and (set(facts) in ({"device"}, {"other"}))):
        return facts
    if set(facts) != {"axes", "sizes", "devices", "spec"} or not all(isinstance(facts[key], list) for key in facts):
        raise ValueError("a sharding is not one that holdfast writes")
    return facts


def _parse_grid(shape: tuple[int, ...], part: Any, sub: Any, itemsize: int) -> Grid:
    part, sub = tuple(map(_whole, part)), tuple(map(_whole, sub))
    if len(part) != len(shape) or len(sub) != len(shape):
        raise ValueError("a grid has another rank than its shape")
    if not math.prod(shape):
        if part != shape or sub != shape:
            raise ValueError("an array without elements has a grid")
    elif any(not 1 <= small <= large or size % large for size, large, small in zip(shape, part, sub, strict=True)):
        raise ValueError(f"the grid {part}, {sub} does not fit the shape {shape}")
    return Grid(shape, part, sub, itemsize)


__all__ = [
    "ITEM_NAME",
    "RECORD_LIMIT_BYTES",
    "FileReport",
    "ItemRecord",
    "ItemReport",
    "LeafRecord",
    "Record",
    "build_record",
    "parse_record",
]
