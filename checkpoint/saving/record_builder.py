"""Builds the record of a save, at the primary, from the plan and the reports of all processes."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..format.files import ItemReport
from ..format.record import FORMAT, chunk_runs
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
    expected = len(plan.files)
    assert len(files) == expected, f"item {name}: {len(files)} files were reported, {expected} planned"
    if "record" not in plan.cache:
        plan.cache["record"] = _static_text(plan)
    return f'{plan.cache["record"]},"values":{_dump(_values(plan, reports))},"files":{_dump(files)}}}'


def _values(plan: Plan, reports: Sequence[ItemReport]) -> list[Any]:
    """Returns the Python values: [type, text], and of those kept per process [type, [text of each process]]."""
    values: list[Any] = []
    others = [iter(report.values) for report in reports[1:]]
    for leaf, (kind, text) in zip(plan.value_leaves, reports[0].values, strict=True):
        values.append([kind, [text, *(next(other)[1] for other in others)] if leaf.per_process else text])
    return values


def _static_text(plan: Plan) -> str:
    """Returns what a plan alone says of its item: the tree, the leaves, and where their chunks are; a JSON object without its end."""
    files = np.array([rank << 32 | pack for rank, pack in plan.files], np.int64)
    known: dict[bytes, int] = {}  # what `runs` has, by its bytes
    runs: list[list[list[int]]] = []
    shardings: dict[str, int] = {}
    leaves = []
    for leaf, array in zip(plan.leaves, plan.arrays, strict=True):
        entry: dict[str, Any] = {"path": leaf.path, "kind": leaf.kind}
        if array is not None:
            where = np.searchsorted(files, array.writers << 32 | array.packs)
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
