"""A job may die at any moment of a save: what is listed afterwards is whole, and what was
acknowledged is there.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, KeepLast
from tests.support.checkpointing import together
from tests.support.killpoints import build, walk, walk_branch
from tests.support.paths import program

FAST_SEEDS = 1
SEEDS = 20
ROWS = 4
COLUMNS = 3_250_000  # f32: 52 MB

SAVES_FOR_EVER = program("crash_saves_for_ever")


def check(root: Path, acknowledged: int) -> None:
    """Opens the root as the next attempt would: the newest step is not older than what was
    acknowledged, and all listed ones are exact.
    """
    whole = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    with CheckpointManager(root, keep_policy=KeepLast(2)) as manager:
        steps = manager.all_steps()
        assert steps and steps[-1] >= acknowledged, (steps, acknowledged)
        for step in steps:
            got = manager.restore(step)
            assert got["step"] == step and np.array_equal(got["w"], whole + step), step
        manager.save(2000, {"w": np.zeros(3)})
        manager.wait_until_finished()
    kept = {path.parent.parent.name for path in root.rglob("*.safetensors")}
    assert kept == {str(steps[-1]), "2000"} and os.listdir(root / ".holdfast") == [], (
        "something was left behind"
    )


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.slow] if seed >= FAST_SEEDS else [])
        for seed in range(SEEDS)
    ],
)
def test_sigkill_of_all_at_a_random_moment(tmp_path: Path, seed: int) -> None:
    """The manager opens, latest_step() is the last acknowledged step or newer, and every listed
    step restores bit-exact.
    """
    with together(SAVES_FOR_EVER, 2, tmp_path, devices=2) as processes:
        processes.wait_for(0, "acknowledged 2")
        time.sleep(
            random.Random(seed).random() * 0.4
        )  # the moment is what varies: a save takes some 0.1 s
        for index in range(2):
            processes.kill(index)
        processes.wait()
        acknowledged = max(
            int(step)
            for index in range(2)
            for step in re.findall(r"acknowledged (\d+)", processes.output(index))
        )
    check(tmp_path, acknowledged)


MOST_POINTS = 400


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("killpoint"))


Walk = tuple[int, int, int, int]


def points(fast: Sequence[Walk], slow: Sequence[Walk]) -> pytest.MarkDecorator:
    """Parametrises by (processes, victim, first point, every how many)."""
    return pytest.mark.parametrize(
        ("processes", "victim", "first", "every"),
        [*fast, *(pytest.param(*walk, marks=pytest.mark.slow) for walk in slow)],
    )


@points(
    fast=[(1, 0, 0, 14), (2, 0, 20, 29)],
    slow=[
        (1, 0, 0, 1),
        *((2, 1, at, 2) for at in range(2)),
        *((2, 0, at, 4) for at in range(4)),
    ],
)
def test_sigkill_before_each_system_call_of_a_save(
    library: Path, processes: int, victim: int, first: int, every: int
) -> None:
    """Of a save that deletes an old step, from opening to closing: listed steps are exact, known
    ones there, nothing stays behind.

    Each point is a fresh root and a real SIGKILL right before the nth call that changes files. Of
    two processes both write packs, of an array that lies on both and of their own; one that
    outlives the other learns of its loss, or reads the record and knows.
    """
    found = walk(library, processes, victim, 0, range(first, MOST_POINTS, every))
    assert not found[-1]["reached"] and set(found[-1]["how"]) == {"saved"}, (
        "the walk did not come to the end of the save"
    )
    assert all(point["how"][victim] == "killed" for point in found[:-1]) and len(found) * every > (
        30 if victim == 0 else 6
    )
    others = {point["how"][1 - victim] for point in found[:-1]} if processes == 2 else set()
    assert others <= {"SaveFailed", "CommitUnknown", "ProcessLost", "saved"}


@pytest.mark.parametrize(
    "error",
    [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)],
    ids=errno.errorcode.get,
)
@points(
    fast=[(2, 0, 20, 29)],
    slow=[(1, 0, 0, 1), (2, 1, 0, 1), (2, 0, 0, 2), (2, 0, 1, 2)],
)
def test_a_full_or_broken_disk_at_each_call(
    library: Path, error: int, processes: int, victim: int, first: int, every: int
) -> None:
    """ENOSPC and EIO at each call: one error of the tree, the same on every process, or none; old
    steps exact, nothing left behind after the next save.
    """
    found = walk(library, processes, victim, error, range(first, MOST_POINTS, every))
    assert not found[-1]["reached"] and len(found) * every > (30 if victim == 0 else 6)
    assert all(len(set(point["how"])) == 1 for point in found), [point["how"] for point in found]
    outcomes = {point["how"][0] for point in found}
    assert "SaveFailed" in outcomes and outcomes <= {
        "CheckpointError",
        "SaveFailed",
        "CommitUnknown",
        "saved",
    }, outcomes


@points(fast=[(1, 0, 0, 11)], slow=[(1, 0, 0, 1), (2, 0, 0, 3), (2, 1, 0, 5)])
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(0, id="SIGKILL"),
        pytest.param(errno.EIO, id="EIO", marks=pytest.mark.slow),
        pytest.param(errno.EMLINK, id="EMLINK", marks=pytest.mark.slow),
    ],
)
def test_an_incremental_save_at_each_system_call(
    library: Path, error: int, processes: int, victim: int, first: int, every: int
) -> None:
    """Killed, or refused, before each call, `link` among them: listed steps are exact, and nothing
    stays behind after the next save.
    """
    found = walk(
        library, processes, victim, error, range(first, MOST_POINTS, every), incremental=True
    )
    assert (
        not found[-1]["reached"]
        and found[-1]["linked"]
        and len(found) * every > (60 if victim == 0 else 12)
    ), len(found)


@pytest.mark.parametrize(
    ("error", "every"),
    [
        (0, 7),
        *(pytest.param(error, 1, marks=pytest.mark.slow) for error in (0, errno.EIO, errno.ENOSPC)),
    ],
)
def test_a_job_that_goes_back_at_each_system_call(library: Path, error: int, every: int) -> None:
    """Killed, or refused, before each call of the save that begins its branch: the newest step is
    the one before, the base, or the branch's own, and nothing that was left is lost.
    """
    found = walk_branch(library, error, range(0, MOST_POINTS, every))
    assert not found[-1]["reached"] and len(found) * every > 20
    newest = [point["newest"] for point in found]
    assert {1, 2, 3} <= set(newest), newest
    if not error:
        # The mark comes first, then the step.
        order = {3: 0, 1: 1, 2: 2}
        assert sorted(newest, key=order.__getitem__) == newest
