"""Builds the record of a save, at the primary, from the plan and the reports of all processes."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import SaveFailed
from ..format.files import ItemReport
from ..format.grid import Ints
from ..format.record import FORMAT, chunk_runs, expand_runs
from ..storage.tombstone import sealed
from .plan import Plan


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
        "metrics": {name: value if math.isfinite(value) else repr(float(value)) for name, value in (metrics or {}).items()},
        "metadata": metadata,
    }
    bodies = [f"{json.dumps(name)}:{_item_text(name, plan, reports)}" for name, (plan, reports) in items.items()]
    body = f'{_dump(head)[:-1]},"items":{{{",".join(bodies)}}}'.encode()
    return sealed(body)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _versions() -> dict[str, str]:
    names = ("holdfast", "jax", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _item_text(name: str, plan: Plan | None, reports: Sequence[ItemReport]) -> str:
    files = [[f"{name}/{file.name}", file.size, file.head, file.crc] for report in reports for file in report.files]
    if plan is None:
        return _dump({"kind": "json", "files": files})
    if all(report.where is None for report in reports):
        assert len(files) == len(plan.files), f"item {name}: {len(files)} files were reported, {len(plan.files)} planned"
        if "record" not in plan.cache:
            plan.cache["record"] = _static_text(plan, _planned_files(plan))
        text = plan.cache["record"]
    else:
        text = _static_text(plan, _reported_files(plan, reports))
    return f'{text},"values":{_dump(_values(plan, reports))},"files":{_dump(files)}}}'


def _planned_files(plan: Plan) -> list[Ints]:
    """Returns the file of each chunk of each array: a file a pack."""
    files = np.array([rank << 32 | pack for rank, pack in plan.files], np.int64)
    return [np.searchsorted(files, array.writers << 32 | array.packs) for array in plan.arrays if array is not None]


def _reported_files(plan: Plan, reports: Sequence[ItemReport]) -> list[Ints]:
    """Returns the file of each chunk of each array, as the processes say; theirs are in the order of their packs (see make_plan)."""
    arrays = [array for array in plan.arrays if array is not None]
    writers, packs = (
        np.concatenate([np.zeros(0, np.int64), *found]) for found in zip(*((a.writers, a.packs) for a in arrays), strict=True)
    )
    sizes = np.concatenate([array.grid.sizes for array in arrays])
    itemsizes = np.concatenate([np.full(len(array.writers), array.leaf.itemsize) for array in arrays])
    order = np.lexsort((-itemsizes, sizes % 64 != 0, packs, writers))  # by writer, then pack, then as they lie in the file
    counts, first, found = np.bincount(writers, minlength=len(reports)), 0, list[Ints]()
    for report, count in zip(reports, counts.tolist(), strict=True):
        own = expand_runs([report.where], len(report.files))[0] if report.where else np.zeros(0, np.int64)
        if len(own) != count:
            raise SaveFailed(f"process {report.process} says where {len(own)} of its {count} chunks are", process=report.process)
        found.append(first + own)
        first += len(report.files)
    where = np.empty(len(writers), np.int64)
    where[order] = np.concatenate(found)
    return np.split(where, np.cumsum([len(array.writers) for array in arrays])[:-1])


def _values(plan: Plan, reports: Sequence[ItemReport]) -> list[Any]:
    """Returns the Python values: [type, text], and of those kept per process [type, [text of each process]]."""
    values: list[Any] = []
    others = [iter(report.values) for report in reports[1:]]
    for leaf, (kind, text) in zip(plan.value_leaves, reports[0].values, strict=True):
        values.append([kind, [text, *(next(other)[1] for other in others)] if leaf.per_process else text])
    return values


def _static_text(plan: Plan, chunk_files: Sequence[Ints]) -> str:
    """Returns an item's tree, its leaves, and where the chunks of each array are; a JSON object without its end."""
    known: dict[bytes, int] = {}  # what `runs` has, by its bytes
    runs: list[list[list[int]]] = []
    shardings: dict[str, int] = {}
    leaves, files = [], iter(chunk_files)
    for leaf, array in zip(plan.leaves, plan.arrays, strict=True):
        entry: dict[str, Any] = {"path": leaf.path, "kind": leaf.kind}
        if array is not None:
            where = next(files)
            key = where.tobytes()
            if key not in known:
                known[key] = len(runs)
                runs.append(chunk_runs(where))
            entry |= {
                "dtype": leaf.dtype,
                "shape": leaf.shape,
                "grid": [array.grid.shard_shape, array.grid.chunk_shape],
                "cells": known[key],
            }
            entry |= {"sharding": shardings.setdefault(_dump(leaf.sharding), len(shardings))}
            entry |= {"impl": leaf.impl} if leaf.impl else {}
        entry |= {"per_process": True} if leaf.per_process else {}
        leaves.append(entry)
    tables = {"kind": "tree", "tree": plan.tree, "leaves": leaves, "cells": runs, "shardings": [json.loads(text) for text in shardings]}
    return _dump(tables)[:-1]
