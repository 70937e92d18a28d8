"""Layers that repeat, as one line: `layers.0.kernel` to `layers.31.kernel` of one shape. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

FEWEST = 3
"""Leaves that are worth folding into one line."""

_NUMBER = re.compile(r"\d+")
_MOST_RANGES = 4


@dataclass(frozen=True)
class Fold:
    """Leaves that are alike but for one number in their paths: `layers.{0..31}.kernel`."""

    path: str
    members: tuple[str, ...]  # their own paths; one alone is no fold


def fold_layers(alike: Mapping[str, Hashable]) -> list[Fold]:
    """Returns the paths in their order, those of repeated layers as one.

    `alike` has, for each path, what leaves of one fold have in common. A path with several numbers
    is in the fold that has the most leaves, by the number further left where two have as many.
    """
    groups: dict[tuple[str, str, Hashable], list[str]] = defaultdict(list)
    for path, facts in alike.items():
        for number in _NUMBER.finditer(path):
            groups[path[: number.start()], path[number.end() :], facts].append(number[0])
    folds: dict[str, Fold] = {}
    largest_first = sorted(groups.items(), key=lambda group: -len(group[1]))
    for (before, after, _), found in largest_first:
        left = [number for number in found if f"{before}{number}{after}" not in folds]
        if len(left) < FEWEST:
            continue
        numbers = sorted(left, key=int)
        members = tuple(f"{before}{number}{after}" for number in numbers)
        fold = Fold(f"{before}{{{_ranges(numbers)}}}{after}", members)
        folds |= dict.fromkeys(members, fold)
    listed = [folds.get(path, Fold(path, (path,))) for path in alike]
    return list(dict.fromkeys(listed))


def _ranges(numbers: Sequence[str]) -> str:
    """Returns ascending numbers as `0..4,6..10`; of many ranges, the first and the last."""
    ranges: list[list[str]] = []
    for number in numbers:
        if ranges and int(number) == int(ranges[-1][1]) + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [first if first == last else f"{first}..{last}" for first, last in ranges]
    if len(shown) > _MOST_RANGES:
        shown = [*shown[:2], "...", shown[-1]]
    return ",".join(shown)
