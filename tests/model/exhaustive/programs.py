"""What the processes of an execution do: they open, save, sweep and read, by the real shells.

A manager is put together as `open_manager` does it, but for the thread that saves and the threads
that watch: a save is done by its caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from holdfast.checkpoint import (
    CheckpointError,
    CommitUnknown,
    Corrupt,
    KeepAll,
    Options,
    StepGone,
    StepNotFound,
)
from holdfast.checkpoint import manager_parts as parts
from holdfast.checkpoint.agreement.save_protocol import SaveResult
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.layouts.base import CheckpointReader
from holdfast.checkpoint.layouts.holdfast import HoldfastCheckpoint
from holdfast.checkpoint.policy import KeepPolicy, StepFacts
from holdfast.checkpoint.saving.save import StepSaver
from holdfast.checkpoint.saving.stager import JsonValue
from holdfast.checkpoint.steps.claims import this_writer
from holdfast.checkpoint.steps.garbage import fence_others, sweep_files
from holdfast.checkpoint.steps.holds import drop_hold, take_hold
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.steps.opening import look_at_steps
from holdfast.checkpoint.storage.base import Storage
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.convert import convert
from holdfast.coordination import HoldfastError
from holdfast.multihost import Group
from holdfast.multihost.group.group import Solo

from .rules import (
    FAILED,
    SAVED,
    UNKNOWN,
    Began,
    Decides,
    Failed,
    GoesBack,
    Holds,
    May,
    Told,
    Took,
)
from .world import World

OPTIONS = Options(check_free_space=False)


def told_of(result: SaveResult) -> str:
    """Returns what a process was told by the end of its save."""
    if result.error is None:
        return SAVED
    return FAILED if result.deletable else UNKNOWN


class Manager:
    """One process's part of a manager."""

    def __init__(
        self,
        world: World,
        storage: Storage,
        *,
        group: Group | None = None,
        keep: KeepPolicy | None = None,
        options: Options = OPTIONS,
        has_hosts: bool = False,
    ) -> None:
        self._world = world
        self._counter = 0
        self.told: list[str] = []  # how its saves have ended
        self.storage = storage
        members = group or Solo()
        keep = keep or KeepAll()
        self.root = parts._open_root(storage, members, options)
        with ExitStack() as undo:
            catalog = parts._open_catalog(
                self.root, keep, None, None, undo=undo, waiting=nullcontext
            )
        lineage = parts._lineage_of(self.root, catalog.state.index, begins=has_hosts)
        self.state = replace(catalog.state, lineage=lineage)
        self.catalog = replace(catalog, state=self.state)
        self._saver = StepSaver(self.root, self.state)

    @property
    def id(self) -> str:
        """The id of its writer."""
        return self.root.writer.id

    def sweep(self) -> None:
        """Does what a manager does in the background once it has opened."""
        sweep_files(self.storage, self.root.claims)

    def save(self, step: int, *, overwrite: bool = False) -> str:
        """Saves a step, whose value is the save's id, and the process; returns what this process
        was told.
        """
        world = self._world
        self._counter += 1
        save_id = f"{self.id}{self._counter:08x}"
        try:
            place = self.catalog.place_of(step, overwrite=overwrite)
        except CheckpointError:
            return FAILED
        self.state.order.begun(place)
        save = self._saver.new_save(self._counter, step)
        save.overwrite = place.replaces
        save.place = place
        text = json.dumps([save_id, self.root.group.index]).encode()
        save.values["state"] = JsonValue(text, self.root.group.count > 1)
        save.started_s = world.now_s
        save.may_miss = False
        who = world.who()
        if place.replaces:
            world.effect(May(who, step))
        if place.is_branch:
            world.effect(GoesBack(who, save_id, place.base))
        self._announce_deletions()
        result = self._saver.run(save)
        how = told_of(result)
        self.told.append(how)
        world.effect(Told(who, save_id, step, how))
        return how

    def _announce_deletions(self) -> None:
        """Tells the judge of what the keep policy lets go, when it does."""
        index = self.state.index
        remove = type(index).remove
        superfluous = type(index).superfluous
        world = self._world

        def decided(new: StepFacts, **more: Any) -> list[int]:
            steps = superfluous(index, new, **more)
            world.effect(Decides(world.who(), steps))
            return steps

        def announced(steps: Sequence[int], **more: Any) -> Any:
            for step in steps:
                world.effect(May(world.who(), step))
            return remove(index, steps, **more)

        vars(index).update(superfluous=decided, remove=announced)

    def delete(self, step: int) -> None:
        """Deletes a step, as a user does."""
        self._world.effect(May(self._world.who(), step))
        self.state.index.remove([step])

    def went_back_to(self, step: int) -> None:
        """Notes a restore, as the restorer does."""
        self.state.order.restored(step)
        self.state.lineage.restored()

    def close(self) -> None:
        """Gives the claim up."""
        self.root.give_up()


def convert_into(world: World, source: CheckpointReader, storage: Storage) -> str:
    """Does what `holdfast convert` does: what lies elsewhere, whose value has the id that the save
    will have, becomes a step of a root. Returns what this process was told.
    """
    how = SAVED
    try:
        convert(source, StorePath(storage), "holdfast")
    except CommitUnknown:
        how = UNKNOWN
    except HoldfastError:
        how = FAILED
    assert source.info.step is not None
    world.effect(Told(world.who(), source.json("state")[0], source.info.step, how))
    return how


def sweep(storage: Storage, *, force: bool = False, spares: str = "") -> None:
    """Does what `holdfast sweep` does to a root; it spares one writer."""
    claims = open_claims(storage)
    me = replace(this_writer(), id=spares) if spares else this_writer()
    fence_others(claims, me, force=force)
    sweep_files(storage, claims)


def read_newest(world: World, storage: Storage) -> int | None:
    """Restores the newest step as an evaluator does; returns it."""
    who = world.who()
    world.effect(Began(who))
    found = look_at_steps(storage)
    steps = [step for step in found.steps if step not in found.left_behind]
    if not steps:
        return None
    return read_step(world, storage, steps[-1], as_newest=True)


def read_step(world: World, storage: Storage, step: int, *, as_newest: bool = False) -> int | None:
    """Restores a step that was listed, with what each process has saved; returns it, None where it
    is gone.
    """
    who = world.who()
    try:
        record = read_record(storage, str(step))
        checkpoint = HoldfastCheckpoint(storage, str(step), record)
        processes = range(record.processes)
        values = [checkpoint.json("state", each) for each in processes]
    except (StepNotFound, StepGone, Corrupt) as error:
        world.effect(Failed(who, step, str(error)))
        return None
    for process, (save, owner) in zip(processes, values, strict=True):
        told = save if owner == process else f"{save} of process {owner}, as process {process}'s"
        world.effect(Took(who, step, told, as_newest))
    return step


def read_held(world: World, storage: Storage, step: int) -> None:
    """Holds a step, and restores it where it is held, as `watch` and its caller do."""
    who = world.who()
    world.effect(Began(who))
    name = take_hold(storage, step, str(step), 60.0)
    if name:
        world.effect(Holds(who, step, name))
        read_step(world, storage, step)
        drop_hold(storage, name)
