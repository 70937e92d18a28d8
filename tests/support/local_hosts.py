"""Jobs with a local tier in one test process: each rank is a thread with a client, a "host" and a
folder of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import AtSteps, CheckpointManager, EveryNSteps, Local, Options
from holdfast.checkpoint.local_tier.local_steps import LocalSteps
from holdfast.checkpoint.saving.stager import SaveOrder
from holdfast.multihost import ClusterGroup
from tests.support.checkpointing import at_once, groups

SIZE = 5000


def state(step: int, rank: int, size: int = SIZE) -> dict[str, Any]:
    """Returns a rank's state at a step: an array of its own, one that is equal everywhere, and a
    number.
    """
    return {
        "mine": np.arange(size, dtype=np.float32) + 1000 * rank + step,
        "all": np.full(size, step, np.float64),
        "step": step,
    }


def is_state(found: Any, step: int, rank: int, size: int = SIZE) -> bool:
    """Says whether a restored state is that of a rank at a step, to the bit."""
    want = state(step, rank, size)
    return found["step"] == step and all(
        np.array_equal(found[name], want[name]) for name in ("mine", "all")
    )


class Job:
    """Managers of all ranks of one life of a job, called at once."""

    def __init__(self, managers: Sequence[CheckpointManager], every: int) -> None:
        self.managers = managers
        self._every = every

    def each(self, call: Callable[[int, CheckpointManager], Any]) -> list[Any]:
        """Makes a call on every rank, and returns the values, or raises the first error."""
        return at_once(
            [functools.partial(call, rank, manager) for rank, manager in enumerate(self.managers)]
        )

    def save(self, step: int, **options: Any) -> None:
        """Saves a step on all ranks, durably at each `every`th, and waits for its end there."""

        def save(rank: int, manager: CheckpointManager) -> None:
            self.begin(rank, step, state(step, rank), **options)
            manager.wait_until_finished()

        self.each(save)

    def begin(self, rank: int, step: int, found: Any, **options: Any) -> None:
        """Begins a save on one rank. In a group the primary chooses when local ones are: here it is
        at this very step.
        """
        manager = self.managers[rank]
        tier = manager._catalog.tier
        if not isinstance(tier, LocalSteps) or step % self._every == 0:
            manager.save(step, found, **options)
        elif not tier.statistics()["local_off"]:
            manager._parts.lanes[1].save(SaveOrder(step, found, **options))

    def restore(self, step: int | None = None, **options: Any) -> int:
        """Restores on all ranks, asserts that each got its own of one step to the bit, and returns
        which step.
        """
        found = self.each(lambda rank, manager: manager.restore(step, **options))
        assert all(is_state(each, found[0]["step"], rank) for rank, each in enumerate(found))
        return int(found[0]["step"])

    def statistics(self, name: str) -> list[Any]:
        """Returns one figure of every rank."""
        return [manager.statistics()[f"local_{name}"] for manager in self.managers]


@contextlib.contextmanager
def job(
    root: Path | str,
    folders: Sequence[Path | None],
    *,
    every: int = 1000,
    hosts: Sequence[str] = (),
    members: Sequence[ClusterGroup] | None = None,
    **local: Any,
) -> Iterator[Job]:
    """Yields a job with a rank for each folder (None: without a local tier), each on a host of its
    own unless `hosts` says otherwise. Its groups are `members` (None: new ones, in memory).

    Steps are saved when they are told to be: see `Job.begin`.
    """

    def opened(rank: int) -> CheckpointManager:
        folder = folders[rank]
        settings = {
            "replicas": 1,
            "timeout_s": 20,
            "address": "127.0.0.1",
            "failure_domain": hosts[rank] if hosts else f"host{rank}",
        }
        settings |= {"save_policy": AtSteps(())} | local
        options = Options(
            per_process=lambda path: path == "mine", save_timeout_s=60, restore_timeout_s=60
        )
        tier = None if folder is None else Local(folder, **settings)
        return CheckpointManager(
            root, save_policy=EveryNSteps(every), group=each[rank], options=options, local=tier
        )

    given = contextlib.nullcontext(members) if members else groups(len(folders))
    with given as each:
        managers = at_once([functools.partial(opened, rank) for rank in range(len(folders))])
        try:
            yield Job(managers, every)
        finally:
            at_once([manager.close for manager in managers])
