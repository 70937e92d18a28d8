"""A save of one checkpoint without a manager, in holdfast's layout or Orbax's."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from holdfast.multihost import Group
from holdfast.multihost.group.group import given_or_default

from .agreement.exchange import Answer, ask_primary, raise_of_any
from .agreement.messages import SentError
from .agreement.save_protocol import SaveKey, SaveResult
from .errors import SaveFailed, StepExists, naming_path
from .format.json_state import Json, is_tree
from .format.leaf_types import encode_leaf_types
from .format.limits import check_item_name, check_step, copy_json, is_step
from .format.step_folders import other_step
from .format.tree import FlatTree
from .layouts.detect import layout_of, open_checkpoint
from .options import Options
from .saving.async_saver import AsyncSaver, SaveHandle
from .saving.cast import cast_tree
from .saving.commit import broken_off, run_protocol
from .saving.save import SnapshotWork
from .saving.stager import OneSave, SaveOrder, SaveStager
from .steps.object_claims import open_claims
from .steps.opening import OpenRoot, give_up_claim, open_root
from .steps.refusals import refuse_root_of_steps, refuse_without_joining
from .storage.base import Storage
from .storage.path import StorePath, beside, open_storage, split
from .tools.conversion import Conversion, trees_of
from .tools.convert import write_orbax

if TYPE_CHECKING:  # imports tensorstore
    from .layouts.orbax.write import OrbaxWriter

BEAT_S = 5.0  # how often the primary says that it still converts


@dataclass(frozen=True)
class SingleSave:
    """Saves one checkpoint into a folder that is claimed for it, and gives the claim up."""

    root: OpenRoot
    staged: OneSave

    @classmethod
    def stage(
        cls,
        path: str | os.PathLike[str],
        group: Group | None,
        order: SaveOrder,
        options: Options,
    ) -> Self:
        """Opens and claims a folder for an order, and stages its save. Every process of the group
        calls it.

        Without a group it is the default one, and what `refuse_without_joining` raises. In a group
        an error of staging is in the save, so that all learn of it. Where it raises, the claim is
        given up.
        """
        members = given_or_default(group)
        if members.count == 1:
            # In a group it is found as the save is staged, so that all processes learn of it.
            _check_step(order.step, path)
            for name in order.chosen_items():
                check_item_name(name)
        storage = open_storage(path, single_writer=options.single_writer)
        claims = open_claims(storage, single_writer=options.single_writer)
        root = open_root(storage, claims, members, options)
        step = order.step if is_step(order.step) else 0
        save = OneSave(root=root, key=SaveKey(root.writer.id, 0, step), overwrite=order.overwrite)
        try:
            if group is None:
                refuse_without_joining(root)
            _check_step(order.step, root.where)
            if members.index == 0:
                refuse_root_of_steps(storage, root.listing.steps)
                if not order.overwrite:
                    _refuse_existing(storage)
            SaveStager(root).stage(save, order)
        except BaseException as error:
            if not isinstance(error, Exception) or members.count == 1:
                give_up_claim(root, is_unclear=False)
                raise
            save.fail(error)
        return cls(root, save)

    def save(self) -> None:
        """Does the save. Blocks; raises its error."""
        result = self.run(self.staged)
        if result.error is not None:
            raise result.error

    def begin(self) -> SaveHandle:
        """Begins the save, which goes on when its call has returned; returns when the caller may
        donate or overwrite its arrays.
        """
        saver = AsyncSaver(self)
        try:
            return saver.begin(self.staged)
        finally:
            saver.leave()  # nobody may ask for the error

    def run(self, save: OneSave) -> SaveResult:
        """Does the save and gives the claim up. Blocks; a failure is in the result."""
        result: SaveResult | None = None
        try:
            result = run_protocol(save, SnapshotWork(save))
            return result
        except Exception as error:
            return broken_off(save, error)
        finally:
            save.release()
            give_up_claim(self.root, is_unclear=result is None or result.is_unclear)


def _check_step(step: int, path: str | os.PathLike[str]) -> None:
    """Raises ValueError for what is no step, and where the folder is called as another one: no
    reader would take it.
    """
    step = check_step(step)
    named = other_step(step, open_storage(path), "")
    if named is not None:
        raise ValueError(
            f"save: the folder {split(path)[1]} is called as step {named} is, and step={step}; call"
            " it otherwise, or leave `step` out"
        )


def _refuse_existing(storage: Storage) -> None:
    with naming_path(storage.root):
        layout = layout_of(StorePath(storage))
    if layout is not None and layout.keeps_roots:
        message = f"{storage.root} holds a checkpoint already; save to another folder"
        if layout.name == "holdfast":
            message += ", or pass overwrite=True"
        raise StepExists(message, path=storage.root)


# --- in Orbax's layout


def save_as_orbax(path: str, order: SaveOrder, group: Group | None, timeout_s: float) -> None:
    """Saves trees and Json in Orbax's layout; every process of the group calls it. Blocks.

    Several processes save in holdfast's layout first, beside the place where the checkpoint is
    made. Then the primary converts that, so that there is one protocol of commits.
    Each process's share is written within `timeout_s`. The others then wait for the primary as long
    as it goes on converting. What goes wrong is raised on all.
    """
    members = given_or_default(group)
    if members.count > 1:
        _save_together(path, order, members, timeout_s)
        return
    from .layouts.orbax.write import save_orbax  # imports tensorstore

    save_orbax(
        StorePath.of(path),
        _trees(order),
        json_items=_json_items(order),
        metadata=order.metadata,
        must_have_joined=group is None,
    )


def _trees(order: SaveOrder) -> dict[str, Any]:
    return {
        name: cast_tree(encode_leaf_types(FlatTree.of(value)), order.dtype).tree()
        for name, value in order.chosen_items().items()
        if is_tree(value)
    }


def _json_items(order: SaveOrder) -> dict[str, Any]:
    return {
        name: copy_json(value.value, f"the item {name!r}")
        for name, value in order.chosen_items().items()
        if isinstance(value, Json)
    }


def _save_together(path: str, order: SaveOrder, group: Group, timeout_s: float) -> None:
    from .layouts.orbax.write import OrbaxWriter

    folder = StorePath.of(path)
    name = f"orbax/{hashlib.sha256(os.fsencode(str(folder))).hexdigest()[:16]}"
    raise_of_any(group, f"{name}/fits", _misfit(order), timeout_s)
    made: list[OrbaxWriter] = []

    def begin() -> str:
        made.append(OrbaxWriter(folder))
        return made[0].aside.name

    # The URL says of which server the store is: a name below its parent says nothing of that.
    aside = beside(path, ask_primary(group, f"{name}/aside", begin, timeout_s))
    try:
        # The name is this save's own: nobody else writes there.
        options = Options(save_timeout_s=timeout_s, single_writer=True)
        SingleSave.stage(aside, group, order, options).save()
        if made:
            _convert(aside, made[0], group, f"{name}/end", timeout_s)
        else:
            _hear_end(group, f"{name}/end", timeout_s)
    except BaseException:
        for writer in made:
            writer.abandon()
        raise


def _misfit(order: SaveOrder) -> Exception | None:
    """Returns why Orbax's layout cannot hold what this process saves."""
    from .layouts.orbax.encode import custom_metadata
    from .layouts.orbax.write import check_tree

    try:
        custom_metadata(order.metadata)
        for item, tree in _trees(order).items():
            check_tree(item, tree)
        _json_items(order)
    except Exception as error:
        return error
    return None


def _convert(aside: str, writer: OrbaxWriter, group: Group, name: str, timeout_s: float) -> None:
    """Converts what all have saved, and tells the others that it goes on, and how it ended."""
    told_s = time.monotonic()
    beat_s = min(BEAT_S, timeout_s / 4)

    def tell(answer: Answer) -> None:
        group.broadcast(name, answer.to_bytes(), timeout_s=timeout_s)

    def progress(nbytes: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > beat_s:
            told_s = time.monotonic()
            tell(Answer(value=False))

    try:
        checkpoint = open_checkpoint(aside)
        items = checkpoint.info.items
        whole = Conversion(
            checkpoint,
            trees_of(checkpoint, items),
            items,
            process=None,
            progress=progress,
            beside=None,
        )
        with writer.failures():
            write_orbax(whole, writer)
    except BaseException as error:
        failure = error if isinstance(error, Exception) else SaveFailed("it was interrupted")
        tell(Answer(error=SentError.of(failure)))
        raise
    tell(Answer(value=True))


def _hear_end(group: Group, name: str, timeout_s: float) -> None:
    """Waits until the primary has converted, without a bound while it says that it goes on."""
    while True:
        answer = Answer.from_bytes(group.broadcast(name, None, timeout_s=timeout_s))
        if answer.error is not None:
            raise answer.error.rebuilt(unknown=SaveFailed, process=0)
        if answer.value:
            return
