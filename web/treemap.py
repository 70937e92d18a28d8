"""A treemap: rectangles in the sizes of things, each as square as can be. Pure.

Source: M. Bruls, K. Huizing, J. van Wijk, "Squarified treemaps" (2000).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Rectangle(NamedTuple):
    """A place in the plane; x grows to the right, y downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def side(self) -> float:
        """The length of the shorter side."""
        return min(self.width, self.height)


def squarify(sizes: Sequence[float], place: Rectangle) -> Iterator[Rectangle]:
    """Yields a rectangle for each of `sizes`, which fall and are above 0.

    Together they fill `place`.
    """
    scale = place.width * place.height / sum(sizes) if sizes else 0.0
    areas = [size * scale for size in sizes]
    while areas:
        row = _row(areas, place.side)
        areas = areas[len(row) :]
        # A rounding must not leave the place.
        longer = max(place.width, place.height)
        depth = min(sum(row) / place.side, longer) if place.side else 0.0
        yield from _laid(row, place, depth)
        place = _beside(place, depth)


def _row(areas: Sequence[float], side: float) -> Sequence[float]:
    """Returns as many of the first areas as lie best beside each other."""
    count = 1
    while count < len(areas):
        if _worst(areas[: count + 1], side) > _worst(areas[:count], side):
            break
        count += 1
    return areas[:count]


def _worst(areas: Sequence[float], side: float) -> float:
    """Returns the worst ratio of two sides in a row along `side`."""
    total = sum(areas)
    if not side or not total:
        return 0.0
    square = (total / side) ** 2
    return max(max(areas) / square, square / min(areas))


def _laid(row: Sequence[float], place: Rectangle, depth: float) -> Iterator[Rectangle]:
    """Yields the rectangles of a row: at the left of a wide place, else at the top."""
    at = 0.0
    for area in row:
        length = place.side * area / sum(row)
        if place.width >= place.height:
            yield Rectangle(place.x, place.y + at, depth, length)
        else:
            yield Rectangle(place.x + at, place.y, length, depth)
        at += length


def _beside(place: Rectangle, depth: float) -> Rectangle:
    """Returns what a row leaves of a place."""
    if place.width >= place.height:
        return place._replace(x=place.x + depth, width=max(0.0, place.width - depth))
    return place._replace(y=place.y + depth, height=max(0.0, place.height - depth))
