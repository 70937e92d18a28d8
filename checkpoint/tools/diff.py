"""Compares two checkpoints of any layouts, leaf by leaf, in bounded memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..arrays.dtypes import HostArray
from ..format.record import LeafRecord
from ..format.values import encode_value
from ..layouts.base import CheckpointReader, read_leaves
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


class _Side(NamedTuple):
    """An item of one of the two checkpoints."""

    checkpoint: CheckpointReader
    item: str

    @property
    def what(self) -> str:
        """Its kind, and how many processes keep a copy of their own."""
        info = self.checkpoint.info
        kind = info.items[self.item]
        if self.item in info.owners:
            return f"{kind} of each of {info.owners[self.item]} processes"
        return kind


def compare(a: CheckpointReader, b: CheckpointReader) -> Iterator[LeafDifference]:
    """Yields what differs between two checkpoints, item by item.

    Blocks. Raises Corrupt, which names file and leaf.
    """
    called_in_b = _paired_items(a, b)
    for name in sorted(a.info.items.keys() | called_in_b.keys()):
        if name not in a.info.items:
            yield LeafDifference(name, "", "only in B")
        elif name not in called_in_b:
            yield LeafDifference(name, "", "only in A")
        else:
            yield from _compare_items(_Side(a, name), _Side(b, called_in_b[name]))


def _paired_items(a: CheckpointReader, b: CheckpointReader) -> dict[str, str]:
    """Returns the items of `b` by the names that they have in `a`.

    Where each has one tree alone, these are compared whatever they are called.
    """
    trees_a, trees_b = (
        [name for name, kind in side.info.items.items() if kind != "files"] for side in (a, b)
    )
    called = {name: name for name in b.info.items}
    if len(trees_a) == len(trees_b) == 1 and trees_a[0] not in called:
        called[trees_a[0]] = called.pop(trees_b[0])
    return called


def _compare_items(a: _Side, b: _Side) -> Iterator[LeafDifference]:
    item = a.item
    if a.what != b.what:
        yield LeafDifference(item, "", "type", a=a.what, b=b.what)
        return
    info = a.checkpoint.info
    kind = info.items[item]
    if kind == "tree":
        yield from _compare_trees(a, b)
        return
    values_of = _json_values if kind == "json" else _digests
    for owner in info.copies(item):
        prefix = "" if owner is None else f"process {owner}: "
        yield from _compare_values(item, prefix, values_of(a, owner or 0), values_of(b, owner or 0))


def _json_values(side: _Side, process: int) -> Values:
    """Returns the one value, under the name ""."""
    value = side.checkpoint.json(side.item, process)
    # By its text: to Python 1, 1.0 and true are equal, and a NaN is not itself.
    return {"": Shown(json.dumps(value, sort_keys=True), repr(value)[:200])}


def _digests(side: _Side, process: int) -> Values:
    """Returns the files' digests by their own names; a piece of a file at a time is in memory."""
    digests: dict[str, Shown] = {}
    for name, pieces in side.checkpoint.files(side.item, PerProcessSelection(process)):
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
    for name in sorted({*a, *b}):
        path = f"{prefix}{name}"
        if name not in a:
            yield LeafDifference(item, path, "only in B", b=b[name].text)
        elif name not in b:
            yield LeafDifference(item, path, "only in A", a=a[name].text)
        elif a[name].value != b[name].value:
            path = path.removesuffix(": ")
            yield LeafDifference(item, path, "value", a[name].text, b[name].text)


def _compare_trees(a: _Side, b: _Side) -> Iterator[LeafDifference]:
    item = a.item
    leaves_a, leaves_b = (
        {leaf.path: leaf for leaf in side.checkpoint.item(side.item).leaves} for side in (a, b)
    )
    pairs: list[tuple[LeafRecord, LeafRecord]] = []
    for path in leaves_a | leaves_b:
        if path not in leaves_b:
            yield LeafDifference(item, path, "only in A", a=show_leaf(leaves_a[path]))
        elif path not in leaves_a:
            yield LeafDifference(item, path, "only in B", b=show_leaf(leaves_b[path]))
        else:
            one = leaves_a[path]
            other = leaves_b[path]
            unlike = _compare_kinds(item, one, other)
            if unlike is not None:
                yield unlike
            elif one.grid is not None:
                pairs.append((one, other))
    yield from _compare_arrays(a, b, pairs)


def _compare_arrays(
    a: _Side, b: _Side, pairs: Sequence[tuple[LeafRecord, LeafRecord]]
) -> Iterator[LeafDifference]:
    arrays_a = _arrays(a, [one for one, _ in pairs])
    arrays_b = _arrays(b, [other for _, other in pairs])
    for (one, array), (other, other_array) in zip(arrays_a, arrays_b, strict=True):
        gap = difference(array, other_array)
        if gap is not None:
            found = LeafDifference(a.item, one.path, "value", a=show_leaf(one), b=show_leaf(other))
            yield _by(found, gap, array.size)


def _arrays(side: _Side, leaves: Sequence[LeafRecord]) -> Iterator[Read]:
    reader = side.checkpoint.reader(side.item)
    return read_leaves(reader, leaves, batch_bytes=BATCH_BYTES, allocate=allocate)


def _compare_kinds(item: str, a: LeafRecord, b: LeafRecord) -> LeafDifference | None:
    """Returns how two leaves differ by their records alone, and None where their arrays say it."""
    if a.grid is None and b.grid is None:
        return None if _exact(a.value) == _exact(b.value) else _compare_numbers(item, a, b)
    if a.grid is None or b.grid is None:
        what = "type"
    elif a.shape != b.shape:
        what = "shape"
    elif a.dtype != b.dtype:
        what = "dtype"
    else:
        return None
    return LeafDifference(item, a.path, what, a=show_leaf(a), b=show_leaf(b))


def _exact(value: Any) -> Any:
    """Returns what is equal for values of Python's that are the same, or of each process's."""
    return [*map(encode_value, value)] if isinstance(value, tuple) else encode_value(value)


def _compare_numbers(item: str, a: LeafRecord, b: LeafRecord) -> LeafDifference:
    """Returns how two values of Python's differ: numbers by how much."""
    found = LeafDifference(item, a.path, "value", a=repr(a.value)[:80], b=repr(b.value)[:80])
    if type(a.value) is type(b.value) and isinstance(a.value, int | float):
        with contextlib.suppress(OverflowError):  # an int that no float holds
            gap = difference(*(np.array([leaf.value], np.float64) for leaf in (a, b)))
            if gap is not None:
                return _by(found, gap, 1)
    return found


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
    """The largest differences of two arrays, and how many elements differ: see LeafDifference."""

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
