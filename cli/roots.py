"""Roots as commands go through them, while their jobs save and delete steps.

It imports jax, which takes a second: commands import it when they run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property

from holdfast.checkpoint import CheckpointError, StepFacts, StepGone, StepNotFound
from holdfast.checkpoint.layouts.base import CheckpointLayout, CheckpointReader, total_bytes
from holdfast.checkpoint.layouts.detect import (
    find_steps,
    left_steps,
    nothing_at,
    open_checkpoint,
    while_it_is_there,
)
from holdfast.checkpoint.layouts.holdfast import HoldfastCheckpoint
from holdfast.checkpoint.steps.index import facts_of
from holdfast.checkpoint.storage.base import Entry
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage

from .common import Meter

ALL_GONE = "has other steps than a moment ago, which its job has deleted: try again"


class Root:
    """A root of steps in any layout, as one look has shown it. `steps` has the folder and the
    layout of each finished step, ascending.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.storage = open_storage(path)
        # Its job may have deleted all that the first listing has shown, and saved others.
        self.steps = find_steps(self.storage) or find_steps(self.storage)

    @cached_property
    def left_behind(self) -> set[int]:
        """The steps that were left behind."""
        return left_steps(self.storage, self.steps)

    def nothing(self) -> StepNotFound:
        """Returns what to raise where there is no step: it says what is there instead."""
        return StepNotFound(nothing_at(self.storage), path=self.path)

    def folder(self, step: int) -> StorePath:
        """Returns where a step is."""
        return StorePath(self.storage, self.steps[step][0])

    @contextlib.contextmanager
    def opened(self, step: int, meter: Meter | None = None) -> Iterator[CheckpointReader]:
        """Opens a step; the meter gets the bytes that are read of it. Raises StepGone where the
        step is deleted before the block ends.
        """
        folder = self.folder(step)
        storage = self.storage if meter is None else CountingStorage(self.storage, meter)
        with while_it_is_there(folder):
            checkpoint = self.steps[step][1].open(StorePath(storage, folder.name))
            if meter is not None:
                meter.expect(total_bytes(checkpoint))
            yield checkpoint

    def own_steps(self) -> tuple[list[StepFacts], list[int]]:
        """Returns the steps of holdfast's, and those that a listing shows to be damaged: these must
        not count for the last or the best. Raises StepNotFound where there are neither.
        """
        steps: list[StepFacts] = []
        damaged: list[int] = []
        for step, (_, layout) in self.steps.items():
            if layout.name != "holdfast":
                continue
            try:
                checkpoint, _, wrong = look_at(self.folder(step), layout)
            except StepGone:  # its job has deleted it meanwhile
                continue
            if wrong or not isinstance(checkpoint, HoldfastCheckpoint):
                damaged.append(step)
            else:
                steps.append(facts_of(step, checkpoint.record))
        if steps or damaged:
            return steps, damaged
        if not self.steps:
            raise self.nothing()
        why = "has steps, but none of holdfast's, and prune deletes no others"
        if any(layout.name == "holdfast" for _, layout in self.steps.values()):
            why = ALL_GONE
        raise StepNotFound(f"{self.storage.root} {why}", path=self.path)


def look_at(
    folder: StorePath, layout: CheckpointLayout
) -> tuple[CheckpointReader | None, list[Entry], list[str]]:
    """Opens a finished checkpoint, or finds that it cannot be. Returns it, all that is in its
    folder, and what is wrong with that. Raises StepGone where it is deleted meanwhile.
    """
    checkpoint: CheckpointReader | None = None
    wrong: list[str] = []
    try:
        with while_it_is_there(folder):
            checkpoint = layout.open(folder)
    except StepGone:
        raise
    except CheckpointError as error:
        wrong = [str(error)]
    entries = folder.storage.list(folder.name, recursive=True)
    if isinstance(checkpoint, HoldfastCheckpoint):
        wrong = checkpoint.misfits(entries)
    return checkpoint, entries, wrong


def open_measured(
    path: str, step: int | None, meter: Meter, *, readings: int = 1
) -> CheckpointReader:
    """Opens a checkpoint of any layout; the meter gets the bytes that are read of it, and expects
    its arrays that many times.
    """
    checkpoint = open_checkpoint(path, step, wrap=lambda storage: CountingStorage(storage, meter))
    meter.expect(readings * total_bytes(checkpoint))
    return checkpoint
