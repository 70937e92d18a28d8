"""Which stored leaves may be the ones that a caller asks for by other names.

None is proposed that would restore other numbers without a word. The two leaves have one shape, and
names with the same numbers (another layer is no rename). They lie in the same classes: Adam's
variance is no momentum, though its arrays look alike. Where two leaves fit as well, neither is.
"""

from __future__ import annotations

import collections
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .grid import Shape
from .record import ItemRecord
from .tree import FlatTree, keys_of

MOST_PAIRS = 5  # that a message proposes
COMPARED = 1000  # leaves of one shape; comparing all with all takes minutes for a large model
_LEAST_RATIO = 0.6  # of difflib's


class NamedLeaf(NamedTuple):
    """A leaf by its path, and what else is known of it.

    `classes` are those of the nodes above it, from the root on, "" for a dict or a list.
    """

    path: str
    shape: Shape | None = None
    classes: tuple[str, ...] = ()


def saved_leaves(item: ItemRecord) -> list[NamedLeaf]:
    """Returns the leaves of an item."""
    return [
        NamedLeaf(leaf.path, leaf.shape, above)
        for leaf, above in zip(item.leaves, _classes(item.tree), strict=True)
    ]


def wanted_leaves(like: FlatTree) -> list[NamedLeaf]:
    """Returns the leaves of a `like`."""
    leaves = zip(like.paths, like.leaves, _classes(like.description), strict=True)
    return [NamedLeaf(path, np.shape(leaf), above) for path, leaf, above in leaves]


def _classes(node: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the classes of the nodes above each leaf of a description."""
    if isinstance(node, int):
        yield above
    elif node is not None:
        for child in node["nodes"]:
            yield from _classes(child, (*above, node.get("type", "")))


def likely_renames(wanted: Sequence[NamedLeaf], saved: Sequence[NamedLeaf]) -> dict[str, str]:
    """Returns which of `saved` the first of `wanted` may be, as {saved path: wanted path}."""
    free = list(saved)
    pairs = {}
    for leaf in wanted[:MOST_PAIRS]:
        fitting = [each for each in free if leaf.shape is None or each.shape in (None, leaf.shape)]
        found = _likely(leaf, fitting[:COMPARED])
        if found is not None:
            free.remove(found)
            pairs[found.path] = leaf.path
    return pairs


def _likely(wanted: NamedLeaf, fitting: Sequence[NamedLeaf]) -> NamedLeaf | None:
    differences = [_difference(keys_of(wanted.path), keys_of(leaf.path)) for leaf in fitting]
    places = collections.Counter(each.place for each in differences)
    scores = [
        each.score(is_alone=places[each.place] == 1) * _are_of_one_class(wanted, leaf, each)
        for leaf, each in zip(fitting, differences, strict=True)
    ]
    best = max(scores, default=0)
    if not best or scores.count(best) > 1:
        return None
    return fitting[scores.index(best)]


class _Difference(NamedTuple):
    """What two paths have between the keys that they begin and end with alike: so many these are,
    and the texts between.
    """

    start: int
    end: int
    wanted: str
    saved: str

    @property
    def place(self) -> tuple[int, int]:
        """Where the paths differ."""
        return self.start, self.end

    def score(self, *, is_alone: bool) -> float:
        """Returns how alike the texts are, 0 where one is no other name for the other.

        `is_alone` says that no other leaf differs in the same place.
        """
        if _numbers_in(self.wanted) != _numbers_in(self.saved):
            return 0
        if not self.wanted or not self.saved:  # a level more or less at the top: a wrapper
            return float(is_alone and not self.start)
        ratio = difflib.SequenceMatcher(None, self.wanted, self.saved).ratio()
        if ratio >= _LEAST_RATIO:
            return ratio
        is_short = self.wanted.startswith(self.saved) or self.saved.startswith(self.wanted)
        return _LEAST_RATIO * (is_short and is_alone)


def _difference(wanted: Sequence[str], saved: Sequence[str]) -> _Difference:
    start = _count_alike(wanted, saved)
    one = wanted[start:]
    two = saved[start:]
    end = _count_alike(one[::-1], two[::-1])
    texts = (".".join(keys[: len(keys) - end]).casefold() for keys in (one, two))
    return _Difference(start, end, *texts)


def _count_alike(one: Sequence[str], two: Sequence[str]) -> int:
    pairs = zip(one, two, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def _are_of_one_class(wanted: NamedLeaf, saved: NamedLeaf, difference: _Difference) -> bool:
    ours = [each for each in wanted.classes if each]
    theirs = [each for each in saved.classes if each]
    if ours == theirs or not wanted.classes:
        return True
    # Other layouts know no classes: there the names that a class gives have to be the same.
    differing = wanted.classes[difference.start : len(wanted.classes) - difference.end]
    return not theirs and not any(differing)


def _numbers_in(text: str) -> list[str]:
    return re.findall(r"[0-9]+", text)
