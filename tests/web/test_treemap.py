"""A treemap fills its place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.web.treemap import Rectangle, squarify

PLACE = Rectangle(0.0, 0.0, 1000.0, 420.0)


@given(st.lists(st.floats(1, 1e12), min_size=1, max_size=200))
def test_the_treemap_fills_its_place_with_the_sizes(sizes: list[float]) -> None:
    """Each cell has its share of the area and lies inside, up to a rounding."""
    sizes.sort(reverse=True)
    cells = list(squarify(sizes, PLACE))
    assert len(cells) == len(sizes)
    whole = PLACE.width * PLACE.height
    for cell, size in zip(cells, sizes, strict=True):
        assert abs(cell.width * cell.height - size / sum(sizes) * whole) <= 1e-3 * whole
        assert cell.x >= -1e-6
        assert cell.y >= -1e-6
        assert cell.x + cell.width <= PLACE.width + 1e-3
        assert cell.y + cell.height <= PLACE.height + 1e-3


def test_nothing_has_no_cells() -> None:
    """A checkpoint without arrays has an empty map."""
    assert list(squarify([], PLACE)) == []
