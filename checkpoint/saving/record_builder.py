"""Builds the record of a save, at the primary, from the plan and the reports of all processes.

Checks too, before a byte is written, that readers will take the record.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from holdfast.coordination.distribution import DISTRIBUTION

from ..errors import CheckpointError, SaveFailed, UnsupportedLeaf
from ..format.grid import Ints
from ..format.item_report import FileReport, ItemReport, pack_name
from ..format.limits import HEADER_LIMIT_BYTES, JSON_LIMIT_BYTES, RECORD_LIMIT_BYTES
from ..format.record import FORMAT, check_record, chunk_runs, expand_runs
from ..format.values import count_value_bytes, encode_value
from ..storage.tombstone import sealed
from .pack_writer import plan_pack
from .plan import Plan
from .snapshot import Snapshot

FILE_BYTES = 220  # of a file's entry in a record, at most: names of items are short
# of a chunk's entry in a header, at most, besides six for each character of its name and what its
# prefixes take
ENTRY_BYTES = 200
_SOME_SAVE = "0" * 16
_EXAMPLES = {
    kind.__name__: encode_value(kind()) for kind in (bool, int, float, complex, str, bytes)
}


@dataclass(frozen=True)
class TreeText:
    """What a record says of a tree besides the reports.

    `text` is its JSON without its end, the same whichever process completes it. `plan` is the
    plan's hash, `files` how many there are. `values` says of each Python value whether it is kept
    per process, and `names` what the host-local arrays and the values are called whose CRCs reports
    have.
    """

    plan: str
    text: str
    files: int
    values: tuple[bool, ...]
    names: tuple[str, ...]


# What each item's plan is (JSON and files have none), and what the processes report of it.
Items: TypeAlias = Mapping[str, tuple[Plan | TreeText | None, Sequence[ItemReport]]]


@dataclass(frozen=True)
class RecordHead:
    """What a record says of a save besides items; `metrics` and `metadata` are of JSON types."""

    step: int
    writer: str
    processes: int
    started_s: float
    finished_s: float
    metrics: Mapping[str, Any] | None = None
    metadata: Any = None
    opening: int | None = None

    def to_text(self) -> str:
        """Returns its JSON without its end. Raises TypeError for what is not of JSON types."""
        members: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "writer": self.writer,
            "processes": self.processes,
            "started_s": self.started_s,
            "finished_s": self.finished_s,
            "versions": _versions(),
            "metrics": {
                # JSON has no number for those that are not finite.
                name: value if math.isfinite(value) else repr(float(value))
                for name, value in (self.metrics or {}).items()
            },
        }
        if self.opening is not None:
            members["opening"] = self.opening
        return f'{_dump(members)[:-1]},"metadata":{_metadata_text(self.metadata)}'


def build_record(head: RecordHead, items: Items) -> bytes:
    """Returns the bytes of checkpoint.json. An item of JSON or files has no plan."""
    bodies = [
        f"{json.dumps(name)}:{_item_text(name, plan, reports)}"
        for name, (plan, reports) in items.items()
    ]
    return _sealed(head, bodies)


def _sealed(head: RecordHead, bodies: Sequence[str]) -> bytes:
    return sealed(f'{head.to_text()},"items":{{{",".join(bodies)}}}'.encode())


def check_plan(plan: Plan) -> None:
    """Raises UnsupportedLeaf where no reader takes what a plan makes.

    That are the headers of this process's packs and, at the primary, the record: it is parsed as
    readers will, with stand-ins for what a plan does not say. Cheap beside making the plan; once a
    plan.
    """
    for pack in plan.own:
        _check_header(plan, pack)
    if plan.process == 0:
        try:
            check_record(_draft(plan), "the tree")
        except CheckpointError as error:
            raise UnsupportedLeaf(
                f"the tree cannot be saved, no reader would take its record: {error}"
            ) from error


def _check_header(plan: Plan, pack: int) -> None:
    chunks = plan.own[pack]
    # An estimate from above, by which most plans need no frame here.
    most = sum(6 * len(chunk.name) + ENTRY_BYTES + (chunk.nbytes >> 15) for chunk in chunks)
    if most <= HEADER_LIMIT_BYTES:
        return
    nbytes = plan_pack(plan, pack).frame.nbytes
    if nbytes > HEADER_LIMIT_BYTES:
        longest = max(chunks, key=lambda chunk: len(chunk.name))
        raise UnsupportedLeaf(
            f"the tree cannot be saved: the header of a pack would have {nbytes:,} bytes, a"
            f" reader takes {HEADER_LIMIT_BYTES:,}, and its {len(chunks):,} chunks have"
            f" names of up to {len(longest.name):,} characters; shorten the keys",
            leaf=plan.leaves[longest.leaf].path,
        )


def _draft(plan: Plan) -> bytes:
    """Returns a record of a plan with files and values that stand for any."""
    files: list[list[FileReport]] = [[] for _ in range(plan.process_count)]
    for rank, pack in plan.files:
        name = pack_name(rank, pack, _SOME_SAVE)
        files[rank].append(FileReport(name, HEADER_LIMIT_BYTES, HEADER_LIMIT_BYTES, 0))
    everything = tuple(_EXAMPLES[leaf.kind] for leaf in plan.value_leaves)
    own = tuple(_EXAMPLES[leaf.kind] for leaf in plan.value_leaves if leaf.per_process)
    reports = [
        ItemReport(rank, plan.hash, tuple(written), values=own if rank else everything)
        for rank, written in enumerate(files)
    ]
    return build_record(_draft_head(plan), {"state": (plan, reports)})


def _draft_head(plan: Plan) -> RecordHead:
    return RecordHead(0, _SOME_SAVE, plan.process_count, started_s=0, finished_s=0)


def check_sizes(trees: Mapping[str, Snapshot], name_bytes: int, metadata: Any) -> None:
    """Raises UnsupportedLeaf where a tree's Python values are too large, ValueError for the record.

    `name_bytes` say where JSON and files are. What the values of other processes add is known when
    the record is built.
    """
    parts = {
        "the metadata": len(_metadata_text(metadata).encode()),
        "the names of JSON items and files": name_bytes,
    }
    for name, snapshot in trees.items():
        plan = snapshot.plan
        sizes = [count_value_bytes(value) for value in snapshot.values]
        if sum(sizes) > JSON_LIMIT_BYTES:
            nbytes = max(sizes)
            path = plan.value_leaves[sizes.index(nbytes)].path
            raise UnsupportedLeaf(
                f"the Python values of the item {name!r} have {sum(sizes):,} bytes in the record, a"
                f" reader takes {JSON_LIMIT_BYTES:,}; the largest is {path!r} with"
                f" {nbytes:,}: put it into an array",
                leaf=path,
            )
        parts[f"the Python values of the item {name!r}"] = sum(sizes)
        tree_bytes = len(plan.cache.get("record", ""))
        parts[f"the tree of the item {name!r}"] = tree_bytes + FILE_BYTES * len(plan.files)
    if sum(parts.values()) > RECORD_LIMIT_BYTES:
        largest_part = max(parts, key=parts.__getitem__)
        raise ValueError(
            f"the record would have about {sum(parts.values()):,} bytes, a reader takes"
            f" {RECORD_LIMIT_BYTES:,}; {parts[largest_part]:,} of them are {largest_part}: save"
            " less of it, or put it into an array"
        )


def _metadata_text(metadata: Any) -> str:
    # As it was measured when it was taken.
    return json.dumps(metadata, separators=(",", ":"), ensure_ascii=False)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@functools.cache  # finding them takes longer than committing
def _versions() -> Mapping[str, str]:
    distributions = {"holdfast": DISTRIBUTION, "jax": "jax", "numpy": "numpy"}
    return {"python": platform.python_version()} | {
        key: importlib.metadata.version(name) for key, name in distributions.items()
    }


def _item_text(name: str, plan: Plan | TreeText | None, reports: Sequence[ItemReport]) -> str:
    files = [
        [f"{name}/{file.name}", file.size, file.head, file.crc]
        for report in reports
        for file in report.files
    ]
    if plan is None:
        return _dump(_plain_item(files, reports))
    tree = plan if isinstance(plan, TreeText) else tree_text(plan)
    end = f',"values":{_dump(_values(tree.values, reports))},"files":{_dump(files)}}}'
    if all(report.where is None for report in reports):
        assert len(files) == tree.files, (
            f"item {name}: {len(files)} files were reported, {tree.files} planned"
        )
        return tree.text + end
    assert isinstance(plan, Plan)
    # Incremental saves repeat a layout: its text is made, and parsed as readers will, once.
    layout = [(report.where, len(report.files)) for report in reports]
    if plan.cache.get("layout") != layout:
        text = _static_text(plan, _reported_files(plan, reports))
        draft = _sealed(_draft_head(plan), [f"{json.dumps(name)}:{text}{end}"])
        check_record(draft, f"the item {name!r}")
        plan.cache.update({"layout": layout, "laid out": text})
    laid_out: str = plan.cache["laid out"]
    return laid_out + end


def _plain_item(files: list[Any], reports: Sequence[ItemReport]) -> dict[str, Any]:
    """Returns what a record says of an item of JSON or of files."""
    names = [report.names for report in reports if report.names is not None]
    if not names:
        return {"kind": "json", "files": files}
    item: dict[str, Any] = {"kind": "files", "names": [own for each in names for own in each]}
    if reports[0].per_process:
        item["per_process"] = True
    item["files"] = files
    return item


def tree_text(plan: Plan) -> TreeText:
    """Returns what a record says of a tree whose files are as planned; made once a plan."""
    text = plan.once("record", lambda: _static_text(plan, _planned_files(plan)))
    names = (
        *(plan.leaves[index].path for index in plan.local_leaves),
        *(leaf.path for leaf in plan.value_leaves),
    )
    kept = tuple(leaf.per_process for leaf in plan.value_leaves)
    return TreeText(plan.hash, text, len(plan.files), kept, names=names)


def _planned_files(plan: Plan) -> list[Ints]:
    """Returns the file of each chunk of each array: a file a pack."""
    files = np.array([rank << 32 | pack for rank, pack in plan.files], np.int64)
    return [
        np.searchsorted(files, array.writers << 32 | array.packs)
        for array in plan.arrays
        if array is not None
    ]


def _reported_files(plan: Plan, reports: Sequence[ItemReport]) -> list[Ints]:
    """Returns the file of each chunk of each array, as the processes report it."""
    if all(array is None for array in plan.arrays):
        return []
    order = plan.once("order", lambda: _ChunkOrder.of(plan, len(reports)))
    first = 0
    files = []
    for report, count in zip(reports, order.counts, strict=True):
        own = np.zeros(0, np.int64)
        if report.where:
            own = expand_runs([report.where], len(report.files))[0]
        if len(own) != count:
            raise SaveFailed(
                f"process {report.process} says where {len(own)} of its {count} chunks are",
                process=report.process,
            )
        files.append(first + own)
        first += len(report.files)
    where = np.empty(len(order.chunks), np.int64)
    where[order.chunks] = np.concatenate(files)
    return np.split(where, order.ends[:-1])


class _ChunkOrder(NamedTuple):
    """The order in which writers report their chunks (see make_plan).

    `chunks` are indices among all chunks, `counts` says how many each writer has, and `ends` where
    the chunks of each array end.
    """

    chunks: Ints
    counts: list[int]
    ends: Ints

    @classmethod
    def of(cls, plan: Plan, num_writers: int) -> Self:
        arrays = [array for array in plan.arrays if array is not None]
        lengths = [len(array.writers) for array in arrays]
        writers, packs = plan.deal
        sizes = np.concatenate([array.grid.sizes for array in arrays])
        itemsizes = np.repeat([array.leaf.itemsize for array in arrays], lengths)
        # By writer, then pack, then as they lie in the file.
        chunks = np.lexsort((-itemsizes, sizes % 64 != 0, packs, writers))
        counts = np.bincount(writers, minlength=num_writers).tolist()
        return cls(chunks, counts, np.cumsum(lengths))


def _values(kept_per_process: Sequence[bool], reports: Sequence[ItemReport]) -> list[Any]:
    """Returns the Python values: [type, text], or [type, [text of each process]] if kept so."""
    others = [iter(report.values) for report in reports[1:]]
    return [
        [kind, [text, *(next(other)[1] for other in others)] if kept else text]
        for kept, (kind, text) in zip(kept_per_process, reports[0].values, strict=True)
    ]


def _static_text(plan: Plan, chunk_files: Sequence[Ints]) -> str:
    """Returns an item's tree, its leaves and the files of their chunks, as JSON without its end."""
    cells: dict[bytes, int] = {}
    shardings: dict[str, int] = {}
    leaves = []
    files = iter(chunk_files)
    for leaf, array in zip(plan.leaves, plan.arrays, strict=True):
        entry: dict[str, Any] = {"path": leaf.path, "kind": leaf.kind}
        if array is not None:
            where = next(files).tobytes()
            entry |= {
                "dtype": leaf.dtype,
                "shape": leaf.shape,
                "grid": [array.grid.shard_shape, array.grid.chunk_shape],
                "cells": cells.setdefault(where, len(cells)),
                "sharding": shardings.setdefault(_dump(leaf.sharding), len(shardings)),
            }
            if leaf.impl:
                entry["impl"] = leaf.impl
            if leaf.weak:
                entry["weak"] = True
        if leaf.per_process:
            entry["per_process"] = True
        leaves.append(entry)
    tables = {
        "kind": "tree",
        "tree": plan.tree,
        "leaves": leaves,
        "cells": [chunk_runs(np.frombuffer(where, np.int64)) for where in cells],
        "shardings": [json.loads(text) for text in shardings],
    }
    if plan.statics:
        tables["statics"] = plan.statics
    return _dump(tables)[:-1]
