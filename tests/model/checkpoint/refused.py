"""Saves that are refused, for what is saved or for where: each leaves everything as it was."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint import CheckpointError, CheckpointManager, Files, register_leaf_type

from .contents import items_of
from .operations import alike, attempted, commit_of, save_forced
from .site import Raised, Site
from .world import Place, World

HOWS = ("two fields of one name", "a folder that became a link", "a folder that is gone")


class Twofold:
    """A leaf whose fields have one name, once as a number and once as a string."""


register_leaf_type(Twofold, lambda value: {1: 2, "1": 3}, lambda fields: Twofold())  # type: ignore[dict-item]


def _link_outside(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to(Path(__file__).parent)


def _state(how: str) -> Any:
    match how:
        case "two fields of one name":
            return {"leaf": Twofold()}
        case "a folder that became a link":
            return Files(_link_outside, per_process=True)
    return Files(shutil.rmtree, per_process=True)


@dataclass(frozen=True)
class SaveRefused:
    """Saves what its leaf type or its handler has made unfit, one of HOWS."""

    step: int
    how: str

    def run(self, site: Site) -> list[Any]:
        site.settle()

        def save(rank: int, manager: CheckpointManager) -> bool:
            handle = manager.save(
                self.step, items={"state": _state(self.how)}, force=True, overwrite=True
            )
            handle.wait()
            return bool(handle)

        return site.each(save)

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        expected = {"UnsupportedLeaf", "ValueError", "SaveFailed"}
        if alike(found) not in expected:
            return
        now_s = site.clock.true_s
        # In a group the others have begun this save, and its policy knows it.
        for ended in world.ended():
            for place in ended.places(self.step, is_local=False, overwrite=True):
                assert isinstance(place, Place)
                yield ended
                for known in (ended, ended.begins(self.step, place)):
                    yield known.started(self.step, now_s)


BEYOND = 1000  # a step that no other operation saves


@dataclass(frozen=True)
class SaveThroughLink:
    """Saves a step on the hosts, of which one has a link in place of its folder, and then content
    `number` as a durable step.

    The first save is refused, and what the link leads to stays as it is. A strict local tier tells
    so by the second save, which is made all the same.
    """

    step: int
    number: int

    def run(self, site: Site) -> list[Any]:
        site.settle()
        runs = [path for path in site.folder.glob("host0/*") if path.is_dir()]
        # With another policy the first save may be a durable one.
        if not runs or site.settings.save_policy != "never":
            return [None]
        outside = site.folder / "moved-host"
        shutil.move(runs[0], outside)
        runs[0].symlink_to(outside)
        before = _contents(outside)
        told = site.each(lambda rank, manager: self._save(rank, manager, site))
        after = _contents(outside)
        runs[0].unlink()
        shutil.move(outside, runs[0])
        return [alike(told), before == after]

    def _save(self, rank: int, manager: CheckpointManager, site: Site) -> tuple[bool, bool]:
        """Returns whether the first save was begun, and whether the second told of it."""
        items = items_of(site.settings, self.number, rank)
        lanes = manager._parts.lanes
        is_begun = bool(manager.save(BEYOND, items=items))
        for lane in lanes:
            lane.join()
        told = attempted(lambda: save_forced(self, site, items, manager))
        for lane in lanes:
            lane.join()
        with contextlib.suppress(CheckpointError):
            manager.wait_until_finished()
        return is_begun, isinstance(told, Raised)

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        if found == [None]:
            yield from world.ended()
            return
        (is_begun, tells), is_same = found
        # The processes of a group may agree on a later step for the first.
        is_due = is_begun or site.settings.processes > 1
        if is_due and is_same and tells == (is_begun and site.settings.local_strict):
            for before in world.ended():
                # The first may have begun a branch, or none.
                yield from commit_of(self, replace(before, sure=frozenset()), site)


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
