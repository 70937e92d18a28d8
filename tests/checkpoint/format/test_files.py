"""Files and folders of a step: reports, values and the names of steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.files import (
    ItemReport,
    decode_value,
    encode_value,
    has_record,
    list_steps,
    step_folders,
    step_of,
)
from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.saving.pack_writer import write_snapshot
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import take_snapshot
from holdfast.checkpoint.storage.local import LocalStorage

TREE = {"w": np.arange(6.0).reshape(2, 3), "n": 3, "none": None}


@given(st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary())
def test_python_values_are_exact(value: Any) -> None:
    """Values of any size come back as themselves, bit by bit."""
    kind, text = json.loads(json.dumps(encode_value(value)))
    found = decode_value(kind, text)
    assert (
        type(found) is type(value)
        and (found == value or found != found)
        and repr(found) == repr(value)
    )


def test_reports_travel_as_bytes(tmp_path: Path) -> None:
    """A report is the same after the gather; other bytes are a ValueError."""
    tree = FlatTree.of(TREE)
    plan = Planner().plan(tree)
    report = write_snapshot(take_snapshot(plan, tree), LocalStorage(tmp_path), "1", "state", "ab")
    assert ItemReport.from_bytes(report.to_bytes()) == report
    for data in (b"", b"[]", b'{"process":1}'):
        with pytest.raises(ValueError):
            ItemReport.from_bytes(data)


@given(st.integers(0, 10**18 - 1))
def test_a_step_folder_is_a_plain_number(step: int) -> None:
    """The number of a step names its folder, and no other spelling of it does."""
    assert step_of(str(step)) == step
    for name in (
        f"0{step}",
        f"+{step}",
        f"-{step}",
        f"{step} ",
        f"{step}.0",
        f"step_{step}",
        f"{step}\n",
    ):
        assert step_of(name) is None


@pytest.mark.parametrize("name", ["", "01", "1" * 19, "\u0661", "1e3", ".holdfast"])
def test_other_folders_are_no_steps(name: str) -> None:
    """Leading zeros, numbers too long and digits of other scripts name no step."""
    assert step_of(name) is None


def test_a_step_is_there_if_its_record_is(tmp_path: Path) -> None:
    """Folders named like steps are listed in order; only those with a record are steps, and a file
    named so is none.
    """
    for name in ("10", "9", "2", "02", "other"):
        (tmp_path / name).mkdir()
    for name in ("10", "2", "02"):
        (tmp_path / name / "checkpoint.json").write_text("{}")
    (tmp_path / "7").write_text("a file")
    storage = LocalStorage(tmp_path)
    assert step_folders(storage) == {2: "2", 9: "9", 10: "10"}
    assert (
        list_steps(storage) == [2, 10]
        and has_record(storage, "10")
        and not has_record(storage, "9")
        and not has_record(storage, "3")
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [("bool", "yes"), ("int", "three"), ("complex", "1"), ("bytes", "?"), ("list", "[]")],
)
def test_other_texts_are_no_values(kind: str, text: str) -> None:
    """A text that `encode_value` does not make is a ValueError."""
    with pytest.raises(ValueError):
        decode_value(kind, text)


def test_a_record_is_there_also_where_it_cannot_be_read(tmp_path: Path) -> None:
    """A pipe or a link in circles in its place is a step, whose opening says what is wrong; a
    folder, or a link to nothing, is none.
    """
    places = [tmp_path / str(step) / "checkpoint.json" for step in range(5)]
    for place in places:
        place.parent.mkdir()
    places[0].write_text("{")
    os.mkfifo(places[1])
    places[2].symlink_to("checkpoint.json")
    places[3].mkdir()
    places[4].symlink_to("nothing")
    assert list_steps(LocalStorage(tmp_path)) == [0, 1, 2] and has_record(
        LocalStorage(tmp_path / "1"), ""
    )
