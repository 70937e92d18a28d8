"""Compares two checkpoints of any layouts, leaf by leaf, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..format.record import LeafRecord
from ..layouts.base import CheckpointInfo, CheckpointReader, read_leaves
from ..restoring.match import show_leaf
from ..restoring.per_process import PerProcessSelection
from ..restoring.restore import allocate

BATCH_BYTES = 64 << 20
COMPARED = 1 << 20  # elements at once


@dataclass(frozen=True)
class LeafDifference:
    """One leaf that differs. `what` is "only in A", "only in B", "type", "shape", "dtype" or
    "value"; the numbers are those of "value".

    `path` is a leaf's, a file's own name, or "" for the whole item, and begins with "process 3: "
    where each process keeps its own. `max_abs` and `max_rel` are over the elements that are finite
    on both sides; `count` is how many elements differ, of `size`. A NaN differs from anything but
    the same bits.
    """

    item: str
    path: str
    what: str
    a: str = ""
    b: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    count: int = 0
    size: int = 0


def compare(a: CheckpointReader, b: CheckpointReader) -> Iterator[LeafDifference]:
    """Yields what differs between two checkpoints, item by item. Blocks; raises Corrupt naming file
    and leaf.
    """
    items_a, items_b = _paired_items(a, b)
    for name in sorted(items_a.keys() | items_b.keys()):
        if name not in items_a or name not in items_b:
            yield LeafDifference(name, "", "only in B" if name not in items_a else "only in A")
            continue
        pair = items_a[name], items_b[name]
        kind = a.info.items[pair[0]]
        other = b.info.items[pair[1]]
        copies = a.info.copies(pair[0])
        if kind != other:
            yield LeafDifference(name, "", "type", kind, other)
        elif kind == "tree":
            yield from _compare_trees(a, b, *pair)
        elif copies != b.info.copies(pair[1]):
            yield LeafDifference(
                name, "", "type", _owned(kind, a.info, pair[0]), _owned(kind, b.info, pair[1])
            )
        else:
            for owner in copies:
                prefix = "" if owner is None else f"process {owner}: "
                read = _json_values if kind == "json" else _digests
                yield from _compare_values(
                    name, prefix, read(a, pair[0], owner), read(b, pair[1], owner)
                )


def _paired_items(
    a: CheckpointReader, b: CheckpointReader
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the items of both by a common name: where each has one tree alone, these are compared
    whatever they are called.
    """
    names_a, names_b = ({name: name for name in reader.info.items} for reader in (a, b))
    trees_a, trees_b = (
        [name for name, kind in reader.info.items.items() if kind != "files"] for reader in (a, b)
    )
    if len(trees_a) == len(trees_b) == 1 and trees_a != trees_b and trees_a[0] not in names_b:
        names_b = {trees_a[0] if name == trees_b[0] else name: name for name in names_b}
    return names_a, names_b


def _owned(kind: str, info: CheckpointInfo, item: str) -> str:
    return f"{kind} of each of {info.owners[item]} processes" if item in info.owners else kind


def _json_values(
    checkpoint: CheckpointReader, item: str, owner: int | None
) -> dict[str, tuple[Any, str]]:
    """Returns what `_compare_values` takes: the one value."""
    value = checkpoint.json(item, owner or 0)
    return {"": (value, repr(value)[:200])}


def _digests(
    checkpoint: CheckpointReader, item: str, owner: int | None
) -> dict[str, tuple[Any, str]]:
    """Returns what `_compare_values` takes, by the files' own names; a piece of a file at a time is
    in memory.
    """
    found: dict[str, tuple[Any, str]] = {}
    for name, pieces in checkpoint.files(item, PerProcessSelection(owner or 0)):
        digest, size = hashlib.blake2b(), 0
        for piece in pieces:
            digest.update(piece)
            size += piece.nbytes
        found[name] = digest.digest(), f"{size:,} bytes, {digest.hexdigest()[:8]}"
    return found


def _compare_values(
    item: str, prefix: str, a: Mapping[str, tuple[Any, str]], b: Mapping[str, tuple[Any, str]]
) -> Iterator[LeafDifference]:
    """Yields what differs between values by name; each comes with how it is shown."""
    for name in sorted(a.keys() | b.keys()):
        (value_a, shown_a), (value_b, shown_b) = (each.get(name, (None, "")) for each in (a, b))
        if name not in a or name not in b:
            yield LeafDifference(
                item,
                f"{prefix}{name}",
                "only in B" if name not in a else "only in A",
                shown_a,
                shown_b,
            )
        elif value_a != value_b:
            yield LeafDifference(
                item,
                f"{prefix}{name}".removesuffix(": "),
                "value",
                shown_a,
                shown_b,
                count=1,
                size=1,
            )


def _compare_trees(
    a: CheckpointReader, b: CheckpointReader, item_a: str, item_b: str
) -> Iterator[LeafDifference]:
    leaves_a = {leaf.path: leaf for leaf in a.item(item_a).leaves}
    leaves_b = {leaf.path: leaf for leaf in b.item(item_b).leaves}
    both: list[tuple[LeafRecord, LeafRecord]] = []
    for path in [*leaves_a, *(path for path in leaves_b if path not in leaves_a)]:
        one, other = leaves_a.get(path), leaves_b.get(path)
        found = _compare_kinds(item_a, path, one, other)
        if found is not None:
            yield found
        elif one is not None and other is not None and one.grid is not None:
            both.append((one, other))
    arrays_a = read_leaves(
        a.reader(item_a), [one for one, _ in both], batch_bytes=BATCH_BYTES, allocate=allocate
    )
    arrays_b = read_leaves(
        b.reader(item_b), [other for _, other in both], batch_bytes=BATCH_BYTES, allocate=allocate
    )
    for (one, array_a), (other, array_b) in zip(arrays_a, arrays_b, strict=True):
        gap = difference(array_a, array_b)
        if gap is not None:
            yield LeafDifference(
                item_a, one.path, "value", show_leaf(one), show_leaf(other), *gap, size=array_a.size
            )


def _compare_kinds(
    item: str, path: str, a: LeafRecord | None, b: LeafRecord | None
) -> LeafDifference | None:
    if a is None or b is None:
        present = a or b
        assert present is not None
        return LeafDifference(
            item,
            path,
            "only in A" if b is None else "only in B",
            *((show_leaf(present), "") if b is None else ("", show_leaf(present))),
        )
    shown = show_leaf(a), show_leaf(b)
    if (a.grid is None) != (b.grid is None):
        return LeafDifference(item, path, "type", *shown)
    if a.grid is None:
        same = type(a.value) is type(b.value) and (
            a.value == b.value or repr(a.value) == repr(b.value)
        )
        return (
            None
            if same
            else LeafDifference(
                item, path, "value", repr(a.value)[:80], repr(b.value)[:80], count=1, size=1
            )
        )
    if a.shape != b.shape:
        return LeafDifference(item, path, "shape", *shown)
    return LeafDifference(item, path, "dtype", *shown) if a.dtype != b.dtype else None


def difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float, float, int] | None:
    """Returns the largest absolute and relative difference of two arrays alike in shape and dtype,
    and how many elements differ.

    None if they are equal. Equal means equal bits, so that a NaN equals itself and 0.0 does not
    equal -0.0.
    """
    bytes_a, bytes_b = a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    if np.array_equal(bytes_a, bytes_b):
        return None
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    max_abs = max_rel = 0.0
    count = 0
    for start in range(0, flat_a.size, COMPARED):
        window = slice(start * a.itemsize, (start + COMPARED) * a.itemsize)
        unequal = (bytes_a[window] != bytes_b[window]).reshape(-1, a.itemsize).any(axis=1)
        count += int(unequal.sum())
        if not unequal.any():
            continue
        with np.errstate(
            invalid="ignore", over="ignore"
        ):  # of signalling NaNs, infinities and the largest numbers
            x = flat_a[start : start + COMPARED][unequal].astype(wide)
            y = flat_b[start : start + COMPARED][unequal].astype(wide)
            finite = np.isfinite(x) & np.isfinite(y)
            gap, scale = np.abs(x - y)[finite], np.maximum(np.abs(x), np.abs(y))[finite]
        max_abs = max(max_abs, float(gap.max(initial=0.0)))
        max_rel = max(
            max_rel,
            float(np.divide(gap, scale, out=np.zeros_like(gap), where=scale > 0).max(initial=0.0)),
        )
    return max_abs, max_rel, count
