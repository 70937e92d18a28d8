"""A job may die at any moment of a save: what is listed afterwards is whole, and what was acknowledged is there."""

from __future__ import annotations

import errno
import os
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest
from checkpointing import together
from killpoints import build, walk

from holdfast.checkpoint import CheckpointManager, KeepLast

FAST_SEEDS = 3
SEEDS = 20
ROWS, COLUMNS = 4, 3_250_000  # f32: 52 MB

SAVES_FOR_EVER = """
whole = np.arange(4 * 3_250_000, dtype=np.float32).reshape(4, 3_250_000)
sharding = NamedSharding(mesh, P("x"))
with CheckpointManager(root, keep_policy=KeepLast(2)) as manager:
    for step in range(1, 1000):
        w = jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i] + step)
        manager.save(step, {"w": w, "step": step})
        manager.wait_until_finished()
        print("acknowledged", step, flush=True)
"""


def check(root: Path, acknowledged: int) -> None:
    """Opens the root as the next attempt would: the newest step is not older than what was acknowledged, and all listed ones are exact."""
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
    assert kept == {str(steps[-1]), "2000"} and os.listdir(root / ".holdfast") == [], "something was left behind"


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= FAST_SEEDS else []) for seed in range(SEEDS)])
def test_sigkill_of_the_whole_job_at_a_random_moment(tmp_path: Path, seed: int) -> None:
    """The manager opens, latest_step() is the last acknowledged step or newer, and every listed step restores bit-exact."""
    with together(SAVES_FOR_EVER, 2, tmp_path, devices=2) as processes:
        processes.wait_for(0, "acknowledged 2")
        time.sleep(random.Random(seed).random() * 0.4)  # the moment is what varies: a save takes some 0.1 s
        for index in range(2):
            processes.kill(index)
        processes.wait()
        acknowledged = max(int(step) for index in range(2) for step in re.findall(r"acknowledged (\d+)", processes.output(index)))
    check(tmp_path, acknowledged)


MOST_POINTS = 400


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("killpoint"))


@pytest.mark.parametrize(
    ("processes", "victim", "every"),
    [(1, 0, 7), (2, 1, 1), pytest.param(1, 0, 1, marks=pytest.mark.slow), pytest.param(2, 0, 1, marks=pytest.mark.slow)],
)
def test_sigkill_before_each_system_call_of_a_save(library: Path, processes: int, victim: int, every: int) -> None:
    """Of a save that deletes an old step, from opening to closing: listed steps are exact, known ones there, nothing stays behind.

    Each point is a fresh root and a real SIGKILL right before the nth call that changes files. A process that outlives the other hears of
    its loss, or reads the record and knows.
    """
    found = walk(library, processes, victim, 0, range(0, MOST_POINTS, every))
    assert not found[-1]["reached"] and set(found[-1]["how"]) == {"saved"}, "the walk did not come to the end of the save"
    assert all(point["how"][victim] == "killed" for point in found[:-1]) and len(found) * every > (30 if victim == 0 else 3)
    others = {point["how"][1 - victim] for point in found[:-1]} if processes == 2 else set()
    assert others <= {"SaveFailed", "CommitUnknown", "ProcessLost", "saved"}


@pytest.mark.parametrize(
    ("error", "every"),
    [(errno.ENOSPC, 7), (errno.EIO, 7), *(pytest.param(error, 1, marks=pytest.mark.slow) for error in (errno.ENOSPC, errno.EIO))],
)
def test_a_full_disk_or_a_broken_one_at_each_system_call(library: Path, error: int, every: int) -> None:
    """ENOSPC and EIO at each call: one error of the tree or none, old steps exact, nothing left behind after the next save."""
    found = walk(library, 1, 0, error, range(0, MOST_POINTS, every))
    assert not found[-1]["reached"]
    outcomes = {point["how"][0] for point in found}
    assert outcomes == {"CheckpointError", "SaveFailed", "CommitUnknown", "saved"} or (every > 1 and "SaveFailed" in outcomes), outcomes
