"""Covering arrays: few rows in which every two values of different settings meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
Cell: TypeAlias = tuple[str, Any]
Pair: TypeAlias = tuple[Cell, Cell]
Agrees: TypeAlias = Callable[[Cell, Cell], bool]

TRIES = 8  # rows that are filled for one place, of which the best is taken


def pairs_of(row: Mapping[str, Any]) -> Iterator[Pair]:
    """Yields the pairs of values in a row, names in the order of the row."""
    return itertools.combinations(row.items(), 2)


def all_pairs(domains: Mapping[str, Sequence[Any]], agrees: Agrees) -> set[Pair]:
    """Returns every pair of values that may stand in one row."""
    names = itertools.combinations(domains, 2)
    pairs = (
        ((one, left), (other, right))
        for one, other in names
        for left in domains[one]
        for right in domains[other]
    )
    return {pair for pair in pairs if agrees(*pair)}


def covering_rows(domains: Mapping[str, Sequence[Any]], agrees: Agrees, seed: int) -> list[Row]:
    """Returns rows that hold every pair which `agrees`. Some value of each domain has to agree
    with all others, so that each row can be completed.
    """
    rng = random.Random(seed)
    missing = all_pairs(domains, agrees)
    # By the order of the domains: a set's own order is another one in each process.
    places = {name: place for place, name in enumerate(domains)}
    rows = []
    while missing:
        first = min(
            missing,
            key=lambda pair: (places[pair[0][0]], places[pair[1][0]], str(pair)),
        )
        filled = [_fill(first, domains, agrees, missing, rng=rng) for _ in range(TRIES)]
        best = max(filled, key=lambda row: len(missing.intersection(pairs_of(row))))
        missing.difference_update(pairs_of(best))
        rows.append(best)
    return rows


def _fill(
    first: Pair,
    domains: Mapping[str, Sequence[Any]],
    agrees: Agrees,
    missing: set[Pair],
    *,
    rng: random.Random,
) -> Row:
    """Returns a row with a pair, whose other values bring many missing pairs."""
    chosen = dict(first)
    others = [name for name in domains if name not in chosen]
    rng.shuffle(others)
    order = list(domains)

    def brings(cell: Cell) -> int:
        met = chosen.items()
        return sum(_in_order(cell, other, order) in missing for other in met)

    for name in others:
        cells = [(name, value) for value in domains[name]]
        fits = [cell for cell in cells if all(agrees(cell, other) for other in chosen.items())]
        rng.shuffle(fits)
        chosen.update([max(fits, key=brings)])
    return {name: chosen[name] for name in domains}


def _in_order(one: Cell, other: Cell, order: Sequence[str]) -> Pair:
    return (one, other) if order.index(one[0]) < order.index(other[0]) else (other, one)
