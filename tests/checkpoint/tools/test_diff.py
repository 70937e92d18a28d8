"""Differences: bit by bit, counted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import Files, Json, save
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.tools.diff import COMPARED, compare, difference
from tests.support.checkpointing import at_once, groups
from tests.support.layouts import write as write_layout

DTYPES = st.sampled_from(["float32", "float16", "int8", "uint64", "bool", "complex64"])


@given(DTYPES, st.integers(0, 50), st.data())
def test_differences_are_counted_exactly(dtype: str, size: int, data: st.DataObject) -> None:
    """As many elements differ as have other bits; equal bits are equal, NaNs too, and 0.0 is not
    -0.0.
    """
    kind = np.dtype(dtype)
    raw = data.draw(st.binary(min_size=size * kind.itemsize, max_size=size * kind.itemsize))
    one = np.frombuffer(bytes(byte & 1 for byte in raw) if dtype == "bool" else raw, kind)
    two = one.copy()
    changed = data.draw(st.sets(st.integers(0, size - 1))) if size else set()
    for index in changed:
        two.view(np.uint8)[index * kind.itemsize] ^= 1
    found = difference(one, two)
    assert (found is None) == (not changed)
    if found is not None:
        assert found.elements == len(changed) and found[0] >= 0 and found[1] >= 0


def test_the_largest_differences() -> None:
    """Absolute and relative ones are over elements that are finite on both sides."""
    one = np.array([1.0, 100.0, np.nan, np.inf, 0.0, 5.0])
    two = np.array([1.5, 101.0, np.nan, 3.0, -0.0, 5.0])
    assert difference(one, two) == (1.0, pytest.approx(1 / 3), 4, 1)
    assert difference(np.zeros((2, 0)), np.zeros((2, 0))) is None


def test_more_elements_than_are_compared_at_once() -> None:
    """A difference in the second window is found as well as one in the first."""
    one = np.zeros(COMPARED + 5, np.int16)
    two = one.copy()
    two[[3, -1]] = 7, -9
    assert difference(one, two) == (9.0, 1.0, 2, 0)


def test_what_differs_is_named(tmp_path: Path) -> None:
    """Missing leaves, shapes, dtypes, types and values have their words; layouts may differ, and
    equal ones differ in nothing.
    """
    tree = {
        "w": np.arange(4.0),
        "shape": np.zeros(2),
        "dtype": np.zeros(2),
        "type": 3,
        "value": "x",
        "gone": 1,
    }
    other = {
        "w": np.arange(4.0),
        "shape": np.zeros(3),
        "dtype": np.zeros(2, np.int8),
        "type": np.ones(2),
        "value": "y",
        "new": 1,
    }
    save(tmp_path / "a", tree)
    save(tmp_path / "b", other)
    a = open_checkpoint(tmp_path / "a")
    b = open_checkpoint(tmp_path / "b")
    assert {row.path: row.what for row in compare(a, b)} == {
        "shape": "shape",
        "dtype": "dtype",
        "type": "type",
        "value": "value",
        "gone": "only in A",
        "new": "only in B",
    }
    assert list(compare(a, a)) == []
    orbax, plain = (
        open_checkpoint(write_layout(layout, str(tmp_path / layout)))
        for layout in ("orbax", "safetensors")
    )
    assert list(compare(orbax, plain)) == []


def test_what_python_takes_for_equal_differs(tmp_path: Path) -> None:
    """A number of another type in JSON, and 0.0 and -0.0, differ; a NaN is itself."""
    items: list[dict[str, Any]] = [
        {"state": {"x": 0.0, "nan": np.nan}, "config": Json({"n": 1, "m": 2})},
        {"state": {"x": -0.0, "nan": np.nan}, "config": Json({"m": 2, "n": True})},
    ]
    for name, each in zip("ab", items, strict=True):
        save(tmp_path / name, items=each)
    a, b = (open_checkpoint(tmp_path / name) for name in "ab")
    assert [(row.item, row.path, row.what) for row in compare(a, b)] == [
        ("config", "", "value"),
        ("state", "x", "value"),
    ]


def test_files_and_what_each_process_keeps_are_compared(tmp_path: Path) -> None:
    """Items of files differ by the files' names and bytes, and what each process keeps by the
    process.
    """

    def write(folder: Path, name: str, text: str) -> None:
        (folder / name).write_text(text)
        (folder / "same").write_text("same")

    def items(name: str, say: str, index: int) -> dict[str, Any]:
        mine = Files(lambda folder: write(folder, "own", f"{say} {index % 2}"), per_process=True)
        shared = Files(lambda folder: write(folder, name, say))
        return {
            "w": {"x": 1},
            "mine": mine,
            "shared": shared,
            "data": Json([say if index else ""], per_process=True),
        }

    def save_both(path: str, name: str, say: str) -> None:
        with groups(2) as members:
            at_once(
                [
                    lambda g=g: save(tmp_path / path, items=items(name, say, g.index), group=g)
                    for g in members
                ]
            )  # type: ignore[misc]

    save_both("a", "old", "one"), save_both("b", "new", "two"), save_both("c", "old", "one")
    a, b, c = (open_checkpoint(tmp_path / path) for path in "abc")
    assert [(row.item, row.path, row.what) for row in compare(a, b)] == [
        ("data", "process 1", "value"),
        ("mine", "process 0: own", "value"),
        ("mine", "process 1: own", "value"),
        ("shared", "new", "only in B"),
        ("shared", "old", "only in A"),
    ]
    assert not list(compare(a, c))
    save(tmp_path / "d", items=items("old", "one", 1))
    rows = {row.item: row for row in compare(a, open_checkpoint(tmp_path / "d"))}
    assert set(rows) == {"data", "mine"}
    assert (rows["mine"].a, rows["mine"].b) == (
        "files of each of 2 processes",
        "files of each of 1 processes",
    )
