"""What a reader refuses is refused before a byte is written, in the caller's thread: nothing is acknowledged that no reader takes."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Json, KeepLast, save

STATE = {"x": np.arange(3.0)}


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and ".holdfast" not in path.parts)


@pytest.mark.parametrize("name", ["a/b", "../../evil", "", ".hidden", "a" * 101, "naïve", 3])
def test_a_name_that_no_reader_takes_is_refused_and_the_last_step_stays(name: Any, tmp_path: Path) -> None:
    """An item's name is held against the reader's rule before anything is written: the step before it is not deleted for it."""
    root = tmp_path / "deep" / "root"
    with CheckpointManager(root, keep_policy=KeepLast(1)) as manager:
        manager.save(1, STATE)
        manager.wait_until_finished()
        before = _files(tmp_path)
        with pytest.raises((ValueError, TypeError), match="item"):
            manager.save(2, items={"state": STATE, name: STATE})
        manager.save(3, STATE)  # a refusal is no failure: the next save goes on
        manager.wait_until_finished()
        assert manager.all_steps() == [3]
    assert [file.split("-")[0] for file in before] == ["deep/root/1/checkpoint.json", "deep/root/1/state/00000"]
    with pytest.raises((ValueError, TypeError), match="item"):
        save(tmp_path / "one", STATE, item=name)
    assert not _files(tmp_path / "one")


@pytest.mark.parametrize("step", [-1, 10**18, 1.5, "3", True, None])
@pytest.mark.parametrize(
    "call", [lambda path, step: save(path, STATE, step=step), lambda path, step: CheckpointManager(path).save(step, STATE)]
)
@pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning")
def test_a_step_that_no_reader_takes_is_refused(call: Callable[[Path, Any], object], step: Any, tmp_path: Path) -> None:
    """A step is a whole number from 0 to 10**18 - 1, for one-shot saves as for managers."""
    with pytest.raises((ValueError, TypeError), match="step"):
        call(tmp_path / "root", step)
    assert not _files(tmp_path / "root")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"a": {1, 2}}, "JSON"),
        ({"a": float("nan")}, "JSON"),
        ({"a": "\ud800"}, "UTF-8"),
        ("x" * 101_000_000, "100,000,000"),
    ],
    ids=["a set", "NaN", "half a character", "too long"],
)
def test_json_that_no_reader_takes_is_refused(value: Any, sentence: str, tmp_path: Path) -> None:
    """A Json item is encoded in the caller's thread, and held against the reader's limit there."""
    with CheckpointManager(tmp_path / "root") as manager:
        with pytest.raises((ValueError, TypeError), match=sentence):
            manager.save(1, items={"state": STATE, "facts": Json(value)})
        assert not _files(tmp_path / "root")
        with pytest.raises((ValueError, TypeError), match="metadata"):
            manager.save(1, STATE, metadata={"a": {1, 2}})
        assert not _files(tmp_path / "root")


def test_a_metric_that_is_no_number_is_valid_json(tmp_path: Path) -> None:
    """A loss that is NaN or infinite is saved and comes back, and the record stays JSON for every parser."""

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, STATE, metrics={"loss": float("nan"), "least": float("-inf"), "most": np.float32("inf"), "lr": 0.5})
        manager.wait_until_finished()
        found = manager.metrics(1)
    assert math.isnan(found.pop("loss")) and found == {"least": -math.inf, "most": math.inf, "lr": 0.5}
    json.loads((tmp_path / "root" / "1" / "checkpoint.json").read_bytes(), parse_constant=refused)


def test_what_is_changed_after_save_returned_is_not_saved(tmp_path: Path) -> None:
    """Json items and metadata are encoded before `save` returns."""
    facts = {"lr": 1}
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, items={"state": {"x": np.ones(1 << 22)}, "facts": Json(facts)}, metadata=facts)
        facts["lr"] = 2
        manager.wait_until_finished()
        assert manager.restore(1, item="facts") == {"lr": 1} and manager.metadata(1) == {"lr": 1}


def _child(manager: CheckpointManager, how: str) -> None:
    if how == "closes":
        manager.close()
    elif how == "saves":
        with pytest.raises(ValueError, match="forked"):
            manager.save(7, STATE)


@pytest.mark.parametrize("how", ["ends", "closes", "saves"])
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_takes_nothing_away(how: str, tmp_path: Path) -> None:
    """A child that was forked (a DataLoader's worker) has no manager: its end changes nothing for the parent, whose saves go on."""
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, STATE)
        manager.wait_until_finished()
        manager.save(2, {"x": np.ones(1 << 22)})  # the child is forked in the middle of it
        child = multiprocessing.get_context("fork").Process(target=_child, args=(manager, how))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        manager.wait_until_finished()
        manager.save(3, STATE)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]
