"""Compares two checkpoints of any layouts, leaf by leaf, in bounded memory."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..arrays.dtypes import HostArray
from ..format.record import LeafRecord
from ..layouts.base import CheckpointInfo, CheckpointReader, read_leaves
from ..restoring.match import show_leaf
from ..restoring.per_process import PerProcessSelection
from ..restoring.restore import allocate

BATCH_BYTES = 64 << 20
COMPARED = 1 << 20  # elements at once


@dataclass(frozen=True)
class LeafDifference:
    """One leaf that differs.

    `what` is "only in A", "only in B", "type", "shape", "dtype" or "value"; the numbers are those
    of "value", 0 for texts, JSON and files. `path` is a leaf's, a file's own name, or "" for the
    whole item. It begins with "process 3: " where each process keeps its own. `max_abs` and
    `max_rel` are over the elements that are finite on both sides. `count` elements of `size`
    differ; `not_finite` of them are NaN or infinite on a side. A NaN differs from anything but the
    same bits.
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
    not_finite: int = 0


def by_size(difference: LeafDifference) -> tuple[bool, bool, float, float]:
    """Returns what sorts differences, the largest first.

    What has no size, such as another shape or text, is before all numbers, and a leaf that has
    become NaN before all others.
    """
    return (
        difference.size > 0,
        not difference.not_finite,
        -difference.max_abs,
        -difference.max_rel,
    )


class Shown(NamedTuple):
    """A value to compare, and how it is shown."""

    value: Any
    text: str


Values: TypeAlias = Mapping[str, Shown]
Read: TypeAlias = tuple[LeafRecord, HostArray]


def compare(a: CheckpointReader, b: CheckpointReader) -> Iterator[LeafDifference]:
    """Yields what differs between two checkpoints, item by item.

    Blocks. Raises Corrupt, which names file and leaf.
    """
    items_a, items_b = _paired_items(a, b)
    for name in sorted(items_a.keys() | items_b.keys()):
        if name not in items_a or name not in items_b:
            yield LeafDifference(name, "", "only in B" if name not in items_a else "only in A")
            continue
        item_a = items_a[name]
        item_b = items_b[name]
        kind = a.info.items[item_a]
        other = b.info.items[item_b]
        copies = a.info.copies(item_a)
        if kind != other:
            yield LeafDifference(name, "", "type", a=kind, b=other)
            continue
        if kind == "tree":
            yield from _compare_trees(a, b, item_a, item_b)
            continue
        if copies != b.info.copies(item_b):
            owned_a = _owned(kind, a.info, item_a)
            yield LeafDifference(name, "", "type", a=owned_a, b=_owned(other, b.info, item_b))
            continue
        read = _json_values if kind == "json" else _digests
        for owner in copies:
            prefix = "" if owner is None else f"process {owner}: "
            values_a = read(a, item_a, owner)
            yield from _compare_values(name, prefix, values_a, read(b, item_b, owner))


def _paired_items(
    a: CheckpointReader, b: CheckpointReader
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the items of both by a common name.

    Where each has one tree alone, these are compared whatever they are called.
    """
    names_a = {name: name for name in a.info.items}
    names_b = {name: name for name in b.info.items}
    trees_a = [name for name, kind in a.info.items.items() if kind != "files"]
    trees_b = [name for name, kind in b.info.items.items() if kind != "files"]
    if len(trees_a) == len(trees_b) == 1 and trees_a != trees_b and trees_a[0] not in names_b:
        names_b = {trees_a[0] if name == trees_b[0] else name: name for name in names_b}
    return names_a, names_b


def _owned(kind: str, info: CheckpointInfo, item: str) -> str:
    return f"{kind} of each of {info.owners[item]} processes" if item in info.owners else kind


def _json_values(checkpoint: CheckpointReader, item: str, owner: int | None) -> Values:
    """Returns the one value, under the name ""."""
    value = checkpoint.json(item, owner or 0)
    return {"": Shown(value, repr(value)[:200])}


def _digests(checkpoint: CheckpointReader, item: str, owner: int | None) -> Values:
    """Returns the files' digests by their own names; a piece of a file at a time is in memory."""
    digests: dict[str, Shown] = {}
    for name, pieces in checkpoint.files(item, PerProcessSelection(owner or 0)):
        digest = hashlib.blake2b()
        size = 0
        for piece in pieces:
            digest.update(piece)
            size += piece.nbytes
        text = f"{size:,} bytes, {digest.hexdigest()[:8]}"
        digests[name] = Shown(digest.digest(), text)
    return digests


def _compare_values(item: str, prefix: str, a: Values, b: Values) -> Iterator[LeafDifference]:
    """Yields what differs between values by name."""
    nothing = Shown(None, "")
    for name in sorted(a.keys() | b.keys()):
        one = a.get(name, nothing)
        other = b.get(name, nothing)
        path = f"{prefix}{name}"
        if name not in a or name not in b:
            what = "only in B" if name not in a else "only in A"
            yield LeafDifference(item, path, what, a=one.text, b=other.text)
        elif one.value != other.value:
            path = path.removesuffix(": ")
            yield LeafDifference(item, path, "value", a=one.text, b=other.text)


def _compare_trees(
    a: CheckpointReader, b: CheckpointReader, item_a: str, item_b: str
) -> Iterator[LeafDifference]:
    leaves_a = {leaf.path: leaf for leaf in a.item(item_a).leaves}
    leaves_b = {leaf.path: leaf for leaf in b.item(item_b).leaves}
    both: list[tuple[LeafRecord, LeafRecord]] = []
    for path in [*leaves_a, *(path for path in leaves_b if path not in leaves_a)]:
        one = leaves_a.get(path)
        other = leaves_b.get(path)
        unlike = _compare_kinds(item_a, path, one, other)
        if unlike is not None:
            yield unlike
        elif one is not None and other is not None and one.grid is not None:
            both.append((one, other))
    yield from _compare_arrays(_arrays(a, item_a, both, 0), _arrays(b, item_b, both, 1), item_a)


def _compare_arrays(a: Iterator[Read], b: Iterator[Read], item: str) -> Iterator[LeafDifference]:
    for (one, array), (other, other_array) in zip(a, b, strict=True):
        gap = difference(array, other_array)
        if gap is not None:
            shown = show_leaf(other)
            found = LeafDifference(item, one.path, "value", a=show_leaf(one), b=shown)
            yield _by(found, gap, array.size)


def _arrays(
    checkpoint: CheckpointReader,
    item: str,
    pairs: Sequence[tuple[LeafRecord, LeafRecord]],
    side: int,
) -> Iterator[Read]:
    """Yields the arrays of one side of all pairs."""
    leaves = [pair[side] for pair in pairs]
    reader = checkpoint.reader(item)
    return read_leaves(reader, leaves, batch_bytes=BATCH_BYTES, allocate=allocate)


def _compare_kinds(
    item: str, path: str, a: LeafRecord | None, b: LeafRecord | None
) -> LeafDifference | None:
    if b is None:
        assert a is not None
        return LeafDifference(item, path, "only in A", a=show_leaf(a))
    if a is None:
        return LeafDifference(item, path, "only in B", b=show_leaf(b))
    if a.grid is None and b.grid is None:
        same_type = type(a.value) is type(b.value)
        if same_type and (a.value == b.value or repr(a.value) == repr(b.value)):
            return None
        return _compare_numbers(item, path, a.value, b.value)
    if a.grid is None or b.grid is None:
        what = "type"
    elif a.shape != b.shape:
        what = "shape"
    elif a.dtype != b.dtype:
        what = "dtype"
    else:
        return None
    return LeafDifference(item, path, what, a=show_leaf(a), b=show_leaf(b))


def _compare_numbers(item: str, path: str, a: Any, b: Any) -> LeafDifference:
    """Returns how two values of Python's differ: numbers by how much."""
    gap = None
    if type(a) is type(b) and isinstance(a, int | float):
        with contextlib.suppress(OverflowError):  # an int that no float holds
            gap = difference(np.array([a], np.float64), np.array([b], np.float64))
    found = LeafDifference(item, path, "value", a=repr(a)[:80], b=repr(b)[:80])
    return found if gap is None else _by(found, gap, 1)


def _by(found: LeafDifference, gap: Gap, size: int) -> LeafDifference:
    """Returns a difference that says by how much the `size` elements of a leaf differ."""
    return replace(
        found,
        max_abs=gap.max_abs,
        max_rel=gap.max_rel,
        count=gap.elements,
        size=size,
        not_finite=gap.not_finite,
    )


class Gap(NamedTuple):
    """The largest differences of two arrays, and how many elements differ.

    `not_finite` of these are NaN or infinite on a side.
    """

    max_abs: float
    max_rel: float
    elements: int
    not_finite: int


def difference(a: HostArray, b: HostArray) -> Gap | None:
    """Compares two arrays alike in shape and dtype. None if they are equal.

    Equal means equal bits: a NaN equals itself, and 0.0 does not equal -0.0.
    """
    gaps = [_gap_of(x, y) for x, y in _unequal(a.reshape(-1), b.reshape(-1))]
    if not gaps:
        return None
    max_abs, max_rel, elements, not_finite = zip(*gaps, strict=True)
    return Gap(max(max_abs), max(max_rel), sum(elements), sum(not_finite))


def _unequal(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the elements of two flat arrays whose bytes differ, of a stretch at a time."""
    for start in range(0, a.size, COMPARED):
        x = a[start : start + COMPARED]
        y = b[start : start + COMPARED]
        unequal = x.view(np.uint8) != y.view(np.uint8)
        if unequal.any():
            elements = unequal.reshape(-1, a.itemsize).any(axis=1)
            yield x[elements], y[elements]


def _gap_of(x: Any, y: Any) -> Gap:
    """Returns how elements differ, by those that are finite on both sides."""
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    # Signalling NaNs, infinities and the largest numbers warn.
    with np.errstate(invalid="ignore", over="ignore"):
        x = x.astype(wide)
        y = y.astype(wide)
        finite = np.isfinite(x) & np.isfinite(y)
        gaps = np.abs(x - y)[finite]
        scale = np.maximum(np.abs(x), np.abs(y))[finite]
    relative = np.divide(gaps, scale, out=np.zeros_like(gaps), where=scale > 0)
    max_abs = float(gaps.max(initial=0.0))
    return Gap(max_abs, float(relative.max(initial=0.0)), x.size, x.size - gaps.size)
