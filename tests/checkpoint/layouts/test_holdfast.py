"""Our own layout behind the seam."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Json, StepNotFound, save
from holdfast.checkpoint.layouts.base import read_leaves
from holdfast.checkpoint.layouts.holdfast import HoldfastLayout
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage


@pytest.fixture
def folder(tmp_path: Path) -> StorePath:
    with CheckpointManager(tmp_path) as manager:
        items = {"state": {"w": np.arange(9.0), "n": 3}, "config": Json({"lr": 1})}
        manager.save(5, items=items, metrics={"loss": 0.5}, metadata={"who": "me"})
        manager.wait_until_finished()
    return StorePath(LocalStorage(tmp_path), "5")


def test_a_step_describes_itself(folder: StorePath) -> None:
    """Items and their kinds, step, times, metrics and metadata are those of the record."""
    layout = HoldfastLayout()
    assert layout.recognises(folder, folder.names()) and not layout.recognises(
        folder / "state", (folder / "state").names()
    )
    checkpoint = layout.open(folder)
    info = checkpoint.info
    assert (info.layout, info.path, info.step, info.items) == (
        "holdfast",
        str(folder),
        5,
        {"state": "tree", "config": "json"},
    )
    assert (
        info.metrics == {"loss": 0.5}
        and info.metadata == {"who": "me"}
        and (info.started_s or 0) <= (info.finished_s or 0)
    )
    assert checkpoint.json("config") == {"lr": 1} and [
        leaf.path for leaf in checkpoint.item("state").leaves
    ] == ["n", "w"]
    assert checkpoint.verify().files == 2
    with pytest.raises(StepNotFound, match="has no item 'other'; it has: config, state"):
        checkpoint.item("other")


def test_a_listing_shows_missing_and_cut_files(folder: StorePath) -> None:
    """What is whole has no misfits; a file that is cut off, grown or gone is named with its
    sizes.
    """
    checkpoint = HoldfastLayout().open(folder)

    def misfits() -> list[str]:
        return checkpoint.misfits(folder.storage.list(folder.name, recursive=True))

    assert misfits() == []
    (pack,) = Path(str(folder / "state")).iterdir()
    size = pack.stat().st_size
    pack.write_bytes(pack.read_bytes()[:-1])
    assert misfits() == [f"state/{pack.name} has {size - 1} of {size} bytes"]
    pack.unlink()
    assert misfits() == [f"state/{pack.name} is missing"]


def test_objects_are_not_taken_for_cut_off() -> None:
    """Where listings have no sizes, only missing files are misfits."""
    save("memory://misfits/a", {"w": np.arange(9.0)})
    folder = StorePath(open_storage("memory://misfits/a"))
    checkpoint = HoldfastLayout().open(folder)
    assert checkpoint.misfits(folder.storage.list("", recursive=True)) == []
    folder.storage.delete(checkpoint.record.file_names())
    assert len(checkpoint.misfits(folder.storage.list("", recursive=True))) == 1


@pytest.mark.parametrize(
    ("name", "step"), [("0", 0), ("12", 12), ("012", None), ("step_12", None), ("", None)]
)
def test_names_of_steps(name: str, step: int | None) -> None:
    """A step's folder is its number, without zeros in front."""
    assert HoldfastLayout().step_of(name) == step


def test_one_leaf_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """Where each fills a batch: the one before is let go of before the next is read."""
    save(tmp_path, {name: np.full(100, number) for number, name in enumerate("abcd")})
    checkpoint = HoldfastLayout().open(StorePath(open_storage(tmp_path)))
    made: list[Any] = []

    def allocate(nbytes: int) -> Any:
        assert not [memory for memory in made if memory() is not None]
        memory = np.empty(nbytes, np.uint8)
        made.append(weakref.ref(memory))
        return memory

    leaves = checkpoint.item("state").leaves
    for _, array in read_leaves(
        checkpoint.reader("state"), leaves, batch_bytes=1, allocate=allocate
    ):
        del array
    assert len(made) == 4
