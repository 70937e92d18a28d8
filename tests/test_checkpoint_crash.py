"""A job may die at any moment of a save: what is listed afterwards is whole, and what was acknowledged is there."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest
from checkpointing import together

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
