"""A save of one checkpoint that goes on when its call has returned."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    SaveCancelled,
    SaveFailed,
    StepExists,
    StepNotFound,
    UnsupportedLeaf,
    load,
    save,
    save_async,
    verify,
)
from holdfast.multihost import Group
from tests.support.checkpointing import at_once, groups


def test_the_arrays_may_change_and_the_handle_waits(tmp_path: Path) -> None:
    """What stood there at the call is saved; after `wait` it is durable, and the claim is gone."""
    tree = {"w": np.zeros(1 << 20)}
    handle = save_async(tmp_path / "a", tree, step=7, metadata={"run": "a"})
    tree["w"][:] = 1
    handle.wait(60)
    assert handle.done() and not load(tmp_path / "a")["w"].any()
    assert verify(tmp_path / "a").step == 7
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["checkpoint.json", "state"]


def test_what_is_wrong_is_raised_before_anything_is_written(tmp_path: Path) -> None:
    """A checkpoint that is there, a leaf that cannot be saved, neither a state nor items."""
    save(tmp_path / "a", {"w": np.zeros(3)})
    with pytest.raises(StepExists):
        save_async(tmp_path / "a", {"w": np.ones(3)})
    with pytest.raises(UnsupportedLeaf):
        save_async(tmp_path / "b", {"w": object()})
    with pytest.raises(ValueError, match="save_async: give either a state or items"):
        save_async(tmp_path / "c")
    assert not load(tmp_path / "a")["w"].any()
    with pytest.raises(StepNotFound):
        load(tmp_path / "b")
    save_async(tmp_path / "a", {"w": np.ones(3)}, overwrite=True).wait(60)
    assert load(tmp_path / "a")["w"].all()


def test_a_cancelled_save_is_not_there(tmp_path: Path) -> None:
    """Whichever came first, the cancelling or the commit: the folder is as the handle says."""
    for trial in range(10):
        folder = tmp_path / str(trial + 100)
        handle = save_async(folder, {"w": np.zeros(1 << 18)}, step=trial + 100)
        if handle.cancel():
            with pytest.raises(SaveCancelled, match="called it off"):
                handle.wait(60)
            with pytest.raises(StepNotFound):
                load(folder)
        else:
            handle.wait(60)
            assert load(folder)["w"].size


def test_of_saves_at_once_one_stands_and_nothing_else(tmp_path: Path) -> None:
    """Each may replace what is there: none is unclear, and the last one out leaves no pack that
    belongs to nobody.
    """
    folder = tmp_path / "a"
    for _ in range(30):
        saves = [
            functools.partial(save, folder, {"w": np.full(3, number)}, overwrite=True)
            for number in range(4)
        ]
        at_once(saves)
        assert load(folder)["w"][0] in range(4)
        assert len(list((folder / "state").iterdir())) == 1
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.json", "state"]


def test_all_processes_save_one_checkpoint(tmp_path: Path) -> None:
    """Each process begins it; an error of one is everybody's, by the handle."""

    def work(group: Group) -> str:
        save_async(tmp_path / "a", {"w": np.arange(4)}, group=group).wait(60)
        tree = {"w": np.arange(4) if group.index == 0 else object()}
        try:
            save_async(tmp_path / "b", tree, group=group).wait(60)
        except (SaveFailed, UnsupportedLeaf) as error:
            return str(error)
        return "saved"

    with groups(2) as both:
        told = at_once([functools.partial(work, group) for group in both])
    assert load(tmp_path / "a")["w"].tolist() == [0, 1, 2, 3]
    assert all("the leaf 'w' is a" in each for each in told)


def test_an_exit_waits_for_it(tmp_path: Path) -> None:
    """An interpreter that ends without a wait has saved; a failure is in its log."""
    program = (
        "import sys, numpy as np\n"
        "from holdfast.checkpoint import save_async\n"
        "save_async(sys.argv[1], {'w': np.ones(1 << 22)})\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "a"], check=True, timeout=100)
    assert load(tmp_path / "a")["w"].all()


def test_a_checkpoint_of_orbaxs_is_not_written_into(tmp_path: Path) -> None:
    """Without `overwrite` it is StepExists, as for one of ours; nothing is written."""
    save(tmp_path / "5", {"w": jnp.ones(2)}, layout="orbax")
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(StepExists, match=r"already; save to another folder$"):
        save(tmp_path / "5", {"w": jnp.zeros(2)}, step=5)
    assert [path for path in sorted(tmp_path.rglob("*")) if ".holdfast" not in str(path)] == files
    assert load(tmp_path / "5")["w"].tolist() == [1, 1]
