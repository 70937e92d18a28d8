"""Several checkpoints become one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import load, save, verify
from holdfast.checkpoint.storage.base import NameTaken
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.merge import merge_checkpoints

TREES = [
    {"b": np.arange(6.0), "deep": {"z": "text", "a": [np.ones(2), 7]}},
    {"a": np.zeros((2, 3), np.int8), "deep": {"k": 2.5}, "none": None, "empty": {}},
]


def _parts(folder: Path) -> list[str]:
    parts = []
    for number, tree in enumerate(TREES):
        save(folder / f"part{number}", tree)
        parts.append(f"{folder}/part{number}")
    return parts


def test_trees_of_parts_are_one(tmp_path: Path) -> None:
    """Leaves, values and nested dicts of all parts are there, whole, and the parts stay."""
    merge_checkpoints(_parts(tmp_path), StorePath.of(tmp_path / "all"), "state", {"run": 1})
    found = load(tmp_path / "all")
    assert found["deep"]["z"] == "text" and found["deep"]["k"] == 2.5
    assert found["deep"]["a"][1] == 7 and found["none"] is None and found["empty"] == {}
    for name, tree in (("b", TREES[0]), ("a", TREES[1])):
        assert found[name].dtype == tree[name].dtype and (found[name] == tree[name]).all()
    assert verify(tmp_path / "all").leaves == 6
    assert load(tmp_path / "part0")["deep"]["a"][1] == 7
    links = {path.stat().st_nlink for path in (tmp_path / "all" / "state").iterdir()}
    assert links == {2}


def test_what_cannot_be_one(tmp_path: Path) -> None:
    """A path in two parts is named, a checkpoint that is there stays, and nothing is left."""
    parts = _parts(tmp_path)
    with pytest.raises(ValueError, match="b is in two parts, and not a dict in both"):
        merge_checkpoints([parts[0], parts[0]], StorePath.of(tmp_path / "all"), "state")
    assert not (tmp_path / "all").exists()
    save(tmp_path / "all", {"x": 1})
    with pytest.raises(NameTaken):
        merge_checkpoints(parts, StorePath.of(tmp_path / "all"), "state")
    assert load(tmp_path / "all") == {"x": 1}
    assert not list((tmp_path / "all" / "state").glob("*.safetensors"))
