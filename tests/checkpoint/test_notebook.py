"""What an interpreter and a notebook show: what matters, in one line or a table."""

from __future__ import annotations

import html.parser
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Json, KeepLast, Options
from holdfast.checkpoint.notebook import html_table, shown_bytes

_EVIL = "<script>alert('x')</script>"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", keep_policy=KeepLast(3)) as manager:
        for step in (4, 8):
            items = {"state": {"w": np.zeros(1000), "b": 1}, "config": Json({"lr": 1})}
            manager.save(step, items=items, metadata=_EVIL, metrics={"loss": 0.5}).wait()
        yield manager


def test_a_manager_says_what_it_has(manager: CheckpointManager, tmp_path: Path) -> None:
    """And whether it can still save."""
    root = str(tmp_path / "run")
    shown = f"{root!r}: 2 steps, latest 8, KeepLast(n=3), process 0 of 1"
    assert repr(manager) == f"<CheckpointManager of {shown}>"
    with CheckpointManager(root, options=Options(read_only=True)) as reader:
        assert repr(reader).endswith(", read only>")
    manager.close()
    assert repr(manager) == f"<CheckpointManager of {shown}, closed>"
    with CheckpointManager(tmp_path / "new") as empty:
        assert ": no steps, KeepAll(), process 0 of 1>" in repr(empty)


def test_a_structure_says_what_a_step_holds(manager: CheckpointManager) -> None:
    """Not each leaf, of which a model has thousands."""
    structure = manager.structure(8)
    assert repr(structure) == (
        f"<Structure of {structure.path!r} (holdfast, step 8): state: tree of 2 leaves,"
        " 8.0 kB, config: json>"
    )
    assert repr(structure.items["state"]) == "<ItemStructure: tree of 2 leaves, 8.0 kB>"


def test_a_save_says_how_it_is(manager: CheckpointManager) -> None:
    """The error too, where it has failed."""
    handle = manager.save(9, {"w": np.zeros(1)})
    handle.wait()
    assert repr(handle) == "<SaveHandle of step 9: committed>"


def test_statistics_say_what_was_counted(manager: CheckpointManager) -> None:
    """Zeros are left out."""
    shown = repr(manager._state.statistics)
    assert re.fullmatch(r"Statistics\(saves=2, save_s=\S+, .*save_bytes=16000, .*\)", shown), shown
    assert "restores" not in shown


class _Cells(html.parser.HTMLParser):
    """Takes a table apart, as a browser does."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += f"{data}|"


def test_notebooks_get_tables(manager: CheckpointManager) -> None:
    """What users have chosen is text in them, never a tag."""
    structure = manager.structure(8)
    shown: dict[str, Any] = {
        "3 steps, latest 9": manager,
        _EVIL: structure,
        "tree|size|8.0 kB|b|1|w|": structure.items["state"],
        "committed|size|8 B|": manager.save(9, {"w": np.zeros(1)}),
        "saves|": manager._state.statistics,
    }
    manager.wait_until_finished()
    for expected, value in shown.items():
        cells = _Cells(value._repr_html_())
        assert cells.tags == {"table", "caption", "tr", "th", "td"}
        assert expected in cells.text, cells.text


def test_a_name_is_escaped_too() -> None:
    """Title, names and values."""
    table = html_table(_EVIL, {_EVIL: _EVIL})
    assert _Cells(table).tags == {"table", "caption", "tr", "th", "td"}
    assert _Cells(table).text.count(_EVIL) == 3


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e15, "2.5 PB")]
)
def test_sizes_in_words(nbytes: float, shown: str) -> None:
    """In decimal units, as disks are sold."""
    assert shown_bytes(nbytes) == shown
