"""Folders of steps: their names, and which of them are steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.step_folders import (
    HINT,
    has_record,
    list_steps,
    read_hint,
    step_folders,
    step_of,
    write_hint,
)
from holdfast.checkpoint.storage.local import LocalStorage


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


def test_a_record_that_cannot_be_read_is_there(tmp_path: Path) -> None:
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


def test_a_hint_says_that_something_was_saved(tmp_path: Path) -> None:
    """Each save's is another; where it cannot be read or written, nothing fails."""
    storage = LocalStorage(tmp_path)
    assert read_hint(storage) is None
    write_hint(storage, 7, "0a0b0c0d00000001")
    first = read_hint(storage)
    write_hint(storage, 7, "0a0b0c0d00000002")
    assert first and read_hint(storage) not in (first, None)
    (tmp_path / HINT).unlink()
    (tmp_path / HINT).mkdir()
    write_hint(storage, 8, "0a0b0c0d00000003")
    assert read_hint(storage) is None
