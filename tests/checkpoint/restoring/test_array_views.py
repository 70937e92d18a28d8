"""Views: which regions of stored leaves a region needs, and what is worth making at once."""

from __future__ import annotations

import numpy as np

from holdfast.checkpoint.restoring.array_views import (
    STRIPE_BYTES,
    Expanded,
    Joined,
    Reshaped,
    SavedArray,
    Transposed,
    View,
)
from holdfast.checkpoint.restoring.devices import Region
from tests.support.array_readers import record_of


def saved(shape: tuple[int, ...], name: str = "w") -> SavedArray:
    return SavedArray.of(record_of(name, np.zeros(shape, np.int8), (1,) * len(shape)))


def needs(view: View, *region: tuple[int, int]) -> list[tuple[str, Region]]:
    return [(leaf.path, inner) for leaf, inner in view.reads(region)]


def test_a_region_needs_its_own_region() -> None:
    """Transposed, it is the region the other way round; stacked, that of the layers it touches."""
    turned = Transposed.of(saved((4, 6)), None)
    assert needs(turned, (1, 2), (0, 4)) == [("w", ((0, 4), (1, 2)))]
    layers = [Expanded.of(saved((4, 6), name), 0) for name in "abc"]
    stack = Joined.of(layers, 0)
    assert needs(stack, (1, 3), (0, 4), (2, 3)) == [
        ("b", ((0, 4), (2, 3))),
        ("c", ((0, 4), (2, 3))),
    ]
    assert needs(stack, (1, 1), (0, 4), (2, 3)) == []


def test_a_reshaped_region_needs_the_rows_around_it() -> None:
    """Heads that were one axis: those of one head are its rows."""
    heads = Reshaped.of(saved((12, 5)), (4, 3, 5))
    assert needs(heads, (1, 2), (0, 3), (0, 5)) == [("w", ((3, 6), (0, 5)))]
    assert needs(heads, (1, 2), (0, 0), (0, 5)) == [("w", ((0, 0), (0, 0)))]


def test_what_is_spread_over_a_leaf_is_made_at_once() -> None:
    """A stripe of a transposed leaf is no less to read than the leaf; of a stack it is a layer."""
    turned = Transposed.of(saved((4, 6)), None)
    assert turned.chunk == (6, 4)
    assert Transposed.of(saved((4, 6)), (0, 1)).chunk == (1, 1)
    assert Joined.of([Expanded.of(turned, 0)] * 3, 0).chunk == (1, 6, 4)
    assert Transposed.of(saved((3, 4, 6)), (0, 2, 1)).chunk == (1, 6, 4)
    assert Reshaped.of(turned, (3, 8)).chunk == (3, 8)
    assert Reshaped.of(saved((4, 6)), (8, 3)).chunk == (2, 3)


def test_a_large_leaf_is_transposed_in_stripes() -> None:
    """So it is not held twice: of three rows of half a stripe each, two are read at a time."""
    width = STRIPE_BYTES // 2
    turned = Transposed.of(saved((3, width)), None)
    assert needs(turned, (0, width), (0, 3)) == [
        ("w", ((0, 2), (0, width))),
        ("w", ((2, 3), (0, width))),
    ]
