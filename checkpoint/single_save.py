"""A save of one checkpoint without a manager: its root, what is staged, and its run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

from holdfast.multihost import Group
from holdfast.multihost.group.group import given_or_default

from .agreement.save_protocol import SaveKey, SaveResult
from .errors import StepExists, failure_of, naming_path
from .format.limits import check_item_name, check_step, is_step
from .format.step_folders import other_step
from .layouts.detect import layout_of
from .options import Options
from .saving.async_saver import AsyncSaver, SaveHandle
from .saving.commit import run_protocol
from .saving.save import SnapshotWork
from .saving.stager import OneSave, SaveOrder, SaveStager
from .steps.object_claims import open_claims
from .steps.opening import OpenRoot, give_up_claim, open_root
from .steps.refusals import refuse_without_joining
from .storage.base import Storage
from .storage.path import StorePath, open_storage, split


@dataclass(frozen=True)
class SingleSave:
    """Saves one checkpoint into a folder that is claimed for it, and gives the claim up."""

    root: OpenRoot

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        group: Group | None,
        order: SaveOrder,
        options: Options,
    ) -> Self:
        """Opens and claims a folder for an order. Every process of the group calls it.

        Without a group it is the default one, and what `refuse_without_joining` raises.
        """
        members = given_or_default(group)
        if members.count == 1:
            # In a group `stage` finds what is wrong, so that all processes learn of it.
            _check_names(order, path)
        storage = open_storage(path)
        claims = open_claims(storage)
        opened = open_root(storage, claims, members, options)
        root = OpenRoot.of(opened, storage, claims, group=members, options=options)
        single = cls(root)
        if group is None:
            try:
                refuse_without_joining(root)
            except BaseException:
                single._give_up()
                raise
        return single

    @property
    def storage(self) -> Storage:
        """Where the checkpoint goes."""
        return self.root.storage

    @property
    def options(self) -> Options:
        """The options of the save."""
        return self.root.options

    def stage(self, order: SaveOrder) -> OneSave:
        """Returns the save with its tree; in a group an error is in it, so that all learn of it.

        Where it raises, the claim is given up.
        """
        root = self.root
        step = check_step(order.step) if is_step(order.step) else 0
        save = OneSave(root=root, key=SaveKey(root.writer.id, 0, step), overwrite=order.overwrite)
        try:
            check_named_step(order.step, root.where)
            if root.group.index == 0 and not order.overwrite:
                _refuse_existing(root.storage)
            SaveStager(root).stage(save, order)
        except BaseException as error:
            if isinstance(error, Exception) and root.group.count > 1:
                save.fail(error)
                return save
            self._give_up()
            raise
        return save

    def run(self, save: OneSave) -> SaveResult:
        """Does the save and gives the claim up. Blocks; a failure is in the result."""
        result: SaveResult | None = None
        try:
            result = run_protocol(save, SnapshotWork(save))
            return result
        finally:
            save.release()
            self._give_up(is_unclear=result is None or result.is_unclear)

    def _give_up(self, *, is_unclear: bool = False) -> None:
        give_up_claim(self.root, is_unclear=is_unclear)


class BackgroundSave(SingleSave):
    """A save that goes on when its call has returned: on a thread, with a handle."""

    def begin(self, save: OneSave) -> SaveHandle:
        """Begins the save; returns when the caller may donate or overwrite its arrays."""
        saver = AsyncSaver(self)
        try:
            return saver.begin(save)
        finally:
            saver.leave()  # nobody may ask for the error

    def run(self, save: OneSave) -> SaveResult:
        """Does the save; a failure is in the result."""
        try:
            return super().run(save)
        except Exception as error:
            failure = failure_of(error, save.step, self.root.group.index)
            return SaveResult(save.key, failure)


def _check_names(order: SaveOrder, path: str | os.PathLike[str]) -> None:
    check_named_step(order.step, path)
    for name in order.chosen_items():
        check_item_name(name)


def check_named_step(step: int, path: str | os.PathLike[str]) -> int:
    """Returns the step.

    Raises ValueError also where the folder is called as another step: no reader would take it.
    """
    step = check_step(step)
    named = other_step(step, open_storage(path), "")
    if named is not None:
        name = split(path)[1]
        raise ValueError(
            f"save: the folder {name} is called as step {named} is, and step={step}; call it"
            " otherwise, or leave `step` out"
        )
    return step


def _refuse_existing(storage: Storage) -> None:
    with naming_path(storage.root):
        layout = layout_of(StorePath(storage))
    if layout is not None and layout.keeps_roots:
        message = f"{storage.root} holds a checkpoint already; save to another folder"
        if layout.name == "holdfast":
            message += ", or pass overwrite=True"
        raise StepExists(message, path=storage.root)
