"""What lies in a root beside the steps: the same on Orbax and on holdfast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as real
import pytest

from holdfast.checkpoint import load
from holdfast.compat import orbax as ours
from holdfast.compat.orbax.roots.root import Trash
from tests.support.orbax_programs import run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own
TREE = {"w": jnp.arange(4.0)}


def _about(ocp: Any, root: Path, metadata: Any = None, **options: Any) -> Any:
    options = ocp.CheckpointManagerOptions(**options)
    with ocp.CheckpointManager(root, options=options, metadata=metadata) as manager:
        return manager.metadata().custom_metadata


def test_the_metadata_of_a_root(tmp_path: Path) -> None:
    """The first that is given stays, for every later manager; a reader's counts where a root has
    none; an empty mapping is one too.
    """

    def program(ocp: Any, root: Path) -> Any:
        return [
            _about(ocp, root / "a"),
            _about(ocp, root / "a", {"lr": 0.1, "tags": ["x"]}),
            _about(ocp, root / "a", {"lr": 0.2}),
            _about(ocp, root / "a"),
            _about(ocp, root / "a", {"lr": 0.3}, read_only=True),
            _about(ocp, root / "b", {"lr": 1}, save_root_metadata=False),
            _about(ocp, root / "b", {"lr": 1}, read_only=True),
            _about(ocp, root / "c", {}),
            _about(ocp, root / "c", {"lr": 1}),
        ]

    run_both(program, tmp_path)


def test_each_reads_the_others_metadata(tmp_path: Path) -> None:
    """A root that Orbax began shows its metadata here, and the other way round."""
    assert _about(real, tmp_path / "a", {"n": 1}) == _about(ours, tmp_path / "a") == {"n": 1}
    assert _about(ours, tmp_path / "b", {"n": 2}) == _about(real, tmp_path / "b") == {"n": 2}


def test_the_metadata_of_a_root_in_v1(tmp_path: Path) -> None:
    """`training.Checkpointer` takes it, and gives it back."""

    def program(ocp: Any, root: Path) -> Any:
        with ocp.training.Checkpointer(root, custom_metadata={"n": 1}) as checkpointer:
            found = checkpointer.root_metadata()
        assert Path(found.directory) == root
        return found.custom_metadata

    run_both(program, tmp_path, v1=True)


def test_deleted_steps_lie_in_a_folder(tmp_path: Path) -> None:
    """What is let go or deleted is moved to `todelete_subdir`, where it is whole."""

    def program(ocp: Any, root: Path) -> Any:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, todelete_subdir="gone")
        with ocp.CheckpointManager(root, options=options) as manager:
            for step in range(4):
                manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3, step)}))
            manager.wait_until_finished()
            manager.delete(3)
            steps = list(manager.all_steps())
        gone = sorted(path.name for path in (root / "gone").iterdir())
        with ocp.CheckpointManager(root / "gone") as manager:
            values = [manager.restore(int(step))["w"] for step in gone]
        return steps, gone, values

    run_both(program, tmp_path)


def test_a_step_that_is_deleted_again(tmp_path: Path) -> None:
    """It takes the place of the one that was deleted before, where Orbax fails."""
    options = ours.CheckpointManagerOptions(todelete_subdir="gone")
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        for value in (1, 2):
            manager.save(3, args=ours.args.StandardSave({"w": jnp.full(3, value)}))
            manager.wait_until_finished()
            manager.delete(3)
    assert load(tmp_path / "gone" / "3", item="default")["w"].tolist() == [2, 2, 2]


def test_what_is_put_aside_is_whole_and_ours(tmp_path: Path) -> None:
    """A step in flight is waited for; one of Orbax's, which is not deleted, is not put aside."""
    with real.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=real.args.StandardSave(TREE))
    options = ours.CheckpointManagerOptions(todelete_subdir="gone", max_to_keep=1)
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(2, args=ours.args.StandardSave({"w": np.zeros(1 << 20)}))
        manager.delete(2)
        for step in (3, 4):
            manager.save(step, args=ours.args.StandardSave(TREE))
    assert sorted(path.name for path in (tmp_path / "gone").iterdir()) == ["2", "3"]
    assert load(tmp_path / "gone" / "2", item="default")["w"].shape == (1 << 20,)


def test_a_step_that_cannot_be_put_aside_stays(tmp_path: Path) -> None:
    """It is tried again after the next save, and the log says why."""
    with ours.CheckpointManager(
        tmp_path, options=ours.CheckpointManagerOptions(max_to_keep=1, todelete_subdir="gone")
    ) as manager:
        (tmp_path / "gone").write_text("no folder")
        for step in range(2):
            manager.save(step, args=ours.args.StandardSave(TREE))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1]
        with pytest.raises(OSError, match="step 0 could not be put into gone"):
            manager.delete(0)
        (tmp_path / "gone").unlink()
        manager.save(2, args=ours.args.StandardSave(TREE))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
    assert load(tmp_path / "gone" / "1", item="default")["w"].shape == (4,)


def test_a_bucket_has_no_such_folder() -> None:
    """As with Orbax the option has no effect there."""
    assert Trash("s3://bucket/run", "gone").put_aside(3)
