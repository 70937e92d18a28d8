"""The grid of a leaf: its chunks cover the array once, within its shards."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.grid import Grid, chunk_name


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Draws grids of up to three axes, with empty axes and last chunks that are shorter."""
    shape = []
    shard = []
    chunk = []
    for _ in range(draw(st.integers(0, 3))):
        part = draw(st.integers(1, 6))
        count = draw(st.integers(1, 3))
        shape.append(part * count)
        shard.append(part)
        chunk.append(draw(st.integers(1, part)))
    if shape and draw(st.booleans()):
        shape = shard = chunk = [*shape[:-1], 0]
    return Grid(tuple(shape), tuple(shard), tuple(chunk), draw(st.sampled_from([1, 2, 8])))


@given(grids())
def test_chunks_cover_an_array_once(grid: Grid) -> None:
    """Every element lies in exactly one chunk, no chunk crosses a shard, and sizes are those of the
    regions.
    """
    seen = np.zeros(grid.shape, int)
    for index in range(grid.num_chunks):
        region = grid.region(index)
        seen[tuple(slice(*bounds) for bounds in region)] += 1
        shards = (
            {
                tuple(at // size for at, size in zip(corner, grid.shard_shape, strict=True))
                for corner in corners(region)
            }
            if seen.size
            else {()}
        )
        assert len(shards) == 1
        assert (
            grid.sizes[index] == math.prod(stop - start for start, stop in region) * grid.itemsize
        )
    assert (seen == 1).all() and grid.sizes.sum() == seen.size * grid.itemsize


def corners(region: tuple[tuple[int, int], ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*((start, stop - 1) for start, stop in region)))


@given(grids())
def test_starts_and_shards_agree_with_regions(grid: Grid) -> None:
    """`starts` lists where the regions begin along an axis, then its end; `shards` numbers the
    shards in C order.
    """
    regions = [grid.region(index) for index in range(grid.num_chunks)]
    for axis in range(len(grid.shape)):
        assert grid.starts(axis).tolist() == [
            *sorted({region[axis][0] for region in regions}),
            grid.shape[axis],
        ]
    if math.prod(grid.shape):
        counts = [size // shard for size, shard in zip(grid.shape, grid.shard_shape, strict=True)]
        for region, shard in zip(regions, grid.shards, strict=True):
            at = [start // size for (start, _), size in zip(region, grid.shard_shape, strict=True)]
            assert shard == (np.ravel_multi_index(at, counts) if counts else 0)


def test_names_of_chunks() -> None:
    """A whole array has its leaf's path, a chunk its slice besides."""
    assert chunk_name("a.b", [(0, 4), (0, 2)], (4, 2)) == "a.b"
    assert chunk_name("a.b", [(2, 4), (0, 2)], (4, 2)) == "a.b[2:4,0:2]"
    assert chunk_name("a.b", [], ()) == "a.b"
