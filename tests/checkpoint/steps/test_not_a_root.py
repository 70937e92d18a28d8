"""The folder of one step, opened as a root."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointError, CheckpointManager, Options, save

TREE = {"w": np.ones(4)}


@pytest.mark.parametrize("read_only", [False, True])
def test_a_steps_folder_is_no_root(read_only: bool, tmp_path: Path) -> None:
    """Whatever its number is, and whatever the root calls it; nothing is written there."""
    options = Options(step_format="step_{:04d}")
    with CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in (0, 7):
            manager.save(step, TREE)
    for step in (0, 7):
        folder = tmp_path / "run" / f"step_{step:04d}"
        before = sorted(folder.rglob("*"))
        with pytest.raises(CheckpointError) as caught:
            CheckpointManager(folder, options=Options(read_only=read_only))
        assert str(caught.value) == (
            f"{folder} is the folder of step {step}, and no root of steps: open {folder.parent}"
            f" and restore({step}), or load({str(folder)!r})"
        )
        assert sorted(folder.rglob("*")) == before
    record = tmp_path / "run" / "step_0007" / "checkpoint.json"
    record.write_bytes(record.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="is the folder of step step_0007, and no root"):
        CheckpointManager(record.parent)


def test_a_checkpoint_by_itself_may_be_a_root(tmp_path: Path) -> None:
    """What a one-shot save wrote, copies and conversions included; not where it has a number."""
    save(tmp_path / "whole", TREE)
    with CheckpointManager(tmp_path / "whole") as manager:
        manager.save(3, TREE)
    save(tmp_path / "whole", TREE, overwrite=True)
    with CheckpointManager(tmp_path / "whole") as manager:
        assert manager.all_steps() == [3]
    save(tmp_path / "numbered", TREE, step=5)
    with pytest.raises(CheckpointError, match=r"numbered is the folder of step 5, and no root"):
        CheckpointManager(tmp_path / "numbered")


def test_a_root_in_a_store_is_told_from_its_steps() -> None:
    """By the same rule, where a URL has a folder above it."""
    object_root = "memory://mistakes/run"
    with CheckpointManager(object_root) as manager:
        for step in (0, 7):
            manager.save(step, TREE).wait()
            message = f"/{step} is the folder of step {step}, and no root"
            with pytest.raises(CheckpointError, match=message):
                CheckpointManager(f"{object_root}/{step}")
