"""Covering arrays, and the rows of settings that the lives begin with."""

from __future__ import annotations

from dataclasses import asdict

from .covering import Cell, all_pairs, covering_rows, pairs_of
from .settings import DOMAINS, agrees, rows


def test_every_pair_is_in_some_row() -> None:
    """Also where some exclude each other, and those then meet in none."""
    domains = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2, 3), "d": (0, 1, 2)}

    def differs(one: Cell, other: Cell) -> bool:
        return not (one[1] and one[1] == other[1])

    met = {pair for row in covering_rows(domains, differs, 1) for pair in pairs_of(row)}
    assert met == all_pairs(domains, differs)


def test_the_settings_of_lives_pair_all_values() -> None:
    """Each two values that do not exclude each other meet in one of few rows."""
    met = {pair for row in rows() for pair in pairs_of(asdict(row))}
    assert met == all_pairs(DOMAINS, agrees)
    largest = sorted(map(len, DOMAINS.values()))[-2:]
    assert len(rows()) < 3 * largest[0] * largest[1]


def test_each_setting_has_a_value_that_fits() -> None:
    """With all values of the others, so that every row can be completed."""
    for name, values in DOMAINS.items():
        others = [(other, value) for other in DOMAINS if other != name for value in DOMAINS[other]]
        assert any(all(agrees((name, value), cell) for cell in others) for value in values)
