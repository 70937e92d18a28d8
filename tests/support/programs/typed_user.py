"""A user's program, with types of its own: nothing of holdfast's is Unknown to a checker."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast import launch, multihost
from holdfast.checkpoint import (
    SAVED,
    AnyOf,
    CheckpointError,
    CheckpointManager,
    EveryNSteps,
    Json,
    KeepBest,
    OnPreemption,
    Options,
    SaveHandle,
    iterate_steps,
    load,
    save,
    structure,
)

State = dict[str, NDArray[np.float64]]


def train(folder: str, steps: int) -> int:
    """Trains, saves and stops at a preemption; returns the last step."""
    step = 0
    options = Options(save_timeout_s=60.0, on_busy="wait")
    policy = AnyOf(EveryNSteps(10), OnPreemption())
    with CheckpointManager(
        folder, save_policy=policy, keep_policy=KeepBest(3, "loss"), options=options
    ) as manager:
        newest: int | None = manager.latest_step()
        state: State = {"w": np.zeros(4)}
        if newest is not None:
            state = manager.restore(newest, like=state)
        for step in range((newest or 0) + 1, steps + 1):
            handle: SaveHandle = manager.save(step, state, metrics={"loss": 1.0})
            handle.on_commit(lambda committed: print(committed))
            if manager.reached_preemption(step):
                break
        found: list[int] = manager.all_steps()
        print(found, manager.statistics()["saves"])
    return step


def evaluate(folder: str) -> None:
    """Follows the steps of a trainer."""
    for step in iterate_steps(folder, timeout_s=1.0):
        tree = structure(folder, step).items["state"].tree
        print(tree, load(folder, SAVED))


def main() -> None:
    """Joins, trains, says how it ended."""
    multihost.initialize(num_processes=1)
    with multihost.watchdog(600.0):
        try:
            last = train("runs/typed", 20)
            save("runs/one", {"step": last}, items=None)
            save("runs/other", items={"notes": Json({"last": last})})
        except CheckpointError as error:
            print(error.path)
    result: launch.JobResult = launch.run_local(["true"], 1)
    print(result.exit_code)
    multihost.shutdown()


if __name__ == "__main__":
    main()
