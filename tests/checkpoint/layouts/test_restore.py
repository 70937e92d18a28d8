"""What an item is restored as: which one is meant, and the states of iterators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.checkpoint import Files, load, save
from holdfast.checkpoint.layouts.base import CheckpointInfo
from holdfast.checkpoint.layouts.restore import pick_item


def test_the_item_that_is_meant() -> None:
    """The usual name finds the one tree of another layout, or another usual name; nothing is
    guessed among several, nor in ours.
    """
    assert (
        pick_item(CheckpointInfo("orbax", "p", {"default": "tree", "metrics": "json"}), "state")
        == "default"
    )
    assert pick_item(CheckpointInfo("orbax", "p", {"model": "tree"}), "state") == "model"
    assert pick_item(CheckpointInfo("holdfast", "p", {"model": "tree"}), "state") == "state"
    assert pick_item(CheckpointInfo("orbax", "p", {"a": "tree", "b": "tree"}), "state") == "state"


class _Loader:
    """An iterator whose state is JSON."""

    def __init__(self) -> None:
        self.state: Any = {}

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_a_state_of_grain_of_many_pieces_comes_back(tmp_path: Path) -> None:
    """A process's state is read from its own file, also where that is read in several pieces."""
    state = {"seen": list(range(400_000))}

    def write_states(folder: Path) -> None:
        (folder / "process_0-of-2.json").write_text("{}")
        (folder / "process_1-of-2.json").write_text(json.dumps(state))

    save(tmp_path / "c", items={"data": Files(write_states)})
    loader = load(tmp_path / "c", _Loader(), item="data", process=1)
    assert loader.state == state
